//! Where the optimizer's state is while a GPU computes.

use moeworks_model::{Decoder, ModelConfig, PassOptions, TokenBatch};
use moeworks_ops::Context;
use moeworks_ops::cuda::{Emulation, Gpu};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random};
use moeworks_train::optimizer::{AdamWConfig, Optimizer};

const SEQ_LEN: usize = 16;

/// What the GPU holds for each weight after two steps in bf16 and one pass, in bytes, and the loss of that pass.
fn trained(gpu: &Gpu, is_offloaded: bool) -> (f64, f64) {
    let ctx = Context::cpu(2).with_gpu(gpu.clone());
    let at = if is_offloaded { ctx.on_host() } else { ctx.clone() };
    let config = ModelConfig {
        vocab_size: 300,
        width: 64,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 4,
        top_k: 2,
        expert_width: 64,
        max_seq_len: SEQ_LEN,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config).expect("a model");
    let mut weights = decoder.init(&ctx, 7);
    let mut compute = weights.compute_copy(&at, DType::BF16);
    let mut grads = weights.zeros_like(&ctx);
    let adamw = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(&ctx, adamw, &weights);
    let random = Random::new(1, Purpose::Test, 0);
    let ids: Vec<u32> = (0..2 * SEQ_LEN as u64).map(|i| random.below(i, 300) as u32).collect();
    let batch = TokenBatch { inputs: &ids, targets: &ids, num_sequences: 2, seq_len: SEQ_LEN, ..TokenBatch::default() };
    let options = PassOptions { grad_scale: 1.0 / ids.len() as f32, ..PassOptions::default() };
    let mut loss = 0.0;
    for step in 0..3 {
        let stats =
            decoder.forward_backward(&ctx, &compute, &batch, &options, Write::Replace, &mut grads).expect("a step");
        loss = stats.loss_sum / stats.num_targets as f64;
        if step < 2 {
            optimizer.update(&at, (1e-3, 1.0), &mut weights, &grads, Some(&mut compute));
        }
    }
    let num_weights: usize = weights.tensors().iter().map(|(_, tensor)| tensor.len()).sum();
    (gpu.held_bytes() as f64 / num_weights as f64, loss)
}

#[test]
fn an_offloaded_optimizer_leaves_a_third_of_the_bytes_on_the_gpu_and_makes_the_same_steps() {
    let gpus = [false, true].map(|_| Gpu::emulated(Emulation::default()));
    let [Ok(first), Ok(second)] = &gpus else {
        println!("SKIPPED: memory of an offloaded optimizer: there is no emulation of a GPU");
        return;
    };
    let ((kept, loss), (offloaded, loss_offloaded)) = (trained(first, false), trained(second, true));
    // Gradients in f32 and weights in bf16; besides them both moments and weights in f32.
    assert!(kept >= 17.5, "{kept} bytes a weight");
    assert!(offloaded <= 6.5, "{offloaded} bytes a weight");
    assert!((loss - loss_offloaded).abs() <= 1e-4 * loss, "{loss_offloaded}, not {loss}");
}
