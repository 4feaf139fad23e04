//! The choices of tokens, sorted by expert.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::experts::{ExpertRows, NO_ROW};
use moeworks_tensor::DType;
use pyo3::prelude::*;

use crate::memory;

/// Sorted choices. An id that is not an expert's has no row.
pub(crate) enum Choices {
    /// The choices of one token, in lists that are made in less time than tables for many.
    One(OneToken),
    /// The choices of any number of tokens.
    Many(Box<SortedChoices>),
}

/// The sizes and the memory of choices: ids are i64, weights f32, both `[T, K]`.
#[derive(Clone, Copy)]
pub(crate) struct ChoiceMemory {
    pub(crate) ids: usize,
    pub(crate) weights: usize,
    pub(crate) num_tokens: usize,
    pub(crate) num_choices: usize,
}

impl Choices {
    /// Sorts choices by expert.
    ///
    /// # Safety
    /// As for [`memory::values`], for ids and weights.
    pub(crate) unsafe fn new(ctx: &Context, memory: ChoiceMemory, num_experts: usize) -> PyResult<Self> {
        let ChoiceMemory { num_tokens, num_choices, .. } = memory;
        let (shape, len) = ([num_tokens, num_choices], num_tokens * num_choices);
        // SAFETY: the function's condition.
        let ids = unsafe { memory::values::<i64>(memory.ids, len) };
        if num_tokens == 1 {
            // SAFETY: the function's condition.
            let weights = unsafe { memory::values::<f32>(memory.weights, len) };
            return Ok(Self::One(OneToken::new(ids, weights, num_experts)));
        }
        // SAFETY: the function's condition.
        let weights = unsafe { memory::tensor(memory.weights, &shape, DType::F32)? };
        let mut narrow = ctx.empty(&shape, DType::U32);
        let outside = num_experts as u32;
        for (to, &id) in narrow.u32s_mut().iter_mut().zip(ids) {
            *to = u32::try_from(id).map_or(outside, |id| id.min(outside));
        }
        Ok(Self::Many(Box::new(sort_choices(ctx, &narrow, &weights, num_experts, None))))
    }

    /// Returns the rows as operations on experts take them.
    pub(crate) fn rows(&self) -> ExpertRows<'_> {
        match self {
            Self::One(one) => {
                ExpertRows::new(&one.offsets, &one.tokens, &one.weights, &one.token_rows, one.token_rows.len())
            }
            Self::Many(sorted) => sorted.rows(),
        }
    }
}

/// The lists of [`ExpertRows`] for one token.
pub(crate) struct OneToken {
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    token_rows: Vec<u32>,
}

impl OneToken {
    /// Sorts the choices `ids` with their `weights` by expert, and those of one expert by rank.
    fn new(ids: &[i64], weights: &[f32], num_experts: usize) -> Self {
        let mut offsets = vec![0; num_experts + 1];
        let mut order = Vec::with_capacity(ids.len());
        for (choice, &id) in ids.iter().enumerate() {
            if let Some(expert) = usize::try_from(id).ok().filter(|&expert| expert < num_experts) {
                offsets[expert + 1] += 1;
                order.push((expert, choice));
            }
        }
        order.sort_unstable();
        for expert in 0..num_experts {
            offsets[expert + 1] += offsets[expert];
        }
        let mut token_rows = vec![NO_ROW; ids.len()];
        for (row, &(_, choice)) in order.iter().enumerate() {
            token_rows[choice] = row as u32;
        }
        let of_rows = order.iter().map(|&(_, choice)| weights[choice]).collect();
        Self { offsets, tokens: vec![0; order.len()], weights: of_rows, token_rows }
    }
}
