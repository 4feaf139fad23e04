//! Inputs and comparisons for the tests of products.

use moeworks_tensor::{DType, Tensor, bf16, f16};

use crate::Context;
use moeworks_gpu::Gpu;

/// Returns contexts of every instruction set with one, two and three threads, and of every GPU or its emulation.
pub(crate) fn contexts() -> impl Iterator<Item = Context> {
    let threads = [Context::cpu(1), Context::cpu(2), Context::cpu(3)];
    crate::Isa::available().into_iter().flat_map(move |isa| threads.clone().map(|ctx| ctx.with_isa(isa))).chain(gpus())
}

/// Returns a context of every instruction set, and of every GPU or its emulation.
pub(crate) fn kinds() -> impl Iterator<Item = Context> {
    crate::Isa::available().into_iter().map(|isa| Context::cpu(2).with_isa(isa)).chain(gpus())
}

/// Returns a context of every GPU or its emulation.
pub(crate) fn gpus() -> impl Iterator<Item = Context> {
    Gpu::for_tests().into_iter().map(|(_, gpu)| Context::cpu(2).with_gpu(gpu))
}

/// Returns the kind of a context. Contexts of one kind must give the same bits.
pub(crate) fn kind(ctx: &Context) -> (crate::Isa, Option<String>) {
    (ctx.isa(), ctx.gpu().map(|gpu| gpu.name().to_string()))
}

/// Returns reproducible numbers in -1..1 without a pattern that sums could hide.
pub(crate) fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Returns the values as a tensor of a type.
pub(crate) fn tensor(ctx: &Context, shape: &[usize], values: &[f32], dtype: DType) -> Tensor {
    match dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            Tensor::from_slice(ctx.pool(), shape, &values)
        }
        DType::F16 => {
            let values: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
            Tensor::from_slice(ctx.pool(), shape, &values)
        }
        _ => Tensor::from_slice(ctx.pool(), shape, values),
    }
}

/// Returns the value that a product in `compute` takes for `x`.
pub(crate) fn rounded(x: f32, compute: DType) -> f64 {
    f64::from(if compute == DType::BF16 { bf16::from_f32(x).to_f32() } else { x })
}

/// Returns whether `y`, stored as `out`, is close to the exact sum of `depth` terms whose magnitudes add up to
/// `size`.
pub(crate) fn is_close(y: f32, exact: f64, size: f64, depth: usize, out: DType) -> bool {
    if exact.is_nan() || exact.is_infinite() {
        return if exact.is_nan() { y.is_nan() } else { f64::from(y) == exact };
    }
    let sum_error = (depth as f64).sqrt().max(1.0) * size * f64::from(f32::EPSILON);
    let store_error = if out == DType::BF16 { exact.abs() / 256.0 } else { 0.0 };
    (f64::from(y) - exact).abs() <= sum_error + store_error
}
