//! The experts of an MoE layer: rows gathered, two grouped products with the activation between, weighted combine.
//!
//! Backward needs only the pre-activation `h` and the row map (see "the layer's backward without saving expert outputs"
//! below). With `u = W2^T dy` for the row's token: `d weight = <u, a>`, `da = weight u`, `dh = act'(h) da`,
//! `dx += W1^T dh`; the weights' gradients are `dW2 += weight dy a^T` and `dW1 += dh x^T`, a task of their own.

use moeworks_tensor::{DType, Tensor};

use crate::linear::{Write, store};
use crate::{Activation, Context};

/// The stacked weights of the experts, f32 or bf16 alike. Their type decides in which precision products are taken.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// `[E, A F, D]` with `A = activation.num_inputs()`; with a gated activation the gate's F rows come first.
    pub gate_up: &'a Tensor,
    /// `[E, D, F]`.
    pub down: &'a Tensor,
    /// What stands between the two.
    pub activation: Activation,
}

/// Which rows go through which expert: R rows sorted by expert.
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    /// `[E + 1]`: expert e has rows `offsets[e]..offsets[e + 1]`; the last entry is R.
    pub offsets: &'a [u32],
    /// `[R]`: the token of each row.
    pub tokens: &'a [u32],
    /// `[R]`: the weight of each row in its token's sum.
    pub weights: &'a [f32],
    /// `[T, K]`: the row of each choice of each token, [`NO_ROW`] where the choice was dropped.
    pub token_rows: &'a [u32],
    /// K, the choices a token has.
    pub num_choices: usize,
}

/// In [`ExpertRows::token_rows`]: this choice has no row.
pub const NO_ROW: u32 = u32::MAX;

/// What backward needs of forward.
pub struct ExpertsSaved {
    /// `[R, A F]`: before the activation, in the weights' type.
    pub h: Tensor,
}

/// The result of [`experts_backward`].
pub struct ExpertsBackward {
    /// `[T, D]` f32: gradient of the input.
    pub dx: Tensor,
    /// `[R]` f32: gradient of the row weights.
    pub d_row_weights: Tensor,
    /// `[R, A F]`: gradient of `h`, for [`experts_weight_grad`], in the weights' type.
    pub dh: Tensor,
}

/// `y [T, D] = sum over a token's rows of weight * W2 act(W1 x)`, in f32. A token without rows gets exact zeros; an
/// expert without rows costs nothing. `x` is `[T, D]`, f32 or bf16.
#[must_use]
pub fn experts_forward(
    ctx: &Context,
    x: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
) -> (Tensor, ExpertsSaved) {
    let s = Sizes::of(x, weights, rows);
    let (x, w1, w2) = (x.to_f32_vec(), weights.gate_up.to_f32_vec(), weights.down.to_f32_vec());
    let mut h = vec![0.0; s.r * s.af];
    let mut y = vec![0.0; s.t * s.d];
    for (r, e) in s.row_experts(rows) {
        let t = rows.tokens[r] as usize;
        for j in 0..s.af {
            h[r * s.af + j] = (0..s.d).map(|i| x[t * s.d + i] * w1[(e * s.af + j) * s.d + i]).sum();
        }
        let a = activate(weights.activation, &h[r * s.af..][..s.af]);
        for i in 0..s.d {
            let o: f32 = (0..s.f).map(|j| a[j] * w2[(e * s.d + i) * s.f + j]).sum();
            y[t * s.d + i] += rows.weights[r] * o;
        }
    }
    let saved = ExpertsSaved { h: store(ctx, &[s.r, s.af], &h, weights.gate_up.dtype()) };
    (store(ctx, &[s.t, s.d], &y, DType::F32), saved)
}

/// The gradients that the layers below wait for. `dy` is `[T, D]`, f32 or bf16.
#[must_use]
pub fn experts_backward(
    ctx: &Context,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
) -> ExpertsBackward {
    let s = Sizes::of(dy, weights, rows);
    let (dy, w1, w2) = (dy.to_f32_vec(), weights.gate_up.to_f32_vec(), weights.down.to_f32_vec());
    let h = saved.h.to_f32_vec();
    let mut dx = vec![0.0; s.t * s.d];
    let mut dg = vec![0.0; s.r];
    let mut dh = vec![0.0; s.r * s.af];
    for (r, e) in s.row_experts(rows) {
        let t = rows.tokens[r] as usize;
        let h = &h[r * s.af..][..s.af];
        let a = activate(weights.activation, h);
        for j in 0..s.f {
            let u: f32 = (0..s.d).map(|i| dy[t * s.d + i] * w2[(e * s.d + i) * s.f + j]).sum();
            dg[r] += u * a[j];
            let da = u * rows.weights[r];
            let dh = &mut dh[r * s.af..][..s.af];
            match weights.activation {
                Activation::SwiGlu => {
                    let (gate, up) = (h[j], h[s.f + j]);
                    let sigmoid = 1.0 / (1.0 + (-gate).exp());
                    dh[j] = da * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                    dh[s.f + j] = da * gate * sigmoid;
                }
                Activation::Relu => dh[j] = if h[j] > 0.0 { da } else { 0.0 },
                Activation::Gelu => {
                    let (cdf, pdf) = crate::vmath::normal::<crate::simd::Baseline>(h[j]);
                    dh[j] = da * (cdf + h[j] * pdf);
                }
            }
        }
        for j in 0..s.af {
            for i in 0..s.d {
                dx[t * s.d + i] += dh[r * s.af + j] * w1[(e * s.af + j) * s.d + i];
            }
        }
    }
    ExpertsBackward {
        dx: store(ctx, &[s.t, s.d], &dx, DType::F32),
        d_row_weights: store(ctx, &[s.r], &dg, DType::F32),
        dh: store(ctx, &[s.r, s.af], &dh, weights.gate_up.dtype()),
    }
}

/// Buffers for the gradients of [`ExpertWeights`], same shapes, f32.
pub struct ExpertGrads<'a> {
    /// Gradient of `gate_up`.
    pub gate_up: &'a mut Tensor,
    /// Gradient of `down`.
    pub down: &'a mut Tensor,
}

/// What [`experts_weight_grad`] computes from.
#[derive(Clone, Copy)]
pub struct WeightGradInputs<'a> {
    /// `[T, D]`: the layer's input.
    pub x: &'a Tensor,
    /// `[T, D]`: the gradient of its output.
    pub dy: &'a Tensor,
    /// What forward saved.
    pub saved: &'a ExpertsSaved,
    /// `[R, A F]`: what backward found.
    pub dh: &'a Tensor,
}

/// The gradients of the weights, from the input `x`, the output's gradient `dy` and what the two passes left. With
/// [`Write::Replace`] an expert without rows gets zeros, with [`Write::Add`] it is not touched.
pub fn experts_weight_grad(
    _ctx: &Context,
    inputs: WeightGradInputs<'_>,
    activation: Activation,
    rows: ExpertRows<'_>,
    write: Write,
    grads: ExpertGrads<'_>,
) {
    let WeightGradInputs { x, dy, saved, dh } = inputs;
    let (d, f) = (x.cols(), grads.down.cols());
    let af = f * activation.num_inputs();
    let (x, dy, h, dh) = (x.to_f32_vec(), dy.to_f32_vec(), saved.h.to_f32_vec(), dh.to_f32_vec());
    let (dw1, dw2) = (grads.gate_up.f32s_mut(), grads.down.f32s_mut());
    if write == Write::Replace {
        dw1.fill(0.0);
        dw2.fill(0.0);
    }
    for e in 0..rows.offsets.len() - 1 {
        for r in rows.offsets[e] as usize..rows.offsets[e + 1] as usize {
            let t = rows.tokens[r] as usize;
            let a = activate(activation, &h[r * af..][..af]);
            for j in 0..af {
                for i in 0..d {
                    dw1[(e * af + j) * d + i] += dh[r * af + j] * x[t * d + i];
                }
            }
            for i in 0..d {
                for j in 0..f {
                    dw2[(e * d + i) * f + j] += rows.weights[r] * dy[t * d + i] * a[j];
                }
            }
        }
    }
}

struct Sizes {
    t: usize,
    d: usize,
    f: usize,
    af: usize,
    r: usize,
}

impl Sizes {
    fn of(x: &Tensor, weights: ExpertWeights<'_>, rows: ExpertRows<'_>) -> Self {
        let f = weights.down.cols();
        Self { t: x.rows(), d: x.cols(), f, af: f * weights.activation.num_inputs(), r: rows.tokens.len() }
    }

    fn row_experts(&self, rows: ExpertRows<'_>) -> Vec<(usize, usize)> {
        let experts = 0..rows.offsets.len() - 1;
        experts.flat_map(|e| (rows.offsets[e] as usize..rows.offsets[e + 1] as usize).map(move |r| (r, e))).collect()
    }
}

fn activate(activation: Activation, h: &[f32]) -> Vec<f32> {
    match activation {
        Activation::SwiGlu => {
            let (gate, up) = h.split_at(h.len() / 2);
            gate.iter().zip(up).map(|(&g, &u)| g / (1.0 + (-g).exp()) * u).collect()
        }
        Activation::Relu => h.iter().map(|&x| x.max(0.0)).collect(),
        Activation::Gelu => h.iter().map(|&x| x * crate::vmath::normal::<crate::simd::Baseline>(x).0).collect(),
    }
}
