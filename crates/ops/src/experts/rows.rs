//! The map of rows to experts.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::deferred::List;

/// The map of rows to experts: R rows, sorted by expert.
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    /// `[E + 1]`: expert e has the rows `offsets[e]..offsets[e + 1]`; the last entry is R.
    pub offsets: List<'a, u32>,
    /// `[R]`: the token of each row.
    pub tokens: List<'a, u32>,
    /// `[R]`: the weight of each row in its token's sum.
    pub weights: List<'a, f32>,
    /// `[T, K]`: the row of each choice of each token; [`NO_ROW`] where the choice was dropped.
    pub token_rows: List<'a, u32>,
    /// K: the number of choices of a token.
    pub num_choices: usize,
    /// The tiles of rows that a GPU listed when it sorted few choices.
    pub few_tiles: Option<&'a Tensor>,
}

impl<'a> ExpertRows<'a> {
    /// Makes a map from lists of the host or tensors, in the order of the fields.
    #[must_use]
    pub fn new(
        offsets: impl Into<List<'a, u32>>,
        tokens: impl Into<List<'a, u32>>,
        weights: impl Into<List<'a, f32>>,
        token_rows: impl Into<List<'a, u32>>,
        num_choices: usize,
    ) -> Self {
        let (offsets, tokens) = (offsets.into(), tokens.into());
        Self { offsets, tokens, weights: weights.into(), token_rows: token_rows.into(), num_choices, few_tiles: None }
    }
}

/// The rows of one expert that has every token with weight 1: row t is token t.
pub struct AllRows {
    offsets: [u32; 2],
    tokens: Tensor,
    weights: Tensor,
}

impl AllRows {
    /// Makes the rows of `num_tokens` tokens. A GPU caches the lists of the last numbers of tokens.
    #[must_use]
    pub fn new(ctx: &Context, num_tokens: usize) -> Self {
        let make = || {
            let mut tokens = ctx.empty(&[num_tokens], DType::U32);
            tokens.u32s_mut().iter_mut().zip(0..).for_each(|(token, t)| *token = t);
            let mut weights = ctx.empty(&[num_tokens], DType::F32);
            weights.f32s_mut().fill(1.0);
            [tokens, weights]
        };
        let [tokens, weights] = ctx.gpu().map_or_else(make, |gpu| gpu.all_rows(num_tokens, make));
        Self { offsets: [0, num_tokens as u32], tokens, weights }
    }

    /// Replaces the weights, `[T]` f32.
    #[must_use]
    pub fn weighed(self, weights: Tensor) -> Self {
        assert_eq!(weights.len(), self.tokens.len(), "weights of all rows");
        Self { weights, ..self }
    }

    /// Returns the weight of each row.
    #[must_use]
    pub fn weights(&self) -> &Tensor {
        &self.weights
    }

    /// Returns the map that the operations on experts take.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.tokens, 1)
    }
}

/// The entry of [`ExpertRows::token_rows`] for a choice that has no row.
pub const NO_ROW: u32 = u32::MAX;
