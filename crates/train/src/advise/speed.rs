//! Findings on the time of steps: ranks, links, products, and pauses between steps.

use moeworks_plan::{EplbSizes, Placement, Placements, RankLoads, eplb};

use super::figures::{LayerFigures, RankFigures, RunFigures, TraceFigures};
use super::finding::{Figure, Finding, Over, Reach, Remedy, Topic};
use super::settings::Remedies;
use crate::config::{PathChoice, PlacementChoice, WireChoice};

/// Above this share of a step ranks wait too long for the slowest.
const MOST_WAITING: f64 = 0.1;
/// Above this share of a step communication takes too long.
const MOST_STANDING: f64 = 0.25;
/// Rows of an expert's product below which it reads weights more than it computes.
const FEW_ROWS: f64 = 64.0;
/// Below this share of the machine's peak products are slow.
const LOW_MFU: f64 = 0.25;
/// Bytes a second of a rank below which messages are small rather than links full.
const SLOW_BYTES_PER_S: f64 = 0.2e9;
/// Above this share of a trace a pause is long.
const LONG_PAUSE: f64 = 0.2;
/// The largest factor by which a microbatch is raised at once.
const MOST_GROWTH: usize = 8;

/// Finds ranks that wait for the slowest one.
pub(super) fn waiting(run: &RunFigures) -> Option<Finding> {
    let (ranks, step_ms) = (run.window.ranks.as_ref()?, run.window.step_ms);
    let waiting = ranks.waiting_ms / step_ms;
    if waiting.partial_cmp(&MOST_WAITING) != Some(std::cmp::Ordering::Greater) {
        return None;
    }
    let slowest = (0..ranks.work_ms.len()).max_by(|&a, &b| ranks.work_ms[a].total_cmp(&ranks.work_ms[b]))?;
    let mut figures = vec![
        Figure::mean("ranks/waiting_ms", ranks.waiting_ms),
        Figure::mean("ranks/imbalance", ranks.imbalance),
        Figure::mean("perf/step_ms", step_ms),
        Figure::mean(format!("ranks/work_ms[{slowest}]"), ranks.work_ms[slowest]),
    ];
    let placed = better_placement(run);
    if let Some(placed) = &placed {
        figures.push(Figure::new("load of the hottest rank over the mean", placed.before, Over::WindowLoad));
    }
    let remedies = [even_sequences(run), placed.map(|placed| placed.remedy), pinned(run)];
    let remedies: Vec<Remedy> = remedies.into_iter().flatten().collect();
    let hint = if remedies.is_empty() { ": no setting explains it, so look at what else its cores do" } else { "" };
    Some(Finding {
        topic: Topic::WaitingForRank,
        summary: format!("ranks wait for rank {slowest} in {:.0}% of a step{hint}", 100.0 * waiting),
        at_stake: waiting.min(1.0),
        figures,
        remedies,
    })
}

/// Returns the remedy of sequences that do not divide over the ranks.
fn even_sequences(run: &RunFigures) -> Option<Remedy> {
    let (parallel, batch_size) = (&run.settings.parallel, run.settings.train.batch_size);
    let groups = parallel.dp.saturating_mul(parallel.ep);
    if groups < 2 || batch_size.is_multiple_of(groups) {
        return None;
    }
    let even = batch_size.next_multiple_of(groups);
    let idle = 1.0 - batch_size as f64 / even as f64;
    let expected =
        format!("as many sequences on each of {groups} groups, of which {:.0}% of the time is idle now", 100.0 * idle);
    Remedies::new(&run.settings).set("train.batch_size", even, expected)
}

fn pinned(run: &RunFigures) -> Option<Remedy> {
    let expected = "threads that stay on their cores";
    (!run.settings.parallel.pin).then(|| Remedies::new(&run.settings).set("parallel.pin", true, expected)).flatten()
}

/// A better placement of experts, and the imbalance of the present one.
struct Placed {
    before: f64,
    remedy: Remedy,
}

/// Finds a placement with a clearly lower load of the hottest rank.
fn better_placement(run: &RunFigures) -> Option<Placed> {
    let parallel = &run.settings.parallel;
    let num_ranks = parallel.ep * parallel.tp;
    let num_experts = run.settings.model.num_experts;
    let has_loads = |layer: &LayerFigures| layer.num_experts() == num_experts && layer.load.num_choices() > 0;
    let is_possible = !run.window.layers.is_empty() && run.window.layers.iter().all(has_loads);
    if num_ranks < 2 || !is_possible || parallel.placement == PlacementChoice::Everywhere {
        return None;
    }
    let (mut before, mut after, mut found) = (0.0, 0.0, Vec::new());
    for layer in &run.window.layers {
        let loads: Vec<f64> = layer.load.tokens_per_expert.iter().map(|&count| count as f64).collect();
        let present = run.placements.as_ref().and_then(|placements| placements.layer(layer.load.layer).cloned());
        let present = present.unwrap_or_else(|| Placement::sharded(loads.len(), num_ranks));
        let num_slots = loads.len().next_multiple_of(num_ranks);
        let placement = eplb(&loads, EplbSizes { num_slots, num_groups: 1, num_nodes: 1, num_ranks }).ok()?;
        before += RankLoads::new(&present, &loads).ok()?.imbalance();
        after += RankLoads::new(&placement, &loads).ok()?.imbalance();
        found.push((layer.load.layer, placement));
    }
    let num_layers = found.len().max(1) as f64;
    (before, after) = (before / num_layers, after / num_layers);
    if before < 0.05 || after > 0.7 * before {
        return None;
    }
    let expected = format!("an imbalance of the ranks' load of {after:.3} in place of {before:.3}");
    let path = format!("{}/placement.txt", run.run);
    let remedy = Remedies::new(&run.settings).set("parallel.placement", path, expected)?;
    let command = Some(format!("balance {} --ranks {num_ranks}", run.run));
    Some(Placed {
        before: 1.0 + before,
        remedy: Remedy { command, placement: Some(Placements::per_layer(found)), ..remedy },
    })
}

/// Finds ranks that are blocked in communication for other reasons than a slow rank.
pub(super) fn links(run: &RunFigures) -> Option<Finding> {
    let (ranks, step_ms) = (run.window.ranks.as_ref()?, run.window.step_ms);
    let blocked_ms = ranks.standing_ms - ranks.waiting_ms;
    let blocked = blocked_ms / step_ms;
    if blocked.partial_cmp(&MOST_STANDING) != Some(std::cmp::Ordering::Greater) {
        return None;
    }
    let mut figures = vec![
        Figure::mean("ranks/standing_ms_mean", ranks.standing_ms),
        Figure::mean("ranks/waiting_ms", ranks.waiting_ms),
        Figure::mean("perf/step_ms", step_ms),
        Figure::mean("ranks/node_mb", ranks.node_mb),
        Figure::mean("ranks/cluster_mb", ranks.cluster_mb),
    ];
    if ranks.tensor_ms > 0.0 {
        figures.push(Figure::mean("ranks/tensor_ms_mean", ranks.tensor_ms));
    }
    figures.extend(run.trace.as_ref().and_then(most_blocking));
    let rate = (ranks.node_mb + ranks.cluster_mb) * 1e6 / ranks.work_ms.len().max(1) as f64 / (blocked_ms / 1e3);
    let how = if rate < SLOW_BYTES_PER_S { "messages are small" } else { "links are full" };
    Some(Finding {
        topic: Topic::Links,
        summary: format!(
            "ranks are blocked in communication for {:.0}% of a step, at {:.1} MB/s a rank: {how}",
            100.0 * blocked,
            rate / 1e6
        ),
        at_stake: blocked.min(1.0),
        figures,
        remedies: less_communication(run, ranks, rate),
    })
}

/// Returns the communication in which rank 0 was blocked longest.
fn most_blocking(trace: &TraceFigures) -> Option<Figure> {
    const NAMES: [&str; 8] =
        ["all-to-all", "all-reduce", "all-gather", "reduce-scatter", "send", "receive", "barrier", "agree"];
    let span = trace.spans.iter().find(|span| NAMES.contains(&span.name.as_str()))?;
    Some(Figure::new(format!("{}, ms", span.name), span.ms, Over::Trace))
}

/// Returns remedies for communication that takes long, at `rate` bytes a second of a rank.
fn less_communication(run: &RunFigures, ranks: &RankFigures, rate: f64) -> Vec<Remedy> {
    let (make, parallel, train) = (Remedies::new(&run.settings), &run.settings.parallel, &run.settings.train);
    let sends_tokens = parallel.ep * parallel.tp > 1 && !run.window.layers.is_empty();
    let is_small = rate < SLOW_BYTES_PER_S;
    let mostly_tensor = ranks.tensor_ms > 0.5 * ranks.standing_ms && parallel.tp.is_multiple_of(2);
    let fewer_tp = [("parallel.tp", (parallel.tp / 2).to_string()), ("parallel.dp", (2 * parallel.dp).to_string())];
    let remedies = [
        mostly_tensor.then(|| make.set_all(&fewer_tp, "half as many ranks in each tensor-parallel sum")).flatten(),
        is_small.then(|| larger_batch(run, 2, "as many messages for twice the tokens")).flatten(),
        (sends_tokens && parallel.wire == WireChoice::F32)
            .then(|| make.set("parallel.wire", "bf16", "half the bytes of tokens under way"))
            .flatten(),
        (ranks.cluster_mb > 0.0 && parallel.all_to_all == PathChoice::Linear)
            .then(|| make.set("parallel.all_to_all", "auto", "tokens cross between nodes once"))
            .flatten(),
        (sends_tokens && parallel.chunks == 1 && !is_small)
            .then(|| make.set("parallel.chunks", 2, "one half of the tokens under way while the other is computed"))
            .flatten(),
        (ranks.gradients_ms > 0.2 * run.window.step_ms && !is_small)
            .then(|| {
                let more = 2 * train.grad_accumulation;
                make.set("train.grad_accumulation", more, "one sum of gradients for twice the tokens")
            })
            .flatten(),
    ];
    remedies.into_iter().flatten().collect()
}

/// Returns the remedy of microbatches `factor` times as large, with fewer of them in a step where that is possible.
fn larger_batch(run: &RunFigures, factor: usize, expected: &str) -> Option<Remedy> {
    let train = &run.settings.train;
    let fewer = if train.grad_accumulation.is_multiple_of(factor) { train.grad_accumulation / factor } else { 1 };
    let batch_size = train.batch_size.checked_mul(factor)?.to_string();
    let wanted = [("train.batch_size", batch_size), ("train.grad_accumulation", fewer.to_string())];
    Remedies::new(&run.settings).set_all(&wanted, expected)
}

/// Finds products with too few rows.
pub(super) fn products(run: &RunFigures) -> Option<Finding> {
    let (train, parallel, mfu) = (&run.settings.train, &run.settings.parallel, run.window.mfu);
    if mfu.partial_cmp(&LOW_MFU) != Some(std::cmp::Ordering::Less) {
        return None;
    }
    // The tokens of a group meet in its experts, however many ranks hold these.
    let tokens = train.microbatch_tokens() as f64 / parallel.dp as f64;
    let rows = run.choices().map_or(tokens, |choices| tokens * choices.top_k as f64 / choices.num_experts as f64);
    if rows >= FEW_ROWS {
        return None;
    }
    let factor = ((FEW_ROWS / rows).ceil() as usize).next_power_of_two().clamp(2, MOST_GROWTH);
    let decimals = usize::from(rows < 10.0);
    let expected = format!(
        "about {:.0} rows a product, which reads as many weights for {factor} times the tokens",
        rows * factor as f64
    );
    Some(Finding {
        topic: Topic::SmallProducts,
        summary: format!(
            "products have few rows: {rows:.decimals$} tokens an expert in a microbatch, at {:.1}% of the machine's peak",
            100.0 * mfu
        ),
        at_stake: (1.0 - mfu) * (1.0 - rows / FEW_ROWS),
        figures: vec![
            Figure::mean("perf/mfu", mfu),
            Figure::mean("perf/tokens_per_s", run.window.tokens_per_s),
            Figure::new("tokens an expert in a microbatch", rows, Over::Computed),
        ],
        remedies: larger_batch(run, factor, &expected).into_iter().collect(),
    })
}

/// Finds evaluations and checkpoints that take much of a trace.
pub(super) fn pauses(run: &RunFigures) -> Option<Finding> {
    let trace = run.trace.as_ref()?;
    let (make, train) = (Remedies::new(&run.settings), &run.settings.train);
    let (evaluation, checkpoint) = (trace.share("evaluation"), trace.share("checkpoint"));
    if evaluation.max(checkpoint) < LONG_PAUSE {
        return None;
    }
    let rarer = |every: u64| if every == 0 { every } else { every.saturating_mul(4) };
    let half = format!("a quarter of the {:.0}% that evaluations take", 100.0 * evaluation);
    let quarter = format!("a quarter of the {:.0}% that checkpoints take", 100.0 * checkpoint);
    let remedies = [
        (evaluation >= LONG_PAUSE).then(|| make.set("train.eval_every", rarer(train.eval_every), half)).flatten(),
        (checkpoint >= LONG_PAUSE)
            .then(|| make.set("train.checkpoint_every", rarer(train.checkpoint_every), quarter))
            .flatten(),
    ];
    Some(Finding {
        topic: Topic::Pauses,
        summary: format!(
            "evaluations take {:.0}% and checkpoints {:.0}% of the traced time",
            100.0 * evaluation,
            100.0 * checkpoint
        ),
        at_stake: (evaluation + checkpoint).min(1.0),
        figures: vec![
            Figure::new("evaluation, share", evaluation, Over::Trace),
            Figure::new("checkpoint, share", checkpoint, Over::Trace),
        ],
        remedies: remedies.into_iter().flatten().map(|remedy| Remedy { reach: Reach::Resume, ..remedy }).collect(),
    })
}
