//! Routing on a GPU against the CPU, scheme by scheme, and without downloads of large tensors.

use moeworks_gpu::Gpu;
use moeworks_moe::{
    GroupScore, LayerStats, LossGrad, MoeConfig, MoeLayer, MoeWeights, Ramp, RouterConfig, RouterInput, RouterKind,
    ScoreFunction, WgradTarget, balance_loss_per_layer,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config;

const D: usize = 16;
const E: usize = 24;
const T: usize = 45;
const SEQ_LEN: usize = 15;

/// The results of a pass: experts of each token, and everything else by name.
struct Found {
    ids: Vec<u32>,
    stats: LayerStats,
    tensors: Vec<(String, Vec<f32>)>,
    /// Bytes downloaded from the GPU in forward and in backward.
    downloaded: [u64; 2],
}

fn values(ctx: &Context, rows: usize, stream: u64, std: f32) -> Tensor {
    let random = Random::new(11, Purpose::Test, stream);
    let values: Vec<f32> = (0..(rows * D) as u64).map(|i| std * random.normal(i)).collect();
    Tensor::from_slice(ctx.pool(), &[rows, D], &values)
}

/// The gradients of the losses of a pass.
#[derive(Clone, Copy)]
struct LossScales {
    z: f32,
    sequence: f32,
}

fn pass(ctx: &Context, config: &MoeConfig, input: &RouterInput<'_>, losses: LossScales) -> Found {
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::random(&ctx.on_host(), config, 5, 0.4);
    for state in weights.state.iter_mut().filter(|state| state.name == "e_score_correction_bias") {
        let random = Random::new(6, Purpose::Test, 0);
        state.tensor.f32s_mut().iter_mut().zip(0..).for_each(|(bias, i)| *bias = 0.2 * random.normal(i));
    }
    // Shared experts have a gate on their output, as in Qwen2-MoE.
    weights.shared.iter_mut().for_each(|shared| shared.gate = Some(values(&ctx.on_host(), 1, 2, 0.4)));
    let (x, dy) = (values(ctx, T, 0, 1.0), values(ctx, T, 1, 1.0));
    let downloaded = || ctx.gpu().map_or(0, |gpu| gpu.traffic().downloaded_bytes);
    let start = downloaded();
    let (y, saved) = layer.forward(ctx, &weights, &x, input);
    let after_forward = downloaded() - start;
    let stats = saved.stats();
    let balance = balance_loss_per_layer(&[&stats], 0.3).gradients.remove(0);
    let losses = LossGrad { balance, z: losses.z, sequence: losses.sequence, ..LossGrad::default() };
    let start = downloaded();
    let (dx, task) = layer.backward(ctx, &weights, &saved, &dy, &losses);
    let mut grads = MoeWeights::zeros(ctx, config, DType::F32);
    grads.shared.iter_mut().for_each(|shared| shared.gate = Some(ctx.zeros(&[1, D], DType::F32)));
    task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
    let after_backward = downloaded() - start;
    let mut tensors = vec![("y".into(), y.f32s().to_vec()), ("dx".into(), dx.f32s().to_vec())];
    tensors.push(("weights".into(), saved.routing().expert_weights().to_vec()));
    tensors.push(("mean_prob".into(), stats.mean_prob.clone()));
    let of_weights = grads.tensors().into_iter().enumerate();
    tensors.extend(of_weights.map(|(i, grad)| (format!("gradient {i}"), grad.f32s().to_vec())));
    let ids = saved.routing().expert_ids().to_vec();
    Found { ids, stats, tensors, downloaded: [after_forward, after_backward] }
}

fn assert_alike(name: &str, of_gpu: &Found, of_host: &Found) {
    assert_eq!(of_gpu.ids, of_host.ids, "{name}: experts");
    for ((what, a), (_, b)) in of_gpu.tensors.iter().zip(&of_host.tensors) {
        let scale = b.iter().fold(0.01_f32, |max, x| max.max(x.abs()));
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            let is_close = (a - b).abs() <= 2e-5 * scale || a.is_nan() && b.is_nan();
            assert!(is_close, "{name}: {what}[{i}] is {a}, on the CPU {b}");
        }
    }
    let (a, b) = (&of_gpu.stats, &of_host.stats);
    assert_eq!(a.tokens_per_expert, b.tokens_per_expert, "{name}");
    let numbers = |s: &LayerStats| [s.mean_entropy, s.z, s.mean_squared_logit, s.sequence_loss];
    for (a, b) in numbers(a).into_iter().zip(numbers(b)) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()) || a.is_nan() && b.is_nan(), "{name}: {a}, {b}");
    }
}

fn with_router(top_k: usize, normalize_weights: bool, router: RouterConfig) -> MoeConfig {
    MoeConfig { normalize_weights, router, ..config(D, 8, E, top_k) }
}

/// Returns the schemes that GPU kernels compute, with a name for each.
fn schemes() -> Vec<(&'static str, MoeConfig)> {
    let plain = RouterConfig::default();
    let v3 = RouterConfig {
        scores: ScoreFunction::Sigmoid,
        expert_bias: true,
        num_groups: 6,
        top_groups: 3,
        group_score: GroupScore::TopTwo,
        routed_scale: 2.5,
        ..plain.clone()
    };
    let v2 = RouterConfig { num_groups: 4, top_groups: 2, routed_scale: 16.0, ..plain.clone() };
    let warm = RouterConfig { temperature: Ramp::constant(1.7), ..plain.clone() };
    let sigmoid = RouterConfig { scores: ScoreFunction::Sigmoid, ..plain.clone() };
    let biased = RouterConfig { expert_bias: true, ..plain.clone() };
    let noisy = RouterConfig { kind: RouterKind::NoisyTopK, ..sigmoid.clone() };
    let mut cosine = RouterConfig { kind: RouterKind::Cosine, temperature: Ramp::constant(0.8), ..plain };
    cosine.schemes.cosine.dim = 8;
    let jitter = MoeConfig { jitter: Ramp::constant(0.1), ..with_router(1, false, RouterConfig::default()) };
    let dropout = RouterConfig { input_dropout: Ramp::constant(0.3), ..RouterConfig::default() };
    vec![
        ("DeepSeek-V3", with_router(4, true, v3.clone())),
        ("DeepSeek-V3, few groups", with_router(4, true, RouterConfig { top_groups: 1, ..v3 })),
        ("DeepSeek-V2", with_router(3, false, v2.clone())),
        ("DeepSeek-V2, normalised", with_router(3, true, v2)),
        ("temperature", with_router(2, true, warm)),
        ("sigmoid, one expert", with_router(1, true, sigmoid)),
        ("bias on a softmax", with_router(E, false, biased)),
        ("noise on sigmoids", with_router(2, true, noisy)),
        ("cosine", with_router(2, false, cosine)),
        ("jitter", jitter),
        ("dropout", with_router(2, false, dropout)),
        ("shared experts", MoeConfig { shared_width: 8, ..with_router(2, false, RouterConfig::default()) }),
    ]
}

#[test]
fn a_gpu_routes_as_the_cpu_does() {
    for (name, config) in schemes() {
        let noise = Random::new(3, Purpose::Router, 8);
        for (kind, input) in [
            ("training", RouterInput { seq_len: SEQ_LEN, ..RouterInput::with_noise(noise) }),
            ("use", RouterInput { is_inference: true, ..RouterInput::default() }),
        ] {
            let sequence = if input.is_inference { 0.0 } else { 0.5 };
            for losses in [LossScales { z: 0.0, sequence: 0.0 }, LossScales { z: 0.2, sequence }] {
                let of_host = pass(&Context::cpu(2), &config, &input, losses);
                for (device, gpu) in Gpu::for_tests() {
                    let of_gpu = pass(&Context::cpu(2).with_gpu(gpu), &config, &input, losses);
                    assert_alike(&format!("{name} in {kind} on the {device}"), &of_gpu, &of_host);
                }
            }
        }
    }
}

/// Tensors as large as the scores of all tokens stay on the GPU, except for noise on logits.
#[test]
fn scores_stay_on_the_gpu() {
    let input = RouterInput { seq_len: SEQ_LEN, ..RouterInput::with_noise(Random::new(3, Purpose::Router, 8)) };
    for (name, config) in schemes() {
        if matches!(config.router.kind, RouterKind::NoisyTopK | RouterKind::Cosine) {
            continue;
        }
        for (device, gpu) in Gpu::for_tests() {
            let losses = LossScales { z: 0.2, sequence: 0.5 };
            let found = pass(&Context::cpu(2).with_gpu(gpu), &config, &input, losses);
            let scores = (T * E * 4) as u64;
            assert!(found.downloaded.iter().all(|&bytes| bytes < scores), "{name}, {device}: {:?}", found.downloaded);
        }
    }
}
