//! Weights in f16: every operation that reads them gives the same results as for the same numbers in f32.

use std::sync::Arc;

use moeworks_tensor::{Bytes, DType, Device, Tensor, f16};
use proptest::prelude::*;

use crate::experts::{ExpertRows, ExpertWeights, experts_forward};
use crate::linear::{linear, linear_backward_input};
use crate::test_data::{contexts, is_close, kinds, numbers, tensor};
use crate::{Activation, Context, elementwise, embedding, quantized};

/// Returns every f16.
fn all() -> Vec<f16> {
    (0..=u16::MAX).map(f16::from_bits).collect()
}

/// Returns f16 numbers of many magnitudes, among them zeros, subnormals and large ones.
fn halves(len: usize, seed: u64) -> Vec<f16> {
    let exponents = numbers(len, seed + 100);
    let number = |(x, exponent): (f32, f32)| f16::from_f32(x * (20.0 * exponent - 8.0).exp2());
    numbers(len, seed).into_iter().zip(exponents).map(number).collect()
}

/// Returns the values in memory that begins `offset` bytes after a multiple of 64.
fn mapped_at(offset: usize, shape: &[usize], values: &[f16]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut memory = vec![0; bytes.len() + 128];
    let start = (64 - memory.as_ptr().addr() % 64) % 64 + offset;
    memory[start..start + bytes.len()].copy_from_slice(&bytes);
    let owner: Bytes = Arc::new(memory);
    Tensor::from_foreign(owner, start..start + bytes.len(), shape, DType::F16).expect("even addresses")
}

fn as_f32(ctx: &Context, halves: &Tensor) -> Tensor {
    Tensor::from_slice(ctx.pool(), halves.shape(), &halves.to_f32_vec())
}

fn assert_same_bits(what: &str, y: &Tensor, expected: &Tensor) {
    for (i, (y, expected)) in y.to_f32_vec().iter().zip(expected.to_f32_vec()).enumerate() {
        let is_same = y.to_bits() == expected.to_bits() || (y.is_nan() && expected.is_nan());
        assert!(is_same, "{what}: element {i} is {y}, not {expected}");
    }
}

#[test]
fn every_f16_becomes_the_f32_that_it_is() {
    let all = all();
    for ctx in kinds() {
        // Alone in its row, each number is multiplied by 1 in a vector, or in a panel that many rows of activations
        // share.
        let stored = Tensor::from_slice(ctx.pool(), &[all.len(), 1], &all);
        let expected = as_f32(&ctx, &stored);
        assert_same_bits("cast", &elementwise::cast(&ctx, &stored, DType::F32), &expected);
        for rows in [1, 40] {
            let ones = tensor(&ctx, &[rows, 1], &vec![1.0; rows], DType::F32);
            let y = linear(&ctx, &ones, &stored, DType::F32);
            for row in y.f32s().chunks(all.len()) {
                let row = Tensor::from_slice(ctx.pool(), &[all.len()], row);
                // A sum begins with +0, to which -0 adds nothing.
                assert_same_bits(
                    "product",
                    &elementwise::cast(&ctx, &row, DType::F32),
                    &positive_zeros(&ctx, &expected),
                );
            }
        }
        let back = elementwise::cast(&ctx, &expected, DType::F16);
        let is_same = |(a, b): (&f16, &f16)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(back.slice::<f16>().iter().zip(&all).all(is_same), "and back");
    }
}

fn positive_zeros(ctx: &Context, x: &Tensor) -> Tensor {
    let values: Vec<f32> = x.f32s().iter().map(|x| x + 0.0).collect();
    Tensor::from_slice(ctx.pool(), x.shape(), &values)
}

/// Compares both products of `rows` rows, with weights in f16 anywhere in memory, with f64 and with the bits of f32
/// weights.
fn check(rows: usize, depth: usize, columns: usize) {
    let (x, w) = (numbers(rows * depth, 1), halves(columns * depth, 2));
    let exact = |r: usize, weight: &dyn Fn(usize) -> f16| {
        let terms = (0..depth).map(|k| f64::from(x[r * depth + k]) * weight(k).to_f64());
        terms.fold((0.0, 0.0), |(sum, size), x: f64| (sum + x, size + x.abs()))
    };
    for (ctx, offset) in contexts().zip([0, 2, 6, 62].into_iter().cycle()) {
        let xs = tensor(&ctx, &[rows, depth], &x, DType::F32);
        let (ws, across) = (mapped_at(offset, &[columns, depth], &w), mapped_at(offset, &[depth, columns], &w));
        let y = linear(&ctx, &xs, &ws, DType::F32);
        let dx = linear_backward_input(&ctx, &xs, &across, DType::F32);
        for (i, (&y, &dx)) in y.f32s().iter().zip(dx.f32s()).enumerate() {
            let (r, c) = (i / columns, i % columns);
            let (sum, size) = exact(r, &|k| w[c * depth + k]);
            assert!(is_close(y, sum, size, depth, DType::F32), "A B^T {rows} {depth} {columns}: {y}, not {sum}");
            let (sum, size) = exact(r, &|k| w[k * columns + c]);
            assert!(is_close(dx, sum, size, depth, DType::F32), "A B {rows} {depth} {columns}: {dx}, not {sum}");
        }
        if ctx.device() == Device::Cpu {
            assert_same_bits("A B^T", &y, &linear(&ctx, &xs, &as_f32(&ctx, &ws), DType::F32));
            assert_same_bits("A B", &dx, &linear_backward_input(&ctx, &xs, &as_f32(&ctx, &across), DType::F32));
        }
    }
}

#[test]
fn products_have_the_bits_of_those_with_f32() {
    for rows in [1, 2, 4, 5, 8, 16, 17, 33, 70] {
        check(rows, 67, 101);
    }
    for (depth, columns) in [(1, 1), (31, 48), (32, 49), (64, 97), (1, 300), (300, 1), (8, 16)] {
        for rows in [1, 7, 40] {
            check(rows, depth, columns);
        }
    }
    check(300, 64, 50);
    check(1, 1_500, 9);
}

#[test]
fn nan_and_infinity_reach_the_sums_they_belong_to() {
    let (rows, depth, columns) = (19, 45, 60);
    let mut w = halves(columns * depth, 2);
    (w[7 * depth + 44], w[59 * depth]) = (f16::NEG_INFINITY, f16::NAN);
    for ctx in kinds() {
        let x = tensor(&ctx, &[rows, depth], &numbers(rows * depth, 1), DType::F32);
        let y = linear(&ctx, &x, &mapped_at(2, &[columns, depth], &w), DType::F32);
        for (i, y) in y.f32s().iter().enumerate() {
            let (is_nan, is_infinite) = (i % columns == 59, i % columns == 7);
            assert_eq!((y.is_nan(), y.is_infinite()), (is_nan, is_infinite), "element {i}");
        }
    }
}

#[test]
fn rows_of_a_table_blocks_and_sums_of_squares_are_those_of_f32() {
    for ctx in kinds() {
        let table = mapped_at(2, &[11, 64], &halves(11 * 64, 3));
        let wide = as_f32(&ctx, &table);
        for out in [DType::F32, DType::BF16] {
            let rows = |table| embedding::embedding(&ctx, &[3, 10, 0, 3], table, out);
            assert_same_bits("rows", &rows(&table), &rows(&wide));
        }
        let blocks = |x| quantized::quantize(&ctx, x, DType::Q8);
        assert_eq!(blocks(&table).bytes(), blocks(&wide).bytes());
        let [a, b] = [&table, &wide].map(|x| elementwise::sum_of_squares(&ctx, x));
        assert!((a - b).abs() <= 1e-12 * b, "{a} and {b}");
    }
}

#[test]
fn experts_have_the_bits_of_those_in_f32() {
    let (t, d, f, e) = (6, 33, 21, 3);
    let rows =
        ExpertRows::new(&[0, 2, 2, 6], &[0, 4, 1, 2, 3, 5], &[0.5, 0.25, 1.0, 2.0, 0.75, 0.1], &[0, 2, 3, 4, 1, 5], 1);
    for ctx in kinds().filter(|ctx| ctx.device() == Device::Cpu) {
        let x = tensor(&ctx, &[t, d], &numbers(t * d, 3), DType::F32);
        let run = |gate_up: &Tensor, down: &Tensor| {
            experts_forward(&ctx, &x, ExpertWeights { gate_up, down, activation: Activation::SwiGlu }, rows).0
        };
        let gate_up = mapped_at(6, &[e, 2 * f, d], &halves(e * 2 * f * d, 1));
        let down = mapped_at(2, &[e, d, f], &halves(e * d * f, 2));
        let expected = run(&as_f32(&ctx, &gate_up), &as_f32(&ctx, &down));
        assert_same_bits("experts", &run(&gate_up, &down), &expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sizes_have_the_bits_of_those_with_f32(rows in 1_usize..60, depth in 1_usize..150, columns in 1_usize..150) {
        check(rows, depth, columns);
    }
}
