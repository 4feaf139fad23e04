use std::sync::Arc;

use moeworks_tensor::{Bytes, bf16};
use proptest::prelude::*;

use super::*;
use crate::test_data::{contexts, is_close, kind, numbers, rounded, tensor};
use moeworks_gpu::{Emulation, Gpu, GpuError, GpuOptions};

const FLOATS: [DType; 2] = [DType::F32, DType::BF16];

/// Sizes of a linear map: tokens, inputs, outputs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    t: usize,
    i: usize,
    o: usize,
}

/// A sum in f64 and the sum of the magnitudes of its terms.
#[derive(Clone, Copy)]
struct Exact {
    sum: f64,
    magnitude: f64,
}

/// Computes `sum over k of a(m, k) b(n, k)` in f64, row-major.
fn reference(
    m: usize,
    n: usize,
    k: usize,
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<Exact> {
    let element = |m: usize, n: usize| {
        let terms = (0..k).map(|k| a(m, k) * b(n, k));
        terms.fold(Exact { sum: 0.0, magnitude: 0.0 }, |Exact { sum, magnitude }, x: f64| Exact {
            sum: sum + x,
            magnitude: magnitude + x.abs(),
        })
    };
    (0..m).flat_map(|m| (0..n).map(move |n| (m, n))).map(|(m, n)| element(m, n)).collect()
}
fn assert_close(what: &str, y: &Tensor, exact: &[Exact], depth: usize) {
    assert_eq!(y.len(), exact.len());
    for (index, (&y_value, &Exact { sum: exact, magnitude })) in y.to_f32_vec().iter().zip(exact).enumerate() {
        let is_close = is_close(y_value, exact, magnitude, depth, y.dtype());
        assert!(is_close, "{what}: element {index} of {:?} is {y_value}, exactly {exact}", y.shape());
    }
}

/// Asserts the same bits, with all NaN alike.
fn assert_same_bits(what: &str, y: &Tensor, first: &mut Option<Vec<f32>>) {
    let y = y.to_f32_vec();
    let first = first.get_or_insert_with(|| y.clone());
    let is_same = y.iter().zip(first.iter()).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
    assert!(is_same, "{what}: bits depend on the number of threads");
}

/// Checks all three products with every mixture of types, on every instruction set and number of threads.
fn check(s: Sizes, x: &[f32], w: &[f32], dy: &[f32]) {
    check_on(&contexts().collect::<Vec<_>>(), s, x, w, dy);
}

fn check_on(contexts: &[Context], s: Sizes, x: &[f32], w: &[f32], dy: &[f32]) {
    for (x_type, w_type) in FLOATS.into_iter().flat_map(|x| FLOATS.map(|w| (x, w))) {
        let values = |numbers: &[f32], dtype: DType| -> Vec<f64> {
            numbers.iter().map(|&x| rounded(rounded(x, dtype) as f32, w_type)).collect()
        };
        let (x_values, w_values, dy_values) = (values(x, x_type), values(w, w_type), values(dy, x_type));
        let x_at = |t: usize, i: usize| x_values[t * s.i + i];
        let w_at = |o: usize, i: usize| w_values[o * s.i + i];
        let dy_at = |t: usize, o: usize| dy_values[t * s.o + o];
        let y = reference(s.t, s.o, s.i, x_at, w_at);
        let dx = reference(s.t, s.i, s.o, dy_at, |i, o| w_at(o, i));
        let dw = reference(s.o, s.i, s.t, |o, t| dy_at(t, o), |i, t| x_at(t, i));
        let dw_added: Vec<_> =
            dw.iter().map(|&Exact { sum, magnitude }| Exact { sum: sum + 3.0, magnitude: magnitude + 3.0 }).collect();
        let mut bits: [Option<Vec<f32>>; 3] = [const { None }; 3];
        let mut last_kind = None;
        for ctx in contexts {
            if last_kind.replace(kind(ctx)) != Some(kind(ctx)) {
                bits = [const { None }; 3];
            }
            let name = |what: &str| format!("{what} of {s:?}, x {x_type:?}, w {w_type:?}, {:?}", kind(ctx));
            let xs = tensor(ctx, &[s.t, s.i], x, x_type);
            let ws = tensor(ctx, &[s.o, s.i], w, w_type);
            let dys = tensor(ctx, &[s.t, s.o], dy, x_type);
            for out in FLOATS {
                let forward = linear(ctx, &xs, &ws, out);
                assert_close(&name("forward"), &forward, &y, s.i);
                let backward = linear_backward_input(ctx, &dys, &ws, out);
                assert_close(&name("input gradient"), &backward, &dx, s.o);
                if out == DType::F32 {
                    assert_same_bits(&name("forward"), &forward, &mut bits[0]);
                    assert_same_bits(&name("input gradient"), &backward, &mut bits[1]);
                }
            }
            let mut grad = tensor(ctx, &[s.o, s.i], &vec![f32::NAN; s.o * s.i], DType::F32);
            linear_backward_weight(ctx, &dys, &xs, w_type, Write::Replace, &mut grad);
            assert_close(&name("weight gradient"), &grad, &dw, s.t);
            assert_same_bits(&name("weight gradient"), &grad, &mut bits[2]);
            grad.f32s_mut().fill(3.0);
            linear_backward_weight(ctx, &dys, &xs, w_type, Write::Add, &mut grad);
            assert_close(&name("added weight gradient"), &grad, &dw_added, s.t + 1);
        }
    }
}

/// Checks the products on the CPU alone: sizes that matter to its packing and its parts of sums, and take an emulated
/// GPU long.
fn check_sizes_on_cpu(t: usize, i: usize, o: usize) {
    let contexts: Vec<_> = contexts().filter(|ctx| ctx.gpu().is_none()).collect();
    check_on(&contexts, Sizes { t, i, o }, &numbers(t * i, 1), &numbers(o * i, 2), &numbers(t * o, 3));
}

fn check_sizes(t: usize, i: usize, o: usize) {
    let s = Sizes { t, i, o };
    check(s, &numbers(t * i, 1), &numbers(o * i, 2), &numbers(t * o, 3));
}

#[test]
fn the_three_products_match_f64_at_awkward_sizes() {
    let sizes =
        [(0, 3, 5), (1, 1, 1), (3, 0, 2), (5, 4, 0), (1, 97, 50), (7, 31, 47), (8, 16, 48), (9, 33, 49), (17, 64, 80)];
    for (t, i, o) in sizes {
        check_sizes(t, i, o);
    }
}

#[test]
fn the_three_products_of_few_rows_match_f64_where_weights_have_many_short_rows() {
    // The GPU's kernel takes two columns at a time.
    for (t, i, o) in [(1, 264, 528), (3, 40, 528), (8, 520, 544), (180, 32, 32)] {
        check_sizes(t, i, o);
    }
}

#[test]
fn the_three_products_match_f64_whatever_a_gpus_blocks_have() {
    // An emulated GPU has three multiprocessors: blocks of a tile with much in flight, and of eight, four and two
    // with all rows.
    for (t, i, o) in [(1, 4_960, 18), (20, 288, 264), (20, 288, 100), (9, 160, 40), (70, 160, 100)] {
        check_sizes(t, i, o);
    }
}

#[test]
fn the_three_products_match_f64_over_a_long_depth() {
    // Longer than the parts that sums are cut into, by an odd remainder.
    check_sizes(3, 4_099, 5);
    check_sizes(5, 3, 4_099);
    check_sizes(787, 3, 5);
    check_sizes_on_cpu(1_100, 16, 24);
    check_sizes_on_cpu(2_300, 16, 24);
    check_sizes_on_cpu(40, 61, 1_700);
    // Large enough to be cut where A is converted or rows of B are far apart.
    check_sizes_on_cpu(9, 1_101, 301);
    // Few enough rows that parts are short. Rows of B are packed while the first rows are multiplied if they are
    // whole vectors.
    check_sizes_on_cpu(33, 1_104, 257);
}

#[test]
fn the_three_products_match_f64_over_many_tasks() {
    check_sizes_on_cpu(401, 64, 113);
    check_sizes(130, 61, 300);
}

#[test]
fn the_three_products_match_f64_where_sums_of_many_rows_wait_for_the_next_part_of_the_depth() {
    check_sizes_on_cpu(261, 1_030, 18);
    check_sizes_on_cpu(261, 18, 1_030);
}

#[test]
fn the_three_products_match_f64_where_tiles_have_kernels_of_their_own() {
    // Rows of weights 4 KiB apart in bf16, and whole panels whose partial sums are kept between parts of the depth.
    for (t, i, o) in [(75, 2_048, 80), (75, 144, 1_100)] {
        check_sizes_on_cpu(t, i, o);
    }
}

/// Checks weight gradients on the CPU; every 997th element is compared.
fn check_weight_gradients(Sizes { t, i, o }: Sizes) {
    let (x, dy) = (numbers(t * i, 1), numbers(t * o, 3));
    for (ctx, w_type) in contexts().filter(|ctx| ctx.gpu().is_none()).flat_map(|ctx| FLOATS.map(|w| (ctx.clone(), w))) {
        let (xs, dys) = (tensor(&ctx, &[t, i], &x, DType::F32), tensor(&ctx, &[t, o], &dy, DType::F32));
        let mut grad = tensor(&ctx, &[o, i], &vec![f32::NAN; o * i], DType::F32);
        linear_backward_weight(&ctx, &dys, &xs, w_type, Write::Replace, &mut grad);
        assert!(grad.f32s().iter().all(|x| x.is_finite()), "elements that nobody wrote");
        for at in (0..o * i).step_by(997) {
            let term = |t: usize| rounded(dy[t * o + at / i], w_type) * rounded(x[t * i + at % i], w_type);
            let (exact, size) = (0..t).map(term).fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let y = grad.f32s()[at];
            let is_close = is_close(y, exact, size, t, DType::F32);
            let what = (t, i, o);
            assert!(is_close, "element {at} of {what:?}, w {w_type:?}, {:?} is {y}, exactly {exact}", kind(&ctx));
        }
    }
}

#[test]
fn gradients_that_are_written_past_the_caches_match_f64() {
    // 8 MiB and more, with rows that are whole cache lines and with others, of few tokens and of many.
    for (t, i, o) in [(20, 1_456, 1_448), (70, 1_456, 1_448), (70, 1_453, 1_448)] {
        check_weight_gradients(Sizes { t, i, o });
    }
}

#[test]
fn gradients_match_f64_where_panels_take_turns_with_rows_that_stay_packed() {
    // Sums too many for a cache on one thread and few enough on several; tokens in one long part and in several.
    for (t, i, o) in [(1_030, 1_100, 99), (4_130, 1_061, 104)] {
        check_weight_gradients(Sizes { t, i, o });
    }
}

#[test]
fn gradients_to_inputs_have_the_bits_of_those_of_a_wider_matrix() {
    // Matrices with whole vectors of columns are read in place and packed while rows are multiplied; others are
    // packed before.
    for (t, o, i) in [17, 23, 40, 300].into_iter().flat_map(|t| [(t, 33, 16), (t, 64, 48), (t, 258, 64), (t, 600, 528)])
    {
        let (dy, w) = (numbers(t * o, 1), numbers(o * i, 2));
        let wider: Vec<f32> = w.chunks_exact(i).flat_map(|row| [row, &[f32::NAN]].concat()).collect();
        for (ctx, w_type) in
            contexts().filter(|ctx| ctx.gpu().is_none()).flat_map(|ctx| FLOATS.map(|w| (ctx.clone(), w)))
        {
            let dys = tensor(&ctx, &[t, o], &dy, DType::F32);
            let gradient = |w: &[f32]| {
                linear_backward_input(&ctx, &dys, &tensor(&ctx, &[o, w.len() / o], w, w_type), DType::F32).to_f32_vec()
            };
            let expected = gradient(&wider).chunks_exact(i + 1).flat_map(|row| row[..i].to_vec()).collect::<Vec<_>>();
            let name = format!("{t} rows, depth {o}, {i} columns of {w_type:?}, {:?}", kind(&ctx));
            assert!(gradient(&w).iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        }
    }
}

/// Returns `values` as bf16 in memory that begins between two multiples of four, as a tensor of a mapped file may.
fn between_multiples_of_four(shape: &[usize], values: &[f32]) -> Tensor {
    let values: Vec<u8> = values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    let mut memory = vec![0; values.len() + 4];
    let start = (2 + 4 - memory.as_ptr().addr() % 4) % 4;
    memory[start..start + values.len()].copy_from_slice(&values);
    let owner: Bytes = Arc::new(memory);
    Tensor::from_foreign(owner, start..start + values.len(), shape, DType::BF16).unwrap()
}

#[test]
fn a_matrix_may_begin_at_any_even_address() {
    for (t, i, o) in [1, 5, 9, 17, 70].into_iter().flat_map(|t| [(t, 6, 5), (t, 34, 33), (t, 64, 80)]) {
        let (x, w) = (numbers(t * i, 1), numbers(o * i, 2));
        for ctx in contexts() {
            let (xs, ws) = (tensor(&ctx, &[t, i], &x, DType::BF16), tensor(&ctx, &[o, i], &w, DType::BF16));
            let expected = linear(&ctx, &xs, &ws, DType::F32);
            let (xs, ws) = (between_multiples_of_four(&[t, i], &x), between_multiples_of_four(&[o, i], &w));
            let mut bits = Some(expected.to_f32_vec());
            assert_same_bits("an odd address", &linear(&ctx, &xs, &ws, DType::F32), &mut bits);
        }
    }
}

#[test]
fn several_matrices_at_once_give_what_each_gives_alone() {
    let all = contexts().flat_map(|ctx| [1, 5, 17, 40, 64, 65].map(|rows| (ctx.clone(), rows)));
    // An emulated GPU takes long: it gets one number of rows for each of its kernels.
    for (ctx, rows) in all.filter(|(ctx, rows)| ctx.gpu().is_none() || [1, 5, 17, 65].contains(rows)) {
        let x = tensor(&ctx, &[rows, 96], &numbers(rows * 96, 1), DType::F32);
        let w = |rows: usize, seed| tensor(&ctx, &[rows, 96], &numbers(rows * 96, seed), DType::F32);
        let (a, b) = (w(50, 2), w(7, 3));
        let bf16 = [&a, &b].map(|w| crate::elementwise::cast(&ctx, w, DType::BF16));
        let blocks = [&a, &b].map(|w| quantized::quantize(&ctx, w, DType::Q4));
        let of_one_type = [[&a, &b, &a], [&bf16[1], &bf16[0], &bf16[1]], [&blocks[0], &blocks[1], &blocks[1]]];
        let of_several = [[&bf16[0], &bf16[1], &b], [&blocks[0], &blocks[1], &bf16[1]], [&a, &blocks[0], &a]];
        for ws in of_one_type.into_iter().chain(of_several) {
            for out in FLOATS {
                for (y, w) in linear_each(&ctx, &x, ws, out).iter().zip(ws) {
                    let alone = linear(&ctx, &x, w, out).to_f32_vec();
                    assert_eq!(y.to_f32_vec(), alone, "{rows} rows, {:?}, {:?}", w.dtype(), ctx.isa());
                }
            }
        }
    }
}

#[test]
fn a_product_may_come_on_top_of_a_base() {
    for (ctx, (t, i, o)) in contexts().flat_map(|ctx| {
        [(1, 40, 9), (5, 33, 3), (33, 296, 50), (130, 64, 264), (180, 32, 32)].map(|s| (ctx.clone(), s))
    }) {
        let base = tensor(&ctx, &[t, o], &numbers(t * o, 3), DType::F32);
        for dtype in FLOATS {
            let x = tensor(&ctx, &[t, i], &numbers(t * i, 1), dtype);
            let w = tensor(&ctx, &[o, i], &numbers(o * i, 2), dtype);
            let (y, sums) = (linear_onto(&ctx, &x, &w, &base), linear(&ctx, &x, &w, DType::F32));
            let sums = sums.f32s().iter().zip(base.f32s()).map(|(sum, base)| sum + base);
            assert!(y.f32s().iter().copied().eq(sums), "{t} x {i} x {o}, {dtype:?}, {}", ctx.describe());
            let dy = tensor(&ctx, &[t, o], &numbers(t * o, 4), dtype);
            let base = tensor(&ctx, &[t, i], &numbers(t * i, 5), DType::F32);
            let sums = linear_backward_input(&ctx, &dy, &w, DType::F32);
            let sums = sums.f32s().iter().zip(base.f32s()).map(|(sum, base)| sum + base);
            let dx = linear_backward_input_onto(&ctx, &dy, &w, &base);
            assert!(dx.f32s().iter().copied().eq(sums), "backward {t} x {i} x {o}, {dtype:?}, {}", ctx.describe());
        }
    }
}

#[test]
fn a_library_takes_plain_products_of_more_than_some_rows() {
    if std::env::var_os("MOEWORKS_NO_EMULATION").is_some() {
        return eprintln!("SKIPPED: products by a library: MOEWORKS_NO_EMULATION is set");
    }
    for is_hopper in [false, true] {
        let emulation = Emulation { is_hopper, has_library: true, ..Emulation::default() };
        let gpu = match Gpu::emulated(emulation, &GpuOptions::for_tests()) {
            Err(GpuError::NoEmulation { reason }) => return eprintln!("SKIPPED: products by a library: {reason}"),
            gpu => gpu.unwrap_or_else(|error| panic!("{error}")),
        };
        let ctx = Context::cpu(1).with_gpu(gpu.clone());
        for (t, i, o) in [(65, 64, 72), (130, 8, 264), (200, 40, 16), (72, 128, 8)] {
            let before = gpu.traffic();
            let s = Sizes { t, i, o };
            check_on(std::slice::from_ref(&ctx), s, &numbers(t * i, 1), &numbers(o * i, 2), &numbers(t * o, 3));
            // For two types of x: each product of bf16 weights with results of two types, and weight gradients,
            // replaced and added.
            let taken = gpu.traffic().since(&before).by_library;
            assert!(taken >= 6, "{s:?}: {taken} products by the library");
            let before = gpu.traffic();
            let [x, w] = [(t * i, [t, i]), (o * i, [o, i])]
                .map(|(len, shape)| tensor(&ctx, &shape, &numbers(len, 1), DType::BF16));
            let base = tensor(&ctx, &[t, o], &numbers(t * o, 3), DType::F32);
            let y = linear_onto(&ctx, &x, &w, &base);
            let sums = linear(&ctx, &x, &w, DType::F32);
            let sums = sums.f32s().iter().zip(base.f32s()).map(|(sum, base)| sum + base);
            assert!(y.f32s().iter().copied().eq(sums), "{s:?}: on top of a base");
            assert_eq!(gpu.traffic().since(&before).by_library, 2, "{s:?}");
            let in_step = ctx.capture_replay(|| linear(&ctx, &x, &w, DType::F32));
            assert_eq!(
                (in_step.len(), gpu.traffic().since(&before).by_library),
                (t * o, 2),
                "{s:?}: a step is of kernels"
            );
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_sums_they_belong_to_and_no_other() {
    // The second sizes are products that AMX takes as bf16x3.
    for s @ Sizes { t, i, o } in [Sizes { t: 19, i: 37, o: 53 }, Sizes { t: 101, i: 137, o: 153 }] {
        let (mut x, mut w, mut dy) = (numbers(t * i, 1), numbers(o * i, 2), numbers(t * o, 3));
        // The last column is half of an incomplete pair of bf16.
        (x[i - 1], x[8 * i - 1], x[3 * i]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        (w[o * i - 1], w[5 * i]) = (f32::INFINITY, f32::NAN);
        (dy[o - 1], dy[19 * o - 1]) = (f32::NAN, f32::INFINITY);
        check(s, &x, &w, &dy);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_three_products_match_f64_at_random_sizes(t in 0_usize..70, i in 0_usize..70, o in 0_usize..120) {
        check_sizes(t, i, o);
    }
}
