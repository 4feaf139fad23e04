use moeworks_tensor::f8_value;

use super::*;
use crate::test_data::{kinds, numbers, tensor};

/// Returns the E4M3 number nearest to `x`, ties to the even byte, by a search among all of them.
fn nearest_of_all(x: f64) -> f64 {
    let distance = |byte: u8| (f64::from(f8_value(byte)) - x.abs()).abs();
    let byte = (0..0x7f_u8).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    f64::from(f8_value(byte.unwrap())).copysign(x)
}

/// Rounds a block's numbers by the definition: with the least power of two that brings all of them to at most 448.
pub(crate) fn exact_block(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().fold(0.0_f64, |all, x| all.max(x.abs()));
    let mut scale = 2.0_f64.powi(MIN_SCALE_EXPONENT);
    while largest / scale > 448.0 {
        scale *= 2.0;
    }
    x.iter().map(|x| nearest_of_all(x / scale) * scale).collect()
}

/// Rounds each block of `high` rows and `wide` columns of matrices of `rows` rows.
pub(crate) fn exact_matrices(x: &[f64], rows: usize, columns: usize, high: usize, wide: usize) -> Vec<f64> {
    let mut all = vec![0.0; x.len()];
    for (x, all) in x.chunks(rows * columns).zip(all.chunks_mut(rows * columns)) {
        for (row, column) in (0..rows).step_by(high).flat_map(|row| (0..columns).step_by(wide).map(move |c| (row, c))) {
            let places: Vec<usize> = (row..(row + high).min(rows))
                .flat_map(|row| (column..(column + wide).min(columns)).map(move |column| row * columns + column))
                .collect();
            let block = exact_block(&places.iter().map(|&at| x[at]).collect::<Vec<_>>());
            places.iter().zip(block).for_each(|(&at, value)| all[at] = value);
        }
    }
    all
}

/// Returns numbers of many magnitudes, also within a row.
fn values(len: usize) -> Vec<f32> {
    let sizes = numbers(len, 2);
    numbers(len, 1)
        .iter()
        .zip(sizes)
        .enumerate()
        .map(|(i, (x, size))| x * (12.0 * size + (i / 300 % 40) as f32).exp2())
        .collect()
}

fn as_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn every_float_is_its_own_nearest_and_ties_go_to_the_even_one() {
    let all: Vec<f32> = (0..0x7f).map(f8_value).collect();
    for (byte, pair) in all.windows(2).enumerate() {
        let (low, high) = (pair[0], pair[1]);
        assert_eq!((nearest(low).to_bits(), nearest(-high)), (low.to_bits(), -high));
        let tie = f32::midpoint(low, high);
        assert_eq!(nearest(tie), if byte % 2 == 0 { low } else { high }, "{tie}");
        assert_eq!((nearest(tie.next_down()), nearest(tie.next_up())), (low, high), "{tie}");
    }
    assert!(nearest(f32::NAN).is_nan() && nearest(f32::INFINITY).is_nan() && nearest(-f32::INFINITY).is_nan());
    assert!(nearest(-0.0).is_sign_negative());
}

#[test]
fn a_scale_is_the_least_power_of_two_that_brings_numbers_to_448_at_most() {
    for largest in [448.0_f32, 448.0_f32.next_up(), 449.0, 1.0, 1.75, 1.76, 3e-5, 7e20, f32::MAX] {
        let scale = f64::from(scale_for(largest));
        assert_eq!(scale.log2().fract(), 0.0);
        let scaled = f64::from(largest) / scale;
        assert!(scaled <= 448.0 && scaled > 224.0, "{largest} by {scale}");
    }
    assert_eq!(scale_for(0.0), 2.0_f32.powi(MIN_SCALE_EXPONENT));
    assert!([f32::INFINITY, f32::NAN].iter().all(|&x| scale_for(x).is_finite()));
}

#[test]
fn rows_and_matrices_are_rounded_in_blocks_by_all_devices_alike() {
    for (matrices, rows, columns) in [(1, 3, 128), (2, 130, 200), (3, 5, 7), (1, 128, 256), (2, 1, 260), (1, 257, 131)]
    {
        let x = values(matrices * rows * columns);
        for (ctx, dtype) in kinds().flat_map(|ctx| [(ctx.clone(), DType::F32), (ctx, DType::BF16)]) {
            let x = tensor(&ctx, &[matrices, rows, columns], &x, dtype);
            let exact = as_f64(&x.to_f32_vec());
            let name = format!("{matrices} x {rows} x {columns} {dtype:?} on {}", ctx.describe());
            let of_rows = as_f64(&round_rows(&ctx, &x).to_f32_vec());
            assert!(of_rows == exact_matrices(&exact, rows, columns, 1, BLOCK), "rows of {name}");
            let of_matrices = as_f64(&round_matrices(&ctx, &x, rows).to_f32_vec());
            assert!(of_matrices == exact_matrices(&exact, rows, columns, BLOCK, BLOCK), "{name}");
        }
    }
}

#[test]
fn what_is_not_finite_is_nan_and_nothing_else_is() {
    for ctx in kinds() {
        let mut x = values(300);
        (x[5], x[140], x[141]) = (f32::NAN, f32::INFINITY, -f32::INFINITY);
        let y = round_rows(&ctx, &tensor(&ctx, &[1, 300], &x, DType::F32)).to_f32_vec();
        assert!(y.iter().zip(&x).all(|(y, x)| y.is_nan() != x.is_finite()), "{}", ctx.describe());
        let none = ctx.zeros(&[0, 128], DType::F32);
        assert!(round_rows(&ctx, &none).is_empty() && round_matrices(&ctx, &none, 4).is_empty());
    }
}
