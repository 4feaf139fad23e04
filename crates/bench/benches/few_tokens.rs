//! Times the experts with few tokens against the rate of reading memory: `cargo bench -p moeworks-bench --bench
//! few_tokens`. With `-- TEXT` only the cases whose name contains the text.
//!
//! Each run sends the tokens to experts other than those of the previous run, so that weights are read from memory as
//! in a model of many layers. Counted are the bytes of the used weights: read once forward and once backward; for the
//! gradients of the weights, written once.

use std::time::Instant;

use moeworks_bench::{ChoiceCounts, Choices};
use moeworks_ops::experts::{
    ExpertGrads, ExpertWeights, ExpertsBackward, ExpertsSaved, WeightGradInputs, experts_backward, experts_forward,
    experts_weight_grad,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context, MachineOptions, peak};
use moeworks_tensor::{DType, Tensor, bf16};

struct Shape {
    name: &'static str,
    d: usize,
    f: usize,
    e: usize,
    k: usize,
    activation: Activation,
}

const SHAPES: [Shape; 4] = [
    Shape { name: "a", d: 2048, f: 1024, e: 64, k: 8, activation: Activation::SwiGlu },
    Shape { name: "b", d: 1024, f: 3584, e: 8, k: 2, activation: Activation::SwiGlu },
    Shape { name: "c", d: 768, f: 3072, e: 64, k: 1, activation: Activation::Gelu },
    Shape { name: "d", d: 1024, f: 384, e: 128, k: 8, activation: Activation::SwiGlu },
];

/// The number of runs of each case, of which the median counts.
const TRIES: usize = 9;

fn main() {
    // `cargo test` runs benches with this argument, only to check that they start.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let ctx = Context::cpu_all_cores().on_machine(&MachineOptions::from_variables(|name| std::env::var_os(name)));
    let peaks = peak::measure(&ctx);
    println!("{} threads, {:?}, reads {:.1} GB/s", ctx.threads().count(), ctx.isa(), peaks.read_bytes_per_s / 1e9);
    for shape in SHAPES {
        for dtype in [DType::F32, DType::BF16] {
            let has_match = |t: usize| format!("{} {dtype:?} T {t} ", shape.name).contains(&filter);
            let tokens: Vec<usize> = [1, 4, 16, 32].into_iter().filter(|&t| has_match(t)).collect();
            if !tokens.is_empty() {
                bench(&ctx, &shape, dtype, &tokens, peaks.read_bytes_per_s);
            }
        }
    }
}

fn values(ctx: &Context, shape: &[usize], dtype: DType) -> Tensor {
    let mut tensor = ctx.empty(shape, dtype);
    let value = |i: usize| ((i * 7919) % 2003) as f32 / 20030.0 - 0.05;
    match dtype {
        DType::BF16 => tensor.bf16s_mut().iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(value(i))),
        _ => tensor.f32s_mut().iter_mut().enumerate().for_each(|(i, x)| *x = value(i)),
    }
    tensor
}

/// Assigns every token to `k` scattered experts; `turn` shifts all of them.
fn choices(t: usize, e: usize, k: usize, turn: usize) -> Choices {
    // The multiplier is coprime to E, so that the choices of a token differ.
    let counts = ChoiceCounts { tokens: t, experts: e, top_k: k };
    Choices::new(counts, |token, choice| (turn * k + token * 5 + choice * 7 + token * token / 3) % e)
}

fn bench(ctx: &Context, shape: &Shape, dtype: DType, tokens: &[usize], read_rate: f64) {
    let Shape { name, d, f, e, k, activation } = *shape;
    let af = f * activation.num_inputs();
    let (gate_up, down) = (values(ctx, &[e, af, d], dtype), values(ctx, &[e, d, f], dtype));
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
    let mut grads = [ctx.zeros(&[e, af, d], DType::F32), ctx.zeros(&[e, d, f], DType::F32)];
    for &t in tokens {
        let (x, dy) = (values(ctx, &[t, d], dtype), values(ctx, &[t, d], DType::F32));
        let mut times = [const { Vec::new() }; 4];
        let mut touched = 0;
        for turn in 0..TRIES {
            let choices = choices(t, e, k, turn);
            let rows = choices.rows();
            touched = choices.num_used();
            let (forward, saved): (f64, ExpertsSaved) = timed(|| experts_forward(ctx, &x, weights, rows).1);
            let (backward, back): (f64, ExpertsBackward) = timed(|| experts_backward(ctx, &dy, weights, rows, &saved));
            let mut grad = |write: Write| {
                let inputs =
                    WeightGradInputs { x: &x, dy: &dy, saved: &saved, dh: &back.dh, weighed: back.weighed.as_ref() };
                let [gate_up, down] = &mut grads;
                let into = ExpertGrads { gate_up, down };
                timed(|| experts_weight_grad(ctx, inputs, activation, rows, write, into)).0
            };
            let passes = [forward, backward, grad(Write::Add), grad(Write::Replace)];
            times.iter_mut().zip(passes).for_each(|(times, pass)| times.push(pass));
        }
        let elements = (touched * (af + f) * d) as f64;
        let weight_bytes = elements * dtype.size() as f64;
        let all_bytes = 4.0 * (e * (af + f) * d) as f64;
        let cases = [
            ("forward", weight_bytes),
            ("backward", weight_bytes),
            ("weight gradient added", 8.0 * elements),
            ("weight gradient replaced, all experts", all_bytes),
        ];
        for ((case, bytes), mut times) in cases.into_iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let seconds = times[TRIES / 2];
            let rate = bytes / seconds;
            println!(
                "{name} {dtype:?} T {t} {case:38} {:9.3} ms {:7.1} GB/s {:5.1}%",
                seconds * 1e3,
                rate / 1e9,
                100.0 * rate / read_rate
            );
        }
    }
}

fn timed<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = run();
    (start.elapsed().as_secs_f64(), result)
}
