//! Every scheme against a plain reference in f64, token by token: what is chosen, the weights, the output, and all
//! gradients against central differences of the reference with its choices held.

use moeworks_moe::{
    EntropyRule, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeSaved, MoeWeights, NO_EXPERT, Ramp, RouterConfig,
    RouterInput, RouterKind, ScoreFunction, SecondExpert, balance_loss_per_layer, cv_squared, entropy_loss,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::reference::feed_forward;
use crate::{config, tensor};

const T: usize = 9;
const D: usize = 5;
const F: usize = 3;
const E: usize = 6;

/// The coefficients of the test's loss besides `sum dy y`.
const BALANCE: f32 = 0.3;
const IMPORTANCE: f32 = 0.2;
const LOAD: f32 = 0.25;
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
}

impl Numbers {
    fn lists(&mut self) -> Vec<&mut Vec<f64>> {
        let fixed = [&mut self.x, &mut self.router, &mut self.gate_up, &mut self.down];
        fixed.into_iter().chain(self.extras.iter_mut().map(|(_, list)| list)).collect()
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

/// The scheme token by token. What is random is drawn where the crate says: use u of a pass begins at 2^48 u.
struct Scheme<'a> {
    config: &'a MoeConfig,
    input: RouterInput<'a>,
    l1: f64,
}

/// A token on its way through the router.
struct Token {
    clean: Vec<f64>,
    noisy: Vec<f64>,
    deviations: Vec<f64>,
    logits: Vec<f64>,
    gates: Vec<f64>,
    probs: Vec<f64>,
}

impl Scheme<'_> {
    fn random(&self, usage: u64, i: usize, kind: fn(&Random, u64) -> f32) -> Option<f64> {
        self.input.noise.map(|random| f64::from(kind(&random, (usage << 48) + i as u64)))
    }

    fn router_x(&self, t: usize, x: &[f64]) -> Vec<f64> {
        let factor = |i: usize| {
            let position = t * D + i;
            let jitter = self
                .random(0, position, Random::uniform)
                .map_or(1.0, |u| 1.0 + f64::from(self.config.jitter) * (2.0 * u - 1.0));
            let p = f64::from(self.config.router.input_dropout);
            let is_kept = self.random(1, position, Random::uniform).is_none_or(|u| p == 0.0 || u >= p);
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
        let clean = match router.kind {
            RouterKind::Cosine => {
                let q = product(numbers.extra("projection.weight"), &x);
                let scale = numbers.extra("log_scale")[0].min(100.0_f64.ln()).exp();
                let rows = numbers.router.chunks(router.cosine_dim);
                rows.map(|m| scale * dot(m, &q) / (dot(m, m) * dot(&q, &q)).sqrt()).collect()
            }
            RouterKind::Hash => vec![0.0; e],
            _ => product(&numbers.router, &x),
        };
        let deviations: Vec<f64> = match router.kind {
            RouterKind::NoisyTopK => {
                product(numbers.extra("noise.weight"), &x).iter().map(|r| r.exp().ln_1p()).collect()
            }
            _ => vec![f64::from(router.noise_std); e],
        };
        let noise = |i: usize| match router.kind {
            RouterKind::Gumbel => {
                self.random(2, t * e + i, Random::uniform).map_or(0.0, |u| -(-(u + 2.0_f64.powi(-25)).ln()).ln())
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
        Token { clean, noisy, deviations, logits, gates, probs }
    }

    /// The weights of the experts `ids` (the one that is none included, as 0).
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

    /// The loss of the test with `held`: the experts whose gates the weights were taken from, and those that were used.
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
                // Straight-through: the value is 1/K, the gradient that of the gate.
                let count = weights.len() as f64;
                weights.iter_mut().zip(&held.gates[t]).for_each(|(weight, held)| *weight += 1.0 / count - held);
            }
            for (i, &id) in held.used[t].iter().enumerate().filter(|(_, id)| **id != NO_EXPERT) {
                loss += weights[i] * dot(&self.expert(numbers, id as usize, x), &dy[t * D..(t + 1) * D]);
                importance[id as usize] += weights[i];
            }
            loss += dot(&token.probs, &held.balance);
            let lse = token.logits.iter().map(|l| l.exp()).sum::<f64>().ln();
            loss += Z * lse * lse / T as f64;
            if self.config.router.kind == RouterKind::Relu {
                loss += self.l1 * token.gates.iter().sum::<f64>() / T as f64;
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
        let cv = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64 / (mean * mean)
        };
        loss += f64::from(IMPORTANCE) * cv(&importance);
        if load.iter().any(|&load| load > 0.0) { loss + f64::from(LOAD) * cv(&load) } else { loss }
    }

    /// Phi by its definition as an integral, Simpson's rule.
    fn add_load(&self, token: &Token, load: &mut [f64]) {
        let router = &self.config.router;
        let is_noisy = router.kind == RouterKind::NoisyTopK || router.noise_std > 0.0;
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
    /// The weights without straight-through.
    gates: Vec<Vec<f64>>,
    balance: Vec<f64>,
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
    /// Of x and of all weights.
    grads: Vec<Vec<f32>>,
}

fn run(num_threads: usize, config: &MoeConfig, input: &RouterInput<'_>, numbers: &Numbers, dy: &[f64]) -> Outcome {
    let ctx = Context::cpu(num_threads);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = layer_weights(&ctx, config, numbers);
    let (y, saved) = layer.forward(&ctx, &weights, &tensor(&ctx, &[T, D], &numbers.x), input);
    let stats = saved.stats();
    let balance = balance_loss_per_layer(&[&stats], BALANCE).gradients.remove(0);
    let entropy = entropy_loss(&stats, &ENTROPY);
    let losses = LossGrad {
        balance,
        z: Z as f32,
        importance: cv_squared(&stats.importance, IMPORTANCE).1,
        load: if stats.smooth_load.is_empty() { Vec::new() } else { cv_squared(&stats.smooth_load, LOAD).1 },
        l1: 1.0,
        entropy: entropy.entropy,
        modality_balance: entropy.modality_balance,
        ..LossGrad::default()
    };
    let (dx, task) = layer.backward(&ctx, &weights, &saved, &tensor(&ctx, &[T, D], dy), &losses);
    let mut grads = MoeWeights::zeros(&ctx, config, DType::F32);
    task.run(&ctx, Write::Replace, &mut grads);
    let lists = std::iter::once(dx.f32s().to_vec()).chain(grads.tensors().iter().map(|g| g.f32s().to_vec())).collect();
    Outcome { y, saved, stats, grads: lists }
}

/// Runs `config`, checks that the experts of each token are those that `choose` gives, and everything else.
fn check(
    name: &str,
    config: &MoeConfig,
    input: RouterInput<'_>,
    choose: &dyn Fn(&[Token]) -> Vec<Vec<u32>>,
) -> Outcome {
    let numbers = numbers(config);
    let dy = draw(9, T * D);
    let outcome = run(2, config, &input, &numbers, &dy);
    for num_threads in [1, 3] {
        let other = run(num_threads, config, &input, &numbers, &dy);
        assert_eq!(outcome.y.f32s(), other.y.f32s(), "{name}");
        assert_eq!((&outcome.grads, &outcome.stats), (&other.grads, &other.stats), "{name}");
    }
    let scheme = Scheme { config, input, l1: f64::from(config.router.l1_start) };
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
    check_output(name, &scheme, &numbers, (&tokens, &ids, &used), &outcome);
    // The loads that the balance loss weighs are counts: without a gradient.
    let gradients = balance_loss_per_layer(&[&outcome.stats], BALANCE).gradients.remove(0);
    let gates = tokens.iter().zip(&ids).map(|(token, ids)| scheme.weights(token, ids)).collect();
    let held = Held { ids, used, gates, balance: gradients.iter().map(|&g| f64::from(g)).collect() };
    check_gradients(name, &scheme, &numbers, (&dy, &held), &outcome);
    outcome
}

fn check_output(
    name: &str,
    scheme: &Scheme<'_>,
    numbers: &Numbers,
    (tokens, ids, used): (&[Token], &[Vec<u32>], &[Vec<u32>]),
    outcome: &Outcome,
) {
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

fn check_gradients(name: &str, scheme: &Scheme<'_>, numbers: &Numbers, (dy, held): (&[f64], &Held), outcome: &Outcome) {
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
    config.router = RouterConfig { kind, cosine_dim: 4, ..RouterConfig::default() };
    config
}

fn noisy<'a>() -> RouterInput<'a> {
    RouterInput { token_ids: &TOKEN_IDS, ..RouterInput::with_noise(Random::new(3, Purpose::Router, 8)) }
}

fn quiet<'a>() -> RouterInput<'a> {
    RouterInput { token_ids: &TOKEN_IDS, ..RouterInput::default() }
}

/// The best `k` by the logits that scores are taken of.
fn best(k: usize) -> impl Fn(&[Token]) -> Vec<Vec<u32>> {
    move |tokens| tokens.iter().map(|token| sorted(&token.logits)[..k].to_vec()).collect()
}

#[test]
fn switch_takes_one_expert() {
    let mut config = with(RouterKind::Switch, 1);
    config.jitter = 0.1;
    check("switch", &config, noisy(), &best(1));
}

#[test]
fn noisy_top_k_learns_its_noise() {
    for (k, is_normalized) in [(2, true), (1, false), (3, true)] {
        let mut config = with(RouterKind::NoisyTopK, k);
        config.normalize_weights = is_normalized;
        check("noisy", &config, noisy(), &best(k));
        check("noisy, at rest", &config, quiet(), &best(k));
    }
    let mut config = with(RouterKind::TopK, 2);
    config.router.noise_std = 0.4;
    let outcome = check("fixed noise", &config, noisy(), &best(2));
    let total: f64 = outcome.stats.smooth_load.iter().sum();
    assert!((total - (2 * T) as f64).abs() < 4.0, "a smooth load adds up to about K T: {total}");
}

#[test]
fn the_routers_input_may_lose_elements_and_the_logits_be_warm() {
    let mut config = with(RouterKind::TopK, 2);
    (config.router.input_dropout, config.jitter, config.normalize_weights) = (0.3, 0.2, true);
    config.router.temperature = "linear 2 to 0.5 over 0.5".parse().unwrap();
    check("dropout and warmth", &config, RouterInput { progress: 0.25, ..noisy() }, &best(2));
    check("cold", &config, quiet(), &best(2));
}

#[test]
fn gshards_second_expert_comes_by_chance() {
    for (second, threshold) in
        [(SecondExpert::Random, 0.5_f32), (SecondExpert::Threshold, 0.2), (SecondExpert::Always, 0.5)]
    {
        let mut config = with(RouterKind::Gshard, 2);
        config.normalize_weights = true;
        (config.router.second, config.router.second_threshold) = (second, threshold);
        let outcome = check("gshard", &config, noisy(), &best(2));
        let random = Random::new(3, Purpose::Router, 8);
        for t in 0..T {
            let choices: Vec<(u32, f32)> = outcome.saved.routing().choices(t).collect();
            let probs = &outcome.saved.probs()[t * E..(t + 1) * E];
            let mut order: Vec<f32> = probs.to_vec();
            order.sort_by(|a, b| b.total_cmp(a));
            let share = order[1] / (order[0] + order[1]);
            let expected = match second {
                SecondExpert::Always => true,
                SecondExpert::Threshold => share > threshold,
                SecondExpert::Random => share / threshold > random.uniform((3 << 48) + t as u64),
            };
            assert_eq!(choices.len() == 2, expected, "{second:?}, token {t}: {share}");
            assert!((choices[0].1 - (1.0 - share)).abs() < 1e-5, "the first keeps its share of both");
        }
    }
}

#[test]
fn the_cosine_router_learns_directions_and_a_temperature() {
    for k in [1, 2] {
        let mut config = with(RouterKind::Cosine, k);
        config.normalize_weights = k == 2;
        check("cosine", &config, quiet(), &best(k));
    }
    // Scaling a token changes nothing, and no logit is beyond one over the temperature.
    let config = with(RouterKind::Cosine, 2);
    let ctx = Context::cpu(1);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::random(&ctx, &config, 5, 1.0);
    let x = tensor(&ctx, &[T, D], &draw(1, T * D));
    let larger = tensor(&ctx, &[T, D], &draw(1, T * D).iter().map(|x| 1024.0 * x).collect::<Vec<_>>());
    let probs =
        |weights: &MoeWeights, x: &Tensor| layer.forward(&ctx, weights, x, &RouterInput::default()).1.probs().to_vec();
    for (a, b) in probs(&weights, &x).iter().zip(probs(&weights, &larger)) {
        assert!((a - b).abs() < 1e-5);
    }
    let rms = layer.forward(&ctx, &weights, &x, &RouterInput::default()).1.stats().logit_rms();
    assert!(rms <= 2.0, "the temperature is 0.5: {rms}");
    // It never falls below 0.01, and then has no gradient.
    weights.extras[1].tensor.f32s_mut()[0] = 9.0;
    let (_, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    assert!(saved.stats().logit_rms() <= 100.0);
}

#[test]
fn gumbel_routing_is_straight_through() {
    let mut config = with(RouterKind::Gumbel, 1);
    config.router.temperature = Ramp::constant(0.7);
    let outcome = check("gumbel", &config, noisy(), &best(1));
    assert!(outcome.saved.routing().expert_weights().iter().all(|&w| w == 1.0));
    config.top_k = 2;
    let outcome = check("gumbel of two", &config, noisy(), &best(2));
    assert!(outcome.saved.routing().expert_weights().iter().all(|&w| w == 0.5));
}

/// Logits 1, 2, 3 win with the probabilities of their softmax, whatever the temperature.
#[test]
fn gumbel_noise_draws_by_the_softmax() {
    let ctx = Context::cpu(2);
    let mut config = config(3, 1, 3, 1);
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..3).for_each(|e| weights.router.f32s_mut()[3 * e] = (e + 1) as f32);
    let n = 100_000;
    let x: Vec<f64> = (0..n).flat_map(|_| [1.0, 0.0, 0.0]).collect();
    let x = tensor(&ctx, &[n, 3], &x);
    for (case, temperature) in [0.1, 0.5, 2.0].into_iter().enumerate() {
        config.router = RouterConfig {
            kind: RouterKind::Gumbel,
            temperature: Ramp::constant(temperature),
            ..RouterConfig::default()
        };
        let input = RouterInput::with_noise(Random::new(case as u64, Purpose::Router, 0));
        let (_, saved) = MoeLayer::new(config.clone()).unwrap().forward(&ctx, &weights, &x, &input);
        for (&count, expected) in saved.stats().tokens_per_expert.iter().zip([0.0900, 0.2447, 0.6652]) {
            let share = f64::from(count) / n as f64;
            let bound = 3.5 * (expected * (1.0 - expected) / n as f64).sqrt() + 5e-5;
            assert!((share - expected).abs() < bound, "temperature {temperature}: {share}, expected {expected}");
        }
    }
}

#[test]
fn experts_choose_their_tokens() {
    for k in [1, 2, 6] {
        let config = with(RouterKind::ExpertChoice, k);
        let outcome = check("expert choice", &config, quiet(), &|tokens| {
            let count = (k * T).div_ceil(E);
            let mut ids: Vec<Vec<u32>> = vec![Vec::new(); T];
            for e in 0..E {
                let column: Vec<f64> = tokens.iter().map(|token| token.probs[e]).collect();
                sorted(&column)[..count.min(T)].iter().for_each(|&t| ids[t as usize].push(e as u32));
            }
            for (ids, token) in ids.iter_mut().zip(tokens) {
                ids.sort_by(|&a, &b| token.probs[b as usize].total_cmp(&token.probs[a as usize]));
            }
            ids
        });
        assert_eq!(outcome.stats.tokens_per_expert, [(k * T).div_ceil(E) as u32; E], "each takes as many");
    }
    // Outside training tokens choose for themselves.
    let config = with(RouterKind::ExpertChoice, 2);
    let input = RouterInput { is_inference: true, ..quiet() };
    check("expert choice at inference", &config, input, &best(2));
}

#[test]
fn base_gives_every_expert_as_many_tokens() {
    let config = with(RouterKind::Base, 1);
    let numbers = numbers(&config);
    let outcome = run(2, &config, &quiet(), &numbers, &draw(9, T * D));
    let chosen: Vec<Vec<u32>> = outcome.saved.routing().expert_ids().iter().map(|&id| vec![id]).collect();
    check("base", &config, quiet(), &|_| chosen.clone());
    assert_eq!(outcome.stats.tokens_per_expert, [2, 2, 2, 1, 1, 1]);
    check("base at inference", &config, RouterInput { is_inference: true, ..quiet() }, &best(1));
}

#[test]
fn sinkhorn_balances_and_weighs_by_the_logits_themselves() {
    for k in [1, 2] {
        let config = with(RouterKind::Sinkhorn, k);
        let choose = |tokens: &[Token]| {
            let mut c = [1.0; E];
            for _ in 0..400 {
                let mut sums = [0.0; E];
                for token in tokens {
                    let total: f64 = token.logits.iter().zip(&c).map(|(l, c)| l.exp() * c).sum();
                    sums.iter_mut().zip(&token.logits).for_each(|(s, l)| *s += l.exp() / total / T as f64);
                }
                c = sums.map(|s| 1.0 / (E as f64 * s));
            }
            let balanced = |token: &Token| token.logits.iter().zip(&c).map(|(l, c)| l + c.ln()).collect::<Vec<_>>();
            tokens.iter().map(|token| sorted(&balanced(token))[..k].to_vec()).collect::<Vec<_>>()
        };
        check("sinkhorn", &config, quiet(), &choose);
    }
}

#[test]
fn a_hash_sends_equal_ids_to_equal_experts() {
    for k in [1, 3] {
        let config = with(RouterKind::Hash, k);
        let numbers = numbers(&config);
        let outcome = run(2, &config, &quiet(), &numbers, &draw(9, T * D));
        let routing = outcome.saved.routing().clone();
        let ids: Vec<Vec<u32>> = (0..T).map(|t| routing.choices(t).map(|(id, _)| id).collect()).collect();
        assert_eq!(ids[0], ids[3], "tokens 0 and 3 have one id");
        assert!(ids.iter().all(|ids| ids.len() == k && (1..k).all(|i| !ids[..i].contains(&ids[i]))));
        assert!(ids.iter().any(|other| *other != ids[0]));
        let none = MoeWeights::zeros(&Context::cpu(1), &config, DType::F32);
        assert!(none.router.is_empty(), "nothing is learned");
    }
    // Many ids spread evenly.
    let ctx = Context::cpu(2);
    let config = with(RouterKind::Hash, 1);
    let ids: Vec<u32> = (0..6000).collect();
    let x = ctx.zeros(&[6000, D], DType::F32);
    let input = RouterInput { token_ids: &ids, ..RouterInput::default() };
    let weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    let (_, saved) = MoeLayer::new(config).unwrap().forward(&ctx, &weights, &x, &input);
    assert!(saved.stats().tokens_per_expert.iter().all(|&n| (880..1120).contains(&n)));
}

#[test]
fn top_p_takes_as_many_experts_as_it_needs() {
    for p in [0.3_f32, 0.7, 1.0] {
        for is_normalized in [false, true] {
            let mut config = with(RouterKind::TopP, 2);
            (config.router.top_p, config.normalize_weights) = (p, is_normalized);
            check("top-p", &config, quiet(), &|tokens| {
                let of_token = |token: &Token| {
                    let order = sorted(&token.probs);
                    let mut sum = 0.0;
                    let needed = order.iter().take_while(|&&e| {
                        let is_needed = sum < f64::from(p);
                        sum += token.probs[e as usize];
                        is_needed
                    });
                    needed.copied().collect()
                };
                tokens.iter().map(of_token).collect()
            });
        }
    }
}

#[test]
fn relu_takes_every_expert_with_a_positive_logit() {
    let mut config = with(RouterKind::Relu, 2);
    config.router.l1_start = 0.3;
    check("relu", &config, quiet(), &|tokens| {
        let positive =
            |token: &Token| sorted(&token.gates).into_iter().filter(|&e| token.gates[e as usize] > 0.0).collect();
        tokens.iter().map(positive).collect()
    });
}

/// The weight of the L1 loss holds the mean number of experts at K.
#[test]
fn relus_loss_holds_the_number_of_experts() {
    let ctx = Context::cpu(2);
    let (e, k, t) = (16, 3, 200);
    let mut config = config(e, 1, e, k);
    config.router = RouterConfig { kind: RouterKind::Relu, ..RouterConfig::default() };
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..e).for_each(|i| weights.router.f32s_mut()[i * e + i] = 1.0);
    let mut shift = 0.5; // what the loss would make of the logits' mean: more weight, lower logits
    let mut active = Vec::new();
    for step in 0..400_u64 {
        let random = Random::new(6, Purpose::Test, step);
        let x: Vec<f64> = (0..(t * e) as u64).map(|i| f64::from(random.normal(i)) + shift).collect();
        let (_, saved) = layer.forward(&ctx, &weights, &tensor(&ctx, &[t, e], &x), &RouterInput::default());
        let stats = saved.stats();
        active.push(stats.num_choices as f64 / t as f64);
        moeworks_moe::next_state(&config, &mut weights.state, &stats);
        let weight = f64::from(weights.state[0].tensor.f32s()[0]);
        // A pull of the loss against a push of the rest.
        shift += 0.02 * (0.5 - shift) - 0.02 * weight.min(5.0);
    }
    let late: f64 = active[300..].iter().sum::<f64>() / 100.0;
    assert!((late - k as f64).abs() < 0.15 * k as f64, "{late} experts a token");
}

#[test]
fn experts_without_computation_are_nothing_a_copy_or_a_mixture() {
    let mut config = with(RouterKind::TopK, 3);
    let router = &mut config.router;
    (router.zero_experts, router.copy_experts, router.constant_experts) = (1, 2, 2);
    check("moe++", &config, quiet(), &best(3));
    config.normalize_weights = true;
    check("moe++, normalised", &config, quiet(), &best(3));
    // Null experts do not count in the weights.
    config.router.null_experts = 3;
    let outcome = check("null experts", &config, quiet(), &best(3));
    let routing = outcome.saved.routing();
    for t in 0..T {
        let sum: f32 = routing.choices(t).map(|(_, weight)| weight).sum();
        assert!((sum - 1.0).abs() < 1e-6 || routing.choices(t).all(|(id, _)| id as usize >= E + 5));
    }
}

#[test]
fn modalities_keep_to_their_experts_and_have_losses_of_their_own() {
    let mut config = with(RouterKind::TopK, 2);
    config.router.modality_boundaries = "100".to_owned();
    check("modalities that share", &config, quiet(), &best(2));
    config.router.modality_experts = "2, 1".to_owned();
    for scores in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
        config.router.scores = scores;
        let outcome = check("modalities", &config, quiet(), &best(2));
        for (t, id) in TOKEN_IDS.into_iter().enumerate() {
            let is_second = id >= 100;
            assert!(outcome.saved.routing().choices(t).all(|(e, _)| if is_second { e >= 2 } else { e != 2 }));
        }
        assert_eq!(outcome.stats.modalities.iter().map(|m| m.num_tokens).collect::<Vec<_>>(), [5, 4]);
    }
}

#[test]
fn random_choices_fade() {
    let ctx = Context::cpu(2);
    let (n, e) = (4000, 8);
    let mut config = config(e, 1, e, 2);
    (config.router.random_share, config.router.random_fade) = (0.2, 0.4);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..e).for_each(|i| weights.router.f32s_mut()[i * e] = -(i as f32));
    let x = tensor(&ctx, &[n, e], &(0..n * e).map(|i| f64::from(u8::from(i % e == 0))).collect::<Vec<_>>());
    // The router itself wants experts 0 and 1.
    let share_of_others = |progress: f64| {
        let input = RouterInput { progress, ..RouterInput::with_noise(Random::new(2, Purpose::Router, 0)) };
        let stats = layer.forward(&ctx, &weights, &x, &input).1.stats();
        f64::from(stats.tokens_per_expert[2..].iter().sum::<u32>()) / (2 * n) as f64
    };
    for (progress, expected) in
        [(0.0, 0.75), (0.19, 0.75), (0.3, 0.75 * 0.75), (0.5, 0.75 * 0.25), (0.6, 0.0), (1.0, 0.0)]
    {
        assert!((share_of_others(progress) - expected).abs() < 0.02, "{progress}");
    }
}
