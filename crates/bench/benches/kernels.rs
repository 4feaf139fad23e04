//! Times operations against the measured limits of this machine: `cargo bench -p moeworks-bench --bench kernels`.
//! With `-- TEXT` only the cases whose name contains the text.

use moeworks_bench::kernels::time_kernels;
use moeworks_ops::{Context, Isa, MachineOptions, peak};
use moeworks_tensor::DType;

fn main() {
    // `cargo test` runs benches with this argument, only to check that they start.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let ctx = Context::cpu_all_cores().on_machine(&MachineOptions::from_variables(|name| std::env::var_os(name)));
    table(&ctx, &[DType::F32, DType::BF16], &filter);
    if Isa::best() != ctx.isa() {
        println!("\nand with the instruction set that was found slower:");
        table(&ctx.with_isa(Isa::best()), &[DType::BF16], &filter);
    }
}

fn table(ctx: &Context, dtypes: &[DType], filter: &str) {
    let peaks = peak::measure(ctx);
    println!("{} threads, {:?}", ctx.threads().count(), ctx.isa());
    println!("peak f32       {:8.1} GFLOP/s", peaks.f32_flops / 1e9);
    if let Some(bf16_flops) = peaks.bf16_flops {
        println!("peak bf16 dot  {:8.1} GFLOP/s", bf16_flops / 1e9);
    }
    println!("memory read    {:8.1} GB/s", peaks.read_bytes_per_s / 1e9);
    for &dtype in dtypes {
        time_kernels(ctx, &peaks, dtype, filter, |result| {
            println!(
                "{:66} {:9.3} ms {:8.1} GFLOP/s {:7.1} GB/s {:5.1}% of {}",
                result.name,
                result.seconds * 1e3,
                result.flops_per_s() / 1e9,
                result.bytes_per_s() / 1e9,
                100.0 * result.share_of_limit(),
                result.limit.name(),
            );
        });
    }
    println!("peak memory    {:8.1} MB", ctx.pool().stats().peak_bytes as f64 / 1e6);
}
