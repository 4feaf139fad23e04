//! A plan of serving: replicas of a model on a cluster, their batch and memory of keys and values, with prefill and
//! decode on ranks of their own or on the same ones.
//!
//! A replica is a number of ranks that hold the model between them: experts over all of them, everything else over
//! tensor-parallel groups, each with sequences of its own. A decode step reads the weights of all experts that its
//! tokens choose and the keys and values of all its sequences, or computes for longer than that takes.

use crate::cost::fabric::{ExpertRows, Fabric, Members};
use crate::{Algorithm, ModelParts, Skew};

/// A model to serve, and the requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingJob {
    /// The model.
    pub parts: ModelParts,
    /// Bytes of a weight: 2 in bf16, 1 in FP8.
    pub weight_bytes: f64,
    /// Bytes of a number of the keys and values that are kept.
    pub cache_bytes: f64,
    /// Tokens of a prompt.
    pub input_len: usize,
    /// Tokens of an answer.
    pub output_len: usize,
    /// The most seconds between two tokens of an answer, if limited.
    pub max_token_s: Option<f64>,
    /// The load of the experts.
    pub skew: Skew,
}

/// A part of the work on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The prompt.
    Prefill,
    /// The answer.
    Decode,
}

/// The costs of one phase on a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseCost {
    /// The phase.
    pub phase: Phase,
    /// Ranks of a replica, over which the experts lie.
    pub ranks: usize,
    /// Tensor parallelism outside the experts.
    pub tp: usize,
    /// Sequences of a replica at a time.
    pub batch: usize,
    /// Seconds of a prefill of the batch, or of a decode step.
    pub step_s: f64,
    /// Requests per second of a replica.
    pub requests_per_s: f64,
    /// Bytes of weights on a rank.
    pub weight_bytes: f64,
    /// Bytes of keys and values on a rank.
    pub cache_bytes: f64,
    /// The part of the step that takes longest.
    pub longest: &'static str,
}

/// A plan of serving on all ranks of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServingPlan {
    /// A replica for prompts.
    pub prefill: PhaseCost,
    /// A replica for answers.
    pub decode: PhaseCost,
    /// The number of replicas for prompts.
    pub prefill_replicas: usize,
    /// The number of replicas for answers; they do the prompts as well if there are none for those.
    pub decode_replicas: usize,
    /// Ranks that are left over.
    pub idle_ranks: usize,
    /// Requests per second.
    pub requests_per_s: f64,
    /// Tokens of answers per second.
    pub tokens_per_s: f64,
    /// Seconds until the first token, without waiting for other requests.
    pub first_token_s: f64,
    /// Seconds between two tokens of an answer.
    pub token_s: f64,
}

/// The most sequences of a tensor-parallel group.
const MAX_SEQUENCES: usize = 4096;
/// The share of memory that weights, keys and values may take; the rest is for activations and buffers.
const MEMORY_SHARE: f64 = 0.9;

/// Seconds of a step by part.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    weights: f64,
    cache: f64,
    links: f64,
}

impl Parts {
    fn total(&self) -> f64 {
        self.weights + self.cache + self.links
    }
}

struct Replica<'a> {
    job: &'a ServingJob,
    fabric: &'a Fabric,
    ranks: usize,
    tp: usize,
    hot: f64,
}

impl Replica<'_> {
    fn num_groups(&self) -> usize {
        self.ranks / self.tp
    }

    /// Returns the bytes of weights on the rank with the most.
    fn weight_bytes(&self) -> f64 {
        let parts = &self.job.parts;
        let held = parts.num_experts.div_ceil(self.ranks) as f64 * parts.num_moe_layers as f64;
        let whole = parts.num_moe_layers as f64 * (parts.shared_params + parts.router_params);
        let cut = parts.layer_params() - whole + parts.outside_params();
        (cut / self.tp as f64 + whole + held * parts.expert_params) * self.job.weight_bytes
    }

    /// Returns the bytes of keys and values of a sequence of `len` tokens on a rank. Latent vectors are on each rank
    /// of a tensor-parallel group.
    fn cache_bytes(&self, len: f64) -> f64 {
        let parts = &self.job.parts;
        let is_latent = parts.cache_elements < parts.key_value_elements;
        let tp = if is_latent { 1.0 } else { self.tp as f64 };
        len * parts.num_layers as f64 * parts.cache_elements * self.job.cache_bytes / tp
    }

    /// Returns the seconds of products of `params` parameters on a rank for `tokens` tokens.
    fn products(&self, tokens: f64, params: f64) -> f64 {
        let rates = &self.fabric.rates;
        let rate = if self.job.weight_bytes < 2.0 { rates.fp8_flops } else { rates.flops };
        (2.0 * tokens * params / rate).max(params * self.job.weight_bytes / rates.memory_bytes_per_s)
    }

    /// Returns the seconds of a pass of `tokens` tokens of each tensor-parallel group, for `heads` of which the next
    /// token is predicted. `context` is what a token attends to on average, `cached` the keys and values that are
    /// read, in tokens.
    fn pass(&self, tokens: f64, heads: f64, context: f64, cached: f64) -> Parts {
        let (parts, rates) = (&self.job.parts, &self.fabric.rates);
        let (tp, own) = (self.tp as f64, tokens / self.tp as f64);
        let (layers, moe) = (parts.num_layers as f64, parts.num_moe_layers as f64);
        let rows = own * parts.top_k as f64;
        let all_rows = rows * self.ranks as f64;
        let held = parts.num_experts.div_ceil(self.ranks) as f64;
        let chosen = if parts.num_experts > 0 {
            held * (1.0 - (1.0 - 1.0 / parts.num_experts as f64).powf(all_rows))
        } else {
            0.0
        };
        let rate = if self.job.weight_bytes < 2.0 { rates.fp8_flops } else { rates.flops };
        let experts = (2.0 * rows * self.hot * parts.expert_params / rate)
            .max(chosen * parts.expert_params * self.job.weight_bytes / rates.memory_bytes_per_s);
        let weights = layers * self.products(tokens, parts.attention_params / tp)
            + (layers - moe) * self.products(tokens, parts.dense_params / tp)
            + moe * (self.products(own, parts.shared_params + parts.router_params) + experts)
            + self.products(heads, parts.head_params() / tp);
        let scores = layers * 2.0 * tokens * context * (parts.query_elements + parts.value_elements) / tp / rates.flops;
        let cache = scores.max(self.cache_bytes(cached) / rates.memory_bytes_per_s);
        Parts { weights, cache, links: self.links(tokens) }
    }

    /// Returns the seconds of the collectives of a pass.
    fn links(&self, tokens: f64) -> f64 {
        let parts = &self.job.parts;
        let (layers, moe) = (parts.num_layers as f64, parts.num_moe_layers as f64);
        let sums = self.fabric.all_reduce(Members { num: self.tp, stride: 1 }, tokens * parts.width as f64 * 2.0);
        let rows = ExpertRows {
            tokens: tokens / self.tp as f64 * self.hot,
            top_k: parts.top_k,
            num_experts: parts.num_experts,
            row_bytes: parts.width as f64 * self.job.weight_bytes.min(2.0),
            max_units: parts.max_units,
        };
        let group = Members { num: self.ranks, stride: 1 };
        let dispatch = self.fabric.fastest_all_to_all(group, &rows, &Algorithm::ALL).1;
        let outputs = ExpertRows { row_bytes: 2.0 * parts.width as f64, ..rows };
        let combine = self.fabric.fastest_all_to_all(group, &outputs, &Algorithm::ALL).1;
        (2.0 * layers - moe) * sums.total() + moe * (dispatch.total() + combine.total())
    }

    /// Returns the cost of prefilling a prompt on each tensor-parallel group.
    fn prefill(&self) -> Option<PhaseCost> {
        let len = self.job.input_len as f64;
        let cache = self.cache_bytes(len);
        if self.weight_bytes() + cache > MEMORY_SHARE * self.fabric.rates.memory_bytes {
            return None;
        }
        let step = self.pass(len, 1.0, len / 2.0, 0.0);
        let batch = self.num_groups();
        Some(self.cost(Phase::Prefill, batch, step, batch as f64 / step.total(), cache))
    }

    /// Returns the cost of a decode step with as many sequences as memory and `is_fast_enough` allow.
    fn decode(&self, is_fast_enough: &dyn Fn(&PhaseCost) -> bool) -> Option<PhaseCost> {
        let (input, output) = (self.job.input_len as f64, self.job.output_len.max(1) as f64);
        // Sequences are at all places of their answers; room is for whole ones.
        let (room, mean) = (self.cache_bytes(input + output), input + output / 2.0);
        let free = MEMORY_SHARE * self.fabric.rates.memory_bytes - self.weight_bytes();
        let cost = |sequences: usize| {
            let count = sequences as f64;
            let step = self.pass(count, count, mean, count * mean);
            let batch = sequences * self.num_groups();
            let requests = batch as f64 / (step.total() * output);
            self.cost(Phase::Decode, batch, step, requests, count * room)
        };
        let is_allowed = |sequences: usize| sequences as f64 * room <= free && is_fast_enough(&cost(sequences));
        if !is_allowed(1) {
            return None;
        }
        let (mut low, mut high) = (1, MAX_SEQUENCES + 1);
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            if is_allowed(middle) { low = middle } else { high = middle }
        }
        Some(cost(low))
    }

    fn cost(&self, phase: Phase, batch: usize, step: Parts, requests_per_s: f64, cache_bytes: f64) -> PhaseCost {
        let parts = [("weights and products", step.weights), ("keys and values", step.cache), ("links", step.links)];
        let longest = parts.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |(name, _)| name);
        PhaseCost {
            phase,
            ranks: self.ranks,
            tp: self.tp,
            batch,
            step_s: step.total(),
            requests_per_s,
            weight_bytes: self.weight_bytes(),
            cache_bytes,
            longest,
        }
    }
}

/// Lists the costs of a phase for all sizes of a replica.
fn costs(job: &ServingJob, fabric: &Fabric, phase: Phase) -> Vec<PhaseCost> {
    let parts = &job.parts;
    let most = fabric.num_ranks.min(parts.num_experts.max(fabric.node_size()));
    let mut found = Vec::new();
    for ranks in (1..=most).filter(|&ranks| ranks.is_power_of_two() || fabric.num_ranks.is_multiple_of(ranks)) {
        let hot = job.skew.hot_rank(parts.num_experts, ranks).time;
        let sizes = (1..=ranks.min(fabric.node_size()))
            .filter(|tp| ranks.is_multiple_of(*tp) && parts.max_tp.max(1).is_multiple_of(*tp));
        for tp in sizes {
            let replica = Replica { job, fabric, ranks, tp, hot };
            let is_fast_enough = |cost: &PhaseCost| is_within(job, cost.step_s);
            let cost = if phase == Phase::Prefill { replica.prefill() } else { replica.decode(&is_fast_enough) };
            found.extend(cost);
        }
    }
    found
}

/// Returns whether tokens of an answer may be so far apart.
fn is_within(job: &ServingJob, token_s: f64) -> bool {
    job.max_token_s.is_none_or(|limit| token_s <= limit)
}

/// Returns the best plans of serving: with prefill and decode apart if there are ranks for both, and on the same
/// replicas. Empty if the model fits nowhere within the limits.
#[must_use]
pub fn serving_plan(job: &ServingJob, fabric: &Fabric) -> Vec<ServingPlan> {
    let (prefills, decodes) = (costs(job, fabric, Phase::Prefill), costs(job, fabric, Phase::Decode));
    let together = decodes.iter().filter_map(|decode| shared(job, fabric, decode)).reduce(better);
    let pairs = prefills.iter().flat_map(|prefill| decodes.iter().map(move |decode| (prefill, decode)));
    let apart = pairs.filter_map(|(prefill, decode)| split(job, fabric, prefill, decode)).reduce(better);
    let mut plans: Vec<ServingPlan> = apart.into_iter().chain(together).collect();
    plans.sort_by(|a, b| b.requests_per_s.total_cmp(&a.requests_per_s));
    plans
}

/// Returns the plan that serves more requests; the one with the shorter wait for a first token at ties.
fn better(a: ServingPlan, b: ServingPlan) -> ServingPlan {
    let by_rate = b.requests_per_s.total_cmp(&a.requests_per_s);
    if by_rate.then(a.first_token_s.total_cmp(&b.first_token_s)).is_gt() { b } else { a }
}

/// Returns the plan with ranks of their own for prompts and for answers, in the numbers that serve the most requests.
fn split(job: &ServingJob, fabric: &Fabric, prefill: &PhaseCost, decode: &PhaseCost) -> Option<ServingPlan> {
    let most = fabric.num_ranks.checked_sub(decode.ranks)? / prefill.ranks;
    let plan = |prefill_replicas: usize| {
        let decode_replicas = (fabric.num_ranks - prefill_replicas * prefill.ranks) / decode.ranks;
        let prompts = prefill_replicas as f64 * prefill.requests_per_s;
        let requests_per_s = prompts.min(decode_replicas as f64 * decode.requests_per_s);
        ServingPlan {
            prefill: *prefill,
            decode: *decode,
            prefill_replicas,
            decode_replicas,
            idle_ranks: fabric.num_ranks - prefill_replicas * prefill.ranks - decode_replicas * decode.ranks,
            requests_per_s,
            tokens_per_s: requests_per_s * job.output_len as f64,
            first_token_s: prefill.step_s,
            token_s: decode.step_s,
        }
    };
    // Where both serve as many requests, and one more.
    let each = prefill.ranks as f64 + decode.ranks as f64 * prefill.requests_per_s / decode.requests_per_s;
    let even = (fabric.num_ranks as f64 / each) as usize;
    (even.max(1)..=even + 1).filter(|&replicas| replicas <= most).map(plan).reduce(better)
}

/// Returns the plan in which replicas of the size of `alone` do the prompts as well: while they do, answers wait, so
/// that a limit on their time allows fewer sequences.
fn shared(job: &ServingJob, fabric: &Fabric, alone: &PhaseCost) -> Option<ServingPlan> {
    let hot = job.skew.hot_rank(job.parts.num_experts, alone.ranks).time;
    let replica = Replica { job, fabric, ranks: alone.ranks, tp: alone.tp, hot };
    let prefill = replica.prefill()?;
    let token_s = |decode: &PhaseCost| decode.step_s * (1.0 + decode.requests_per_s / prefill.requests_per_s);
    let decode = replica.decode(&|decode| is_within(job, token_s(decode)))?;
    let each = 1.0 / (1.0 / prefill.requests_per_s + 1.0 / decode.requests_per_s);
    let replicas = fabric.num_ranks / decode.ranks;
    let requests_per_s = each * replicas as f64;
    Some(ServingPlan {
        prefill,
        decode,
        prefill_replicas: 0,
        decode_replicas: replicas,
        idle_ranks: fabric.num_ranks - replicas * decode.ranks,
        requests_per_s,
        tokens_per_s: requests_per_s * job.output_len as f64,
        first_token_s: prefill.step_s,
        token_s: token_s(&decode),
    })
}
