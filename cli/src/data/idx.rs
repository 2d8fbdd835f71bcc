//! MNIST and Fashion-MNIST: IDX files, plain or gzipped.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::{CLASSES, Dataset, Images, PIXELS, SIDE};
use crate::error::CliError;

const IMAGE_MAGIC: u32 = 0x0803;
const LABEL_MAGIC: u32 = 0x0801;

/// Reads the four files of a data folder.
pub fn load(folder: &Path) -> Result<Dataset, CliError> {
    if !folder.is_dir() {
        return Err(CliError::file(
            folder,
            "no such folder; --data takes the folder that holds the IDX files",
        ));
    }
    let train = load_part(folder, "train")?;
    let validation = load_part(folder, "t10k")?;
    Ok(Dataset::new(folder.display().to_string(), train, validation))
}

fn load_part(folder: &Path, part: &str) -> Result<Images, CliError> {
    let (images_path, images) = read_file(folder, &format!("{part}-images-idx3-ubyte"))?;
    let (labels_path, labels) = read_file(folder, &format!("{part}-labels-idx1-ubyte"))?;
    let (pixels, image_count) = parse_images(&images_path, images)?;
    let labels = parse_labels(&labels_path, labels)?;
    if labels.len() != image_count {
        return Err(CliError::file(
            &labels_path,
            format!(
                "{} labels for the {image_count} images of {}; both files must come from the same data set",
                labels.len(),
                images_path.display()
            ),
        ));
    }
    Ok(Images::new(pixels, labels))
}

/// Reads `name` or `name.gz`, unpacked.
fn read_file(folder: &Path, name: &str) -> Result<(PathBuf, Vec<u8>), CliError> {
    let plain = folder.join(name);
    if plain.exists() {
        let bytes = fs::read(&plain).map_err(|e| CliError::file(&plain, e))?;
        return Ok((plain, bytes));
    }
    let packed = folder.join(format!("{name}.gz"));
    if !packed.exists() {
        return Err(CliError::file(
            &plain,
            "no such file, with or without .gz; --data takes the folder that holds the four IDX files of MNIST or \
             Fashion-MNIST",
        ));
    }
    let file = fs::File::open(&packed).map_err(|e| CliError::file(&packed, e))?;
    let mut bytes = Vec::new();
    MultiGzDecoder::new(file).read_to_end(&mut bytes).map_err(|e| {
        let problem = match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                "the gzip data ends too early; download the file again".to_owned()
            }
            _ => format!(
                "not a valid gzip file ({e}); download it again, or remove .gz from its name if unpacked"
            ),
        };
        CliError::file(&packed, problem)
    })?;
    Ok((packed, bytes))
}

/// Checks magic, dimensions and length; returns the pixels and the number of images.
fn parse_images(path: &Path, mut bytes: Vec<u8>) -> Result<(Vec<u8>, usize), CliError> {
    let [count, rows, columns] = header(path, &bytes, IMAGE_MAGIC, "images")?;
    if (rows, columns) != (SIDE, SIDE) {
        return Err(CliError::file(
            path,
            format!("images of {rows}×{columns} pixels; only {SIDE}×{SIDE} are read"),
        ));
    }
    check_length(path, bytes.len() as u64 - 16, count as u64 * PIXELS as u64)?;
    bytes.drain(..16);
    Ok((bytes, count))
}

/// Checks magic, length and range; returns the labels.
fn parse_labels(path: &Path, mut bytes: Vec<u8>) -> Result<Vec<u8>, CliError> {
    let [count] = header(path, &bytes, LABEL_MAGIC, "labels")?;
    check_length(path, bytes.len() as u64 - 8, count as u64)?;
    bytes.drain(..8);
    match bytes.iter().position(|&label| usize::from(label) >= CLASSES) {
        Some(row) => Err(CliError::file(
            path,
            format!("label {row} (from 0) is {}; labels lie between 0 and {}", bytes[row], CLASSES - 1),
        )),
        None => Ok(bytes),
    }
}

/// The big-endian sizes behind the magic number.
fn header<const N: usize>(path: &Path, bytes: &[u8], magic: u32, what: &str) -> Result<[usize; N], CliError> {
    let word = |i: usize| {
        bytes.get(4 * i..4 * i + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]])).ok_or_else(|| {
            CliError::file(
                path,
                format!(
                    "truncated: {} bytes, the header alone has {}; get the file again",
                    bytes.len(),
                    4 + 4 * N
                ),
            )
        })
    };
    let found = word(0)?;
    if found != magic {
        return Err(CliError::file(
            path,
            format!(
                "magic number {found:#010x}, IDX {what} have {magic:#010x}; this is another kind of file"
            ),
        ));
    }
    let mut sizes = [0; N];
    for (i, size) in sizes.iter_mut().enumerate() {
        *size = word(i + 1)? as usize;
    }
    if sizes[0] == 0 {
        return Err(CliError::file(path, format!("holds no {what}")));
    }
    Ok(sizes)
}

fn check_length(path: &Path, found: u64, expected: u64) -> Result<(), CliError> {
    match found.cmp(&expected) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => Err(CliError::file(
            path,
            format!("truncated: {found} bytes of data, the header promises {expected}; get the file again"),
        )),
        std::cmp::Ordering::Greater => Err(CliError::file(
            path,
            format!("{} bytes more than the header promises; get the file again", found - expected),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn images(count: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [IMAGE_MAGIC, count, 28, 28] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend((0..count as usize * PIXELS).map(|i| (i % 256) as u8));
        bytes
    }

    fn labels(values: &[u8]) -> Vec<u8> {
        let mut bytes = LABEL_MAGIC.to_be_bytes().to_vec();
        bytes.extend((values.len() as u32).to_be_bytes());
        bytes.extend(values);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// A correct folder with one file replaced (or removed), and the error it causes.
    fn error_with(name: &str, content: Option<Vec<u8>>) -> String {
        let folder = tempfile::tempdir().unwrap();
        for (file, bytes) in [
            ("train-images-idx3-ubyte", images(3)),
            ("train-labels-idx1-ubyte", labels(&[1, 2, 3])),
            ("t10k-images-idx3-ubyte", images(1)),
            ("t10k-labels-idx1-ubyte", labels(&[9])),
        ] {
            if !name.starts_with(file) {
                fs::write(folder.path().join(file), bytes).unwrap();
            }
        }
        if let Some(content) = content {
            fs::write(folder.path().join(name), content).unwrap();
        }
        let text = match load(folder.path()) {
            Err(CliError::Data(text)) => text,
            other => panic!("{other:?}"),
        };
        assert!(text.contains(name), "{text} names {name}");
        assert!(!text.contains('\n'));
        text
    }

    #[test]
    fn plain_and_gzipped_files_hold_the_same_images() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("train-images-idx3-ubyte.gz"), gzip(&images(3))).unwrap();
        fs::write(folder.path().join("train-labels-idx1-ubyte"), labels(&[1, 2, 3])).unwrap();
        fs::write(folder.path().join("t10k-images-idx3-ubyte"), images(3)).unwrap();
        fs::write(folder.path().join("t10k-labels-idx1-ubyte.gz"), gzip(&labels(&[1, 2, 3]))).unwrap();
        let data = load(folder.path()).unwrap();
        assert_eq!(data.train.len(), 3);
        assert_eq!(data.train.image(2), data.validation.image(2));
        assert_eq!(data.train.image(2)[5], ((2 * PIXELS + 5) % 256) as u8);
        assert_eq!(data.train.labels(), data.validation.labels());
    }

    #[test]
    fn every_fault_names_the_file_and_the_remedy() {
        let text = error_with("t10k-labels-idx1-ubyte", None);
        assert!(text.contains("no such file") && text.contains("--data"), "{text}");

        let mut bytes = images(3);
        bytes.truncate(1000);
        let text = error_with("train-images-idx3-ubyte", Some(bytes));
        assert!(text.contains("truncated: 984 bytes") && text.contains("2352"), "{text}");

        let text = error_with("train-images-idx3-ubyte", Some(vec![0, 0, 8]));
        assert!(text.contains("truncated: 3 bytes"), "{text}");

        let text = error_with("train-images-idx3-ubyte", Some(labels(&[1, 2, 3])));
        assert!(text.contains("0x00000801") && text.contains("0x00000803"), "{text}");

        let text = error_with("train-labels-idx1-ubyte", Some(labels(&[1, 2])));
        assert!(text.contains("2 labels") && text.contains("3 images"), "{text}");

        let text = error_with("train-labels-idx1-ubyte", Some(labels(&[1, 10, 2])));
        assert!(text.contains("label 1 (from 0) is 10"), "{text}");

        let mut bytes = images(3);
        bytes.push(0);
        let text = error_with("train-images-idx3-ubyte", Some(bytes));
        assert!(text.contains("1 bytes more"), "{text}");

        let mut bytes = images(3);
        bytes[11] = 32;
        let text = error_with("train-images-idx3-ubyte", Some(bytes));
        assert!(text.contains("32×28"), "{text}");

        let text = error_with("t10k-images-idx3-ubyte", Some(images(0)));
        assert!(text.contains("holds no images"), "{text}");

        let text = error_with("train-images-idx3-ubyte.gz", Some(images(3)));
        assert!(text.contains("not a valid gzip file"), "{text}");

        let mut bytes = gzip(&images(3));
        bytes.truncate(bytes.len() - 40);
        let text = error_with("train-images-idx3-ubyte.gz", Some(bytes));
        assert!(text.contains("gzip data ends too early"), "{text}");
    }

    #[test]
    fn a_header_that_promises_more_than_memory_holds_is_only_a_length_error() {
        let mut bytes = images(1);
        bytes[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(error_with("train-images-idx3-ubyte", Some(bytes)).contains("truncated"));
    }

    #[test]
    fn real_mnist_reads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/mnist");
        if !folder.exists() {
            println!("skipped: {} not found", folder.display());
            return;
        }
        let data = load(&folder).unwrap();
        assert_eq!((data.train.len(), data.validation.len()), (60_000, 10_000));
        // Known figures of the training pixels: mean 0.1307, deviation 0.3081 of full scale.
        let (mean, deviation) = (data.pixel_mean, data.pixel_deviation);
        assert!((mean / 255.0 - 0.1307).abs() < 5e-5 && (deviation / 255.0 - 0.3081).abs() < 5e-5);
        assert_eq!(&data.train.labels()[..5], [5, 0, 4, 1, 9]);
    }
}
