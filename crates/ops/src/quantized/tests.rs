use std::sync::Arc;

use moeworks_tensor::{Bytes, Device, F8Block, Mxfp4Block, Place, Q4Block, Q8Block, bf16, f8_value, f16};
use proptest::prelude::*;

use super::block::FromNumbers;
use super::kernel::Kernel;
use super::layouts::Block;
use super::*;
use crate::Activation;
#[cfg(target_arch = "x86_64")]
use crate::Isa;
use crate::embedding::embedding;
use crate::experts::{ExpertRows, ExpertWeights, experts_forward};
#[cfg(target_arch = "x86_64")]
use crate::gemm::Compute;
use crate::gemm::store::Store;
use crate::linear::{Write, linear};
use crate::parallel::Lent;
use crate::test_data::{contexts, kind, kinds, numbers, tensor};

/// The types to which numbers can be quantized.
const TYPES: [DType; 2] = [DType::Q8, DType::Q4];

/// The block types that only files have, with the place of an f16 in a block.
const FOREIGN: [(DType, &[usize]); 11] = [
    (DType::Q4_1, &[0, 2]),
    (DType::Q5_0, &[0]),
    (DType::Q5_1, &[0, 2]),
    (DType::Q2K, &[80, 82]),
    (DType::Q3K, &[108]),
    (DType::Q4K, &[0, 2]),
    (DType::Q5K, &[0, 2]),
    (DType::Q6K, &[208]),
    (DType::Iq4Nl, &[0]),
    (DType::Mxfp4, &[]),
    (DType::F8, &[]),
];

fn all_types() -> impl Iterator<Item = DType> {
    TYPES.into_iter().chain(FOREIGN.map(|(dtype, _)| dtype))
}

/// Returns a matrix in blocks: of random numbers, or for types of files of random bytes with scales of either sign.
fn blocks(ctx: &Context, shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let Some((_, halves)) = FOREIGN.iter().find(|(foreign, _)| *foreign == dtype) else {
        return quantize(ctx, &tensor(ctx, shape, &numbers(shape.iter().product(), seed), DType::F32), dtype);
    };
    let mut y = ctx.empty(shape, dtype);
    let random = numbers(y.num_bytes(), seed);
    for (block, random) in y.bytes_mut().chunks_exact_mut(dtype.size()).zip(random.chunks_exact(dtype.size())) {
        block.iter_mut().zip(random).for_each(|(byte, x)| *byte = (x.abs() * 1e6) as u32 as u8);
        if dtype == DType::Mxfp4 {
            block[0] = 110 + block[0] % 16;
        }
        if dtype == DType::F8 {
            block[..4].copy_from_slice(&(0.1 * random[0]).to_le_bytes());
            // NaN is tested elsewhere.
            block[4..].iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte = 0);
        }
        for &at in *halves {
            block[at..at + 2].copy_from_slice(&moeworks_tensor::f16::from_f32(0.1 * random[at]).to_le_bytes());
        }
    }
    y
}

/// Returns the same matrix with its scales split off and space between its rows; none for a type that keeps its
/// scales with its numbers.
fn parted(ctx: &Context, blocks: &Tensor) -> Option<Tensor> {
    const GAP: usize = 5;
    let (mut numbers, mut scales) = (vec![0xa5; 3], vec![0x5a; 1]);
    let mut steps = [0; 2];
    for row in 0..blocks.rows() {
        let starts = [numbers.len(), scales.len()];
        let blocks_per_row = blocks.cols() / blocks.dtype().block_len();
        let range = row * blocks_per_row..(row + 1) * blocks_per_row;
        match blocks.dtype() {
            DType::Mxfp4 => blocks.slice::<Mxfp4Block>()[range].iter().for_each(|block| {
                let (values, scale) = block.parted();
                numbers.extend(values);
                scales.push(scale);
            }),
            DType::F8 => blocks.slice::<F8Block>()[range].iter().for_each(|block| {
                numbers.extend(block.values.as_flattened());
                scales.extend(block.scale);
            }),
            _ => return None,
        }
        numbers.extend([0x77; GAP]);
        steps = [numbers.len() - starts[0], scales.len() - starts[1]];
    }
    let place = |bytes: Vec<u8>, start, step| Place { owner: Arc::new(bytes), start, step, rows_each: 1 };
    let places = [place(numbers, 3, steps[0]), place(scales, 1, steps[1])];
    Some(Tensor::with_split_scales(ctx.pool(), blocks.shape(), blocks.dtype(), places).expect("rows that are there"))
}

#[test]
fn blocks_are_those_of_gguf() {
    // Scale 0.5 is 0x3800 as an f16.
    let block = Q8Block { scale: [0x00, 0x38], values: std::array::from_fn(|i| i as i8 - 16) };
    assert_eq!(block.ints(0).map(|n| f32::from(n) * block.scale()), std::array::from_fn(|i| (i as f32 - 16.0) * 0.5));
    // The first 16 weights are the low four bits.
    let block = Q4Block { scale: [0x00, 0x38], values: std::array::from_fn(|i| i as u8 | ((15 - i as u8) << 4)) };
    let exact = |i: usize| if i < 16 { i as i8 - 8 } else { 7 - (i as i8 - 16) };
    assert_eq!(block.ints(0), std::array::from_fn(exact));
}

#[test]
fn floats_of_few_bits_have_the_values_of_their_standards() {
    // The low half comes first, times a power of two.
    let mut values = [0; BLOCK_LEN / 2];
    (values[0], values[8], values[15]) = (0x7a, 0x01, 0x90);
    let mut numbers = [9.0; BLOCK_LEN];
    decode(DType::Mxfp4, Mxfp4Block::joined(&values, &[128]).bytes(), &mut numbers);
    assert_eq!((numbers[0], numbers[1], numbers[2]), (-2.0, 12.0, 0.0));
    assert_eq!((numbers[16], numbers[17], numbers[31]), (1.0, 0.0, -1.0));

    let mut values = [0; 128];
    (values[0], values[1], values[64], values[127]) = (0x38, 0xb9, 0x01, 0x7e);
    let mut numbers = [9.0; 128];
    decode(DType::F8, bytemuck::bytes_of(&F8Block::joined(&values, &2.0_f32.to_le_bytes())), &mut numbers);
    assert_eq!((numbers[0], numbers[1], numbers[2]), (2.0, -2.25, 0.0));
    assert_eq!((numbers[64], numbers[127]), (2.0_f32.powi(-8), 896.0));
    for half in [0, 128_u8] {
        let values: [u8; 128] = std::array::from_fn(|i| half + i as u8);
        decode(DType::F8, bytemuck::bytes_of(&F8Block::joined(&values, &1.0_f32.to_le_bytes())), &mut numbers);
        for (number, byte) in numbers.into_iter().zip(values) {
            let expected = f8_value(byte);
            assert!(number.to_bits() == expected.to_bits() || number.is_nan() && expected.is_nan(), "byte {byte}");
        }
    }
}

/// Returns the largest error of a block's numbers, and its bound: `steps` scales, and the share of the scale's
/// rounding to f16 (whose subnormals are multiples of 2^-24) for the largest integer.
fn error_and_bound<B: FromNumbers>(x: &[f32; BLOCK_LEN], steps: f32, largest: f32) -> (f32, f32) {
    let block = B::quantize(x);
    let (ints, scale) = (block.ints(0), Block::scale(&block, 0, &[]).scale);
    let error = x.iter().zip(ints).map(|(x, n)| (x - scale * f32::from(n)).abs()).fold(0.0, f32::max);
    let rounding = scale.abs() * 2.0_f32.powi(-11) + 2.0_f32.powi(-25);
    (error, 1.001 * (steps * scale.abs() + largest * rounding))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_weight_is_off_by_no_more_than_documented(seed in 0_u64..10_000, exponent in -8_i32..8) {
        let x: [f32; BLOCK_LEN] = numbers(BLOCK_LEN, seed).try_into().expect("a block");
        let x = x.map(|x| x * x * x * 2.0_f32.powi(exponent));
        let (error, bound) = error_and_bound::<Q8Block>(&x, 0.5, 127.0);
        prop_assert!(error <= bound, "8 bits: {error}, at most {bound}");
        // With the smallest tried scale the largest magnitude becomes 8.4, and a number of the other sign becomes 7.
        let (error, bound) = error_and_bound::<Q4Block>(&x, 1.4, 8.0);
        prop_assert!(error <= bound, "4 bits: {error}, at most {bound}");
    }

    #[test]
    fn the_scale_of_four_bits_is_the_best_of_those_that_are_tried(seed in 0_u64..10_000, exponent in -12_i32..12) {
        let x: [f32; BLOCK_LEN] = numbers(BLOCK_LEN, seed).try_into().expect("a block");
        let x = x.map(|x| x * x.abs() * 2.0_f32.powi(exponent));
        let squares = |scale: f32, numbers: [f32; BLOCK_LEN]| -> f64 {
            x.iter().zip(numbers).map(|(&x, n)| (f64::from(x) - f64::from(scale) * f64::from(n)).powi(2)).sum()
        };
        let largest = x.iter().copied().reduce(|a, b| if b.abs() > a.abs() { b } else { a }).expect("a number");
        let tried = (-4..=8).map(|step| f16::from_f32(largest / (-8.0 + 0.1 * step as f32)).to_f32());
        let best = tried.map(|scale| squares(scale, x.map(|x| (x / scale).round_ties_even().clamp(-8.0, 7.0))));
        let best = best.reduce(f64::min).expect("scales");
        for ctx in contexts() {
            let block = quantize(&ctx, &tensor(&ctx, &[1, BLOCK_LEN], &x, DType::F32), DType::Q4);
            let block: Q4Block = bytemuck::pod_read_unaligned(block.bytes());
            let found = squares(block.scale(), block.ints(0).map(f32::from));
            prop_assert!(found <= best * 1.0001, "{found} instead of {best} on {:?}", ctx.isa());
        }
    }
}

#[test]
fn zeros_stay_zeros_and_what_is_not_finite_shows() {
    let ctx = Context::cpu(1);
    for dtype in TYPES {
        let mut x = numbers(96, 1);
        x[..32].fill(0.0);
        x[70] = f32::INFINITY;
        let y = dequantize(&ctx, &quantize(&ctx, &tensor(&ctx, &[96], &x, DType::F32), dtype), DType::F32);
        assert!(y.f32s()[..32].iter().all(|&y| y == 0.0));
        assert!(y.f32s()[32..64].iter().all(|y| y.is_finite()));
        assert!(y.f32s()[64..].iter().all(|y| y.is_nan()), "{dtype:?}");
    }
}

/// A product of quantized weights.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    depth: usize,
    columns: usize,
    dtype: DType,
}

impl Case {
    /// Rounds the depth up to one that rows of the type can have.
    fn new(rows: usize, depth: usize, columns: usize, dtype: DType) -> Self {
        Self { rows, depth: depth.next_multiple_of(dtype.block_len()), columns, dtype }
    }

    fn x(&self) -> Vec<f32> {
        numbers(self.rows * self.depth, 1)
    }

    /// Holds `y` to the documented bound around the f64 sums of the numbers that the blocks stand for.
    fn assert_close(&self, what: &str, y: &[f32], x: &[f32], w: &[f32]) {
        let Self { depth, columns, .. } = *self;
        for (i, &y) in y.iter().enumerate() {
            let (x, w) = (&x[i / columns * depth..][..depth], &w[i % columns * depth..][..depth]);
            let (mut exact, mut bound) = (0.0, 1e-30);
            for (x, w) in x.chunks(BLOCK_LEN).zip(w.chunks(BLOCK_LEN)) {
                let scale = f64::from(x.iter().fold(0.0_f32, |a, x| a.max(x.abs()))) / 127.0;
                for (&x, &w) in x.iter().zip(w) {
                    let (x, w) = (f64::from(x), f64::from(w));
                    exact += x * w;
                    let is_few = self.rows <= 16;
                    let off = if is_few { w.abs() * scale * 0.5001 } else { (x * w).abs() * 2.01 / 512.0 };
                    bound += off + (x * w).abs() * 1e-5;
                }
            }
            let error = (f64::from(y) - exact).abs();
            assert!(error <= bound, "{what}, {self:?}: element {i} is {y}, exactly {exact}, bound {bound}");
        }
    }
}

/// Checks a case on every instruction set with one to three threads and with every kernel of each, also with split
/// scales.
fn check(case: Case) {
    let Case { rows, depth, columns, dtype } = case;
    let x = case.x();
    let mut last: Option<(_, Vec<Tensor>)> = None;
    for ctx in contexts() {
        let x_tensor = tensor(&ctx, &[rows, depth], &x, DType::F32);
        let weights = blocks(&ctx, &[columns, depth], dtype, 2);
        let exact = dequantize(&ctx, &weights, DType::F32);
        let mut ys = Vec::new();
        for weights in parted(&ctx, &weights).into_iter().chain([weights]) {
            assert_eq!(dequantize(&ctx, &weights, DType::F32).bytes(), exact.bytes(), "{case:?}");
            let y = linear(&ctx, &x_tensor, &weights, DType::F32);
            case.assert_close(&format!("{:?}", ctx.isa()), y.f32s(), &x, exact.f32s());
            every_kernel(&ctx, case, &x_tensor, &weights, exact.f32s());
            ys.push(y);
        }
        if let Some((last_kind, last)) = &last
            && *last_kind == kind(&ctx)
        {
            for (last, y) in last.iter().zip(&ys) {
                assert_eq!(last.bytes(), y.bytes(), "{case:?}: bits depend on the number of threads");
            }
        }
        last = Some((kind(&ctx), ys));
    }
}

fn every_kernel(ctx: &Context, case: Case, x: &Tensor, weights: &Tensor, w: &[f32]) {
    let Case { rows, columns, dtype, .. } = case;
    if rows > 16 {
        return;
    }
    for kernel in Kernel::available(ctx.isa(), dtype) {
        let mut y = ctx.empty(&[rows, columns], DType::F32);
        y.f32s_mut().fill(f32::NAN);
        let halves = matrix(weights, 0, columns, false);
        let groups = &[Group { indices: None, first: 0, rows, weights: halves, columns }];
        let product = Product { a: x, weights, groups, is_paired: false };
        let to = Lent::new(y.f32s_mut());
        let store = Store { to, offsets: &[0], stride: columns, write: Write::Replace };
        product::run_few(ctx, &product, kernel, &store);
        case.assert_close(&format!("{kernel:?}"), y.f32s(), x.f32s(), w);
    }
}

#[test]
fn every_number_of_rows_is_within_the_bound() {
    for rows in 1..=18 {
        for dtype in all_types() {
            check(Case::new(rows, 96, 53, dtype));
        }
    }
}

#[test]
fn odd_and_even_numbers_of_blocks_and_partial_panels_are_within_the_bound() {
    for (depth, columns) in [(32, 1), (64, 48), (96, 7), (160, 49), (544, 97), (1024, 12)] {
        for dtype in all_types() {
            for rows in [1, 5, 40] {
                check(Case::new(rows, depth, columns, dtype));
            }
        }
    }
}

#[test]
fn many_columns_are_within_the_bound() {
    // Half blocks of a GPU take few rows.
    for (rows, dtype) in [1, 7].into_iter().flat_map(|rows| all_types().map(move |dtype| (rows, dtype))) {
        check(Case::new(rows, 64, 4129, dtype));
    }
}

#[test]
fn blocks_of_threads_of_every_layout_are_within_the_bound() {
    // An emulated GPU has three multiprocessors: blocks of a tile with four chunks in flight, and of eight, four and
    // two with all rows.
    for (rows, depth, columns) in [(1, 9056, 18), (20, 288, 264), (20, 288, 100), (9, 160, 40)] {
        TYPES.into_iter().for_each(|dtype| check(Case::new(rows, depth, columns, dtype)));
    }
    all_types().for_each(|dtype| check(Case::new(70, 160, 40, dtype)));
}

#[test]
fn sums_over_a_long_depth_are_within_the_bound() {
    // A GPU's warps copy chunks in turn to the places of earlier ones.
    for (rows, dtype) in [1, 13, 31].into_iter().flat_map(|rows| all_types().map(move |dtype| (rows, dtype))) {
        check(Case::new(rows, 4640, 18, dtype));
    }
}

#[test]
fn weights_at_any_address_are_read_right() {
    let ctx = Context::cpu(2);
    for dtype in all_types() {
        let case = Case::new(3, 96, 50, dtype);
        let (x, depth) = (case.x(), case.depth);
        let weights = blocks(&ctx, &[50, depth], dtype, 2);
        for shift in 0..5 {
            let mut bytes = vec![0; shift];
            bytes.extend_from_slice(weights.bytes());
            let (owner, end): (Bytes, usize) = (Arc::new(bytes.clone()), bytes.len());
            let foreign = Tensor::from_foreign(owner, shift..end, &[50, depth], dtype).expect("bytes of any alignment");
            let y = linear(&ctx, &tensor(&ctx, &[3, depth], &x, DType::F32), &foreign, DType::F32);
            case.assert_close("shifted", y.f32s(), &x, dequantize(&ctx, &weights, DType::F32).f32s());
        }
    }
}

#[test]
fn a_float_of_eight_bits_that_is_nan_makes_its_column_nan_and_no_other() {
    for byte in [0x7f, 0xff] {
        for ctx in contexts() {
            let mut weights = blocks(&ctx, &[50, 256], DType::F8, 2);
            let row_bytes = weights.num_bytes() / 50;
            weights.bytes_mut()[7 * row_bytes + 4 + 77] = byte;
            for rows in [1, 3, 40] {
                let x = tensor(&ctx, &[rows, 256], &numbers(rows * 256, 1), DType::F32);
                let y = linear(&ctx, &x, &weights, DType::F32);
                for (at, y) in y.f32s().iter().enumerate() {
                    assert_eq!(y.is_nan(), at % 50 == 7, "{byte:#x}, {rows} rows, {at}");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_make_their_row_or_column_nan_and_no_other() {
    for dtype in TYPES {
        let (mut x, mut w) = (numbers(3 * 96, 1), numbers(50 * 96, 2));
        (x[95], x[96 + 3]) = (f32::NAN, f32::INFINITY);
        w[7 * 96 + 64] = f32::NAN;
        for ctx in contexts() {
            let weights = quantize(&ctx, &tensor(&ctx, &[50, 96], &w, DType::F32), dtype);
            let y = linear(&ctx, &tensor(&ctx, &[3, 96], &x, DType::F32), &weights, DType::F32);
            // A GPU does not quantize activations, so infinity stays infinite.
            let is_bad =
                |i: usize, y: f32| if ctx.device() == Device::Cpu || i < 50 { y.is_nan() } else { !y.is_finite() };
            for (i, y) in y.f32s().iter().enumerate() {
                assert_eq!(is_bad(i, *y), i / 50 < 2 || i % 50 == 7, "element {i}, {dtype:?}, {}", ctx.describe());
            }
        }
    }
}

/// Returns the layer's output with quantized experts of sizes D and F, and with the same weights as floats.
fn experts(ctx: &Context, dtypes: [DType; 2], d: usize, f: usize, num_tokens: usize) -> [Tensor; 2] {
    let e = 3;
    let x = tensor(ctx, &[num_tokens, d], &numbers(num_tokens * d, 1), DType::F32);
    let [gate_up, down] = dtypes;
    let quantized = [([e, 2 * f, d], 2, gate_up), ([e, d, f], 3, down)]
        .map(|(shape, seed, dtype)| blocks(ctx, &shape, dtype, seed));
    let floats = [&quantized[0], &quantized[1]].map(|w| dequantize(ctx, w, DType::F32));
    // Expert 0 gets every other token, expert 2 the others, expert 1 none.
    let half = num_tokens.div_ceil(2) as u32;
    let tokens: Vec<u32> = (0..num_tokens as u32).step_by(2).chain((1..num_tokens as u32).step_by(2)).collect();
    let mut token_rows = vec![0; num_tokens];
    tokens.iter().zip(0..).for_each(|(&token, row)| token_rows[token as usize] = row);
    let weights = vec![0.5; num_tokens];
    let offsets = [0, half, half, num_tokens as u32];
    let rows = ExpertRows::new(&offsets, &tokens, &weights, &token_rows, 1);
    [&quantized, &floats].map(|[gate_up, down]| {
        let weights = ExpertWeights { gate_up, down, activation: Activation::SwiGlu };
        experts_forward(ctx, &x, weights, rows).0
    })
}

fn assert_experts_are_close(ctx: &Context, dtypes: [DType; 2], d: usize, f: usize, num_tokens: usize, most: f32) {
    let [y, exact] = experts(ctx, dtypes, d, f, num_tokens);
    let size: f32 = exact.f32s().iter().map(|x| x * x).sum();
    let error: f32 = exact.f32s().iter().zip(y.f32s()).map(|(a, b)| (a - b) * (a - b)).sum();
    let off = (error / size).sqrt();
    assert!(off <= most, "{dtypes:?}, {num_tokens} tokens, {}: {off}", ctx.describe());
}

#[test]
fn quantized_experts_give_nearly_what_their_weights_give_as_floats() {
    for ctx in contexts() {
        for dtypes in [[DType::Q8; 2], [DType::Q4; 2], [DType::Q4, DType::Q8]] {
            // 33: one group of few rows, one of many. 520: more rows than are multiplied with blocks in place.
            for num_tokens in [1, 9, 100, 33, 520] {
                assert_experts_are_close(&ctx, dtypes, 64, 96, num_tokens, 0.014);
            }
        }
    }
}

#[test]
fn experts_in_blocks_of_files_give_nearly_what_their_weights_give_as_floats() {
    for ctx in kinds() {
        for (dtype, _) in FOREIGN {
            for num_tokens in [1, 50] {
                // Random bytes are numbers whose mean is not zero, unlike their sums.
                assert_experts_are_close(&ctx, [dtype; 2], 512, 256, num_tokens, 0.04);
            }
        }
    }
}

#[test]
fn one_token_gets_nearly_the_sum_of_its_experts() {
    let (d, f, e) = (256, 768, 5);
    // Experts 0, 2 and 4 have the tensor's rows.
    let (offsets, tokens, weights, token_rows) = ([0, 1, 1, 2, 2, 3], [0; 3], [0.5, 0.25, 1.5], [2, 0, 1]);
    for (ctx, dtype) in kinds().flat_map(|ctx| all_types().map(move |dtype| (ctx.clone(), dtype))) {
        let x = tensor(&ctx, &[1, d], &numbers(d, 1), DType::F32);
        let quantized = [blocks(&ctx, &[e, 2 * f, d], dtype, 2), blocks(&ctx, &[e, d, f], dtype, 3)];
        let floats = [&quantized[0], &quantized[1]].map(|w| dequantize(&ctx, w, DType::F32));
        let [y, exact] = [&quantized, &floats].map(|[gate_up, down]| {
            let experts = ExpertWeights { gate_up, down, activation: Activation::SwiGlu };
            experts_forward(&ctx, &x, experts, ExpertRows::new(&offsets, &tokens, &weights, &token_rows, 3)).0
        });
        let size: f32 = exact.f32s().iter().map(|x| x * x).sum();
        let error: f32 = exact.f32s().iter().zip(y.f32s()).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(error <= 2e-3 * size, "{dtype:?}, {}: {}", ctx.describe(), (error / size).sqrt());
    }
}

#[test]
fn rows_of_a_table_in_blocks_are_the_numbers_that_the_blocks_stand_for() {
    let ids = [3, 0, 4, 4, 1];
    for dtype in all_types() {
        let cpu = Context::cpu(1);
        let table = blocks(&cpu, &[5, 512], dtype, 9);
        let exact = dequantize(&cpu, &table, DType::F32);
        for ctx in kinds() {
            let y = embedding(&ctx, &ids, &table, DType::F32);
            for (y, id) in y.f32s().chunks(512).zip(ids) {
                let expected = &exact.f32s()[id as usize * 512..][..512];
                let is_close = |(y, x): (&f32, &f32)| (y - x).abs() <= 1e-6 * x.abs().max(1e-30);
                assert!(y.iter().zip(expected).all(is_close), "{dtype:?}, row {id}, {}", ctx.describe());
            }
        }
    }
}

#[test]
fn bf16_numbers_are_quantized_like_the_floats_they_are() {
    let ctx = Context::cpu(1);
    let x = numbers(64, 1).iter().map(|&x| bf16::from_f32(x).to_f32()).collect::<Vec<_>>();
    for dtype in TYPES {
        let [a, b] = [DType::F32, DType::BF16].map(|float| quantize(&ctx, &tensor(&ctx, &[2, 32], &x, float), dtype));
        assert_eq!(a.bytes(), b.bytes());
    }
}

#[test]
fn blocks_become_the_bf16_numbers_nearest_to_what_they_stand_for() {
    for ctx in contexts() {
        for dtype in all_types() {
            for num_blocks in [1_usize, 2, 7, 1025] {
                let (rows, depth) = (num_blocks.div_ceil(7), num_blocks.min(7) * dtype.block_len());
                let blocks = blocks(&ctx, &[rows, depth], dtype, 3);
                let exact = dequantize(&ctx, &blocks, DType::F32);
                let nearest: Vec<bf16> = exact.f32s().iter().map(|&x| bf16::from_f32(x)).collect();
                for blocks in parted(&ctx, &blocks).into_iter().chain([blocks]) {
                    let mut found = vec![bf16::from_f32(7.0); exact.len()];
                    super::dequantize::to_bf16(&ctx, Weights::from_tensor(&blocks), rows, depth, &mut found);
                    assert!(found == nearest, "{dtype:?}, {num_blocks} blocks, {:?}", ctx.isa());
                    let found = dequantize(&ctx, &blocks, DType::BF16);
                    assert!(found.slice::<bf16>() == nearest, "{dtype:?}, {num_blocks} blocks, {}", ctx.describe());
                }
            }
        }
    }
}

/// Converts a matrix in blocks to f32 units, each row from an element on, as products do that convert rows by
/// themselves.
#[cfg(target_arch = "x86_64")]
fn as_units(ctx: &Context, blocks: &Tensor, start: usize) -> Vec<f32> {
    let (rows, depth) = (blocks.rows(), blocks.cols());
    let source = Blocks::new(ctx.isa(), [Weights::from_tensor(blocks); 2], rows, depth);
    let mut found = vec![0; rows * (depth - start)];
    for (row, to) in found.chunks_exact_mut(depth - start).enumerate() {
        source.to_units(row, start, Compute::F32, to);
    }
    found.into_iter().map(f32::from_bits).collect()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn blocks_in_products_of_f32_become_the_same_bf16_numbers() {
    const START: usize = 256;
    for ctx in contexts().filter(|ctx| ctx.isa() >= Isa::Avx512) {
        for dtype in all_types() {
            for depth in [512, 768] {
                let blocks = blocks(&ctx, &[3, depth], dtype, 5);
                let exact = dequantize(&ctx, &blocks, DType::F32);
                let rows = exact.f32s().chunks_exact(depth);
                let nearest = rows.flat_map(|row| row[START..].iter().map(|&x| bf16::from_f32(x).to_f32()));
                let nearest: Vec<f32> = nearest.collect();
                for blocks in parted(&ctx, &blocks).into_iter().chain([blocks]) {
                    assert!(as_units(&ctx, &blocks, START) == nearest, "{dtype:?}, {depth}, {:?}", ctx.isa());
                }
            }
        }
    }
}

#[test]
fn a_scale_that_is_nan_makes_its_whole_block_nan_when_it_is_turned_into_bf16() {
    for ctx in contexts() {
        for dtype in [DType::Q8, DType::Q4, DType::Iq4Nl, DType::Q5_0] {
            let mut blocks = blocks(&ctx, &[1, 256], dtype, 6);
            // Of all NaN payloads the one that rounding would carry into the sign.
            blocks.bytes_mut()[3 * dtype.size()..][..2].copy_from_slice(&0x7fff_u16.to_le_bytes());
            let is_right = |(i, is_nan): (usize, bool)| is_nan == (i / BLOCK_LEN == 3);
            let mut found = vec![bf16::from_f32(7.0); 256];
            super::dequantize::to_bf16(&ctx, Weights::from_tensor(&blocks), 1, 256, &mut found);
            assert!(found.iter().map(|x| x.is_nan()).enumerate().all(is_right), "{dtype:?} on {:?}", ctx.isa());
            #[cfg(target_arch = "x86_64")]
            if ctx.isa() >= Isa::Avx512 {
                let found = as_units(&ctx, &blocks, 0);
                assert!(found.iter().map(|x| x.is_nan()).enumerate().all(is_right), "{dtype:?} on {:?}", ctx.isa());
            }
        }
    }
}
