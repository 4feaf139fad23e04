//! Collection of the choices of a pass, layer by layer.

use std::time::{SystemTime, UNIX_EPOCH};

use moeworks_moe::{Dispatch, MoeSaved, NO_EXPERT, Routing};
use moeworks_ops::experts::NO_ROW;

use super::{Block, LayerChoices, NONE, RecordError, RecordWriter, Run, TokenBlock};

/// The most tokens of a block.
const BLOCK_TOKENS: usize = 4096;
/// The most choices of all layers in a block: 7 bytes each stay below the largest block.
const BLOCK_CHOICES: usize = 1 << 21;

/// The optional parts of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordOptions {
    /// True if token ids are recorded, from which the text can be read.
    pub token_ids: bool,
    /// True if the weights of choices are recorded.
    pub weights: bool,
}

/// The tokens of a pass in the order of its rows.
#[derive(Clone, Copy, Debug)]
pub struct PassTokens<'a> {
    /// The runs. Rows behind them are padding, which is not recorded.
    pub runs: &'a [Run],
    /// The ids of the tokens of all runs.
    pub token_ids: &'a [u32],
}

/// A recorder of the choices that the routers of passes make.
#[derive(Debug)]
pub struct RoutingRecorder {
    writer: RecordWriter,
    options: RecordOptions,
    /// The choices of the pass so far, for each layer of the header.
    layers: Vec<Choices>,
}

/// The choices of one layer.
#[derive(Clone, Debug, Default)]
struct Choices {
    top_k: usize,
    /// True if the weights are known.
    has_weights: bool,
    expert_ids: Vec<u32>,
    weights: Vec<f32>,
    dropped: Vec<bool>,
}

impl RoutingRecorder {
    /// Makes a recorder that writes to `writer`.
    #[must_use]
    pub fn new(writer: RecordWriter, options: RecordOptions) -> Self {
        let layers = vec![Choices::default(); writer.header().layers.len()];
        Self { writer, options, layers }
    }

    /// Returns the writer, for other blocks.
    pub fn writer(&mut self) -> &mut RecordWriter {
        &mut self.writer
    }

    /// Takes in what layer `layer` of the model decided for its next rows. Waits for a device that decides.
    pub fn tell(&mut self, layer: usize, saved: &MoeSaved) {
        self.tell_routing(layer, saved.routing(), Some(saved.dispatch()));
    }

    /// Takes in a routing of layer `layer`; without a dispatch no choice is dropped.
    pub fn tell_routing(&mut self, layer: usize, routing: &Routing, dispatch: Option<&Dispatch>) {
        let Ok(place) = self.writer.header().layers.binary_search(&layer) else { return };
        let choices = &mut self.layers[place];
        choices.has_weights = true;
        let top_k = routing.top_k().max(1);
        if choices.top_k < top_k {
            choices.widen(top_k);
        }
        let rows = routing.expert_ids().chunks_exact(top_k).zip(routing.expert_weights().chunks_exact(top_k));
        for (t, (ids, weights)) in rows.enumerate() {
            choices.push(ids, weights);
            let start = choices.dropped.len();
            choices.dropped.resize(choices.expert_ids.len(), false);
            for (slot, dropped) in choices.dropped[start..].iter_mut().enumerate().take(top_k) {
                *dropped = dispatch.is_some_and(|dispatch| is_dropped(dispatch, ids[slot], t * top_k + slot));
            }
        }
    }

    /// Takes in the experts of the next tokens in layer `layer`, without weights.
    pub fn tell_choices(&mut self, layer: usize, tokens: &[Vec<u32>]) {
        let Ok(place) = self.writer.header().layers.binary_search(&layer) else { return };
        let choices = &mut self.layers[place];
        let top_k = tokens.iter().map(Vec::len).max().unwrap_or(0).max(1);
        if choices.top_k < top_k {
            choices.widen(top_k);
        }
        for experts in tokens {
            choices.push(experts, &vec![0.0; experts.len()]);
        }
        choices.dropped.resize(choices.expert_ids.len(), false);
        choices.has_weights = false;
    }

    /// Writes the choices of the pass that is over.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish_pass(&mut self, tokens: PassTokens<'_>) -> Result<(), RecordError> {
        let empty = vec![Choices::default(); self.layers.len()];
        let layers = std::mem::replace(&mut self.layers, empty);
        let header = self.writer.header();
        let num_encoder = header.layers.iter().take_while(|&&layer| layer < header.num_encoder_layers).count();
        let num_run: usize = tokens.runs.iter().map(|run| run.len as usize).sum();
        let time_ms = now_ms();
        for (first, end) in [(0, num_encoder), (num_encoder, layers.len())] {
            let group = &layers[first..end];
            let Some(num_rows) = group.first().map(Choices::num_tokens).filter(|&rows| rows > 0) else { continue };
            // All layers of a stack see the same rows.
            if group.iter().any(|choices| choices.num_tokens() != num_rows) || num_run == 0 {
                continue;
            }
            // The rows of an encoder are those of sources; they have no ids here.
            let whole = [Run { id: tokens.runs[0].id, position: 0, len: num_rows as u32 }];
            let is_own = first == num_encoder && num_run <= num_rows;
            let (runs, token_ids) = if is_own { (tokens.runs, tokens.token_ids) } else { (&whole[..], &[][..]) };
            self.write_group(group, first, PassTokens { runs, token_ids }, time_ms)?;
        }
        Ok(())
    }

    /// Writes layers with the same tokens in blocks of a bounded size.
    fn write_group(
        &mut self,
        group: &[Choices],
        first_layer: usize,
        tokens: PassTokens<'_>,
        time_ms: u64,
    ) -> Result<(), RecordError> {
        let top_k = group.iter().map(|choices| choices.top_k).max().unwrap_or(1).max(1);
        let most = (BLOCK_CHOICES / (top_k * group.len()).max(1)).clamp(1, BLOCK_TOKENS);
        let mut start = 0;
        for runs in split(tokens.runs, most) {
            let count: usize = runs.iter().map(|run| run.len as usize).sum();
            let ids = tokens.token_ids.get(start..start + count).filter(|_| self.options.token_ids);
            let layer = |choices: &Choices| {
                choices.part(start..start + count, top_k, self.options.weights && choices.has_weights)
            };
            let layers = group.iter().map(layer).collect();
            let token_ids = ids.map(<[u32]>::to_vec);
            let block = TokenBlock { time_ms, runs, first_layer, top_k, token_ids, layers };
            self.writer.write(&Block::Tokens(block))?;
            start += count;
        }
        Ok(())
    }
}

/// Returns the time in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// Returns whether choice `i` of all choices was dropped: it has no row, and its expert is not a zero-computation
/// one.
fn is_dropped(dispatch: &Dispatch, expert: u32, i: usize) -> bool {
    let is_free = dispatch.zero_computation_choices().is_some_and(|free| free[i] != NO_EXPERT);
    expert != NO_EXPERT && dispatch.token_rows().get(i) == Some(&NO_ROW) && !is_free
}

/// Splits runs into lists of at most `most` tokens.
fn split(runs: &[Run], most: usize) -> Vec<Vec<Run>> {
    let (mut lists, mut free) = (vec![Vec::new()], most);
    for &(mut run) in runs {
        while run.len > 0 {
            if free == 0 {
                lists.push(Vec::new());
                free = most;
            }
            let len = run.len.min(free as u32);
            lists.last_mut().expect("there is a list").push(Run { len, ..run });
            free -= len as usize;
            (run.len, run.position) = (run.len - len, run.position.saturating_add(len));
        }
    }
    lists.retain(|list| !list.is_empty());
    lists
}

impl Choices {
    fn num_tokens(&self) -> usize {
        self.expert_ids.len() / self.top_k.max(1)
    }

    /// Adds a token's choices, which are at most K.
    fn push(&mut self, ids: &[u32], weights: &[f32]) {
        let end = self.expert_ids.len() + self.top_k;
        self.expert_ids.extend(ids.iter().map(|&id| if id == NO_EXPERT { NONE } else { id }));
        self.weights.extend(weights);
        self.expert_ids.resize(end, NONE);
        self.weights.resize(end, 0.0);
    }

    /// Makes room for more experts of a token: some schemes give it as many as they like.
    fn widen(&mut self, top_k: usize) {
        let whole = self.part(0..self.num_tokens(), top_k, true);
        *self = Self {
            top_k,
            has_weights: self.has_weights,
            dropped: whole.dropped.unwrap_or_else(|| vec![false; whole.expert_ids.len()]),
            expert_ids: whole.expert_ids,
            weights: whole.weights.unwrap_or_default(),
        };
    }

    /// Returns the choices of some tokens with `top_k` places each.
    fn part(&self, tokens: std::ops::Range<usize>, top_k: usize, has_weights: bool) -> LayerChoices {
        let range = tokens.start * self.top_k..tokens.end * self.top_k;
        let dropped = &self.dropped[range.clone()];
        LayerChoices {
            weights: has_weights.then(|| widened(&self.weights[range.clone()], self.top_k, top_k, 0.0)),
            dropped: dropped.contains(&true).then(|| widened(dropped, self.top_k, top_k, false)),
            expert_ids: widened(&self.expert_ids[range], self.top_k, top_k, NONE),
        }
    }
}

/// Copies rows of `from` entries to rows of `to`, which are filled up.
fn widened<T: Copy>(entries: &[T], from: usize, to: usize, fill: T) -> Vec<T> {
    if from == to {
        return entries.to_vec();
    }
    let mut all = Vec::with_capacity(entries.len() / from.max(1) * to);
    for row in entries.chunks_exact(from.max(1)) {
        all.extend_from_slice(row);
        all.resize(all.len() + to - from, fill);
    }
    all
}
