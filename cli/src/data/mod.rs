//! Labelled images of ten classes, and the batches drawn from them.

mod batches;
pub mod idx;
pub mod synthetic;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

pub use batches::{Batches, draw_batch};

/// Height and width of an image.
pub const SIDE: usize = 28;
/// Pixels of an image.
pub const PIXELS: usize = SIDE * SIDE;
/// Number of classes.
pub const CLASSES: usize = 10;

/// Grey images, one byte a pixel, with their classes.
#[derive(Clone, Debug)]
pub struct Images {
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

impl Images {
    /// `pixels` holds one image of [`PIXELS`] bytes for each label.
    pub fn new(pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        assert_eq!(pixels.len(), labels.len() * PIXELS, "one image a label");
        Images { pixels, labels }
    }

    /// How many images there are.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// The classes, one an image.
    #[cfg(test)]
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The bytes of one image.
    pub fn image(&self, index: usize) -> &[u8] {
        &self.pixels[index * PIXELS..][..PIXELS]
    }

    /// Keeps the first `count` images.
    pub fn truncate(&mut self, count: usize) {
        self.labels.truncate(count);
        self.pixels.truncate(count.saturating_mul(PIXELS));
    }

    /// Mean and standard deviation over all pixels, in bytes. Integer sums, hence exact.
    fn moments(&self) -> (f64, f64) {
        let (sum, squares) = self
            .pixels
            .par_chunks(1 << 16)
            .map(|chunk| {
                chunk
                    .iter()
                    .fold((0u64, 0u64), |(s, q), &p| (s + u64::from(p), q + u64::from(p) * u64::from(p)))
            })
            .reduce(|| (0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let count = self.pixels.len().max(1) as f64;
        let mean = sum as f64 / count;
        (mean, (squares as f64 / count - mean * mean).max(0.0).sqrt())
    }
}

/// A training and a validation part, normalised by the mean and the deviation of the training part.
#[derive(Debug)]
pub struct Dataset {
    /// Where it comes from, for the report.
    pub source: String,
    /// The part that is trained on.
    pub train: Images,
    /// The part that the validation loss is taken on.
    pub validation: Images,
    /// Mean over all pixels of the training part, in bytes.
    pub pixel_mean: f64,
    /// Their standard deviation.
    pub pixel_deviation: f64,
    normalised: [f32; 256],
}

impl Dataset {
    /// Joins two parts.
    pub fn new(source: String, train: Images, validation: Images) -> Self {
        let (pixel_mean, pixel_deviation) = train.moments();
        // Constant images carry nothing to scale by; they become zero instead of NaN.
        let scale = if pixel_deviation > 0.0 { 1.0 / pixel_deviation } else { 0.0 };
        let normalised = std::array::from_fn(|byte| ((byte as f64 - pixel_mean) * scale) as f32);
        Dataset { source, train, validation, pixel_mean, pixel_deviation, normalised }
    }

    /// Keeps the first images of each part.
    pub fn truncate(mut self, train: usize, validation: usize) -> Self {
        self.train.truncate(train);
        self.validation.truncate(validation);
        Dataset::new(self.source, self.train, self.validation)
    }

    /// The images at `indices` as a [`Batch`] of the element type `dtype`.
    pub fn batch(&self, part: &Images, indices: &[u32], dtype: DType) -> candle_core::Result<Batch> {
        let mut pixels = Vec::with_capacity(indices.len() * PIXELS);
        let mut labels = Vec::with_capacity(indices.len());
        for &index in indices {
            pixels.extend(part.image(index as usize).iter().map(|&byte| self.normalised[usize::from(byte)]));
            labels.push(u32::from(part.labels[index as usize]));
        }
        let images = Tensor::from_vec(pixels, (indices.len(), PIXELS), &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Batch { images, labels: Tensor::from_vec(labels, indices.len(), &Device::Cpu)? })
    }
}

/// Normalised images (batch × [`PIXELS`]) and their classes.
#[derive(Debug)]
pub struct Batch {
    /// The images.
    pub images: Tensor,
    /// The classes, unsigned 32-bit.
    pub labels: Tensor,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_pixels_have_mean_zero_and_deviation_one() {
        let pixels: Vec<u8> = (0..4 * PIXELS).map(|i| (i * i % 251) as u8).collect();
        let data =
            Dataset::new("test".into(), Images::new(pixels, vec![0, 1, 2, 3]), Images::new(vec![], vec![]));
        let batch = data.batch(&data.train, &[0, 1, 2, 3], DType::F64).unwrap();
        let values = batch.images.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        // 256 table entries rounded to f32, relative 6e-8 each.
        assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-6, "{mean} {variance}");
        assert_eq!(batch.labels.to_vec1::<u32>().unwrap(), [0, 1, 2, 3]);
    }
}
