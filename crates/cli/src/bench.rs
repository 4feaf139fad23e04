//! `moeworks bench`: the peak rates of this machine, and the share of them that kernels, the MoE layer and a training
//! step reach.

mod comm;
mod decode;
mod machine_file;
mod overlap;
mod pipeline;
mod rebalance;

use std::io::{BufRead as _, stdin};

use moeworks_bench::routing_schemes::RoutingShape;
use moeworks_bench::{CaseResult, MoeRequests, kernels, layers, machine, training};
use moeworks_ops::Context;
use moeworks_ops::peak::{self, Peaks};
use moeworks_tensor::DType;
use moeworks_train::config::{Precision, RunConfig};
use serde_json::{Value, json};

use crate::args::{BenchArgs, BenchKind, CasesArgs, DecodeArgs, MoeArgs};
use crate::environment;
use crate::estimate::BYTE_VOCABULARY;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::model::context;
use crate::progress::bytes;
use crate::tables;

pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    match &args.kind {
        BenchKind::Kernels(args) => time_kernels(args),
        BenchKind::Layers(args) => cases("layers", args, |output, ctx, peaks, filter| {
            output.header(ctx, peaks);
            Ok(layers::measure(ctx, peaks, filter, |result| output.case(result))?)
        }),
        BenchKind::Routing(args) => cases("routing", args, |output, ctx, _, filter| output.routing(ctx, filter)),
        BenchKind::Decode(args) => decode(args),
        BenchKind::Overlap(args) => overlap::run(args),
        BenchKind::Comm(args) => comm::run(args),
        BenchKind::Pipeline(args) => pipeline::run(args),
        BenchKind::Rebalance(args) => rebalance::run(args),
        BenchKind::Machine(args) => machine_file::run(args),
        BenchKind::Moe(args) => answer_moe_requests(args),
    }
}

/// Runs `measure` on the cases of a kind that pass its filter, and prints the results.
fn cases(
    kind: &str,
    args: &CasesArgs,
    measure: impl FnOnce(&mut Output, &Context, &Peaks, &str) -> Result<(), Failure>,
) -> Result<ExitCode, Failure> {
    let (ctx, filter) = (context(&args.machine)?, args.filter());
    let peaks = peak::measure(&ctx);
    let mut output = Output { is_json: args.json, cases: Vec::new() };
    measure(&mut output, &ctx, &peaks, &filter)?;
    output.finish(&ctx, &peaks, format!("{kind} {filter}").trim())?;
    Ok(ExitCode::SUCCESS)
}

fn time_kernels(args: &CasesArgs) -> Result<ExitCode, Failure> {
    cases("", args, |output, ctx, peaks, filter| {
        output.header(ctx, peaks);
        for dtype in [DType::F32, DType::BF16] {
            kernels::time_kernels(ctx, peaks, dtype, filter, |result| output.case(result));
            layers::measure_backward(ctx, peaks, dtype, filter)?.iter().for_each(|result| output.case(result));
        }
        // Without hardware support, fp8 is computed as bf16 and need not be timed.
        let fp8 = peaks.fp8_flops.map(|_| Precision::Fp8);
        for precision in [Precision::F32, Precision::Bf16].into_iter().chain(fp8) {
            output.training(args, precision)?;
        }
        Ok(())
    })
}

fn decode(args: &DecodeArgs) -> Result<ExitCode, Failure> {
    let ctx = context(&args.machine)?;
    if let (true, Some(model)) = (args.endless, &args.model) {
        return decode::endless(&ctx, model);
    }
    let peaks = peak::measure(&ctx);
    let mut output = Output { is_json: args.json, cases: Vec::new() };
    decode::run(&mut output, &ctx, &peaks, args)?;
    output.finish(&ctx, &peaks, "decode")?;
    Ok(ExitCode::SUCCESS)
}

/// Answers every line of standard input.
fn answer_moe_requests(args: &MoeArgs) -> Result<ExitCode, Failure> {
    let ctx = context(&args.machine)?;
    let mut requests = MoeRequests::default();
    for line in stdin().lock().lines() {
        let line = line.map_err(|error| Failure::input(format!("standard input: {error}")))?;
        println!("{}", requests.answer(&ctx, &line)?);
        // The other program waits for the answer, so it must not stay in the buffer.
        crate::output::flush();
    }
    Ok(ExitCode::SUCCESS)
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// The output of measurements: printed as they are made, or collected for one JSON value.
struct Output {
    is_json: bool,
    cases: Vec<Value>,
}

impl Output {
    fn header(&self, ctx: &Context, peaks: &Peaks) {
        if self.is_json {
            return;
        }
        println!("{}", machine::describe(ctx));
        println!("peaks measured now, of products on registers and of memory:");
        println!("  f32          {:9.1} GFLOP/s", peaks.f32_flops / 1e9);
        if let Some(flops) = peaks.f32_in_tiles_flops {
            println!("  f32 in tiles {:9.1} GFLOP/s, of six products of bf16 each", flops / 1e9);
        }
        if let Some(flops) = peaks.bf16_flops {
            println!("  bf16         {:9.1} GFLOP/s", flops / 1e9);
        }
        if let Some(flops) = peaks.fp8_flops {
            println!("  fp8          {:9.1} GFLOP/s", flops / 1e9);
        }
        println!("  reading      {:9.1} GB/s", peaks.read_bytes_per_s / 1e9);
        if let Some(rate) = peaks.copy_bytes_per_s {
            println!("  copying      {:9.1} GB/s, read and written", rate / 1e9);
        }
        if let Some(flops) = machine::dense_rate(ctx) {
            println!("  bf16 product of 8192 x 8192 matrices {:9.1} GFLOP/s", flops / 1e9);
        }
        println!();
        println!(
            "share: of the limit by the peak or by memory, whichever is lower; with data in caches it can exceed 100%"
        );
        println!("  {:66} {:>10} {:>9} {:>8} {:>7}", "case", "ms", "GFLOP/s", "GB/s", "share");
    }

    fn case(&mut self, result: &CaseResult) {
        let (seconds, share, limit) = (result.seconds, result.share_of_limit(), result.limit.name());
        let (flops, bytes) = (result.flops_per_s(), result.bytes_per_s());
        self.cases.push(json!({
            "name": result.name, "seconds": seconds, "flops_per_s": flops, "bytes_per_s": bytes,
            "limit": limit, "share_of_limit": share, "plan": result.plan.map(|plan| plan.to_string()),
        }));
        if !self.is_json {
            let rates = format!("{:9.1} {:8.1}", flops / 1e9, bytes / 1e9);
            let plan = result.plan.map_or_else(String::new, |plan| format!(", {plan}"));
            println!("  {:66} {:10.3} {rates} {:>7} of {limit}{plan}", result.name, seconds * 1e3, percent(share));
        }
    }

    /// Times training steps of the comparison model: 4 layers, D 256, 8 experts of width 512, K 2, byte vocabulary, S
    /// 256, batch 16.
    fn training(&mut self, args: &CasesArgs, precision: Precision) -> Result<(), Failure> {
        let name = format!("training steps of the comparison model, {precision:?}");
        if !name.contains(&args.filter()) {
            return Ok(());
        }
        let mut config = RunConfig::default();
        config.model.vocab_size = BYTE_VOCABULARY;
        config.train.threads = args.machine.threads;
        config.train.device = args.machine.device;
        config.train.precision = precision;
        let speed = training::tokens_per_second(&config, &environment::machine())?;
        self.cases.push(
            json!({ "name": name, "tokens_per_s": speed.tokens_per_s, "limit": "peak", "share_of_limit": speed.mfu }),
        );
        if !self.is_json {
            let share = percent(speed.mfu);
            println!("  {name:66} {:10.0} tokens/s          {share:>7} of peak", speed.tokens_per_s);
        }
        Ok(())
    }

    /// Times the routing of every scheme whose name contains `schemes`, and compares it with the layer's forward
    /// pass.
    fn routing(&mut self, ctx: &Context, schemes: &str) -> Result<(), Failure> {
        let shape = RoutingShape { num_tokens: 4096, width: 1024, expert_width: 2048, num_experts: 64, top_k: 2 };
        let mut rows = Vec::new();
        for dtype in [DType::F32, DType::BF16] {
            shape.measure(ctx, dtype, schemes, |cost, share| {
                self.cases.push(json!({
                    "name": cost.name, "dtype": format!("{dtype:?}"), "seconds": cost.seconds,
                    "layer_seconds": cost.layer_seconds, "share": share, "experts_per_token": cost.experts_per_token,
                }));
                rows.push(vec![
                    format!("{}, {dtype:?}", cost.name),
                    format!("{:.2}", cost.seconds * 1e3),
                    format!("{:.1}", cost.layer_seconds * 1e3),
                    format!("{:.2}%", 100.0 * share),
                    format!("{:.2}", cost.experts_per_token),
                ]);
            })?;
        }
        if !self.is_json {
            println!("{}, {shape:?}", machine::describe(ctx));
            tables::print(&["routing", "ms", "layer's forward, ms", "share", "experts a token"], &rows);
        }
        Ok(())
    }

    /// Prints the summary. Returns an error if no case passed the filter.
    fn finish(self, ctx: &Context, peaks: &Peaks, filter: &str) -> Result<(), Failure> {
        if self.cases.is_empty() {
            let kinds = "kernels, layers, routing, decode, overlap, comm, machine, moe";
            return Err(Failure::input(format!(
                "bench {filter:?}: no name of a case contains this; the kinds are {kinds} (`moeworks bench --help`)"
            )));
        }
        let stats = ctx.pool().stats();
        if !self.is_json {
            println!("\npeak memory of the cases {}", bytes(stats.peak_bytes as u64));
            return Ok(());
        }
        let value = json!({
            "machine": machine::name(ctx),
            "threads": ctx.threads().count(),
            "kernels": format!("{:?}", ctx.isa()),
            "device": ctx.describe(),
            "f32_flops_per_s": peaks.f32_flops,
            "f32_in_tiles_flops_per_s": peaks.f32_in_tiles_flops,
            "bf16_flops_per_s": peaks.bf16_flops,
            "fp8_flops_per_s": peaks.fp8_flops,
            "read_bytes_per_s": peaks.read_bytes_per_s,
            "copy_bytes_per_s": peaks.copy_bytes_per_s,
            "dense_bf16_flops_per_s": machine::dense_rate(ctx),
            "peak_bytes": stats.peak_bytes,
            "cases": self.cases,
        });
        println!("{value:#}");
        Ok(())
    }
}
