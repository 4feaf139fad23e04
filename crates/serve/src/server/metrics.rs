//! Metrics in the text format of Prometheus, with the names and shapes of vLLM's.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};

use super::moe::{balancedness, layers};
use crate::experts::{ExpertLoad, LayerLoad, RankLoad};
use crate::scheduler::Counts;

/// The reason why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    /// The client went away.
    Abort,
    Error,
}

/// The reasons with their names.
const FINISHES: [(Finish, &str); 4] =
    [(Finish::Stop, "stop"), (Finish::Length, "length"), (Finish::Abort, "abort"), (Finish::Error, "error")];

/// Upper bounds of times in seconds.
const FIRST_TOKEN: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0];
const BETWEEN_TOKENS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5];
const WHOLE: [f64; 14] = [0.1, 0.3, 0.5, 0.8, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0, 1920.0];

/// Times, counted by their upper bounds.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// Times up to each bound and above the one before; the last counts those above all.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    fn add(&mut self, seconds: f64) {
        let place = self.bounds.iter().position(|&bound| seconds <= bound).unwrap_or(self.bounds.len());
        self.counts[place] += 1;
        self.sum += seconds;
    }
}

/// The figures of a server.
/// Facts about the memory of keys and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvCacheInfo {
    /// Tokens of a block.
    pub block_len: usize,
    /// The name of their number type.
    pub dtype: String,
    /// Bytes of a token in all layers.
    pub bytes_per_token: usize,
}

#[derive(Debug)]
pub(crate) struct Metrics {
    /// Stands before every name.
    prefix: String,
    /// The model's name, with what a label must escape.
    model: String,
    num_blocks: usize,
    kv_cache: KvCacheInfo,
    /// The load of experts; none for a model without.
    experts: Option<Arc<ExpertLoad>>,
    figures: Mutex<Figures>,
}

#[derive(Debug)]
struct Figures {
    counts: Counts,
    prompt_tokens: u64,
    generation_tokens: u64,
    finished: [u64; FINISHES.len()],
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
}

impl Metrics {
    pub(crate) fn new(prefix: &str, model: &str, num_blocks: usize) -> Self {
        let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let figures = Figures {
            counts: Counts { free_blocks: num_blocks, ..Counts::default() },
            prompt_tokens: 0,
            generation_tokens: 0,
            finished: [0; FINISHES.len()],
            first_token: Histogram::new(&FIRST_TOKEN),
            between_tokens: Histogram::new(&BETWEEN_TOKENS),
            whole: Histogram::new(&WHOLE),
        };
        let (prefix, kv_cache) = (prefix.to_owned(), KvCacheInfo::default());
        Self { prefix, model, num_blocks, kv_cache, experts: None, figures: Mutex::new(figures) }
    }

    /// The metrics with facts about keys and values.
    pub(crate) fn with_kv_cache(self, kv_cache: KvCacheInfo) -> Self {
        Self { kv_cache, ..self }
    }

    /// The metrics with the load of experts.
    pub(crate) fn with_experts(self, experts: Option<Arc<ExpertLoad>>) -> Self {
        Self { experts, ..self }
    }

    pub(crate) fn experts(&self) -> Option<&ExpertLoad> {
        self.experts.as_deref()
    }

    /// The figures that the page shows.
    pub(crate) fn serving(&self) -> Value {
        let figures = self.figures();
        json!({
            "running": figures.counts.running,
            "waiting": figures.counts.waiting,
            "kv_cache_usage": self.kv_cache_usage(figures.counts),
            "prompt_tokens": figures.prompt_tokens,
            "generation_tokens": figures.generation_tokens,
        })
    }

    /// The share of the blocks that sequences hold, from 0 to 1.
    fn kv_cache_usage(&self, counts: Counts) -> f64 {
        1.0 - counts.free_blocks as f64 / self.num_blocks.max(1) as f64
    }

    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_counts(&self, counts: Counts) {
        self.figures().counts = counts;
    }

    pub(crate) fn add_prompt(&self, num_tokens: usize) {
        self.figures().prompt_tokens += num_tokens as u64;
    }

    /// Counts a token of a request that came at `since` and had its last token at `last`.
    pub(crate) fn add_token(&self, since: Instant, last: Option<Instant>, now: Instant) {
        let mut figures = self.figures();
        figures.generation_tokens += 1;
        let seconds = now.duration_since(last.unwrap_or(since)).as_secs_f64();
        match last {
            None => figures.first_token.add(seconds),
            Some(_) => figures.between_tokens.add(seconds),
        }
    }

    pub(crate) fn finish(&self, why: Finish, since: Instant) {
        let mut figures = self.figures();
        if let Some(place) = FINISHES.iter().position(|(finish, _)| *finish == why) {
            figures.finished[place] += 1;
        }
        if matches!(why, Finish::Stop | Finish::Length) {
            figures.whole.add(since.elapsed().as_secs_f64());
        }
    }

    /// Writes all figures.
    pub(crate) fn text(&self) -> String {
        let figures = self.figures();
        let Counts { waiting, running, preemptions, prefix_queries, prefix_hits, .. } = figures.counts;
        let usage = self.kv_cache_usage(figures.counts);
        let mut page = Page { metrics: self, text: String::new() };
        page.one("gauge", "num_requests_running", "Sequences that hold blocks.", running as f64);
        page.one("gauge", "num_requests_waiting", "Sequences that wait for blocks.", waiting as f64);
        page.one("gauge", "kv_cache_usage_perc", "Share of the blocks that sequences hold, from 0 to 1.", usage);
        let counters = [
            ("num_preemptions_total", "Sequences that lost their blocks to others.", preemptions),
            ("prefix_cache_queries_total", "Tokens that were looked for in the prefix cache.", prefix_queries),
            ("prefix_cache_hits_total", "Tokens that were found in the prefix cache.", prefix_hits),
            ("prompt_tokens_total", "Tokens of prompts.", figures.prompt_tokens),
            ("generation_tokens_total", "Tokens of answers.", figures.generation_tokens),
        ];
        for (name, help, value) in counters {
            page.one("counter", name, help, value as f64);
        }
        page.head("counter", "request_success_total", "Requests that ended, by reason.");
        for ((_, reason), count) in FINISHES.iter().zip(figures.finished) {
            page.sample("request_success_total", &format!(",finished_reason=\"{reason}\""), count as f64);
        }
        page.histogram("time_to_first_token_seconds", "Time to the first token.", &figures.first_token);
        page.histogram("inter_token_latency_seconds", "Time between tokens.", &figures.between_tokens);
        page.histogram("e2e_request_latency_seconds", "Time of whole answers.", &figures.whole);
        drop(figures);
        page.kv_cache();
        page.experts();
        page.text
    }
}

/// The text as it is written.
struct Page<'a> {
    metrics: &'a Metrics,
    text: String,
}

impl Page<'_> {
    fn head(&mut self, kind: &str, name: &str, help: &str) {
        let prefix = &self.metrics.prefix;
        // Writing into a text does not fail.
        let _ = writeln!(self.text, "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let Metrics { prefix, model, .. } = self.metrics;
        let _ = writeln!(self.text, "{prefix}{name}{{model_name=\"{model}\"{labels}}} {value}");
    }

    fn one(&mut self, kind: &str, name: &str, help: &str, value: f64) {
        self.head(kind, name, help);
        self.sample(name, "", value);
    }

    /// Writes the facts about keys and values.
    fn kv_cache(&mut self) {
        let Metrics { num_blocks, kv_cache: KvCacheInfo { block_len, dtype, bytes_per_token }, .. } = self.metrics;
        let name = "cache_config_info";
        self.head("gauge", name, "The blocks of keys and values and their number type.");
        let labels = format!(",block_size=\"{block_len}\",num_blocks=\"{num_blocks}\",cache_dtype=\"{dtype}\"");
        self.sample(name, &labels, 1.0);
        let help = "Bytes of keys and values of a token, in all layers.";
        self.one("gauge", "kv_cache_bytes_per_token", help, *bytes_per_token as f64);
    }

    /// Writes the load of experts, if there are any.
    fn experts(&mut self) {
        let layers = layers(self.metrics.experts());
        if layers.is_empty() {
            return;
        }
        let (counts, cv) = ("expert_tokens_total", "expert_load_cv");
        self.head("counter", counts, "Tokens that each expert computed, by layer.");
        for load in &layers {
            for (expert, &count) in load.tokens_per_expert.iter().enumerate() {
                let labels = format!(",layer=\"{}\",expert=\"{expert}\"", load.layer);
                self.sample(counts, &labels, count as f64);
            }
        }
        self.head("gauge", cv, "Standard deviation over mean of the experts' tokens, by layer; 0 where even.");
        for load in &layers {
            self.sample(cv, &format!(",layer=\"{}\"", load.layer), load.cv());
        }
        let help = "Mean load over highest load of experts, the mean of all layers; 1 where even.";
        self.one("gauge", "expert_balancedness", help, balancedness(&layers));
        if let Some(ranks) = self.metrics.experts().and_then(ExpertLoad::ranks) {
            self.ranks(&ranks, &layers);
        }
    }

    /// Writes how even the load of ranks is and what has moved.
    fn ranks(&mut self, ranks: &RankLoad, layers: &[LayerLoad]) {
        let [before, now] = ranks.balancedness(layers);
        let name = "rank_balancedness";
        self.head("gauge", name, "Mean load over highest load of ranks, by the first placement and by that in force.");
        self.sample(name, ",placement=\"first\"", before);
        self.sample(name, ",placement=\"now\"", now);
        let help = "Copies of experts that have travelled between ranks.";
        self.one("counter", "expert_copies_moved_total", help, ranks.num_copies as f64);
        self.one("gauge", "experts_moved", "Experts of all layers that have moved.", ranks.moved.len() as f64);
        let help = "Copies of experts beyond the first of each, over all layers.";
        self.one("gauge", "expert_replicas", help, ranks.num_replicas() as f64);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head("histogram", name, help);
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        let mut count = 0;
        for (bound, own) in bounds.zip(&histogram.counts) {
            count += own;
            self.sample(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), count as f64);
        }
        self.sample(&format!("{name}_sum"), "", histogram.sum);
        self.sample(&format!("{name}_count"), "", count as f64);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn histograms_count_up_to_each_bound_and_names_are_escaped() {
        let kv_cache = KvCacheInfo { block_len: 16, dtype: "q8".to_owned(), bytes_per_token: 68 };
        let metrics = Metrics::new("moeworks_", "a\"b\n", 4).with_kv_cache(kv_cache);
        metrics.set_counts(Counts { free_blocks: 1, running: 2, ..Counts::default() });
        let now = Instant::now();
        metrics.add_token(now, None, now + Duration::from_millis(3));
        metrics.add_token(now, Some(now), now + Duration::from_secs(100));
        metrics.finish(Finish::Length, now);
        let text = metrics.text();
        let labels = "model_name=\"a\\\"b\\n\"";
        for line in [
            format!("moeworks_num_requests_running{{{labels}}} 2"),
            format!("moeworks_kv_cache_usage_perc{{{labels}}} 0.75"),
            format!("moeworks_kv_cache_bytes_per_token{{{labels}}} 68"),
            format!("moeworks_cache_config_info{{{labels},block_size=\"16\",num_blocks=\"4\",cache_dtype=\"q8\"}} 1"),
            format!("moeworks_time_to_first_token_seconds_bucket{{{labels},le=\"0.001\"}} 0"),
            format!("moeworks_time_to_first_token_seconds_bucket{{{labels},le=\"0.005\"}} 1"),
            format!("moeworks_inter_token_latency_seconds_bucket{{{labels},le=\"2.5\"}} 0"),
            format!("moeworks_inter_token_latency_seconds_bucket{{{labels},le=\"+Inf\"}} 1"),
            format!("moeworks_inter_token_latency_seconds_sum{{{labels}}} 100"),
            format!("moeworks_request_success_total{{{labels},finished_reason=\"length\"}} 1"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
