//! Comparison of every scheme with a plain f64 reference, token by token: the choice, the weights, the output, and
//! all gradients against central differences of the reference with its choices fixed.

mod cases;
mod dense_to_sparse;
mod forced;
mod low_rank;
mod replay;
mod trees;

use moeworks_gpu::Gpu;
use moeworks_moe::{
    BackwardInput, EntropyRule, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeSaved, MoeWeights, NO_EXPERT, Ramp,
    RouterConfig, RouterInput, RouterKind, ScoreFunction, SecondExpert, WgradTarget, balance_loss_per_layer,
    cv_squared, entropy_loss, l1_loads,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::reference::feed_forward;
use crate::{config, jitter_factor, tensor};

const T: usize = 9;
const D: usize = 5;
const F: usize = 3;
const E: usize = 6;

/// The coefficients of the test's loss besides `sum dy y`.
const BALANCE: f32 = 0.3;
const IMPORTANCE: f32 = 0.2;
const LOAD: f32 = 0.25;
const GSHARD: f32 = 0.4;
const ENTROPY: EntropyRule = EntropyRule { local: 0.15, global: 0.35, min_entropy: 1.9 };
const Z: f64 = 0.1;

/// All numbers of a layer and a batch, in f64.
#[derive(Clone)]
struct Numbers {
    x: Vec<f64>,
    router: Vec<f64>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    extras: Vec<(&'static str, Vec<f64>)>,
    /// The logits of the previous layer; empty if the router does not use them.
    previous: Vec<f64>,
}

impl Numbers {
    fn lists(&mut self) -> Vec<&mut Vec<f64>> {
        let fixed = [&mut self.x, &mut self.router, &mut self.gate_up, &mut self.down];
        let extras = self.extras.iter_mut().map(|(_, list)| list);
        fixed.into_iter().chain(extras).chain([&mut self.previous]).collect()
    }

    fn extra(&self, name: &str) -> &[f64] {
        &self.extras.iter().find(|(extra, _)| *extra == name).expect("an extra weight").1
    }
}

fn draw(stream: u64, count: usize) -> Vec<f64> {
    let random = Random::new(11, Purpose::Test, stream);
    (0..count as u64).map(|i| f64::from(random.normal(i))).collect()
}

fn numbers(config: &MoeConfig) -> Numbers {
    let [rows, cols] = config.router_shape();
    let extra = |(i, shape): (usize, moeworks_moe::WeightShape)| {
        let count = shape.shape.iter().product();
        let values = draw(20 + i as u64, count).iter().map(|x| 0.5 * x).collect();
        (shape.name, values)
    };
    Numbers {
        x: draw(1, T * D),
        router: draw(2, rows * cols),
        gate_up: draw(3, E * 2 * F * D),
        down: draw(4, E * D * F),
        extras: config.extra_shapes().into_iter().enumerate().map(extra).collect(),
        previous: draw(5, if config.router.gate_residual { T * config.num_choosable() } else { 0 }),
    }
}

fn layer_weights(ctx: &Context, config: &MoeConfig, numbers: &Numbers) -> MoeWeights {
    let mut weights = MoeWeights::zeros(ctx, config, DType::F32);
    let mut lists = vec![&numbers.router, &numbers.gate_up, &numbers.down];
    lists.extend(numbers.extras.iter().map(|(_, list)| list));
    for (to, list) in weights.tensors_mut().into_iter().zip(lists) {
        to.f32s_mut().iter_mut().zip(list).for_each(|(to, &x)| *to = x as f32);
    }
    weights
}

/// The reference of a scheme. It draws random numbers at the crate's positions: use u of a pass begins at 2^48 u.
struct Scheme<'a> {
    config: &'a MoeConfig,
    input: RouterInput<'a>,
    l1: f64,
}

/// A token's values in the router.
struct Token {
    clean: Vec<f64>,
    noisy: Vec<f64>,
    deviations: Vec<f64>,
    logits: Vec<f64>,
    gates: Vec<f64>,
    probs: Vec<f64>,
    /// In a tree: the experts in open clusters, and the squared log-sum-exps below the first level.
    open: Vec<bool>,
    lower_z: f64,
}

impl Scheme<'_> {
    fn random(&self, usage: u64, i: usize, kind: fn(&Random, u64) -> f32) -> Option<f64> {
        self.input.noise.map(|random| f64::from(kind(&random, (usage << 48) + i as u64)))
    }

    fn router_x(&self, t: usize, x: &[f64]) -> Vec<f64> {
        let factor = |i: usize| {
            let position = t * D + i;
            let eps = self.config.jitter.at(self.input.progress);
            let jitter = self.input.noise.map_or(1.0, |random| jitter_factor(&random, position as u64, eps));
            let p = self.config.router.input_dropout.at(self.input.progress);
            let is_kept = self.random(1, position, Random::coarse).is_none_or(|u| p == 0.0 || u >= p);
            jitter
                * if is_kept { if p > 0.0 && self.input.noise.is_some() { 1.0 / (1.0 - p) } else { 1.0 } } else { 0.0 }
        };
        (0..D).map(|i| x[t * D + i] * factor(i)).collect()
    }

    fn token(&self, numbers: &Numbers, t: usize) -> Token {
        let router = &self.config.router;
        let e = self.config.num_choosable();
        let x = self.router_x(t, &numbers.x);
        let product =
            |matrix: &[f64], x: &[f64]| -> Vec<f64> { matrix.chunks(x.len()).map(|row| dot(row, x)).collect() };
        let (mut open, mut lower_z) = (vec![true; e], 0.0);
        let mut clean = match router.kind {
            RouterKind::Hierarchical => {
                let logits;
                (logits, open, lower_z) = self.tree(numbers, &x);
                logits
            }
            RouterKind::Cosine => {
                let q = product(numbers.extra("projection.weight"), &x);
                let scale = numbers.extra("log_scale")[0].min(100.0_f64.ln()).exp();
                let rows = numbers.router.chunks(router.schemes.cosine.dim);
                rows.map(|m| scale * dot(m, &q) / (dot(m, m) * dot(&q, &q)).sqrt()).collect()
            }
            RouterKind::LowRank => {
                let q = product(numbers.extra("projection.weight"), &x);
                let rms = (dot(&q, &q) / q.len() as f64 + 1e-6).sqrt();
                let norm = if router.schemes.low_rank.normalize { rms } else { 1.0 };
                product(&numbers.router, &q.iter().map(|q| q / norm).collect::<Vec<_>>())
            }
            RouterKind::Hash => vec![0.0; e],
            _ => product(&numbers.router, &x),
        };
        if router.gate_residual {
            let before = product(numbers.extra("residual.weight"), &numbers.previous[t * e..(t + 1) * e]);
            clean.iter_mut().zip(before).for_each(|(clean, before)| *clean += before);
        }
        let deviations: Vec<f64> = match router.kind {
            RouterKind::NoisyTopK => {
                product(numbers.extra("noise.weight"), &x).iter().map(|r| r.exp().ln_1p()).collect()
            }
            _ => vec![router.noise_std.at(self.input.progress); e],
        };
        let is_dense = router.kind == RouterKind::DenseToSparse
            && self.input.progress < router.schemes.dense_to_sparse.share
            && !self.input.is_inference;
        let noise = |i: usize| match router.kind {
            _ if is_dense || router.kind == RouterKind::Gumbel => {
                self.random(2, t * e + i, Random::uniform).map_or(0.0, |u| -(-u.max(2.0_f64.powi(-25)).ln()).ln())
            }
            _ => deviations[i] * self.random(2, t * e + i, Random::normal).unwrap_or(0.0),
        };
        let noisy: Vec<f64> = (0..e).map(|i| clean[i] + noise(i)).collect();
        let temperature = router.temperature.at(self.input.progress);
        let mut logits: Vec<f64> = noisy.iter().map(|l| l / temperature).collect();
        if !router.modality_experts.is_empty() {
            // "2, 1" with a boundary at 100.
            let is_second = self.input.token_ids[t] >= 100;
            (0..e).filter(|&i| if is_second { i < 2 } else { i == 2 }).for_each(|i| logits[i] = f64::NEG_INFINITY);
        }
        let softmax = softmax(&logits);
        let is_sigmoid = router.scores == ScoreFunction::Sigmoid
            || router.kind == RouterKind::Base
            || (router.kind == RouterKind::Sinkhorn && self.config.top_k == 1);
        let gates: Vec<f64> = match router.kind {
            RouterKind::Relu => logits.iter().map(|l| l.max(0.0)).collect(),
            _ if is_sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
            _ => softmax,
        };
        let total: f64 = gates.iter().sum();
        let probs = gates.iter().map(|g| if total > 0.0 { g / total } else { 0.0 }).collect();
        Token { clean, noisy, deviations, logits, gates, probs, open, lower_z }
    }

    /// Returns the weights of the experts `ids`, 0 for [`NO_EXPERT`].
    fn weights(&self, token: &Token, ids: &[u32]) -> Vec<f64> {
        let router = &self.config.router;
        let first_null = self.config.num_choosable() - router.null_experts;
        let counts = |id: u32| id != NO_EXPERT && (id as usize) < first_null;
        let gates: Vec<f64> = ids.iter().map(|&id| if counts(id) { token.gates[id as usize] } else { 0.0 }).collect();
        let is_normalized =
            self.config.normalize_weights && !matches!(router.kind, RouterKind::Base | RouterKind::Relu);
        let sum = if is_normalized { gates.iter().sum::<f64>() } else { 1.0 };
        if matches!(router.kind, RouterKind::Hash) {
            let count = ids.iter().filter(|&&id| counts(id)).count() as f64;
            return ids.iter().map(|&id| if counts(id) { 1.0 / count } else { 0.0 }).collect();
        }
        gates.iter().map(|g| if sum > 0.0 { f64::from(router.routed_scale) * g / sum } else { 0.0 }).collect()
    }

    fn expert(&self, numbers: &Numbers, id: usize, x: &[f64]) -> Vec<f64> {
        let router = &self.config.router;
        if id < E {
            let (up, down) = (&numbers.gate_up[id * 2 * F * D..][..2 * F * D], &numbers.down[id * D * F..][..D * F]);
            return feed_forward(self.config.activation, up, down, x);
        }
        let id = id - E;
        let (zero, copy) = (router.zero_experts, router.copy_experts);
        if (zero..zero + copy).contains(&id) {
            x.to_vec()
        } else if (zero + copy..zero + copy + router.constant_experts).contains(&id) {
            let at = id - zero - copy;
            let mix = &numbers.extra("constant_mix.weight")[2 * at * D..][..2 * D];
            let a = softmax(&[dot(&mix[..D], x), dot(&mix[D..], x)]);
            let v = &numbers.extra("constant.weight")[at * D..][..D];
            (0..D).map(|i| a[0] * x[i] + a[1] * v[i]).collect()
        } else {
            vec![0.0; D]
        }
    }

    /// Computes the loss with the choices fixed to `held`.
    fn loss(&self, numbers: &Numbers, dy: &[f64], held: &Held) -> f64 {
        let e = self.config.num_choosable();
        let (mut loss, mut importance, mut load) = (0.0, vec![0.0; e], vec![0.0; e]);
        let modality = |t: usize| {
            usize::from(!self.config.router.modality_boundaries.is_empty() && self.input.token_ids[t] >= 100)
        };
        let mut sums = vec![(0.0, 0.0, vec![0.0; e]); 2];
        for t in 0..T {
            let token = self.token(numbers, t);
            let x = &numbers.x[t * D..(t + 1) * D];
            let mut weights = self.weights(&token, &held.ids[t]);
            if self.config.router.kind == RouterKind::Gumbel {
                // Straight-through: the value is 1/K, the gradient is that of the gate.
                let count = weights.len() as f64;
                weights.iter_mut().zip(&held.gates[t]).for_each(|(weight, held)| *weight += 1.0 / count - held);
            }
            for (i, &id) in held.used[t].iter().enumerate().filter(|(_, id)| **id != NO_EXPERT) {
                loss += weights[i] * dot(&self.expert(numbers, id as usize, x), &dy[t * D..(t + 1) * D]);
                importance[id as usize] += weights[i];
            }
            loss += dot(&token.probs, &held.balance);
            if self.config.router.gate_residual {
                loss += dot(&token.clean, &d_next(e)[t * e..(t + 1) * e]);
            }
            let lse = token.logits.iter().map(|l| l.exp()).sum::<f64>().ln();
            loss += Z * (lse * lse + token.lower_z) / T as f64;
            if self.config.router.kind == RouterKind::Relu {
                let count = |e: usize| held.used.iter().flatten().filter(|&&id| id == e as u32).count();
                let load = |e: usize| (E * count(e)) as f64 / (self.config.top_k * T) as f64;
                let is_balanced = self.config.router.schemes.relu.l1_balanced;
                let gates = token.gates.iter().enumerate();
                loss +=
                    self.l1 * gates.map(|(e, g)| if is_balanced { load(e) * g } else { *g }).sum::<f64>() / T as f64;
            }
            let sum = &mut sums[modality(t)];
            sum.0 += 1.0;
            sum.1 += token.probs.iter().map(|&p| if p > 0.0 { -p * p.ln() } else { 0.0 }).sum::<f64>();
            sum.2.iter_mut().zip(&token.probs).for_each(|(s, p)| *s += p);
            self.add_load(&token, &mut load);
        }
        for (count, entropy, probs) in sums.into_iter().filter(|sum| sum.0 > 0.0) {
            loss += f64::from(ENTROPY.local) * entropy / count;
            let h: f64 = probs.iter().map(|p| p / count).map(|p| if p > 0.0 { -p * p.ln() } else { 0.0 }).sum();
            loss += f64::from(ENTROPY.global) * (ENTROPY.min_entropy - h).max(0.0);
        }
        loss += f64::from(GSHARD) * self.gshard_loss(numbers, &held.ids);
        let cv = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64 / (mean * mean)
        };
        loss += f64::from(IMPORTANCE) * cv(&importance);
        if load.iter().any(|&load| load > 0.0) { loss + f64::from(LOAD) * cv(&load) } else { loss }
    }

    /// Computes GShard's loss, group by group: `(1/E) sum_e (c_e / S) m_e`, with c the tokens whose first choice is
    /// e.
    fn gshard_loss(&self, numbers: &Numbers, ids: &[Vec<u32>]) -> f64 {
        let e = self.config.num_choosable();
        let size = if self.config.router.local_group == 0 { T } else { self.config.router.local_group };
        let groups: Vec<Vec<usize>> = (0..T).collect::<Vec<_>>().chunks(size).map(<[usize]>::to_vec).collect();
        let of_group = |tokens: &Vec<usize>| {
            let first: Vec<u32> = tokens.iter().map(|&t| ids[t][0]).filter(|&id| id != NO_EXPERT).collect();
            let (mut c, mut m) = (vec![0.0; e], vec![0.0; e]);
            first.iter().for_each(|&id| c[id as usize] += 1.0 / first.len() as f64);
            for &t in tokens {
                let probs = self.token(numbers, t).probs;
                m.iter_mut().zip(probs).for_each(|(m, p)| *m += p / tokens.len() as f64);
            }
            dot(&c, &m) / e as f64
        };
        groups.iter().map(of_group).sum::<f64>() / groups.len() as f64
    }

    /// Adds the smooth load, with Phi integrated by Simpson's rule.
    fn add_load(&self, token: &Token, load: &mut [f64]) {
        let router = &self.config.router;
        let is_noisy = router.kind == RouterKind::NoisyTopK || router.noise_std.at(self.input.progress) > 0.0;
        if self.input.noise.is_none() || !is_noisy {
            return;
        }
        for (i, load) in load.iter_mut().enumerate() {
            let mut others: Vec<f64> =
                token.noisy.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, &h)| h).collect();
            others.sort_by(|a, b| b.total_cmp(a));
            let u = (token.clean[i] - others[self.config.top_k - 1]) / token.deviations[i];
            let steps = 2000;
            let h = u / f64::from(steps);
            let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let at = |k: i32| {
                density(h * f64::from(k)) * if k == 0 || k == steps { 1.0 } else { f64::from(2 + 2 * (k % 2)) }
            };
            *load += 0.5 + h / 3.0 * (0..=steps).map(at).sum::<f64>();
        }
    }
}

struct Held {
    ids: Vec<Vec<u32>>,
    used: Vec<Vec<u32>>,
    /// The weights before the straight-through replacement.
    gates: Vec<Vec<f64>>,
    balance: Vec<f64>,
}

/// Returns the gradient of the logits from a next layer in the test's loss.
fn d_next(e: usize) -> Vec<f64> {
    draw(10, T * e).iter().map(|x| 0.3 * x).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
    logits.iter().map(|l| (l - top).exp() / total).collect()
}

fn sorted(values: &[f64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..values.len() as u32).filter(|&e| values[e as usize] > f64::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]));
    order
}

const TOKEN_IDS: [u32; T] = [5, 150, 7, 5, 300, 20, 100, 99, 101];

struct Outcome {
    y: Tensor,
    saved: MoeSaved,
    stats: LayerStats,
    /// The gradients of x and of all weights.
    grads: Vec<Vec<f32>>,
}

fn run(ctx: &Context, config: &MoeConfig, input: &RouterInput<'_>, numbers: &Numbers, dy: &[f64]) -> Outcome {
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = layer_weights(ctx, config, numbers);
    let e = config.num_choosable();
    let logits = |values: &[f64]| config.router.gate_residual.then(|| tensor(ctx, &[T, e], values));
    let (previous, d_next) = (logits(&numbers.previous), logits(&d_next(e)));
    let input = RouterInput { previous: previous.as_ref(), ..*input };
    let (y, saved) = layer.forward(ctx, &weights, &tensor(ctx, &[T, D], &numbers.x), &input);
    let stats = saved.stats();
    let balance = balance_loss_per_layer(&[&stats], BALANCE).gradients.remove(0);
    let entropy = entropy_loss(&stats, &ENTROPY);
    let losses = LossGrad {
        balance,
        z: Z as f32,
        gshard: GSHARD,
        importance: cv_squared(&stats.importance, IMPORTANCE).1,
        load: if stats.smooth_load.is_empty() { Vec::new() } else { cv_squared(&stats.smooth_load, LOAD).1 },
        l1: 1.0,
        l1_loads: if config.router.schemes.relu.l1_balanced { l1_loads(&stats, config.top_k) } else { Vec::new() },
        entropy: entropy.entropy,
        modality_balance: entropy.modality_balance,
        ..LossGrad::default()
    };
    let dy = tensor(ctx, &[T, D], dy);
    let back = BackwardInput { d_next_router_logits: d_next.as_ref(), ..BackwardInput::from(&losses) };
    let (dx, task) = layer.backward(ctx, &weights, &saved, &dy, back);
    let d_previous = task.d_previous_logits().map(|grad| grad.f32s().to_vec());
    let mut grads = MoeWeights::zeros(ctx, config, DType::F32);
    task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
    let lists = std::iter::once(dx.f32s().to_vec()).chain(grads.tensors().into_iter().map(|g| g.f32s().to_vec()));
    Outcome { y, saved, stats, grads: lists.chain(d_previous).collect() }
}

/// Runs `config` and checks that each token has the experts that `choose` returns, and everything else.
fn check(
    name: &str,
    config: &MoeConfig,
    input: RouterInput<'_>,
    choose: &dyn Fn(&[Token]) -> Vec<Vec<u32>>,
) -> Outcome {
    let numbers = numbers(config);
    let dy = draw(9, T * D);
    let outcome = run(&Context::cpu(2), config, &input, &numbers, &dy);
    for num_threads in [1, 3] {
        let other = run(&Context::cpu(num_threads), config, &input, &numbers, &dy);
        assert_eq!(outcome.y.f32s(), other.y.f32s(), "{name}");
        assert_eq!((&outcome.grads, &outcome.stats), (&other.grads, &other.stats), "{name}");
    }
    for (device, gpu) in Gpu::for_tests() {
        let other = run(&Context::cpu(2).with_gpu(gpu), config, &input, &numbers, &dy);
        assert_alike(&format!("{name} on the {device}"), &other, &outcome);
    }
    let scheme = Scheme { config, input, l1: f64::from(config.router.schemes.relu.l1_start) };
    let tokens: Vec<Token> = (0..T).map(|t| scheme.token(&numbers, t)).collect();
    let used: Vec<Vec<u32>> =
        outcome.saved.routing().expert_ids().chunks(outcome.saved.routing().top_k()).map(<[u32]>::to_vec).collect();
    let ids = choose(&tokens);
    for (t, (used, ids)) in used.iter().zip(&ids).enumerate() {
        let chosen: Vec<u32> = used.iter().copied().filter(|&id| id != NO_EXPERT).collect();
        assert!(ids.starts_with(&chosen), "{name}: token {t} has {chosen:?}, expected {ids:?}");
    }
    let mut ids = ids;
    ids.iter_mut().zip(&used).for_each(|(ids, used)| ids.resize(used.len(), NO_EXPERT));
    check_output(name, &scheme, &numbers, Chosen { tokens: &tokens, ids: &ids, used: &used }, &outcome);
    // The loads in the balance loss are counts, which have no gradient.
    let gradients = balance_loss_per_layer(&[&outcome.stats], BALANCE).gradients.remove(0);
    let gates = tokens.iter().zip(&ids).map(|(token, ids)| scheme.weights(token, ids)).collect();
    if config.router.kind != RouterKind::Hash {
        let expected = scheme.gshard_loss(&numbers, &ids);
        assert!((outcome.stats.gshard_loss - expected).abs() < 1e-6, "{name}: {expected}");
    }
    let held = Held { ids, used, gates, balance: gradients.iter().map(|&g| f64::from(g)).collect() };
    check_gradients(name, &scheme, &held, &numbers, &dy, &outcome);
    outcome
}

/// Asserts that a GPU gives the CPU's results.
fn assert_alike(name: &str, of_gpu: &Outcome, of_host: &Outcome) {
    assert_eq!(of_gpu.saved.routing().expert_ids(), of_host.saved.routing().expert_ids(), "{name}");
    let lists = |outcome: &Outcome| [vec![outcome.y.f32s().to_vec()], outcome.grads.clone()].concat();
    for (list, (a, b)) in lists(of_gpu).iter().zip(lists(of_host)).enumerate() {
        let scale = b.iter().fold(0.1_f32, |max, &x| max.max(x.abs()));
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= 5e-5 * scale, "{name}: {i} of list {list} is {a}, on the CPU {b}");
        }
    }
}

/// The choices of all tokens: their scores, the chosen experts, and those that are used.
#[derive(Clone, Copy)]
struct Chosen<'a> {
    tokens: &'a [Token],
    ids: &'a [Vec<u32>],
    used: &'a [Vec<u32>],
}

fn check_output(name: &str, scheme: &Scheme<'_>, numbers: &Numbers, chosen: Chosen<'_>, outcome: &Outcome) {
    let Chosen { tokens, ids, used } = chosen;
    if scheme.config.router.kind == RouterKind::Gumbel {
        return; // its weights are not its gates
    }
    for t in 0..T {
        let weights = scheme.weights(&tokens[t], &ids[t]);
        let mut y = [0.0; D];
        for (i, &id) in used[t].iter().enumerate().filter(|(_, id)| **id != NO_EXPERT) {
            let out = scheme.expert(numbers, id as usize, &numbers.x[t * D..(t + 1) * D]);
            y.iter_mut().zip(out).for_each(|(y, o)| *y += weights[i] * o);
        }
        for (i, expected) in y.iter().enumerate() {
            let value = f64::from(outcome.y.f32s()[t * D + i]);
            assert!(
                (value - expected).abs() < 2e-5 * (1.0 + expected.abs()),
                "{name}: y[{t}, {i}] {value}, expected {expected}"
            );
        }
    }
}

fn check_gradients(name: &str, scheme: &Scheme<'_>, held: &Held, numbers: &Numbers, dy: &[f64], outcome: &Outcome) {
    let step = 1e-5;
    for (list, gradients) in outcome.grads.iter().enumerate() {
        let scale = gradients.iter().fold(0.1_f64, |max, &g| max.max(f64::from(g.abs())));
        for (i, &gradient) in gradients.iter().enumerate() {
            let moved = |by: f64| {
                let mut numbers = numbers.clone();
                numbers.lists()[list][i] += by;
                scheme.loss(&numbers, dy, held)
            };
            let expected = (moved(step) - moved(-step)) / (2.0 * step);
            let error = (f64::from(gradient) - expected).abs();
            assert!(error < 2e-4 * scale, "{name}: gradient {i} of list {list}: {gradient}, expected {expected}");
        }
    }
}

fn with(kind: RouterKind, top_k: usize) -> MoeConfig {
    let mut config = config(D, F, E, top_k);
    config.router = RouterConfig { kind, ..RouterConfig::default() };
    config.router.schemes.cosine.dim = 4;
    config
}

fn noisy<'a>() -> RouterInput<'a> {
    RouterInput { token_ids: &TOKEN_IDS, ..RouterInput::with_noise(Random::new(3, Purpose::Router, 8)) }
}

fn quiet<'a>() -> RouterInput<'a> {
    RouterInput { token_ids: &TOKEN_IDS, ..RouterInput::default() }
}

/// Chooses the best `k` by the logits of the scores.
fn best(k: usize) -> impl Fn(&[Token]) -> Vec<Vec<u32>> {
    move |tokens| tokens.iter().map(|token| sorted(&token.logits)[..k].to_vec()).collect()
}
