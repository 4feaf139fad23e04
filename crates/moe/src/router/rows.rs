//! Scores of one token: from logits to a distribution and gates, and back.
//!
//! A token has `probs`, a distribution over the experts that the losses and statistics look at, and `gates`, what the
//! weights of its experts are taken from. With softmax both are the same.

/// What a row's scores say besides themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowSums {
    /// Logarithm of the sum of exponentials of the logits.
    pub(crate) lse: f32,
    /// Entropy of the distribution, in nats.
    pub(crate) entropy: f32,
}

/// Softmax of `logits`.
pub(crate) fn softmax(logits: &[f32], probs: &mut [f32]) -> RowSums {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut total, mut moment) = (0.0, 0.0);
    for (p, &logit) in probs.iter_mut().zip(logits) {
        let distance = logit - top;
        *p = distance.exp();
        total += *p;
        // Where the exponential is 0 the distance may be infinite.
        moment += if *p > 0.0 { *p * distance } else { 0.0 };
    }
    probs.iter_mut().for_each(|p| *p /= total);
    RowSums { lse: top + total.ln(), entropy: total.ln() - moment / total }
}

/// Sigmoid of each of `logits` into `gates`, and these divided by their sum into `probs`.
pub(crate) fn sigmoid(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> RowSums {
    let RowSums { lse, .. } = softmax(logits, probs);
    for (gate, &logit) in gates.iter_mut().zip(logits) {
        *gate = 1.0 / (1.0 + (-logit).exp());
    }
    RowSums { lse, entropy: distribute(gates, probs) }
}

/// The positive ones of `logits` into `gates`, and these divided by their sum into `probs`.
pub(crate) fn relu(logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> RowSums {
    let RowSums { lse, .. } = softmax(logits, probs);
    gates.iter_mut().zip(logits).for_each(|(gate, logit)| *gate = logit.max(0.0));
    RowSums { lse, entropy: distribute(gates, probs) }
}

/// Divides `gates` by their sum into `probs` and returns the entropy; all zeros stay so.
fn distribute(gates: &[f32], probs: &mut [f32]) -> f32 {
    let total: f32 = gates.iter().sum();
    let mut entropy = 0.0;
    for (p, gate) in probs.iter_mut().zip(gates) {
        *p = if total > 0.0 { gate / total } else { 0.0 };
        entropy -= if *p > 0.0 { *p * p.ln() } else { 0.0 };
    }
    entropy
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
