//! Timing of operations, and the table of products that `cargo bench` and `moeworks bench` print.

use std::time::Instant;

use moeworks_tensor::{DType, Tensor, bf16};

use crate::experts::{
    ExpertGrads, ExpertRows, ExpertWeights, ExpertsBackward, WeightGradInputs, experts_backward, experts_forward,
    experts_weight_grad,
};
use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use crate::peak::Peaks;
use crate::{Activation, Context};

/// The shortest of a number of runs, in seconds.
pub fn best_seconds(tries: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..tries).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// The shortest of as many runs as take a quarter of a second, at least three, in seconds; a run is over when the device is done.
pub fn best_seconds_of_many(ctx: &Context, mut run: impl FnMut()) -> f64 {
    let mut run = || {
        run();
        ctx.wait();
    };
    let start = Instant::now();
    let mut best = best_seconds(3, &mut run);
    while start.elapsed().as_secs_f64() < 0.25 {
        best = best.min(best_seconds(1, &mut run));
    }
    best
}

/// The time of one case.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchResult {
    /// What was computed, with its sizes.
    pub name: String,
    /// Floating-point operations of one run; a multiply-add counts as two.
    pub flops: f64,
    /// The shortest run.
    pub seconds: f64,
    /// The measured peak that the case is compared with, in operations a second.
    pub peak: f64,
}

impl BenchResult {
    /// Operations a second.
    #[must_use]
    pub fn flops_per_s(&self) -> f64 {
        self.flops / self.seconds
    }

    /// The part of the peak that was reached.
    #[must_use]
    pub fn share_of_peak(&self) -> f64 {
        self.flops_per_s() / self.peak
    }
}

/// A linear layer to time: tokens, outputs, inputs.
const LINEAR_CASES: [(usize, usize, usize); 6] =
    [(2048, 2048, 2048), (64, 2048, 2048), (4096, 256, 256), (4096, 1024, 256), (4096, 256, 512), (1, 2048, 2048)];

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

/// Times products of linear layers and experts with weights of a type and hands each result to `report` as it comes: the three
/// forms of dense products, and the experts forward, backward, and all phases. Only cases whose name contains `filter` are run.
/// Takes some seconds.
pub fn bench_cases(ctx: &Context, peaks: &Peaks, dtype: DType, filter: &str, mut report: impl FnMut(&BenchResult)) {
    let mut timing = Timing { ctx, peak: peaks.flops(dtype), filter, report: &mut report };
    for sizes in LINEAR_CASES {
        bench_linear(ctx, dtype, sizes, &mut timing);
    }
    for case in EXPERTS_CASES {
        bench_experts(ctx, dtype, case, &mut timing);
    }
}

/// What is done with each case.
struct Timing<'a> {
    ctx: &'a Context,
    peak: f64,
    filter: &'a str,
    report: &'a mut dyn FnMut(&BenchResult),
}

impl Timing<'_> {
    fn case(&mut self, name: String, flops: f64, run: impl FnMut()) {
        if name.contains(self.filter) {
            let seconds = best_seconds_of_many(self.ctx, run);
            (self.report)(&BenchResult { name, flops, seconds, peak: self.peak });
        }
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

fn bench_linear(ctx: &Context, dtype: DType, (t, o, i): (usize, usize, usize), timing: &mut Timing<'_>) {
    let (x, w, dy) = (values(ctx, &[t, i], dtype), values(ctx, &[o, i], dtype), values(ctx, &[t, o], dtype));
    let mut dw = ctx.zeros(&[o, i], DType::F32);
    let flops = 2.0 * (t * o * i) as f64;
    let mut case = |what: &str, run: &mut dyn FnMut()| {
        timing.case(format!("{what} {t} x {o} x {i}, {dtype:?}"), flops, run);
    };
    case("x w^T  ", &mut || drop(linear(ctx, &x, &w, dtype)));
    case("dy w   ", &mut || drop(linear_backward_input(ctx, &dy, &w, DType::F32)));
    case("dy^T x ", &mut || linear_backward_weight(ctx, &dy, &x, dtype, Write::Replace, &mut dw));
}

/// Rows of experts for tokens that have K different experts each, with equal weights.
pub struct Choices {
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    token_rows: Vec<u32>,
    num_choices: usize,
}

impl Choices {
    /// `expert_of(token, choice)` for T tokens, E experts and K choices; the choices of a token must differ.
    pub fn new((t, e, k): (usize, usize, usize), expert_of: impl Fn(usize, usize) -> usize) -> Self {
        let (mut offsets, mut tokens, mut token_rows) = (vec![0], Vec::new(), vec![0; t * k]);
        for expert in 0..e {
            for token in 0..t {
                if let Some(choice) = (0..k).find(|&choice| expert_of(token, choice) == expert) {
                    token_rows[token * k + choice] = tokens.len() as u32;
                    tokens.push(token as u32);
                }
            }
            offsets.push(tokens.len() as u32);
        }
        let weights = vec![1.0 / k as f32; tokens.len()];
        Self { offsets, tokens, weights, token_rows, num_choices: k }
    }

    /// As operations on experts take them.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.token_rows, self.num_choices)
    }
}

fn bench_experts(ctx: &Context, dtype: DType, case: ExpertsCase, timing: &mut Timing<'_>) {
    let ExpertsCase { t, d, f, e, k } = case;
    let (x, dy) = (values(ctx, &[t, d], dtype), values(ctx, &[t, d], DType::F32));
    let (gate_up, down) = (values(ctx, &[e, 2 * f, d], dtype), values(ctx, &[e, d, f], dtype));
    let (mut gate_up_grad, mut down_grad) =
        (ctx.zeros(gate_up.shape(), DType::F32), ctx.zeros(down.shape(), DType::F32));
    let activation = Activation::SwiGlu;
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
    // Choice k of token t is expert (t + k e / K) mod E: every expert gets as many rows.
    let choices = Choices::new((t, e, k), |token, choice| (token + choice * e / k) % e);
    let rows = choices.rows();
    let flops = 6.0 * (t * k * d * f) as f64;
    let mut result = |what: &str, passes: f64, run: &mut dyn FnMut()| {
        timing.case(format!("experts {what} T {t} D {d} F {f} E {e} K {k}, {dtype:?}"), passes * flops, run);
    };
    result("forward", 1.0, &mut || drop(experts_forward(ctx, &x, weights, rows)));
    let (_, saved) = experts_forward(ctx, &x, weights, rows);
    result("backward", 1.0, &mut || drop(experts_backward(ctx, &dy, weights, rows, &saved)));
    let backward = experts_backward(ctx, &dy, weights, rows, &saved);
    let mut weight_grad = |saved: &_, back: &ExpertsBackward| {
        let inputs = WeightGradInputs { x: &x, dy: &dy, saved, dh: &back.dh, weighed: back.weighed.as_ref() };
        let grads = ExpertGrads { gate_up: &mut gate_up_grad, down: &mut down_grad };
        experts_weight_grad(ctx, inputs, activation, rows, Write::Replace, grads);
    };
    result("weight gradient", 1.0, &mut || weight_grad(&saved, &backward));
    drop(backward);
    result("all phases", 3.0, &mut || {
        let (_, saved) = experts_forward(ctx, &x, weights, rows);
        let backward = experts_backward(ctx, &dy, weights, rows, &saved);
        weight_grad(&saved, &backward);
    });
}
