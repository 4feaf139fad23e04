//! Blocks of columns against plain loops.

use moeworks_ops::columns::{Blocks, Columns, add_columns, copy_columns};
use moeworks_tensor::DType;

use crate::common::{doubles, normal_tensor, thread_counts};

#[test]
fn blocks_are_copied_repeated_and_added_where_they_belong() {
    for ctx in thread_counts() {
        for rows in [0, 1, 3000] {
            let from = normal_tensor(&ctx, 1, &[rows, 10], DType::F32);
            let blocks = Blocks { count: 3, width: 2 };
            for (start, step) in [(1, 3), (4, 0)] {
                let at = (&from, Columns { start, step });
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
                copy_columns(&ctx, blocks, at, (&mut to, Columns { start: 2, step: 5 }));
                each(&mut expected, |to, x| *to = x);
                assert_eq!(doubles(&to), expected);
                add_columns(&ctx, blocks, at, (&mut to, Columns { start: 2, step: 5 }));
                each(&mut expected, |to, x| *to += x);
                assert_eq!(doubles(&to), expected);
            }
        }
    }
}

#[test]
#[should_panic(expected = "columns")]
fn columns_that_are_not_there_are_refused() {
    let ctx = moeworks_ops::Context::cpu(1);
    let (from, mut to) = (ctx.zeros(&[2, 4], DType::F32), ctx.zeros(&[2, 4], DType::F32));
    let at = Columns { start: 1, step: 2 };
    copy_columns(&ctx, Blocks { count: 2, width: 2 }, (&from, at), (&mut to, at));
}
