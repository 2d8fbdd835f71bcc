//! Fitted models as versioned JSON.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Family, Model, TensorFactor};
use crate::files::{read_regular, write_atomically};
use crate::{Error, Moments, Result};

const FORMAT: &str = "rfdescent-model";
const VERSION: u64 = 1;

/// What stands in messages for a text that was not read from a file.
const NO_PATH: &str = "model JSON";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    format: String,
    version: u64,
    covariance: Family,
    moments: Moments,
    /// Releases before this field refuse files that have it, as they would not know the geometry of the
    /// moments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tensors: Vec<TensorFactor>,
}

impl Model {
    /// The model as JSON: format, version, covariance, moments and, where it has some, tensors. Numbers read
    /// back to the same bits.
    ///
    /// An error for a covariance that is not built in: it is code, so save the [moments](Model::moments) and
    /// build the model anew with [`Model::with_covariance`].
    pub fn to_json(&self) -> Result<String> {
        let Some(covariance) = self.family() else {
            return Err(Error::invalid(
                "covariance",
                self.covariance().name(),
                "only built-in covariances can be saved; save the moments and rebuild with Model::with_covariance",
            ));
        };
        let contents = Contents {
            format: FORMAT.into(),
            version: VERSION,
            covariance,
            moments: *self.moments(),
            tensors: self.tensors().to_vec(),
        };
        // Nothing in it can fail: no maps with odd keys, no writer.
        let mut text = serde_json::to_string_pretty(&contents)
            .map_err(|error| Error::File { path: NO_PATH.into(), problem: error.to_string() })?;
        text.push('\n');
        Ok(text)
    }

    /// The inverse of [`to_json`](Model::to_json).
    pub fn from_json(json: &str) -> Result<Model> {
        parse(json, Path::new(NO_PATH))
    }

    /// Writes [`to_json`](Model::to_json) to a file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<()> {
        write_atomically(path, self.to_json()?.as_bytes())
    }

    /// Reads a file that [`save`](Model::save) wrote.
    pub fn load(path: &Path) -> Result<Model> {
        let json = String::from_utf8(read_regular(path)?).map_err(|_| Error::File {
            path: path.into(),
            problem: "not a fitted model, which is a JSON object: not a text in UTF-8".into(),
        })?;
        parse(&json, path)
    }
}

fn parse(json: &str, path: &Path) -> Result<Model> {
    let problem = |problem: String| Error::File { path: path.into(), problem };
    let value: Value = serde_json::from_str(json)
        .map_err(|error| problem(format!("not a fitted model, which is a JSON object: {error}")))?;
    if value.get("format").and_then(Value::as_str) != Some(FORMAT) {
        return Err(problem(format!("not a fitted model: `format` is not \"{FORMAT}\"")));
    }
    match value.get("version") {
        Some(version) if version.as_u64() == Some(VERSION) => {}
        version => {
            let found = version.map_or("missing".into(), Value::to_string);
            return Err(problem(format!(
                "the model's `version` is {found}, this release reads version {VERSION}: fit it again, or use the \
                 release that wrote it"
            )));
        }
    }
    // From the text, so that the message has line and column.
    let contents: Contents = serde_json::from_str(json).map_err(|error| problem(error.to_string()))?;
    Model::new(contents.covariance, contents.moments)
        .and_then(|model| model.with_tensors(contents.tensors))
        .map_err(|error| problem(error.to_string()))
}
