//! Samples as CSV: `loss,grad_norm,batchsize,time`, in any order, further columns ignored.

use super::statistics::{LARGEST_NORM, Sample};
use crate::files::read_regular;
use crate::{Error, Result};
use std::path::Path;

/// Where the values of a sample stand in a row.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    names: Vec<String>,
    loss: usize,
    grad_norm: GradNormColumn,
    batch_size: usize,
    line_break: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum GradNormColumn {
    Norm(usize),
    Squared(usize),
}

impl Columns {
    fn from_header(path: &Path, header: &csv::StringRecord, line_break: &'static str) -> Result<Self> {
        let names: Vec<String> = header.iter().map(|name| name.trim().to_string()).collect();
        let find = |wanted: &str| names.iter().position(|name| name == wanted);
        let missing = |wanted: &str| {
            let problem = format!(
                "row 1 has no column `{wanted}`: the header must name loss, grad_norm (or sq_grad_norm) and batchsize"
            );
            Error::File { path: path.into(), problem }
        };
        for used in ["loss", "grad_norm", "sq_grad_norm", "batchsize"] {
            if names.iter().filter(|name| *name == used).count() > 1 {
                let problem =
                    format!("row 1 names column `{used}` more than once: rename or delete all but one");
                return Err(Error::File { path: path.into(), problem });
            }
        }
        let grad_norm = find("sq_grad_norm")
            .map(GradNormColumn::Squared)
            .or_else(|| find("grad_norm").map(GradNormColumn::Norm))
            .ok_or_else(|| missing("grad_norm"))?;
        Ok(Columns {
            loss: find("loss").ok_or_else(|| missing("loss"))?,
            grad_norm,
            batch_size: find("batchsize").ok_or_else(|| missing("batchsize"))?,
            names,
            line_break,
        })
    }

    /// The last column with a value that a fit uses: if nothing follows it in a cut-off line, it may have lost digits.
    fn last_used(&self) -> usize {
        let (GradNormColumn::Norm(grad_norm) | GradNormColumn::Squared(grad_norm)) = self.grad_norm;
        self.loss.max(grad_norm).max(self.batch_size)
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
            GradNormColumn::Norm(column) => match not_negative(column)? {
                norm if norm > LARGEST_NORM => {
                    let name = &self.names[column];
                    return Err(format!(
                        "column `{name}`: {norm:e} must be at most {LARGEST_NORM:e}; divide the loss by a constant"
                    ));
                }
                norm => norm.powi(2),
            },
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
        fields.join(",") + self.line_break
    }
}

/// What to do about a last line without a line break, which a crash or a full disk may have cut off.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum CutOff {
    /// Refuse it unless nothing that a fit uses can be missing.
    Refuse,
    /// Complete it where a separator follows everything that a fit uses, else drop it.
    Mend,
}

/// A file's samples in the order of its rows.
pub(super) struct Parsed {
    pub samples: Vec<Sample>,
    pub columns: Columns,
    /// Length in bytes of the part that was read: less than the file's where a cut-off line was dropped.
    pub length: usize,
    /// What the last line lacks to be a whole one.
    pub completion: String,
}

pub(super) fn parse(path: &Path, content: &[u8], cut_off: CutOff) -> Result<Parsed> {
    let problem = |problem: String| Error::File { path: path.into(), problem };
    if let Some(row) = rows(content).position(leaves_quote_open) {
        let row = row + 1;
        return Err(problem(format!("row {row}: a quote is opened and not closed: close or delete it")));
    }
    let unreadable = |error: csv::Error| {
        let row = error.position().map_or(String::new(), |p| format!("row {}: ", row_at(content, p.byte())));
        problem(format!("{row}not a CSV text file in UTF-8"))
    };
    let whole = content.iter().rposition(|&byte| is_break(byte)).map_or(0, |last| last + 1);
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(content);
    let header = reader.headers().map_err(unreadable)?.clone();
    if header.is_empty() {
        return Err(problem("row 1: the header loss,grad_norm,batchsize,time is missing".into()));
    }
    let columns = Columns::from_header(path, &header, line_break(content))?;
    if cut_off == CutOff::Mend && whole == 0 {
        return Err(problem(
            "row 1: the header may be cut off: complete it and end it with a line break".into(),
        ));
    }

    let mut parsed =
        Parsed { samples: Vec::new(), columns, length: content.len(), completion: String::new() };
    let mut record = csv::StringRecord::new();
    while reader.read_record(&mut record).map_err(unreadable)? {
        let (start, columns) = (record.position().map_or(0, csv::Position::byte), &parsed.columns);
        let row = || row_at(content, start);
        let has_break = reader.position().byte() as usize <= whole;
        if !has_break && cut_off == CutOff::Mend {
            if record.len() <= columns.last_used() + 1 {
                parsed.length = whole;
                break;
            }
            // What a fit uses is followed by a separator: complete, whatever may be missing behind it.
            let missing = header.len().saturating_sub(record.len());
            (0..missing).for_each(|_| record.push_field(""));
            parsed.completion = ",".repeat(missing) + columns.line_break;
        }
        let sample = columns.parse(&record).map_err(|what| problem(format!("row {}: {what}", row())))?;
        if !has_break && cut_off == CutOff::Refuse && columns.last_used() + 1 == header.len() {
            let (row, name) = (row(), &header[header.len() - 1]);
            return Err(problem(format!(
                "row {row}: the file ends without a line break, so `{name}` may be cut off: complete the row and end \
                 it with a line break, or delete it"
            )));
        }
        parsed.samples.push(sample);
    }
    Ok(parsed)
}

fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

/// The lines of a file, split at each of the three usual line breaks.
fn rows(content: &[u8]) -> impl Iterator<Item = &[u8]> {
    content
        .split_inclusive(|&byte| byte == b'\n')
        .map(|line| line.strip_suffix(b"\n").unwrap_or(line))
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .flat_map(|line| line.split(|&byte| byte == b'\r'))
}

/// The number, from 1, of the row that a record starting at this byte stands in; line breaks before it are not its own.
fn row_at(content: &[u8], start: u64) -> usize {
    let (before, rest) = content.split_at(content.len().min(start as usize));
    let skipped = rest.iter().take_while(|&&byte| is_break(byte)).count();
    rows(&content[..before.len() + skipped + 1]).count()
}

/// How the first line ends, for rows to come.
fn line_break(content: &[u8]) -> &'static str {
    match content.iter().position(|&byte| is_break(byte)) {
        Some(first) if content[first..].starts_with(b"\r\n") => "\r\n",
        Some(first) if content[first] == b'\r' => "\r",
        _ => "\n",
    }
}

/// Whether the row ends within quotes. CSV lets the field go on in the next line then, but no sample file has such fields:
/// a quote too many would swallow rows.
fn leaves_quote_open(row: &[u8]) -> bool {
    #[derive(PartialEq)]
    enum At {
        Start,
        Plain,
        Quoted,
        /// Behind a quote within quotes: the closing one, or the first of a doubled one.
        Quote,
    }
    let end = row.iter().fold(At::Start, |at, &byte| match (at, byte) {
        (At::Start | At::Quote, b'"') => At::Quoted,
        (At::Quoted, b'"') => At::Quote,
        (At::Quoted, _) => At::Quoted,
        (_, b',') => At::Start,
        _ => At::Plain,
    });
    end == At::Quoted
}

/// Reads samples from CSV.
///
/// Columns by name, in any order: `loss`; `grad_norm`, or `sq_grad_norm` in place of it; `batchsize`. Others are ignored.
///
/// # Errors
/// [`Error::Io`] when the file can't be read; [`Error::File`] when it is no regular file, or with row (line of the file,
/// from 1) and column for a missing column or one that is there twice, a row with too few or too many fields or a quote
/// left open, a value that is not a number or not finite, a negative norm, a loss or norm beyond 1e60, a batch size that is
/// not a whole number of at least 1, a last row that may be cut off.
pub fn read_samples(path: &Path) -> Result<Vec<Sample>> {
    Ok(parse(path, &read_regular(path)?, CutOff::Refuse)?.samples)
}
