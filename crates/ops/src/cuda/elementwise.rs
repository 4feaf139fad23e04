//! [`elementwise`](crate::elementwise), [`adamw`](crate::adamw), [`embedding`](crate::embedding) and
//! [`rope`](crate::rope) on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::{On, THREADS, double};
use crate::adamw::{AdamWTensors, Factors};
use crate::columns::{Blocks, Columns};
use crate::deferred::{Deferred, List};
use crate::linear::Write;
use crate::random;
use moeworks_gpu::sources::{ELEMENTWISE, NOISE};
use moeworks_gpu::{Arg, Launch};

/// Returns the number of blocks for `len` elements. Each thread takes some, so that launches of any length have a
/// moderate size.
fn blocks(len: usize) -> usize {
    len.div_ceil(THREADS * 8)
}

fn is_bf16(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::BF16
}

pub(crate) fn cast(on: On<'_>, x: &Tensor, dtype: DType) -> Tensor {
    let mut y = on.empty(x.shape(), dtype);
    cast_into(on, x, &mut y);
    y
}

pub(crate) fn cast_into(on: On<'_>, x: &Tensor, y: &mut Tensor) {
    let (len, y_bf16) = (x.len(), is_bf16(y));
    let args = [on.read(x), is_bf16(x).into(), on.write(y), y_bf16.into(), Arg::elements(len)];
    // SAFETY: a thread reads and writes its elements, of as many as both have.
    unsafe { on.launch(&ELEMENTWISE, "cast_elements", blocks(len), &args) };
}

/// Fills a tensor of any type, of whole 32-bit words, with zeros.
pub(crate) fn fill_with_zeros(on: On<'_>, y: &mut Tensor) {
    let len = y.num_bytes() / 4;
    let args = [on.write(y), 0.0_f32.into(), Arg::elements(len)];
    // SAFETY: a thread writes its words.
    unsafe { on.launch(&ELEMENTWISE, "fill_elements", blocks(len), &args) };
}

pub(crate) fn fill(on: On<'_>, y: &mut Tensor, value: f32) {
    let len = y.len();
    let args = [on.write(y), value.into(), Arg::elements(len)];
    // SAFETY: a thread writes its elements.
    unsafe { on.launch(&ELEMENTWISE, "fill_elements", blocks(len), &args) };
}

/// Copies `count` rows of whole 16-bit words.
pub(crate) fn copy_rows(on: On<'_>, x: &Tensor, first: usize, y: &mut Tensor, start: usize, count: usize) {
    let words = x.cols() * x.dtype().size() / 2;
    let [first, start, len] = [first, start, count].map(|rows| Arg::elements(rows * words));
    let args = [on.read(x), on.write(y), first, start, len];
    // SAFETY: the rows lie within both, and a thread copies its words.
    unsafe { on.launch(&ELEMENTWISE, "copy_words", blocks(count * words), &args) };
}

/// The numbers of bytes that a thread may copy at once, if all offsets and sizes are multiples of it.
const UNITS: [usize; 3] = [16, 4, 2];

/// Computes [`copy_columns`](crate::columns::copy_columns) of blocks that do not overlap.
pub(crate) fn copy_columns(on: On<'_>, blocks: Blocks, from: &Tensor, at: Columns, to: &mut Tensor, to_at: Columns) {
    let size = to.dtype().size();
    let all = [blocks.width, from.cols(), at.start, at.step, to.cols(), to_at.start, to_at.step]
        .map(|columns| columns * size);
    let unit = UNITS.into_iter().find(|unit| all.iter().all(|bytes| bytes.is_multiple_of(*unit))).unwrap_or(size);
    let (rows, threads) = (to.rows(), THREADS);
    let mut args = vec![on.read(from), on.write(to), unit.into(), blocks.count.into()];
    args.extend(all.map(|bytes| Arg::from(bytes / unit)));
    let launch = Launch {
        source: &ELEMENTWISE,
        kernel: "copy_columns",
        grid: [rows * usize::from(blocks.count * blocks.width > 0), 1, 1],
        threads,
        shared: 0,
        args: &args,
    };
    // SAFETY: the blocks are columns of both; a block of threads copies those of its row, each thread its own units.
    unsafe { on.gpu.launch(&launch) };
}

/// Computes [`add_columns`](crate::columns::add_columns). A thread has a column of all blocks, one after the other.
pub(crate) fn add_columns(on: On<'_>, blocks: Blocks, from: &Tensor, at: Columns, to: &mut Tensor, to_at: Columns) {
    let (rows, cols) = (to.rows(), to.cols());
    let mut args = vec![on.read(from), on.write(to)];
    args.extend(
        [blocks.count, blocks.width, from.cols(), at.start, at.step, cols, to_at.start, to_at.step].map(Arg::from),
    );
    // SAFETY: the blocks are columns of both; a block of threads adds to those of its row.
    unsafe { on.launch(&ELEMENTWISE, "add_columns", rows * usize::from(blocks.count * blocks.width > 0), &args) };
}

/// Copies `rows` rows of each of `count` sequences.
pub(crate) fn copy_rows_of_each(
    on: On<'_>,
    x: &Tensor,
    first: usize,
    y: &mut Tensor,
    start: usize,
    rows: usize,
    count: usize,
) {
    let words = x.cols() * x.dtype().size() / 2;
    let (len, steps) = (rows * count * words, [rows, x.rows() / count, first, y.rows() / count, start]);
    let mut args = vec![on.read(x), on.write(y)];
    args.extend(steps.map(|rows| Arg::elements(rows * words)));
    args.push(Arg::elements(len));
    // SAFETY: the rows lie within both, and a thread copies its words.
    unsafe { on.launch(&ELEMENTWISE, "copy_words_of_each", blocks(len), &args) };
}

pub(crate) fn add_assign(on: On<'_>, y: &mut Tensor, x: &Tensor) {
    let len = x.len();
    let args = [on.write(y), on.read(x), is_bf16(x).into(), Arg::elements(len)];
    // SAFETY: as above.
    unsafe { on.launch(&ELEMENTWISE, "add_elements", blocks(len), &args) };
}

pub(crate) fn scale_assign(on: On<'_>, y: &mut Tensor, factor: f32) {
    let (len, y_bf16) = (y.len(), is_bf16(y));
    let args = [on.write(y), y_bf16.into(), factor.into(), Arg::elements(len)];
    // SAFETY: a thread reads and writes its elements.
    unsafe { on.launch(&ELEMENTWISE, "scale_elements", blocks(len), &args) };
}

pub(crate) fn clip_assign(on: On<'_>, y: &mut Tensor, limit: f32) {
    let (len, y_bf16) = (y.len(), is_bf16(y));
    let args = [on.write(y), y_bf16.into(), limit.into(), Arg::elements(len)];
    // SAFETY: a thread reads and writes its elements.
    unsafe { on.launch(&ELEMENTWISE, "clip_elements", blocks(len), &args) };
}

/// Zeroes the gradients of clipped elements. `limit` is the limit that `y` was clipped to.
pub(crate) fn clip_backward_assign(on: On<'_>, dy: &mut Tensor, y: &Tensor, limit: f32) {
    let len = y.len();
    let args = [on.write(dy), on.read(y), is_bf16(y).into(), limit.into(), Arg::elements(len)];
    // SAFETY: a thread reads and writes its elements, of as many as both have.
    unsafe { on.launch(&ELEMENTWISE, "clip_backward", blocks(len), &args) };
}

pub(crate) fn sigmoid(on: On<'_>, x: &Tensor) -> Tensor {
    let mut y = on.empty(x.shape(), DType::F32);
    let args = [on.read(x), on.write(&mut y), Arg::elements(x.len())];
    // SAFETY: a thread reads and writes its elements, of as many as both have.
    unsafe { on.launch(&ELEMENTWISE, "sigmoid_elements", blocks(x.len()), &args) };
    y
}

pub(crate) fn sigmoid_backward(on: On<'_>, dy: &Tensor, y: &Tensor) -> Tensor {
    let mut dx = on.empty(y.shape(), DType::F32);
    let args = [on.read(dy), on.read(y), on.write(&mut dx), Arg::elements(y.len())];
    // SAFETY: as above.
    unsafe { on.launch(&ELEMENTWISE, "sigmoid_backward", blocks(y.len()), &args) };
    dx
}

pub(crate) fn add_rows(on: On<'_>, y: &mut Tensor, bias: &Tensor) {
    let (len, columns, y_bf16, bias) = (y.len(), y.cols(), is_bf16(y), on.f32s(bias));
    let args = [on.write(y), y_bf16.into(), on.read(&bias), Arg::elements(len), columns.into()];
    // SAFETY: as above; the bias is as long as a row.
    unsafe { on.launch(&ELEMENTWISE, "add_bias", blocks(len), &args) };
}

/// The most rows that one block sums.
const SUMMED_ROWS: usize = 128;

pub(crate) fn sum_rows(on: On<'_>, x: &Tensor, write: Write, sums: &mut Tensor) {
    let (rows, columns, parts) = (x.rows(), x.cols(), x.rows().div_ceil(SUMMED_ROWS));
    if parts > 1 {
        let mut partial = on.empty(&[parts, columns], DType::F32);
        sum_columns(on, x, SUMMED_ROWS, Write::Replace, &mut partial, parts);
        return sum_rows(on, &partial, write, sums);
    }
    sum_columns(on, x, rows, write, sums, 1);
}

/// Writes the sums of each `rows_each` rows, a row of sums for each of `parts` parts.
fn sum_columns(on: On<'_>, x: &Tensor, rows_each: usize, write: Write, sums: &mut Tensor, parts: usize) {
    let (rows, columns, add) = (x.rows(), x.cols(), write == Write::Add);
    let args =
        [on.read(x), is_bf16(x).into(), on.write(sums), rows.into(), columns.into(), rows_each.into(), add.into()];
    let grid = [columns.div_ceil(32), parts, 1];
    let launch = Launch { source: &ELEMENTWISE, kernel: "sum_columns", grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: a block reads its rows' columns and writes their sums.
    unsafe { on.gpu.launch(&launch) };
}

/// Writes or adds the sum over `num_parts` parts of each of `rows` rows, the last part first.
pub(super) fn add_parts(on: On<'_>, parts: &Tensor, rows: usize, num_parts: usize, write: Write, to: &mut Tensor) {
    let (len, width) = (to.len(), to.len() / rows.max(1));
    let args = [on.read(parts), on.write(to), len.into(), width.into(), num_parts.into(), (write == Write::Add).into()];
    // SAFETY: a thread reads its numbers' parts and writes the numbers.
    unsafe { on.launch(&ELEMENTWISE, "add_parts", len.div_ceil(2 * THREADS), &args) };
}

/// The most blocks that sum a part of a tensor each, so that the host has few sums left to add.
const MAX_SUMS: usize = 1024;

/// Returns the sum of squares of each tensor. The partial sums of all tensors arrive in one copy and are added in
/// order.
pub(crate) fn sums_of_squares(on: On<'_>, tensors: &[&Tensor]) -> Deferred<Vec<f64>> {
    let counts: Vec<usize> = tensors.iter().map(|x| blocks(x.len()).min(MAX_SUMS)).collect();
    let mut sums = on.empty(&[counts.iter().sum(), 2], DType::U32);
    let mut first = 0;
    for (x, &count) in tensors.iter().zip(&counts) {
        let args = [on.read(x), is_bf16(x).into(), on.write(&mut sums), first.into(), Arg::elements(x.len())];
        // SAFETY: a block writes its sum, whose place is its own.
        unsafe { on.launch(&ELEMENTWISE, "sums_of_squares", count, &args) };
        first += count;
    }
    Deferred::new(move || {
        let mut halves = sums.u32s().as_chunks::<2>().0.iter();
        counts.iter().map(|&count| halves.by_ref().take(count).map(|&halves| double(halves)).sum()).collect()
    })
}

pub(crate) fn adamw(on: On<'_>, factors: &Factors, tensors: AdamWTensors<'_>) {
    let AdamWTensors { param, grad, m, v, compute } = tensors;
    let len = param.len();
    let compute = compute.map_or(Arg::none(), |compute| on.write(compute));
    let args = [
        on.write(param),
        on.read(grad),
        is_bf16(grad).into(),
        on.write(m),
        on.write(v),
        compute,
        Arg::elements(len),
        factors.grad_scale.into(),
        factors.keep.into(),
        factors.beta1.into(),
        factors.one_minus_beta1.into(),
        factors.beta2.into(),
        factors.one_minus_beta2.into(),
        factors.inv_root_correction2.into(),
        factors.eps.into(),
        factors.step_size.into(),
    ];
    // SAFETY: a thread reads and writes its elements of tensors that have as many.
    unsafe { on.launch(&ELEMENTWISE, "adamw_step", blocks(len), &args) };
}

pub(crate) fn embedding(on: On<'_>, ids: List<'_, u32>, table: &Tensor, out: DType) -> Tensor {
    let (mut y, list) = (on.empty(&[ids.len(), table.cols()], out), on.list(ids));
    let y_bf16 = is_bf16(&y);
    let args = [
        on.read(list.tensor()),
        on.read(table),
        is_bf16(table).into(),
        on.write(&mut y),
        y_bf16.into(),
        table.cols().into(),
    ];
    // SAFETY: the ids are rows of the table, and a block writes its row.
    unsafe { on.launch(&ELEMENTWISE, "gather_rows", ids.len(), &args) };
    y
}

/// Rows that one block sums, so that the rows of a frequent id are shared by many blocks.
const ROWS_OF_PIECE: usize = 32;

/// Adds the gradient of the table. Tokens are sorted by id, so that one block sums some rows of one id; these sums
/// are then added to the id's row.
pub(crate) fn embedding_backward(on: On<'_>, ids: &[u32], dy: &Tensor, dtable: &mut Tensor) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|&token| ids[token as usize]);
    let (mut used, mut pieces_of_used, mut starts, mut first) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for rows in order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]) {
        used.push(ids[rows[0] as usize]);
        pieces_of_used.push(starts.len() as u32);
        starts.extend((first..first + rows.len() as u32).step_by(ROWS_OF_PIECE));
        first += rows.len() as u32;
    }
    pieces_of_used.push(starts.len() as u32);
    starts.push(first);
    let mut pieces = on.empty(&[starts.len() - 1, dtable.cols()], DType::F32);
    let (starts, order) = (on.u32s(&starts), on.u32s(&order));
    add_rows_of_ids(on, None, &starts, Some(&order), dy, &mut pieces);
    let (used, pieces_of_used) = (on.u32s(&used), on.u32s(&pieces_of_used));
    add_rows_of_ids(on, Some(&used), &pieces_of_used, None, &pieces, dtable);
}

pub(crate) fn sums_of_rows(on: On<'_>, x: &Tensor, starts: &[u32]) -> Tensor {
    let mut sums = on.empty(&[starts.len() - 1, x.cols()], DType::F32);
    add_rows_of_ids(on, None, &on.u32s(starts), None, x, &mut sums);
    sums
}

/// Adds sums of rows of `dy` to rows of `table`: entry i of `starts` and the next bound the rows of sum i, named by
/// `rows` if that is given. Sum i goes to row `ids[i]`, or replaces row i without ids.
fn add_rows_of_ids(
    on: On<'_>,
    ids: Option<&Tensor>,
    starts: &Tensor,
    rows: Option<&Tensor>,
    dy: &Tensor,
    table: &mut Tensor,
) {
    let (width, count) = (table.cols(), starts.len() - 1);
    let args = [
        on.read_or_none(ids),
        on.read(starts),
        on.read_or_none(rows),
        on.read(dy),
        is_bf16(dy).into(),
        on.write(table),
        width.into(),
    ];
    // SAFETY: a block adds to the row of its id, which no other block has, or writes its own.
    unsafe { on.launch(&ELEMENTWISE, "add_rows_of_ids", count, &args) };
}

/// The arguments of a rotation besides the tensor and the positions.
pub(crate) struct Rotation<'a> {
    /// `[positions, 2, half]`: cosines, then sines.
    pub(crate) angles: &'a Tensor,
    pub(crate) head_dim: usize,
    pub(crate) start: usize,
    pub(crate) half: usize,
    pub(crate) is_interleaved: bool,
    pub(crate) sign: f32,
}

pub(crate) fn rope(on: On<'_>, x: &mut Tensor, rotation: &Rotation<'_>, positions: List<'_, u32>) {
    let (columns, x_bf16, list) = (x.cols(), is_bf16(x), on.list(positions));
    let args = [
        on.write(x),
        x_bf16.into(),
        on.read(rotation.angles),
        on.read(list.tensor()),
        columns.into(),
        rotation.head_dim.into(),
        rotation.start.into(),
        rotation.half.into(),
        rotation.is_interleaved.into(),
        rotation.sign.into(),
    ];
    // SAFETY: a block rotates its row; positions are those of the table.
    unsafe { on.launch(&ELEMENTWISE, "rotate", positions.len(), &args) };
}

/// Consecutive factors that share their random draws. Sixteen threads have a part of a group each.
const FACTOR_GROUP: u64 = 256;

pub(crate) fn times_factors(on: On<'_>, x: &Tensor, factors: &random::Factors) -> Tensor {
    let mut y = on.empty(x.shape(), DType::F32);
    let (first, count) = (factors.first.0, x.len());
    let groups = (first % FACTOR_GROUP + count as u64).div_ceil(FACTOR_GROUP) as usize;
    let mut args = vec![on.read(x), (x.dtype() == DType::BF16).into(), on.write(&mut y)];
    args.extend([count, first as usize, factors.first.1 as usize].map(Arg::elements));
    args.extend(factors.random.key_and_stream().map(Arg::from));
    args.extend([factors.eps, factors.dropout].map(Arg::from));
    // SAFETY: a thread reads and writes elements whose positions are below the count.
    unsafe { on.launch(&NOISE, "times_factors", (16 * groups).div_ceil(THREADS), &args) };
    y
}
