//! Damaged files of every kind that the library reads: whatever the bytes, an error or a value that works,
//! never a panic, and no more memory than a small multiple of the file. `fuzz/` does the same for as long as
//! one likes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rfdescent::covariance::{Family, Model, Observation, StepRule, TensorFactor};
use rfdescent::estimation::{Sample, SampleStatistics, SampleTable, TensorDims, fit, fit_tensors};
use rfdescent::optimizer::{Adaptive, Fitted, Method, Optimizer, Options, StepInput, TensorSpec};
use rfdescent::{DType, GradRef, Moments, ParamMut};

/// Counts what is allocated.
struct Counting;

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static ALONE: Mutex<()> = Mutex::new(());

fn grow(size: usize) {
    let now = CURRENT.fetch_add(size, Ordering::Relaxed) + size;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller vouches for the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller vouches for both.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Rounds of each test; more for a longer run.
fn rounds() -> u64 {
    std::env::var("RFDESCENT_MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(4000)
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// What is likely to upset a parser of numbers, JSON, CSV or lengths.
const TOKENS: [&[u8]; 24] = [
    b"0",
    b"-1",
    b"1e999",
    b"1e-999",
    b"NaN",
    b"inf",
    b"-inf",
    b"18446744073709551615",
    b"18446744073709551616",
    b"9223372036854775807",
    b"null",
    b"[",
    b"{",
    b"\"",
    b",",
    b"\n",
    b"\0",
    b"\xff\xfe",
    b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"1e60",
    b"1e120",
    b"5e-324",
];

/// One to four changes: bits, bytes, cuts, repeats, tokens in place of something or between.
fn mutate(valid: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => {
                let end = (at + random.below(64)).min(bytes.len());
                bytes.drain(at..end);
            }
            4 => {
                let end = (at + random.below(64)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            kind => {
                let token = TOKENS[random.below(TOKENS.len())];
                // In place of a whole number or word, or between.
                let word =
                    bytes[at..].iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'.').count();
                let end = if kind == 5 { at + word } else { at };
                bytes.splice(at..end, token.iter().copied());
            }
        }
    }
    bytes
}

/// Runs `read` on many mutations. At least one must be refused and one accepted, or the test tests nothing.
fn attack(valid: &[u8], mut read: impl FnMut(&[u8]) -> bool) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(read(valid), "the valid file is refused");
    let mut random = Random(1);
    let mut accepted = 0;
    for round in 0..rounds() {
        let bytes = mutate(valid, &mut random);
        let before = CURRENT.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        accepted += u64::from(read(&bytes));
        let used = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        // Parsed JSON takes some 100 bytes for each of its own where it is densest; other tests' threads and
        // messages are within the constant.
        let bound = 256 * bytes.len() + (1 << 20);
        assert!(used < bound, "round {round}: {used} bytes allocated for a file of {}", bytes.len());
    }
    assert!(accepted > 0 && accepted < rounds(), "{accepted} of {} accepted", rounds());
}

fn moments() -> Moments {
    Moments {
        mean: 2.5,
        variance: 0.01,
        noise_variance: 0.9,
        grad_variance: 5.0,
        noise_grad_variance: 300.0,
        dims: 20_000,
    }
}

#[test]
fn damaged_models() {
    let factor =
        |name: &str, dims, length_scale_factor| TensorFactor { name: name.into(), dims, length_scale_factor };
    let tensors = vec![factor("weight", moments().dims - 10, 0.5), factor("bias", 10, 5.0)];
    let model = Model::new(Family::RationalQuadratic { beta: 1.5 }, moments()).unwrap();
    let model = model.with_tensors(tensors).unwrap();
    attack(model.to_json().unwrap().as_bytes(), |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return false };
        let Ok(model) = Model::from_json(text) else { return false };
        let observation = Observation { loss: 1.0, grad_norm: 3.0, inv_batch_size: 0.1 };
        let step = model.step(&observation, &StepRule::default()).unwrap();
        assert!(step.step_size >= 0.0 && step.step_size.is_finite(), "{model:?}");
        Model::from_json(&model.to_json().unwrap()).unwrap();
        true
    });
}

fn samples() -> Vec<Sample> {
    (0..60)
        .map(|i| Sample {
            loss: 2.0 + f64::from(i * 37 % 11) / 7.0,
            sq_grad_norm: 5.0 + f64::from(i % 5),
            batch_size: [20, 100, 1000][i as usize % 3],
        })
        .collect()
}

/// A fit or an error, for all and by tensor.
fn fit_all(statistics: &SampleStatistics) {
    let _ = fit(statistics);
    let tensors: Vec<TensorDims> =
        statistics.tensors().map(|name| TensorDims { name: name.into(), dims: 10 }).collect();
    if let Ok(fits) = fit_tensors(statistics, &tensors) {
        assert!(fits.tensors.iter().all(|tensor| tensor.length_scale_factor > 0.0), "{fits:?}");
    }
}

#[test]
fn damaged_statistics() {
    let mut statistics = SampleStatistics::new();
    for sample in samples() {
        statistics.push_tensors(&sample, [("a", sample.sq_grad_norm), ("b", 0.0)]).unwrap();
    }
    attack(statistics.to_json().as_bytes(), |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return false };
        let Ok(mut statistics) = SampleStatistics::from_json(text) else { return false };
        // And one that goes on.
        fit_all(&statistics);
        let copy = statistics.clone();
        statistics.merge(&copy);
        let names: Vec<String> = statistics.tensors().map(String::from).collect();
        statistics.push_tensors(&samples()[0], names.iter().map(|name| (name.as_str(), 1.0))).unwrap();
        true
    });
}

#[test]
fn damaged_samples() {
    let mut csv = String::from("loss,grad_norm,batchsize,time,sq_grad_norm:a,\"sq_grad_norm:b, c\"\n");
    for sample in samples() {
        let Sample { loss, sq_grad_norm, batch_size } = sample;
        csv += &format!("{loss},{},{batch_size},1.5,{sq_grad_norm},0.0\n", sq_grad_norm.sqrt());
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("samples.csv");
    attack(csv.as_bytes(), |bytes| {
        std::fs::write(&file, bytes).unwrap();
        let Ok(table) = SampleTable::read(&file) else { return false };
        fit_all(&table.statistics().unwrap());
        true
    });
}

#[test]
fn damaged_states() {
    let model = Model::new(Family::SquaredExponential, moments()).unwrap();
    attack_states(Fitted::new(model).with_momentum(0.9).into());
    attack_states(Adaptive::default().into());
}

fn attack_states(method: Method) {
    let options = Options { master_weights: true, ..Options::default() };
    let specs = vec![
        TensorSpec::new("a", &[5, 3], DType::F32),
        TensorSpec::new("b", &[4], DType::BF16),
        TensorSpec::new("c", &[2], DType::F64),
    ];
    let (mut a, mut b, mut c) = ([1.0_f32; 15], [half::bf16::ONE; 4], [1.0_f64; 2]);
    let mut step = |optimizer: &mut Optimizer| {
        let gradients = ([1.0_f32; 15], [1.0_f32; 4], [1.0_f32; 2]);
        let params =
            &mut [ParamMut::from(&mut a[..]), ParamMut::from(&mut b[..]), ParamMut::from(&mut c[..])];
        let grads = &[
            GradRef::from(&gradients.0[..]),
            GradRef::from(&gradients.1[..]),
            GradRef::from(&gradients.2[..]),
        ];
        optimizer.step(params, grads, &StepInput::new(2.0)).unwrap();
    };
    let mut first = Optimizer::new(method.clone(), options.clone(), specs.clone()).unwrap();
    step(&mut first);
    let mut second = Optimizer::new(method, options, specs).unwrap();
    attack(&first.state_to_bytes().unwrap(), |bytes| {
        let before = second.applied_steps();
        let accepted = second.load_state_from_bytes(bytes).is_ok();
        if !accepted {
            assert_eq!(second.applied_steps(), before, "a refused state left something");
        } else {
            step(&mut second);
        }
        accepted
    });
}
