//! Passes over a record that collect what statistics need.

use std::io::Read;

use moeworks_infer::routing_record::{Block, LoadBlock, NONE, RecordError, RecordReader, TokenBlock};
use moeworks_plan::Coactivation;

use super::foretell::LayerPair;
use super::windows::{Window, of_windows};
use super::{ExpertPair, RecordStats, RecordedLayer, Repeats, StatsOptions};

/// The windows of a record at most.
const MAX_WINDOWS: usize = 2000;
/// The counts of all windows, layers and experts at most.
const MAX_NUMBERS: usize = 1 << 26;
/// The windows that the tokens are divided into where no size is given.
const TOKEN_WINDOWS: u64 = 20;
/// Consecutive tokens that are all counted, or all foretold.
const HELD_OUT_RUN: u64 = 64;
/// The most numbers of the tables of pairs of experts.
const MAX_PAIRS: usize = 1 << 26;
/// The pairs that are listed of a layer.
const LISTED_PAIRS: usize = 10;

/// The sums of one layer.
#[derive(Clone, Debug)]
struct LayerSums {
    windows: Vec<Window>,
    kept: Vec<u64>,
    importance: Vec<f64>,
    has_weights: bool,
    has_kept: bool,
    /// Choices of single tokens.
    num_tokens: u64,
    num_compared: u64,
    num_repeats: u64,
    /// `[E]`: tokens that chose each expert.
    tokens: Vec<u64>,
}

/// The sums of all layers.
struct Sums {
    num_experts: usize,
    /// Says whether windows are of loads, or of single tokens.
    has_loads: bool,
    /// Steps, or tokens, of a window.
    window: u64,
    max_windows: usize,
    layers: Vec<LayerSums>,
    pairs: Vec<Coactivation>,
    /// The pair of each layer with the next.
    next: Vec<LayerPair>,
    num_steps: u64,
    has_pairs: bool,
}

/// Computes the statistics of the record that `open` opens, in three passes over it: to count, to sum up, and to
/// foretell.
///
/// # Errors
/// If the record cannot be read.
pub fn record_stats<R: Read>(
    open: impl Fn() -> Result<RecordReader<R>, RecordError>,
    options: StatsOptions,
) -> Result<RecordStats, RecordError> {
    let mut reader = open()?;
    let header = reader.header().clone();
    let (mut num_tokens, mut num_steps) = (0, 0);
    while let Some(block) = reader.next_block()? {
        match block {
            Block::Tokens(block) => {
                let is_last = block.first_layer + block.layers.len() == header.layers.len();
                num_tokens += if is_last { block.num_tokens() as u64 } else { 0 };
            }
            Block::Loads(block) => num_steps += u64::from(block.first_layer == 0),
        }
    }
    let has_loads = num_steps > 0;
    let all = if has_loads { num_steps } else { num_tokens };
    let default = if has_loads { 1 } else { num_tokens.div_ceil(TOKEN_WINDOWS) };
    let most = (MAX_NUMBERS / (header.num_experts * header.layers.len())).clamp(1, MAX_WINDOWS);
    let window = options.window.unwrap_or(default).max(all.div_ceil(most as u64)).max(1);
    let num_pairs = header.num_experts.saturating_mul(header.num_experts).saturating_mul(header.layers.len());
    let has_pairs = num_tokens > 0 && num_pairs <= MAX_PAIRS;
    let mut sums = Sums::new(header.num_experts, header.layers.len(), has_pairs);
    (sums.has_loads, sums.window, sums.max_windows) = (has_loads, window, most);
    let mut reader = open()?;
    while let Some(block) = reader.next_block()? {
        match block {
            Block::Tokens(block) => sums.add_tokens(&block),
            Block::Loads(block) => sums.add_loads(&block),
        }
    }
    sums.next.iter_mut().for_each(LayerPair::finish);
    if has_pairs {
        sums.foretell(&mut open()?)?;
    }
    let mut notes = Vec::new();
    if num_tokens == 0 {
        notes.push("choices of single tokens are not recorded: only loads are shown".to_owned());
    } else if !has_pairs {
        notes.push(format!("pairs of {} experts are too many: they are left out", header.num_experts));
    }
    let damage = reader.damage().clone();
    let num_windows = sums.layers.first().map_or(0, |layer| layer.windows.len());
    let num_ahead = options.ahead.unwrap_or(1);
    let layers = sums.finish(&header.layers, num_ahead);
    Ok(RecordStats { header, num_tokens, num_steps, num_windows, num_ahead, layers, damage, notes })
}

impl Sums {
    fn new(num_experts: usize, num_layers: usize, has_pairs: bool) -> Self {
        let layer = LayerSums {
            windows: Vec::new(),
            kept: vec![0; num_experts],
            importance: vec![0.0; num_experts],
            has_weights: false,
            has_kept: false,
            num_tokens: 0,
            num_compared: 0,
            num_repeats: 0,
            tokens: vec![0; num_experts],
        };
        let (num_pairs, num_next) = if has_pairs { (num_layers, num_layers - 1) } else { (0, 0) };
        Self {
            num_experts,
            has_loads: false,
            window: 1,
            max_windows: MAX_WINDOWS,
            layers: vec![layer; num_layers],
            pairs: vec![Coactivation::new(num_experts); num_pairs],
            next: vec![LayerPair::new(num_experts); num_next],
            num_steps: 0,
            has_pairs,
        }
    }

    fn add_loads(&mut self, block: &LoadBlock) {
        let index = ((self.num_steps / self.window) as usize).min(self.max_windows - 1);
        for (at, loads) in (block.first_layer..).zip(&block.layers) {
            let layer = &mut self.layers[at];
            let window = layer.window(index, block.time_ms, self.num_experts);
            window.iter_mut().zip(&loads.chosen).for_each(|(sum, &count)| *sum += u64::from(count));
            layer.kept.iter_mut().zip(&loads.kept).for_each(|(sum, &count)| *sum += u64::from(count));
            layer.has_kept = true;
            if let Some(importance) = &loads.importance {
                layer.has_weights = true;
                layer.importance.iter_mut().zip(importance).for_each(|(sum, &weight)| *sum += f64::from(weight));
            }
        }
        self.num_steps += u64::from(block.first_layer == 0);
    }

    fn add_tokens(&mut self, block: &TokenBlock) {
        let first = self.layers[block.first_layer].num_tokens;
        let begins = starts(block);
        for (at, choices) in (block.first_layer..).zip(&block.layers) {
            let rows = choices.expert_ids.chunks_exact(block.top_k);
            let mut before: &[u32] = &[];
            for (t, row) in rows.enumerate() {
                self.layers[at].add_choices(row, if begins[t] { &[] } else { before });
                if self.has_pairs {
                    self.pairs[at].add(row);
                }
                before = row;
            }
            if !self.has_loads {
                self.add_choice_loads(block, at);
            }
            self.layers[at].num_tokens += block.num_tokens() as u64;
        }
        if self.has_pairs {
            each_next(block, first, |place, is_held_out, here, next| {
                if !is_held_out {
                    self.next[place].count(here, next);
                }
            });
        }
    }

    /// Adds the choices of a layer to the windows of tokens.
    fn add_choice_loads(&mut self, block: &TokenBlock, at: usize) {
        let choices = &block.layers[at - block.first_layer];
        let layer = &mut self.layers[at];
        let first = layer.num_tokens;
        layer.has_kept = true;
        layer.has_weights |= choices.weights.is_some();
        for (i, &expert) in choices.expert_ids.iter().enumerate().filter(|(_, expert)| **expert != NONE) {
            let index = ((first + (i / block.top_k) as u64) / self.window) as usize;
            let index = index.min(self.max_windows - 1);
            layer.window(index, block.time_ms, self.num_experts)[expert as usize] += 1;
            let is_dropped = choices.dropped.as_ref().is_some_and(|dropped| dropped[i]);
            layer.kept[expert as usize] += u64::from(!is_dropped);
            layer.importance[expert as usize] += choices.weights.as_ref().map_or(0.0, |weights| f64::from(weights[i]));
        }
    }

    /// Foretells the tokens that were not counted.
    fn foretell<R: Read>(&mut self, reader: &mut RecordReader<R>) -> Result<(), RecordError> {
        let mut counted = vec![0; self.layers.len()];
        while let Some(block) = reader.next_block()? {
            let Block::Tokens(block) = block else { continue };
            each_next(&block, counted[block.first_layer], |place, is_held_out, here, next| {
                if is_held_out {
                    self.next[place].test(here, next);
                }
            });
            let layers = block.first_layer..block.first_layer + block.layers.len();
            counted[layers].iter_mut().for_each(|count| *count += block.num_tokens() as u64);
        }
        Ok(())
    }

    fn finish(self, layers: &[usize], num_ahead: usize) -> Vec<RecordedLayer> {
        let Self { num_experts, layers: all, pairs, next, .. } = self;
        let layer = |(at, (sums, &layer)): (usize, (LayerSums, &usize))| {
            let windows = of_windows(&sums.windows, num_experts, num_ahead);
            let num_tokens = sums.num_tokens;
            let pairs = pairs.get(at).map_or_else(Vec::new, |pairs| listed(pairs, &sums.tokens, num_tokens));
            RecordedLayer {
                layer,
                kept: sums.has_kept.then_some(sums.kept),
                importance: sums.has_weights.then_some(sums.importance),
                next_layer: next.get(at).and_then(LayerPair::accuracy),
                repeats: repeats(sums.num_compared, sums.num_repeats, &sums.tokens, num_tokens),
                pairs,
                ..windows
            }
        };
        all.into_iter().zip(layers).enumerate().map(layer).collect()
    }
}

impl LayerSums {
    /// The counts of a window, which begins at this time if it is new.
    fn window(&mut self, index: usize, time_ms: u64, num_experts: usize) -> &mut Vec<u64> {
        while self.windows.len() <= index {
            self.windows.push(Window { time_s: time_ms as f64 / 1e3, loads: vec![0; num_experts] });
        }
        &mut self.windows[index].loads
    }

    fn add_choices(&mut self, row: &[u32], before: &[u32]) {
        for &expert in row.iter().filter(|&&expert| expert != NONE) {
            self.tokens[expert as usize] += 1;
            if !before.is_empty() {
                self.num_compared += 1;
                self.num_repeats += u64::from(before.contains(&expert));
            }
        }
    }
}

/// `[T]`: true for the first token of each run.
fn starts(block: &TokenBlock) -> Vec<bool> {
    let mut begins = vec![false; block.num_tokens()];
    let mut at = 0;
    for run in block.runs.iter().filter(|run| run.len > 0) {
        begins[at] = true;
        at += run.len as usize;
    }
    begins
}

/// Tells the experts of each token in a layer and in the next one: the place of the layer, whether the token is one
/// that is foretold, and both lists.
fn each_next(block: &TokenBlock, first: u64, mut tell: impl FnMut(usize, bool, &[u32], &[u32])) {
    for (place, pair) in (block.first_layer..).zip(block.layers.windows(2)) {
        let rows = |at: usize| pair[at].expert_ids.chunks_exact(block.top_k);
        for (t, (here, next)) in rows(0).zip(rows(1)).enumerate() {
            let is_held_out = (first + t as u64) / HELD_OUT_RUN % 2 == 1;
            tell(place, is_held_out, here, next);
        }
    }
}

fn repeats(num_compared: u64, num_repeats: u64, tokens: &[u64], num_tokens: u64) -> Option<Repeats> {
    let choices: u64 = tokens.iter().sum();
    if num_compared == 0 || choices == 0 || num_tokens == 0 {
        return None;
    }
    // Expert e has a share of all choices, and the token before has it with its share of all tokens.
    let base = |&count: &u64| count as f64 / choices as f64 * count as f64 / num_tokens as f64;
    Some(Repeats { share: num_repeats as f64 / num_compared as f64, base: tokens.iter().map(base).sum() })
}

/// The pairs of a layer that most tokens choose.
fn listed(pairs: &Coactivation, tokens: &[u64], num_tokens: u64) -> Vec<ExpertPair> {
    let mut found = Vec::new();
    for first in 0..pairs.num_experts() {
        for second in first + 1..pairs.num_experts() {
            found.push((pairs.pair(first, second), first, second));
        }
        found.sort_by_key(|&(count, first, second)| (std::cmp::Reverse(count), first, second));
        found.truncate(LISTED_PAIRS);
    }
    let all = num_tokens.max(1) as f64;
    let pair = |(count, first, second): (u64, usize, usize)| {
        let (share, alone) = (count as f64 / all, tokens[first] as f64 / all * (tokens[second] as f64 / all));
        ExpertPair { first, second, share, lift: if alone > 0.0 { share / alone } else { 0.0 } }
    };
    found.into_iter().filter(|(count, ..)| *count > 0).map(pair).collect()
}
