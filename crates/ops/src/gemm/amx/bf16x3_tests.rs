//! Products of f32 in tiles must be as exact as those in f32.

use moeworks_tensor::{DType, Tensor};

use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use crate::test_data::{numbers, tensor};
use crate::{Context, Isa};

/// Rows, columns and depth of a product, large enough for tiles.
type Sizes = (usize, usize, usize);

/// Returns a context with tiles and one without, if the machine has tiles.
fn contexts() -> Option<[Context; 2]> {
    let are_there = Isa::available().contains(&Isa::AmxF32);
    if !are_there {
        eprintln!("SKIPPED: products of f32 in tiles: this processor has none");
    }
    are_there.then(|| [Isa::AmxF32, Isa::Avx512].map(|isa| Context::cpu(2).with_isa(isa)))
}

/// Computes the product of `a [rows, depth]` and `b [columns, depth]` in each of the three forms.
fn products(ctx: &Context, a: &[f32], b: &[f32], (rows, columns, depth): Sizes) -> [Vec<f32>; 3] {
    let turned = |x: &[f32], rows: usize| {
        tensor(
            ctx,
            &[depth, rows],
            &(0..depth * rows).map(|i| x[i % rows * depth + i / rows]).collect::<Vec<_>>(),
            DType::F32,
        )
    };
    let [a_rows, b_rows] = [(a, rows), (b, columns)].map(|(x, rows)| tensor(ctx, &[rows, depth], x, DType::F32));
    let [a_turned, b_turned] = [turned(a, rows), turned(b, columns)];
    let mut of_weights = ctx.zeros(&[rows, columns], DType::F32);
    linear_backward_weight(ctx, &a_turned, &b_turned, DType::F32, Write::Replace, &mut of_weights);
    let [nt, nn] =
        [linear(ctx, &a_rows, &b_rows, DType::F32), linear_backward_input(ctx, &a_rows, &b_turned, DType::F32)];
    [nt, nn, of_weights].map(|y: Tensor| y.to_f32_vec())
}

/// Computes the product in f64.
fn exact(a: &[f32], b: &[f32], depth: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    a.chunks_exact(depth).flat_map(|a| b.chunks_exact(depth).map(move |b| dot(a, b))).collect()
}

/// Generates numbers of many magnitudes.
fn spread(len: usize, seed: u64) -> Vec<f32> {
    numbers(len, seed).into_iter().zip(numbers(len, seed + 100)).map(|(x, e)| x * (8.0 * e).exp2()).collect()
}

#[test]
fn sums_in_tiles_are_as_exact_as_in_f32() {
    let Some(contexts) = contexts() else { return };
    // Panels of one, two and three vectors; rows of one block and of two; a depth of part of a block, of several, and
    // in several parts.
    let sizes = [(96, 96, 112), (97, 208, 130), (160, 113, 500), (300, 97, 1_100), (530, 600, 170)];
    for (rows, columns, depth) in sizes {
        let (a, b) = (spread(rows * depth, 1), spread(columns * depth, 2));
        let exact = exact(&a, &b, depth);
        let error =
            |y: &[f32]| y.iter().zip(&exact).map(|(&y, exact)| (f64::from(y) - exact).powi(2)).sum::<f64>().sqrt();
        let [in_tiles, in_f32] = contexts.each_ref().map(|ctx| products(ctx, &a, &b, (rows, columns, depth)));
        for (form, (in_tiles, in_f32)) in in_tiles.iter().zip(&in_f32).enumerate() {
            let (ours, theirs) = (error(in_tiles), error(in_f32));
            assert!(in_tiles != in_f32, "form {form} of {rows}, {columns}, {depth} was not taken in tiles");
            assert!(ours <= 1.5 * theirs, "form {form} of {rows}, {columns}, {depth}: {ours:e}, in f32 {theirs:e}");
        }
    }
}

#[test]
fn a_sum_that_is_not_finite_changes_no_bit_of_another() {
    let Some([ctx, _]) = contexts() else { return };
    let (rows, columns, depth) = (130, 150, 200);
    let (a, b) = (numbers(rows * depth, 1), numbers(columns * depth, 2));
    let usual = products(&ctx, &a, &b, (rows, columns, depth));
    // The last number is finite as f32, but not when rounded to bf16.
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let (mut a, mut b) = (a.clone(), b.clone());
        (a[7 * depth + 199], b[140 * depth + 3]) = (special, special);
        for (form, (y, usual)) in products(&ctx, &a, &b, (rows, columns, depth)).iter().zip(&usual).enumerate() {
            for (at, (y, usual)) in y.iter().zip(usual).enumerate() {
                let (row, column) = (at / columns, at % columns);
                if row != 7 && column != 140 {
                    assert_eq!(
                        y.to_bits(),
                        usual.to_bits(),
                        "row {row}, column {column} of form {form} with {special}"
                    );
                    continue;
                }
                let dot =
                    |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
                let exact = dot(&a[row * depth..][..depth], &b[column * depth..][..depth]) as f32;
                let is_right = match special.is_nan() || exact.is_infinite() || exact.is_nan() {
                    true => y.to_bits() == exact.to_bits() || y.is_nan() && exact.is_nan(),
                    false => (y / exact - 1.0).abs() < 1e-5,
                };
                assert!(is_right, "row {row}, column {column} of form {form} with {special}: {y}, exactly {exact}");
            }
        }
    }
}

#[test]
fn tiny_numbers_are_rounded_to_bf16() {
    let Some([ctx, _]) = contexts() else { return };
    let sizes @ (rows, columns, depth) = (96, 96, 128);
    for exponent in [-90, -100, -103, -112, -120] {
        let (scale, back) = (2_f32.powi(exponent), 2_f32.powi(60));
        // Positive numbers, so that sums are as large as their terms together.
        let positive =
            |len, seed, scale: f32| numbers(len, seed).iter().map(|x| (1.0 + x.abs()) * scale).collect::<Vec<_>>();
        let (a, b) = (positive(rows * depth, 1, scale), positive(columns * depth, 2, back));
        let most = if exponent > -102 { 1e-6 } else { 2_f64.powi(-9) };
        for y in products(&ctx, &a, &b, sizes) {
            for (y, exact) in y.into_iter().zip(exact(&a, &b, depth)) {
                assert!((f64::from(y) / exact - 1.0).abs() <= most, "2^{exponent}: {y}, exactly {exact}");
            }
        }
    }
}
