//! Operations other than matrix products: attention, the output layer with its loss, norms, rotations, embeddings,
//! conversions and the optimizer. Operations limited by memory have sizes that no cache holds.

use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::{Cost, Timing};
use moeworks_ops::Context;
use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::attention::{AttentionInputs, AttentionSaved, AttentionShape, attention, attention_backward};
use moeworks_ops::elementwise::{add_assign, cast, cast_into, scale_assign, sum_of_squares};
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::head_loss::{head_loss, head_loss_backward};
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{rms_norm, rms_norm_backward};
use moeworks_ops::rope::{RopeTable, Rotation, rope};

/// The number of elements of a tensor that is processed as a whole: 128 MiB in f32.
const LEN: usize = 32 << 20;

/// The number of rows of norms, rotations and embeddings, and their width.
const ROWS: (usize, usize) = (16_384, 1024);

const HEAD_DIM: usize = 64;

/// A causal attention to time.
#[derive(Clone, Copy)]
struct AttentionCase {
    /// True for one query per sequence, as in a decoding step; else there are as many queries as keys.
    is_step: bool,
    batch: usize,
    kv_len: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

const ATTENTION_CASES: [AttentionCase; 6] = [
    AttentionCase { is_step: false, batch: 16, kv_len: 256, num_heads: 4, num_kv_heads: 4, head_dim: 64 },
    AttentionCase { is_step: false, batch: 16, kv_len: 256, num_heads: 4, num_kv_heads: 2, head_dim: 64 },
    AttentionCase { is_step: false, batch: 4, kv_len: 1024, num_heads: 16, num_kv_heads: 16, head_dim: 64 },
    AttentionCase { is_step: false, batch: 1, kv_len: 4096, num_heads: 8, num_kv_heads: 2, head_dim: 128 },
    AttentionCase { is_step: true, batch: 1, kv_len: 8192, num_heads: 16, num_kv_heads: 4, head_dim: 128 },
    AttentionCase { is_step: true, batch: 8, kv_len: 4096, num_heads: 8, num_kv_heads: 8, head_dim: 64 },
];

/// An output layer to time.
#[derive(Clone, Copy)]
struct HeadCase {
    tokens: usize,
    width: usize,
    classes: usize,
}

const HEAD_CASES: [HeadCase; 2] =
    [HeadCase { tokens: 4096, width: 256, classes: 256 }, HeadCase { tokens: 1024, width: 512, classes: 32_000 }];

pub(super) fn bench(timing: &mut Timing<'_>, dtype: DType) {
    for case in ATTENTION_CASES {
        attentions(timing, dtype, case);
    }
    for case in HEAD_CASES {
        heads(timing, dtype, case);
    }
    rows(timing, dtype);
    whole(timing, dtype);
}

/// Random numbers that repeat after 8,191 elements.
fn normal(ctx: &Context, shape: &[usize], dtype: DType) -> Tensor {
    let random = Random::new(1, Purpose::Test, 0);
    let values: Vec<f32> = (0..8191).map(|i| random.normal(i)).collect();
    let repeated: Vec<f32> = values.into_iter().cycle().take(shape.iter().product()).collect();
    cast(ctx, &Tensor::from_slice(ctx.pool(), shape, &repeated), dtype)
}

/// Times causal attention. Only the pairs that the mask leaves are counted; forward takes two products per pair and
/// backward five.
fn attentions(timing: &mut Timing<'_>, dtype: DType, case: AttentionCase) {
    let AttentionCase { is_step, batch, kv_len, num_heads, num_kv_heads, head_dim } = case;
    let seq_len = if is_step { 1 } else { kv_len };
    let of_step = if is_step { "of a step " } else { "" };
    let name = format!("{of_step}{batch} x {kv_len} heads {num_heads}/{num_kv_heads} x {head_dim}");
    let [forward, backward] = ["forward", "backward"].map(|pass| format!("attention {pass} {name}, {dtype:?}"));
    if !timing.wants_any(&[&forward, &backward]) {
        return;
    }
    let ctx = timing.ctx;
    let shape = AttentionShape {
        batch,
        seq_len,
        kv_len,
        kv_capacity: kv_len,
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim: head_dim,
        window: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    let q = normal(ctx, &[batch * seq_len, num_heads * head_dim], dtype);
    let [k, v] = [(); 2].map(|()| normal(ctx, &[batch * kv_len, num_kv_heads * head_dim], dtype));
    let pairs = batch * num_heads * seq_len * (2 * kv_len - seq_len + 1) / 2;
    let [operands, written] = [q.num_bytes() + k.num_bytes() + v.num_bytes(), q.num_bytes()];
    let cost = Cost { flops: (4 * pairs * head_dim) as f64, dtype, ..Cost::from_bytes(operands, written) };
    timing.case(forward, cost, || drop(attention(ctx, &q, &k, &v, &shape)));
    if seq_len == 1 {
        return;
    }
    let d_o = normal(ctx, &[batch * seq_len, num_heads * head_dim], DType::F32);
    let (o, lse) = attention(ctx, &q, &k, &v, &shape);
    timing.case(backward, cost.times(2.5), || {
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, sinks: None };
        let saved = AttentionSaved { o: &o, lse: &lse };
        drop(attention_backward(ctx, &d_o, inputs, saved, &shape));
    });
}

/// Times the output layer with cross-entropy.
fn heads(timing: &mut Timing<'_>, dtype: DType, case: HeadCase) {
    let HeadCase { tokens, width, classes } = case;
    let [forward, backward] = ["forward", "backward"]
        .map(|pass| format!("output layer and loss {pass} {tokens} x {width}, {classes} classes, {dtype:?}"));
    if !timing.wants_any(&[&forward, &backward]) {
        return;
    }
    let ctx = timing.ctx;
    let (x, w) = (normal(ctx, &[tokens, width], dtype), normal(ctx, &[classes, width], dtype));
    let mut dw = ctx.zeros(&[classes, width], DType::F32);
    let targets: Vec<u32> = (0..tokens as u32).map(|i| i % classes as u32).collect();
    let flops = (2 * tokens * width * classes) as f64;
    let cost = Cost { flops, dtype, ..Cost::from_bytes(x.num_bytes() + w.num_bytes(), 0) };
    timing.case(forward, cost, || _ = head_loss(ctx, &x, &w, &targets));
    timing.case(backward, cost.times(3.0), || {
        drop(head_loss_backward(ctx, &x, &w, &targets, 1e-3, Write::Replace, &mut dw));
    });
}

fn rows(timing: &mut Timing<'_>, dtype: DType) {
    let (tokens, width) = ROWS;
    let names = ["rms norm forward", "rms norm backward", "rope", "embedding forward", "embedding backward"]
        .map(|what| format!("{what} {tokens} x {width}, {dtype:?}"));
    if !timing.wants_any(&names) {
        return;
    }
    let [norm_forward, norm_backward, rotation, embedding_forward, to_embedding] = names;
    let ctx = timing.ctx;
    let (elements, size) = (tokens * width, dtype.size());
    let (mut x, weight) = (normal(ctx, &[tokens, width], dtype), normal(ctx, &[width], DType::F32));
    let dy = normal(ctx, &[tokens, width], DType::F32);
    let mut dweight = ctx.zeros(&[width], DType::F32);
    timing.case(norm_forward, Cost::from_bytes(size * elements, size * elements), || {
        drop(rms_norm(ctx, &x, &weight, 1e-6, dtype));
    });
    let (_, inv_rms) = rms_norm(ctx, &x, &weight, 1e-6, dtype);
    timing.case(norm_backward, Cost::from_bytes((4 + size) * elements, 4 * elements), || {
        drop(rms_norm_backward(ctx, &dy, &x, &weight, &inv_rms, Write::Add, &mut dweight));
    });
    let table = RopeTable::new(HEAD_DIM, 10_000.0, 2048);
    let positions: Vec<u32> = (0..tokens as u32).map(|i| i % 2048).collect();
    timing.case(rotation, Cost::from_bytes(size * elements, size * elements), || {
        rope(ctx, &mut x, &table, &positions, Rotation::Forward);
    });
    let classes = 32_000;
    let random = Random::new(2, Purpose::Test, 0);
    let ids: Vec<u32> = (0..tokens as u64).map(|i| random.below(i, classes) as u32).collect();
    let mut table = normal(ctx, &[classes as usize, width], DType::F32);
    timing.case(embedding_forward, Cost::from_bytes(4 * elements, size * elements), || {
        drop(embedding(ctx, &ids, &table, dtype));
    });
    if dtype == DType::F32 {
        timing.case(to_embedding, Cost::from_bytes(8 * elements, 4 * elements), || {
            embedding_backward(ctx, &ids, &dy, &mut table);
        });
    }
}

/// Times operations on whole tensors of f32, or of f32 together with a tensor of `dtype`.
fn whole(timing: &mut Timing<'_>, dtype: DType) {
    let names = ["add", "sum of squares", "scale", "cast f32 to", "cast to f32 of", "adamw"];
    let name = |what: &str| format!("{what} {}M, {dtype:?}", LEN >> 20);
    if !timing.wants_any(&names.map(name)) {
        return;
    }
    let ctx = timing.ctx;
    let is_bf16 = dtype == DType::BF16;
    let size = dtype.size();
    let f = |read: usize, written: usize| Cost::from_bytes(read * LEN, written * LEN);
    let (mut y, x) = (normal(ctx, &[LEN], DType::F32), normal(ctx, &[LEN], DType::F32));
    let mut other = cast(ctx, &x, dtype);
    timing.case(name("add"), f(4 + size, 4), || add_assign(ctx, &mut y, &other));
    timing.case(name("sum of squares"), f(size, 0), || _ = sum_of_squares(ctx, &other));
    if is_bf16 {
        timing.case(name("cast f32 to"), f(4, size), || cast_into(ctx, &x, &mut other));
        timing.case(name("cast to f32 of"), f(size, 4), || cast_into(ctx, &other, &mut y));
    } else {
        timing.case(name("scale"), f(4, 4), || scale_assign(ctx, &mut y, 0.5));
    }
    let (mut m, mut v) = (ctx.zeros(&[LEN], DType::F32), ctx.zeros(&[LEN], DType::F32));
    let step = AdamWStep { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };
    // For f32 weights a bf16 copy is written for the products.
    timing.case(name("adamw"), f(16, if is_bf16 { 12 + size } else { 12 }), || {
        let compute = is_bf16.then_some(&mut other);
        adamw(ctx, &step, AdamWTensors { param: &mut y, grad: &x, m: &mut m, v: &mut v, compute });
    });
}
