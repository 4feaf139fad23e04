//! Log-probabilities of tokens: what a model thought of them before any setting of the sampler.

/// A token with its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// The log-probability of a token, beside those of the likeliest ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that is there.
    pub token: TokenLogprob,
    /// The likeliest tokens, in descending order; of equal ones the lower id comes first.
    pub top: Vec<TokenLogprob>,
}

impl TokenLogprobs {
    /// Finds the log-probability of `id`, and the `num_top` likeliest tokens, from the logits of its place. It is not
    /// a number where a logit is none.
    #[must_use]
    pub fn from_logits(logits: &[f32], id: u32, num_top: usize) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from((logit - max).exp())).sum();
        let log_sum = f64::from(max) + sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
        let own = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let top = top_ids(logits, num_top).into_iter();
        let top = top.map(|id| TokenLogprob { id, logprob: logprob(logits[id as usize]) }).collect();
        Self { token: TokenLogprob { id, logprob: logprob(own) }, top }
    }

    /// Returns whether the model's result is a number.
    #[must_use]
    pub fn is_number(&self) -> bool {
        !self.token.logprob.is_nan()
    }
}

/// The tokens with the largest logits, in descending order.
fn top_ids(logits: &[f32], count: usize) -> Vec<u32> {
    let mut top: Vec<u32> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        let is_beyond = |&other: &u32| logits[other as usize] >= logit;
        if top.len() == count && top.last().is_none_or(is_beyond) {
            continue;
        }
        let place = top.partition_point(is_beyond);
        top.insert(place, id as u32);
        top.truncate(count);
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_a_softmax_and_the_likeliest_come_in_order() {
        let logits = [1.0, 3.0, f32::NEG_INFINITY, 3.0, 0.0];
        let found = TokenLogprobs::from_logits(&logits, 0, 3);
        let ids: Vec<u32> = found.top.iter().map(|top| top.id).collect();
        assert_eq!(ids, [1, 3, 0]);
        let sum = 1_f64.exp() + 2.0 * 3_f64.exp() + 1.0;
        assert!((f64::from(found.token.logprob) - (1.0 - sum.ln())).abs() < 1e-6);
        let sure = TokenLogprobs::from_logits(&[0.0, 200.0], 1, 0);
        assert_eq!((sure.token.logprob, sure.top.len()), (0.0, 0));
        let never = TokenLogprobs::from_logits(&logits, 2, 9);
        assert_eq!((never.token.logprob, never.top.len()), (f32::NEG_INFINITY, 5));
        assert!(!TokenLogprobs::from_logits(&[f32::NAN, 1.0], 1, 0).is_number());
    }
}
