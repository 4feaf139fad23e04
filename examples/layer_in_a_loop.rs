//! An MoE layer in a training loop of your own: forward, loss, backward, plain SGD.
//!
//! `cargo run --release --example layer_in_a_loop`

use moeworks_moe::{
    ConfigError, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget, balance_loss_per_layer,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

const TOKENS: usize = 256;
const WIDTH: usize = 16;

/// The layer's aim: the largest number of each vector is doubled, the others become zero.
fn target(x: &[f32]) -> Vec<f32> {
    let largest = x.iter().copied().fold(f32::MIN, f32::max);
    x.iter().map(|&value| if value == largest { 2.0 * value } else { 0.0 }).collect()
}

/// Trains for `steps` steps. Returns the mean squared error before and after.
pub(crate) fn train(steps: usize) -> Result<(f32, f32), ConfigError> {
    let ctx = Context::cpu_all_cores();
    // Eight experts, two for each token.
    let layer = MoeLayer::new(MoeConfig::plain(WIDTH, 32, 8, 2))?;
    let mut weights = MoeWeights::random(&ctx, layer.config(), /* seed */ 1, /* deviation */ 0.2);
    let mut grads = MoeWeights::zeros(&ctx, layer.config(), DType::F32);
    let mut errors = Vec::new();
    for step in 0..steps {
        let random = Random::new(/* seed */ 7, Purpose::Test, step as u64);
        let values: Vec<f32> = (0..(TOKENS * WIDTH) as u64).map(|i| random.normal(i)).collect();
        let wanted: Vec<f32> = values.chunks(WIDTH).flat_map(target).collect();
        let x = Tensor::from_slice(ctx.pool(), &[TOKENS, WIDTH], &values);

        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
        let differences: Vec<f32> = y.f32s().iter().zip(&wanted).map(|(y, wanted)| y - wanted).collect();
        let error = differences.iter().map(|d| d * d).sum::<f32>() / TOKENS as f32;

        // The gradient of the error by y, and that of the balance loss by the router's probabilities.
        let dy: Vec<f32> = differences.iter().map(|d| 2.0 * d / TOKENS as f32).collect();
        let dy = Tensor::from_slice(ctx.pool(), &[TOKENS, WIDTH], &dy);
        let stats = saved.stats();
        let balance = balance_loss_per_layer(&[&stats], /* coefficient */ 0.3);
        let losses = LossGrad { balance: balance.gradients[0].clone(), ..LossGrad::default() };
        let (_dx, task) = layer.backward(&ctx, &weights, &saved, &dy, &losses);
        task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));

        for (weight, grad) in weights.tensors_mut().into_iter().zip(grads.tensors()) {
            weight.f32s_mut().iter_mut().zip(grad.f32s()).for_each(|(w, g)| *w -= 0.1 * g);
        }
        if step % 50 == 0 {
            println!("step {step:>4}: error {error:.3}, tokens per expert {:?}", stats.tokens_per_expert);
        }
        errors.push(error);
    }
    Ok((errors[0], errors[errors.len() - 1]))
}

#[allow(dead_code)] // the test calls `train`
fn main() -> Result<(), ConfigError> {
    let (before, after) = train(401)?;
    println!("error {before:.3} before, {after:.3} after");
    Ok(())
}
