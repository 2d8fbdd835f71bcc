//! Samples as CSV: `loss,grad_norm,batchsize,time`, in any order, further columns ignored.

use super::statistics::Sample;
use crate::{Error, Result};
use std::path::Path;

/// Where the values of a sample stand in a row.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    names: Vec<String>,
    loss: usize,
    grad_norm: GradNormColumn,
    batch_size: usize,
}

#[derive(Clone, Copy, Debug)]
enum GradNormColumn {
    Norm(usize),
    Squared(usize),
}

impl Columns {
    fn from_header(path: &Path, header: &csv::StringRecord) -> Result<Self> {
        let names: Vec<String> = header.iter().map(|name| name.trim().to_string()).collect();
        let find = |wanted: &str| names.iter().position(|name| name == wanted);
        let missing = |wanted: &str| {
            let problem = format!(
                "row 1 has no column `{wanted}`: the header must name loss, grad_norm (or sq_grad_norm) and batchsize"
            );
            Error::File { path: path.into(), problem }
        };
        let grad_norm = find("sq_grad_norm")
            .map(GradNormColumn::Squared)
            .or_else(|| find("grad_norm").map(GradNormColumn::Norm))
            .ok_or_else(|| missing("grad_norm"))?;
        Ok(Columns {
            loss: find("loss").ok_or_else(|| missing("loss"))?,
            grad_norm,
            batch_size: find("batchsize").ok_or_else(|| missing("batchsize"))?,
            names,
        })
    }

    /// Whether a value that a fit uses stands in the last column, where a cut-off line could have lost digits.
    fn uses_last(&self) -> bool {
        let last = self.names.len() - 1;
        let (GradNormColumn::Norm(grad_norm) | GradNormColumn::Squared(grad_norm)) = self.grad_norm;
        [self.loss, grad_norm, self.batch_size].contains(&last)
    }

    fn parse(&self, record: &csv::StringRecord) -> std::result::Result<Sample, String> {
        if record.len() != self.names.len() {
            return Err(format!(
                "{} fields where the header has {}: complete or delete the row",
                record.len(),
                self.names.len()
            ));
        }
        let number = |column: usize| {
            let (text, name) = (record[column].trim(), &self.names[column]);
            let wrong = |expected: &str| format!("column `{name}`: `{text}` {expected}");
            match text.parse::<f64>() {
                Ok(value) if value.is_finite() => Ok(value),
                Ok(_) => Err(wrong("is not finite: delete the row or draw the sample again")),
                Err(_) => Err(wrong("is not a number")),
            }
        };
        let not_negative = |column: usize| match number(column)? {
            value if value < 0.0 => {
                Err(format!("column `{}`: {value} is negative, a norm is at least 0", self.names[column]))
            }
            value => Ok(value),
        };
        let loss = number(self.loss)?;
        let sq_grad_norm = match self.grad_norm {
            GradNormColumn::Squared(column) => not_negative(column)?,
            GradNormColumn::Norm(column) => not_negative(column)?.powi(2),
        };
        let text = record[self.batch_size].trim();
        let batch_size = text.parse::<u64>().ok().filter(|&b| b >= 1).ok_or_else(|| {
            format!("column `{}`: `{text}` is not a whole number of at least 1", self.names[self.batch_size])
        })?;
        let sample = Sample { loss, sq_grad_norm, batch_size };
        sample.validate().map_err(|e| e.to_string())?;
        Ok(sample)
    }

    /// A row of this file, with its line break; columns that a sample does not have stay empty.
    ///
    /// Numbers are written with the fewest digits that read back as the same number.
    pub fn row(&self, loss: f64, grad_norm: f64, batch_size: u64, time: f64) -> String {
        let fields: Vec<String> = self
            .names
            .iter()
            .map(|name| match name.as_str() {
                "loss" => format!("{loss:?}"),
                "grad_norm" => format!("{grad_norm:?}"),
                "sq_grad_norm" => format!("{:?}", grad_norm.powi(2)),
                "batchsize" => batch_size.to_string(),
                "time" => format!("{time:?}"),
                _ => String::new(),
            })
            .collect();
        fields.join(",") + "\n"
    }
}

/// What to do about a last line that a crash or a full disk has cut off.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum CutOff {
    Refuse,
    Drop,
}

/// A file's samples in the order of its rows.
pub(super) struct Parsed {
    pub samples: Vec<Sample>,
    pub columns: Columns,
    /// Length in bytes of the part that was read: less than the file's where a cut-off line was dropped.
    pub length: usize,
}

pub(super) fn parse(path: &Path, content: &[u8], cut_off: CutOff) -> Result<Parsed> {
    let problem = |problem: String| Error::File { path: path.into(), problem };
    let unreadable = |error: csv::Error| {
        let row = error.position().map_or(String::new(), |p| format!("row {}: ", p.line()));
        problem(format!("{row}not a CSV text file in UTF-8"))
    };
    let ends_with_break = content.last() == Some(&b'\n');
    let mut length = match cut_off {
        CutOff::Refuse => content.len(),
        CutOff::Drop => content.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1),
    };
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(&content[..length]);
    let header = reader.headers().map_err(unreadable)?.clone();
    if header.is_empty() {
        return Err(problem("row 1: the header loss,grad_norm,batchsize,time is missing".into()));
    }
    let columns = Columns::from_header(path, &header)?;

    let mut samples = Vec::new();
    let mut record = csv::StringRecord::new();
    loop {
        let start = reader.position().byte() as usize;
        if !reader.read_record(&mut record).map_err(unreadable)? {
            break;
        }
        let row = record.position().map_or(0, csv::Position::line);
        let is_last = reader.position().byte() as usize >= length;
        if is_last && cut_off == CutOff::Drop && record.len() < header.len() {
            length = start;
            break;
        }
        let sample = columns.parse(&record).map_err(|what| problem(format!("row {row}: {what}")))?;
        if is_last && !ends_with_break && cut_off == CutOff::Refuse && columns.uses_last() {
            let name = &header[header.len() - 1];
            return Err(problem(format!(
                "row {row}: the file ends without a line break, so `{name}` may be cut off: complete the row and end \
                 it with a line break, or delete it"
            )));
        }
        samples.push(sample);
    }
    Ok(Parsed { samples, columns, length })
}

/// Reads samples from CSV.
///
/// Columns by name, in any order: `loss`; `grad_norm`, or `sq_grad_norm` in place of it; `batchsize`. Others are ignored.
///
/// # Errors
/// [`Error::Io`] when the file can't be read; [`Error::File`] with row (line of the file, from 1) and column for a
/// missing column, a row with too few or too many fields, a value that is not a number or not finite, a negative norm, a
/// batch size that is not a whole number of at least 1, a last row that may be cut off.
pub fn read_samples(path: &Path) -> Result<Vec<Sample>> {
    let content = std::fs::read(path).map_err(|source| Error::Io { path: path.into(), source })?;
    Ok(parse(path, &content, CutOff::Refuse)?.samples)
}
