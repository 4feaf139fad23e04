//! Activations by their definitions, in f64.

use crate::Activation;

/// Every activation, those with limits and caps with some that inputs exceed.
pub(super) const ACTIVATIONS: [Activation; 9] = [
    Activation::SwiGlu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Relu,
    Activation::ClampedSwiGlu { alpha: 1.702, limit: 0.5 },
    Activation::ClampedSilu { limit: 0.5 },
    Activation::GegluTanh,
    Activation::SquaredRelu,
    Activation::SoftcappedSwiGlu { gate_cap: 0.6, up_cap: 2.5 },
];

/// The value and the derivatives of an activation, by the book: `(a, da/dh, da/dup)`.
pub(super) fn exact_activation(activation: Activation, h: f64, up: f64) -> (f64, f64, f64) {
    match activation {
        Activation::SwiGlu => {
            let sigmoid = 1.0 / (1.0 + (-h).exp());
            (h * sigmoid * up, up * sigmoid * (1.0 + h * (1.0 - sigmoid)), h * sigmoid)
        }
        Activation::Gelu => {
            // The series of the error function whose terms all have one sign.
            let z = h / std::f64::consts::SQRT_2;
            let (mut term, mut sum) = (z, z);
            for n in 1..400 {
                term *= 2.0 * z * z / f64::from(2 * n + 1);
                sum += term;
            }
            let cdf = 0.5 + sum * (-z * z).exp() / std::f64::consts::PI.sqrt();
            let pdf = (-0.5 * h * h).exp() / (2.0 * std::f64::consts::PI).sqrt();
            (h * cdf, cdf + h * pdf, 0.0)
        }
        Activation::GeluTanh => {
            let value =
                |h: f64| 0.5 * h * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (h + 0.044_715 * h.powi(3))).tanh());
            (value(h), (value(h + 1e-6) - value(h - 1e-6)) / 2e-6, 0.0)
        }
        Activation::GegluTanh => {
            let (value, slope, _) = exact_activation(Activation::GeluTanh, h, 0.0);
            (value * up, slope * up, value)
        }
        Activation::ClampedSilu { limit } => {
            let limit = f64::from(limit);
            let (g, u) = (h.min(limit), up.clamp(-limit, limit));
            let sigmoid = 1.0 / (1.0 + (-g).exp());
            let (a, slope) = (g * sigmoid, u * sigmoid * (1.0 + g * (1.0 - sigmoid)));
            (a * u, if h > limit { 0.0 } else { slope }, if up.abs() > limit { 0.0 } else { a })
        }
        Activation::SquaredRelu => (h.max(0.0).powi(2), 2.0 * h.max(0.0), 0.0),
        Activation::SoftcappedSwiGlu { gate_cap, up_cap } => {
            let cap = |x: f64, cap: f32| f64::from(cap) * (x / f64::from(cap)).tanh();
            let value = |h: f64, up: f64| cap(h, gate_cap) / (1.0 + (-h).exp()) * cap(up, up_cap);
            let step = 1e-6;
            let slope = (value(h + step, up) - value(h - step, up)) / (2.0 * step);
            (value(h, up), slope, (value(h, up + step) - value(h, up - step)) / (2.0 * step))
        }
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (h.min(limit), up.clamp(-limit, limit));
            let sigmoid = 1.0 / (1.0 + (-alpha * g).exp());
            let slope = (u + 1.0) * sigmoid * (1.0 + alpha * g * (1.0 - sigmoid));
            let a = g * sigmoid;
            (a * (u + 1.0), if h > limit { 0.0 } else { slope }, if up.abs() > limit { 0.0 } else { a })
        }
        Activation::Relu => (h.max(0.0), if h > 0.0 { 1.0 } else { 0.0 }, 0.0),
    }
}
