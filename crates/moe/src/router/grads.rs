//! Backward of a router: from the gradients of the expert weights and of the auxiliary losses to those of the logits.

use moeworks_ops::Context;
use moeworks_ops::elementwise::add_assign;
use moeworks_ops::linear::{Write, linear_backward_input, linear_backward_weight};
use moeworks_ops::score_top_k::{Scored, ScoredGrads, score_top_k_backward};
use moeworks_ops::top_k::{ScoreGrads, TopK, softmax_top_k_backward};
use moeworks_tensor::{DType, Tensor};

use super::blocks::{self, ROWS};
use super::logits::{LogitGrads, NOISE};
use super::noise::LogitNoise;
use super::score_router::{RouterSaved, ScoreBackend, ScoreRouter};
use super::scores::{Gate, Scores};
use super::token_groups::{CountedChoices, TokenGroupGrads, TokenGroups};
use super::weigh::{WeightRule, is_normalized};
use super::{load, rows};
use crate::{LossGrad, ModalityStats, MoeWeights, NO_EXPERT};

/// The gradients that arrive at a router.
#[derive(Clone, Copy)]
pub(crate) struct RouterGrads<'a> {
    /// `[T, K]`: the gradient of the expert weights.
    pub(crate) dweights: &'a Tensor,
    /// `[T, K]`: the experts to which these weights were applied.
    pub(crate) used: &'a Tensor,
    /// The gradients of the auxiliary losses.
    pub(crate) losses: &'a LossGrad,
    /// `[T, E]`: the gradient of the logits from the next layer, with gating residuals.
    pub(crate) d_next_router_logits: Option<&'a Tensor>,
}

/// A deferred computation of the gradients of a router's weights.
pub(crate) struct RouterGradTask {
    dlogits: Tensor,
    /// The gradient of the pre-activation of the learned noise's deviations.
    draw: Option<Tensor>,
    /// The gradient of the previous layer's logits.
    pub(crate) dprevious: Option<Tensor>,
    /// Tensors left by the backward of the logits, for the weights' gradients.
    left: Vec<Tensor>,
}

impl ScoreRouter<'_> {
    /// Adds the gradient of `x` through the router to `dx`. Returns a task for the router's weights, which also holds
    /// the gradient of the previous layer's logits; `None` for a router without weights.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        saved: &RouterSaved,
        grads: RouterGrads<'_>,
        dx: &mut Tensor,
    ) -> Option<RouterGradTask> {
        let RouterGrads { dweights, used, losses, d_next_router_logits } = grads;
        if !saved.logits.is_learned() {
            return None;
        }
        let mut dlogits = if saved.backend == ScoreBackend::Fused && losses.is_simple() {
            self.fused_grads(ctx, saved, dweights, losses)
        } else if saved.backend == ScoreBackend::GpuScores && losses.is_simple_by_parts() {
            self.fused_score_grads(ctx, saved, dweights, losses)
        } else {
            let mut dweights = dweights.copied(ctx.pool());
            add_importance(&mut dweights, used.u32s(), &losses.importance);
            self.logit_grads(ctx, saved, &dweights, losses)
        };
        let mut draw = None;
        if let LogitNoise::Learned(..) = saved.noise {
            draw = Some(noise_grads(ctx, saved, &dlogits));
        }
        if let Some(clean) = saved.clean.as_ref().filter(|_| !losses.load.is_empty()) {
            load::backward(ctx, saved, clean, &losses.load, &mut dlogits, draw.as_mut());
        }
        if let Some(d_next) = d_next_router_logits {
            add_assign(ctx, &mut dlogits, d_next);
        }
        let dprevious = saved.residual.as_ref().and_then(|residual| residual.backward(ctx, self.weights, &dlogits));
        let z = losses.z / saved.ids.rows().max(1) as f32;
        let logit_grads = LogitGrads { dlogits: &dlogits, z };
        let left = if draw.is_none() && saved.input_noise.is_none() {
            saved.logits.backward(ctx, self.weights, logit_grads, dx)
        } else {
            let (mut own, left) = saved.logits.backward_alone(ctx, self.weights, logit_grads);
            if let Some(draw) = &draw {
                let noise_dx = linear_backward_input(ctx, draw, self.weights.extra(NOISE), DType::F32);
                add_assign(ctx, &mut own, &noise_dx);
            }
            if let Some(noise) = saved.input_noise {
                noise.apply_assign(ctx, &mut own);
            }
            add_assign(ctx, dx, &own);
            left
        };
        Some(RouterGradTask { dlogits, draw, dprevious, left })
    }

    fn fused_grads(&self, ctx: &Context, saved: &RouterSaved, dweights: &Tensor, losses: &LossGrad) -> Tensor {
        let grads = ScoreGrads {
            weights: dweights.into(),
            probs: &losses.balance,
            lse_squared: losses.z / saved.ids.rows().max(1) as f32,
        };
        let Scores { probs, lse, sums, .. } = &saved.scores;
        let (ids, weights) = (saved.ids.clone(), saved.weights.clone());
        let (lse, sums) = (lse.clone(), sums.clone());
        let scores = TopK { probs: probs.clone(), ids, weights, lse, sums, sorted: None };
        softmax_top_k_backward(ctx, &scores, is_normalized(self.config), grads)
    }

    /// Returns the gradient of the logits if a GPU computed the scores.
    fn fused_score_grads(&self, ctx: &Context, saved: &RouterSaved, dweights: &Tensor, losses: &LossGrad) -> Tensor {
        let (num_tokens, e) = (saved.scores.probs.rows(), saved.scores.probs.cols());
        let mut part = (num_tokens.max(1), 0);
        let mut probs = losses.balance.clone();
        if losses.sequence != 0.0 && saved.seq_len > 0 {
            let rows;
            (rows, part) = saved.sequence_grads(losses).rows();
            let balance = rows.chunks(e).flat_map(|_| losses.balance.iter().copied());
            probs =
                rows.iter().zip(balance.chain(std::iter::repeat(0.0))).map(|(row, balance)| row + balance).collect();
        }
        let lse_squared = losses.z / num_tokens.max(1) as f32;
        let grads = ScoredGrads { weights: dweights.into(), probs: &probs, part, lse_squared };
        let Scores { probs, gates, logits, lse, sums, .. } = &saved.scores;
        let (probs, gates, lse, sums) = (probs.clone(), gates.clone(), lse.clone(), sums.clone());
        let (logits, ids) = (logits.clone().expect("scores of a GPU keep their logits"), saved.ids.clone());
        let scored = Scored { probs, gates, logits, lse, ids, weights: saved.weights.clone(), sums };
        let rule = self.score_rule(saved.top_k, saved.temperature);
        score_top_k_backward(ctx, &scored, &rule, grads).expect("a GPU")
    }

    /// Returns the gradient of the logits before noise and temperature, computed token by token.
    fn logit_grads(&self, ctx: &Context, saved: &RouterSaved, dweights: &Tensor, losses: &LossGrad) -> Tensor {
        let (num_tokens, e) = (saved.scores.probs.rows(), saved.scores.probs.cols());
        let dprobs = ProbGrads::new(saved, losses);
        let z = 2.0 * losses.z / num_tokens.max(1) as f32;
        let l1 = self.l1(losses) / num_tokens.max(1) as f32;
        let rule = WeightRule::from_config(self.config);
        let gate = self.gate();
        let mixer = self.sparsemixer();
        let mut dlogits = ctx.empty(&[num_tokens, e], DType::F32);
        blocks::for_each(ctx, blocks::split_mut(dlogits.f32s_mut(), e), |block, dlogits| {
            let (mut dprob, mut dgate) = (vec![0.0; e], vec![0.0; e]);
            for (t, dlogits) in (block * ROWS..).zip(dlogits.chunks_mut(e)) {
                let row = saved.row(t);
                dprobs.fill(t, row.probs, &mut dprob);
                dgate.iter_mut().enumerate().for_each(|(e, d)| *d = l1 * losses.l1_loads.get(e).unwrap_or(&1.0));
                let dweights = &dweights.f32s()[t * row.ids.len()..(t + 1) * row.ids.len()];
                if mixer.is_none() {
                    rule.backward(row.ids, row.weights, row.gates.unwrap_or(row.probs), dweights, &mut dgate);
                }
                row.logit_grads(gate, &dprob, &mut dgate, dlogits);
                if let (Some(mixer), Some(logits)) = (mixer, row.logits) {
                    mixer.backward(logits, &mut dprob, row.ids, dweights, dlogits);
                }
                row.add_z(z, dlogits);
                if saved.temperature != 1.0 {
                    dlogits.iter_mut().for_each(|d| *d /= saved.temperature);
                }
            }
        });
        dlogits
    }

    /// Returns the gradient of each gate by the L1 loss, times T.
    fn l1(&self, losses: &LossGrad) -> f32 {
        losses.l1 * self.scheme().l1_weight(self.weights)
    }
}

impl RouterGradTask {
    /// Writes or adds the gradients of the router's weights; `x` is the layer's input.
    pub(crate) fn run(self, ctx: &Context, saved: &RouterSaved, x: &Tensor, write: Write, grads: &mut MoeWeights) {
        let noisy = saved.input_noise.map(|noise| noise.apply(ctx, x));
        let x = noisy.as_ref().unwrap_or(x);
        if let Some(draw) = &self.draw {
            linear_backward_weight(ctx, draw, x, DType::F32, write, grads.extra_mut(NOISE));
        }
        if let Some(residual) = &saved.residual {
            residual.run(ctx, &self.dlogits, write, grads);
        }
        saved.logits.weight_grads(ctx, &self.left, &self.dlogits, x, write, grads);
    }
}

/// Adds the gradient of the experts' importance, the sum of their weights.
fn add_importance(dweights: &mut Tensor, used: &[u32], importance: &[f32]) {
    if !importance.is_empty() {
        let used = dweights.f32s_mut().iter_mut().zip(used).filter(|(_, id)| **id != NO_EXPERT);
        used.for_each(|(d, &id)| *d += importance[id as usize]);
    }
}

/// Returns the gradient of r, where the noise's deviation is `softplus(r)`: `dlogit n sigmoid(r)`.
fn noise_grads(ctx: &Context, saved: &RouterSaved, dlogits: &Tensor) -> Tensor {
    let mut draw = dlogits.copied(ctx.pool());
    let LogitNoise::Learned(deviations, draws) = &saved.noise else { return draw };
    let e = deviations.cols();
    let rows = blocks::split_mut(draw.f32s_mut(), e).zip(blocks::split(deviations.f32s(), e));
    blocks::for_each(ctx, rows, |block, (draw, deviations)| {
        let normals = draws.normals(ctx.isa(), block * ROWS * e, draw.len());
        for ((d, &deviation), normal) in draw.iter_mut().zip(deviations).zip(normals) {
            *d *= normal * LogitNoise::slope(deviation);
        }
    });
    draw
}

impl RouterSaved {
    fn row(&self, t: usize) -> Row<'_> {
        let Scores { probs, gates, logits, lse, .. } = &self.scores;
        let (e, k) = (probs.cols(), self.ids.cols());
        let row = |tensor: &'_ Tensor| -> std::ops::Range<usize> { t * tensor.cols()..(t + 1) * tensor.cols() };
        Row {
            probs: &probs.f32s()[t * e..(t + 1) * e],
            gates: gates.as_ref().map(|gates| &gates.f32s()[row(gates)]),
            logits: logits.as_ref().map(|logits| &logits.f32s()[row(logits)]),
            lse: lse.f32s()[t],
            ids: &self.ids.u32s()[t * k..(t + 1) * k],
            weights: &self.weights.f32s()[t * k..(t + 1) * k],
        }
    }

    /// Computes the sequence-wise balance loss (DeepSeek-V3): the mean over the sequences of `sum_i f_i P_i`, with
    /// `f_i` expert i's share of the sequence's choices times E and `P_i` its mean probability there.
    pub(crate) fn sequence_loss(&self) -> f64 {
        let (e, sequences) = (self.scores.probs.cols(), self.sequences());
        let loss = match &self.sums_of_pieces {
            Some((starts, sums)) => {
                let starts = starts.iter().map(|&start| start as usize);
                sequences.loss_of(starts.zip(sums.f32s().chunks(e)), e)
            }
            None => sequences.loss(self.scores.probs.f32s(), e),
        };
        e as f64 * loss
    }

    /// Computes GShard's auxiliary loss (2006.16668, algorithm 1): the mean over the local groups of `(1/E) sum_i c_i
    /// m_i`, with `c_i` the share of the group's tokens whose first choice is expert i and `m_i` its mean probability
    /// there. `firsts [E]` counts the first choices of all tokens.
    pub(crate) fn gshard_loss(&self, firsts: &[u32]) -> f64 {
        let (num_tokens, e) = (self.scores.probs.rows(), self.scores.probs.cols());
        let is_one_group = self.shared_groups.is_none() && (self.group_len == 0 || self.group_len >= num_tokens);
        let sum = if is_one_group {
            let total = firsts.iter().sum::<u32>().max(1);
            let shares = firsts.iter().map(|&n| f64::from(n) / f64::from(total));
            shares.zip(&self.scores.sums.probs).map(|(share, p)| share * p).sum::<f64>() / num_tokens.max(1) as f64
        } else {
            self.with_groups(|groups| groups.loss(self.scores.probs.f32s(), e))
        };
        sum / e as f64
    }

    /// Returns the gradient of the distributions by the sequence-wise loss.
    fn sequence_grads(&self, losses: &LossGrad) -> TokenGroupGrads {
        let e = self.scores.probs.cols();
        self.sequences().grads(e, f64::from(losses.sequence) * e as f64)
    }

    /// Returns the first `first_k` choices of each token.
    fn counted(&self, first_k: usize) -> CountedChoices<'_> {
        let (ids, top_k, num_experts) = (self.ids.u32s(), self.ids.cols(), self.scores.probs.cols());
        CountedChoices { ids, top_k, first_k, num_experts }
    }

    /// Returns the sequences as groups of tokens, with all choices.
    fn sequences(&self) -> TokenGroups {
        TokenGroups::new(self.counted(self.ids.cols()), self.seq_len, None)
    }

    /// Calls `get` with the local groups and the first choices of their tokens.
    fn with_groups<R>(&self, get: impl FnOnce(&TokenGroups) -> R) -> R {
        match &self.shared_groups {
            Some(groups) => get(groups),
            None => get(&TokenGroups::new(self.counted(1), self.group_len, None)),
        }
    }

    /// Computes the statistics of each modality's tokens; empty if there is one modality.
    pub(crate) fn modality_stats(&self) -> Vec<ModalityStats> {
        if self.modalities.is_empty() {
            return Vec::new();
        }
        let e = self.scores.probs.cols();
        let count = self.modalities.iter().max().map_or(0, |&m| m as usize + 1);
        let mut sums = vec![(0_usize, vec![0.0_f64; e], 0.0_f64); count];
        for (&modality, probs) in self.modalities.iter().zip(self.scores.probs.f32s().chunks(e)) {
            let (num_tokens, sum, entropy) = &mut sums[modality as usize];
            *num_tokens += 1;
            for (sum, &p) in sum.iter_mut().zip(probs) {
                *sum += f64::from(p);
                *entropy -= if p > 0.0 { f64::from(p) * f64::from(p).ln() } else { 0.0 };
            }
        }
        let mean = |(num_tokens, sum, entropy): (usize, Vec<f64>, f64)| {
            let per_token = 1.0 / num_tokens.max(1) as f64;
            let mean_prob = sum.iter().map(|sum| (sum * per_token) as f32).collect();
            ModalityStats { num_tokens, mean_prob, mean_entropy: entropy * per_token }
        };
        sums.into_iter().map(mean).collect()
    }
}

/// One token's saved state.
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
        if z == 0.0 {
            return;
        }
        match (self.gates, self.logits) {
            (Some(_), Some(logits)) => {
                for (d, &logit) in dlogits.iter_mut().zip(logits) {
                    *d += z * self.lse * (logit - self.lse).exp();
                }
            }
            _ => dlogits.iter_mut().zip(self.probs).for_each(|(d, &p)| *d += z * self.lse * p),
        }
    }

    /// Computes the gradient of the logits from those of the distribution and of the gates. `gate` is the function
    /// that made the gates, if they are not the distribution.
    fn logit_grads(&self, gate: Gate, dprobs: &[f32], dgates: &mut [f32], dlogits: &mut [f32]) {
        let Some(gates) = self.gates else {
            for ((d, dprob), dgate) in dlogits.iter_mut().zip(dprobs).zip(&*dgates) {
                *d = dprob + dgate;
            }
            rows::softmax_backward(self.probs, dlogits);
            return;
        };
        rows::distribute_backward(gates, self.probs, dprobs, dgates);
        for ((d, dgate), &g) in dlogits.iter_mut().zip(&*dgates).zip(gates) {
            let slope = match gate {
                Gate::Relu => f32::from(u8::from(g > 0.0)),
                _ => g * (1.0 - g),
            };
            *d = dgate * slope;
        }
    }
}

/// The gradients of the distributions by the auxiliary losses.
struct ProbGrads<'a> {
    balance: &'a [f32],
    /// The gradients of each sequence and of each local group.
    parts: Vec<TokenGroupGrads>,
    modalities: &'a [u32],
    /// `[M, E]`, or empty.
    modality_balance: &'a [f32],
    /// `[M]`: gradient of the entropy of each token of a modality; empty for none.
    entropy: &'a [f32],
}

impl<'a> ProbGrads<'a> {
    fn new(saved: &'a RouterSaved, losses: &'a LossGrad) -> Self {
        let e = saved.scores.probs.cols();
        let mut parts = Vec::new();
        if losses.sequence != 0.0 && saved.seq_len > 0 {
            parts.push(saved.sequence_grads(losses));
        }
        if losses.gshard != 0.0 {
            parts.push(saved.with_groups(|groups| groups.grads(e, f64::from(losses.gshard) / e as f64)));
        }
        let LossGrad { balance, modality_balance, entropy, .. } = losses;
        Self { balance, parts, modalities: &saved.modalities, modality_balance, entropy }
    }

    /// Computes the gradient of the distribution `probs` of token `t`.
    fn fill(&self, t: usize, probs: &[f32], dprobs: &mut [f32]) {
        let e = dprobs.len();
        if self.balance.is_empty() {
            dprobs.fill(0.0);
        } else {
            dprobs.copy_from_slice(self.balance);
        }
        for grads in &self.parts {
            add(dprobs, grads.token(t, e));
        }
        let modality = self.modalities.get(t).copied().unwrap_or(0) as usize;
        if !self.modality_balance.is_empty() {
            add(dprobs, &self.modality_balance[modality * e..]);
        }
        if let Some(&entropy) = self.entropy.get(modality).filter(|entropy| **entropy != 0.0) {
            // Up to a constant, which has no effect through the softmax.
            for (d, &p) in dprobs.iter_mut().zip(probs) {
                *d -= entropy * p.max(f32::MIN_POSITIVE).ln();
            }
        }
    }
}

fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}
