use super::*;
use crate::counting_sort::sort_choices;
use crate::test_data::{contexts, is_close, kind, numbers, rounded, tensor};

/// Compares all three products with sums in f64, on every instruction set and number of threads; groups without rows,
/// with one and with many.
#[test]
fn every_row_meets_the_matrix_of_its_group() {
    for (case, (t, k, d, width, num_groups, first, dtype)) in [
        (40, 2, 19, 3, 5, 2, DType::F32),
        (40, 2, 19, 3, 5, 0, DType::F32),
        (1, 1, 7, 2, 3, 2, DType::F32),
        (90, 1, 33, 9, 2, 0, DType::F32),
        (60, 2, 24, 16, 3, 0, DType::BF16),
        (0, 2, 4, 2, 2, 2, DType::F32),
    ]
    .into_iter()
    .enumerate()
    {
        let numbers =
            |len, seed| numbers(len, seed).into_iter().map(|x| rounded(x, dtype) as f32).collect::<Vec<f32>>();
        let (x, dy) = (numbers(t * d, 1), numbers(t * k * width, 2));
        let rows_of_w = first + num_groups * width + 1;
        let w = numbers(rows_of_w * d, 3);
        // The last group gets nothing, and the first token's last choice is none.
        let id = |t: usize, i: usize| if (t, i) == (0, 1) { u32::MAX } else { ((t * t + i) % (num_groups - 1)) as u32 };
        let ids: Vec<u32> = (0..t * k).map(|at| id(at / k, at % k)).collect();
        let mut last_kind = None;
        let mut bits: Vec<Vec<f32>> = Vec::new();
        for ctx in contexts() {
            if last_kind.replace(kind(&ctx)) != Some(kind(&ctx)) {
                bits.clear();
            }
            let make = |shape: &[usize], values: &[f32]| tensor(&ctx, shape, values, dtype);
            let ids = Tensor::from_slice(ctx.pool(), &[t, k], &ids);
            let sorted = sort_choices(&ctx, &ids, &ctx.zeros(&[t, k], DType::F32), num_groups, None);
            let groups = GroupedRows { rows: sorted.rows(), first, width };
            let (x_t, w_t) = (make(&[t, d], &x), make(&[rows_of_w, d], &w));
            let dy_t = make(&[groups.num_rows(), width], &dy[..groups.num_rows() * width]);
            let y = grouped_linear(&ctx, &x_t, &w_t, groups);
            let dx = grouped_linear_backward_input(&ctx, &dy_t, &w_t, groups);
            let mut dw = tensor(&ctx, &[rows_of_w, d], &vec![5.0; rows_of_w * d], DType::F32);
            grouped_linear_backward_weight(&ctx, &dy_t, &x_t, groups, Write::Replace, &mut dw);
            let (mut exact_dx, mut exact_dw) = (vec![(0.0, 0.0); t * d], vec![(0.0, 0.0); rows_of_w * d]);
            for (group, range) in groups.ranges() {
                for (row, c) in range.flat_map(|row| (0..width).map(move |c| (row, c))) {
                    let (token, out) = (sorted.tokens.u32s()[row] as usize, first + group * width + c);
                    let mut sum = (0.0, 0.0);
                    let g = f64::from(dy[row * width + c]);
                    for i in 0..d {
                        let (x, w) = (f64::from(x[token * d + i]), f64::from(w[out * d + i]));
                        sum = (sum.0 + x * w, sum.1 + (x * w).abs());
                        let (dx, dw) = (&mut exact_dx[token * d + i], &mut exact_dw[out * d + i]);
                        *dx = (dx.0 + g * w, dx.1 + (g * w).abs());
                        *dw = (dw.0 + g * x, dw.1 + (g * x).abs());
                    }
                    assert!(is_close(y.f32s()[row * width + c], sum.0, sum.1, d, DType::F32), "case {case}: y");
                }
            }
            // Rows of the weight that belong to no group stay as they are.
            exact_dw[..first * d].fill((5.0, 0.0));
            exact_dw[(rows_of_w - 1) * d..].fill((5.0, 0.0));
            for (what, values, exact) in [("dx", dx.f32s(), &exact_dx), ("dw", dw.f32s(), &exact_dw)] {
                for (value, &(exact, size)) in values.iter().zip(exact) {
                    assert!(
                        is_close(*value, exact, size, t * width, DType::F32),
                        "case {case}: {what} {value} {exact}"
                    );
                }
            }
            let all = [y.f32s(), dx.f32s(), dw.f32s()].concat();
            assert_eq!(bits.first().unwrap_or(&all), &all, "case {case}: bits depend on the threads");
            bits.push(all);
        }
    }
}
