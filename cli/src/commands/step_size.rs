//! `rfdescent step-size`: the step size for one observation, or for each row of a table.

use std::path::{Path, PathBuf};

use rfdescent::covariance::{Family, Model, NoStep, Observation, Step, StepMode, StepRule};
use rfdescent::tables::{self, Layout, whole_number};
use rfdescent::{Error, Moments};
use serde_json::{Map, Value, json};

use crate::error::CliError;
use crate::input;
use crate::numbers::{short, shortened, whole};
use crate::terminal::print;

/// Step sizes from a fitted model, or for the models and observations of a table.
#[derive(Debug, clap::Args)]
pub struct StepSizeArgs {
    /// A CSV file with the columns model, shape, mean, variance, noise_variance, grad_variance,
    /// noise_grad_variance, dims, loss, grad_norm, inv_batch_size, conservatism; it is printed with
    /// length_scale and step_size filled in. Semicolons or tabs may separate the columns, lines that start
    /// with # are comments, the file may be gzipped, and - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model_file", "loss", "grad_norm", "batch_size", "mode", "conservatism"])]
    table: Option<PathBuf>,

    /// A fitted model, as `rfdescent fit --output` writes it, or - for standard input.
    #[arg(long, value_name = "FILE", required_unless_present = "table")]
    model_file: Option<PathBuf>,

    /// The mini-batch loss.
    #[arg(long, allow_hyphen_values = true, required_unless_present = "table")]
    loss: Option<f64>,

    /// The norm of its gradient.
    #[arg(long, allow_hyphen_values = true, required_unless_present = "table")]
    grad_norm: Option<f64>,

    /// The number of examples in the batch, for S-RFD [default: loss and gradient count as noiseless]
    #[arg(long, allow_hyphen_values = true, value_parser = whole::<u64>(0..=u64::MAX))]
    batch_size: Option<u64>,

    /// 0 minimises the expected cost, values up to 1 the upper end of a confidence interval.
    #[arg(long, allow_hyphen_values = true, default_value_t = 0.0)]
    conservatism: f64,

    /// rfd, a-rfd or clipped-a-rfd.
    #[arg(long, default_value_t)]
    mode: StepMode,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command; prints nothing unless all of it succeeds.
pub fn run(args: &StepSizeArgs) -> Result<(), CliError> {
    let text = match args {
        StepSizeArgs { table: Some(path), json, .. } => {
            let table = Table::read(path)?;
            if *json { table.to_json() } else { table.to_csv() }
        }
        StepSizeArgs { model_file: Some(path), loss: Some(loss), grad_norm: Some(grad_norm), .. } => {
            let rule = StepRule { mode: args.mode, conservatism: args.conservatism };
            single(path, *loss, *grad_norm, args.batch_size, rule, args.json)?
        }
        _ => {
            return Err(CliError::Usage(
                "step-size: give --table FILE, or --model-file, --loss and --grad-norm".into(),
            ));
        }
    };
    print(&text)
}

/// A gradient of 0 leaves the parameters where they are.
fn step(model: &Model, observation: &Observation, rule: &StepRule) -> Result<Step, Wrong> {
    let &Observation { loss, grad_norm, .. } = observation;
    let wrong = |column: &str, value: f64, problem: &dyn std::fmt::Display| {
        Err(Wrong::new(column, format!("{}: {problem}", short(value))))
    };
    if grad_norm < 0.0 {
        return wrong("grad_norm", grad_norm, &"a norm must not be negative");
    }
    match model.step(observation, rule) {
        Ok(step) => Ok(step),
        Err(NoStep::ZeroGradient) => Ok(Step { step_size: 0.0, theta: 0.0 }),
        Err(reason @ NoStep::NonFiniteLoss) => wrong("loss", loss, &reason),
        Err(reason) => wrong("grad_norm", grad_norm, &reason),
    }
}

fn single(
    path: &Path,
    loss: f64,
    grad_norm: f64,
    batch_size: Option<u64>,
    rule: StepRule,
    as_json: bool,
) -> Result<String, CliError> {
    if batch_size == Some(0) {
        return Err(CliError::Usage("--batch-size 0: must be at least 1".into()));
    }
    let wrong =
        |Wrong { column, problem }| CliError::Usage(format!("--{} {problem}", column.replace('_', "-")));
    rule.validate().map_err(Wrong::from).map_err(wrong)?;
    let model = model(path)?;
    let observation =
        Observation { loss, grad_norm, inv_batch_size: batch_size.map_or(0.0, |b| 1.0 / b as f64) };
    let step = step(&model, &observation, &rule).map_err(wrong)?;
    let results = [
        ("step_size", Some(step.step_size)),
        // Without a gradient there is no rate.
        ("learning_rate", (grad_norm > 0.0).then(|| step.learning_rate(grad_norm))),
        ("theta", Some(step.theta)),
        ("length_scale", Some(model.length_scale())),
        ("plateau_step_size", Some(model.plateau_step_size())),
    ];
    if as_json {
        // An infinite Θ becomes null.
        let object: Map<String, Value> =
            results.into_iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        return Ok(format!("{:#}\n", Value::Object(object)));
    }
    let lines = results.into_iter().map(|(name, value)| match value {
        Some(value) => format!("{name:<18} {value:?}\n"),
        None => format!("{name:<18} none\n"),
    });
    Ok(lines.collect())
}

fn model(path: &Path) -> Result<Model, CliError> {
    if !input::is_standard(path) {
        return Ok(Model::load(path)?);
    }
    let unfit = |problem: &dyn std::fmt::Display| CliError::file(input::name(path), problem);
    let json = String::from_utf8(input::read(path)?).map_err(|_| unfit(&"not a text in UTF-8"))?;
    Model::from_json(&json).map_err(|error| match error {
        Error::File { problem, .. } => unfit(&problem),
        error => unfit(&error),
    })
}

/// What a table must have.
const COLUMNS: [&str; 12] = [
    "model",
    "shape",
    "mean",
    "variance",
    "noise_variance",
    "grad_variance",
    "noise_grad_variance",
    "dims",
    "loss",
    "grad_norm",
    "inv_batch_size",
    "conservatism",
];

/// A table with the two columns filled in.
struct Table {
    separator: u8,
    headers: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Where the column of the dimensions is.
    dims: usize,
}

impl Table {
    fn read(path: &Path) -> Result<Table, CliError> {
        let content = input::read(path)?;
        let path = input::name(path);
        let unreadable = |error: csv::Error| CliError::file(path, tables::not_text(&content, &error));
        let wanted = COLUMNS.map(|column| [column]);
        let wanted: Vec<&[&str]> = wanted.iter().map(|names| &names[..]).collect();
        let Some(layout) = Layout::find(&content, &wanted).map_err(unreadable)? else {
            return Err(CliError::file(
                path,
                format!("empty; its first row must name {}", COLUMNS.join(", ")),
            ));
        };
        let column = |name: &str| {
            layout.column(name).map_err(|problem| CliError::file(path, problem))?.ok_or_else(|| {
                let problem = format!(
                    "row {}: no column `{name}`; the header must name {}, and this one names {}",
                    layout.row,
                    COLUMNS.join(", "),
                    layout.listed()
                );
                CliError::file(path, problem)
            })
        };
        let columns = COLUMNS.iter().map(|name| Ok((*name, column(name)?)));
        let columns: Vec<(&str, usize)> = columns.collect::<Result<_, CliError>>()?;
        let mut headers = layout.names.clone();
        let given = headers.len();
        let mut filled = |name: &str| {
            let there = layout.column(name).map_err(|problem| CliError::file(path, problem))?;
            Ok::<_, CliError>(there.unwrap_or_else(|| {
                headers.push(name.into());
                headers.len() - 1
            }))
        };
        let (length_scale_at, step_size_at) = (filled("length_scale")?, filled("step_size")?);
        let mut rows = Vec::new();
        for record in layout.reader(&content).records() {
            let record = record.map_err(unreadable)?;
            let start = record.position().map_or(0, csv::Position::byte);
            let fail = |problem: &str| {
                CliError::file(path, format!("row {}: {problem}", tables::row_at(&content, start)))
            };
            if record.len() != given {
                return Err(fail(&format!("{} fields where the header has {given}", record.len())));
            }
            let mut cells: Vec<String> = record.iter().map(|cell| cell.trim().to_string()).collect();
            cells.resize(headers.len(), String::new());
            let (length_scale, step_size) = Row { columns: &columns, cells: &cells }
                .evaluate()
                .map_err(|Wrong { column, problem }| fail(&format!("column `{column}`: {problem}")))?;
            // The shortest text that reads back to the same number.
            cells[length_scale_at] = format!("{length_scale:?}");
            cells[step_size_at] = format!("{step_size:?}");
            rows.push(cells);
        }
        Ok(Table { separator: layout.separator, headers, rows, dims: column("dims")? })
    }

    fn to_csv(&self) -> String {
        let mut writer = csv::WriterBuilder::new().delimiter(self.separator).from_writer(Vec::new());
        for row in std::iter::once(&self.headers).chain(&self.rows) {
            writer
                .write_record(row)
                .expect("all rows have as many cells as the header, and memory takes them");
        }
        let bytes = writer.into_inner().expect("memory takes them");
        String::from_utf8(bytes).expect("made of strings")
    }

    fn to_json(&self) -> String {
        let cell = |(column, text): (usize, &String)| match (text.parse::<u64>(), whole_number(text)) {
            (Ok(number), _) => json!(number),
            (_, Ok(number)) if column == self.dims => json!(number),
            _ => match text.parse::<f64>() {
                Ok(number) if number.is_finite() => json!(number),
                _ if text.is_empty() => Value::Null,
                _ => json!(text),
            },
        };
        let objects = self.rows.iter().map(|row| {
            Value::Object(
                self.headers.iter().cloned().zip(row.iter().enumerate().map(cell)).collect::<Map<_, _>>(),
            )
        });
        format!("{:#}\n", Value::Array(objects.collect()))
    }
}

/// Which column, or option of the same name, is wrong and how.
struct Wrong {
    column: String,
    problem: String,
}

impl Wrong {
    fn new(column: &str, problem: impl ToString) -> Self {
        Wrong { column: column.into(), problem: problem.to_string() }
    }
}

/// The library names the argument at fault, and its names are the columns'.
impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        match error {
            Error::InvalidArgument { name, value, expected } => {
                Wrong::new(&name, format!("{}: {expected}", shortened(value)))
            }
            error => Wrong::new("model", error),
        }
    }
}

/// A row's cells under the names of [`COLUMNS`].
struct Row<'a> {
    columns: &'a [(&'a str, usize)],
    cells: &'a [String],
}

impl Row<'_> {
    fn text(&self, column: &str) -> Result<&str, Wrong> {
        match self.columns.iter().find(|(name, _)| *name == column) {
            Some(&(_, index)) => Ok(&self.cells[index]),
            None => Err(Wrong::new(column, "the table has no such column")),
        }
    }

    fn number(&self, column: &str) -> Result<f64, Wrong> {
        let text = self.text(column)?;
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(number),
            Ok(_) => Err(Wrong::new(column, format!("`{text}` is not a finite number"))),
            Err(_) => Err(Wrong::new(column, format!("`{text}` {}", tables::not_a_number(text)))),
        }
    }

    /// Length scale and step size.
    fn evaluate(&self) -> Result<(f64, f64), Wrong> {
        let (name, shape) = (self.text("model")?, self.text("shape")?);
        let full = if shape.is_empty() { name.to_string() } else { format!("{name}:{shape}") };
        let family: Family = full.parse().map_err(|error| Wrong::new("model", error))?;
        let dims = self.text("dims")?;
        let moments = Moments {
            mean: self.number("mean")?,
            variance: self.number("variance")?,
            noise_variance: self.number("noise_variance")?,
            grad_variance: self.number("grad_variance")?,
            noise_grad_variance: self.number("noise_grad_variance")?,
            dims: whole_number(dims).map_err(|problem| Wrong::new("dims", format!("`{dims}` {problem}")))?,
        };
        let observation = Observation {
            loss: self.number("loss")?,
            grad_norm: self.number("grad_norm")?,
            inv_batch_size: self.number("inv_batch_size")?,
        };
        rfdescent::covariance::validate_inv_batch_size(observation.inv_batch_size)?;
        let rule = StepRule::new(StepMode::Rfd, self.number("conservatism")?)?;
        let model = Model::new(family, moments)?;
        Ok((model.length_scale(), step(&model, &observation, &rule)?.step_size))
    }
}
