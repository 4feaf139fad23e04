//! Elementwise operations: exact where they can be.

use moeworks_ops::elementwise::{
    add_assign, add_rows, cast, cast_into, clip_assign, clip_backward_assign, copy_rows, fill_normal, scale_assign,
    sum_of_squares, sum_rows, sums_of_rows,
};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor, bf16};
use proptest::prelude::*;

use crate::common::{assert_close, contexts, doubles, normal_tensor, normals, tensor, thread_counts};

/// Lengths on and around the edges of vectors and of pieces.
const LENGTHS: [usize; 7] = [0, 1, 15, 33, 1000, 32_768, 70_001];

#[test]
fn rows_are_added_up_from_each_start_to_the_next() {
    for (name, ctx) in contexts() {
        for cols in [1, 33, 300] {
            let x = normal_tensor(&ctx, 4, &[100, cols], DType::F32);
            let values = doubles(&x);
            for starts in [&[][..], &[7], &[0, 100], &[0, 1, 1, 64, 90]] {
                let of = |piece: &[u32], col: usize| -> f64 {
                    (piece[0]..piece[1]).map(|row| values[row as usize * cols + col]).sum()
                };
                let pieces = starts.windows(2);
                let expected: Vec<f64> = pieces.flat_map(|piece| (0..cols).map(move |col| of(piece, col))).collect();
                let sums = sums_of_rows(&ctx, &x, starts);
                assert_eq!(sums.shape(), [starts.len().saturating_sub(1), cols]);
                assert_close(&format!("{name}: {starts:?}"), &doubles(&sums), &expected, 1e-5);
            }
        }
    }
}

#[test]
fn sums_and_scales_are_those_of_scalar_code() {
    for (name, ctx) in contexts() {
        for len in LENGTHS {
            for dtype in [DType::F32, DType::BF16] {
                let (x, mut y) = (normal_tensor(&ctx, 1, &[len], dtype), normal_tensor(&ctx, 2, &[len], DType::F32));
                let expected: Vec<f32> = x.to_f32_vec().iter().zip(y.f32s()).map(|(x, y)| y + x).collect();
                add_assign(&ctx, &mut y, &x);
                assert_eq!(y.f32s(), expected, "{name}, {len}");
                let expected: Vec<f32> = y.f32s().iter().map(|y| y * 0.3).collect();
                scale_assign(&ctx, &mut y, 0.3);
                assert_eq!(y.f32s(), expected, "{name}, {len}");
            }
        }
    }
}

#[test]
fn copied_rows_are_the_same_bits_where_they_are_put_and_leave_the_others() {
    for (name, ctx) in contexts() {
        for (cols, dtype) in [(1, DType::F32), (7, DType::BF16), (16, DType::BF16), (300, DType::F32)] {
            let (x, mut y) = (normal_tensor(&ctx, 1, &[9, cols], dtype), normal_tensor(&ctx, 2, &[6, cols], dtype));
            let mut expected = y.to_f32_vec();
            expected[2 * cols..5 * cols].copy_from_slice(&x.to_f32_vec()[4 * cols..7 * cols]);
            copy_rows(&ctx, &x, 4, &mut y, 2, 3);
            assert_eq!(y.to_f32_vec(), expected, "{name}, {cols} columns");
            copy_rows(&ctx, &x, 9, &mut y, 6, 0);
            assert_eq!(y.to_f32_vec(), expected, "{name}, no rows");
        }
    }
}

#[test]
fn casts_round_to_nearest_even_and_keep_what_is_not_finite() {
    let mut values = normals(3, 2000);
    values.extend([
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        1.003_906_2,
        1.011_718_8,
    ]);
    for (name, ctx) in contexts() {
        let x = Tensor::from_slice(ctx.pool(), &[values.len()], &values);
        let rounded = cast(&ctx, &x, DType::BF16);
        let expected: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        assert_eq!(rounded.bf16s(), expected, "{name}");
        let mut back = ctx.empty(&[values.len()], DType::F32);
        cast_into(&ctx, &rounded, &mut back);
        assert_eq!(back.f32s(), rounded.to_f32_vec(), "{name}");
        let nan = cast(&ctx, &tensor(&ctx, &[1], &[f32::from_bits(0x7f80_0001)], DType::F32), DType::BF16);
        assert!(nan.bf16s()[0].is_nan(), "{name}");
    }
}

#[test]
fn the_sum_of_squares_is_that_of_doubles_and_the_same_on_any_number_of_threads() {
    for len in LENGTHS {
        for dtype in [DType::F32, DType::BF16] {
            let sums = thread_counts().map(|ctx| sum_of_squares(&ctx, &normal_tensor(&ctx, 4, &[len], dtype)));
            assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len}");
            let ctx = &thread_counts()[0];
            let exact: f64 = doubles(&normal_tensor(ctx, 4, &[len], dtype)).iter().map(|x| x * x).sum();
            assert!((sums[0] - exact).abs() <= 1e-12 * exact, "{len}: {} and {exact}", sums[0]);
        }
    }
}

#[test]
fn the_sum_of_squares_does_not_overflow_and_shows_what_is_not_finite() {
    for (name, ctx) in contexts() {
        let mut x = tensor(&ctx, &[40_000], &vec![1e30; 40_000], DType::F32);
        let sum = sum_of_squares(&ctx, &x);
        assert!((sum / 4e64 - 1.0).abs() < 1e-6, "{name}: {sum}");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x.f32s_mut()[39_999] = bad;
            assert!(!sum_of_squares(&ctx, &x).is_finite(), "{name}: {bad}");
        }
    }
}

#[test]
fn normal_filling_has_the_right_moments_and_no_outliers() {
    let random = Random::new(9, Purpose::Init, 0);
    let filled = thread_counts().map(|ctx| {
        let mut x = ctx.empty(&[200_000], DType::F32);
        fill_normal(&ctx, &random, 0.02, &mut x);
        x
    });
    assert!(filled.iter().all(|x| x.bytes() == filled[0].bytes()));
    let x = doubles(&filled[0]);
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    assert!(mean.abs() < 2e-4, "{mean}");
    // A normal distribution cut at three deviations has 0.98658 of its deviation.
    assert!((variance.sqrt() / (0.02 * 0.986_58) - 1.0).abs() < 0.01, "{variance}");
    assert!(x.iter().all(|x| x.abs() <= 0.060_001));
    assert!(x.iter().any(|x| x.abs() > 0.055));
}

#[test]
#[should_panic(expected = "add_assign")]
fn tensors_of_different_sizes_are_refused() {
    let (_, ctx) = contexts().remove(0);
    add_assign(&ctx, &mut ctx.zeros(&[3], DType::F32), &ctx.zeros(&[4], DType::F32));
}

proptest! {
    #[test]
    fn a_cast_is_that_of_the_half_crate_for_any_bits(bits in proptest::collection::vec(any::<u32>(), 1..100)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for (_, ctx) in contexts() {
            let y = cast(&ctx, &Tensor::from_slice(ctx.pool(), &[values.len()], &values), DType::BF16);
            for (&x, &y) in values.iter().zip(y.bf16s()) {
                let is_right = if x.is_nan() { y.is_nan() } else { y.to_bits() == bf16::from_f32(x).to_bits() };
                prop_assert!(is_right, "{x} became {y}");
            }
        }
    }
}

#[test]
fn biases_are_added_to_rows_and_their_gradients_are_the_sums_of_rows() {
    for (name, ctx) in contexts() {
        for (rows, cols) in [(1, 1), (7, 130), (300, 5), (0, 3)] {
            let (mut y, bias) =
                (normal_tensor(&ctx, 1, &[rows, cols], DType::F32), normal_tensor(&ctx, 2, &[cols], DType::F32));
            let (before, bias_values) = (doubles(&y), doubles(&bias));
            add_rows(&ctx, &mut y, &bias);
            let expected: Vec<f64> = before.iter().enumerate().map(|(i, x)| x + bias_values[i % cols]).collect();
            assert_close(&name, &doubles(&y), &expected, 1e-6);
            let mut sums = ctx.zeros(&[cols], DType::F32);
            sum_rows(&ctx, &y, Write::Replace, &mut sums);
            sum_rows(&ctx, &y, Write::Add, &mut sums);
            let mut twice = vec![0.0; cols];
            expected.iter().enumerate().for_each(|(i, x)| twice[i % cols] += 2.0 * x);
            assert_close(&name, &doubles(&sums), &twice, 1e-5);
        }
    }
}

#[test]
fn clipped_elements_have_no_gradient() {
    for (name, ctx) in contexts() {
        // Alone, and with whole vectors before them.
        for (times, dtype) in [(1, DType::F32), (201, DType::F32), (201, DType::BF16)] {
            let elements = [-3.0_f32, -0.5, 0.0, 2.0, f32::NAN].repeat(times);
            let mut y = cast(&ctx, &Tensor::from_slice(ctx.pool(), &[5 * times], &elements), dtype);
            clip_assign(&ctx, &mut y, 1.0);
            let mut dy = Tensor::from_slice(ctx.pool(), &[5 * times], &vec![1.0_f32; 5 * times]);
            clip_backward_assign(&ctx, &mut dy, &y, 1.0);
            for (y, dy) in y.to_f32_vec().chunks(5).zip(dy.f32s().chunks(5)) {
                assert_eq!(y[..4], [-1.0, -0.5, 0.0, 1.0], "{name}, {dtype:?}");
                assert!(y[4].is_nan());
                assert_eq!(dy, [0.0, 1.0, 1.0, 0.0, 1.0], "{name}, {dtype:?}");
            }
        }
    }
}
