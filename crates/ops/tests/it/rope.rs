//! Rotary embedding against its definition in f64.

use moeworks_ops::Context;
use moeworks_ops::rope::{RopeLayout, RopeTable, Rotation, rope};
use moeworks_tensor::DType;
use proptest::prelude::*;

use crate::common::{assert_close, below, contexts, doubles, normal_tensor, rounding, thread_counts};

const THETA: f64 = 10_000.0;

fn reference(x: &[f64], cols: usize, head_dim: usize, positions: &[u32]) -> Vec<f64> {
    let mut y = x.to_vec();
    for (row, &position) in y.chunks_exact_mut(cols).zip(positions) {
        for head in row.chunks_exact_mut(head_dim) {
            for i in 0..head_dim / 2 {
                let angle = f64::from(position) * THETA.powf(-2.0 * i as f64 / head_dim as f64);
                let (a, b) = (head[i], head[i + head_dim / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + head_dim / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }
    y
}

fn check(name: &str, ctx: &Context, rows: usize, heads: usize, head_dim: usize, dtype: DType) {
    let cols = heads * head_dim;
    let table = RopeTable::new(head_dim, THETA, 5000);
    let positions = below(1, rows, 5000);
    let mut x = normal_tensor(ctx, 1, &[rows, cols], dtype);
    let before = doubles(&x);
    rope(ctx, &mut x, &table, &positions, Rotation::Forward);
    let what = format!("{name}: {rows} rows of {heads} heads of {head_dim}, {dtype:?}");
    assert_close(&what, &doubles(&x), &reference(&before, cols, head_dim, &positions), 1e-6 + rounding(dtype));
    rope(ctx, &mut x, &table, &positions, Rotation::Inverse);
    assert_close(&what, &doubles(&x), &before, 1e-6 + 3.0 * rounding(dtype));
}

#[test]
fn agrees_with_the_definition_and_turns_back_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            check(&name, &ctx, 1, 1, 2, dtype);
            check(&name, &ctx, 9, 3, 10, dtype);
            check(&name, &ctx, 300, 4, 64, dtype);
            check(&name, &ctx, 0, 4, 64, dtype);
        }
    }
}

#[test]
fn the_inverse_is_the_gradient() {
    // A rotation is linear and orthogonal: <dy, R x> = <R^T dy, x>.
    let ctx = Context::cpu(1);
    let (table, positions) = (RopeTable::new(16, THETA, 100), below(2, 20, 100));
    let (x, dy) = (normal_tensor(&ctx, 1, &[20, 32], DType::F32), normal_tensor(&ctx, 2, &[20, 32], DType::F32));
    let (mut y, mut dx) = (x.copied(ctx.pool()), dy.copied(ctx.pool()));
    rope(&ctx, &mut y, &table, &positions, Rotation::Forward);
    rope(&ctx, &mut dx, &table, &positions, Rotation::Inverse);
    let (left, right) =
        (crate::common::dot(&doubles(&dy), &doubles(&y)), crate::common::dot(&doubles(&dx), &doubles(&x)));
    assert!((left - right).abs() < 1e-4, "{left} and {right}");
}

#[test]
fn position_zero_changes_nothing_and_threads_do_not_matter() {
    let results = thread_counts().map(|ctx| {
        let table = RopeTable::new(64, THETA, 1000);
        let mut x = normal_tensor(&ctx, 1, &[1000, 256], DType::F32);
        let before = x.copied(ctx.pool());
        rope(&ctx, &mut x, &table, &vec![0; 1000], Rotation::Forward);
        assert_eq!(x.f32s(), before.f32s());
        rope(&ctx, &mut x, &table, &(0..1000).collect::<Vec<_>>(), Rotation::Forward);
        x
    });
    assert!(results.iter().all(|x| x.bytes() == results[0].bytes()));
}

#[test]
#[should_panic(expected = "position 10 in a table of 10")]
fn positions_beyond_the_table_are_refused() {
    let ctx = Context::cpu(1);
    rope(&ctx, &mut ctx.zeros(&[1, 4], DType::F32), &RopeTable::new(4, THETA, 10), &[10], Rotation::Forward);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn agrees_with_the_definition_on_random_shapes(rows in 0..50_usize, heads in 1..6_usize, half in 1..70_usize) {
        check("random", &Context::cpu(2), rows, heads, 2 * half, DType::F32);
    }
}

#[test]
fn neighbours_and_parts_of_heads_are_rotated_where_the_layout_says_so() {
    let frequencies = [1.0, 0.3, 0.01];
    for (name, ctx) in contexts() {
        for (start, is_interleaved) in [(0, true), (4, true), (0, false), (3, false)] {
            let layout = RopeLayout { head_dim: 10, start, is_interleaved };
            let table = RopeTable::with_frequencies(layout, &frequencies, 1.5, 50);
            let positions = below(1, 7, 50);
            let x = normal_tensor(&ctx, 1, &[7, 20], DType::F32);
            let mut y = x.copied(ctx.pool());
            rope(&ctx, &mut y, &table, &positions, Rotation::Forward);
            let mut expected = doubles(&x);
            for (row, &position) in expected.chunks_exact_mut(20).zip(&positions) {
                for head in row.chunks_exact_mut(10) {
                    for (i, frequency) in frequencies.iter().enumerate() {
                        let (low, high) = if is_interleaved {
                            (start + 2 * i, start + 2 * i + 1)
                        } else {
                            (start + i, start + i + 3)
                        };
                        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                        let (a, b) = (head[low], head[high]);
                        (head[low], head[high]) = (1.5 * (a * cos - b * sin), 1.5 * (b * cos + a * sin));
                    }
                }
            }
            assert_close(&format!("{name} {layout:?}"), &doubles(&y), &expected, 2e-6);
        }
    }
}
