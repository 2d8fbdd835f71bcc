//! Samples as CSV: `loss,grad_norm,batchsize,time` and `sq_grad_norm:<tensor>`, in any order, further columns
//! ignored.

use super::statistics::{LARGEST_NORM, Sample, SampleStatistics};
use crate::files::read_regular;
use crate::{Error, Result};
use std::collections::HashSet;
use std::path::Path;

/// What the name of a tensor's column starts with; the tensor's name follows.
const TENSOR: &str = "sq_grad_norm:";

/// The columns of new files, before those of the tensors.
const BASE: [&str; 4] = ["loss", "grad_norm", "batchsize", "time"];

/// The first line of a new file, with its line break; names of tensors are quoted where CSV needs it.
pub(super) fn header<'a>(tensors: impl IntoIterator<Item = &'a str>) -> String {
    let quoted = |name: String| match name.contains([',', '"']) {
        true => format!("\"{}\"", name.replace('"', "\"\"")),
        false => name,
    };
    let tensors = tensors.into_iter().map(|tensor| quoted(format!("{TENSOR}{tensor}")));
    let names: Vec<String> = BASE.into_iter().map(String::from).chain(tensors).collect();
    names.join(",") + "\n"
}

/// Where the values of a sample stand in a row.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    names: Vec<String>,
    loss: usize,
    grad_norm: GradNormColumn,
    batch_size: usize,
    /// The columns of ‖g_k‖², in the order of the file.
    tensors: Vec<usize>,
    line_break: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum GradNormColumn {
    Norm(usize),
    Squared(usize),
}

impl Columns {
    fn from_header(path: &Path, header: &csv::StringRecord, line_break: &'static str) -> Result<Self> {
        let names: Vec<String> = header
            .iter()
            .map(|name| match name.trim().strip_prefix(TENSOR) {
                Some(tensor) => format!("{TENSOR}{}", tensor.trim()),
                None => name.trim().to_string(),
            })
            .collect();
        let tensors: Vec<usize> = (0..names.len()).filter(|&k| names[k].starts_with(TENSOR)).collect();
        let find = |wanted: &str| names.iter().position(|name| name == wanted);
        let missing = |wanted: &str| {
            let problem = format!(
                "row 1 has no column `{wanted}`: the header must name loss, grad_norm (or sq_grad_norm) and batchsize"
            );
            Error::File { path: path.into(), problem }
        };
        let used = ["loss", "grad_norm", "sq_grad_norm", "batchsize"];
        let mut seen = HashSet::new();
        for name in names.iter().filter(|name| used.contains(&name.as_str()) || name.starts_with(TENSOR)) {
            let problem = match name.as_str() {
                TENSOR => {
                    format!("row 1 has a column `{TENSOR}` without a tensor: complete its name or delete it")
                }
                name if !seen.insert(name) => {
                    format!("row 1 names column `{name}` more than once: rename or delete all but one")
                }
                _ => continue,
            };
            return Err(Error::File { path: path.into(), problem });
        }
        let grad_norm = find("sq_grad_norm")
            .map(GradNormColumn::Squared)
            .or_else(|| find("grad_norm").map(GradNormColumn::Norm))
            .ok_or_else(|| missing("grad_norm"))?;
        Ok(Columns {
            loss: find("loss").ok_or_else(|| missing("loss"))?,
            grad_norm,
            batch_size: find("batchsize").ok_or_else(|| missing("batchsize"))?,
            tensors,
            names,
            line_break,
        })
    }

    /// The last column with a value that a fit uses: if nothing follows it in a cut-off line, it may have
    /// lost digits.
    fn last_used(&self) -> usize {
        let (GradNormColumn::Norm(grad_norm) | GradNormColumn::Squared(grad_norm)) = self.grad_norm;
        self.tensors.iter().copied().fold(self.loss.max(grad_norm).max(self.batch_size), usize::max)
    }

    /// The tensors that have a column, in the order of the file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.iter().map(|&column| &self.names[column][TENSOR.len()..])
    }

    /// The sample and ‖g_k‖² of each tensor that has a column.
    fn parse(&self, record: &csv::StringRecord) -> std::result::Result<(Sample, Vec<f64>), String> {
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
        let of_tensor = |&column: &usize| match not_negative(column)? {
            square if square > LARGEST_NORM.powi(2) => Err(format!(
                "column `{}`: {square:e} must be at most 1e120; divide the loss by a constant",
                self.names[column]
            )),
            square => Ok(square),
        };
        let sq_grad_norms = self.tensors.iter().map(of_tensor).collect::<std::result::Result<_, _>>()?;
        Ok((sample, sq_grad_norms))
    }

    /// A row of this file, with its line break; columns that a sample does not have stay empty.
    /// `sq_grad_norms` are those of [`tensors`](Self::tensors).
    ///
    /// Numbers are written with the fewest digits that read back as the same number.
    pub fn row(
        &self,
        loss: f64,
        grad_norm: f64,
        batch_size: u64,
        time: f64,
        sq_grad_norms: impl IntoIterator<Item = f64>,
    ) -> String {
        let mut sq_grad_norms = sq_grad_norms.into_iter();
        let fields: Vec<String> = self
            .names
            .iter()
            .map(|name| match name.as_str() {
                "loss" => format!("{loss:?}"),
                "grad_norm" => format!("{grad_norm:?}"),
                "sq_grad_norm" => format!("{:?}", grad_norm.powi(2)),
                "batchsize" => batch_size.to_string(),
                "time" => format!("{time:?}"),
                tensor if tensor.starts_with(TENSOR) => {
                    sq_grad_norms.next().map_or(String::new(), |square| format!("{square:?}"))
                }
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
    /// ‖g_k‖² of the tensors that have a column, for each sample.
    pub sq_grad_norms: Vec<Vec<f64>>,
    /// The row that each sample stands in.
    pub rows: Vec<u64>,
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

    let mut parsed = Parsed {
        samples: Vec::new(),
        sq_grad_norms: Vec::new(),
        rows: Vec::new(),
        columns,
        length: content.len(),
        completion: String::new(),
    };
    let mut record = csv::StringRecord::new();
    let mut cursor = RowCursor { start: 0, row: 1 };
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
        let (sample, sq_grad_norms) =
            columns.parse(&record).map_err(|what| problem(format!("row {}: {what}", row())))?;
        if !has_break && cut_off == CutOff::Refuse && columns.last_used() + 1 == header.len() {
            let (row, name) = (row(), &header[header.len() - 1]);
            return Err(problem(format!(
                "row {row}: the file ends without a line break, so `{name}` may be cut off: complete the row and end \
                 it with a line break, or delete it"
            )));
        }
        parsed.samples.push(sample);
        parsed.sq_grad_norms.push(sq_grad_norms);
        parsed.rows.push(cursor.advance(content, start));
    }
    Ok(parsed)
}

/// Counts rows from record to record, as [`row_at`] would from the start of the file each time.
struct RowCursor {
    start: usize,
    row: u64,
}

impl RowCursor {
    /// The row that the record starting at this byte, behind the last one, stands in.
    fn advance(&mut self, content: &[u8], start: u64) -> u64 {
        let start = content.len().min(start as usize);
        let skipped = content[start..].iter().take_while(|&&byte| is_break(byte)).count();
        let end = content.len().min(start + skipped + 1);
        self.row += rows(&content[self.start..end]).count().saturating_sub(1) as u64;
        self.start = start + skipped;
        self.row
    }
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

/// The number, from 1, of the row that a record starting at this byte stands in; line breaks before it are
/// not its own.
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

/// Whether the row ends within quotes. CSV lets the field go on in the next line then, but no sample file has
/// such fields: a quote too many would swallow rows.
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

/// The samples of a file and, where it has such columns, what each tensor of parameters adds to ‖g‖².
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampleTable {
    /// The samples, in the order of the rows.
    pub samples: Vec<Sample>,
    /// Names of the tensors that have a column `sq_grad_norm:<name>`, in the order of the columns.
    pub tensors: Vec<String>,
    /// For each sample the squared gradient norms ‖g_k‖² of the tensors, in their order.
    pub sq_grad_norms: Vec<Vec<f64>>,
    /// For each sample its row (line of the file, from 1); empty where the samples come from no file.
    pub rows: Vec<u64>,
}

/// Samples that come from no file, without norms of tensors.
impl From<Vec<Sample>> for SampleTable {
    fn from(samples: Vec<Sample>) -> Self {
        let sq_grad_norms = vec![Vec::new(); samples.len()];
        SampleTable { samples, sq_grad_norms, ..Default::default() }
    }
}

impl SampleTable {
    /// Reads samples from CSV.
    ///
    /// Columns by name, in any order: `loss`; `grad_norm`, or `sq_grad_norm` in place of it; `batchsize`; any
    /// number of `sq_grad_norm:<tensor>`. Others are ignored.
    ///
    /// # Errors
    /// [`Error::Io`] when the file can't be read; [`Error::File`] when it is no regular file, or with row
    /// (line of the file, from 1) and column for a missing column or one that is there twice, a row with too
    /// few or too many fields or a quote left open, a value that is not a number or not finite, a negative
    /// norm, a loss or norm beyond 1e60, a batch size that is not a whole number of at least 1, a last row
    /// that may be cut off.
    pub fn read(path: &Path) -> Result<Self> {
        let Parsed { samples, sq_grad_norms, columns, rows, .. } =
            parse(path, &read_regular(path)?, CutOff::Refuse)?;
        Ok(SampleTable {
            samples,
            tensors: columns.tensors().map(String::from).collect(),
            sq_grad_norms,
            rows,
        })
    }

    /// The statistics of all samples, with those of the tensors.
    ///
    /// # Errors
    /// Those of [`SampleStatistics::push_tensors`]; none for a table that was read from a file.
    pub fn statistics(&self) -> Result<SampleStatistics> {
        self.statistics_of(|_| true)
    }

    /// The statistics of some samples, by their place.
    pub(super) fn statistics_of(&self, take: impl Fn(usize) -> bool) -> Result<SampleStatistics> {
        let mut statistics = SampleStatistics::new();
        let all = self.samples.iter().zip(&self.sq_grad_norms).enumerate();
        for (_, (sample, sq_grad_norms)) in all.filter(|&(index, _)| take(index)) {
            let names = self.tensors.iter().map(String::as_str);
            statistics.push_tensors(sample, names.zip(sq_grad_norms.iter().copied()))?;
        }
        Ok(statistics)
    }
}

/// The [samples](SampleTable::samples) of a file.
///
/// # Errors
/// Those of [`SampleTable::read`].
pub fn read_samples(path: &Path) -> Result<Vec<Sample>> {
    Ok(SampleTable::read(path)?.samples)
}
