//! Products by head against plain loops.

use moeworks_ops::columns::Columns;
use moeworks_ops::heads::{HeadParts, linear_by_head, transposed_linear_by_head};
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_close, contexts, doubles, normal_tensor, rounding};

/// A matrix in f64 and its width.
struct Matrix(Vec<f64>, usize);

impl Matrix {
    fn of(tensor: &Tensor) -> Self {
        Self(doubles(tensor), tensor.cols())
    }

    fn at(&self, row: usize, col: usize) -> f64 {
        self.0[row * self.1 + col]
    }
}

#[test]
fn each_head_multiplies_with_rows_of_its_own() {
    // Heads of 6 columns, 4 of them used, with 3 and then 5 rows; also odd widths, which pairs of bf16 do not divide;
    // then heads that are whole vectors, more than a block of a GPU has.
    for (what, ctx) in contexts() {
        for (dtype, rows) in [(DType::F32, 1), (DType::F32, 40), (DType::BF16, 3), (DType::BF16, 70)] {
            for (inner, num_rows, first, spare) in [(4, 6, 1, 2), (7, 5, 1, 2), (64, 32, 1, 2), (264, 16, 8, 8)] {
                let count = 3;
                let w = normal_tensor(&ctx, 1, &[count * (num_rows + 1), inner], dtype);
                let parts = HeadParts {
                    count,
                    x: Columns { start: first, step: inner + spare },
                    w: Columns { start: 1, step: num_rows + 1 },
                    num_rows,
                    y: Columns { start: 2, step: num_rows + 1 },
                };
                let x = normal_tensor(&ctx, 2, &[rows, first + count * (inner + spare)], dtype);
                let mut y = normal_tensor(&ctx, 3, &[rows, 2 + count * (num_rows + 1)], DType::F32);
                let (mut expected, width) = (doubles(&y), y.cols());
                linear_by_head(&ctx, &x, &w, &parts, &mut y);
                let (m, n) = (Matrix::of(&x), Matrix::of(&w));
                for (row, head, out) in places(rows, count, num_rows) {
                    let (x0, w0) = (first + head * (inner + spare), 1 + head * (num_rows + 1));
                    let sum = (0..inner).map(|i| m.at(row, x0 + i) * n.at(w0 + out, i)).sum();
                    expected[row * width + 2 + head * (num_rows + 1) + out] = sum;
                }
                assert_close(&format!("{what}, {dtype:?}, {rows}, {inner}"), &doubles(&y), &expected, 2e-5);

                let parts = HeadParts {
                    x: Columns { start: first, step: num_rows + spare },
                    y: Columns { start: 2, step: inner + 1 },
                    ..parts
                };
                let x = normal_tensor(&ctx, 4, &[rows, first + count * (num_rows + spare)], dtype);
                let mut y = normal_tensor(&ctx, 5, &[rows, 2 + count * (inner + 1)], dtype);
                let (mut expected, width) = (doubles(&y), y.cols());
                transposed_linear_by_head(&ctx, &x, &w, &parts, &mut y);
                let m = Matrix::of(&x);
                for (row, head, out) in places(rows, count, inner) {
                    let (x0, w0) = (first + head * (num_rows + spare), 1 + head * (num_rows + 1));
                    let sum = (0..num_rows).map(|i| m.at(row, x0 + i) * n.at(w0 + i, out)).sum();
                    expected[row * width + 2 + head * (inner + 1) + out] = sum;
                }
                let tolerance = 2e-5 + rounding(dtype);
                assert_close(&format!("{what}, {dtype:?}, {rows}, {inner}, back"), &doubles(&y), &expected, tolerance);
            }
        }
    }
}

/// Every row, head and column of the head.
fn places(rows: usize, count: usize, columns: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..rows).flat_map(move |row| (0..count).flat_map(move |head| (0..columns).map(move |column| (row, head, column))))
}

#[test]
#[should_panic(expected = "products by head")]
fn heads_that_are_not_there_are_refused() {
    let ctx = moeworks_ops::Context::cpu(1);
    let (x, w) = (ctx.zeros(&[1, 8], DType::F32), ctx.zeros(&[3, 4], DType::F32));
    let mut y = ctx.zeros(&[1, 4], DType::F32);
    let at = |step| Columns { start: 0, step };
    let parts = HeadParts { count: 2, x: at(4), w: at(2), num_rows: 2, y: at(2) };
    linear_by_head(&ctx, &x, &w, &parts, &mut y);
}
