//! Samples as CSV: `loss,grad_norm,batchsize,time` and `sq_grad_norm:<tensor>`, in any order, further columns
//! ignored; with the separators and spellings that tools have where they leave no doubt.

use super::statistics::{LARGEST_NORM, Sample, SampleStatistics};
use crate::files::read_regular;
use crate::tables::{
    Layout, comment, is_break, not_a_number, not_text, row_at, rows, rows_at, same_name, whole, whole_number,
};
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
    layout: Layout,
    loss: usize,
    grad_norm: GradNormColumn,
    batch_size: usize,
    /// The columns of ‖g_k‖², in the order of the file, with the tensors' names.
    tensors: Vec<(usize, String)>,
    /// What belongs into each column of a new row.
    cells: Vec<Cell>,
    line_break: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum GradNormColumn {
    Norm(usize),
    Squared(usize),
}

#[derive(Clone, Copy, Debug)]
enum Cell {
    Loss,
    Norm,
    SquaredNorm,
    BatchSize,
    Time,
    Tensor,
    Empty,
}

/// What a header must name, each by one of these.
const WANTED: [&[&str]; 3] = [&["loss"], &["grad_norm", "sq_grad_norm"], &["batchsize"]];

impl Columns {
    fn new(layout: Layout, line_break: &'static str) -> std::result::Result<Self, String> {
        let row = layout.row;
        let missing = |wanted: &str| {
            let seen = layout.listed();
            format!(
                "row {row} has no column `{wanted}`: the header must name loss, grad_norm (or sq_grad_norm) and \
                 batchsize, and this one names {seen}"
            )
        };
        let tensor = |(k, name): (usize, &String)| Some((k, tensor_of(name)?.to_string()));
        let tensors: Vec<(usize, String)> = layout.names.iter().enumerate().filter_map(tensor).collect();
        let mut seen = HashSet::new();
        for (_, name) in &tensors {
            if name.is_empty() {
                return Err(format!(
                    "row {row} has a column `{TENSOR}` without a tensor: complete its name or delete it"
                ));
            }
            if !seen.insert(name) {
                return Err(format!(
                    "row {row} names column `{TENSOR}{name}` more than once: rename or delete all but one"
                ));
            }
        }
        let (norm, squared) = (layout.column("grad_norm")?, layout.column("sq_grad_norm")?);
        let grad_norm = squared.map(GradNormColumn::Squared).or_else(|| norm.map(GradNormColumn::Norm));
        let grad_norm = grad_norm.ok_or_else(|| missing("grad_norm"))?;
        let loss = layout.column("loss")?.ok_or_else(|| missing("loss"))?;
        let batch_size = layout.column("batchsize")?.ok_or_else(|| missing("batchsize"))?;
        let mut cells = vec![Cell::Empty; layout.names.len()];
        // Nothing reads the times: of several columns none is filled.
        let time = layout.column("time").unwrap_or(None);
        for (column, cell) in [(norm, Cell::Norm), (squared, Cell::SquaredNorm), (time, Cell::Time)] {
            column.into_iter().for_each(|k| cells[k] = cell);
        }
        tensors.iter().for_each(|&(k, _)| cells[k] = Cell::Tensor);
        (cells[loss], cells[batch_size]) = (Cell::Loss, Cell::BatchSize);
        Ok(Columns { layout, loss, grad_norm, batch_size, tensors, cells, line_break })
    }

    /// The last column with a value that a fit uses: if nothing follows it in a cut-off line, it may have
    /// lost digits.
    fn last_used(&self) -> usize {
        let (GradNormColumn::Norm(grad_norm) | GradNormColumn::Squared(grad_norm)) = self.grad_norm;
        let last = self.loss.max(grad_norm).max(self.batch_size);
        self.tensors.iter().map(|&(column, _)| column).fold(last, usize::max)
    }

    /// The tensors that have a column, in the order of the file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.iter().map(|(_, name)| name.as_str())
    }

    /// The sample and ‖g_k‖² of each tensor that has a column.
    fn parse(&self, record: &csv::StringRecord) -> std::result::Result<(Sample, Vec<f64>), String> {
        let names = &self.layout.names;
        if record.len() != names.len() {
            return Err(format!(
                "{} fields where the header has {}: complete or delete the row",
                record.len(),
                names.len()
            ));
        }
        let number = |column: usize| {
            let (text, name) = (record[column].trim(), &names[column]);
            let wrong = |expected: &str| format!("column `{name}`: `{text}` {expected}");
            match text.parse::<f64>() {
                Ok(value) if value.is_finite() => Ok(value),
                Ok(_) => Err(wrong("is not finite: delete the row or draw the sample again")),
                Err(_) => Err(wrong(not_a_number(text))),
            }
        };
        let not_negative = |column: usize| match number(column)? {
            value if value < 0.0 => {
                Err(format!("column `{}`: {value} is negative, a norm is at least 0", names[column]))
            }
            value => Ok(value),
        };
        let loss = number(self.loss)?;
        let sq_grad_norm = match self.grad_norm {
            GradNormColumn::Squared(column) => not_negative(column)?,
            GradNormColumn::Norm(column) => match not_negative(column)? {
                norm if norm > LARGEST_NORM => {
                    let name = &names[column];
                    return Err(format!(
                        "column `{name}`: {norm:e} must be at most {LARGEST_NORM:e}; divide the loss by a constant"
                    ));
                }
                norm => norm.powi(2),
            },
        };
        let text = record[self.batch_size].trim();
        let batch_size = match whole_number(text) {
            Ok(0) => Err("is too small"),
            other => other,
        };
        let batch_size = batch_size.map_err(|problem| {
            format!("column `{}`: `{text}` {problem}; a batch has at least 1 example", names[self.batch_size])
        })?;
        let sample = Sample { loss, sq_grad_norm, batch_size };
        sample.validate().map_err(|e| e.to_string())?;
        let of_tensor = |&(column, _): &(usize, String)| match not_negative(column)? {
            square if square > LARGEST_NORM.powi(2) => Err(format!(
                "column `{}`: {square:e} must be at most 1e120; divide the loss by a constant",
                names[column]
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
        let fields = self.cells.iter().map(|cell| match cell {
            Cell::Loss => format!("{loss:?}"),
            Cell::Norm => format!("{grad_norm:?}"),
            Cell::SquaredNorm => format!("{:?}", grad_norm.powi(2)),
            Cell::BatchSize => batch_size.to_string(),
            Cell::Time => format!("{time:?}"),
            Cell::Tensor => sq_grad_norms.next().map_or(String::new(), |square| format!("{square:?}")),
            Cell::Empty => String::new(),
        });
        fields.collect::<Vec<_>>().join(&self.separator()) + self.line_break
    }

    fn separator(&self) -> String {
        char::from(self.layout.separator).to_string()
    }
}

/// The tensor whose squared norms stand in a column of this name.
fn tensor_of(column: &str) -> Option<&str> {
    let (name, tensor) = column.split_once(':')?;
    same_name(name, "sq_grad_norm").then(|| tensor.trim())
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
    let unreadable = |error: csv::Error| problem(not_text(content, &error));
    let Some(layout) = Layout::find(content, &WANTED).map_err(unreadable)? else {
        return Err(problem("row 1: the header loss,grad_norm,batchsize,time is missing".into()));
    };
    if let Some(row) = rows(content).position(|line| leaves_quote_open(line, layout.separator)) {
        let row = row + 1;
        return Err(problem(format!("row {row}: a quote is opened and not closed: close or delete it")));
    }
    let (header_row, header_ended, width) = (layout.row, layout.ended, layout.names.len());
    let mut reader = layout.reader(content);
    let columns = Columns::new(layout, line_break(content)).map_err(problem)?;
    if cut_off == CutOff::Mend && !header_ended {
        return Err(problem(format!(
            "row {header_row}: the header may be cut off: complete it and end it with a line break"
        )));
    }
    // Left out, it would be missed by those whose first column, which no fit needs, starts with #.
    let sample_in = |line| columns.layout.row_in_comment(line).is_some_and(|row| columns.parse(&row).is_ok());
    if let Some(row) = rows(content).position(sample_in) {
        let row = row + 1;
        return Err(problem(format!(
            "row {row}: a comment, as it starts with #, but it holds a sample: delete the row, or the #"
        )));
    }

    let whole = whole(content);
    let mut parsed = Parsed {
        samples: Vec::new(),
        sq_grad_norms: Vec::new(),
        rows: Vec::new(),
        columns,
        length: content.len(),
        completion: String::new(),
    };
    let mut record = csv::StringRecord::new();
    let mut starts = Vec::new();
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
            let missing = width.saturating_sub(record.len());
            (0..missing).for_each(|_| record.push_field(""));
            parsed.completion = columns.separator().repeat(missing) + columns.line_break;
        }
        let (sample, sq_grad_norms) =
            columns.parse(&record).map_err(|what| problem(format!("row {}: {what}", row())))?;
        if !has_break && cut_off == CutOff::Refuse && columns.last_used() + 1 == width {
            let (row, name) = (row(), &columns.layout.names[width - 1]);
            return Err(problem(format!(
                "row {row}: the file ends without a line break, so `{name}` may be cut off: complete the row and end \
                 it with a line break, or delete it"
            )));
        }
        parsed.samples.push(sample);
        parsed.sq_grad_norms.push(sq_grad_norms);
        starts.push(start);
    }
    parsed.rows = rows_at(content, &starts);
    if comment(&content[whole..]).is_some() {
        // Rows to come would belong to it.
        parsed.completion = parsed.columns.line_break.into();
    }
    Ok(parsed)
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
fn leaves_quote_open(row: &[u8], separator: u8) -> bool {
    if comment(row).is_some() {
        return false;
    }
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
        (_, byte) if byte == separator => At::Start,
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
    /// number of `sq_grad_norm:<tensor>`. Others are ignored. Upper case and `_`, `-` or blanks within a name
    /// count only where several columns differ in nothing else (`Batch_Size` is `batchsize`). Fields are
    /// separated by commas, semicolons or tabs. Lines that start with `#` are comments; the header may be one
    /// of them, as numpy writes it. Batch sizes may have a point or an exponent (`16.0`, `1.6e+01`).
    ///
    /// # Errors
    /// [`Error::Io`] when the file can't be read; [`Error::File`] when it is no regular file, or with row
    /// (line of the file, from 1) and column for a missing column or one that is there twice, a row with too
    /// few or too many fields or a quote left open, a comment that holds a sample, a value that is not a
    /// number or not finite, a negative norm, a loss or norm beyond 1e60, a batch size that is not a whole
    /// number of at least 1, a last row that may be cut off.
    pub fn read(path: &Path) -> Result<Self> {
        Self::from_csv(&read_regular(path)?, path)
    }

    /// The same from the content of a file; `name` is what errors call it.
    ///
    /// # Errors
    /// [`Error::File`] of [`read`](Self::read).
    pub fn from_csv(content: &[u8], name: &Path) -> Result<Self> {
        let Parsed { samples, sq_grad_norms, columns, rows, .. } = parse(name, content, CutOff::Refuse)?;
        let tensors = columns.tensors().map(String::from).collect();
        Ok(SampleTable { samples, tensors, sq_grad_norms, rows })
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
