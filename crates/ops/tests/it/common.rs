//! Inputs and comparisons shared by the tests.

use moeworks_gpu::Gpu;
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

/// A context for each instruction set of the machine, for one, two and three threads, and for each GPU or its
/// emulation.
pub(crate) fn contexts() -> Vec<(String, Context)> {
    let isas = Isa::available().into_iter().map(|isa| (format!("{isa:?}"), Context::cpu(2).with_isa(isa)));
    let threads = [1, 3].map(|threads| (format!("{threads} threads"), Context::cpu(threads)));
    isas.chain(threads).chain(gpu_contexts()).collect()
}

/// A context for each GPU or its emulation.
pub(crate) fn gpu_contexts() -> impl Iterator<Item = (String, Context)> {
    Gpu::for_tests().into_iter().map(|(name, gpu)| (name.to_string(), Context::cpu(2).with_gpu(gpu)))
}

/// Contexts that differ in the number of threads alone: results must be the same bits.
pub(crate) fn thread_counts() -> [Context; 3] {
    [1, 2, 3].map(Context::cpu)
}

/// Standard normal numbers of `seed`.
pub(crate) fn normals(seed: u64, len: usize) -> Vec<f32> {
    let random = Random::new(seed, Purpose::Test, 0);
    (0..len as u64).map(|i| random.normal(i)).collect()
}

/// Whole numbers below `bound`.
pub(crate) fn below(seed: u64, len: usize, bound: u32) -> Vec<u32> {
    let random = Random::new(seed, Purpose::Test, 1);
    (0..len as u64).map(|i| random.below(i, bound.into()) as u32).collect()
}

/// A tensor of `values`, rounded if `dtype` is bf16.
pub(crate) fn tensor(ctx: &Context, shape: &[usize], values: &[f32], dtype: DType) -> Tensor {
    let tensor = Tensor::from_slice(ctx.pool(), shape, values);
    moeworks_ops::elementwise::cast(ctx, &tensor, dtype)
}

/// A tensor of standard normal numbers.
pub(crate) fn normal_tensor(ctx: &Context, seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    tensor(ctx, shape, &normals(seed, shape.iter().product()), dtype)
}

/// The elements as f64.
pub(crate) fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor.to_f32_vec().into_iter().map(f64::from).collect()
}

/// Holds `actual` to within `tolerance` of `expected`, relative to the larger of 1 and the expected size.
#[track_caller]
pub(crate) fn assert_close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_within(what, actual, expected, tolerance, &vec![0.0; expected.len()]);
}

/// [`assert_close`] with a further absolute tolerance for each element.
#[track_caller]
pub(crate) fn assert_within(what: &str, actual: &[f64], expected: &[f64], tolerance: f64, further: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of elements");
    for (i, ((&a, &e), further)) in actual.iter().zip(expected).zip(further).enumerate() {
        let bound = tolerance * e.abs().max(1.0) + further;
        let is_close = if e.is_finite() { (a - e).abs() <= bound } else { a.to_bits() == e.to_bits() };
        assert!(is_close, "{what}: element {i} is {a}, should be {e}");
    }
}

/// The rounding that a result of this type may carry, relative.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        _ => 0.0,
    }
}

/// Central differences of `f` at `x` in each of its elements.
pub(crate) fn finite_differences(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let original = x[i];
            x[i] = original + step;
            let above = f(&x);
            x[i] = original - step;
            let below = f(&x);
            x[i] = original;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// The sum of products, to turn a vector result into a number with known gradient.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
