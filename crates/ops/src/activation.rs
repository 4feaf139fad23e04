//! Activations of feed-forward networks, forward and backward.

use crate::simd::Level;
use crate::vmath::{normal, sigmoid};

/// What stands between the projections of a feed-forward network or an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `silu(gate) * up`, three matrices (Shazeer, 2002.05202). The pre-activation has 2F columns: gate first, then up.
    SwiGlu,
    /// `x * Phi(x)` with the exact error function (within 3e-7), two matrices.
    Gelu,
    /// `max(x, 0)`, two matrices.
    Relu,
}

impl Activation {
    /// Columns of the pre-activation for each column of the activation: 2 for gated ones, 1 otherwise.
    #[must_use]
    pub const fn num_inputs(self) -> usize {
        match self {
            Self::SwiGlu => 2,
            Self::Gelu | Self::Relu => 1,
        }
    }
}

/// `a = act(h)`, element by element; `up` is read by gated activations only. All slices have one length.
#[inline(always)]
pub(crate) fn activate<S: Level>(activation: Activation, h: &[f32], up: &[f32], a: &mut [f32]) {
    match activation {
        Activation::SwiGlu => {
            for ((a, &gate), &up) in a.iter_mut().zip(h).zip(up) {
                *a = gate * sigmoid::<S>(gate) * up;
            }
        }
        Activation::Gelu => {
            for (a, &x) in a.iter_mut().zip(h) {
                *a = x * normal::<S>(x).0;
            }
        }
        // Not `max`, which would lose a NaN.
        Activation::Relu => {
            for (a, &x) in a.iter_mut().zip(h) {
                *a = if x < 0.0 { 0.0 } else { x };
            }
        }
    }
}

/// Replaces `h` (and `up`, where gated) by the gradients with respect to them, given `da` of the activation, and writes
/// the activation itself to `a`. All slices have one length.
#[inline(always)]
pub(crate) fn pull_back<S: Level>(activation: Activation, da: &[f32], h: &mut [f32], up: &mut [f32], a: &mut [f32]) {
    match activation {
        Activation::SwiGlu => {
            for (((a, &da), gate), up) in a.iter_mut().zip(da).zip(h).zip(up) {
                let s = sigmoid::<S>(*gate);
                let silu = *gate * s;
                *a = silu * *up;
                *gate = da * *up * (s + silu * (1.0 - s));
                *up = da * silu;
            }
        }
        Activation::Gelu => {
            for ((a, &da), x) in a.iter_mut().zip(da).zip(h) {
                let (cdf, pdf) = normal::<S>(*x);
                *a = *x * cdf;
                *x = da * (cdf + *x * pdf);
            }
        }
        Activation::Relu => {
            for ((a, &da), x) in a.iter_mut().zip(da).zip(h) {
                *a = if *x < 0.0 { 0.0 } else { *x };
                *x = if *x <= 0.0 { 0.0 } else { da };
            }
        }
    }
}
