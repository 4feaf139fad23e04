//! Weight gradients on a GPU: sums over the rows of each group, and plain ones as one group.

use moeworks_tensor::{DType, Tensor};

use super::grouped::{HOPPER_COLUMNS, HOPPER_DEPTH, Kernel, PLAIN_TILE, TILE, rounded};
use super::{On, elementwise};
use crate::gemm::Form;
use crate::linear::Write;
use moeworks_gpu::{Arg, BOX_COLUMNS, Matrices, Onto};

/// The number of tiles that keeps a GPU busy.
const WANTED_TILES: usize = 128;
/// The fewest rows of depth that are worth a tile of their own.
const MIN_PART_DEPTH: usize = 512;

/// Returns the number of parts in which the sums `a^T b` over `depth` rows are taken, so that there are tiles for all
/// of a GPU. It depends on sizes alone.
fn parts_of_depth(rows: usize, columns: usize, depth: usize) -> usize {
    let num_tiles = rows.div_ceil(TILE) * columns.div_ceil(HOPPER_COLUMNS);
    (WANTED_TILES / num_tiles.max(1)).clamp(1, (depth / MIN_PART_DEPTH).max(1))
}

/// Returns `a^T b` of `a [T, M]` and `b [T, N]` in parts of the rows, `[parts M, N]` f32, and the number of parts.
pub(super) fn sums_in_parts(on: On<'_>, a: &Tensor, b: &Tensor, compute: DType) -> (Tensor, usize) {
    let (depth, rows, columns) = (a.rows(), a.cols(), b.cols());
    let num_parts = parts_of_depth(rows, columns, depth);
    let offsets: Vec<u32> = (0..=num_parts).map(|part| (depth * part / num_parts) as u32).collect();
    let mut sums = on.empty(&[num_parts * rows, columns], DType::F32);
    let (a, b, offsets) = ((a, None), (b, None), &on.cached_list(&offsets));
    WgradProduct { a, b, rows, columns, offsets, compute, keeps_unused: false }.run(on, Write::Replace, &mut sums);
    (sums, num_parts)
}

/// Writes or adds `a^T b` to `to`.
pub(super) fn sums(on: On<'_>, a: &Tensor, b: &Tensor, compute: DType, write: Write, to: &mut Tensor) {
    let (depth, rows, columns) = (a.rows(), a.cols(), b.cols());
    let is_whole = [rows, columns].iter().all(|size| size.is_multiple_of(8));
    if compute == DType::BF16 && is_whole && on.gpu.takes_dense() {
        // Tensors that are not bf16 are rounded once, whichever code multiplies them.
        let (a, b) = (&rounded(on, a), &rounded(on, b));
        let product = super::dense_product(Form::Tn, [rows, columns, depth], false);
        let onto = if write == Write::Add { Onto::Itself } else { Onto::Nothing };
        if !on.gpu.dense(product, [a, b], onto, to) {
            sums_by_kernels(on, a, b, compute, write, to);
        }
        return;
    }
    sums_by_kernels(on, a, b, compute, write, to);
}

/// Writes or adds `a^T b` to `to`, by our own kernels.
fn sums_by_kernels(on: On<'_>, a: &Tensor, b: &Tensor, compute: DType, write: Write, to: &mut Tensor) {
    let (depth, rows, columns) = (a.rows(), a.cols(), b.cols());
    if parts_of_depth(rows, columns, depth) > 1 {
        let (sums, num_parts) = sums_in_parts(on, a, b, compute);
        return elementwise::add_parts(on, &sums, 1, num_parts, write, to);
    }
    let (a, b, offsets) = ((a, None), (b, None), &on.cached_list(&[0, depth as u32]));
    WgradProduct { a, b, rows, columns, offsets, compute, keeps_unused: false }.run(on, write, to);
}

/// Gradients of matrices: `dW_g = A_g^T B_g` over the rows of each group, `[E, rows, columns]` in f32, or in bf16
/// with sums that are rounded once.
pub(super) struct WgradProduct<'a> {
    /// `[.., rows]`, and which of its rows.
    pub(super) a: (&'a Tensor, Option<&'a Tensor>),
    /// `[.., columns]`, and which of its rows.
    pub(super) b: (&'a Tensor, Option<&'a Tensor>),
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// `[E + 1]` u32: the first row of each group.
    pub(super) offsets: &'a Tensor,
    pub(super) compute: DType,
    /// Leaves the matrices of groups without rows as they are.
    pub(super) keeps_unused: bool,
}

/// Returns the TMA map of consecutive rows of `width` columns that lie across the depth, with boxes of a tile's
/// columns.
fn depth_map(on: On<'_>, x: &Tensor, width: usize, tile: usize) -> Option<Tensor> {
    let (address, box_blocks) = (on.gpu.address(x), tile / BOX_COLUMNS as usize);
    let rows = x.len() / width.max(1);
    let matrices = Matrices { address, columns: width, rows, count: 1, box_rows: HOPPER_DEPTH, box_blocks };
    Some(on.cached_list(&on.gpu.tensor_map(&matrices)?))
}

impl WgradProduct<'_> {
    /// Writes or adds the gradients to `to`.
    pub(super) fn run(&self, on: On<'_>, write: Write, to: &mut Tensor) {
        let is_whole = self.rows.is_multiple_of(8) && self.columns.is_multiple_of(8);
        let kernel = match self.compute == DType::BF16 && is_whole {
            true => Kernel::on_tensor_cores(on),
            false => Kernel::Plain,
        };
        let rounded = |x: &Tensor| {
            (kernel.uses_tensor_cores() && x.dtype() != DType::BF16).then(|| elementwise::cast(on, x, DType::BF16))
        };
        let (rounded_a, rounded_b) = (rounded(self.a.0), rounded(self.b.0));
        let (a, b) = (rounded_a.as_ref().unwrap_or(self.a.0), rounded_b.as_ref().unwrap_or(self.b.0));
        let is_bf16 = |tensor: &Tensor| Arg::from(tensor.dtype() == DType::BF16);
        let to_bf16 = is_bf16(to);
        let mut args = vec![
            on.read(a),
            on.read_or_none(self.a.1),
            on.read(b),
            on.read_or_none(self.b.1),
            on.read(self.offsets),
            is_bf16(a),
            is_bf16(b),
            self.rows.into(),
            self.columns.into(),
            self.keeps_unused.into(),
            on.write(to),
            to_bf16,
            (write == Write::Add).into(),
        ];
        let (tile_rows, tile_columns) = match kernel {
            Kernel::Tensor | Kernel::Fp8 { .. } => (TILE, TILE),
            Kernel::Hopper { .. } => (TILE, HOPPER_COLUMNS),
            Kernel::Plain | Kernel::Vec | Kernel::SmallM(_) => (PLAIN_TILE, PLAIN_TILE),
        };
        let groups = self.offsets.len() - 1;
        let grid = [self.columns.div_ceil(tile_columns), self.rows.div_ceil(tile_rows), groups];
        args.extend(kernel.last_arg(self.compute, groups));
        let operands = [(a, self.a.1, self.rows, tile_rows), (b, self.b.1, self.columns, tile_columns)];
        let maps = operands.map(|(x, gather, width, tile)| match (kernel.is_of_hopper(), gather) {
            (true, None) => depth_map(on, x, width, tile),
            _ => None,
        });
        if kernel.is_of_hopper() {
            args.extend(maps.iter().map(|map| on.read_or_none(map.as_ref())));
        }
        let (source, name) = kernel.source_and_name(["wgrad_tn", "plain_wgrad_tn", ""]);
        let launch = kernel.launch(source, &name, grid, &args);
        // SAFETY: offsets and gathered rows lie within the operands, as the operation's checks say, and each block
        // writes its own tile of its group's matrix.
        unsafe { on.gpu.launch(&launch) };
    }
}
