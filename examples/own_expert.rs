//! Experts of your own: the layer's router decides, your functions compute, rows are gathered and combined here.
//!
//! `cargo run --release --example own_expert`

use std::error::Error;

use moeworks_moe::{Dispatch, MoeConfig, MoeLayer, MoeWeights, RouterInput};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

const TOKENS: usize = 20;
const WIDTH: usize = 6;

/// An expert: any function of a token's vector.
type Expert = fn(&[f32]) -> Vec<f32>;

fn identity(x: &[f32]) -> Vec<f32> {
    x.to_vec()
}

fn reversed(x: &[f32]) -> Vec<f32> {
    x.iter().rev().copied().collect()
}

fn squared(x: &[f32]) -> Vec<f32> {
    x.iter().map(|value| value * value).collect()
}

fn mean(x: &[f32]) -> Vec<f32> {
    vec![x.iter().sum::<f32>() / x.len() as f32; x.len()]
}

pub(crate) const EXPERTS: [Expert; 4] = [identity, reversed, squared, mean];

/// The output of a layer with these experts, the input, and each token's experts with their weights.
pub(crate) struct Outcome {
    pub(crate) x: Vec<f32>,
    pub(crate) y: Vec<f32>,
    pub(crate) choices: Vec<Vec<(u32, f32)>>,
}

/// Passes some tokens through a router of the library and the experts here.
pub(crate) fn forward() -> Result<Outcome, Box<dyn Error>> {
    let ctx = Context::cpu_all_cores();
    let layer = MoeLayer::new(MoeConfig::plain(WIDTH, 8, EXPERTS.len(), 2))?;
    let weights = MoeWeights::random(&ctx, layer.config(), 1, 0.5);
    let values: Vec<f32> = (0..TOKENS * WIDTH).map(|i| (i as f32 * 0.917).cos()).collect();
    let x = Tensor::from_slice(ctx.pool(), &[TOKENS, WIDTH], &values);

    // Which experts each token goes to, and the rows sorted by expert: plain values.
    let routing = layer.route(&ctx, &weights, &x, &RouterInput::default())?;
    let dispatch = Dispatch::new(&ctx, &routing, /* capacity factor */ 0.0);
    let mut y = vec![0.0; TOKENS * WIDTH];
    for (expert, range) in EXPERTS.iter().zip(dispatch.offsets().windows(2)) {
        // All rows of an expert are together: yours may be one matrix product.
        for row in range[0] as usize..range[1] as usize {
            let (token, weight) = (dispatch.row_tokens()[row] as usize, dispatch.row_weights()[row]);
            let out = expert(&values[token * WIDTH..][..WIDTH]);
            y[token * WIDTH..][..WIDTH].iter_mut().zip(out).for_each(|(sum, value)| *sum += weight * value);
        }
    }
    println!("{dispatch}");
    let pair = |i: usize| (routing.expert_ids()[i], routing.expert_weights()[i]);
    let choices = (0..TOKENS).map(|t| (2 * t..2 * t + 2).map(pair).collect()).collect();
    Ok(Outcome { x: values, y, choices })
}

#[allow(dead_code)] // the test calls `forward`
fn main() -> Result<(), Box<dyn Error>> {
    let Outcome { x, y, choices } = forward()?;
    for ((x, y), choices) in x.chunks(WIDTH).zip(y.chunks(WIDTH)).zip(choices).take(3) {
        println!("{x:.2?} goes to {choices:.2?} and becomes {y:.2?}");
    }
    Ok(())
}
