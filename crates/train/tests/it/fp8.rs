//! Training whose experts multiply in eight-bit floats.

use moeworks_model::{Decoder, ModelConfig, PassOptions, TokenBatch};
use moeworks_ops::Context;
use moeworks_ops::cuda::{Emulation, Gpu};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random};
use moeworks_train::optimizer::{AdamWConfig, Optimizer};

const SEQ_LEN: usize = 24;
const STEPS: usize = 12;

/// The losses of some steps on one batch, in bf16 but for the context's experts.
fn losses(ctx: &Context) -> Vec<f64> {
    let config = ModelConfig {
        vocab_size: 300,
        width: 64,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 3,
        top_k: 2,
        expert_width: 128,
        max_seq_len: SEQ_LEN,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config).expect("a model");
    let mut weights = decoder.init(ctx, 7);
    let mut compute = weights.compute_copy(ctx, DType::BF16);
    let mut grads = weights.zeros_like(ctx);
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(ctx, adamw, &weights);
    let random = Random::new(1, Purpose::Test, 0);
    let ids: Vec<u32> = (0..2 * SEQ_LEN as u64).map(|i| random.below(i, 300) as u32).collect();
    let batch = TokenBatch { inputs: &ids, targets: &ids, num_sequences: 2, seq_len: SEQ_LEN, ..TokenBatch::default() };
    let options = PassOptions { grad_scale: 1.0 / ids.len() as f32, ..PassOptions::default() };
    let step = |_| {
        let stats =
            decoder.forward_backward(ctx, &compute, &batch, &options, Write::Replace, &mut grads).expect("a step");
        optimizer.update(ctx, (3e-3, 1.0), &mut weights, &grads, Some(&mut compute));
        stats.loss_sum / stats.num_targets as f64
    };
    (0..STEPS).map(step).collect()
}

/// The largest difference of two runs' losses, as a share of the loss.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs() / b))
}

#[test]
fn experts_in_eight_bit_floats_learn_as_in_bf16() {
    let [bf16, fp8] = [false, true].map(|has| losses(&Context::cpu(2).with_fp8_experts(has)));
    assert!(bf16[STEPS - 1] < 0.8 * bf16[0], "{bf16:?}");
    let distance = distance(&fp8, &bf16);
    assert!(distance > 0.0 && distance < 0.01, "{distance}: {fp8:?}, in bf16 {bf16:?}");
}

#[test]
fn a_gpu_makes_the_steps_of_the_processor_in_eight_bit_floats() {
    let expected = losses(&Context::cpu(2).with_fp8_experts(true));
    let hopper = Emulation { is_hopper: true, ..Emulation::default() };
    let gpus = [Gpu::emulated(Emulation::default()), Gpu::emulated(hopper), Gpu::open(0)];
    for gpu in gpus {
        let gpu = match gpu {
            Ok(gpu) => gpu,
            Err(missing) => {
                println!("SKIPPED: training in eight-bit floats: {missing}");
                continue;
            }
        };
        let name = gpu.name().to_owned();
        let found = losses(&Context::cpu(2).with_gpu(gpu).with_fp8_experts(true));
        let distance = distance(&found, &expected);
        assert!(distance < 2e-3, "{name}: {distance}: {found:?}, not {expected:?}");
    }
}
