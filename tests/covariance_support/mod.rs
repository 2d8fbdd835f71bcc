//! What the covariance suites share.
#![allow(dead_code, reason = "each suite uses its part")]

use std::path::PathBuf;
use std::sync::Arc;

use rfdescent::Moments;
use rfdescent::covariance::{Covariance, Family, Observation};

/// A row of the golden table.
pub struct Row {
    /// Counted from 1 below the header.
    pub number: usize,
    pub family: Family,
    pub moments: Moments,
    pub observation: Observation,
    pub conservatism: f64,
    pub length_scale: f64,
    pub step_size: f64,
}

/// The golden table, or `None` (and a line that says so) where it is not at hand.
pub fn golden() -> Option<Vec<Row>> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/golden/step_sizes.csv"));
    if !path.exists() {
        say_skipped(format_args!("skipped: {} not found", path.display()));
        return None;
    }
    let mut reader = csv::Reader::from_path(path).unwrap();
    let headers = reader.headers().unwrap().clone();
    let rows = reader.records().enumerate().map(|(index, record)| {
        let record = record.unwrap();
        let field = |name: &str| &record[headers.iter().position(|header| header == name).unwrap()];
        let number = |name: &str| field(name).parse::<f64>().unwrap();
        let family = match field("shape") {
            "" => field("model").parse(),
            shape => format!("{}:{shape}", field("model")).parse(),
        };
        Row {
            number: index + 1,
            family: family.unwrap(),
            moments: Moments {
                mean: number("mean"),
                variance: number("variance"),
                noise_variance: number("noise_variance"),
                grad_variance: number("grad_variance"),
                noise_grad_variance: number("noise_grad_variance"),
                dims: field("dims").parse().unwrap(),
            },
            observation: Observation {
                loss: number("loss"),
                grad_norm: number("grad_norm"),
                inv_batch_size: number("inv_batch_size"),
            },
            conservatism: number("conservatism"),
            length_scale: number("length_scale"),
            step_size: number("step_size"),
        }
    });
    Some(rows.collect())
}

/// A checked-in table of reference values: the first column, then numbers.
pub fn table(name: &str) -> Vec<(Family, Vec<f64>)> {
    let path = format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"));
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_path(path).unwrap();
    let rows = reader.records().map(|record| {
        let record = record.unwrap();
        (record[0].parse().unwrap(), record.iter().skip(1).map(|field| field.parse().unwrap()).collect())
    });
    rows.collect()
}

/// A built-in covariance that shows its C, C' and C'' only, in another unit of length and with C(0) = 7.
#[derive(Debug)]
pub struct Opaque(pub Arc<dyn Covariance>);

/// The squared length of one of [`Opaque`]'s units.
pub const OPAQUE_UNIT: f64 = 9.0;

impl Covariance for Opaque {
    fn name(&self) -> String {
        "opaque".into()
    }
    fn c(&self, h: f64) -> f64 {
        7.0 * self.0.c(h / OPAQUE_UNIT)
    }
    fn dc(&self, h: f64) -> f64 {
        7.0 / OPAQUE_UNIT * self.0.dc(h / OPAQUE_UNIT)
    }
    fn ddc(&self, h: f64) -> f64 {
        7.0 / (OPAQUE_UNIT * OPAQUE_UNIT) * self.0.ddc(h / OPAQUE_UNIT)
    }
}

pub fn opaque(family: Family) -> Arc<dyn Covariance> {
    Arc::new(Opaque(family.covariance().unwrap()))
}

/// One of each family, with rational quadratics from heavy tails to nearly none.
pub fn families() -> Vec<Family> {
    let mut families = vec![Family::SquaredExponential, Family::Matern32, Family::Matern52];
    families.extend([1e-6, 0.01, 0.5, 1.0, 7.5, 1e6].map(|beta| Family::RationalQuadratic { beta }));
    families
}

pub fn relative_error(value: f64, exact: f64) -> f64 {
    if value == exact { 0.0 } else { ((value - exact) / exact).abs() }
}

/// Straight to stderr: the test runner shows what passing tests print only when asked.
fn say_skipped(what: std::fmt::Arguments<'_>) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{what}");
}
