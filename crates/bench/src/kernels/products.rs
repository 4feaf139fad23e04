//! Dense products and experts.

use moeworks_tensor::{DType, Tensor, bf16};

use super::{ChoiceCounts, Choices, Cost, Timing};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertWeights, ExpertsBackward, ExpertsSaved, WeightGradInputs, experts_backward,
    experts_forward, experts_weight_grad,
};
use moeworks_ops::gemm_plan::GemmProblem;
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::{Activation, Context};

/// A linear layer to time: the number of tokens, of outputs and of inputs.
#[derive(Clone, Copy)]
struct LinearCase {
    t: usize,
    o: usize,
    i: usize,
}

const LINEAR_CASES: [LinearCase; 6] = [
    LinearCase { t: 2048, o: 2048, i: 2048 },
    LinearCase { t: 64, o: 2048, i: 2048 },
    LinearCase { t: 4096, o: 256, i: 256 },
    LinearCase { t: 4096, o: 1024, i: 256 },
    LinearCase { t: 4096, o: 256, i: 512 },
    LinearCase { t: 1, o: 2048, i: 2048 },
];

/// An MoE layer's experts to time.
#[derive(Clone, Copy)]
struct ExpertsCase {
    t: usize,
    d: usize,
    f: usize,
    e: usize,
    k: usize,
}

const EXPERTS_CASES: [ExpertsCase; 3] = [
    ExpertsCase { t: 1024, d: 1024, f: 512, e: 32, k: 4 },
    ExpertsCase { t: 4096, d: 256, f: 512, e: 8, k: 2 },
    ExpertsCase { t: 1, d: 1024, f: 512, e: 32, k: 4 },
];

/// The number of weights that cases of one token use in turn. Those of one matrix would stay in a cache, unlike those
/// of a model.
const COLD_MATRICES: usize = 16;

pub(super) fn bench(timing: &mut Timing<'_>, dtype: DType) {
    for case in LINEAR_CASES {
        linears(timing, dtype, case);
    }
    for case in EXPERTS_CASES {
        experts(timing, dtype, case);
    }
}

fn values(ctx: &Context, shape: &[usize], dtype: DType) -> Tensor {
    let mut tensor = ctx.empty(shape, dtype);
    let value = |i: usize| ((i * 7919) % 2003) as f32 / 2003.0 - 0.5;
    match dtype {
        DType::BF16 => tensor.bf16s_mut().iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(value(i))),
        _ => tensor.f32s_mut().iter_mut().enumerate().for_each(|(i, x)| *x = value(i)),
    }
    tensor
}

fn linears(timing: &mut Timing<'_>, dtype: DType, case: LinearCase) {
    let LinearCase { t, o, i } = case;
    let names = ["x w^T  ", "dy w   ", "dy^T x "].map(|what| format!("{what} {t} x {o} x {i}, {dtype:?}"));
    if !timing.wants_any(&names) {
        return;
    }
    let [forward, to_input, to_weight] = names;
    let ctx = timing.ctx;
    let (x, dy) = (values(ctx, &[t, i], dtype), values(ctx, &[t, o], dtype));
    let copies = if t == 1 { COLD_MATRICES } else { 1 };
    let weights: Vec<Tensor> = (0..copies).map(|_| values(ctx, &[o, i], dtype)).collect();
    // The output has been written before, because fresh memory is mapped page by page.
    let mut grads: Vec<Tensor> = (0..copies).map(|_| values(ctx, &[o, i], DType::F32)).collect();
    let (size, wide) = (dtype.size(), DType::F32.size());
    let flops = 2.0 * (t * o * i) as f64;
    let (of_x, of_w, of_y) = (t * i, o * i, t * o);
    let cost = |read: usize, written: usize| Cost { flops, dtype, ..Cost::from_bytes(read, written) };
    let mut turn = 0;
    let mut next = move || {
        turn = (turn + 1) % copies;
        turn
    };
    let problem = Some(GemmProblem::linear([t, o, i], dtype));
    timing.case_of(forward, problem, cost(size * (of_x + of_w), size * of_y), || {
        drop(linear(ctx, &x, &weights[next()], dtype));
    });
    let problem = Some(GemmProblem::linear_backward_input([t, i, o], dtype));
    timing.case_of(to_input, problem, cost(size * (of_y + of_w), wide * of_x), || {
        drop(linear_backward_input(ctx, &dy, &weights[next()], DType::F32));
    });
    let problem = Some(GemmProblem::linear_backward_weight([o, i, t], dtype));
    timing.case_of(to_weight, problem, cost(size * (of_x + of_y), wide * of_w), || {
        linear_backward_weight(ctx, &dy, &x, dtype, Write::Replace, &mut grads[next()]);
    });
}

fn experts(timing: &mut Timing<'_>, dtype: DType, case: ExpertsCase) {
    let ExpertsCase { t, d, f, e, k } = case;
    let names = ["forward", "backward", "weight gradient", "all phases"]
        .map(|what| format!("experts {what} T {t} D {d} F {f} E {e} K {k}, {dtype:?}"));
    if !timing.wants_any(&names) {
        return;
    }
    let [forward, backward, weight_gradient, all_phases] = names;
    let ctx = timing.ctx;
    let (x, dy) = (values(ctx, &[t, d], dtype), values(ctx, &[t, d], DType::F32));
    let (gate_up, down) = (values(ctx, &[e, 2 * f, d], dtype), values(ctx, &[e, d, f], dtype));
    let (mut gate_up_grad, mut down_grad) =
        (ctx.zeros(gate_up.shape(), DType::F32), ctx.zeros(down.shape(), DType::F32));
    let activation = Activation::SwiGlu;
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
    // Choice k of token t is expert (t + k e / K) mod E, so that every expert gets as many rows. Cases of few tokens
    // use other experts in turn.
    let turns = (e / (t * k)).max(1);
    let all: Vec<Choices> = (0..turns)
        .map(|turn| {
            Choices::new(ChoiceCounts { tokens: t, experts: e, top_k: k }, |token, choice| {
                (turn + token + choice * e / k) % e
            })
        })
        .collect();
    let used = all[0].num_used();
    let flops = 6.0 * (t * k * d * f) as f64;
    let (of_expert, of_rows, wide) = (3 * d * f, t * d, DType::F32.size());
    let cost = |read: usize, written: usize| Cost { flops, dtype, ..Cost::from_bytes(read, written) };
    let read = cost(used * of_expert * dtype.size() + of_rows * dtype.size(), of_rows * wide);
    // Experts without rows get zeros.
    let written = cost(of_rows * (dtype.size() + wide), e * of_expert * wide);
    let mut weight_grad = |saved: &ExpertsSaved, back: &ExpertsBackward, rows: ExpertRows<'_>| {
        let inputs = WeightGradInputs { x: &x, dy: &dy, saved, dh: &back.dh, weighed: back.weighed.as_ref() };
        let grads = ExpertGrads { gate_up: &mut gate_up_grad, down: &mut down_grad };
        experts_weight_grad(ctx, inputs, activation, rows, Write::Replace, grads);
    };
    let mut turn = 0;
    let mut next = || {
        turn = (turn + 1) % turns;
        turn
    };
    let rows = |turn: usize| all[turn].rows();
    let rows_each = (t * k).div_ceil(used.max(1));
    let of_experts = |problem: GemmProblem| Some(GemmProblem { num_groups: used, ..problem });
    let gate_up_problem = GemmProblem { is_paired: true, ..GemmProblem::linear([rows_each, f, d], dtype) };
    timing
        .case_of(forward, of_experts(gate_up_problem), read, || drop(experts_forward(ctx, &x, weights, rows(next()))));
    let saved: Vec<ExpertsSaved> = (0..turns).map(|turn| experts_forward(ctx, &x, weights, rows(turn)).1).collect();
    let problem = of_experts(GemmProblem::linear_backward_input([rows_each, f, d], dtype));
    timing.case_of(backward, problem, read, || {
        let turn = next();
        drop(experts_backward(ctx, &dy, weights, rows(turn), &saved[turn]));
    });
    let backs: Vec<ExpertsBackward> =
        (0..turns).map(|turn| experts_backward(ctx, &dy, weights, rows(turn), &saved[turn])).collect();
    let problem = of_experts(GemmProblem::linear_backward_weight([d, f, rows_each], dtype));
    timing.case_of(weight_gradient, problem, written, || {
        let turn = next();
        weight_grad(&saved[turn], &backs[turn], rows(turn));
    });
    drop(backs);
    timing.case(all_phases, read + read + written, || {
        let rows = rows(next());
        let (_, saved) = experts_forward(ctx, &x, weights, rows);
        let backward = experts_backward(ctx, &dy, weights, rows, &saved);
        weight_grad(&saved, &backward, rows);
    });
}
