//! Scores of one token: from logits to a distribution and gates, and backward.
//!
//! `probs` is a distribution over the experts, for the losses and statistics. `gates` are the values that the
//! experts' weights are taken from. With softmax they are equal.

/// Writes the sigmoid of `logits` to `gates`, and gates divided by their sum to `probs`. Returns the entropy of
/// `probs`.
pub(crate) fn sigmoid(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> f32 {
    for (gate, &logit) in gates.iter_mut().zip(logits) {
        *gate = 1.0 / (1.0 + (-logit).exp());
    }
    distribute(gates, probs)
}

/// Writes the ReLU of `logits` to `gates`, and gates divided by their sum to `probs`. Returns the entropy of `probs`.
pub(crate) fn relu(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> f32 {
    // `max` would drop a NaN.
    gates.iter_mut().zip(logits).for_each(|(gate, &logit)| *gate = if logit < 0.0 { 0.0 } else { logit });
    distribute(gates, probs)
}

/// Divides `gates` by their sum into `probs` and returns the entropy. All zeros stay zeros.
fn distribute(gates: &[f32], probs: &mut [f32]) -> f32 {
    let total: f32 = gates.iter().sum();
    let mut entropy = 0.0;
    for (p, gate) in probs.iter_mut().zip(gates) {
        *p = if total == 0.0 { 0.0 } else { gate / total };
        entropy -= if *p > 0.0 { *p * p.ln() } else { 0.0 };
    }
    if total.is_nan() { total } else { entropy }
}

/// Computes the gradient of logits through a softmax. `dlogits` holds the gradient of the probabilities and receives
/// that of the logits.
pub(crate) fn softmax_backward(probs: &[f32], dlogits: &mut [f32]) {
    let mean = inner(probs, dlogits);
    for (d, &p) in dlogits.iter_mut().zip(probs) {
        *d = (f64::from(p) * (f64::from(*d) - mean)) as f32;
    }
}

/// Adds to `dgates` the gradient through `probs = gates / sum(gates)`.
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
