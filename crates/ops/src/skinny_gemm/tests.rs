use moeworks_tensor::{DType, Tensor, bf16};
use proptest::prelude::*;

use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use crate::test_data::{contexts, is_close, kind, numbers, rounded, tensor};
use crate::{Context, Isa};

/// Rows, depth and columns of a product, and the type of its weights.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    depth: usize,
    columns: usize,
    dtype: DType,
}

/// A sum in f64 and the sum of the magnitudes of its terms.
struct Exact {
    sum: f64,
    magnitude: f64,
}

/// Computes each sum and the sum of its terms' magnitudes in f64, row-major.
fn exact(case: Case, a: &[f32], weight: impl Fn(usize, usize) -> f32) -> Vec<Exact> {
    let Case { rows, depth, columns, dtype } = case;
    let element = |r: usize, c: usize| {
        let terms = (0..depth).map(|k| rounded(a[r * depth + k], dtype) * rounded(weight(k, c), dtype));
        let start = Exact { sum: 0.0, magnitude: 0.0 };
        terms.fold(start, |Exact { sum, magnitude }, x: f64| Exact { sum: sum + x, magnitude: magnitude + x.abs() })
    };
    (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))).map(|(r, c)| element(r, c)).collect()
}

fn assert_close(what: &str, case: Case, y: &Tensor, exact: &[Exact]) {
    for (i, (&y, &Exact { sum: exact, magnitude })) in y.f32s().iter().zip(exact).enumerate() {
        assert!(
            is_close(y, exact, magnitude, case.depth, DType::F32),
            "{what} {case:?}: element {i} is {y}, not {exact}"
        );
    }
}

/// Compares `A B^T` and `A B` with f64 on every instruction set, and the bits of one, two and three threads with each
/// other.
fn check(case: Case) {
    let Case { rows, depth, columns, dtype } = case;
    let (a, w) = (numbers(rows * depth, 1), numbers(depth * columns, 2));
    let forward = exact(case, &a, |k, c| w[c * depth + k]);
    let backward = exact(case, &a, |k, c| w[k * columns + c]);
    let mut last: Option<(_, Tensor, Tensor)> = None;
    for ctx in contexts() {
        let x = tensor(&ctx, &[rows, depth], &a, DType::F32);
        let y = linear(&ctx, &x, &tensor(&ctx, &[columns, depth], &w, dtype), DType::F32);
        let dx = linear_backward_input(&ctx, &x, &tensor(&ctx, &[depth, columns], &w, dtype), DType::F32);
        assert_close("A B^T", case, &y, &forward);
        assert_close("A B", case, &dx, &backward);
        if let Some((last_kind, last_y, last_dx)) = &last
            && *last_kind == kind(&ctx)
        {
            assert!(last_y.bytes() == y.bytes() && last_dx.bytes() == dx.bytes(), "{case:?}: bits depend on threads");
        }
        last = Some((kind(&ctx), y, dx));
    }
}

#[test]
fn every_number_of_rows_matches_f64() {
    for rows in 1..=18 {
        for dtype in [DType::F32, DType::BF16] {
            check(Case { rows, depth: 67, columns: 101, dtype });
        }
    }
}

#[test]
fn sizes_on_the_edges_of_blocks_and_panels_match_f64() {
    for (depth, columns) in [(1, 1), (31, 48), (32, 49), (33, 95), (64, 97), (1, 700), (700, 1), (129, 257), (8, 16)] {
        for (rows, dtype) in [(1, DType::BF16), (5, DType::F32), (9, DType::BF16)] {
            check(Case { rows, depth, columns, dtype });
        }
    }
}

#[test]
fn weights_of_several_tasks_match_f64() {
    check(Case { rows: 3, depth: 300, columns: 700, dtype: DType::F32 });
    check(Case { rows: 2, depth: 700, columns: 900, dtype: DType::BF16 });
}

#[test]
fn short_rows_of_many_panels_match_f64() {
    // Enough panels to be read in several stretches, which end in wide panels, in narrow ones and within a stream.
    for (columns, depth) in [(1015, 40), (48 * 11, 33), (437, 7), (48 * 8 + 3, 64)] {
        for (rows, dtype) in [1, 2, 3, 4, 6].into_iter().flat_map(|rows| [(rows, DType::F32), (rows, DType::BF16)]) {
            check(Case { rows, depth, columns, dtype });
        }
    }
}

#[test]
fn rows_of_weights_that_lie_in_memory_match_f64() {
    // Matrices above the size from which rows are packed as lanes, and numbers of rows on both sides of the limit.
    for rows in [4, 8, 12, 16] {
        check(Case { rows, depth: 802, columns: 700, dtype: DType::BF16 });
    }
    check(Case { rows: 7, depth: 402, columns: 700, dtype: DType::F32 });
}

#[test]
fn gradients_of_weights_of_few_rows_match_f64() {
    let (out, inputs) = (37, 83);
    for (rows, dtype) in [1, 2, 7, 16, 17, 40, 63, 64, 65].into_iter().flat_map(|r| [(r, DType::F32), (r, DType::BF16)])
    {
        let (dy, x) = (numbers(rows * out, 3), numbers(rows * inputs, 4));
        let transposed: Vec<f32> =
            (0..out).flat_map(|o| (0..rows).map(move |r| (o, r))).map(|(o, r)| dy[r * out + o]).collect();
        let case = Case { rows: out, depth: rows, columns: inputs, dtype };
        let exact = exact(case, &transposed, |r, c| x[r * inputs + c]);
        for ctx in contexts() {
            let (dy, x) = (tensor(&ctx, &[rows, out], &dy, DType::F32), tensor(&ctx, &[rows, inputs], &x, DType::F32));
            let mut grad = ctx.zeros(&[out, inputs], DType::F32);
            linear_backward_weight(&ctx, &dy, &x, dtype, Write::Add, &mut grad);
            assert_close("dy^T x added", case, &grad, &exact);
            grad.f32s_mut().fill(f32::NAN);
            linear_backward_weight(&ctx, &dy, &x, dtype, Write::Replace, &mut grad);
            assert_close("dy^T x", case, &grad, &exact);
        }
    }
}

#[test]
fn rows_that_start_anywhere_in_memory_are_read_right() {
    // A stack of matrices whose rows are of odd length: the second matrix starts at an odd element.
    let case = Case { rows: 2, depth: 37, columns: 23, dtype: DType::BF16 };
    let (a, w) = (numbers(2 * 37, 1), numbers(3 * 23 * 37, 2));
    for ctx in contexts() {
        let x = tensor(&ctx, &[2, 37], &a, DType::F32);
        let stack = tensor(&ctx, &[3, 23, 37], &w, DType::BF16);
        let owner: moeworks_tensor::Bytes = std::sync::Arc::new(stack.bytes().to_vec());
        let matrix = 2 * 23 * 37;
        for index in 0..3 {
            let range = index * matrix..(index + 1) * matrix;
            let w_part = Tensor::from_foreign(owner.clone(), range, &[23, 37], DType::BF16).expect("even addresses");
            let exact = exact(case, &a, |k, c| w[index * 23 * 37 + c * 37 + k]);
            assert_close("A B^T", case, &linear(&ctx, &x, &w_part, DType::F32), &exact);
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_sums_they_belong_to() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case { rows: 4, depth: 45, columns: 60, dtype };
        let (mut a, mut w) = (numbers(4 * 45, 1), numbers(45 * 60, 2));
        // At the ends of rows, where blocks are filled up with zeros.
        (a[44], a[2 * 45]) = (f32::NAN, f32::INFINITY);
        (w[7 * 45 + 44], w[59 * 45]) = (f32::NEG_INFINITY, f32::NAN);
        let forward = exact(case, &a, |k, c| w[c * 45 + k]);
        let backward = exact(case, &a, |k, c| w[k * 60 + c]);
        for ctx in contexts() {
            let x = tensor(&ctx, &[4, 45], &a, DType::F32);
            let y = linear(&ctx, &x, &tensor(&ctx, &[60, 45], &w, dtype), DType::F32);
            let dx = linear_backward_input(&ctx, &x, &tensor(&ctx, &[45, 60], &w, dtype), DType::F32);
            assert_close("A B^T", case, &y, &forward);
            assert_close("A B", case, &dx, &backward);
        }
    }
}

/// Computes the weight gradient of `rows` rows twice: written over NaN, and added to zeros.
fn gradients(ctx: &Context, rows: usize, out: usize, inputs: usize, dtype: DType) -> [Tensor; 2] {
    let (dy, x) = (numbers(rows * out, 3), numbers(rows * inputs, 4));
    let dy = tensor(ctx, &[rows, out], &dy, DType::F32);
    let x = tensor(ctx, &[rows, inputs], &x, DType::F32);
    [(f32::NAN, Write::Replace), (0.0, Write::Add)].map(|(start, write)| {
        let mut grad = tensor(ctx, &[out, inputs], &vec![start; out * inputs], dtype);
        linear_backward_weight(ctx, &dy, &x, DType::F32, write, &mut grad);
        grad
    })
}

#[test]
fn gradients_that_are_streamed_to_memory_are_those_that_are_added() {
    // More bytes than the limit of `tn`; odd columns cannot be streamed.
    for (out, inputs) in [(1_057, 2_048), (1_111, 1_999)] {
        for ctx in contexts() {
            for rows in [0, 1, 3, 33] {
                let [replaced, added] = gradients(&ctx, rows, out, inputs, DType::F32);
                let is_same = replaced.f32s().iter().zip(added.f32s()).all(|(a, b)| a == b);
                assert!(is_same, "{rows} rows, {out} x {inputs}, {:?}", ctx.isa());
            }
        }
    }
}

#[test]
fn gradients_in_bf16_are_those_in_f32_rounded() {
    // Small matrices, and some above the size that `tn` streams: by outer products, and by tiles where vectors are
    // wide. Rows of tiles end in the middle of a line at some columns and anywhere at others.
    let large = [(2_105, 2_048, 33), (2_117, 2_000, 290), (2_111, 1_999, 290)];
    for (out, inputs, rows) in large.into_iter().chain([0, 2, 33, 290].map(|rows| (37, 83, rows))) {
        let is_quick = |isa: &Isa| out < 100 || *isa != Isa::Portable && *isa != Isa::Avx2;
        for isa in Isa::available().into_iter().filter(is_quick) {
            let ctx = Context::cpu(2).with_isa(isa);
            let [wide, narrow] = [DType::F32, DType::BF16].map(|dtype| gradients(&ctx, rows, out, inputs, dtype));
            for (wide, narrow) in wide.iter().zip(&narrow) {
                let is_same = wide.f32s().iter().zip(narrow.bf16s()).all(|(&a, &b)| bf16::from_f32(a) == b);
                assert!(is_same, "{rows} rows, {out} x {inputs}, {isa:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_sizes_match_f64(rows in 1_usize..17, depth in 1_usize..150, columns in 1_usize..220, is_bf16: bool) {
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        check(Case { rows, depth, columns, dtype });
    }
}
