//! The fused operation on projections against the operations that it is made of, on the CPU.

use moeworks_ops::Context;
use moeworks_ops::attention::{AttentionInputs, AttentionShape, attention_with_sinks};
use moeworks_ops::elementwise::copy_rows_of_each;
use moeworks_ops::qkv_norm_rope_append::{Kept, Placing, qkv_norm_rope_append};
use moeworks_ops::rms_norm::rms_norm;
use moeworks_ops::rope::{RopeLayout, RopeTable, Rotation, default_frequencies, rope};
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_close, below, contexts, doubles, gpu_contexts, normal_tensor, rounding, tensor};

const EPS: f32 = 1e-5;

/// Heads of queries, heads of keys, elements of a head, of a value; how many of those before the rotated ones stay,
/// and pairs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: [usize; 2],
    width: usize,
    value: usize,
    start: usize,
    half: usize,
    is_interleaved: bool,
}

const WHOLE: Sizes = Sizes { heads: [4, 2], width: 16, value: 16, start: 0, half: 8, is_interleaved: false };
const PART: Sizes = Sizes { heads: [6, 3], width: 20, value: 12, start: 4, half: 5, is_interleaved: true };
const ODD: Sizes = Sizes { heads: [3, 1], width: 7, value: 5, start: 1, half: 3, is_interleaved: false };
const WIDE: Sizes = Sizes { heads: [40, 5], width: 64, value: 64, start: 0, half: 16, is_interleaved: false };

/// The extent of the norms: none, whole rows, or each head.
#[derive(Clone, Copy, Debug)]
enum Normed {
    Nothing,
    Rows,
    Heads,
}

/// The number of rows, and of the sequences that share them.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    num_sequences: usize,
}

fn check(name: &str, ctx: &Context, s: Sizes, normed: Normed, rows: Rows, dtype: DType) {
    let Rows { rows, num_sequences } = rows;
    let what = format!("{name}: {s:?}, {normed:?}, {rows} rows of {num_sequences}, {dtype:?}");
    let widths = [s.heads[0] * s.width, s.heads[1] * s.width, s.heads[1] * s.value];
    let layout = RopeLayout { head_dim: s.width, start: s.start, is_interleaved: s.is_interleaved };
    let table = RopeTable::with_frequencies(layout, &default_frequencies(2 * s.half, 1e4), 0.75, 500);
    let (held, capacity) = (3, 3 + rows / num_sequences + 2);
    let run = |ctx: &Context, at_once: bool| {
        let [q, k, v] = [0, 1, 2].map(|i| normal_tensor(ctx, i as u64, &[rows, widths[i]], dtype));
        let norm = |i: usize| match normed {
            Normed::Nothing => None,
            Normed::Rows => Some(normal_tensor(ctx, 10 + i as u64, &[widths[i]], DType::F32)),
            Normed::Heads => Some(normal_tensor(ctx, 10 + i as u64, &[s.width], dtype)),
        };
        let (norms, positions) = ([norm(0), norm(1)], below(1, rows, 500));
        let positions = Tensor::from_slice(ctx.pool(), &[rows], &positions);
        let kept = |i: usize| normal_tensor(ctx, 20 + i as u64, &[num_sequences * capacity, widths[i]], dtype);
        let (mut keys, mut values) = (kept(1), kept(2));
        let placing =
            Placing { norms: norms.each_ref().map(Option::as_ref), eps: EPS, table: &table, positions: &positions };
        let queries = if at_once {
            let mut kept = Kept { keys: &mut keys, values: &mut values, held, num_sequences };
            qkv_norm_rope_append(ctx, [q, k, v], &placing, &mut kept)
        } else {
            let [q, k] = [(q, &norms[0]), (k, &norms[1])].map(|(mut x, norm)| {
                if let Some(norm) = norm {
                    x = rms_norm(ctx, &x, norm, EPS, dtype).0;
                }
                rope(ctx, &mut x, &table, &positions, Rotation::Forward);
                x
            });
            copy_rows_of_each(ctx, &k, &mut keys, held, num_sequences);
            copy_rows_of_each(ctx, &v, &mut values, held, num_sequences);
            q
        };
        [queries, keys, values].map(|x| doubles(&x))
    };
    for (made, expected) in run(ctx, true).iter().zip(&run(&Context::cpu(1), false)) {
        // A number may be rounded to the next one before it is rotated with another.
        assert_close(&what, made, expected, 4e-6 + 2.0 * rounding(dtype));
    }
}

#[test]
fn queries_keys_and_values_are_where_attention_looks_for_them() {
    for (name, ctx) in contexts() {
        for (dtype, sizes) in [DType::F32, DType::BF16].into_iter().flat_map(|d| [WHOLE, PART, ODD].map(|s| (d, s))) {
            for normed in [Normed::Nothing, Normed::Rows, Normed::Heads] {
                for (rows, num_sequences) in [(1, 1), (7, 1), (6, 3)] {
                    check(&name, &ctx, sizes, normed, Rows { rows, num_sequences }, dtype);
                }
            }
        }
        check(&name, &ctx, WIDE, Normed::Rows, Rows { rows: 2, num_sequences: 2 }, DType::BF16);
        check(&name, &ctx, WIDE, Normed::Heads, Rows { rows: 2, num_sequences: 1 }, DType::F32);
    }
}

#[test]
fn a_row_that_is_not_finite_stays_alone() {
    for (name, ctx) in contexts() {
        let table = RopeTable::new(8, 1e4, 10);
        let rows = |bad: f32| [[1.0; 8], [bad; 8], [2.0; 8]].concat();
        let [q, k, v] = [f32::NAN, f32::INFINITY, f32::NAN].map(|bad| tensor(&ctx, &[3, 8], &rows(bad), DType::F32));
        let positions = Tensor::from_slice(ctx.pool(), &[3], &[0_u32, 1, 2]);
        let [mut keys, mut values] = [(); 2].map(|()| ctx.zeros(&[4, 8], DType::F32));
        let norm = tensor(&ctx, &[8], &[1.0; 8], DType::F32);
        let placing = Placing { norms: [Some(&norm); 2], eps: EPS, table: &table, positions: &positions };
        let mut kept = Kept { keys: &mut keys, values: &mut values, held: 1, num_sequences: 1 };
        let queries = qkv_norm_rope_append(&ctx, [q, k, v], &placing, &mut kept);
        for (x, bad) in [(&queries, 1), (&keys, 2), (&values, 2)] {
            for (row, x) in x.f32s().chunks(8).enumerate() {
                assert_eq!(x.iter().all(|x| x.is_finite()), row != bad, "{name}: row {row}");
            }
        }
    }
}

/// Attention of new tokens right behind, within a step: one kernel for both if a sequence has one new token.
fn check_with_attention(ctx: &Context, s: Sizes, normed: Normed, shape: &AttentionShape) {
    let what = format!("{s:?}, {normed:?}, {shape:?}");
    let (rows, num_sequences, held) = (shape.batch * shape.seq_len, shape.batch, shape.kv_len - shape.seq_len);
    let widths = [s.heads[0] * s.width, s.heads[1] * s.width, s.heads[1] * s.value];
    let layout = RopeLayout { head_dim: s.width, start: s.start, is_interleaved: s.is_interleaved };
    let table = RopeTable::with_frequencies(layout, &default_frequencies(2 * s.half, 1e4), 0.75, 800);
    let norm = |i: usize| match normed {
        Normed::Nothing => None,
        Normed::Rows => Some(normal_tensor(ctx, 10 + i as u64, &[widths[i]], DType::F32)),
        Normed::Heads => Some(normal_tensor(ctx, 10 + i as u64, &[s.width], DType::F32)),
    };
    let (norms, sinks) = ([norm(0), norm(1)], normal_tensor(ctx, 30, &[s.heads[0]], DType::F32));
    let positions = Tensor::from_slice(ctx.pool(), &[rows], &below(1, rows, 800));
    let [q, k, v] = [0, 1, 2].map(|i| normal_tensor(ctx, i as u64, &[rows, widths[i]], DType::BF16));
    let kept =
        |i: usize| normal_tensor(ctx, 20 + i as u64, &[num_sequences * shape.kv_capacity, widths[i]], DType::BF16);
    let run = |is_step: bool| {
        let (mut keys, mut values) = (kept(1), kept(2));
        let before = ctx.gpu().expect("a GPU").traffic();
        let mut both = || {
            let placing =
                Placing { norms: norms.each_ref().map(Option::as_ref), eps: EPS, table: &table, positions: &positions };
            let mut kept = Kept { keys: &mut keys, values: &mut values, held, num_sequences };
            let queries = qkv_norm_rope_append(ctx, [q.clone(), k.clone(), v.clone()], &placing, &mut kept);
            let inputs = AttentionInputs { q: &queries, k: &keys, v: &values, sinks: Some(&sinks) };
            let (o, lse) = attention_with_sinks(ctx, inputs, shape);
            [queries, o, lse]
        };
        let [queries, o, lse] = if is_step { ctx.capture_replay(both) } else { both() };
        let launches = ctx.gpu().expect("a GPU").traffic().since(&before).launches;
        ([queries, o, lse, keys, values], launches)
    };
    let ((apart, all), (together, fewer)) = (run(false), run(true));
    for (index, (apart, together)) in apart.iter().zip(&together).enumerate() {
        assert!(apart.bytes() == together.bytes(), "{what}: result {index}");
    }
    let is_one = shape.seq_len == 1 && shape.num_kv_heads * shape.batch <= 256;
    assert_eq!(all - fewer, u64::from(is_one), "{what}");
}

#[test]
fn attention_of_a_new_token_makes_its_queries_key_and_value_with_the_same_bits() {
    let of_two = Sizes { heads: [2, 2], width: 128, value: 128, start: 0, half: 64, is_interleaved: false };
    let part = Sizes { heads: [6, 2], width: 24, value: 40, start: 8, half: 6, is_interleaved: true };
    for (_, ctx) in gpu_contexts() {
        for (s, normed) in [
            (WHOLE, Normed::Rows),
            (WHOLE, Normed::Nothing),
            (of_two, Normed::Rows),
            (of_two, Normed::Heads),
            (part, Normed::Heads),
            (Sizes { heads: [5, 1], ..part }, Normed::Rows),
        ] {
            // The first key, the last and the first of a tile, and parts of the keys by blocks of their own.
            for (kv_len, batch, window) in
                [(1, 1, None), (64, 1, None), (65, 3, None), (600, 1, None), (130, 2, Some(40))]
            {
                let shape = AttentionShape {
                    batch,
                    seq_len: 1,
                    kv_len,
                    kv_capacity: kv_len + 3,
                    num_heads: s.heads[0],
                    num_kv_heads: s.heads[1],
                    head_dim: s.width,
                    value_dim: s.value,
                    window,
                    scale: 0.3,
                };
                check_with_attention(&ctx, s, normed, &shape);
            }
        }
        // Two new tokens, and more sequences than there are blocks at a time.
        for (batch, seq_len) in [(1, 2), (129, 1)] {
            let shape = AttentionShape {
                batch,
                seq_len,
                kv_len: 9,
                kv_capacity: 9,
                num_heads: 4,
                num_kv_heads: 2,
                head_dim: 16,
                value_dim: 16,
                window: None,
                scale: 0.3,
            };
            check_with_attention(&ctx, WHOLE, Normed::Rows, &shape);
        }
    }
}
