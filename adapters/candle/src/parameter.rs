//! Variables with the names that errors and saved states know them by.

use std::sync::PoisonError;

use candle_core::{Result, Var};
use candle_nn::VarMap;
use rfdescent::optimizer::TensorSpec;

use crate::error;
use crate::storage::format;

/// A variable to train.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Unique name, for errors and saved states.
    pub name: String,
    /// Its value.
    pub var: Var,
    /// Index into [`Options::groups`](rfdescent::optimizer::Options::groups).
    pub group: usize,
}

impl Parameter {
    /// A variable in group 0.
    pub fn new(name: impl Into<String>, var: Var) -> Self {
        Self { name: name.into(), var, group: 0 }
    }

    /// The same variable in another group.
    pub fn in_group(self, group: usize) -> Self {
        Self { group, ..self }
    }

    pub(crate) fn spec(&self) -> Result<TensorSpec> {
        let dtype = self.var.dtype();
        let Some(format) = format(dtype) else {
            let problem = format!("is {}; make it f32, f64, f16 or bf16", dtype.as_str());
            return Err(error::tensor(&self.name, problem));
        };
        Ok(TensorSpec::new(&self.name, self.var.dims(), format).in_group(self.group))
    }
}

/// The variables of a map, sorted by name: the map itself has no order, and the bits of a step depend on it.
pub fn parameters(map: &VarMap) -> Vec<Parameter> {
    let vars = map.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut all: Vec<Parameter> = vars.iter().map(|(name, var)| Parameter::new(name, var.clone())).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}
