//! [`attention`](crate::attention) on a GPU.
//!
//! bf16 tensors whose heads are whole vectors of 8 run on tensor cores in blocks of 64 rows. Others run in f32 on the
//! plain units: blocks of 32 rows against 32 keys at a time. With few rows, as in decoding, the keys of a block are
//! split among several blocks. Wider heads whose keys are their values (the cache of latent attention) have a kernel
//! for forward only.

use moeworks_tensor::{DType, Tensor};

use super::{On, elementwise, qkv_norm_rope_append};
use crate::attention::{AttentionInputs, AttentionSaved, AttentionShape};
use crate::linear::Write;
use moeworks_gpu::sources::{ATTENTION, ATTENTION_PLACED, ATTENTION_TENSOR, ATTENTION_WIDE};
use moeworks_gpu::{Arg, Launch, Source};

/// Rows, and keys, of a block on the plain units.
const BLOCK: usize = 32;
/// Rows, and keys, of a block on tensor cores.
const TENSOR_BLOCK: usize = 64;
/// The most rows for which all warps of a block share the rows and split the keys, as in decoding.
const FEW_ROWS: usize = 16;
/// Threads of a block.
const THREADS: usize = 128;
/// Threads of a block that sums the gradient of a head's sink.
const SINK_THREADS: usize = 256;
/// The number of blocks that keeps a GPU busy.
const WANTED_BLOCKS: usize = 256;
/// The fewest keys that are worth a block of their own.
const MIN_PART_KEYS: usize = 256;
/// The fewest keys of wide heads that are worth a block of their own; a wide key is as much work as four others.
const MIN_WIDE_PART_KEYS: usize = 64;
/// The largest head that the kernels take, apart from those for wide heads.
const MAX_DIM: usize = 256;
/// The largest head for which tensor cores compute the gradients of keys and values.
const MAX_KEYS_DIM: usize = 192;
/// The sizes of the kernels for wide heads, as their names end.
const WIDE_DIMS: [usize; 2] = [320, 576];
/// Threads of a block of the kernels for wide heads.
const WIDE_THREADS: usize = 256;
/// Tiles of 64 rows or keys in shared memory on tensor cores, forward: one of queries, two of keys and two of values.
const TENSOR_TILES: usize = 5;
/// Tiles in shared memory on tensor cores, backward: two that stay, and two of half as many rows that are loaded
/// while two are in use.
const TENSOR_TILES_BACK: usize = 4;
/// The largest head whose queries, keys and values are made by the kernel that attends to them.
const MAX_PLACED_DIM: usize = 128;
/// Static shared memory of that kernel in bytes, alignment included.
const PLACED_OTHER_BYTES: usize = 2 << 10;
/// The most blocks of that kernel. With more blocks than a GPU runs at a time each would repeat the wait for what it
/// makes.
const MAX_PLACED_BLOCKS: usize = 256;

/// Tiles of values of a block on the plain units, forward.
const FORWARD_TILES: usize = 1;
/// Tiles of values and gradients of a block on the plain units, backward.
const BACKWARD_TILES: usize = 2;

/// Returns whether there are kernels for heads of these sizes and the GPU has the shared memory that they need.
pub(crate) fn takes(on: On<'_>, qkv: AttentionInputs<'_>, shape: &AttentionShape, is_backward: bool) -> bool {
    let tiles = if is_backward { BACKWARD_TILES } else { FORWARD_TILES };
    let has_room = || is_for_tensor_cores(on, qkv, shape) || shared_bytes(shape, tiles) <= on.gpu.most_shared();
    if !is_backward && is_wide(on, qkv, shape) {
        return true;
    }
    shape.head_dim.max(shape.value_dim) <= MAX_DIM && shape.head_dim > 0 && shape.value_dim > 0 && has_room()
}

/// Returns whether there are kernels for one head of keys of this type that are values as well, whatever the number
/// of queries.
pub(crate) fn takes_kept(on: On<'_>, head_dim: usize, dtype: DType) -> bool {
    head_dim <= MAX_DIM || (dtype == DType::BF16 && wide_dim(on, head_dim).is_some())
}

/// Returns the size of the kernel for heads that are too wide for the others.
fn wide_dim(on: On<'_>, head_dim: usize) -> Option<usize> {
    let dim = WIDE_DIMS.into_iter().find(|&dim| head_dim <= dim)?;
    (head_dim > MAX_DIM && head_dim.is_multiple_of(8) && wide_bytes(dim) <= on.gpu.most_shared()).then_some(dim)
}

/// Returns the shared memory of a block for wide heads in bytes: its rows of queries, two tiles of keys, scores,
/// their weights, and three numbers a row (`attention_wide.cu`).
fn wide_bytes(dim: usize) -> usize {
    2 * (TENSOR_BLOCK + 2 * BLOCK) * dim + TENSOR_BLOCK * (4 * (BLOCK + 4) + 2 * (BLOCK + 8) + 3 * 4)
}

/// Returns whether the kernels for wide heads take the tensors.
fn is_wide(on: On<'_>, AttentionInputs { q, k, v, .. }: AttentionInputs<'_>, shape: &AttentionShape) -> bool {
    let are_bf16 = [q, k, v].iter().all(|x| x.dtype() == DType::BF16);
    let are_same = shape.head_dim == shape.value_dim && k.len() == v.len();
    are_bf16
        && are_same
        && wide_dim(on, shape.head_dim).is_some()
        && (std::ptr::eq(k, v) || on.gpu.address(k) == on.gpu.address(v))
}

/// Returns the shared memory of a block on the plain units in bytes: tiles of queries and keys, of values and
/// gradients, and a tile of scores for each of the latter.
fn shared_bytes(shape: &AttentionShape, tiles: usize) -> usize {
    let (q, v) = (shape.head_dim + 1, shape.value_dim + 1);
    BLOCK * (2 * q + tiles * v + tiles * (BLOCK + 1)) * 4
}

/// Returns the smallest size of heads with a kernel on the plain units, as kernels' names end.
fn dim(shape: &AttentionShape) -> usize {
    shape.head_dim.max(shape.value_dim).next_power_of_two().max(64)
}

/// Returns the sizes of an attention as arguments of kernels.
fn sizes(shape: &AttentionShape) -> [Arg<'static>; 9] {
    [
        shape.seq_len.into(),
        shape.kv_len.into(),
        shape.kv_capacity.into(),
        shape.num_heads.into(),
        shape.num_kv_heads.into(),
        shape.head_dim.into(),
        shape.value_dim.into(),
        // A window as long as all keys hides none.
        shape.window.filter(|&window| window < shape.kv_len).unwrap_or(0).into(),
        shape.scale.into(),
    ]
}

/// Returns the inputs as arguments without their types.
fn plain_inputs<'a>(on: On<'_>, AttentionInputs { q, k, v, .. }: AttentionInputs<'a>) -> Vec<Arg<'a>> {
    [q, k, v].map(|x| on.gpu.read(x)).to_vec()
}

/// Returns the inputs as arguments, each followed by its type.
fn typed_inputs<'a>(on: On<'_>, AttentionInputs { q, k, v, .. }: AttentionInputs<'a>) -> Vec<Arg<'a>> {
    [q, k, v].into_iter().flat_map(|x| with_type(on, x)).collect()
}

/// Returns the size of heads of the kernel on tensor cores, as kernels' names end.
fn tensor_dim(shape: &AttentionShape) -> usize {
    shape.head_dim.max(shape.value_dim).next_multiple_of(64)
}

/// Returns the size in bytes of `tiles` tiles of 64 rows.
fn tensor_bytes(shape: &AttentionShape, tiles: usize) -> usize {
    tiles * TENSOR_BLOCK * tensor_dim(shape) * 2
}

/// Returns whether the kernels on tensor cores take the tensors.
fn is_for_tensor_cores(on: On<'_>, qkv: AttentionInputs<'_>, shape: &AttentionShape) -> bool {
    let AttentionInputs { q, k, v, .. } = qkv;
    let is_whole = |dim: usize| dim.is_multiple_of(8) && dim <= MAX_DIM;
    let has_room = tensor_bytes(shape, TENSOR_TILES) <= on.gpu.most_shared();
    let are_bf16 = [q, k, v].iter().all(|x| x.dtype() == DType::BF16);
    // With a positive scale the largest score is that of the largest product.
    are_bf16 && is_whole(shape.head_dim) && is_whole(shape.value_dim) && has_room && shape.scale > 0.0
}

/// Returns a tensor and its type as arguments.
fn with_type<'a>(on: On<'_>, x: &'a Tensor) -> [Arg<'a>; 2] {
    [on.gpu.read(x), (x.dtype() == DType::BF16).into()]
}

/// Returns the number of blocks that the rows of queries of one key head are cut into.
fn row_blocks(shape: &AttentionShape, block: usize) -> usize {
    (shape.seq_len * shape.num_heads / shape.num_kv_heads).div_ceil(block)
}

/// Returns whether so few queries share a key head that a block's warps split the keys and not the rows.
fn are_few(shape: &AttentionShape) -> bool {
    row_blocks(shape, FEW_ROWS) == 1
}

/// Returns the shared memory of a forward block on tensor cores in bytes.
fn forward_bytes(shape: &AttentionShape) -> usize {
    let other_rows = if are_few(shape) { (TENSOR_BLOCK - FEW_ROWS) * tensor_dim(shape) * 2 } else { 0 };
    tensor_bytes(shape, TENSOR_TILES) - other_rows
}

/// Returns the shared memory in bytes of a block that also makes the queries, the key and the value of a key head:
/// these, and a number for each row.
fn placed_bytes(shape: &AttentionShape) -> usize {
    let rows = shape.num_heads / shape.num_kv_heads + 1;
    forward_bytes(shape) + 2 * shape.value_dim + 4 * rows * (shape.head_dim + 1)
}

/// Takes back the pending launch that makes the queries and the newest keys and values, if there is one and the
/// attention kernel can do its work. Returns its arguments.
fn placed(on: On<'_>, qkv: AttentionInputs<'_>, shape: &AttentionShape) -> Option<qkv_norm_rope_append::Placed> {
    let AttentionInputs { q, k, v, .. } = qkv;
    let has_room = placed_bytes(shape) + PLACED_OTHER_BYTES <= on.gpu.most_shared();
    let are_few = are_few(shape) && shape.num_kv_heads * shape.batch <= MAX_PLACED_BLOCKS;
    if has_room && are_few && tensor_dim(shape) <= MAX_PLACED_DIM {
        qkv_norm_rope_append::take(on, [q, k, v].map(|x| on.read(x)), shape)
    } else {
        None
    }
}

/// Launches a kernel on tensor cores with `shared` bytes of shared memory.
fn launch_tensor(on: On<'_>, kernel: &str, blocks: usize, shape: &AttentionShape, shared: usize, args: &[Arg<'_>]) {
    let kernel = &format!("attention_{kernel}_{}", tensor_dim(shape));
    let grid = [blocks, shape.num_kv_heads, shape.batch];
    let launch = Launch { source: &ATTENTION_TENSOR, kernel, grid, threads: THREADS, shared, args };
    // SAFETY: the shape is checked against the tensors; a block writes its own rows, or those of its keys.
    unsafe { on.gpu.launch(&launch) };
}

/// Launches a kernel on the plain units with `tiles` tiles of values and gradients.
fn launch(on: On<'_>, kernel: &str, blocks: usize, shape: &AttentionShape, tiles: usize, args: &[Arg<'_>]) {
    let grid = [blocks, shape.num_kv_heads, shape.batch];
    let shared = shared_bytes(shape, tiles);
    let launch = Launch { source: &ATTENTION, kernel, grid, threads: THREADS, shared, args };
    // SAFETY: the shape is checked against the tensors; a block writes its own rows, or those of its keys.
    unsafe { on.gpu.launch(&launch) };
}

/// Computes [`attention_with_sinks`](crate::attention::attention_with_sinks).
pub(crate) fn forward(on: On<'_>, inputs: AttentionInputs<'_>, shape: &AttentionShape) -> (Tensor, Tensor) {
    let (rows, out) = (shape.batch * shape.seq_len, inputs.q.dtype());
    let mut o = on.empty(&[rows, shape.num_heads * shape.value_dim], out);
    let mut lse = on.empty(&[shape.batch, shape.num_heads, shape.seq_len], DType::F32);
    if is_wide(on, inputs, shape) || is_for_tensor_cores(on, inputs, shape) {
        forward_tensor(on, inputs, shape, &mut o, &mut lse);
        return (o, lse);
    }
    let mut args = typed_inputs(on, inputs);
    args.push(on.read_or_none(inputs.sinks));
    args.extend([on.write(&mut o), (out == DType::BF16).into(), on.write(&mut lse)]);
    args.extend(sizes(shape));
    launch(on, &format!("attention_{}", dim(shape)), row_blocks(shape, BLOCK), shape, FORWARD_TILES, &args);
    drop(args);
    (o, lse)
}

/// Computes the forward pass on tensor cores.
fn forward_tensor(on: On<'_>, inputs: AttentionInputs<'_>, shape: &AttentionShape, o: &mut Tensor, lse: &mut Tensor) {
    let wide = wide_dim(on, shape.head_dim);
    let (count, keys) = parts(shape, if wide.is_some() { MIN_WIDE_PART_KEYS } else { MIN_PART_KEYS });
    let rows = shape.batch * shape.seq_len * shape.num_heads;
    let mut parts = (count > 1).then(|| on.empty(&[rows, count, shape.value_dim + 2], DType::F32));
    let outputs = [on.read_or_none(inputs.sinks), on.write(o), on.write(lse)];
    let placed = if wide.is_none() { placed(on, inputs, shape) } else { None };
    let mut args = placed.map_or_else(|| plain_inputs(on, inputs), |placed| placed.to_vec());
    if wide.is_some() {
        // Keys are values: there is no third argument.
        args.pop();
    }
    args.extend(outputs);
    args.push(parts.as_mut().map_or(Arg::none(), |parts| on.write(parts)));
    args.extend([count, keys].map(Arg::from));
    args.extend(sizes(shape));
    let blocks = row_blocks(shape, TENSOR_BLOCK) * count;
    match wide {
        Some(dim) => launch_wide(on, dim, blocks, shape, &args),
        None if placed.is_some() => launch_placed(on, blocks, shape, &args),
        None => {
            let kernel = if are_few(shape) { "few" } else { "tensor" };
            launch_tensor(on, kernel, blocks, shape, forward_bytes(shape), &args);
        }
    }
    drop(args);
    let Some(parts) = parts else { return };
    let mut args = vec![on.read(&parts), count.into()];
    args.extend(outputs);
    args.extend(sizes(shape));
    let grid = [row_blocks(shape, 1), shape.num_kv_heads, shape.batch];
    let (source, kernel): (&'static Source, _) = match wide {
        Some(_) => (&ATTENTION_WIDE, "attention_wide_join"),
        None => (&ATTENTION_TENSOR, "attention_tensor_join"),
    };
    let launch = Launch { source, kernel, grid, threads: 32, shared: 0, args: &args };
    // SAFETY: a block reads the parts of its row and writes it.
    unsafe { on.gpu.launch(&launch) };
}

/// Launches the attention kernel that also makes queries, keys and values.
fn launch_placed(on: On<'_>, blocks: usize, shape: &AttentionShape, args: &[Arg<'_>]) {
    let kernel = &format!("attention_placed_{}", tensor_dim(shape));
    let (grid, shared) = ([blocks, shape.num_kv_heads, shape.batch], placed_bytes(shape));
    let launch = Launch { source: &ATTENTION_PLACED, kernel, grid, threads: THREADS, shared, args };
    // SAFETY: as of `qkv_norm_rope_append` and of attention: of what a block makes, it alone reads the key and the
    // value, and who reads the queries comes after it.
    unsafe { on.gpu.launch(&launch) };
}

/// Launches the kernel for wide heads.
fn launch_wide(on: On<'_>, dim: usize, blocks: usize, shape: &AttentionShape, args: &[Arg<'_>]) {
    let kernel = &format!("attention_wide_{dim}");
    let (grid, shared) = ([blocks, shape.num_kv_heads, shape.batch], wide_bytes(dim));
    let launch = Launch { source: &ATTENTION_WIDE, kernel, grid, threads: WIDE_THREADS, shared, args };
    // SAFETY: the shape is checked against the tensors; a block writes its own rows, or their parts.
    unsafe { on.gpu.launch(&launch) };
}

/// Returns the number of blocks that share the keys of one row, and the number of keys of each, at least about
/// `min_keys`. Few queries have too few blocks to occupy a GPU.
fn parts(shape: &AttentionShape, min_keys: usize) -> (usize, usize) {
    let blocks = row_blocks(shape, TENSOR_BLOCK) * shape.num_kv_heads * shape.batch;
    let seen = shape.window.map_or(shape.kv_len, |window| shape.kv_len.min(window + shape.seq_len + TENSOR_BLOCK));
    let count = (WANTED_BLOCKS / blocks.max(1)).min(seen / min_keys).max(1);
    let keys = seen.div_ceil(count).next_multiple_of(TENSOR_BLOCK);
    (seen.div_ceil(keys).max(1), keys)
}

/// Returns the dot products of the rows of outputs and their gradients, in the order of `lse`.
fn row_dots(on: On<'_>, both: [&Tensor; 2], lse: &Tensor, shape: &AttentionShape) -> Tensor {
    let mut delta = on.empty(lse.shape(), DType::F32);
    let rows = shape.batch * shape.seq_len * shape.num_heads;
    let mut args: Vec<_> = both.into_iter().flat_map(|x| with_type(on, x)).collect();
    args.push(on.write(&mut delta));
    args.extend([shape.seq_len, shape.num_heads, shape.value_dim, rows].map(Arg::from));
    let grid = [rows.div_ceil(THREADS / 32), 1, 1];
    let sums = Launch { source: &ATTENTION, kernel: "attention_delta", grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: a warp reads its row of both and writes its sum.
    unsafe { on.gpu.launch(&sums) };
    drop(args);
    delta
}

/// Computes [`sinks_backward`](crate::attention::sinks_backward).
pub(crate) fn sinks_backward(
    on: On<'_>,
    d_o: &Tensor,
    AttentionSaved { o, lse }: AttentionSaved<'_>,
    sinks: &Tensor,
    shape: &AttentionShape,
    write: Write,
    d_sinks: &mut Tensor,
) {
    let delta = row_dots(on, [d_o, o], lse, shape);
    let sizes = [shape.batch, shape.seq_len, shape.num_heads].map(Arg::from);
    let mut args = vec![on.read(lse), on.read(&delta), on.read(sinks), on.write(d_sinks), (write == Write::Add).into()];
    args.extend(sizes);
    let (grid, threads) = ([shape.num_heads, 1, 1], SINK_THREADS);
    let launch = Launch { source: &ATTENTION, kernel: "attention_sinks_back", grid, threads, shared: 0, args: &args };
    // SAFETY: a block reads its head's log-sums and dot products, and writes its sum.
    unsafe { on.gpu.launch(&launch) };
}

/// Computes [`attention_backward`](crate::attention::attention_backward).
pub(crate) fn backward(
    on: On<'_>,
    d_o: &Tensor,
    qkv: AttentionInputs<'_>,
    AttentionSaved { o, lse }: AttentionSaved<'_>,
    shape: &AttentionShape,
) -> (Tensor, Tensor, Tensor) {
    let AttentionInputs { q, k, v, .. } = qkv;
    let delta = row_dots(on, [d_o, o], lse, shape);
    let mut dq = on.empty(q.shape(), DType::F32);
    let (mut dk, mut dv) = (on.empty(k.shape(), DType::F32), on.empty(v.shape(), DType::F32));
    let plainly = |outputs: &[Arg<'_>], kernel: &str, blocks: usize| {
        let mut args = with_type(on, d_o).to_vec();
        args.extend(typed_inputs(on, qkv));
        args.extend([on.read(lse), on.read(&delta)]);
        args.extend_from_slice(outputs);
        args.extend(sizes(shape));
        launch(on, &format!("attention_backward_{kernel}_{}", dim(shape)), blocks, shape, BACKWARD_TILES, &args);
    };
    let (plain_keys, tensor_keys) = (shape.kv_capacity.div_ceil(BLOCK), shape.kv_capacity.div_ceil(TENSOR_BLOCK));
    if is_for_tensor_cores(on, qkv, shape) {
        let rounded = (d_o.dtype() != DType::BF16).then(|| elementwise::cast(on, d_o, DType::BF16));
        let of = |outputs: &[Arg<'_>], kernel: &str, blocks: usize| {
            let mut args = vec![on.read(rounded.as_ref().unwrap_or(d_o))];
            args.extend(plain_inputs(on, qkv));
            args.extend([on.read(lse), on.read(&delta)]);
            args.extend_from_slice(outputs);
            args.extend(sizes(shape));
            launch_tensor(on, kernel, blocks, shape, tensor_bytes(shape, TENSOR_TILES_BACK), &args);
        };
        of(&[on.write(&mut dq)], "tensor_queries", row_blocks(shape, TENSOR_BLOCK));
        let outputs = [on.write(&mut dk), on.write(&mut dv)];
        if tensor_dim(shape) <= MAX_KEYS_DIM {
            of(&outputs, "tensor_keys", tensor_keys);
        } else {
            plainly(&outputs, "keys", plain_keys);
        }
        return (dq, dk, dv);
    }
    plainly(&[on.write(&mut dq)], "queries", row_blocks(shape, BLOCK));
    plainly(&[on.write(&mut dk), on.write(&mut dv)], "keys", plain_keys);
    (dq, dk, dv)
}
