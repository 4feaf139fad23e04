//! A text and the experts that each MoE layer chose for its tokens: the data of
//! [`routing_page`](super::routing_page).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::ControlFlow;

use moeworks_infer::data::Sources;
use moeworks_infer::generation::ModelRef;
use moeworks_model::{Mode, TokenBatch, Tokenizer, TokenizerError};
use moeworks_moe::{Dispatch, MoeSaved, NO_EXPERT};
use moeworks_ops::experts::NO_ROW;

use super::text::{self, Piece};
use crate::error::TrainError;

/// One expert that a router chose for a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: u32,
    /// The weight of the expert's output in the token's sum.
    pub weight: f32,
    /// True if the expert was full, so that it adds nothing.
    pub is_dropped: bool,
}

/// The routing of all tokens in one MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutedLayer {
    /// Index of the layer in the model.
    pub layer: usize,
    /// `[T]`: the choices of each token, first choice first.
    pub choices: Vec<Vec<Choice>>,
}

/// A text with the routing of its tokens in every MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutedText {
    /// The number of experts, zero-computation experts included.
    pub num_experts: usize,
    /// `[T]`: the token ids.
    pub token_ids: Vec<u32>,
    /// The MoE layers, first to last.
    pub layers: Vec<RoutedLayer>,
    /// The text, cut into pieces of whole characters.
    pub(super) pieces: Vec<Piece>,
    /// The name of each token id in lists.
    pub(super) labels: BTreeMap<u32, String>,
}

/// A token id and the number of its choices of an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenCount {
    /// The token id.
    pub id: u32,
    /// The number of times that the token chose the expert.
    pub count: u64,
    /// The number of times that the token occurs.
    pub occurrences: u64,
}

impl RoutedText {
    /// Routes `token_ids` through the model in windows of `seq_len` tokens. In a training mode each window has its
    /// own capacity.
    pub fn new(
        model: ModelRef<'_>,
        tokenizer: &Tokenizer,
        token_ids: Vec<u32>,
        seq_len: usize,
        mode: Mode,
    ) -> Result<Self, TrainError> {
        let ModelRef { ctx, decoder, weights } = model;
        let mut layers: BTreeMap<usize, Vec<Vec<Choice>>> = BTreeMap::new();
        // A router may add zero-computation experts to those of the configuration.
        let mut num_experts = decoder.config().num_experts;
        for window in token_ids.chunks(seq_len.max(1)) {
            let window = TokenBatch::without_targets(window, 1);
            decoder.route(ctx, weights, &window, mode, &mut |layer, saved| {
                num_experts = num_experts.max(saved.routing().num_experts());
                layers.entry(layer).or_default().extend(choices_of(saved));
            })?;
        }
        let layers = layers.into_iter().map(|(layer, choices)| RoutedLayer { layer, choices }).collect();
        Ok(Self {
            num_experts,
            pieces: text::pieces(tokenizer, &token_ids)?,
            labels: labels(tokenizer, &token_ids)?,
            layers,
            token_ids,
        })
    }
}

impl RoutedLayer {
    /// Counts the choices of each of E experts, dropped ones included: `[E]`.
    #[must_use]
    pub fn tokens_per_expert(&self, num_experts: usize) -> Vec<u64> {
        let mut counts = vec![0; num_experts];
        self.choices.iter().flatten().for_each(|choice| counts[choice.expert as usize] += 1);
        counts
    }

    /// Returns the share of the choices that were dropped.
    #[must_use]
    pub fn drop_rate(&self) -> f64 {
        let all = self.choices.iter().flatten();
        let dropped = all.clone().filter(|choice| choice.is_dropped).count();
        moeworks_moe::share(dropped as u64, all.count() as u64)
    }

    /// Finds for each expert the `max` tokens whose count exceeds the expected one the most. Expected is the token's
    /// number of occurrences times the expert's share of all choices. Ties go to the lower id.
    #[must_use]
    pub fn top_tokens(&self, token_ids: &[u32], num_experts: usize, max: usize) -> Vec<Vec<TokenCount>> {
        let mut occurrences: BTreeMap<u32, u64> = BTreeMap::new();
        let mut cells: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        for (&id, choices) in token_ids.iter().zip(&self.choices) {
            *occurrences.entry(id).or_default() += 1;
            choices.iter().for_each(|choice| *cells.entry((choice.expert, id)).or_default() += 1);
        }
        let share = |expert: u32, loads: &[u64]| loads[expert as usize] as f64 / token_ids.len() as f64;
        let loads = self.tokens_per_expert(num_experts);
        let mut top: Vec<Vec<(f64, TokenCount)>> = vec![Vec::new(); num_experts];
        for ((expert, id), count) in cells {
            let token = TokenCount { id, count, occurrences: occurrences[&id] };
            let beyond = count as f64 - token.occurrences as f64 * share(expert, &loads);
            top[expert as usize].push((beyond, token));
        }
        let sorted = |mut tokens: Vec<(f64, TokenCount)>| {
            tokens.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
            tokens.into_iter().take(max).filter(|(beyond, _)| *beyond > 0.0).map(|(_, token)| token).collect()
        };
        top.into_iter().map(sorted).collect()
    }
}

/// Tokenizes the texts that `sources` finds, with the tokens before and after each document, and returns the first
/// `max`.
pub fn first_tokens(sources: &Sources, tokenizer: &Tokenizer, max: usize) -> Result<Vec<u32>, TrainError> {
    let mut ids = Vec::new();
    let (mut failed, mut begins_document) = (None, true);
    let notes = sources.for_each(|piece| {
        if begins_document {
            ids.extend(tokenizer.text_start());
        }
        begins_document = piece.ends_document;
        match tokenizer.encode(piece.text) {
            Ok(more) => ids.extend(more),
            Err(error) => {
                failed = Some(error);
                return Ok(ControlFlow::Break(()));
            }
        }
        if piece.ends_document {
            ids.extend(tokenizer.eos_id());
        }
        Ok(if ids.len() < max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    match failed {
        Some(error) => Err(error.into()),
        None => {
            notes.warn();
            ids.truncate(max);
            Ok(ids)
        }
    }
}

/// Lists the choices of each token in the order of the routing's slots, without the empty ones.
fn choices_of(saved: &MoeSaved) -> impl Iterator<Item = Vec<Choice>> + '_ {
    let (routing, dispatch) = (saved.routing(), saved.dispatch());
    let slots = routing.top_k();
    (0..routing.num_tokens()).map(move |t| {
        let choice = |i: usize| {
            let (expert, weight) = (routing.expert_ids()[i], routing.expert_weights()[i]);
            (expert != NO_EXPERT).then(|| Choice { expert, weight, is_dropped: is_dropped(dispatch, i) })
        };
        (t * slots..(t + 1) * slots).filter_map(choice).collect()
    })
}

/// Returns whether choice `i` of all choices was dropped: it has no row, and its expert is not a zero-computation
/// one.
fn is_dropped(dispatch: &Dispatch, i: usize) -> bool {
    let is_free = dispatch.zero_computation_choices().is_some_and(|free| free[i] != NO_EXPERT);
    dispatch.token_rows()[i] == NO_ROW && !is_free
}

fn labels(tokenizer: &Tokenizer, token_ids: &[u32]) -> Result<BTreeMap<u32, String>, TokenizerError> {
    let mut labels = BTreeMap::new();
    for &id in token_ids {
        if let Entry::Vacant(entry) = labels.entry(id) {
            entry.insert(text::label(tokenizer, id)?);
        }
    }
    Ok(labels)
}

#[cfg(test)]
#[path = "routed_tests.rs"]
mod tests;
