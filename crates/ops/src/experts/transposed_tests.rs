use moeworks_tensor::{DType, Tensor};

use crate::experts::{
    ExpertBiases, ExpertGrads, ExpertRows, ExpertWeights, ForwardOptions, WeightGradTarget, experts_backward_as_stored,
    experts_backward_with_weight_grad, experts_forward_with,
};
use crate::linear::Write;
use crate::test_data::{contexts, numbers, tensor};
use crate::{Activation, Context};

const D: usize = 36;
const F: usize = 70;
const E: usize = 3;

/// The names and values of a pass's results, with gradients in the order of matrices `[N, K]`.
type Results = Vec<(&'static str, Vec<f32>)>;

/// A case: how many tokens, the type of weights, and the order of the columns of gate and up.
#[derive(Clone, Copy, Debug)]
struct Case {
    num_tokens: usize,
    dtype: DType,
    is_interleaved: bool,
    activation: Activation,
}

impl Case {
    /// Runs both passes with stacks that are transposed, or with copies of these in the usual order.
    fn run(self, ctx: &Context, is_transposed: bool) -> Results {
        let Self { num_tokens, dtype, is_interleaved, activation } = self;
        let of = |shape: &[usize], seed, dtype| tensor(ctx, shape, &numbers(shape.iter().product(), seed), dtype);
        let x = of(&[num_tokens, D], 1, DType::F32);
        let gate_up = Tensor::transposed(ctx.pool(), of(&[E, D, 2 * F], 2, dtype), is_interleaved).expect("a stack");
        let down = Tensor::transposed(ctx.pool(), of(&[E, F, D], 3, dtype), false).expect("a stack");
        let copy = |stack: Tensor| if is_transposed { stack } else { stack.copied(ctx.pool()) };
        let (gate_up, down) = (copy(gate_up), copy(down));
        let biases = [of(&[E, 2 * F], 4, DType::F32), of(&[E, D], 5, DType::F32)];
        let biases = Some(ExpertBiases { gate_up: &biases[0], down: &biases[1] });
        // Expert 0 gets every other token, expert 2 the others, expert 1 none.
        let half = num_tokens.div_ceil(2) as u32;
        let tokens: Vec<u32> = (0..num_tokens as u32).step_by(2).chain((1..num_tokens as u32).step_by(2)).collect();
        let mut token_rows = vec![0; num_tokens];
        tokens.iter().zip(0..).for_each(|(&token, row)| token_rows[token as usize] = row);
        let (row_weights, offsets) = (vec![0.5; num_tokens], [0, half, half, num_tokens as u32]);
        let rows = ExpertRows::new(&offsets, &tokens, &row_weights, &token_rows, 1);
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let options = ForwardOptions { biases, ..ForwardOptions::default() };
        let (y, saved) = experts_forward_with(ctx, &x, weights, rows, options);
        let saved = saved.expect("what a backward pass needs");
        let mut results = vec![("y", y.to_f32_vec()), ("h", saved.h.to_f32_vec())];
        if dtype == DType::F16 {
            return results;
        }
        let dy = of(&[num_tokens, D], 6, DType::F32);
        let shapes = if is_transposed { [[E, D, 2 * F], [E, F, D]] } else { [[E, 2 * F, D], [E, D, F]] };
        let [mut to_gate_up, mut to_down] = shapes.map(|shape| of(&shape, 7, DType::F32));
        let grads = ExpertGrads { gate_up: &mut to_gate_up, down: &mut to_down };
        let target = WeightGradTarget { write: Write::Replace, of_used: false, grads };
        let back = match is_transposed {
            true => experts_backward_as_stored(ctx, &x, &dy, weights, rows, &saved, target),
            false => experts_backward_with_weight_grad(ctx, &x, &dy, weights, rows, &saved, target),
        };
        let in_usual_order = |grad: Tensor, is_interleaved| match is_transposed {
            true => Tensor::transposed(ctx.pool(), grad, is_interleaved).expect("a stack").to_f32_vec(),
            false => grad.to_f32_vec(),
        };
        results.extend(
            [("dx", &back.dx), ("dh", &back.dh), ("d_row_weights", &back.d_row_weights)]
                .map(|(name, tensor)| (name, tensor.to_f32_vec())),
        );
        results.push(("gradient of gate_up", in_usual_order(to_gate_up, is_interleaved)));
        results.push(("gradient of down", in_usual_order(to_down, false)));
        results
    }
}

fn assert_alike(case: Case, ctx: &Context, tolerance: f32) {
    for ((name, found), (_, exact)) in case.run(ctx, true).iter().zip(&case.run(ctx, false)) {
        assert_eq!(found.len(), exact.len(), "{name} of {case:?}");
        let largest = exact.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * largest;
        assert!(found.iter().zip(exact).all(is_close), "{name} of {case:?}, {:?}", ctx.isa());
    }
}

#[test]
fn transposed_stacks_give_the_results_and_gradients_of_copies_in_the_usual_order() {
    let clamped = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
    for ctx in contexts() {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-5), (DType::BF16, 2e-2)] {
            // An emulated GPU takes seconds for what the host does in none.
            let counts: &[usize] = if ctx.gpu().is_some() { &[2, 9] } else { &[1, 2, 9, 40, 200] };
            for &num_tokens in counts {
                for (is_interleaved, activation) in [(true, clamped), (false, Activation::SwiGlu)] {
                    assert_alike(Case { num_tokens, dtype, is_interleaved, activation }, &ctx, tolerance);
                }
            }
        }
    }
}
