//! Activations of experts as kernels know them.

use moeworks_gpu::Arg;

use crate::Activation;

/// An activation as kernels know it: its number and two settings.
struct Kind {
    number: u32,
    alpha: f32,
    limit: f32,
}

/// Returns what kernels know an activation by, if there are some with it.
fn kind_of(activation: Activation) -> Option<Kind> {
    let plain = |number| Some(Kind { number, alpha: 0.0, limit: 0.0 });
    match activation {
        Activation::SwiGlu => plain(0),
        Activation::Gelu => plain(1),
        Activation::GeluTanh => plain(2),
        Activation::Relu => plain(3),
        Activation::ClampedSwiGlu { alpha, limit } => Some(Kind { number: 4, alpha, limit }),
        Activation::ClampedSilu { .. }
        | Activation::GegluTanh
        | Activation::SquaredRelu
        | Activation::SoftcappedSwiGlu { .. } => None,
    }
}

/// Returns whether there are kernels with an activation. The host computes the others.
pub(super) fn has_kernels(activation: Activation) -> bool {
    kind_of(activation).is_some()
}

/// Returns the arguments by which kernels know an activation.
pub(super) fn args(activation: Activation) -> [Arg<'static>; 3] {
    let Kind { number, alpha, limit } = kind_of(activation).expect("an activation that kernels have");
    [Arg::from(number), alpha.into(), limit.into()]
}
