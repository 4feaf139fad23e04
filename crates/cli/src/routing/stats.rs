//! `moeworks routing stats`: how concentrated recorded routing is, how stable, and how well it can be foretold.

mod on_ranks;

use std::path::Path;

use moeworks_infer::routing_record::{RecordHeader, RecordReader, RecordSource, is_record};
use moeworks_infer::store::{METRICS_JSONL, ROUTING_RECORD};
use moeworks_plan::ForecastMethod;
use moeworks_train::metrics::read_records;
use moeworks_train::routing::{
    RecordStats, RecordedLayer, StatsOptions, Window, record_stats, stats_json, stats_of_windows, stats_page,
};

use super::name_of;
use crate::args::RoutingStatsArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::progress::thousands;
use crate::tables;

/// The steps of a run's metrics whose loads are read at most, the last ones.
const MAX_STEPS: usize = 2000;

pub(super) fn run(args: &RoutingStatsArgs) -> Result<ExitCode, Failure> {
    for (option, value) in [("--window", args.window), ("--ahead", Some(args.ahead as u64))] {
        if value == Some(0) {
            return Err(Failure::input(format!("{option} 0: must be at least 1")));
        }
    }
    if let Some(path) = &args.page {
        Target { option: "--page", path, mark: "Moeworks routing", is_forced: args.force }.check()?;
    }
    let mut stats = read(args)?;
    if stats.num_windows == 0 {
        return Err(Failure::input(format!("{}: the record has no whole block", args.record.display())));
    }
    on_ranks::place(args, &mut stats)?;
    if !stats.damage.is_none() {
        tracing::warn!("{}: {}", args.record.display(), stats.damage);
    }
    if let Some(path) = &args.page {
        write_whole(path, &stats_page(&stats, &facts(&stats)))?;
    }
    if args.json {
        println!("{:#}", stats_json(&stats));
    } else {
        print(&stats);
        if let Some(path) = &args.page {
            println!("{}", path.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn read(args: &RoutingStatsArgs) -> Result<RecordStats, Failure> {
    let path = &args.record;
    let record = if path.is_dir() { path.join(ROUTING_RECORD) } else { path.clone() };
    if path.is_dir() && !is_record(&record) {
        return stats_of_run(path, args);
    }
    Ok(record_stats(|| RecordReader::open(&record), StatsOptions { window: args.window, ahead: Some(args.ahead) })?)
}

/// Computes the statistics of the loads in a run's metrics.
fn stats_of_run(run: &Path, args: &RoutingStatsArgs) -> Result<RecordStats, Failure> {
    let file = run.join(METRICS_JSONL);
    let mut steps = Vec::new();
    for record in read_records(&file)? {
        let record = record?;
        if record.step > 0 && !record.layers.is_empty() {
            steps.push(record.layers);
        }
    }
    let none = || format!("{}: has no record of an MoE layer; train a model with experts first", file.display());
    let shape = |layers: &[moeworks_train::metrics::LayerRecord]| -> Vec<(usize, usize)> {
        layers.iter().map(|layer| (layer.layer, layer.tokens_per_expert.len())).collect()
    };
    let last = shape(steps.last().ok_or_else(|| Failure::input(none()))?);
    // Steps of another model, before the run was begun again, are left out.
    steps.retain(|layers| shape(layers) == last);
    steps.drain(..steps.len().saturating_sub(MAX_STEPS));
    let size = args.window.map_or(1, |window| usize::try_from(window).unwrap_or(usize::MAX));
    let num_experts = last.iter().map(|(_, experts)| *experts).max().unwrap_or(0);
    let windows = |at: usize| -> Vec<Window> {
        let sum = |(index, group): (usize, &[Vec<moeworks_train::metrics::LayerRecord>])| {
            let mut loads = vec![0_u64; num_experts];
            for layers in group {
                let counts = loads.iter_mut().zip(&layers[at].tokens_per_expert);
                counts.for_each(|(sum, &count)| *sum = sum.saturating_add(count));
            }
            Window { time_s: index as f64, loads }
        };
        steps.chunks(size).enumerate().map(sum).collect()
    };
    let header = RecordHeader {
        source: RecordSource::Train,
        model: name_of(run),
        layers: last.iter().map(|(layer, _)| *layer).collect(),
        num_encoder_layers: 0,
        num_experts,
        num_computing: num_experts,
        top_k: 0,
        placement: None,
        ranks_per_node: None,
    };
    let all: Vec<Vec<Window>> = (0..last.len()).map(windows).collect();
    Ok(RecordStats { num_steps: steps.len() as u64, ..stats_of_windows(header, &all, args.ahead) })
}

fn facts(stats: &RecordStats) -> Vec<String> {
    let RecordStats { header, num_tokens, num_steps, num_windows, num_ahead, layers, damage, notes } = stats;
    let mut facts = vec![format!("{} MoE layers of {} experts", layers.len(), header.num_experts)];
    if *num_tokens > 0 {
        facts.push(format!("choices of {} tokens", thousands(*num_tokens)));
    }
    if *num_steps > 0 {
        facts.push(format!("loads of {} steps", thousands(*num_steps)));
    }
    facts.push(format!("{num_windows} windows of time"));
    if *num_ahead > 1 {
        facts.push(format!("forecasts of {num_ahead} windows together"));
    }
    if !damage.is_none() {
        facts.push(damage.to_string());
    }
    facts.extend(notes.iter().cloned());
    facts
}

/// Formats a figure, or a dash for one that is not known.
fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

fn print(stats: &RecordStats) {
    println!("{}: {}", stats.header.model, facts(stats).join(", "));
    println!();
    let rows: Vec<Vec<String>> = stats.layers.iter().map(concentration_row).collect();
    tables::print(&["layer", "max/mean", "top 1", "top tenth", "entropy", "Gini", "Zipf", "unused"], &rows);
    println!();
    let rows: Vec<Vec<String>> = stats.layers.iter().map(foretold_row).collect();
    let heads = [
        "layer",
        "change",
        "by sampling",
        "drift",
        "best forecast",
        "error",
        "last value",
        "true shares",
        "next layer",
        "base",
        "repeats",
        "base",
    ];
    tables::print(&heads, &rows);
    if stats.layers.iter().any(|layer| layer.on_ranks.is_some()) {
        println!();
        on_ranks::print(stats);
    }
    if stats.layers.iter().any(|layer| !layer.pairs.is_empty()) {
        println!();
        let rows: Vec<Vec<String>> = stats.layers.iter().map(pair_row).collect();
        tables::print(&["layer", "experts chosen together: % of tokens, times as many as independent choices"], &rows);
    }
}

fn concentration_row(layer: &RecordedLayer) -> Vec<String> {
    let of = &layer.concentration;
    let figures =
        [Some(of.max_over_mean), Some(of.top_1), Some(of.top_tenth), Some(of.entropy), Some(of.gini), of.zipf];
    let mut row = vec![layer.layer.to_string()];
    row.extend(figures.map(figure));
    row.push(of.num_unused.to_string());
    row
}

fn foretold_row(layer: &RecordedLayer) -> Vec<String> {
    let best = layer.forecasts.iter().min_by(|a, b| a.mean.total_cmp(&b.mean));
    let stability = layer.stability;
    let mut row = vec![layer.layer.to_string()];
    row.extend([
        figure(stability.map(|stability| stability.change)),
        figure(stability.map(|stability| stability.sampling)),
        figure(stability.map(|stability| stability.drift)),
        best.map_or_else(|| "-".to_owned(), |best| best.method.name().to_owned()),
        figure(best.map(|best| best.mean)),
        figure(layer.forecasts.iter().find(|error| error.method == ForecastMethod::LastValue).map(|last| last.mean)),
        figure(layer.forecast_sampling),
        figure(layer.next_layer.map(|next| next.top_1)),
        figure(layer.next_layer.map(|next| next.top_1_base)),
        figure(layer.repeats.map(|repeats| repeats.share)),
        figure(layer.repeats.map(|repeats| repeats.base)),
    ]);
    row
}

fn pair_row(layer: &RecordedLayer) -> Vec<String> {
    let pair = |pair: &moeworks_train::routing::ExpertPair| {
        format!("{}+{}: {:.1}%, {:.1}x", pair.first, pair.second, 100.0 * pair.share, pair.lift)
    };
    let pairs: Vec<String> = layer.pairs.iter().take(3).map(pair).collect();
    vec![layer.layer.to_string(), pairs.join("   ")]
}
