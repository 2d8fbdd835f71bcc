//! What the adaptive method remembers, on the device: two slots, of which a step reads one and writes the other.

use crate::backend::abi::{RfdAdaptive, RfdHistory, RfdTensorHistory};
use crate::backend::executor::{Device, DeviceBuffer, Stream};
use crate::error::Result;
use crate::optimizer::adaptive::{self as numbers, History, TensorHistory, Trust};
use crate::optimizer::{Adaptive, Anisotropy};

const HEAD: usize = size_of::<RfdHistory>() / size_of::<f64>();
const PER_TENSOR: usize = size_of::<RfdTensorHistory>() / size_of::<f64>();

/// Memory for both slots.
#[derive(Debug)]
pub(super) struct HistoryMemory {
    memory: DeviceBuffer,
    tensors: usize,
}

impl HistoryMemory {
    /// That of an optimizer that has applied no step.
    pub fn new(device: &Device, tensors: usize) -> Result<Self> {
        let memory = device.allocate(2 * Self::slot_bytes(tensors))?;
        let mut history = Self { memory, tensors };
        history.write(0, &History::new(tensors), Stream::PER_THREAD)?;
        Ok(history)
    }

    /// The rule as the kernels evaluate it.
    pub fn rule(&self, adaptive: &Adaptive) -> RfdAdaptive {
        RfdAdaptive {
            history: self.memory.address(),
            averaging: adaptive.averaging,
            loss_bound: adaptive.loss_bound,
            decrease: numbers::DECREASE,
            noisy_decrease: numbers::NOISY_DECREASE,
            variance_decay: numbers::VARIANCE_DECAY,
            smallest_variance: numbers::SMALLEST_VARIANCE,
            largest_variance: numbers::LARGEST_VARIANCE,
            window: Trust::WINDOW,
            share: Trust::SHARE,
            after_less: Trust::AFTER_LESS,
            after_more: Trust::AFTER_MORE,
            smallest_trust: Trust::SMALLEST,
            ramp: numbers::RAMP as u32,
            tensorwise: (adaptive.anisotropy == Anisotropy::Tensorwise).into(),
        }
    }

    /// What is remembered after so many applied steps, after the work on the stream.
    pub fn read(&self, applied: u64, stream: Stream) -> Result<History> {
        let mut bytes = vec![0; Self::slot_bytes(self.tensors)];
        self.memory.download(self.offset(applied), &mut bytes, stream)?;
        let words: Vec<f64> = bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect();
        let (head, tensors) = words.split_at(HEAD);
        let head: &[f64; HEAD] = head.try_into().expect("split there");
        Ok(history(head, tensors.as_chunks().0))
    }

    /// Replaces it.
    pub fn write(&mut self, applied: u64, history: &History, stream: Stream) -> Result<()> {
        let tensors = history.tensors.iter().flat_map(tensor_words);
        let bytes: Vec<u8> =
            head_words(history).into_iter().chain(tensors).flat_map(f64::to_le_bytes).collect();
        self.memory.upload(self.offset(applied), &bytes, stream)
    }

    fn slot_bytes(tensors: usize) -> usize {
        size_of::<RfdHistory>() + tensors * size_of::<RfdTensorHistory>()
    }

    fn offset(&self, applied: u64) -> usize {
        if applied.is_multiple_of(2) { 0 } else { Self::slot_bytes(self.tensors) }
    }
}

/// In the order of [`RfdHistory`].
fn head_words(history: &History) -> [f64; HEAD] {
    let History { loss, loss_rest, trust, .. } = history;
    [
        *loss,
        *loss_rest,
        trust.factor,
        trust.last,
        trust.steps,
        trust.windows,
        trust.sum,
        trust.squares,
        trust.promised,
        trust.sum_before,
        trust.squares_before,
        trust.promised_before,
    ]
}

/// In the order of [`RfdTensorHistory`].
fn tensor_words(tensor: &TensorHistory) -> [f64; PER_TENSOR] {
    [tensor.squares, tensor.squares_rest, tensor.average_rest]
}

fn history(head: &[f64; HEAD], tensors: &[[f64; PER_TENSOR]]) -> History {
    let [
        loss,
        loss_rest,
        factor,
        last,
        steps,
        windows,
        sum,
        squares,
        promised,
        sum_before,
        squares_before,
        promised_before,
    ] = *head;
    let trust = Trust {
        factor,
        last,
        steps,
        windows,
        sum,
        squares,
        promised,
        sum_before,
        squares_before,
        promised_before,
    };
    let tensor = |&[squares, squares_rest, average_rest]: &[f64; PER_TENSOR]| TensorHistory {
        squares,
        squares_rest,
        average_rest,
    };
    History { loss, loss_rest, trust, tensors: tensors.iter().map(tensor).collect() }
}
