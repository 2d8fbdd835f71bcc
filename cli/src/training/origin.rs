//! What network and data a file of samples belongs to.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rfdescent::files;
use serde::{Deserialize, Serialize};

use crate::data::Dataset;
use crate::error::CliError;
use crate::network::NetworkKind;

/// What the samples of a cache are samples of; kept beside the cache, as samples of another network or other
/// data would give a wrong model without any sign of it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    network: String,
    training_images: usize,
    pixel_mean: f64,
    pixel_deviation: f64,
}

impl Origin {
    /// Of a network of this kind on these data.
    pub fn of(kind: NetworkKind, data: &Dataset) -> Self {
        Origin {
            network: kind.to_string(),
            training_images: data.train.len(),
            pixel_mean: data.pixel_mean,
            pixel_deviation: data.pixel_deviation,
        }
    }

    /// Marks a cache without samples as ours; one with samples must be. Returns a warning about one whose
    /// origin is unknown.
    pub fn claim(&self, cache: &Path) -> Result<Option<String>, CliError> {
        let mut note = cache.as_os_str().to_owned();
        note.push(".origin.json");
        let note = PathBuf::from(note);
        if holds_samples(cache)? {
            if matches!(fs::symlink_metadata(&note), Err(error) if error.kind() == ErrorKind::NotFound) {
                return Ok(Some(format!(
                    "{}: taken as samples of this network on this data; nothing beside it says so",
                    cache.display()
                )));
            }
            let origin: Origin = serde_json::from_slice(&files::read_regular(&note)?).map_err(|e| {
                CliError::file(&note, format!("not what this program wrote ({e}); remove it"))
            })?;
            if origin != *self {
                return Err(CliError::file(
                    cache,
                    format!(
                        "holds samples of network `{}` on {} images with mean {:.3}, not of `{}` on {} images with mean \
                         {:.3}; name another file with --samples, or another --output",
                        origin.network,
                        origin.training_images,
                        origin.pixel_mean,
                        self.network,
                        self.training_images,
                        self.pixel_mean
                    ),
                ));
            }
            return Ok(None);
        }
        let text = serde_json::to_string_pretty(self).map_err(|e| CliError::file(&note, e))?;
        files::write_atomically(&note, text.as_bytes())?;
        Ok(None)
    }
}

/// Whether a cache has more than a header.
fn holds_samples(cache: &Path) -> Result<bool, CliError> {
    if !cache.exists() {
        return Ok(false);
    }
    let content = files::read_regular(cache)?;
    let content = content.trim_ascii();
    let header = content.starts_with(b"loss,grad_norm,batchsize,time")
        && !content.iter().any(|byte| matches!(byte, b'\n' | b'\r'));
    Ok(!(content.is_empty() || header))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(network: &str) -> Origin {
        Origin { network: network.into(), training_images: 7, pixel_mean: 0.1, pixel_deviation: 1.0 / 3.0 }
    }

    const SAMPLES: &str = "loss,grad_norm,batchsize,time\n2.5,3.0,20,0\n";

    #[test]
    fn a_cache_of_another_network_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("samples.csv");
        // Without samples there is nothing to mix up: not there, empty, a header alone.
        for (network, content) in [
            ("cnn", None),
            ("mlp", Some("")),
            ("mlp", SAMPLES.split_inclusive('\n').next()),
            ("mlp", Some("loss,grad_norm,batchsize,time,sq_grad_norm:a,sq_grad_norm:b\n")),
        ] {
            if let Some(content) = content {
                fs::write(&cache, content).unwrap();
            }
            assert_eq!(origin(network).claim(&cache).unwrap(), None);
        }
        fs::write(&cache, SAMPLES).unwrap();
        assert_eq!(origin("mlp").claim(&cache).unwrap(), None);
        let error = origin("cnn").claim(&cache).unwrap_err().to_string();
        assert!(error.contains("samples.csv") && error.contains("--samples"), "{error}");
        fs::write(&cache, "loss,grad_norm,batchsize,time,sq_grad_norm:a\r2.5,3.0,20,0,9.0").unwrap();
        assert!(origin("cnn").claim(&cache).is_err(), "samples whatever their line breaks");
    }

    #[test]
    fn a_cache_of_unknown_origin_is_used_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("theirs.csv");
        fs::write(&cache, SAMPLES).unwrap();
        assert!(origin("mlp").claim(&cache).unwrap().unwrap().contains("theirs.csv"));
    }

    #[test]
    fn a_note_that_cannot_be_read_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("samples.csv");
        let note = folder.path().join("samples.csv.origin.json");
        fs::write(&cache, SAMPLES).unwrap();
        let named = || {
            let error = origin("mlp").claim(&cache).unwrap_err().to_string();
            assert!(error.contains("samples.csv.origin.json"), "{error}");
        };
        for damaged in [&b""[..], b"{\"network\":", b"\xff\xfe", b"[]"] {
            fs::write(&note, damaged).unwrap();
            named();
        }
        fs::remove_file(&note).unwrap();
        fs::create_dir(&note).unwrap();
        named();
    }
}
