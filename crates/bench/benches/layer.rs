//! Times the whole MoE layer, forward and backward with all gradients, against the rate of a dense product measured
//! in the same run: `cargo bench -p moeworks-bench --bench layer`.
//!
//! The layer's rate counts only the experts' operations (18 R D F for the three phases), so that all other work
//! lowers it.

use std::hint::black_box;

use moeworks_bench::timing::best_seconds;
use moeworks_moe::{Dispatch, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget};
use moeworks_ops::elementwise::{cast, fill_normal};
use moeworks_ops::experts::{
    ExpertGrads, ExpertWeights, WeightGradInputs, experts_backward, experts_forward, experts_weight_grad,
};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::{Context, MachineOptions};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

/// The number of runs of each case, of which the best counts.
const TRIES: usize = 5;

fn main() {
    // `cargo test` runs benches with this argument, only to check that they start.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let ctx = Context::cpu_all_cores().on_machine(&MachineOptions::from_variables(|name| std::env::var_os(name)));
    println!("{} threads, {:?}", ctx.threads().count(), ctx.isa());
    let large = MoeConfig::plain(1024, 512, 32, 4);
    let comparison = MoeConfig::plain(256, 512, 8, 2);
    for dtype in [DType::F32, DType::BF16] {
        let dense = dense_rate(&ctx, dtype);
        println!("\n{dtype:?}: dense product 2048^3 {:.1} GFLOP/s", dense / 1e9);
        for (config, num_tokens) in [(&large, 1024), (&comparison, 4096)] {
            bench_layer(&ctx, config, num_tokens, dtype, dense);
        }
    }
    println!("\npeak memory {:.1} MB", ctx.pool().stats().peak_bytes as f64 / 1e6);
}

fn normal(ctx: &Context, shape: &[usize], stream: u64, dtype: DType) -> Tensor {
    let mut tensor = ctx.empty(shape, DType::F32);
    fill_normal(ctx, &Random::new(1, Purpose::Test, stream), 1.0, &mut tensor);
    cast(ctx, &tensor, dtype)
}

fn dense_rate(ctx: &Context, dtype: DType) -> f64 {
    let n = 2048;
    let (x, w) = (normal(ctx, &[n, n], 1, dtype), normal(ctx, &[n, n], 2, dtype));
    let seconds = best_seconds(TRIES, || drop(black_box(linear(ctx, &x, &w, DType::F32))));
    2.0 * (n * n * n) as f64 / seconds
}

fn bench_layer(ctx: &Context, config: &MoeConfig, num_tokens: usize, dtype: DType, dense: f64) {
    let MoeConfig { width, expert_width, num_experts, top_k, .. } = *config;
    println!("  T {num_tokens}, D {width}, F {expert_width}, E {num_experts}, K {top_k}");
    let layer = MoeLayer::new(config.clone()).expect("a valid configuration");
    let mut weights = MoeWeights::random(ctx, config, 1, 0.02);
    (weights.gate_up, weights.down) = (cast(ctx, &weights.gate_up, dtype), cast(ctx, &weights.down, dtype));
    let (x, dy) = (normal(ctx, &[num_tokens, width], 3, dtype), normal(ctx, &[num_tokens, width], 4, DType::F32));
    let mut grads = MoeWeights::zeros(ctx, config, DType::F32);
    let losses = LossGrad { balance: vec![1e-5; num_experts], z: 1e-3, ..LossGrad::default() };

    let whole = best_seconds(TRIES, || {
        let (_y, saved) = layer.forward(ctx, &weights, &x, &RouterInput::default());
        let (_dx, task) = layer.backward(ctx, &weights, &saved, &dy, &losses);
        task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
    });
    let flops = 18.0 * (num_tokens * top_k * width * expert_width) as f64;
    let rate = flops / whole;
    println!(
        "    whole layer {:9.3} ms  {:7.1} GFLOP/s  {:5.1}% of dense",
        whole * 1e3,
        rate / 1e9,
        100.0 * rate / dense
    );

    let line = |name: &str, seconds: f64| {
        println!("      {name:<20} {:9.3} ms  {:5.1}%", seconds * 1e3, 100.0 * seconds / whole);
    };
    line("router", best_seconds(TRIES, || drop(black_box(layer.route(ctx, &weights, &x, &RouterInput::default())))));
    let dlogits = normal(ctx, &[num_tokens, num_experts], 5, DType::F32);
    line(
        "router backward",
        best_seconds(TRIES, || drop(black_box(linear_backward_input(ctx, &dlogits, &weights.router, DType::F32)))),
    );
    let mut drouter = ctx.zeros(weights.router.shape(), DType::F32);
    line(
        "router weight grad",
        best_seconds(TRIES, || {
            linear_backward_weight(ctx, &dlogits, &x, DType::F32, Write::Replace, &mut drouter);
        }),
    );
    let routing = layer.route(ctx, &weights, &x, &RouterInput::default()).expect("finite logits");
    line("dispatch", best_seconds(TRIES, || drop(black_box(Dispatch::new(ctx, &routing, 0.0)))));
    let dispatch = Dispatch::new(ctx, &routing, 0.0);

    let rows = dispatch.rows();
    let experts = ExpertWeights { gate_up: &weights.gate_up, down: &weights.down, activation: config.activation };
    line("experts forward", best_seconds(TRIES, || drop(black_box(experts_forward(ctx, &x, experts, rows)))));
    let (_, saved) = experts_forward(ctx, &x, experts, rows);
    line(
        "experts backward",
        best_seconds(TRIES, || drop(black_box(experts_backward(ctx, &dy, experts, rows, &saved)))),
    );
    let backward = experts_backward(ctx, &dy, experts, rows, &saved);
    line(
        "experts weight grad",
        best_seconds(TRIES, || {
            let inputs = WeightGradInputs {
                x: &x,
                dy: &dy,
                saved: &saved,
                dh: &backward.dh,
                weighed: backward.weighed.as_ref(),
            };
            let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
            experts_weight_grad(ctx, inputs, config.activation, rows, Write::Replace, into);
        }),
    );
}
