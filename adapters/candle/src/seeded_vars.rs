//! Variables that are initialised from a seeded generator.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::VarBuilder;
use candle_nn::init::{Init, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use crate::parameter::Parameter;

/// Named variables in the order in which a network asks for them, drawn from a generator of the caller's: the
/// generator of candle's CPU device can't be seeded, so a [`VarMap`](candle_nn::VarMap) gives other variables
/// in every run.
///
/// Numbers are drawn in f32 and converted to the variable's format.
#[derive(Clone, Debug)]
pub struct SeededVars(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    rng: ChaCha8Rng,
    parameters: Vec<Parameter>,
    /// Places in the list, by name.
    places: HashMap<String, usize>,
}

impl SeededVars {
    /// No variables yet; they are to be drawn from `rng`.
    pub fn new(rng: ChaCha8Rng) -> Self {
        SeededVars(Arc::new(Mutex::new(Inner { rng, parameters: Vec::new(), places: HashMap::new() })))
    }

    /// A builder that makes variables here.
    pub fn builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// The variables made so far, in that order.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.lock().parameters.clone()
    }

    /// The generator as the variables have left it, to go on with.
    pub fn rng(&self) -> ChaCha8Rng {
        self.lock().rng.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for SeededVars {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut inner = self.lock();
        if let Some(&place) = inner.places.get(name) {
            let found = &inner.parameters[place].var;
            if found.shape() != &shape {
                bail!("variable `{name}` has shape {:?}, not {:?}", found.dims(), shape.dims());
            }
            return Ok(found.as_tensor().clone());
        }
        let values = draw(init, &shape, &mut inner.rng);
        let var = Var::from_tensor(
            &Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?,
        )?;
        let place = inner.parameters.len();
        inner.places.insert(name.to_owned(), place);
        inner.parameters.push(Parameter::new(name, var.clone()));
        Ok(var.into_inner())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        bail!("variable `{name}` was asked for without a shape; new variables need one: use `get`")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().places.contains_key(name)
    }
}

/// Values by the rule, which is candle's.
fn draw(init: Init, shape: &Shape, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let count = shape.elem_count();
    match init {
        Init::Const(value) => vec![value as f32; count],
        Init::Uniform { lo, up } => {
            let (centre, reach) = ((0.5 * (lo + up)) as f32, (0.5 * (up - lo)) as f32);
            (0..count).map(|_| centre + (2.0 * rng.random::<f32>() - 1.0) * reach).collect()
        }
        Init::Randn { mean, stdev } => {
            let mut normal = || -> f32 { StandardNormal.sample(rng) };
            (0..count).map(|_| mean as f32 + normal() * stdev as f32).collect()
        }
        Init::Kaiming { dist, fan, non_linearity } => {
            let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            let reach = 3_f64.sqrt() * deviation;
            let init = match dist {
                NormalOrUniform::Uniform => Init::Uniform { lo: -reach, up: reach },
                NormalOrUniform::Normal => Init::Randn { mean: 0.0, stdev: deviation },
            };
            draw(init, shape, rng)
        }
    }
}
