//! RMS norm against its definition in f64.

use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{
    RmsNormInputs, rms_norm, rms_norm_backward, rms_norm_backward_onto, rms_norm_part, rms_norm_part_backward,
    row_products,
};
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, contexts, dot, doubles, finite_differences, normal_tensor, rounding, thread_counts};

const EPS: f32 = 1e-5;

fn reference(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let rows = x.chunks_exact(weight.len()).flat_map(|row| {
        let scale = 1.0 / (dot(row, row) / row.len() as f64 + f64::from(EPS)).sqrt();
        row.iter().zip(weight).map(move |(x, w)| x * scale * w).collect::<Vec<_>>()
    });
    rows.collect()
}

/// `dx` and `dweight` in f64.
fn reference_grads(dy: &[f64], x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let mut dweight = vec![0.0; width];
    let mut dx = Vec::new();
    for (dy, x) in dy.chunks_exact(width).zip(x.chunks_exact(width)) {
        let scale = 1.0 / (dot(x, x) / width as f64 + f64::from(EPS)).sqrt();
        let g: Vec<f64> = dy.iter().zip(weight).map(|(dy, w)| dy * w).collect();
        let mean = dot(&g, x) / width as f64;
        dx.extend(g.iter().zip(x).map(|(g, x)| scale * (g - x * scale * scale * mean)));
        dweight.iter_mut().zip(dy.iter().zip(x)).for_each(|(sum, (dy, x))| *sum += dy * x * scale);
    }
    (dx, dweight)
}

fn run(ctx: &Context, seed: u64, shape: &[usize], width: usize, dtype: DType) -> [Tensor; 7] {
    let x = normal_tensor(ctx, seed, shape, dtype);
    let weight = normal_tensor(ctx, seed + 1, &[width], DType::F32);
    let dy = normal_tensor(ctx, seed + 2, shape, DType::F32);
    let (y, inv_rms) = rms_norm(ctx, &x, &weight, EPS, dtype);
    let mut dweight = ctx.zeros(&[width], DType::F32);
    let dx = rms_norm_backward(ctx, &dy, &x, &weight, &inv_rms, Write::Add, &mut dweight);
    let base = normal_tensor(ctx, seed + 9, x.shape(), DType::F32);
    let mut again = ctx.zeros(&[width], DType::F32);
    let inputs = RmsNormInputs { x: &x, weight: &weight, inv_rms: &inv_rms };
    let onto = rms_norm_backward_onto(ctx, &dy, inputs, Some(&base), Write::Replace, &mut again);
    // A GPU may take a product and this sum as one.
    let sums: Vec<f64> = doubles(&dx).iter().zip(doubles(&base)).map(|(dx, base)| dx + base).collect();
    assert_close(&format!("on top of a base: {shape:?} by {width}"), &doubles(&onto), &sums, 1e-6);
    [x, weight, dy, y, inv_rms, dx, dweight]
}

fn check(name: &str, ctx: &Context, shape: &[usize], width: usize, dtype: DType) {
    let [x, weight, dy, y, inv_rms, dx, dweight] = run(ctx, 5, shape, width, dtype).map(|tensor| doubles(&tensor));
    let what = format!("{name}, {shape:?} by {width}, {dtype:?}");
    assert_close(&what, &y, &reference(&x, &weight), 2e-6 + rounding(dtype));
    let (expected_dx, expected_dweight) = reference_grads(&dy, &x, &weight);
    // The difference of two numbers, each rounded, of this size: a single small element has a large scale.
    let scale = inv_rms.iter().copied().fold(1.0, f64::max);
    assert_close(&what, &dx, &expected_dx, 5e-6 * scale);
    assert_close(&what, &dweight, &expected_dweight, 5e-6 * (x.len() as f64 / width as f64).sqrt().max(1.0));
}

#[test]
fn agrees_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            check(&name, &ctx, &[1, 1], 1, dtype);
            check(&name, &ctx, &[7, 65], 65, dtype);
            check(&name, &ctx, &[3, 4, 32], 32, dtype);
            check(&name, &ctx, &[300, 4 * 64], 64, dtype);
            check(&name, &ctx, &[3, 40_000], 40_000, dtype);
            check(&name, &ctx, &[0, 16], 16, dtype);
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let ctx = Context::cpu(1);
    let [x, weight, dy, _, _, dx, dweight] = run(&ctx, 3, &[4, 6], 6, DType::F32).map(|tensor| doubles(&tensor));
    assert_close("dx", &dx, &finite_differences(&x, |x| dot(&reference(x, &weight), &dy)), 1e-5);
    assert_close("dweight", &dweight, &finite_differences(&weight, |w| dot(&reference(&x, w), &dy)), 1e-5);
}

#[test]
fn the_gradient_of_the_weight_is_added_or_replaces() {
    let ctx = Context::cpu(2);
    let [x, weight, dy, _, inv_rms, _, once] = run(&ctx, 1, &[50, 8], 8, DType::F32);
    let mut dweight = once.copied(ctx.pool());
    _ = rms_norm_backward(&ctx, &dy, &x, &weight, &inv_rms, Write::Add, &mut dweight);
    let twice: Vec<f64> = doubles(&once).iter().map(|x| 2.0 * x).collect();
    assert_close("added", &doubles(&dweight), &twice, 1e-6);
    dweight.f32s_mut().fill(f32::NAN);
    _ = rms_norm_backward(&ctx, &dy, &x, &weight, &inv_rms, Write::Replace, &mut dweight);
    assert_eq!(dweight.bytes(), once.bytes());
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let results = thread_counts().map(|ctx| run(&ctx, 2, &[500, 256], 256, DType::F32));
    for other in &results[1..] {
        assert!(results[0].iter().zip(other).all(|(a, b)| a.bytes() == b.bytes()));
    }
}

#[test]
fn a_nan_spoils_its_row_alone() {
    for (name, ctx) in contexts() {
        let mut x = normal_tensor(&ctx, 1, &[3, 20], DType::F32);
        x.f32s_mut()[25] = f32::NAN;
        let (y, _) = rms_norm(&ctx, &x, &normal_tensor(&ctx, 2, &[20], DType::F32), EPS, DType::F32);
        for (i, y) in y.f32s().iter().enumerate() {
            assert_eq!(y.is_nan(), i / 20 == 1, "{name}: element {i}");
        }
    }
}

/// Columns `range` of `[rows, width]`.
fn columns(ctx: &Context, tensor: &Tensor, width: usize, range: std::ops::Range<usize>) -> Tensor {
    let values: Vec<f32> =
        tensor.to_f32_vec().chunks_exact(width).flat_map(|row| row[range.clone()].to_vec()).collect();
    Tensor::from_slice(ctx.pool(), &[values.len() / range.len(), range.len()], &values)
}

#[test]
fn parts_of_rows_that_know_each_others_sums_are_normed_as_the_whole() {
    for (name, ctx) in contexts() {
        let (rows, width) = (9, 53);
        let [x, weight, dy, y, inv_rms, dx, dweight] = run(&ctx, 4, &[rows, width], width, DType::F32);
        let part = |tensor: &Tensor, range| columns(&ctx, tensor, width, range);
        let sums = |of: &dyn Fn(std::ops::Range<usize>) -> Tensor| {
            let (a, b) = (of(0..20), of(20..width));
            let sums: Vec<f32> = a.f32s().iter().zip(b.f32s()).map(|(a, b)| a + b).collect();
            Tensor::from_slice(ctx.pool(), &[rows], &sums)
        };
        let squares =
            sums(&|range| row_products(&ctx, &part(&x, range.clone()), &part(&x, range.clone()), range.len(), None));
        let found: Vec<f64> =
            doubles(&squares).iter().map(|sum| 1.0 / (sum / width as f64 + f64::from(EPS)).sqrt()).collect();
        assert_close(&name, &doubles(&inv_rms), &found, 2e-6);
        let mut means = sums(&|range| {
            let (dy, x) = (part(&dy, range.clone()), part(&x, range.clone()));
            row_products(&ctx, &dy, &x, range.len(), Some(&part(&weight, range.clone())))
        });
        means.f32s_mut().iter_mut().for_each(|mean| *mean /= width as f32);
        for range in [0..20, 20..width] {
            let (x, weight, dy) = (part(&x, range.clone()), part(&weight, range.clone()), part(&dy, range.clone()));
            let weight = weight.reshaped(&[range.len()]);
            let expected = |tensor: &Tensor| doubles(&part(tensor, range.clone()));
            assert_close(&name, &doubles(&rms_norm_part(&ctx, &x, &weight, &inv_rms, DType::F32)), &expected(&y), 2e-6);
            let mut d_weight = ctx.zeros(&[range.len()], DType::F32);
            let inputs = RmsNormInputs { x: &x, weight: &weight, inv_rms: &inv_rms };
            let d_x = rms_norm_part_backward(&ctx, &dy, inputs, &means, Write::Add, &mut d_weight);
            assert_close(&name, &doubles(&d_x), &expected(&dx), 5e-6);
            assert_close(&name, &doubles(&d_weight), &expected(&dweight), 5e-6);
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    let ctx = Context::cpu(1);
    let x = ctx.zeros(&[2, 16], DType::F32);
    let (y, inv_rms) = rms_norm(&ctx, &x, &normal_tensor(&ctx, 2, &[16], DType::F32), EPS, DType::F32);
    assert!(y.f32s().iter().all(|&y| y == 0.0));
    assert!(inv_rms.f32s().iter().all(|&r| r.is_finite()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn agrees_with_the_definition_on_random_shapes(rows in 0..40_usize, width in 1..300_usize, is_bf16: bool) {
        check("random", &Context::cpu(2), &[rows, width], width, if is_bf16 { DType::BF16 } else { DType::F32 });
    }
}

/// 32 MiB and more are written past the caches.
#[test]
fn results_of_many_megabytes_have_the_bits_of_those_of_parts() {
    let (rows, width) = (8192, 1024);
    for (isa, dtype) in Isa::available().into_iter().flat_map(|isa| [DType::F32, DType::BF16].map(|dtype| (isa, dtype)))
    {
        let ctx = Context::cpu(2).with_isa(isa);
        let x = normal_tensor(&ctx, 1, &[rows, width], dtype);
        let (weight, dy) =
            (normal_tensor(&ctx, 2, &[width], DType::F32), normal_tensor(&ctx, 3, &[rows, width], dtype));
        let pass = |first: usize, count: usize| {
            let part = |tensor: &Tensor| {
                let values = &tensor.to_f32_vec()[first * width..][..count * width];
                cast(&ctx, &Tensor::from_slice(ctx.pool(), &[count, width], values), dtype)
            };
            let (x, dy) = (part(&x), part(&dy));
            let (y, inv_rms) = rms_norm(&ctx, &x, &weight, EPS, DType::F32);
            let mut dweight = ctx.zeros(&[width], DType::F32);
            let dx = rms_norm_backward(&ctx, &dy, &x, &weight, &inv_rms, Write::Replace, &mut dweight);
            [y, dx]
        };
        let (whole, parts) = (pass(0, rows), [0, rows / 2].map(|first| pass(first, rows / 2)));
        for (index, whole) in whole.iter().enumerate() {
            let joined = [parts[0][index].bytes(), parts[1][index].bytes()].concat();
            assert!(whole.bytes() == joined, "{isa:?}, {dtype:?}, {index}");
        }
    }
}
