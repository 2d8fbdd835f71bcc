//! Images with labels: MNIST's files, or generated ones.

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use tch::{Device, Kind, Tensor};

const PIXELS: i64 = 784;

/// Images, one row of pixels each, and their classes.
pub struct Part {
    pub images: Tensor,
    pub labels: Tensor,
}

pub struct Data {
    pub train: Part,
    pub validation: Part,
}

impl Data {
    pub fn load(folder: &Path) -> Result<Self, Box<dyn Error>> {
        Ok(Self { train: Part::load(folder, "train")?, validation: Part::load(folder, "t10k")? })
    }

    /// Ten clouds of points in 16 dimensions, drawn as pixels: neighbouring numbers depend on each other, as
    /// in images.
    pub fn generate() -> Self {
        let randn = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let (centres, drawing) = (randn([10, 16]), randn([16, PIXELS]));
        let part = |count: i64| {
            let labels = Tensor::randint(10, [count], (Kind::Int64, Device::Cpu));
            let points = centres.index_select(0, &labels) + randn([count, 16]);
            Part { images: points.matmul(&drawing) + randn([count, PIXELS]), labels }
        };
        Self { train: part(20_000), validation: part(5_000) }
    }

    /// Keeps the first training images, and scales all by their mean and deviation.
    pub fn prepare(self, train_images: Option<i64>, device: Device) -> Self {
        let count = train_images.unwrap_or(i64::MAX).min(self.train.len());
        let (train, labels) = (self.train.images.narrow(0, 0, count), self.train.labels.narrow(0, 0, count));
        let (mean, deviation) = (train.mean(Kind::Float), train.std(false));
        let scale = |images: &Tensor| ((images - &mean) / &deviation).to_device(device);
        Self {
            train: Part { images: scale(&train), labels: labels.to_device(device) },
            validation: Part {
                images: scale(&self.validation.images),
                labels: self.validation.labels.to_device(device),
            },
        }
    }
}

impl Part {
    pub fn len(&self) -> i64 {
        self.labels.size()[0]
    }

    /// So many at random, none twice.
    pub fn draw(&self, size: i64) -> (Tensor, Tensor) {
        self.at(&self.shuffled().narrow(0, 0, size.min(self.len())))
    }

    /// All in random order, in batches.
    pub fn batches(&self, size: i64) -> impl ExactSizeIterator<Item = (Tensor, Tensor)> {
        let order = self.shuffled();
        (0..(self.len() / size) as i32).map(move |k| self.at(&order.narrow(0, i64::from(k) * size, size)))
    }

    fn shuffled(&self) -> Tensor {
        Tensor::randperm(self.len(), (Kind::Int64, self.labels.device()))
    }

    fn at(&self, indices: &Tensor) -> (Tensor, Tensor) {
        (self.images.index_select(0, indices), self.labels.index_select(0, indices))
    }

    fn load(folder: &Path, part: &str) -> Result<Self, Box<dyn Error>> {
        let pixels = read_idx(folder, &format!("{part}-images-idx3-ubyte"), 3)?;
        let labels = read_idx(folder, &format!("{part}-labels-idx1-ubyte"), 1)?;
        if pixels.len() != labels.len() * PIXELS as usize {
            return Err(
                format!("{part} files in {}: not one image of 28 by 28 a label", folder.display()).into()
            );
        }
        Ok(Self {
            images: Tensor::from_slice(&pixels).view([-1, PIXELS]).to_kind(Kind::Float),
            labels: Tensor::from_slice(&labels).to_kind(Kind::Int64),
        })
    }
}

/// The bytes of an IDX file with so many axes, gzipped or not.
fn read_idx(folder: &Path, name: &str, axes: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut bytes = Vec::new();
    let (plain, zipped) = (folder.join(name), folder.join(format!("{name}.gz")));
    if plain.exists() {
        File::open(&plain)?.read_to_end(&mut bytes)?;
    } else {
        let file = File::open(&zipped).map_err(|error| format!("{}: {error}", zipped.display()))?;
        GzDecoder::new(file).read_to_end(&mut bytes)?;
    }
    // Two zeros, 8 for bytes, the number of axes; then the length of each.
    if bytes.get(..4) != Some(&[0, 0, 8, axes as u8]) || bytes.len() < 4 + 4 * axes {
        return Err(
            format!("{name} in {}: not an IDX file of bytes with {axes} axes", folder.display()).into()
        );
    }
    let length = |k: usize| bytes[4 + 4 * k..][..4].iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    if (0..axes).map(length).product::<usize>() != bytes.len() - 4 - 4 * axes {
        return Err(format!("{name} in {}: cut off", folder.display()).into());
    }
    Ok(bytes.split_off(4 + 4 * axes))
}
