//! The weights of sparsemixer (Liu et al., 2409.12136) after training, as in `modeling_phimoe.py` of transformers.

/// The weights of the two experts `ids` of one token with these `logits`: each the softmax over those experts whose logit
/// `s` has `(top - s) / max(|s|, top) <= 2 jitter` for the choice's own logit `top`; the second without the first.
pub(super) fn weigh(jitter: f32, logits: &[f32], ids: &[u32], weights: &mut [f32]) {
    for (choice, (&id, weight)) in ids.iter().zip(weights).enumerate() {
        let Some(&top) = logits.get(id as usize) else {
            *weight = 0.0;
            continue;
        };
        let is_out = |expert: usize| ids[..choice].iter().any(|&before| before as usize == expert);
        let is_far = |s: f32| (top - s) / s.abs().max(top) > 2.0 * jitter;
        let close = logits.iter().enumerate().filter(|&(expert, &s)| !is_out(expert) && !is_far(s));
        *weight = 1.0 / close.map(|(_, &s)| (s - top).exp()).sum::<f32>();
    }
}

#[cfg(test)]
mod tests {
    use super::weigh;

    #[test]
    fn a_choice_shares_its_softmax_with_the_experts_close_to_it() {
        let logits = [2.0, 1.9, 1.0, -3.0];
        let mut weights = [0.0; 2];
        weigh(0.1, &logits, &[0, 1], &mut weights);
        assert!((weights[0] - 1.0 / (1.0 + (-0.1_f32).exp())).abs() < 1e-6, "{weights:?}");
        assert_eq!(weights[1], 1.0);
        // Half of 1.9 away is close at a jitter of 0.25: 1.0 is 0.47 away from 1.9 and 0.5 from 2.0.
        weigh(0.25, &logits, &[0, 1], &mut weights);
        let second = 1.0 / (1.0 + (-0.9_f32).exp());
        assert!((weights[1] - second).abs() < 1e-6, "{weights:?}");
    }
}
