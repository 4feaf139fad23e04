//! Scores of one token: from logits to a distribution and gates, and back.
//!
//! A token has `probs`, a distribution over the experts that the losses and statistics look at, and `gates`, what the
//! weights of its experts are taken from. With softmax both are the same.

/// Sigmoid of each of `logits` into `gates`, and these divided by their sum into `probs`; returns the entropy.
pub(crate) fn sigmoid(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> f32 {
    for (gate, &logit) in gates.iter_mut().zip(logits) {
        *gate = 1.0 / (1.0 + (-logit).exp());
    }
    distribute(gates, probs)
}

/// The positive ones of `logits` into `gates`, and these divided by their sum into `probs`; returns the entropy.
pub(crate) fn relu(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> f32 {
    // Not `max`, which would lose a NaN.
    gates.iter_mut().zip(logits).for_each(|(gate, &logit)| *gate = if logit < 0.0 { 0.0 } else { logit });
    distribute(gates, probs)
}

/// Divides `gates` by their sum into `probs` and returns the entropy; all zeros stay so.
fn distribute(gates: &[f32], probs: &mut [f32]) -> f32 {
    let total: f32 = gates.iter().sum();
    let mut entropy = 0.0;
    for (p, gate) in probs.iter_mut().zip(gates) {
        *p = if total == 0.0 { 0.0 } else { gate / total };
        entropy -= if *p > 0.0 { *p * p.ln() } else { 0.0 };
    }
    if total.is_nan() { total } else { entropy }
}

/// The gradient of logits through a softmax: `dlogits` holds that of the probabilities and becomes theirs.
pub(crate) fn softmax_backward(probs: &[f32], dlogits: &mut [f32]) {
    let mean = inner(probs, dlogits);
    for (d, &p) in dlogits.iter_mut().zip(probs) {
        *d = (f64::from(p) * (f64::from(*d) - mean)) as f32;
    }
}

/// The gradient of what was divided by its sum, `gates`, added to `dgates`, from that of the quotients `probs`.
pub(crate) fn distribute_backward(gates: &[f32], probs: &[f32], dprobs: &[f32], dgates: &mut [f32]) {
    let total: f32 = gates.iter().sum();
    if total > 0.0 {
        let mean = inner(probs, dprobs);
        for (dgate, &dprob) in dgates.iter_mut().zip(dprobs) {
            *dgate += ((f64::from(dprob) - mean) / f64::from(total)) as f32;
        }
    }
}

fn inner(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}
