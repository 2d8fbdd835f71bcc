//! Patches and pooling of images laid out as batch × rows × columns × channels.
//!
//! A convolution is then a linear layer over patches, one matrix product for the whole batch, and batch
//! normalisation sees features in the last dimension as after any linear layer. candle's own operations do
//! not serve for training here: the gradient of its `max_pool2d` (0.11.1) is multiplied by the share of
//! maxima in each window instead of being divided by their number, and that of `conv2d` takes seconds a
//! batch.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, WithDType};
use rayon::prelude::*;

use super::batch_norm::{slice, values};

/// All `size`×`size` patches of a batch of images, one a row: (batch·rows·columns) × (size·size·channels).
pub fn patches(images: &Tensor, size: usize) -> Result<Tensor> {
    let (_, rows, columns, channels) = images.dims4()?;
    images.contiguous()?.apply_op1(OnImages(Patches { rows, columns, channels, size }))
}

/// The maximum of each 2×2 window, channel by channel.
pub fn max_pool(images: &Tensor) -> Result<Tensor> {
    let (_, rows, columns, channels) = images.dims4()?;
    images.contiguous()?.apply_op1(OnImages(MaxPool { rows, columns, channels }))
}

/// An operation on batches of images of a known size, in f32 or f64.
trait Operation: Send + Sync {
    const NAME: &'static str;

    /// The elements of an image.
    fn image(&self) -> usize;

    /// The result's shape for so many images.
    fn shape(&self, batch: usize) -> Result<Shape>;

    fn forward<T: WithDType>(&self, images: &[T]) -> Vec<T>;

    /// The gradient with respect to the images, from that with respect to the result.
    fn backward<T: WithDType>(&self, images: &Tensor, gradient: &[T]) -> Result<Vec<T>>;
}

/// The operation as candle takes it.
struct OnImages<O>(O);

impl<O: Operation> CustomOp1 for OnImages<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, images: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = self.0.shape(layout.shape().elem_count() / self.0.image())?;
        let storage = match images {
            CpuStorage::F64(_) => CpuStorage::F64(self.0.forward(slice(images, layout)?)),
            _ => CpuStorage::F32(self.0.forward(slice(images, layout)?)),
        };
        Ok((storage, shape))
    }

    fn bwd(&self, images: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = match images.dtype() {
            DType::F64 => {
                let gradient = self.0.backward::<f64>(images, &values(gradient)?)?;
                Tensor::from_vec(gradient, images.shape(), &Device::Cpu)
            }
            _ => {
                let gradient = self.0.backward::<f32>(images, &values(gradient)?)?;
                Tensor::from_vec(gradient, images.shape(), &Device::Cpu)
            }
        };
        gradient.map(Some)
    }
}

struct Patches {
    rows: usize,
    columns: usize,
    channels: usize,
    size: usize,
}

impl Patches {
    fn positions(&self) -> (usize, usize) {
        (self.rows - self.size + 1, self.columns - self.size + 1)
    }

    /// Numbers of all patches of one image.
    fn output(&self) -> usize {
        let (down, right) = self.positions();
        down * right * self.size * self.size * self.channels
    }

    /// Calls `pair(image offset, patch offset)` for each run of a patch's row; a run is contiguous in both.
    fn runs(&self, mut pair: impl FnMut(usize, usize)) {
        let (down, right) = self.positions();
        let run = self.size * self.channels;
        let mut target = 0;
        for row in 0..down {
            for column in 0..right {
                for line in 0..self.size {
                    pair(((row + line) * self.columns + column) * self.channels, target);
                    target += run;
                }
            }
        }
    }
}

impl Operation for Patches {
    const NAME: &'static str = "patches";

    fn image(&self) -> usize {
        self.rows * self.columns * self.channels
    }

    fn shape(&self, batch: usize) -> Result<Shape> {
        let (down, right) = self.positions();
        Ok(Shape::from((batch * down * right, self.size * self.size * self.channels)))
    }

    fn forward<T: WithDType>(&self, images: &[T]) -> Vec<T> {
        let run = self.size * self.channels;
        let mut out = vec![T::zero(); images.len() / self.image() * self.output()];
        out.par_chunks_mut(self.output()).zip(images.par_chunks(self.image())).for_each(|(out, image)| {
            self.runs(|from, to| out[to..to + run].copy_from_slice(&image[from..from + run]));
        });
        out
    }

    fn backward<T: WithDType>(&self, _images: &Tensor, gradient: &[T]) -> Result<Vec<T>> {
        let run = self.size * self.channels;
        let mut out = vec![T::zero(); gradient.len() / self.output() * self.image()];
        out.par_chunks_mut(self.image()).zip(gradient.par_chunks(self.output())).for_each(
            |(image, gradient)| {
                self.runs(|to, from| {
                    image[to..to + run]
                        .iter_mut()
                        .zip(&gradient[from..from + run])
                        .for_each(|(sum, &g)| *sum += g);
                });
            },
        );
        Ok(out)
    }
}

struct MaxPool {
    rows: usize,
    columns: usize,
    channels: usize,
}

impl MaxPool {
    /// The first of the largest of a window; a NaN in the window's first place stays.
    fn largest<T: WithDType>(&self, image: &[T], output: usize) -> usize {
        let (channel, window) = (output % self.channels, output / self.channels);
        let (row, column) = (window / (self.columns / 2), window % (self.columns / 2));
        let corner = (2 * row * self.columns + 2 * column) * self.channels + channel;
        let below = corner + self.columns * self.channels;
        let candidates = [corner + self.channels, below, below + self.channels];
        candidates.into_iter().fold(corner, |best, at| if image[at] > image[best] { at } else { best })
    }
}

impl Operation for MaxPool {
    const NAME: &'static str = "max-pool";

    fn image(&self) -> usize {
        self.rows * self.columns * self.channels
    }

    fn shape(&self, batch: usize) -> Result<Shape> {
        if !(self.rows.is_multiple_of(2) && self.columns.is_multiple_of(2)) {
            candle_core::bail!("pooling {}×{} images by two leaves a remainder", self.rows, self.columns);
        }
        Ok(Shape::from((batch, self.rows / 2, self.columns / 2, self.channels)))
    }

    fn forward<T: WithDType>(&self, images: &[T]) -> Vec<T> {
        let mut out = vec![T::zero(); images.len() / 4];
        out.par_chunks_mut(self.image() / 4).zip(images.par_chunks(self.image())).for_each(|(out, image)| {
            out.iter_mut().enumerate().for_each(|(i, out)| *out = image[self.largest(image, i)]);
        });
        out
    }

    fn backward<T: WithDType>(&self, images: &Tensor, gradient: &[T]) -> Result<Vec<T>> {
        let images = values::<T>(images)?;
        let mut out = vec![T::zero(); images.len()];
        out.par_chunks_mut(self.image())
            .zip(images.par_chunks(self.image()).zip(gradient.par_chunks(self.image() / 4)))
            .for_each(|(out, (image, gradient))| {
                gradient.iter().enumerate().for_each(|(i, &g)| out[self.largest(image, i)] = g);
            });
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_layer_over_patches_is_a_convolution() {
        let (batch, channels, outputs, size) = (2, 3, 4, 3);
        let data: Vec<f64> = (0..batch * 6 * 5 * channels).map(|i| (i as f64 * 0.7).sin()).collect();
        let images = Tensor::from_vec(data, (batch, 6, 5, channels), &Device::Cpu).unwrap();
        let data: Vec<f64> = (0..outputs * size * size * channels).map(|i| (i as f64 * 1.3).cos()).collect();
        let weight = Tensor::from_vec(data, (outputs, size, size, channels), &Device::Cpu).unwrap();

        let flat = weight.flatten_from(1).unwrap();
        let ours = patches(&images, size).unwrap().matmul(&flat.t().unwrap()).unwrap();
        let ours = ours.reshape((batch, 4, 3, outputs)).unwrap();
        let channels_first = |t: &Tensor| t.permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
        let reference = channels_first(&images).conv2d(&channels_first(&weight), 0, 1, 1, 1).unwrap();
        let difference = (channels_first(&ours) - reference).unwrap().abs().unwrap().flatten_all().unwrap();
        // 27 products of order one in f64.
        assert!(difference.max(0).unwrap().to_scalar::<f64>().unwrap() < 1e-13);
    }

    #[test]
    fn pooling_takes_the_maximum_and_sends_the_whole_gradient_there() {
        // Two channels; the second is the negative of the first.
        let image: Vec<f64> =
            [1.0, 5.0, 2.0, 2.0, 3.0, 4.0, 2.0, 1.0].iter().flat_map(|&v| [v, -v]).collect();
        let image = Tensor::from_vec(image, (1, 2, 4, 2), &Device::Cpu).unwrap();
        let image = candle_core::Var::from_tensor(&image).unwrap();
        let pooled = max_pool(&image).unwrap();
        assert_eq!(values::<f64>(&pooled).unwrap(), [5.0, -1.0, 2.0, -1.0]);
        let factors = Tensor::new(&[10.0, 20.0, 30.0, 40.0], &Device::Cpu).unwrap();
        let sum = (pooled.flatten_all().unwrap() * factors).unwrap().sum_all().unwrap();
        let gradient = values::<f64>(sum.backward().unwrap().get(&image).unwrap()).unwrap();
        let channel = |c: usize| gradient.iter().skip(c).step_by(2).copied().collect::<Vec<_>>();
        assert_eq!(channel(0), [0.0, 10.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(channel(1), [20.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 40.0]);
    }
}
