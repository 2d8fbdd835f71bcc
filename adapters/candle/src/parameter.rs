//! Variables with the names that errors and saved states know them by.

use std::collections::HashMap;
use std::sync::PoisonError;

use candle_core::{Result, Var};
use candle_nn::VarMap;
use rfdescent::optimizer::TensorSpec;

use crate::error;
use crate::storage::{format, storage_id};

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

/// Where the memory of each variable is, by identity: an error for one that is strided, lies elsewhere than the first or
/// shares its memory with another.
pub(crate) fn distinct_storages(parameters: &[Parameter]) -> Result<HashMap<usize, usize>> {
    let mut seen = HashMap::with_capacity(parameters.len());
    for (index, Parameter { name, var, .. }) in parameters.iter().enumerate() {
        if !var.is_contiguous() {
            return Err(error::tensor(name, "is strided; make a variable of its `contiguous()` copy"));
        }
        if !var.device().same_device(parameters[0].var.device()) {
            let problem = format!(
                "lies on another device ({:?}) than `{}` ({:?}); move all variables to one device, or use an optimizer \
                 for each",
                var.device().location(),
                parameters[0].name,
                parameters[0].var.device().location()
            );
            return Err(error::tensor(name, problem));
        }
        if let Some(other) = seen.insert(storage_id(var), index) {
            let other = &parameters[other].name;
            let problem = format!("shares its memory with `{other}`; give each variable once");
            return Err(error::tensor(name, problem));
        }
    }
    Ok(seen)
}
