//! Experts with biases against their definition in f64, gradients against finite differences of that.

use moeworks_ops::experts::{
    ExpertBiases, ExpertRows, ExpertWeights, ForwardOptions, NO_ROW, add_bias_row_weight_grads, experts_backward,
    experts_bias_grad, experts_forward_with,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_close, contexts, dot, doubles, finite_differences, normal_tensor};

const T: usize = 5;
const D: usize = 6;
const F: usize = 7;
const E: usize = 3;

/// Expert 0 has tokens 1, 2 and 4, expert 1 none, expert 2 tokens 0 and 2.
const OFFSETS: [u32; E + 1] = [0, 3, 3, 5];
const TOKENS: [u32; 5] = [1, 2, 4, 0, 2];
const TOKEN_ROWS: [u32; 2 * T] = [3, NO_ROW, 0, NO_ROW, 1, 4, NO_ROW, NO_ROW, 2, NO_ROW];

/// x, gate_up, down, their biases, and the row weights.
type Inputs<'a> = [&'a [f64]; 6];

fn reference([x, gate_up, down, b1, b2, weights]: Inputs<'_>) -> Vec<f64> {
    let mut y = vec![0.0; T * D];
    for row in 0..TOKENS.len() {
        let expert = if row < 3 { 0 } else { 2 };
        let token = TOKENS[row] as usize;
        let x = &x[token * D..][..D];
        let h: Vec<f64> = (0..F).map(|j| dot(&gate_up[(expert * F + j) * D..][..D], x) + b1[expert * F + j]).collect();
        let a: Vec<f64> = h.iter().map(|h| h.max(0.0)).collect();
        for i in 0..D {
            y[token * D + i] += weights[row] * (dot(&down[(expert * D + i) * F..][..F], &a) + b2[expert * D + i]);
        }
    }
    y
}

fn rows(weights: &Tensor) -> ExpertRows<'_> {
    ExpertRows::new(&OFFSETS, &TOKENS, weights.f32s(), &TOKEN_ROWS, 2)
}

fn check(name: &str, ctx: &Context) {
    let normal = |seed, shape: &[usize]| normal_tensor(ctx, seed, shape, DType::F32);
    let (x, gate_up, down) = (normal(1, &[T, D]), normal(2, &[E, F, D]), normal(3, &[E, D, F]));
    let (b1, b2, weights) = (normal(4, &[E, F]), normal(5, &[E, D]), normal(6, &[TOKENS.len()]));
    let dy = normal(7, &[T, D]);
    let rows = rows(&weights);
    let experts = ExpertWeights { gate_up: &gate_up, down: &down, activation: Activation::Relu };
    let biases = ExpertBiases { gate_up: &b1, down: &b2 };
    let options = ForwardOptions { biases: Some(biases), ..ForwardOptions::default() };
    let (y, saved) = experts_forward_with(ctx, &x, experts, rows, options);
    let saved = saved.expect("what a backward pass needs");
    let inputs = [&x, &gate_up, &down, &b1, &b2, &weights].map(doubles);
    let expected = |inputs: &[Vec<f64>; 6]| reference(inputs.each_ref().map(Vec::as_slice));
    assert_close(name, &doubles(&y), &expected(&inputs), 1e-5);
    let base = normal(8, &[T, D]);
    let onto = experts_forward_with(ctx, &x, experts, rows, ForwardOptions { base: Some(&base), ..options }).0;
    let sums = onto.f32s().iter().zip(y.f32s()).zip(base.f32s());
    assert!(sums.into_iter().all(|((&sum, y), base)| sum == y + base), "{name}: on top of a base");

    let mut back = experts_backward(ctx, &dy, experts, rows, &saved);
    add_bias_row_weight_grads(ctx, &dy, &b2, rows, &mut back.d_row_weights);
    let (mut d_b1, mut d_b2) = (ctx.zeros(&[E, F], DType::F32), ctx.zeros(&[E, D], DType::F32));
    d_b1.f32s_mut().fill(9.0);
    experts_bias_grad(ctx, &dy, &back.dh, rows, Write::Replace, &mut d_b1, &mut d_b2);
    experts_bias_grad(ctx, &dy, &back.dh, rows, Write::Add, &mut d_b1, &mut d_b2);
    let dy = doubles(&dy);
    let grad = |which: usize| {
        finite_differences(&inputs[which], |values| {
            let mut inputs = inputs.clone();
            inputs[which] = values.to_vec();
            dot(&expected(&inputs), &dy)
        })
    };
    let twice = |grad: Vec<f64>| grad.into_iter().map(|g| 2.0 * g).collect::<Vec<_>>();
    assert_close(name, &doubles(&back.dx), &grad(0), 2e-5);
    assert_close(name, &doubles(&d_b1), &twice(grad(3)), 2e-5);
    assert_close(name, &doubles(&d_b2), &twice(grad(4)), 2e-5);
    assert_close(name, &doubles(&back.d_row_weights), &grad(5), 2e-5);
}

#[test]
fn experts_with_biases_agree_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        check(&name, &ctx);
    }
}
