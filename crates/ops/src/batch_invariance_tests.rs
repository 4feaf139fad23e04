//! Batch invariance: each row of a forward pass has the same bits whatever the number of rows.

use moeworks_tensor::{DType, Tensor};

use crate::attention::{AttentionShape, attention};
use crate::elementwise::{cast, copy_rows};
use crate::linear::{linear, linear_backward_input};
use crate::test_data::{numbers, tensor};
use crate::{Context, Isa, quantized};

/// Numbers of rows on both sides of all bounds between kernels.
const COUNTS: [usize; 14] = [1, 2, 4, 5, 12, 13, 16, 17, 33, 96, 97, 160, 257, 300];
const MOST: usize = 300;

fn invariant_contexts() -> Vec<Context> {
    let contexts = Isa::available().into_iter().map(|isa| Context::cpu(2).with_isa(isa).with_batch_invariance(true));
    contexts.chain([Context::cpu(1).with_batch_invariance(true)]).collect()
}

/// Returns a tensor of numbers of some type, quantized or not.
fn weights(ctx: &Context, shape: &[usize], dtype: DType) -> Tensor {
    let values = numbers(shape.iter().product(), 2);
    if dtype.is_quantized() {
        return quantized::quantize(ctx, &tensor(ctx, shape, &values, DType::F32), dtype);
    }
    tensor(ctx, shape, &values, dtype)
}

/// Returns the last `count` rows.
fn last_rows(ctx: &Context, x: &Tensor, count: usize) -> Tensor {
    let mut rows = ctx.empty(&[count, x.cols()], x.dtype());
    copy_rows(ctx, x, x.rows() - count, &mut rows, 0, count);
    rows
}

/// Lists the numbers of rows for which the last rows differ in bits from those among all rows.
fn differing_counts(ctx: &Context, x: &Tensor, of_rows: impl Fn(&Tensor) -> Tensor) -> Vec<usize> {
    let bits = |y: &Tensor| cast(ctx, y, DType::F32).f32s().iter().map(|y| y.to_bits()).collect::<Vec<_>>();
    let all = of_rows(x);
    let differs = |&count: &usize| bits(&of_rows(&last_rows(ctx, x, count))) != bits(&last_rows(ctx, &all, count));
    COUNTS.into_iter().filter(differs).collect()
}

#[test]
fn a_row_of_a_linear_layer_has_the_same_bits_among_any_number_of_rows() {
    for ctx in invariant_contexts() {
        // Weights that fit a cache, weights that come from memory, and a depth that is no whole number of units.
        for (depth, columns) in [(64_usize, 40), (1024, 520), (96, 3100), (35, 50)] {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::Q8, DType::Q4] {
                if dtype.is_quantized() && !depth.is_multiple_of(32) {
                    continue;
                }
                for x_type in [DType::F32, DType::BF16] {
                    let x = tensor(&ctx, &[MOST, depth], &numbers(MOST * depth, 1), x_type);
                    let w = weights(&ctx, &[columns, depth], dtype);
                    let differing = differing_counts(&ctx, &x, |x| linear(&ctx, x, &w, DType::F32));
                    assert!(
                        differing.is_empty(),
                        "{:?} {dtype:?} of {x_type:?} {depth} x {columns}: {differing:?}",
                        ctx.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_of_an_input_gradient_has_the_same_bits_among_any_number_of_rows() {
    for ctx in invariant_contexts() {
        for dtype in [DType::F32, DType::BF16] {
            let (dy, w) =
                (tensor(&ctx, &[MOST, 520], &numbers(MOST * 520, 1), dtype), weights(&ctx, &[520, 1024], dtype));
            let differing = differing_counts(&ctx, &dy, |dy| linear_backward_input(&ctx, dy, &w, DType::F32));
            assert!(differing.is_empty(), "{:?} {dtype:?}: {differing:?}", ctx.isa());
        }
    }
}

#[test]
fn without_the_mode_some_numbers_of_rows_have_other_bits() {
    let ctx = Context::cpu(2);
    let differs = |dtype| {
        let x = tensor(&ctx, &[MOST, 1024], &numbers(MOST * 1024, 1), DType::BF16);
        let w = weights(&ctx, &[520, 1024], dtype);
        !differing_counts(&ctx, &x, |x| linear(&ctx, x, &w, DType::F32)).is_empty()
    };
    assert!(differs(DType::BF16) && differs(DType::Q4), "the cases above would not notice");
}

/// Attends queries in pieces of these lengths, each with all keys up to its last.
fn attention_in_pieces(ctx: &Context, qkv: [&Tensor; 3], shape: &AttentionShape, pieces: &[usize]) -> Vec<u32> {
    let [q, k, v] = qkv;
    let mut bits = Vec::new();
    let mut start = 0;
    for &seq_len in pieces {
        let mut part = ctx.empty(&[seq_len, q.cols()], q.dtype());
        copy_rows(ctx, q, start, &mut part, 0, seq_len);
        start += seq_len;
        let shape = AttentionShape { seq_len, kv_len: start, ..*shape };
        let (o, _) = attention(ctx, &part, k, v, &shape);
        bits.extend(cast(ctx, &o, DType::F32).f32s().iter().map(|o| o.to_bits()));
    }
    bits
}

#[test]
fn a_query_finds_the_same_bits_alone_and_among_others() {
    const LEN: usize = 600;
    let pieces: [&[usize]; 3] = [&[1; LEN], &[7, 1, 64, 1, 300, 2, 1, 224], &[599, 1]];
    for ctx in invariant_contexts() {
        for (num_heads, num_kv_heads, head_dim, window) in [(4, 4, 32, None), (6, 2, 64, None), (4, 1, 16, Some(70))] {
            for dtype in [DType::F32, DType::BF16] {
                let draw = |heads: usize, seed| {
                    let width = heads * head_dim;
                    tensor(&ctx, &[LEN, width], &numbers(LEN * width, seed), dtype)
                };
                let [q, k, v] = [draw(num_heads, 1), draw(num_kv_heads, 2), draw(num_kv_heads, 3)];
                let shape = AttentionShape {
                    batch: 1,
                    seq_len: LEN,
                    kv_len: LEN,
                    kv_capacity: LEN,
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    value_dim: head_dim,
                    window,
                    scale: 1.5,
                };
                let all = attention_in_pieces(&ctx, [&q, &k, &v], &shape, &[LEN]);
                for pieces in pieces {
                    let found = attention_in_pieces(&ctx, [&q, &k, &v], &shape, pieces);
                    let num_differing = found.iter().zip(&all).filter(|(a, b)| a != b).count();
                    assert_eq!(num_differing, 0, "{:?} {dtype:?} {shape:?}: {} pieces", ctx.isa(), pieces.len());
                }
            }
        }
    }
}
