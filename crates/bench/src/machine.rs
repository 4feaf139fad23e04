//! The name of the machine that was measured.

use moeworks_ops::linear::linear;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::timing::best_seconds_of_many;

/// Returns the name of the GPU or of the CPU, with family and model, because virtual machines often hide the rest.
#[must_use]
pub fn name(ctx: &Context) -> String {
    if let Some(gpu) = ctx.gpu() {
        return gpu.name().to_owned();
    }
    // Only Linux has this file; elsewhere the architecture is used.
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    match (field("model name"), field("cpu family"), field("model")) {
        (Some(name), Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        (Some(name), ..) => name.to_owned(),
        // Arm processors report only numbers, which `lscpu` translates with a table of names.
        _ => match (field("CPU implementer"), field("CPU part")) {
            (Some(implementer), Some(part)) => {
                format!("{} (implementer {implementer}, part {part})", std::env::consts::ARCH)
            }
            _ => std::env::consts::ARCH.to_owned(),
        },
    }
}

/// Returns the machine's name and the threads and instruction set, or GPU, that compute.
#[must_use]
pub fn describe(ctx: &Context) -> String {
    if ctx.gpu().is_some() { name(ctx) } else { format!("{}, {}", name(ctx), ctx.describe()) }
}

/// Measures the operations per second of a large bf16 GEMM of random numbers on a GPU.
#[must_use]
pub fn dense_rate(ctx: &Context) -> Option<f64> {
    const SIZE: usize = 8192;
    ctx.gpu()?.memory_bytes()?;
    let [x, w] = [0, 1].map(|stream| {
        let mut normal: Tensor = ctx.empty(&[SIZE, SIZE], DType::F32);
        elementwise::fill_normal(ctx, &Random::new(0, Purpose::Test, stream), 1.0, &mut normal);
        elementwise::cast(ctx, &normal, DType::BF16)
    });
    let seconds = best_seconds_of_many(ctx, || drop(linear(ctx, &x, &w, DType::BF16)));
    Some(2.0 * (SIZE as f64).powi(3) / seconds)
}
