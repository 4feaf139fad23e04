//! Adam with decoupled weight decay (Loshchilov and Hutter, 1711.05101), computed as PyTorch's `AdamW` does.
//!
//! One pass reads gradient, both moments and parameter, and writes the last three and the rounded copy for compute,
//! so that a step moves each byte once.

use moeworks_tensor::{Tensor, bf16};

use crate::Context;
use crate::cuda::{self, On};
use crate::parallel::{Lent, PIECE, piece_range};
use crate::simd::{Float, kernel, with_float};

/// The settings of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment, the mean of gradients.
    pub beta1: f64,
    /// Decay of the second moment, the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay: the parameter is first multiplied by `1 - lr * weight_decay`.
    pub weight_decay: f64,
    /// The number of this step, from 1, for the bias correction of the moments.
    pub step: u64,
    /// Factor of the gradient as it is read: that of clipping, or one over the number of accumulated batches.
    pub grad_scale: f32,
}

/// The tensors of a step, all of one size, and f32 except for the gradient.
pub struct AdamWTensors<'a> {
    /// The parameter; updated.
    pub param: &'a mut Tensor,
    /// Its gradient, f32 or bf16.
    pub grad: &'a Tensor,
    /// The first moment; updated. Zeros before the first step.
    pub m: &'a mut Tensor,
    /// The second moment; updated. Zeros before the first step.
    pub v: &'a mut Tensor,
    /// A bf16 copy of the updated parameter, if wanted.
    pub compute: Option<&'a mut Tensor>,
}

/// Performs one AdamW step on one parameter.
pub fn adamw(ctx: &Context, step: &AdamWStep, tensors: AdamWTensors<'_>) {
    let len = tensors.param.len();
    let lens = (tensors.grad.len(), tensors.m.len(), tensors.v.len());
    assert_eq!(lens, (len, len, len), "adamw: tensors for a parameter {:?}", tensors.param.shape());
    let has_room = tensors.compute.as_ref().is_none_or(|compute| compute.len() == len);
    assert!(has_room, "adamw: the copy of a parameter {:?}", tensors.param.shape());
    let factors = Factors::new(step);
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::adamw(on, &factors, tensors);
    }
    let AdamWTensors { param, grad, m, v, compute } = tensors;
    let has_copy = compute.is_some();
    let mut empty: [bf16; 0] = [];
    let compute = compute.map_or(&mut empty[..], |compute| compute.bf16s_mut());
    let (param, m, v) = (Lent::new(param.f32s_mut()), Lent::new(m.f32s_mut()), Lent::new(v.f32s_mut()));
    let compute = Lent::new(compute);
    with_float!(grad.dtype(), G => {
        let grad = grad.slice::<G>();
        ctx.threads().run(len.div_ceil(PIECE), |task| {
            let range = piece_range(task, PIECE, len);
            // SAFETY: the tasks' ranges do not overlap.
            let (param, m, v) = unsafe { (param.range(range.clone()), m.range(range.clone()), v.range(range.clone())) };
            step_kernel::<G>(ctx.isa(), &factors, param, &grad[range.clone()], m, v);
            if has_copy {
                // SAFETY: as above.
                let compute = unsafe { compute.range(range) };
                round_kernel(ctx.isa(), param, compute);
            }
        });
    });
}

/// The coefficients of a step, computed once in f64.
pub(crate) struct Factors {
    pub(crate) grad_scale: f32,
    pub(crate) keep: f32,
    pub(crate) beta1: f32,
    pub(crate) one_minus_beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) one_minus_beta2: f32,
    pub(crate) inv_root_correction2: f32,
    pub(crate) eps: f32,
    pub(crate) step_size: f32,
}

impl Factors {
    fn new(step: &AdamWStep) -> Self {
        let power = i32::try_from(step.step).unwrap_or(i32::MAX);
        let (correction1, correction2) = (1.0 - step.beta1.powi(power), 1.0 - step.beta2.powi(power));
        Self {
            grad_scale: step.grad_scale,
            keep: (1.0 - step.lr * step.weight_decay) as f32,
            beta1: step.beta1 as f32,
            one_minus_beta1: (1.0 - step.beta1) as f32,
            beta2: step.beta2 as f32,
            one_minus_beta2: (1.0 - step.beta2) as f32,
            inv_root_correction2: (1.0 / correction2.sqrt()) as f32,
            eps: step.eps as f32,
            step_size: (step.lr / correction1) as f32,
        }
    }
}

kernel! {
    fn step_kernel<S: Level, G: Float>(factors: &Factors, param: &mut [f32], grad: &[G], m: &mut [f32], v: &mut [f32]) {
        let Factors { grad_scale, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, .. } = *factors;
        let Factors { inv_root_correction2, eps, step_size, .. } = *factors;
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
            let g = g.load() * grad_scale;
            *m = S::mul_add(*m, beta1, g * one_minus_beta1);
            *v = S::mul_add(*v, beta2, g * g * one_minus_beta2);
            let root = S::mul_add(v.sqrt(), inv_root_correction2, eps);
            *p = *p * keep - step_size * (*m / root);
        }
    }
}

kernel! {
    fn round_kernel<S: Level>(x: &[f32], y: &mut [bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = bf16::store(*x);
        }
    }
}
