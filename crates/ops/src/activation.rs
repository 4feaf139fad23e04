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

/// Replaces `h` by its activation, element by element; `up` is read by gated activations only and is then as long.
#[inline(always)]
pub(crate) fn activate<S: Level>(activation: Activation, h: &mut [f32], up: &[f32]) {
    match activation {
        Activation::SwiGlu => {
            for (h, &up) in h.iter_mut().zip(up) {
                *h = *h * sigmoid::<S>(*h) * up;
            }
        }
        Activation::Gelu => h.iter_mut().for_each(|h| *h *= normal::<S>(*h).0),
        // Not `max`, which would lose a NaN.
        Activation::Relu => h.iter_mut().for_each(|h| *h = if *h < 0.0 { 0.0 } else { *h }),
    }
}

/// Replaces `h` (and `up`, where gated) by the gradients with respect to them, given those of the activation in `da`,
/// and these by the activation itself. All slices have one length.
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
        Activation::Relu => {
            for (da, h) in da.iter_mut().zip(h) {
                let a = if *h < 0.0 { 0.0 } else { *h };
                *h = if *h <= 0.0 { 0.0 } else { *da };
                *da = a;
            }
        }
    }
}
