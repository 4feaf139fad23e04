//! Blocks of columns against plain loops.

use moeworks_ops::columns::{Blocks, Columns, add_columns, copy_columns};
use moeworks_tensor::DType;

use crate::common::{contexts, doubles, normal_tensor, thread_counts};

#[test]
fn blocks_are_copied_repeated_and_added_where_they_belong() {
    for ctx in thread_counts().into_iter().chain(contexts().into_iter().map(|(_, ctx)| ctx)) {
        for rows in [0, 1, 300] {
            let from = normal_tensor(&ctx, 1, &[rows, 10], DType::F32);
            let blocks = Blocks { count: 3, width: 2 };
            for (start, step) in [(1, 3), (4, 0)] {
                let (at, to_at) = (Columns { start, step }, Columns { start: 2, step: 5 });
                let mut to = normal_tensor(&ctx, 2, &[rows, 17], DType::F32);
                let mut expected = doubles(&to);
                let each = |expected: &mut [f64], f: fn(&mut f64, f64)| {
                    for (row, expected) in expected.chunks_exact_mut(17).enumerate() {
                        for (block, i) in (0..3).flat_map(|block| [(block, 0), (block, 1)]) {
                            let x = f64::from(from.f32s()[row * 10 + start + block * step + i]);
                            f(&mut expected[2 + 5 * block + i], x);
                        }
                    }
                };
                copy_columns(&ctx, blocks, &from, at, &mut to, to_at);
                each(&mut expected, |to, x| *to = x);
                assert_eq!(doubles(&to), expected);
                add_columns(&ctx, blocks, &from, at, &mut to, to_at);
                each(&mut expected, |to, x| *to += x);
                assert_eq!(doubles(&to), expected);
            }
        }
    }
}

#[test]
fn heads_of_either_type_are_parted_and_joined_and_added_up_to_one() {
    let (heads, plain, rotary, rows) = (5, 24, 8, 37);
    let wide = plain + rotary;
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            // Widths in units of 16 bytes, and of 2.
            for extra in [0, 1] {
                let from = normal_tensor(&ctx, 3, &[rows, heads * (wide + extra)], dtype);
                let mut to = ctx.zeros(&[rows, heads * plain], dtype);
                let (at, to_at) = (Columns { start: rotary, step: wide + extra }, Columns { start: 0, step: plain });
                copy_columns(&ctx, Blocks { count: heads, width: plain }, &from, at, &mut to, to_at);
                let (from, to) = (doubles(&from), doubles(&to));
                for (i, x) in to.iter().enumerate() {
                    let (row, head, column) = (i / (heads * plain), i / plain % heads, i % plain);
                    let place = (row * heads + head) * (wide + extra) + rotary + column;
                    assert_eq!(*x, from[place], "{name}, {dtype:?}, element {i}");
                }
            }
        }
        let from = normal_tensor(&ctx, 4, &[rows, heads * wide], DType::F32);
        let mut to = ctx.zeros(&[rows, rotary], DType::F32);
        let (at, to_at) = (Columns { start: plain, step: wide }, Columns { start: 0, step: 0 });
        add_columns(&ctx, Blocks { count: heads, width: rotary }, &from, at, &mut to, to_at);
        for (i, x) in to.f32s().iter().enumerate() {
            let of_head = |head| from.f32s()[(i / rotary * heads + head) * wide + plain + i % rotary];
            assert_eq!(*x, (0..heads).map(of_head).fold(0.0, |sum, x| sum + x), "{name}, element {i}");
        }
    }
}

#[test]
#[should_panic(expected = "columns")]
fn columns_that_are_not_there_are_refused() {
    let ctx = moeworks_ops::Context::cpu(1);
    let (from, mut to) = (ctx.zeros(&[2, 4], DType::F32), ctx.zeros(&[2, 4], DType::F32));
    let at = Columns { start: 1, step: 2 };
    copy_columns(&ctx, Blocks { count: 2, width: 2 }, &from, at, &mut to, at);
}
