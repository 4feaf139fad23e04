//! Synthetic choices of experts for benchmarks.

use moeworks_ops::experts::ExpertRows;

/// The sizes of a set of choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceCounts {
    /// The number of tokens, T.
    pub tokens: usize,
    /// The number of experts, E.
    pub experts: usize,
    /// The number of experts per token, K.
    pub top_k: usize,
}

/// The dispatched rows of tokens that each choose K different experts with equal weights.
pub struct Choices {
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    token_rows: Vec<u32>,
    num_choices: usize,
}

impl Choices {
    /// Sorts the choices `expert_of(token, choice)` of all tokens by expert. The choices of a token must differ.
    pub fn new(counts: ChoiceCounts, expert_of: impl Fn(usize, usize) -> usize) -> Self {
        let ChoiceCounts { tokens: t, experts: e, top_k: k } = counts;
        let (mut offsets, mut tokens, mut token_rows) = (vec![0], Vec::new(), vec![0; t * k]);
        for expert in 0..e {
            for token in 0..t {
                if let Some(choice) = (0..k).find(|&choice| expert_of(token, choice) == expert) {
                    token_rows[token * k + choice] = tokens.len() as u32;
                    tokens.push(token as u32);
                }
            }
            offsets.push(tokens.len() as u32);
        }
        let weights = vec![1.0 / k as f32; tokens.len()];
        Self { offsets, tokens, weights, token_rows, num_choices: k }
    }

    /// Returns the number of experts that have rows.
    #[must_use]
    pub fn num_used(&self) -> usize {
        self.offsets.windows(2).filter(|pair| pair[0] < pair[1]).count()
    }

    /// Returns the rows in the form that operations on experts take.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.token_rows, self.num_choices)
    }
}
