//! [`attention`](crate::attention) on a GPU: blocks of 32 rows against 32 keys at a time, in f32 on the plain units. (Tensor cores
//! and a cut of long caches among blocks are still to come.)

use moeworks_tensor::{DType, Tensor};

use super::On;
use crate::attention::AttentionShape;
use crate::cuda::sources::ATTENTION;
use crate::cuda::{Arg, Launch};

/// Rows, and keys, of a block, and its threads.
const BLOCK: usize = 32;
const THREADS: usize = 128;
/// The largest head that there are kernels for.
const MAX_DIM: usize = 256;

/// Whether there are kernels for heads of these sizes.
pub(crate) fn takes(shape: &AttentionShape) -> bool {
    shape.head_dim.max(shape.value_dim) <= MAX_DIM && shape.head_dim > 0 && shape.value_dim > 0
}

/// The smallest size of heads that there are kernels for, as kernels' names end.
fn dim(shape: &AttentionShape) -> usize {
    shape.head_dim.max(shape.value_dim).next_power_of_two().max(64)
}

fn sizes(shape: &AttentionShape) -> [Arg<'static>; 9] {
    [
        shape.seq_len.into(),
        shape.kv_len.into(),
        shape.kv_capacity.into(),
        shape.num_heads.into(),
        shape.num_kv_heads.into(),
        shape.head_dim.into(),
        shape.value_dim.into(),
        // A window as long as all keys is none.
        shape.window.filter(|&window| window < shape.kv_len).unwrap_or(0).into(),
        shape.scale.into(),
    ]
}

/// Queries, keys and values.
type Inputs<'a> = (&'a Tensor, &'a Tensor, &'a Tensor);

fn inputs<'a>(on: On<'_>, (q, k, v): Inputs<'a>) -> Vec<Arg<'a>> {
    [q, k, v].into_iter().flat_map(|x| with_type(on, x)).collect()
}

fn with_type<'a>(on: On<'_>, x: &'a Tensor) -> [Arg<'a>; 2] {
    [on.gpu.read(x), (x.dtype() == DType::BF16).into()]
}

/// Blocks of rows of all queries that share a key head.
fn row_blocks(shape: &AttentionShape) -> usize {
    (shape.seq_len * shape.num_heads / shape.num_kv_heads).div_ceil(BLOCK)
}

fn launch(on: On<'_>, kernel: &str, blocks: usize, (shape, tiles): (&AttentionShape, usize), args: &[Arg<'_>]) {
    let grid = [blocks, shape.num_kv_heads, shape.batch];
    let (q, v) = (shape.head_dim + 1, shape.value_dim + 1);
    // Tiles of queries and keys, of values and gradients, and two of scores at most.
    let shared = BLOCK * (2 * q + tiles * v + 2 * (BLOCK + 1)) * 4;
    let launch = Launch { source: &ATTENTION, kernel, grid, threads: THREADS, shared, args };
    // SAFETY: the shape is checked against the tensors; a block writes its own rows, or those of its keys.
    unsafe { on.gpu.launch(&launch) };
}

pub(crate) fn forward(on: On<'_>, qkv: Inputs<'_>, sinks: Option<&[f32]>, shape: &AttentionShape) -> (Tensor, Tensor) {
    let (rows, out) = (shape.batch * shape.seq_len, qkv.0.dtype());
    let mut o = on.empty(&[rows, shape.num_heads * shape.value_dim], out);
    let mut lse = on.empty(&[shape.batch, shape.num_heads, shape.seq_len], DType::F32);
    let sinks = sinks.map(|sinks| on.floats(sinks));
    let mut args = inputs(on, qkv);
    args.push(on.read_or_none(sinks.as_ref()));
    args.extend([on.write(&mut o), (out == DType::BF16).into(), on.write(&mut lse)]);
    args.extend(sizes(shape));
    launch(on, &format!("attention_{}", dim(shape)), row_blocks(shape), (shape, 1), &args);
    drop(args);
    (o, lse)
}

pub(crate) fn backward(
    on: On<'_>,
    d_o: &Tensor,
    (q, k, v): Inputs<'_>,
    (o, lse): (&Tensor, &Tensor),
    shape: &AttentionShape,
) -> (Tensor, Tensor, Tensor) {
    let mut delta = on.empty(lse.shape(), DType::F32);
    let rows = shape.batch * shape.seq_len * shape.num_heads;
    let mut args: Vec<_> = [d_o, o].into_iter().flat_map(|x| with_type(on, x)).collect();
    args.push(on.write(&mut delta));
    args.extend([shape.seq_len, shape.num_heads, shape.value_dim, rows].map(Arg::from));
    let grid = [rows.div_ceil(THREADS / 32), 1, 1];
    let sums = Launch { source: &ATTENTION, kernel: "attention_delta", grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: a warp reads its row of both and writes its sum.
    unsafe { on.gpu.launch(&sums) };
    drop(args);
    let mut dq = on.empty(q.shape(), DType::F32);
    let (mut dk, mut dv) = (on.empty(k.shape(), DType::F32), on.empty(v.shape(), DType::F32));
    let of = |outputs: &[Arg<'_>], kernel: &str, blocks: usize| {
        let mut args = with_type(on, d_o).to_vec();
        args.extend(inputs(on, (q, k, v)));
        args.extend([on.read(lse), on.read(&delta)]);
        args.extend_from_slice(outputs);
        args.extend(sizes(shape));
        launch(on, &format!("attention_backward_{kernel}_{}", dim(shape)), blocks, (shape, 2), &args);
    };
    of(&[on.write(&mut dq)], "queries", row_blocks(shape));
    of(&[on.write(&mut dk), on.write(&mut dv)], "keys", shape.kv_capacity.div_ceil(BLOCK));
    (dq, dk, dv)
}
