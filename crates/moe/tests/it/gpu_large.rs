//! Layers of published sizes on a GPU against the CPU: more tiles than multiprocessors, many stages, long sums. They
//! are skipped without a GPU, because the emulation would take hours.

use moeworks_gpu::{Gpu, GpuOptions};
use moeworks_moe::{LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

struct Case {
    name: &'static str,
    config: MoeConfig,
    tokens: usize,
    dtype: DType,
    is_fp8: bool,
}

/// The sizes of a layer.
struct Sizes {
    width: usize,
    expert_width: usize,
    num_experts: usize,
    top_k: usize,
}

impl From<[usize; 4]> for Sizes {
    fn from([width, expert_width, num_experts, top_k]: [usize; 4]) -> Self {
        Self { width, expert_width, num_experts, top_k }
    }
}

impl Case {
    fn new(name: &'static str, sizes: impl Into<Sizes>, tokens: usize, dtype: DType) -> Self {
        let Sizes { width, expert_width, num_experts, top_k } = sizes.into();
        let activation = if name.contains("GELU") { Activation::Gelu } else { Activation::SwiGlu };
        let config = MoeConfig { activation, ..MoeConfig::plain(width, expert_width, num_experts, top_k) };
        Self { name, config, tokens, dtype, is_fp8: name.contains("FP8") }
    }
}

fn normals(ctx: &Context, rows: usize, columns: usize, stream: u64, dtype: DType) -> Tensor {
    let mut tensor: Tensor = ctx.empty(&[rows, columns], DType::F32);
    elementwise::fill_normal(ctx, &Random::new(7, Purpose::Test, stream), 1.0, &mut tensor);
    elementwise::cast(ctx, &tensor, dtype)
}

/// Returns outputs, gradients of inputs, of the router and of both matrices of the experts.
fn pass(ctx: &Context, case: &Case, weights: &MoeWeights) -> Vec<(String, Vec<f32>)> {
    let ctx = &ctx.clone().with_fp8_experts(case.is_fp8);
    let layer = MoeLayer::new(case.config.clone()).expect("a layer");
    let x = normals(&ctx.on_host(), case.tokens, case.config.width, 0, case.dtype);
    let dy = normals(&ctx.on_host(), case.tokens, case.config.width, 1, DType::F32);
    let (y, saved) = layer.forward(ctx, weights, &x, &RouterInput::default());
    let losses = LossGrad { balance: vec![0.0; case.config.num_experts], z: 0.0, ..LossGrad::default() };
    let (dx, task) = layer.backward(ctx, weights, &saved, &dy, &losses);
    let mut grads = MoeWeights::zeros(ctx, &case.config, DType::F32);
    task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
    let mut all = vec![("y".to_string(), y.to_f32_vec()), ("dx".to_string(), dx.to_f32_vec())];
    all.extend(grads.tensors().into_iter().enumerate().map(|(i, grad)| (format!("gradient {i}"), grad.to_f32_vec())));
    all
}

/// Returns the norm of the difference, relative to the norm of `expected` unless that is 0.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let of = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = of(&mut found.iter().zip(expected).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let length = of(&mut expected.iter().map(|&x| f64::from(x)));
    if length > 0.0 { difference / length } else { difference }
}

#[test]
fn layers_of_published_sizes_on_a_gpu_are_those_of_the_cpu() {
    let gpu = match Gpu::open(0, &GpuOptions::for_tests()) {
        Ok(gpu) => gpu,
        Err(missing) => return println!("SKIPPED: layers of published sizes on a GPU: {missing}"),
    };
    let cases = [
        Case::new("OLMoE", [2048, 1024, 64, 8], 2048, DType::BF16),
        Case::new("half of Mixtral's width", [4096, 7168, 8, 2], 1000, DType::BF16),
        Case::new("Qwen3", [2048, 768, 128, 8], 1500, DType::BF16),
        Case::new("Qwen3, few tokens", [2048, 768, 128, 8], 33, DType::BF16),
        Case::new("two matrices and GELU", [768, 3072, 64, 1], 3000, DType::BF16),
        Case::new("f32", [1024, 384, 32, 4], 1111, DType::F32),
        Case::new("FP8", [2048, 1024, 16, 4], 2048, DType::BF16),
    ];
    let cpu = Context::cpu(std::thread::available_parallelism().map_or(1, usize::from));
    let mut failures = Vec::new();
    for case in &cases {
        let mut weights = MoeWeights::random(&cpu, &case.config, 5, 0.02);
        for experts in [&mut weights.gate_up, &mut weights.down] {
            *experts = elementwise::cast(&cpu, experts, case.dtype);
        }
        let expected = pass(&cpu, case, &weights);
        let found = pass(&cpu.clone().with_gpu(gpu.clone()), case, &weights);
        let most = if case.dtype == DType::F32 { 1e-5 } else { 2e-2 };
        for ((what, found), (_, expected)) in found.iter().zip(&expected) {
            let distance = distance(found, expected);
            println!("{}: {what}: {distance:.2e}", case.name);
            if distance.is_nan() || distance > most {
                failures.push(format!("{}: {what} is {distance:.2e} off", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
