//! Activations of feed-forward networks, forward and backward.

use crate::simd::Level;
use crate::vmath::{normal, sigmoid, tanh};

/// The activation between the projections of a feed-forward network or an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`, three matrices (Shazeer, 2002.05202). The pre-activation has 2F columns: gate first, then
    /// up.
    SwiGlu,
    /// `x * Phi(x)` with the exact error function (within 3e-7), two matrices.
    Gelu,
    /// `x * sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: GELU's tanh approximation (GPT-2), two
    /// matrices.
    GeluTanh,
    /// `max(x, 0)`, two matrices.
    Relu,
    /// `g sigmoid(alpha g) (u + 1)` with the gate `g` clamped to at most `limit`, and the up projection `u` to
    /// `[-limit, limit]` (GPT-OSS), three matrices in the layout of [`Activation::SwiGlu`].
    ClampedSwiGlu {
        /// The sigmoid's slope, 1.702 in GPT-OSS.
        alpha: f32,
        /// The limit of inputs, 7 in GPT-OSS.
        limit: f32,
    },
    /// `silu(g) u` with the gate `g` clamped to at most `limit`, and the up projection `u` to `[-limit, limit]`
    /// (DeepSeek-V4), three matrices.
    ClampedSilu {
        /// The limit of inputs, 10 in DeepSeek-V4.
        limit: f32,
    },
    /// `gelu(gate) * up` with GELU's tanh approximation (Gemma 4), three matrices.
    GegluTanh,
    /// `max(x, 0)^2` (Primer, 2109.08668; Nemotron-H), two matrices.
    SquaredRelu,
    /// `cap(g) sigmoid(g) cap(u)` with soft caps `c tanh(x / c)` of gate and up (Inkling 2), three matrices.
    SoftcappedSwiGlu {
        /// The cap of the gate.
        gate_cap: f32,
        /// The cap of the up projection.
        up_cap: f32,
    },
}

impl Activation {
    /// Returns the columns of the pre-activation per column of the activation: 2 if gated, otherwise 1.
    #[must_use]
    pub const fn num_inputs(self) -> usize {
        match self {
            Self::SwiGlu
            | Self::ClampedSwiGlu { .. }
            | Self::ClampedSilu { .. }
            | Self::GegluTanh
            | Self::SoftcappedSwiGlu { .. } => 2,
            Self::Gelu | Self::GeluTanh | Self::Relu | Self::SquaredRelu => 1,
        }
    }
}

/// Replaces `h` by its activation, element by element. Only gated activations read `up`, which is as long as `h`.
#[inline(always)]
pub(crate) fn activate<S: Level>(activation: Activation, h: &mut [f32], up: &[f32]) {
    match activation {
        Activation::SwiGlu => {
            for (h, &up) in h.iter_mut().zip(up) {
                *h = *h * sigmoid::<S>(*h) * up;
            }
        }
        Activation::Gelu => h.iter_mut().for_each(|h| *h *= normal::<S>(*h).0),
        Activation::GeluTanh => h.iter_mut().for_each(|h| *h *= sigmoid::<S>(2.0 * tanh_argument(*h).0)),
        Activation::ClampedSwiGlu { alpha, limit } => {
            for (h, &up) in h.iter_mut().zip(up) {
                let gate = cut_above(*h, limit);
                *h = gate * sigmoid::<S>(alpha * gate) * (cut(up, limit) + 1.0);
            }
        }
        Activation::ClampedSilu { limit } => {
            for (h, &up) in h.iter_mut().zip(up) {
                let gate = cut_above(*h, limit);
                *h = gate * sigmoid::<S>(gate) * cut(up, limit);
            }
        }
        Activation::GegluTanh => {
            for (h, &up) in h.iter_mut().zip(up) {
                *h = *h * sigmoid::<S>(2.0 * tanh_argument(*h).0) * up;
            }
        }
        Activation::SoftcappedSwiGlu { gate_cap, up_cap } => {
            for (h, &up) in h.iter_mut().zip(up) {
                let gate = gate_cap * tanh::<S>(*h / gate_cap);
                *h = gate * sigmoid::<S>(*h) * (up_cap * tanh::<S>(up / up_cap));
            }
        }
        // Not `max`, which would drop a NaN.
        Activation::Relu => h.iter_mut().for_each(|h| *h = if *h < 0.0 { 0.0 } else { *h }),
        Activation::SquaredRelu => h.iter_mut().for_each(|h| *h = if *h < 0.0 { 0.0 } else { *h * *h }),
    }
}

/// Replaces `h` (and `up`, if gated) by their gradients and `da` by the activation; `da` holds the gradient of the
/// activation. All slices have one length.
#[inline(always)]
pub(crate) fn pull_back<S: Level>(activation: Activation, da: &mut [f32], h: &mut [f32], up: &mut [f32]) {
    match activation {
        Activation::SwiGlu => {
            for ((da, h), up) in da.iter_mut().zip(h).zip(up) {
                let s = sigmoid::<S>(*h);
                let silu = *h * s;
                let (slope, a) = (s + silu * (1.0 - s), silu * *up);
                *h = *da * *up * slope;
                *up = *da * silu;
                *da = a;
            }
        }
        Activation::Gelu => {
            for (da, h) in da.iter_mut().zip(h) {
                let (cdf, pdf) = normal::<S>(*h);
                let (slope, a) = (cdf + *h * pdf, *h * cdf);
                *h = *da * slope;
                *da = a;
            }
        }
        Activation::GeluTanh => {
            for (da, h) in da.iter_mut().zip(h) {
                let (u, u_slope) = tanh_argument(*h);
                let s = sigmoid::<S>(2.0 * u);
                let a = *h * s;
                *h = *da * (s + 2.0 * a * (1.0 - s) * u_slope);
                *da = a;
            }
        }
        Activation::ClampedSwiGlu { alpha, limit } => {
            for ((da, h), up) in da.iter_mut().zip(h).zip(up) {
                let (gate, raised) = (cut_above(*h, limit), cut(*up, limit) + 1.0);
                let s = sigmoid::<S>(alpha * gate);
                let a = gate * s;
                let slope = s + alpha * a * (1.0 - s);
                *h = if *h > limit { 0.0 } else { *da * raised * slope };
                *up = if up.abs() > limit { 0.0 } else { *da * a };
                *da = a * raised;
            }
        }
        Activation::ClampedSilu { .. } | Activation::GegluTanh | Activation::SoftcappedSwiGlu { .. } => {
            pull_gated_back::<S>(activation, da, h, up);
        }
        Activation::SquaredRelu => {
            for (da, h) in da.iter_mut().zip(h) {
                let a = if *h < 0.0 { 0.0 } else { *h };
                *h = *da * 2.0 * a;
                *da = a * a;
            }
        }
        Activation::Relu => {
            for (da, h) in da.iter_mut().zip(h) {
                let a = if *h < 0.0 { 0.0 } else { *h };
                *h = if *h <= 0.0 { 0.0 } else { *da };
                *da = a;
            }
        }
    }
}

/// Does what [`pull_back`] does, for the gated activations that few models have.
#[inline(always)]
fn pull_gated_back<S: Level>(activation: Activation, da: &mut [f32], h: &mut [f32], up: &mut [f32]) {
    let triples = da.iter_mut().zip(h).zip(up);
    match activation {
        Activation::ClampedSilu { limit } => {
            for ((da, h), up) in triples {
                let (gate, factor) = (cut_above(*h, limit), cut(*up, limit));
                let s = sigmoid::<S>(gate);
                let a = gate * s;
                *h = if *h > limit { 0.0 } else { *da * factor * (s + a * (1.0 - s)) };
                *up = if up.abs() > limit { 0.0 } else { *da * a };
                *da = a * factor;
            }
        }
        Activation::GegluTanh => {
            for ((da, h), up) in triples {
                let (u, u_slope) = tanh_argument(*h);
                let s = sigmoid::<S>(2.0 * u);
                let (a, factor) = (*h * s, *up);
                *h = *da * factor * (s + 2.0 * a * (1.0 - s) * u_slope);
                *up = *da * a;
                *da = a * factor;
            }
        }
        Activation::SoftcappedSwiGlu { gate_cap, up_cap } => {
            for ((da, h), up) in triples {
                let (gate, factor) = (tanh::<S>(*h / gate_cap), tanh::<S>(*up / up_cap));
                let (s, capped_up) = (sigmoid::<S>(*h), up_cap * factor);
                let a = gate_cap * gate * s;
                *h = *da * capped_up * ((1.0 - gate * gate) * s + a * (1.0 - s));
                *up = *da * a * (1.0 - factor * factor);
                *da = a * capped_up;
            }
        }
        _ => {}
    }
}

/// Returns `u` of [`Activation::GeluTanh`] and its slope.
#[inline(always)]
fn tanh_argument(x: f32) -> (f32, f32) {
    const SCALE: f32 = 0.797_884_6;
    const CUBIC: f32 = 0.044_715;
    (SCALE * (x + CUBIC * x * x * x), SCALE * (1.0 + 3.0 * CUBIC * x * x))
}

/// Returns `min(x, limit)`; NaN stays NaN.
#[inline(always)]
fn cut_above(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// Clamps `x` to `[-limit, limit]`; NaN stays NaN.
#[inline(always)]
fn cut(x: f32, limit: f32) -> f32 {
    if x < -limit { -limit } else { cut_above(x, limit) }
}
