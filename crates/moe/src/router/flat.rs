//! Routers that score every expert for every token: logits, scores, choice, weights, each a step over rows.
//!
//! The plain scheme, softmax over linear logits, has one fused operation in `ops`; all others take the steps one by one.
//! Backward goes from the weights to the gates they were taken from, adds what the losses say of the distribution and of
//! the logits, and ends at the logits. The choice itself has no gradient.

use moeworks_ops::Context;
use moeworks_ops::elementwise::{add_rows, sum_of_squares, sum_rows};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::top_k::{ScoreGrads, ScoreSums, TopK, softmax_top_k, softmax_top_k_backward};
use moeworks_tensor::{DType, Tensor};

use super::blocks::{self, ROWS};
use super::config::{RouterConfig, ScoreFunction};
use super::input::RouterInput;
use super::noise::Jitter;
use super::state::EXPERT_BIAS;
use super::{choice, rows, sparsemixer};
use crate::overflow::{self, Overflow, Room};
use crate::{DispatchRule, LossGrad, MoeConfig, MoeWeights, NO_EXPERT, Routing, RoutingError, ScoreOrder};

/// Added to the sum that sigmoid weights are divided by (DeepSeek-V3).
const WEIGHT_EPS: f32 = 1e-20;

/// A router at work: what it is, its weights and what it looks at.
#[derive(Clone, Copy)]
pub(crate) struct FlatRouter<'a> {
    pub(crate) config: &'a MoeConfig,
    pub(crate) weights: &'a MoeWeights,
    pub(crate) input: &'a RouterInput<'a>,
}

/// What a router decided, and what its backward needs.
pub(crate) struct Decision {
    pub(crate) routing: Routing,
    pub(crate) saved: FlatSaved,
    /// Choices that went to another expert than the token's own, for want of room.
    pub(crate) num_rerouted: usize,
}

/// What backward needs of forward.
pub(crate) struct FlatSaved {
    jitter: Option<Jitter>,
    pub(crate) scores: Scores,
    ids: Tensor,
    weights: Tensor,
    is_fused: bool,
}

/// The scores of all tokens.
pub(crate) struct Scores {
    /// `[T, E]`: a distribution over the experts for each token.
    pub(crate) probs: Tensor,
    /// `[T, E]`: what weights are taken from, if not the probabilities.
    gates: Option<Tensor>,
    /// `[T, E]`: the logits that the scores were taken of; none where the fused operation took their memory.
    logits: Option<Tensor>,
    /// `[T]`.
    lse: Tensor,
    pub(crate) sums: ScoreSums,
    /// The sum of the squared logits.
    pub(crate) squared_logits: f64,
}

/// The gradients of a router's weights, to be computed when it suits.
pub(crate) struct RouterGradTask {
    dlogits: Tensor,
}

impl FlatRouter<'_> {
    fn router(&self) -> &RouterConfig {
        &self.config.router
    }

    /// The decision for `x [T, D]`.
    pub(crate) fn forward(&self, ctx: &Context, x: &Tensor) -> Decision {
        let jitter = self.jitter();
        let logits = self.logits(ctx, x, jitter);
        let squared_logits = sum_of_squares(ctx, &logits);
        if self.is_fused() {
            let TopK { probs, ids, weights, lse, sums } =
                softmax_top_k(ctx, logits, self.config.top_k, self.is_normalized());
            let scores = Scores { probs, gates: None, logits: None, lse, sums, squared_logits };
            return self.decision(FlatSaved { jitter, scores, ids, weights, is_fused: true }, 0);
        }
        let scores = Scores { squared_logits, ..self.score(ctx, logits) };
        let ranking = self.ranking(ctx, &scores);
        let mut ids = self.choose(ctx, &ranking);
        let num_rerouted = self.reroute(&mut ids, &ranking);
        let weights = self.weigh(ctx, &scores, &ids);
        self.decision(FlatSaved { jitter, scores, ids, weights, is_fused: false }, num_rerouted)
    }

    fn decision(&self, saved: FlatSaved, num_rerouted: usize) -> Decision {
        let routing = Routing::from_tensors(self.config.num_experts, saved.ids.clone(), saved.weights.clone());
        Decision { routing, saved, num_rerouted }
    }

    /// Fails if a logit of `x [T, D]` is not finite.
    pub(crate) fn check(&self, ctx: &Context, x: &Tensor) -> Result<(), RoutingError> {
        let logits = self.logits(ctx, x, self.jitter());
        match logits.f32s().iter().position(|logit| !logit.is_finite()) {
            Some(at) => {
                let (token, expert) = (at / logits.cols(), at % logits.cols());
                Err(RoutingError::NotFinite { token, expert, logit: logits.f32s()[at] })
            }
            None => Ok(()),
        }
    }

    fn jitter(&self) -> Option<Jitter> {
        let random = self.input.noise.filter(|_| !self.input.is_inference)?;
        (self.config.jitter > 0.0).then_some(Jitter { eps: self.config.jitter, random })
    }

    fn logits(&self, ctx: &Context, x: &Tensor, jitter: Option<Jitter>) -> Tensor {
        let noisy = jitter.map(|jitter| jitter.apply(ctx, x));
        let mut logits = linear(ctx, noisy.as_ref().unwrap_or(x), &self.weights.router, DType::F32);
        if let Some(bias) = &self.weights.router_bias {
            add_rows(ctx, &mut logits, bias);
        }
        logits
    }

    /// Whether the fused operation computes this scheme.
    fn is_fused(&self) -> bool {
        self.router().is_plain_at_inference() && !self.reroutes()
    }

    fn reroutes(&self) -> bool {
        self.router().overflow == Overflow::Reroute && self.config.capacity_factor != 0.0
    }

    /// The softmax over the chosen logits is the softmax over all of them divided by the sum over the chosen.
    fn is_normalized(&self) -> bool {
        self.config.normalize_weights || self.config.score_order == ScoreOrder::TopKThenSoftmax
    }

    /// Scores of `logits [T, E]`. A token with a logit that is not finite gets zeros as logits, by which it chooses the
    /// first experts, and NaN as scores, which its output then shows.
    fn score(&self, ctx: &Context, mut logits: Tensor) -> Scores {
        let (num_tokens, e) = (logits.rows(), logits.cols());
        let empty = |shape: &[usize]| ctx.empty(shape, DType::F32);
        let is_softmax = self.router().scores == ScoreFunction::Softmax;
        let mut probs = empty(&[num_tokens, e]);
        let mut gates = empty(&[if is_softmax { 0 } else { num_tokens }, e]);
        let (mut lse, mut entropy) = (empty(&[num_tokens]), empty(&[num_tokens]));
        let outputs = blocks::of_mut(logits.f32s_mut(), e)
            .zip(blocks::of_mut(probs.f32s_mut(), e))
            .zip(blocks::of_mut(lse.f32s_mut(), 1))
            .zip(blocks::of_mut(entropy.f32s_mut(), 1));
        // Without gates there are empty blocks in their place.
        let gate_blocks = blocks::of_mut(gates.f32s_mut(), e).map(Some).chain(std::iter::repeat_with(|| None));
        blocks::for_each(ctx, outputs.zip(gate_blocks), |_, ((((logits, probs), lse), entropy), gates)| {
            let mut gates = gates.map(|gates| gates.chunks_mut(e));
            let rows = logits.chunks_mut(e).zip(probs.chunks_mut(e)).zip(lse).zip(entropy);
            for (((logits, probs), lse), entropy) in rows {
                let gates = gates.as_mut().and_then(Iterator::next);
                let sums = score_row(logits, probs, gates);
                (*lse, *entropy) = (sums.lse, sums.entropy);
            }
        });
        let sums = sums(ctx, &probs, &lse, &entropy);
        Scores { probs, gates: (!is_softmax).then_some(gates), logits: Some(logits), lse, sums, squared_logits: 0.0 }
    }

    /// `[T, E]`: what experts are chosen by, negative infinity for those out of reach.
    fn ranking(&self, ctx: &Context, scores: &Scores) -> Tensor {
        let (router, e) = (self.router(), scores.probs.cols());
        let logits = scores.logits.as_ref().expect("only the fused operation keeps no logits");
        let is_limited = router.top_groups < router.num_groups;
        if !router.expert_bias && !is_limited {
            // The order of the logits is that of the scores, without their ties.
            return logits.clone();
        }
        let bias = router.expert_bias.then(|| self.weights.state(EXPERT_BIAS).f32s());
        let gates = scores.gates();
        let mut ranking = ctx.empty(&[gates.rows(), e], DType::F32);
        let inputs = blocks::of_mut(ranking.f32s_mut(), e).zip(blocks::of(gates.f32s(), e));
        blocks::for_each(ctx, inputs, |_, (ranking, gates)| {
            for (ranking, gates) in ranking.chunks_mut(e).zip(gates.chunks(e)) {
                for (i, (rank, &gate)) in ranking.iter_mut().zip(gates).enumerate() {
                    let gate = if gate.is_nan() { 0.0 } else { gate };
                    *rank = gate + bias.map_or(0.0, |bias| bias[i]);
                }
                choice::limit_groups(ranking, router.num_groups, router.top_groups, router.group_score);
            }
        });
        ranking
    }

    fn choose(&self, ctx: &Context, ranking: &Tensor) -> Tensor {
        let (e, k) = (ranking.cols(), self.config.top_k);
        let mut ids = ctx.empty(&[ranking.rows(), k], DType::U32);
        let inputs = blocks::of_mut(ids.u32s_mut(), k).zip(blocks::of(ranking.f32s(), e));
        blocks::for_each(ctx, inputs, |_, (ids, ranking)| {
            for (ids, ranking) in ids.chunks_mut(k).zip(ranking.chunks(e)) {
                choice::top_k(ranking, ids);
            }
        });
        ids
    }

    /// Moves choices to experts with room, if that is the scheme; returns how many.
    fn reroute(&self, ids: &mut Tensor, ranking: &Tensor) -> usize {
        if !self.reroutes() || self.input.is_inference {
            return 0;
        }
        let (num_tokens, top_k) = (ids.rows(), ids.cols());
        let rule = self.rule(None);
        let capacity = rule.capacities(num_tokens, ranking.cols());
        let room = Room { capacity: &capacity, group_tokens: rule.group_size(num_tokens) };
        overflow::reroute(ids.u32s_mut(), top_k, room, ranking.f32s())
    }

    /// How this router's choices become rows.
    pub(crate) fn rule<'p>(&self, priority: Option<&'p [f32]>) -> DispatchRule<'p> {
        DispatchRule {
            capacity_factor: if self.input.is_inference { 0.0 } else { self.config.capacity_factor },
            top_k: self.config.top_k,
            num_free: 0,
            free_ratio: 1.0,
            group_tokens: self.router().local_group,
            priority,
        }
    }

    /// `[T]`: the score of each token's first choice, if that decides who is served first.
    pub(crate) fn priority(&self, saved: &FlatSaved) -> Option<Vec<f32>> {
        if self.router().overflow != Overflow::Priority || self.config.capacity_factor == 0.0 {
            return None;
        }
        let (gates, k) = (saved.scores.gates(), saved.ids.cols());
        let rows = gates.f32s().chunks(gates.cols()).zip(saved.ids.u32s().chunks(k));
        Some(rows.map(|(gates, ids)| gates.get(ids[0] as usize).copied().unwrap_or(0.0)).collect())
    }

    /// The weights of the choices `ids [T, K]`.
    fn weigh(&self, ctx: &Context, scores: &Scores, ids: &Tensor) -> Tensor {
        let (gates, k) = (scores.gates(), ids.cols());
        let e = gates.cols();
        let rule = self.weight_rule();
        let mut weights = ctx.empty(ids.shape(), DType::F32);
        let jitter = self.router().sparsemixer_jitter;
        if let (true, Some(logits)) = (jitter > 0.0, &scores.logits) {
            let rows = weights.f32s_mut().chunks_mut(k).zip(ids.u32s().chunks(k)).zip(logits.f32s().chunks(e));
            rows.for_each(|((weights, ids), logits)| sparsemixer::weigh(jitter, logits, ids, weights));
            return weights;
        }
        let inputs =
            blocks::of_mut(weights.f32s_mut(), k).zip(blocks::of(ids.u32s(), k)).zip(blocks::of(gates.f32s(), e));
        blocks::for_each(ctx, inputs, |_, ((weights, ids), gates)| {
            for ((weights, ids), gates) in weights.chunks_mut(k).zip(ids.chunks(k)).zip(gates.chunks(e)) {
                rule.weigh(gates, ids, weights);
            }
        });
        weights
    }

    fn weight_rule(&self) -> WeightRule {
        WeightRule { is_normalized: self.is_normalized(), scale: self.router().routed_scale }
    }

    /// The gradient of `x` through the router, and what is left to do for its weights. `dweights [T, K]` is the gradient of
    /// the weights, changed here.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        saved: &FlatSaved,
        dweights: Tensor,
        losses: &LossGrad,
    ) -> (Tensor, RouterGradTask) {
        let dlogits = if saved.is_fused && losses.is_simple() {
            let grads = ScoreGrads {
                weights: dweights.f32s(),
                probs: &losses.balance,
                lse_squared: losses.z / saved.ids.rows().max(1) as f32,
            };
            let Scores { probs, lse, sums, .. } = &saved.scores;
            let (ids, weights) = (saved.ids.clone(), saved.weights.clone());
            let scores = TopK { probs: probs.clone(), ids, weights, lse: lse.clone(), sums: sums.clone() };
            softmax_top_k_backward(ctx, &scores, self.is_normalized(), grads)
        } else {
            self.logit_grads(ctx, saved, &dweights, losses)
        };
        let mut dx = linear_backward_input(ctx, &dlogits, &self.weights.router, DType::F32);
        if let Some(jitter) = saved.jitter {
            jitter.apply_assign(ctx, &mut dx);
        }
        (dx, RouterGradTask { dlogits })
    }

    /// The gradient of the logits, token by token.
    fn logit_grads(&self, ctx: &Context, saved: &FlatSaved, dweights: &Tensor, losses: &LossGrad) -> Tensor {
        let (num_tokens, e) = (saved.scores.probs.rows(), saved.scores.probs.cols());
        let dprobs = ProbGrads::of(saved, losses, self.input.seq_len);
        let z = 2.0 * losses.z / num_tokens.max(1) as f32;
        let mut dlogits = ctx.empty(&[num_tokens, e], DType::F32);
        blocks::for_each(ctx, blocks::of_mut(dlogits.f32s_mut(), e), |block, dlogits| {
            let (mut dprob, mut dgate) = (vec![0.0; e], vec![0.0; e]);
            for (t, dlogits) in (block * ROWS..).zip(dlogits.chunks_mut(e)) {
                let row = saved.row(t);
                dprobs.fill(t, &mut dprob);
                dgate.fill(0.0);
                let dweights = &dweights.f32s()[t * row.ids.len()..(t + 1) * row.ids.len()];
                self.weight_rule().backward(&row, dweights, &mut dgate);
                logit_grads(&row, &mut dprob, &mut dgate, dlogits);
                if z != 0.0 {
                    row.add_z(z, dlogits);
                }
            }
        });
        dlogits
    }
}

impl RouterGradTask {
    /// Writes or adds the gradients of the router's weights, from the layer's input.
    pub(crate) fn run(self, ctx: &Context, saved: &FlatSaved, x: &Tensor, write: Write, grads: &mut MoeWeights) {
        let noisy = saved.jitter.map(|jitter| jitter.apply(ctx, x));
        let router_x = noisy.as_ref().unwrap_or(x);
        linear_backward_weight(ctx, &self.dlogits, router_x, DType::F32, write, &mut grads.router);
        if let Some(bias) = &mut grads.router_bias {
            sum_rows(ctx, &self.dlogits, write, bias);
        }
    }
}

impl Scores {
    fn gates(&self) -> &Tensor {
        self.gates.as_ref().unwrap_or(&self.probs)
    }
}

impl FlatSaved {
    fn row(&self, t: usize) -> Row<'_> {
        let Scores { probs, gates, logits, lse, .. } = &self.scores;
        let (e, k) = (probs.cols(), self.ids.cols());
        let of = |tensor: &'_ Tensor| -> std::ops::Range<usize> { t * tensor.cols()..(t + 1) * tensor.cols() };
        Row {
            probs: &probs.f32s()[t * e..(t + 1) * e],
            gates: gates.as_ref().map(|gates| &gates.f32s()[of(gates)]),
            logits: logits.as_ref().map(|logits| &logits.f32s()[of(logits)]),
            lse: lse.f32s()[t],
            ids: &self.ids.u32s()[t * k..(t + 1) * k],
            weights: &self.weights.f32s()[t * k..(t + 1) * k],
        }
    }

    /// The sequence-wise balance loss (DeepSeek-V3), the mean of the sequences' `sum_i f_i P_i`, with `f_i` expert i's share
    /// of the sequence's choices times E and `P_i` its mean probability there.
    pub(crate) fn sequence_loss(&self, seq_len: usize) -> f64 {
        let e = self.scores.probs.cols();
        let sequences = sequence_loads(self, seq_len);
        let mut value = 0.0;
        for (loads, probs) in sequences.chunks(e).zip(self.scores.probs.f32s().chunks(seq_len * e)) {
            let num_tokens = (probs.len() / e) as f64;
            for probs in probs.chunks(e) {
                value += loads.iter().zip(probs).map(|(&f, &p)| f64::from(f) * f64::from(p)).sum::<f64>() / num_tokens;
            }
        }
        value * e as f64 / sequences.len().max(1) as f64
    }
}

/// `[sequences, E]`: E times each expert's share of the choices of each sequence.
fn sequence_loads(saved: &FlatSaved, seq_len: usize) -> Vec<f32> {
    let (e, k) = (saved.scores.probs.cols(), saved.ids.cols());
    let mut loads = Vec::new();
    for ids in saved.ids.u32s().chunks(seq_len * k) {
        let mut counts = vec![0_u32; e];
        ids.iter().filter(|&&id| id != NO_EXPERT).for_each(|&id| counts[id as usize] += 1);
        let total: u32 = counts.iter().sum();
        loads.extend(counts.iter().map(|&n| (f64::from(n) * e as f64 / f64::from(total.max(1))) as f32));
    }
    loads
}

/// One token's part of what was saved.
struct Row<'a> {
    probs: &'a [f32],
    gates: Option<&'a [f32]>,
    logits: Option<&'a [f32]>,
    lse: f32,
    ids: &'a [u32],
    weights: &'a [f32],
}

impl Row<'_> {
    /// Adds the gradient `z lse softmax(logits)` of the squared log-sum-exp.
    fn add_z(&self, z: f32, dlogits: &mut [f32]) {
        match (self.gates, self.logits) {
            (Some(_), Some(logits)) => {
                for (d, &logit) in dlogits.iter_mut().zip(logits) {
                    *d += z * self.lse * (logit - self.lse).exp();
                }
            }
            _ => dlogits.iter_mut().zip(self.probs).for_each(|(d, &p)| *d += z * self.lse * p),
        }
    }
}

/// How the weights of a token's experts are taken from their gates.
#[derive(Clone, Copy)]
struct WeightRule {
    is_normalized: bool,
    scale: f32,
}

impl WeightRule {
    fn weigh(self, gates: &[f32], ids: &[u32], weights: &mut [f32]) {
        for (weight, &id) in weights.iter_mut().zip(ids) {
            *weight = gates.get(id as usize).copied().unwrap_or(0.0);
        }
        let sum = if self.is_normalized { weights.iter().sum::<f32>() + WEIGHT_EPS } else { 1.0 };
        weights.iter_mut().for_each(|weight| *weight *= self.scale / sum);
    }

    /// Adds the gradient of the gates.
    fn backward(self, row: &Row<'_>, dweights: &[f32], dgates: &mut [f32]) {
        let gates = row.gates.unwrap_or(row.probs);
        let chosen = || row.ids.iter().zip(dweights).filter(|(id, _)| **id != NO_EXPERT);
        if !self.is_normalized {
            chosen().for_each(|(&id, dweight)| dgates[id as usize] += self.scale * dweight);
            return;
        }
        let sum: f32 = chosen().map(|(&id, _)| gates[id as usize]).sum::<f32>() + WEIGHT_EPS;
        for (&id, &dweight) in chosen() {
            // As differences, which lose no digit where one weight is nearly all.
            let others = row.ids.iter().zip(row.weights).zip(dweights).filter(|((id, _), _)| **id != NO_EXPERT);
            let centered: f32 = others.map(|((_, weight), other)| weight * (dweight - other)).sum();
            dgates[id as usize] += centered / sum;
        }
    }
}

/// What the losses say of the distributions.
struct ProbGrads<'a> {
    balance: &'a [f32],
    /// `[sequences, E]` and the tokens of a sequence; empty for none.
    sequence: (Vec<f32>, usize),
}

impl<'a> ProbGrads<'a> {
    fn of(saved: &FlatSaved, losses: &'a LossGrad, seq_len: usize) -> Self {
        let num_tokens = saved.ids.rows();
        let mut sequence = Vec::new();
        if losses.sequence != 0.0 && seq_len > 0 && num_tokens > 0 {
            let num_sequences = num_tokens.div_ceil(seq_len);
            sequence = sequence_loads(saved, seq_len);
            for (i, loads) in sequence.chunks_mut(saved.scores.probs.cols()).enumerate() {
                let len = seq_len.min(num_tokens - i * seq_len);
                loads.iter_mut().for_each(|load| *load *= losses.sequence / (num_sequences * len) as f32);
            }
        }
        Self { balance: &losses.balance, sequence: (sequence, seq_len) }
    }

    /// The gradient of the distribution of token `t`.
    fn fill(&self, t: usize, dprobs: &mut [f32]) {
        if self.balance.is_empty() {
            dprobs.fill(0.0);
        } else {
            dprobs.copy_from_slice(self.balance);
        }
        let (sequence, seq_len) = &self.sequence;
        if !sequence.is_empty() {
            let of_sequence = &sequence[t / seq_len * dprobs.len()..];
            dprobs.iter_mut().zip(of_sequence).for_each(|(d, s)| *d += s);
        }
    }
}

/// The gradient of one token's logits from those of its distribution and of its gates.
fn logit_grads(row: &Row<'_>, dprobs: &mut [f32], dgates: &mut [f32], dlogits: &mut [f32]) {
    match row.gates {
        None => {
            for ((d, dprob), dgate) in dlogits.iter_mut().zip(&*dprobs).zip(&*dgates) {
                *d = dprob + dgate;
            }
            rows::softmax_backward(row.probs, dlogits);
        }
        Some(gates) => {
            rows::distribute_backward(gates, row.probs, dprobs, dgates);
            for ((d, dgate), &gate) in dlogits.iter_mut().zip(&*dgates).zip(gates) {
                *d = dgate * gate * (1.0 - gate);
            }
        }
    }
}

fn score_row(logits: &mut [f32], probs: &mut [f32], gates: Option<&mut [f32]>) -> rows::RowSums {
    if logits.iter().any(|logit| !logit.is_finite()) {
        logits.fill(0.0);
        probs.fill(f32::NAN);
        gates.into_iter().for_each(|gates| gates.fill(f32::NAN));
        return rows::RowSums { lse: f32::NAN, entropy: f32::NAN };
    }
    match gates {
        None => rows::softmax(logits, probs),
        Some(gates) => rows::sigmoid(logits, gates, probs),
    }
}

/// Sums over the rows, block by block.
fn sums(ctx: &Context, probs: &Tensor, lse: &Tensor, entropy: &Tensor) -> ScoreSums {
    let e = probs.cols();
    let mut partial = vec![0.0_f64; probs.rows().div_ceil(ROWS) * (e + 2)];
    let inputs = partial.chunks_mut(e + 2).zip(blocks::of(probs.f32s(), e));
    let inputs = inputs.zip(blocks::of(lse.f32s(), 1)).zip(blocks::of(entropy.f32s(), 1));
    blocks::for_each(ctx, inputs, |_, (((sums, probs), lse), entropy)| {
        for probs in probs.chunks(e) {
            sums.iter_mut().zip(probs).for_each(|(sum, &p)| *sum += f64::from(p));
        }
        sums[e] = entropy.iter().map(|&x| f64::from(x)).sum();
        sums[e + 1] = lse.iter().map(|&x| f64::from(x).powi(2)).sum();
    });
    let mut sums = ScoreSums { probs: vec![0.0; e], entropy: 0.0, lse_squared: 0.0 };
    for block in partial.chunks(e + 2) {
        sums.probs.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
        sums.entropy += block[e];
        sums.lse_squared += block[e + 1];
    }
    sums
}
