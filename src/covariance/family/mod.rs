//! The built-in covariances, one file each, and their names.

mod matern32;
mod matern52;
mod rational_quadratic;
mod special;
mod squared_exponential;

pub use matern32::Matern32;
pub use matern52::Matern52;
pub use rational_quadratic::RationalQuadratic;
pub use squared_exponential::SquaredExponential;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Covariance, Profile, VANISHED};
use crate::{Error, Result};

/// Their numbers that the kernels have too.
pub(crate) mod shared {
    pub(crate) use super::matern32::SQRT_3;
    pub(crate) use super::matern52::SQRT_5;
    pub(crate) use super::rational_quadratic::NEWTON_ITERATIONS;
}

/// The built-in covariances (paper, appendix "Covariance models").
///
/// As text: `squared_exponential` (or `se`), `rational_quadratic:β` (or `rq:β`; β is 1 when left out),
/// `matern:1.5` (or `matern32`), `matern:2.5` (or `matern52`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Family {
    /// [`SquaredExponential`].
    SquaredExponential,
    /// [`RationalQuadratic`].
    RationalQuadratic {
        /// The weight of the tails; positive and finite.
        beta: f64,
    },
    /// [`Matern32`].
    Matern32,
    /// [`Matern52`].
    Matern52,
}

impl Family {
    /// The covariance itself; an error if β is not positive and finite.
    pub fn covariance(self) -> Result<Arc<dyn Covariance>> {
        Ok(match self {
            Family::SquaredExponential => Arc::new(SquaredExponential),
            Family::RationalQuadratic { beta } => Arc::new(RationalQuadratic::new(beta)?),
            Family::Matern32 => Arc::new(Matern32),
            Family::Matern52 => Arc::new(Matern52),
        })
    }
}

/// Gives each family the number that is its place in the list.
macro_rules! numbers {
    ($($family:ident),* $(,)?) => {
        impl Family {
            /// The names of all families, each at the place that is its number.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($family)),*];

            /// Its number in the kernels.
            pub(crate) fn number(self) -> u32 {
                enum Number { $($family),* }
                match self {
                    $(Family::$family { .. } => Number::$family as u32),*
                }
            }
        }
    };
}
numbers!(SquaredExponential, RationalQuadratic, Matern32, Matern52);

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Family::SquaredExponential => f.write_str("squared_exponential"),
            // {:?} is the shortest text that reads back to the same number, with an exponent where that is
            // shorter.
            Family::RationalQuadratic { beta } => write!(f, "rational_quadratic:{beta:?}"),
            Family::Matern32 => f.write_str("matern:1.5"),
            Family::Matern52 => f.write_str("matern:2.5"),
        }
    }
}

impl FromStr for Family {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = |expected: &str| Err(Error::invalid("covariance model", text, expected));
        let (name, shape) = match text.split_once(':') {
            Some((name, shape)) => (name, Some(shape)),
            None => (text, None),
        };
        match (name, shape) {
            ("squared_exponential" | "se", None) => Ok(Family::SquaredExponential),
            ("squared_exponential" | "se", Some(_)) => {
                unknown("the squared exponential has no shape parameter")
            }
            ("rational_quadratic" | "rq", shape) => match shape.unwrap_or("1").parse() {
                Ok(beta) => RationalQuadratic::new(beta).map(|_| Family::RationalQuadratic { beta }),
                Err(_) => unknown("the β after the colon must be a number, e.g. rational_quadratic:1"),
            },
            ("matern32", None) => Ok(Family::Matern32),
            ("matern52", None) => Ok(Family::Matern52),
            ("matern", Some(shape)) => match shape.parse() {
                Ok(1.5) => Ok(Family::Matern32),
                Ok(2.5) => Ok(Family::Matern52),
                _ => {
                    unknown("the Matérn model is built in for ν = 1.5 and 2.5 only: matern:1.5 or matern:2.5")
                }
            },
            _ => unknown(
                "must be one of squared_exponential (se), rational_quadratic:BETA (rq:BETA), matern:1.5 (matern32), \
                 matern:2.5 (matern52)",
            ),
        }
    }
}

impl From<Family> for String {
    fn from(family: Family) -> Self {
        family.to_string()
    }
}

impl TryFrom<String> for Family {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}
