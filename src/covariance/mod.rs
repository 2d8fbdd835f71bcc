//! STUB
use crate::{Moments, Result};
#[derive(Clone, Debug)] pub struct Model { m: Moments, s: f64 }
#[derive(Clone, Copy, Debug)] pub enum Family { SquaredExponential, Matern32, Matern52, RationalQuadratic { beta: f64 } }
#[derive(Clone, Copy, Debug)] pub struct Observation { pub loss: f64, pub grad_norm: f64, pub inv_batch_size: f64 }
#[derive(Clone, Copy, Debug, PartialEq, Default)] #[allow(missing_docs)] pub struct StepRule { pub conservatism: f64 }
impl StepRule { pub fn validate(&self) -> Result<()> { Ok(()) } }
#[derive(Clone, Copy, Debug)] pub struct Step { pub step_size: f64, pub theta: f64 }
#[derive(Clone, Copy, Debug)] pub enum NoStep { NonFiniteLoss, NonFiniteGradient, ZeroGradient }
impl Model {
  pub fn new(_f: Family, m: Moments) -> Result<Model> { Ok(Model{ m, s: (m.variance*m.dims as f64/m.grad_variance).sqrt() }) }
  pub fn step(&self, o: &Observation, _r: &StepRule) -> std::result::Result<Step, NoStep> {
    if !o.loss.is_finite() { return Err(NoStep::NonFiniteLoss) } if !o.grad_norm.is_finite() { return Err(NoStep::NonFiniteGradient) } if o.grad_norm==0.0 { return Err(NoStep::ZeroGradient) }
    let b=(self.m.mean-o.loss).max(0.0); let a=self.s*o.grad_norm; let m=a.max(b); let (a,b)=(a/m,b/m);
    Ok(Step{ step_size: self.s*a/((b*b/4.0+a*a).sqrt()+b/2.0), theta: o.grad_norm/b })
  }
}
