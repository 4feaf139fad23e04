//! A routing rule of your own: expert ids are handed in, their weights come from the layer's router.
//!
//! The rule here sends each token to the two experts whose index follows from the sign pattern of its first numbers
//! (a locality-sensitive hash). A scheme that is to be named in configurations is one file in the library instead:
//! docs/add-a-routing-scheme.md.
//!
//! `cargo run --release --example own_router`

use std::error::Error;

use moeworks_moe::{MoeConfig, MoeLayer, MoeWeights, RouterInput};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

const WIDTH: usize = 8;
const EXPERTS: u32 = 8;

/// The experts of a token: that of its sign pattern, and the one behind it.
fn choose(token: &[f32]) -> [u32; 2] {
    let first = token[..3].iter().fold(0, |bits, &value| 2 * bits + u32::from(value > 0.0));
    [first, (first + 1) % EXPERTS]
}

/// Passes 32 tokens. Returns the experts that the rule chose and those that the layer sent them to.
pub(crate) fn route() -> Result<(Vec<u32>, Vec<u32>), Box<dyn Error>> {
    let ctx = Context::cpu_all_cores();
    let layer = MoeLayer::new(MoeConfig::plain(WIDTH, 16, EXPERTS as usize, 2))?;
    let weights = MoeWeights::random(&ctx, layer.config(), 1, 0.3);
    let values: Vec<f32> = (0..32 * WIDTH).map(|i| (i as f32 * 1.713).sin()).collect();
    let x = Tensor::from_slice(ctx.pool(), &[32, WIDTH], &values);

    let chosen: Vec<u32> = values.chunks(WIDTH).flat_map(choose).collect();
    // Checked once: two experts for each token, each below the number of experts, none twice.
    let ids = layer.expert_ids(&ctx, 32, &chosen)?;
    let input = RouterInput { expert_ids: Some(&ids), ..RouterInput::default() };
    let (_y, saved) = layer.forward(&ctx, &weights, &x, &input);

    // The weights are a softmax of the live logits over the two experts, and gradients flow through them.
    println!("{}", saved.routing());
    println!("{}", saved.dispatch());
    Ok((chosen, saved.routing().expert_ids().to_vec()))
}

#[allow(dead_code)] // the test calls `route`
fn main() -> Result<(), Box<dyn Error>> {
    route().map(|_| ())
}
