//! A reference MoE layer in f64, token by token. It shares nothing with the crate except the configuration: plain
//! loops over tokens and their choices, forward and backward. Its backward is checked against finite differences of
//! its forward.

use moeworks_moe::{GroupScore, MoeConfig, Overflow, ScoreFunction, ScoreOrder};
use moeworks_ops::Activation;

#[derive(Clone, Debug, Default)]
pub(crate) struct RefWeights {
    pub(crate) router: Vec<f64>,
    pub(crate) gate_up: Vec<f64>,
    pub(crate) down: Vec<f64>,
    pub(crate) shared: Option<RefShared>,
    /// The bias of each expert; empty for none.
    pub(crate) bias: Vec<f64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct RefShared {
    pub(crate) gate_up: Vec<f64>,
    pub(crate) down: Vec<f64>,
}

impl RefWeights {
    pub(crate) fn lists_mut(&mut self) -> Vec<&mut Vec<f64>> {
        let shared = self.shared.iter_mut().flat_map(|shared| [&mut shared.gate_up, &mut shared.down]);
        [&mut self.router, &mut self.gate_up, &mut self.down].into_iter().chain(shared).collect()
    }
}

/// The coefficients of the tests' scalar loss: `sum dy y + sum over tokens and experts of balance p + z mean lse^2 +
/// sequence (mean over sequences of sum_i f_i P_i)`.
#[derive(Clone, Copy)]
pub(crate) struct RefLoss<'a> {
    pub(crate) dy: &'a [f64],
    pub(crate) balance: &'a [f64],
    pub(crate) z: f64,
    pub(crate) sequence: f64,
    pub(crate) seq_len: usize,
}

/// A token's experts, and whether each is within the capacity.
#[derive(Clone, Debug)]
pub(crate) struct RefChoice {
    pub(crate) ids: Vec<usize>,
    pub(crate) is_kept: Vec<bool>,
}

#[derive(Clone, Debug)]
pub(crate) struct RefToken {
    pub(crate) ids: Vec<usize>,
    pub(crate) weights: Vec<f64>,
    pub(crate) is_kept: Vec<bool>,
    pub(crate) logits: Vec<f64>,
    pub(crate) gates: Vec<f64>,
    pub(crate) probs: Vec<f64>,
    pub(crate) lse: f64,
}

pub(crate) struct RefForward {
    pub(crate) y: Vec<f64>,
    pub(crate) tokens: Vec<RefToken>,
}

pub(crate) struct RefBackward {
    pub(crate) dx: Vec<f64>,
    pub(crate) grads: RefWeights,
}

/// A layer of `config`; `noise` holds the factors on the router's input, if any.
pub(crate) struct Reference<'a> {
    pub(crate) config: &'a MoeConfig,
    pub(crate) noise: Option<&'a [f64]>,
}

impl Reference<'_> {
    pub(crate) fn forward(&self, weights: &RefWeights, x: &[f64]) -> RefForward {
        self.forward_with(weights, x, self.choose(weights, x))
    }

    /// Computes the output for given choices, which finite differences keep fixed.
    fn forward_with(&self, weights: &RefWeights, x: &[f64], choices: Vec<RefChoice>) -> RefForward {
        let (d, f) = (self.config.width, self.config.expert_width);
        let a = self.config.activation.num_inputs();
        let mut forward = RefForward { y: Vec::new(), tokens: Vec::new() };
        for ((x, router_x), choice) in x.chunks(d).zip(self.router_input(x).chunks(d)).zip(choices) {
            let token = self.score(&logits(weights, router_x), choice);
            let mut y = vec![0.0; d];
            for ((&e, &weight), _) in
                token.ids.iter().zip(&token.weights).zip(&token.is_kept).filter(|choice| *choice.1)
            {
                let up = &weights.gate_up[e * a * f * d..][..a * f * d];
                let out = feed_forward(self.config.activation, up, &weights.down[e * d * f..][..d * f], x);
                y.iter_mut().zip(out).for_each(|(y, o)| *y += weight * o);
            }
            if let Some(shared) = &weights.shared {
                let out = feed_forward(self.config.activation, &shared.gate_up, &shared.down, x);
                y.iter_mut().zip(out).for_each(|(y, o)| *y += o);
            }
            forward.y.extend(y);
            forward.tokens.push(token);
        }
        forward
    }

    pub(crate) fn router_input(&self, x: &[f64]) -> Vec<f64> {
        match self.noise {
            Some(noise) => x.iter().zip(noise).map(|(x, noise)| x * noise).collect(),
            None => x.to_vec(),
        }
    }

    /// Chooses the experts of each token. All first choices are served before any second one.
    pub(crate) fn choose(&self, weights: &RefWeights, x: &[f64]) -> Vec<RefChoice> {
        let k = self.config.top_k;
        let mut choices: Vec<RefChoice> = Vec::new();
        let (mut rankings, mut best) = (Vec::new(), Vec::new());
        for x in self.router_input(x).chunks(self.config.width) {
            let ranking = self.ranking(&logits(weights, x), &weights.bias);
            let mut ids = sorted(&ranking);
            ids.truncate(k);
            best.push(self.gates(&logits(weights, x))[ids[0]]);
            choices.push(RefChoice { ids, is_kept: vec![true; k] });
            rankings.push(ranking);
        }
        if self.config.capacity_factor != 0.0 {
            let size = match self.config.router.local_group {
                0 => choices.len(),
                size => size.min(choices.len()),
            };
            let share = f64::from(self.config.capacity_factor.abs()) * (k * size) as f64;
            let capacity = (share / self.config.num_experts as f64).ceil() as usize;
            let size = size.max(1);
            for (i, choices) in choices.chunks_mut(size).enumerate() {
                self.serve(choices, &rankings[i * size..], &best[i * size..], capacity);
            }
        }
        choices
    }

    /// Marks or reroutes the choices beyond the capacity within one group of tokens.
    fn serve(&self, choices: &mut [RefChoice], rankings: &[Vec<f64>], best: &[f64], capacity: usize) {
        let mut order: Vec<usize> = (0..choices.len()).collect();
        if self.config.router.overflow == Overflow::Priority {
            order.sort_by(|&a, &b| best[b].total_cmp(&best[a]));
        }
        let mut taken = vec![0; self.config.num_experts];
        for rank in 0..self.config.top_k {
            for &t in &order {
                let RefChoice { ids, is_kept } = &mut choices[t];
                if taken[ids[rank]] >= capacity && self.config.router.overflow == Overflow::Reroute {
                    let free = |e: &usize| taken[*e] < capacity && !ids.contains(e) && rankings[t][*e].is_finite();
                    if let Some(next) = sorted(&rankings[t]).into_iter().find(free) {
                        ids[rank] = next;
                    }
                }
                is_kept[rank] = taken[ids[rank]] < capacity;
                taken[ids[rank]] += 1;
            }
        }
    }

    /// Returns the values by which experts are chosen; negative infinity outside the best groups.
    fn ranking(&self, logits: &[f64], bias: &[f64]) -> Vec<f64> {
        let router = &self.config.router;
        if bias.is_empty() && router.top_groups == router.num_groups {
            return logits.to_vec();
        }
        let gates = self.gates(logits);
        let mut ranking: Vec<f64> = (0..logits.len()).map(|e| gates[e] + bias.get(e).copied().unwrap_or(0.0)).collect();
        let size = logits.len() / router.num_groups;
        let of_group = |scores: &[f64]| {
            let mut sorted = scores.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let count = if router.group_score == GroupScore::TopTwo { 2 } else { 1 };
            sorted.iter().take(count).sum::<f64>()
        };
        let best = sorted(&ranking.chunks(size).map(of_group).collect::<Vec<_>>());
        for &group in &best[router.top_groups..] {
            ranking[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
        }
        ranking
    }

    fn gates(&self, logits: &[f64]) -> Vec<f64> {
        match self.config.router.scores {
            ScoreFunction::Softmax => softmax(logits),
            ScoreFunction::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        }
    }

    fn is_normalized(&self) -> bool {
        self.config.normalize_weights || self.config.score_order == ScoreOrder::TopKThenSoftmax
    }

    fn score(&self, logits: &[f64], RefChoice { ids, is_kept }: RefChoice) -> RefToken {
        let gates = self.gates(logits);
        let total: f64 = gates.iter().sum();
        let probs: Vec<f64> = gates.iter().map(|gate| gate / total).collect();
        let is_sigmoid = self.config.router.scores == ScoreFunction::Sigmoid;
        let weights: Vec<f64> = match self.config.score_order {
            ScoreOrder::TopKThenSoftmax if !is_sigmoid => softmax(&ids.iter().map(|&e| logits[e]).collect::<Vec<_>>()),
            _ => {
                let chosen: Vec<f64> = ids.iter().map(|&e| gates[e]).collect();
                let sum = if self.is_normalized() { chosen.iter().sum() } else { 1.0 };
                chosen.iter().map(|p| p / sum).collect()
            }
        };
        let weights = weights.iter().map(|w| w * f64::from(self.config.router.routed_scale)).collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + logits.iter().map(|l| (l - top).exp()).sum::<f64>().ln();
        RefToken { ids, weights, is_kept, logits: logits.to_vec(), gates, probs, lse }
    }

    /// Returns `[sequences, E]`: the factor of each probability of a sequence in the sequence-wise loss.
    fn sequence_factors(&self, tokens: &[RefToken], seq_len: usize) -> Vec<Vec<f64>> {
        if seq_len == 0 {
            return Vec::new();
        }
        let e = self.config.num_experts;
        let num_sequences = tokens.len().div_ceil(seq_len);
        let of_sequence = |tokens: &[RefToken]| {
            let per_token = e as f64 / (self.config.top_k * tokens.len()) as f64;
            let mut f = vec![0.0; e];
            tokens.iter().flat_map(|token| &token.ids).for_each(|&id| f[id] += per_token);
            f.iter().map(|f| f / (tokens.len() * num_sequences) as f64).collect()
        };
        tokens.chunks(seq_len).map(of_sequence).collect()
    }

    pub(crate) fn sequence_loss(&self, tokens: &[RefToken], seq_len: usize) -> f64 {
        let factors = self.sequence_factors(tokens, seq_len);
        self.sequence_value(tokens, seq_len, &factors)
    }

    fn sequence_value(&self, tokens: &[RefToken], seq_len: usize, factors: &[Vec<f64>]) -> f64 {
        let of_token = |(t, token): (usize, &RefToken)| -> f64 {
            factors[t / seq_len].iter().zip(&token.probs).map(|(f, p)| f * p).sum()
        };
        if factors.is_empty() { 0.0 } else { tokens.iter().enumerate().map(of_token).sum() }
    }

    pub(crate) fn loss(&self, forward: &RefForward, loss: &RefLoss<'_>) -> f64 {
        let output: f64 = forward.y.iter().zip(loss.dy).map(|(y, dy)| y * dy).sum();
        let balance: f64 =
            forward.tokens.iter().flat_map(|token| token.probs.iter().zip(loss.balance)).map(|(p, b)| p * b).sum();
        let z: f64 = forward.tokens.iter().map(|token| token.lse.powi(2)).sum();
        let sequence = self.sequence_loss(&forward.tokens, loss.seq_len);
        output + balance + loss.z * z / forward.tokens.len().max(1) as f64 + loss.sequence * sequence
    }

    pub(crate) fn backward(&self, weights: &RefWeights, x: &[f64], loss: &RefLoss<'_>) -> RefBackward {
        let (d, f, a) = (self.config.width, self.config.expert_width, self.config.activation.num_inputs());
        let forward = self.forward(weights, x);
        let mut grads = weights.clone();
        grads.lists_mut().into_iter().for_each(|list| list.fill(0.0));
        let mut dx = vec![0.0; x.len()];
        let router_x = self.router_input(x);
        let factors = self.sequence_factors(&forward.tokens, loss.seq_len);
        for (t, token) in forward.tokens.iter().enumerate() {
            let range = t * d..(t + 1) * d;
            let (x, dy, dx) = (&x[range.clone()], &loss.dy[range.clone()], &mut dx[range.clone()]);
            let mut dweights = vec![0.0; token.ids.len()];
            for (i, &e) in token.ids.iter().enumerate().filter(|&(i, _)| token.is_kept[i]) {
                let (up, down) = (e * a * f * d..(e + 1) * a * f * d, e * d * f..(e + 1) * d * f);
                let w = FeedForward { gate_up: &weights.gate_up[up.clone()], down: &weights.down[down.clone()] };
                let scaled: Vec<f64> = dy.iter().map(|dy| dy * token.weights[i]).collect();
                let into = FeedForwardGrads { gate_up: &mut grads.gate_up[up], down: &mut grads.down[down] };
                feed_forward_backward(self.config.activation, w, x, &scaled, dx, into);
                let out = feed_forward(self.config.activation, w.gate_up, w.down, x);
                dweights[i] = out.iter().zip(dy).map(|(o, dy)| o * dy).sum();
            }
            if let (Some(shared), Some(grads)) = (&weights.shared, &mut grads.shared) {
                let w = FeedForward { gate_up: &shared.gate_up, down: &shared.down };
                let into = FeedForwardGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
                feed_forward_backward(self.config.activation, w, x, dy, dx, into);
            }
            let mut dprobs = loss.balance.to_vec();
            if let Some(factors) = factors.get(t.checked_div(loss.seq_len).unwrap_or(0)) {
                dprobs.iter_mut().zip(factors).for_each(|(d, f)| *d += loss.sequence * f);
            }
            let dlogits = self.logit_grads(token, &dweights, &dprobs, loss.z / forward.tokens.len() as f64);
            for (e, dlogit) in dlogits.iter().enumerate() {
                for i in 0..d {
                    grads.router[e * d + i] += dlogit * router_x[t * d + i];
                    let noise = self.noise.map_or(1.0, |noise| noise[t * d + i]);
                    dx[i] += dlogit * weights.router[e * d + i] * noise;
                }
            }
        }
        RefBackward { dx, grads }
    }

    /// Computes the gradient of the logits by the Jacobians, entry by entry.
    fn logit_grads(&self, token: &RefToken, dweights: &[f64], dprobs: &[f64], z: f64) -> Vec<f64> {
        let (n, scale) = (token.probs.len(), f64::from(self.config.router.routed_scale));
        let mut dgates = vec![0.0; n];
        if self.is_normalized() {
            let sum: f64 = token.ids.iter().map(|&e| token.gates[e]).sum();
            for ((&e, &g), weight) in token.ids.iter().zip(dweights).zip(&token.weights) {
                // w = scale g_e / sum: dw / dg_i = (scale [i = e] - w) / sum for every chosen i.
                dgates[e] += g * scale / sum;
                token.ids.iter().for_each(|&other| dgates[other] -= g * weight / sum);
            }
        } else {
            token.ids.iter().zip(dweights).for_each(|(&e, &g)| dgates[e] += scale * g);
        }
        // p_j = g_j / total.
        let total: f64 = token.gates.iter().sum();
        let mean: f64 = dprobs.iter().zip(&token.probs).map(|(d, p)| d * p).sum();
        dgates.iter_mut().zip(dprobs).for_each(|(dgate, d)| *dgate += (d - mean) / total);
        let softmax = softmax(&token.logits);
        let mut dlogits = vec![0.0; n];
        for (i, dlogit) in dlogits.iter_mut().enumerate() {
            match self.config.router.scores {
                ScoreFunction::Softmax => {
                    for (j, dgate) in dgates.iter().enumerate() {
                        let same = if i == j { 1.0 } else { 0.0 };
                        *dlogit += dgate * softmax[j] * (same - softmax[i]);
                    }
                }
                ScoreFunction::Sigmoid => *dlogit += dgates[i] * token.gates[i] * (1.0 - token.gates[i]),
            }
            *dlogit += z * 2.0 * token.lse * softmax[i];
        }
        dlogits
    }
}

/// Returns the indices by value, highest first; the lower index wins a tie.
fn sorted(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    order
}

/// Computes the logits. The sum starts from plus zero, because `sum` of negative zeros gives a negative zero, which
/// sorts below zero.
fn logits(weights: &RefWeights, x: &[f64]) -> Vec<f64> {
    weights.router.chunks(x.len()).map(|row| row.iter().zip(x).fold(0.0, |sum, (w, x)| sum + w * x)).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
    logits.iter().map(|l| (l - top).exp() / total).collect()
}

/// Computes `down act(gate_up x)`.
pub(crate) fn feed_forward(activation: Activation, gate_up: &[f64], down: &[f64], x: &[f64]) -> Vec<f64> {
    let f = down.len() / x.len();
    let h: Vec<f64> = gate_up.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
    let act: Vec<f64> = (0..f).map(|j| activate(activation, &h, j)[0]).collect();
    down.chunks(f).map(|row| row.iter().zip(&act).map(|(w, a)| w * a).sum()).collect()
}

/// The weights of a feed-forward.
#[derive(Clone, Copy)]
struct FeedForward<'a> {
    gate_up: &'a [f64],
    down: &'a [f64],
}

/// The gradients of a feed-forward's weights.
struct FeedForwardGrads<'a> {
    gate_up: &'a mut [f64],
    down: &'a mut [f64],
}

fn feed_forward_backward(
    activation: Activation,
    FeedForward { gate_up, down }: FeedForward<'_>,
    x: &[f64],
    dy: &[f64],
    dx: &mut [f64],
    FeedForwardGrads { gate_up: dgate_up, down: ddown }: FeedForwardGrads<'_>,
) {
    let (d, f) = (x.len(), down.len() / x.len());
    let h: Vec<f64> = gate_up.chunks(d).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
    for j in 0..f {
        let act = activate(activation, &h, j);
        let da: f64 = (0..d).map(|i| dy[i] * down[i * f + j]).sum();
        (0..d).for_each(|i| ddown[i * f + j] += dy[i] * act[0]);
        for (input, slope) in [(j, act[1]), (f + j, act[2])].into_iter().take(activation.num_inputs()) {
            for i in 0..d {
                dgate_up[input * d + i] += da * slope * x[i];
                dx[i] += da * slope * gate_up[input * d + i];
            }
        }
    }
}

/// Returns the activation of column j and its slopes in the first and the second input.
fn activate(activation: Activation, h: &[f64], j: usize) -> [f64; 3] {
    let x = h[j];
    match activation {
        Activation::SwiGlu => {
            let (up, sigmoid) = (h[h.len() / 2 + j], 1.0 / (1.0 + (-x).exp()));
            [x * sigmoid * up, up * (sigmoid + x * sigmoid * (1.0 - sigmoid)), x * sigmoid]
        }
        Activation::Gelu => {
            let phi = 0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2));
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            [x * phi, phi + x * density, 0.0]
        }
        Activation::GeluTanh => {
            let scale = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (scale * (x + 0.044_715 * x.powi(3))).tanh();
            let inner_slope = scale * (1.0 + 3.0 * 0.044_715 * x * x);
            [0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope, 0.0]
        }
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let up = h[h.len() / 2 + j];
            let (gate, raised) = (x.min(limit), up.clamp(-limit, limit) + 1.0);
            let sigmoid = 1.0 / (1.0 + (-alpha * gate).exp());
            let slope = raised * (sigmoid + alpha * gate * sigmoid * (1.0 - sigmoid));
            let up_slope = if up.abs() > limit { 0.0 } else { gate * sigmoid };
            [gate * sigmoid * raised, if x > limit { 0.0 } else { slope }, up_slope]
        }
        Activation::Relu => [x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }, 0.0],
        other => panic!("no reference for {other:?}: the tests of the operations have one"),
    }
}

/// Computes the error function by `2 / sqrt(pi) e^(-x^2) sum_n 2^n x^(2n+1) / (2n+1)!!`, a series without
/// cancellation.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

mod tests {
    use moeworks_tensor::{Purpose, Random};

    use super::*;

    fn draw(seed: u64, count: usize) -> Vec<f64> {
        let random = Random::new(seed, Purpose::Test, 0);
        (0..count as u64).map(|i| 0.7 * f64::from(random.normal(i))).collect()
    }

    #[test]
    fn erf_has_its_known_values() {
        assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-14);
        assert!((erf(-2.0) + 0.995_322_265_018_952_7).abs() < 1e-14);
    }

    /// Compares every gradient of the reference, entry by entry, with central differences of its forward.
    #[test]
    fn the_backward_matches_finite_differences() {
        let (t, d, f, e, s) = (7, 3, 2, 4, 3);
        let clamped = Activation::ClampedSwiGlu { alpha: 1.7, limit: 0.8 };
        let activations = [Activation::SwiGlu, Activation::Gelu, Activation::Relu, Activation::GeluTanh, clamped];
        for (case, activation) in activations.into_iter().cycle().take(12).enumerate() {
            let mut config = crate::config(d, f, e, 1 + case % 4);
            config.activation = activation;
            config.normalize_weights = case % 2 == 1;
            config.capacity_factor = [0.0, 1.0, -0.7][case % 3];
            config.shared_width = if case < 3 { s } else { 0 };
            if case == 4 {
                config.score_order = ScoreOrder::TopKThenSoftmax;
            }
            if case >= 6 {
                config.router.scores = if case < 9 { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax };
                config.router.routed_scale = 2.5;
                config.router.overflow = [Overflow::Reroute, Overflow::Priority, Overflow::Drop][case / 2 % 3];
                (config.router.num_groups, config.router.top_groups) = if config.top_k <= 2 { (2, 1) } else { (1, 1) };
            }
            let a = activation.num_inputs();
            let noise: Vec<f64> = draw(9, t * d).iter().map(|x| 1.0 + 0.1 * x).collect();
            let reference = Reference { config: &config, noise: (case >= 2).then_some(&noise) };
            let weights = RefWeights {
                router: draw(1, e * d),
                gate_up: draw(2, e * a * f * d),
                down: draw(3, e * d * f),
                shared: (case < 3).then(|| RefShared { gate_up: draw(4, a * s * d), down: draw(5, d * s) }),
                bias: if case >= 6 { draw(10, e) } else { Vec::new() },
            };
            let (x, dy, balance) = (draw(6, t * d), draw(7, t * d), draw(8, e));
            let loss = RefLoss { dy: &dy, balance: &balance, z: 0.4, sequence: 0.7, seq_len: 3 };
            let mut backward = reference.backward(&weights, &x, &loss);
            let choices = reference.choose(&weights, &x);
            let value = |weights: &RefWeights, x: &[f64]| {
                reference.loss(&reference.forward_with(weights, x, choices.clone()), &loss)
            };
            let step = 1e-6;
            let check = |gradient: f64, high: f64, low: f64| {
                let expected = (high - low) / (2.0 * step);
                assert!((gradient - expected).abs() < 1e-7, "case {case}: {gradient}, expected {expected}");
            };
            for (i, &gradient) in backward.dx.iter().enumerate() {
                let moved = |by: f64| {
                    let mut x = x.clone();
                    x[i] += by;
                    value(&weights, &x)
                };
                check(gradient, moved(step), moved(-step));
            }
            for (list, gradients) in backward.grads.lists_mut().into_iter().enumerate() {
                for (i, &gradient) in gradients.iter().enumerate() {
                    let moved = |by: f64| {
                        let mut weights = weights.clone();
                        weights.lists_mut()[list][i] += by;
                        value(&weights, &x)
                    };
                    check(gradient, moved(step), moved(-step));
                }
            }
        }
    }
}
