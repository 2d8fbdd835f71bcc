//! MNIST and Fashion-MNIST: IDX files, plain or gzipped.

use std::cmp::Ordering;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{CLASSES, Dataset, Images, PIXELS, SIDE};
use crate::error::CliError;
use crate::input;

const IMAGE_MAGIC: u32 = 0x0803;
const LABEL_MAGIC: u32 = 0x0801;
/// Most examples of a file, 7.8 GB of images: a header that is wrong, or made to harm, must not fill the
/// memory.
const MOST: usize = 10_000_000;

/// Reads the four files of a data folder, or of the one below it that has them.
pub fn load(folder: &Path) -> Result<Dataset, CliError> {
    if !folder.is_dir() {
        return Err(CliError::file(
            folder,
            "no such folder; --data takes the folder that holds the IDX files",
        ));
    }
    let folder = find(folder)?;
    let train = load_part(&folder, "train")?;
    let validation = load_part(&folder, "t10k")?;
    Ok(Dataset::new(folder.display().to_string(), train, validation))
}

/// The kinds of files, as their names say them.
const KINDS: [&str; 2] = ["images", "labels"];

/// The folder itself where it has any of the files, else `raw` in it, or `raw` in one of its folders:
/// torchvision lays them out as `MNIST/raw`.
fn find(folder: &Path) -> Result<PathBuf, CliError> {
    let holds = |folder: &Path| {
        ["train", "t10k"].iter().any(|part| KINDS.iter().any(|kind| names(folder, part, kind).is_some()))
    };
    let raw = folder.join("raw");
    if let Some(found) = [folder, &raw].into_iter().find(|folder| holds(folder)) {
        return Ok(found.into());
    }
    let below = fs::read_dir(folder).map_err(|error| CliError::io(folder, error))?;
    let below = below.filter_map(|entry| Some(entry.ok()?.path().join("raw")));
    let mut found: Vec<PathBuf> = below.filter(|folder| holds(folder)).collect();
    found.sort();
    match &found[..] {
        [] => Ok(folder.into()),
        [one] => Ok(one.clone()),
        [first, ..] => {
            let list: Vec<String> = found.iter().map(|folder| folder.display().to_string()).collect();
            let problem =
                format!("several data sets: {}; name one, as in --data {}", list.join(", "), first.display());
            Err(CliError::file(folder, problem))
        }
    }
}

/// The file of a part and kind under one of the names that are in use. A folder of such a name, which some
/// archives unpack to, is none.
fn names(folder: &Path, part: &str, kind: &str) -> Option<PathBuf> {
    let dims = if kind == "images" { 3 } else { 1 };
    let plain = ['-', '.'].map(|mark| format!("{part}-{kind}{mark}idx{dims}-ubyte"));
    let packed = plain.each_ref().map(|name| format!("{name}.gz"));
    let mut paths = plain.iter().chain(&packed).map(|name| folder.join(name));
    paths.find(|path| path.exists() && !path.is_dir())
}

fn load_part(folder: &Path, part: &str) -> Result<Images, CliError> {
    let [images, labels] = KINDS.map(|kind| Source::open(folder, part, kind));
    let (images, labels) = (images?, labels?);
    let (images_path, labels_path) = (images.path.clone(), labels.path.clone());
    let (pixels, image_count) = read_images(images)?;
    let labels = read_labels(labels)?;
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

/// A file, unpacked as it is read. Its header says how much that is: what is packed may have no end.
struct Source {
    path: PathBuf,
    reader: Box<dyn Read>,
}

impl Source {
    fn open(folder: &Path, part: &str, kind: &str) -> Result<Self, CliError> {
        let Some(path) = names(folder, part, kind) else {
            let dims = if kind == "images" { 3 } else { 1 };
            return Err(CliError::file(
                &folder.join(format!("{part}-{kind}-idx{dims}-ubyte")),
                format!(
                    "no such file, with or without .gz, nor {part}-{kind}.idx{dims}-ubyte; --data takes the folder that \
                     holds the four IDX files of MNIST or Fashion-MNIST"
                ),
            ));
        };
        Ok(Source { reader: input::open(&path)?, path })
    }

    /// The next `bytes` bytes, fewer at the end of the file.
    fn read(&mut self, bytes: u64) -> Result<Vec<u8>, CliError> {
        let mut content = Vec::new();
        let read = self.reader.by_ref().take(bytes).read_to_end(&mut content);
        read.map_err(|error| input::unreadable(&self.path, error))?;
        Ok(content)
    }

    /// All that follows the header, which promises `bytes` bytes.
    fn read_exactly(&mut self, bytes: u64) -> Result<Vec<u8>, CliError> {
        // One more shows a file that is too long.
        let content = self.read(bytes + 1)?;
        let found = content.len() as u64;
        let problem = match found.cmp(&bytes) {
            Ordering::Equal => return Ok(content),
            Ordering::Less => {
                format!("truncated: {found} bytes of data, the header promises {bytes}; get the file again")
            }
            Ordering::Greater => {
                format!("more than the {bytes} bytes that the header promises; get the file again")
            }
        };
        Err(CliError::file(&self.path, problem))
    }
}

/// Checks magic, dimensions and length; returns the pixels and the number of images.
fn read_images(mut source: Source) -> Result<(Vec<u8>, usize), CliError> {
    let head = source.read(16)?;
    let [count, rows, columns] = header(&source.path, &head, IMAGE_MAGIC, "images")?;
    if (rows, columns) != (SIDE, SIDE) {
        return Err(CliError::file(
            &source.path,
            format!("images of {rows}×{columns} pixels; only {SIDE}×{SIDE} are read"),
        ));
    }
    Ok((source.read_exactly(count as u64 * PIXELS as u64)?, count))
}

/// Checks magic, length and range; returns the labels.
fn read_labels(mut source: Source) -> Result<Vec<u8>, CliError> {
    let head = source.read(8)?;
    let [count] = header(&source.path, &head, LABEL_MAGIC, "labels")?;
    let labels = source.read_exactly(count as u64)?;
    match labels.iter().position(|&label| usize::from(label) >= CLASSES) {
        Some(row) => Err(CliError::file(
            &source.path,
            format!("label {row} (from 0) is {}; labels lie between 0 and {}", labels[row], CLASSES - 1),
        )),
        None => Ok(labels),
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
    if sizes[0] > MOST {
        return Err(CliError::file(path, format!("promises {} {what}; at most {MOST} are read", sizes[0])));
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
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

    /// Where the files of torchvision, of downloads and of browsers lie and what they are called, one row for
    /// each.
    #[test]
    fn folders_and_names_as_people_have_them() {
        let dashes = ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"];
        let packed = |bytes: &[u8]| gzip(bytes);
        let plain = |bytes: &[u8]| bytes.to_vec();
        type Pack<'a> = &'a dyn Fn(&[u8]) -> Vec<u8>;
        for (given, within, mark, end, pack) in [
            ("", "", "-", "", &plain as Pack),
            ("", "", "-", ".gz", &packed),
            ("", "", ".", "", &plain),
            ("", "", ".", ".gz", &packed),
            // Packed files without their suffix, and unpacked ones that kept it.
            ("", "", "-", "", &packed),
            ("", "", "-", ".gz", &plain),
            // torchvision: --data is root, root/MNIST or root/MNIST/raw.
            ("", "MNIST/raw", "-", "", &plain),
            ("MNIST", "MNIST/raw", "-", ".gz", &packed),
            ("MNIST/raw", "MNIST/raw", "-", "", &plain),
            ("", "FashionMNIST/raw", "-", "", &plain),
        ] {
            let root = tempfile::tempdir().unwrap();
            let (given, within) = (root.path().join(given), root.path().join(within));
            fs::create_dir_all(&within).unwrap();
            fs::create_dir_all(root.path().join("other/raw")).unwrap();
            for name in dashes {
                let bytes = if name.contains("images") { images(2) } else { labels(&[4, 2]) };
                let name = name.replace("-idx", &format!("{mark}idx"));
                fs::write(within.join(format!("{name}-ubyte{end}")), pack(&bytes)).unwrap();
            }
            let data = load(&given).unwrap_or_else(|error| panic!("{given:?} {within:?}: {error}"));
            assert_eq!((data.train.labels(), data.validation.len()), (&[4, 2][..], 2));
            assert_eq!(data.train.image(1)[3], ((PIXELS + 3) % 256) as u8);
            assert!(data.source.ends_with(within.strip_prefix(root.path()).unwrap().to_str().unwrap()));
        }
    }

    #[test]
    fn a_folder_of_several_data_sets_is_refused_with_their_names() {
        let root = tempfile::tempdir().unwrap();
        for set in ["MNIST", "FashionMNIST"] {
            let raw = root.path().join(set).join("raw");
            fs::create_dir_all(&raw).unwrap();
            fs::write(raw.join("t10k-labels-idx1-ubyte"), labels(&[1])).unwrap();
        }
        let text = load(root.path()).unwrap_err().to_string();
        assert!(text.contains("/FashionMNIST/raw, ") && text.contains("/MNIST/raw; name one"), "{text}");
        // A folder by the name of a file, as an archive may unpack to, is no file.
        fs::create_dir(root.path().join("train-images-idx3-ubyte")).unwrap();
        assert_eq!(load(root.path()).unwrap_err().to_string(), text);
        let text = load(&root.path().join("MNIST")).unwrap_err().to_string();
        assert!(text.contains("train-images-idx3-ubyte: no such file") && text.contains("/raw/"), "{text}");
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
        assert!(text.contains("more than the 2352 bytes"), "{text}");

        let mut bytes = images(3);
        bytes[11] = 32;
        let text = error_with("train-images-idx3-ubyte", Some(bytes));
        assert!(text.contains("32×28"), "{text}");

        let text = error_with("t10k-images-idx3-ubyte", Some(images(0)));
        assert!(text.contains("holds no images"), "{text}");

        let mut bytes = gzip(&images(3));
        bytes[2] = 0;
        let text = error_with("train-images-idx3-ubyte.gz", Some(bytes));
        assert!(text.contains("not a valid gzip file"), "{text}");

        let mut bytes = gzip(&images(3));
        bytes.truncate(bytes.len() - 40);
        let text = error_with("train-images-idx3-ubyte.gz", Some(bytes));
        assert!(text.contains("gzip data ends too early"), "{text}");
    }

    #[test]
    fn a_header_that_promises_more_than_there_is_fills_no_memory() {
        for (count, said) in [(u32::MAX, "at most 10000000"), (10_000_000, "truncated: 784 bytes")] {
            let mut bytes = images(1);
            bytes[4..8].copy_from_slice(&count.to_be_bytes());
            let text = error_with("train-images-idx3-ubyte", Some(bytes));
            assert!(text.contains(said), "{text}");
        }
    }

    #[test]
    fn no_more_is_unpacked_than_the_header_promises() {
        // Three gigabytes of zeros, in three thousand members of a megabyte each.
        let zeros = gzip(&vec![0; 1 << 20]);
        let mut bytes = gzip(&images(3));
        (0..3000).for_each(|_| bytes.extend(&zeros));
        let started = std::time::Instant::now();
        let text = error_with("train-images-idx3-ubyte.gz", Some(bytes));
        assert!(text.contains("more than the 2352 bytes"), "{text}");
        assert!(started.elapsed().as_secs_f64() < 1.0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_and_pipes_are_refused_rather_than_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train-images-idx3-ubyte");
        let pipe = || std::process::Command::new("mkfifo").arg(&path).status().unwrap().success();
        let device = || std::os::unix::fs::symlink("/dev/zero", &path).is_ok();
        for make in [&pipe as &dyn Fn() -> bool, &device] {
            assert!(make());
            let text = load(folder.path()).unwrap_err().to_string();
            assert!(text.contains("train-images-idx3-ubyte") && text.contains("device or a pipe"), "{text}");
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn real_mnist_reads() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/mnist");
        if !folder.exists() {
            say_skipped(format_args!("skipped: {} not found", folder.display()));
            return;
        }
        let data = load(&folder).unwrap();
        assert_eq!((data.train.len(), data.validation.len()), (60_000, 10_000));
        // Known figures of the training pixels: mean 0.1307, deviation 0.3081 of full scale.
        let (mean, deviation) = (data.pixel_mean, data.pixel_deviation);
        assert!((mean / 255.0 - 0.1307).abs() < 5e-5 && (deviation / 255.0 - 0.3081).abs() < 5e-5);
        assert_eq!(&data.train.labels()[..5], [5, 0, 4, 1, 9]);
    }
    /// Straight to stderr: the test runner shows what passing tests print only when asked.
    fn say_skipped(what: std::fmt::Arguments<'_>) {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "{what}");
    }
}
