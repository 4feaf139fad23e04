//! Grouped products on a GPU: each group of rows with a matrix of its own, and plain products as one group.
//!
//! The kernel depends on sizes, types and the GPU alone. Groups of few rows, as in decoding, have a kernel that reads
//! each row of the matrices once; up to 32 rows with bf16 or quantized matrices have one on tensor cores. Other bf16
//! products whose sizes are whole vectors of 8 run on tensor cores with asynchronous copies in four stages: `wgmma`
//! and TMA on Hopper, `mma.sync` elsewhere. All others take a plain kernel.

use moeworks_tensor::{DType, Tensor};

use super::router::list_tiles;
use super::scattered::Scattered;
use super::small_m_gemm::{self, Layout};
use super::tile_list::{TileLists, num_tiles};
use super::{On, blocks, elementwise};
use crate::gemm::Form;
use moeworks_gpu::sources::{GROUPED, GROUPED_FP8, GROUPED_HOPPER};
use moeworks_gpu::{Arg, BOX_COLUMNS, Launch, Matrices, Onto, Pending, PendingProduct, ProductKernel, Source};

/// Rows and columns of a block's tile on the tensor cores.
pub(super) const TILE: usize = 128;
/// Shared memory of such a block: four stages of two operands.
const SHARED: usize = 4 * 2 * TILE * 32 * 2;
/// Bytes of a warp's buffer of sums for an epilogue of Hopper's kernels (`hopper_finish.cuh`).
const OWN_BUFFERS: usize = 4096;
/// Columns of a tile of Hopper's kernels; it has [`TILE`] rows.
pub(super) const HOPPER_COLUMNS: usize = 256;
/// Threads of a block of Hopper's kernels.
const HOPPER_THREADS: usize = 384;
/// The depth of a stage of Hopper's kernels.
pub(super) const HOPPER_DEPTH: usize = 64;
/// Shared memory of a block of Hopper's kernels: four stages, buffers of eight warps, barriers, and the block's
/// progress.
const HOPPER_SHARED: usize = 4 * (TILE + HOPPER_COLUMNS) * HOPPER_DEPTH * 2 + 8 * OWN_BUFFERS + 8 * 8 + 8;
/// Shared memory of a block of Hopper's FP8 kernels: square tiles, six stages of 128 in depth, and the buffers.
const FP8_SHARED: usize = 6 * (TILE + TILE) * 128 + 8 * OWN_BUFFERS + 12 * 8 + 8;
/// The depth by which Hopper's blocks may be apart, about; a power of two. All tiles at work have 0.6 MB of operands
/// for each of its 16 stages, of the 50 MB that an H100's second-level cache holds.
const EPOCH_DEPTH: usize = 1024;

/// Rows and columns of a plain block's tile.
pub(super) const PLAIN_TILE: usize = 64;
/// The most rows of a group that the vector kernel takes at once.
pub(super) const FEW_ROWS: usize = 8;
/// Columns of a block of the vector kernel: one for each warp.
const FEW_COLUMNS: usize = 8;
/// The most bytes of a short row of weights.
const MAX_SHORT_ROW: usize = 2048;
/// The fewest blocks, of two columns a warp, for which halving the number of blocks is worth it.
const MIN_SHORT_BLOCKS: usize = 32;
/// The most plain tiles of a result that has few.
const MAX_FEW_TILES: usize = 32;

/// The number of arguments behind those of a small-M kernel for rows to be combined (experts.rs).
pub(super) const COMBINE_ARGS: usize = 7;

/// Returns these arguments for rows that are not combined.
fn nothing_to_combine() -> [Arg<'static>; COMBINE_ARGS] {
    let none = Arg::none;
    [none(), none(), none(), none(), 0_u32.into(), 0_u32.into(), none()]
}

/// Returns whether a result of these sizes has few plain tiles.
pub(super) fn are_few_tiles(rows: usize, columns: usize) -> bool {
    rows.div_ceil(PLAIN_TILE) * columns.div_ceil(PLAIN_TILE) <= MAX_FEW_TILES
}

/// The kernel that takes a product.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kernel {
    /// On tensor cores.
    Tensor,
    /// On Hopper's tensor cores, with at most `processors` blocks.
    Hopper { processors: usize },
    /// In FP8 on Hopper's tensor cores.
    Fp8 { processors: usize },
    /// On the plain units.
    Plain,
    /// For few rows, on the plain units (`vec_gemm.cuh`).
    Vec,
    /// For up to 32 rows, on tensor cores with matrices of this type as they are stored (`small_m_gemm.cuh`).
    SmallM(DType),
}

impl Kernel {
    /// Returns the kernel on tensor cores for this GPU.
    pub(super) fn on_tensor_cores(on: On<'_>) -> Self {
        on.gpu.hopper_processors().map_or(Self::Tensor, |processors| Self::Hopper { processors })
    }

    /// Returns whether bf16 operands are multiplied in large tiles on tensor cores.
    pub(super) fn uses_tensor_cores(self) -> bool {
        self == Self::Tensor || self.is_of_hopper()
    }

    /// Returns whether it is one of Hopper's kernels, whose blocks process many tiles and load matrices by TMA.
    pub(super) fn is_of_hopper(self) -> bool {
        matches!(self, Self::Hopper { .. } | Self::Fp8 { .. })
    }

    /// Returns the kernel's source and name, from the names for tensor cores, for the plain kernel and for few rows.
    pub(super) fn source_and_name(self, [tensor, plain, few]: [&str; 3]) -> (&'static Source, String) {
        match self {
            Self::Vec => (&GROUPED, few.into()),
            Self::Plain => (&GROUPED, plain.into()),
            Self::Tensor => (&GROUPED, tensor.into()),
            Self::Hopper { .. } => (&GROUPED_HOPPER, format!("hopper_{tensor}")),
            Self::Fp8 { .. } => (&GROUPED_FP8, format!("fp8_{tensor}")),
            Self::SmallM(dtype) => small_m_gemm::kernel(tensor, dtype),
        }
    }

    /// The type in which elements are multiplied: f32 or bf16.
    pub(super) fn last_arg(self, compute: DType, listed: usize) -> Option<Arg<'static>> {
        match self {
            Self::Tensor | Self::SmallM(_) => None,
            Self::Hopper { .. } | Self::Fp8 { .. } => Some(listed.into()),
            Self::Plain | Self::Vec => Some((compute == DType::BF16).into()),
        }
    }

    /// Returns a launch for numbers of tiles of columns, of rows, and of groups.
    pub(super) fn launch<'a>(
        self,
        source: &'static Source,
        kernel: &'a str,
        tiles: [usize; 3],
        args: &'a [Arg<'a>],
    ) -> Launch<'a> {
        let (grid, threads, shared) = match self {
            Self::Tensor => (tiles, 256, SHARED),
            Self::Hopper { processors } => (in_one_dimension(tiles, processors), HOPPER_THREADS, HOPPER_SHARED),
            Self::Fp8 { processors } => (in_one_dimension(tiles, processors), HOPPER_THREADS, FP8_SHARED),
            Self::Plain | Self::Vec => (tiles, 256, 0),
            // Its shared memory is part of its layout.
            Self::SmallM(_) => (tiles, 256, 0),
        };
        Launch { source, kernel, grid, threads, shared, args }
    }
}

/// Returns the grid of blocks that process many tiles each.
fn in_one_dimension(tiles: [usize; 3], processors: usize) -> [usize; 3] {
    [tiles.iter().product::<usize>().min(processors), 1, 1]
}

/// Products of rows: `A B_g^T` ([`Form::Nt`]) or `A B_g` ([`Form::Nn`]) for the rows of each group g.
pub(super) struct RowsProduct<'a> {
    pub(super) form: Form,
    /// The rows of A, in order or named by `gather`.
    pub(super) a: &'a Tensor,
    /// `[R]` u32: the row of A for each row.
    pub(super) gather: Option<&'a Tensor>,
    /// The matrices, `group_rows` rows each.
    pub(super) b: &'a Tensor,
    /// The addresses of the groups' matrices, if these are not in `b`. `b` still gives their type and sizes.
    pub(super) scattered: Option<Scattered<'a>>,
    pub(super) group_rows: usize,
    /// Columns of the result: rows of B (nt) or columns of B (nn); with pairs the first of each pair.
    pub(super) columns: usize,
    pub(super) depth: usize,
    /// The distance from a column's row of B to its second row, if sums come in pairs.
    pub(super) pair: Option<usize>,
    /// f32 or bf16: what elements are multiplied as.
    pub(super) compute: DType,
    pub(super) groups: Groups<'a>,
    /// A is bf16 in the order of the levels of quantized blocks, as products take it for which
    /// [`reads_blocks`](RowsProduct::reads_blocks) holds.
    pub(super) a_in_levels: bool,
    /// The scales of A and B where these are [FP8](super::e4m3::Packed) (of [`Form::Nt`], on Hopper).
    pub(super) scales: Option<[&'a Tensor; 2]>,
}

/// The division of consecutive rows into groups.
#[derive(Clone, Copy)]
pub(super) enum Groups<'a> {
    /// One group with all rows.
    One { rows: usize },
    /// Group g has the rows `offsets[g]..offsets[g + 1]` of `rows` rows, at most `most`.
    Many { offsets: &'a Tensor, rows: usize, most: usize, listed: &'a TileLists },
}

impl Groups<'_> {
    /// Returns the most rows that a group may have. Choices rest on this bound, because the actual numbers are not
    /// known here.
    pub(super) fn most(self) -> usize {
        match self {
            Self::One { rows } => rows,
            Self::Many { most, .. } => most,
        }
    }
}

/// An epilogue: the names of its kernels on tensor cores (Hopper's with `hopper_` before), on the plain units, and
/// for few rows (of `A B^T` alone), and its arguments.
pub(super) struct Epilogue<'a> {
    pub(super) kernels: [&'static str; 3],
    pub(super) args: Vec<Arg<'a>>,
    /// The places of sums of the form `A B^T` that are stored without change. Such a launch may be fused with the
    /// next one.
    pub(super) stored: Option<Stored<'a>>,
}

/// The places of a product's sums.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    to: Arg<'a>,
    /// The summand, or the null pointer.
    base: Arg<'a>,
}

impl RowsProduct<'_> {
    /// Returns the kernel that takes the product. All but the plain kernel take vectors of 8, which must be within
    /// one row of each operand.
    fn kernel(&self, on: On<'_>) -> Kernel {
        if let Some((_, processors)) = self.scales.zip(on.gpu.hopper_processors()) {
            return Kernel::Fp8 { processors };
        }
        let is_whole = self.depth.is_multiple_of(8) && self.depth > 0;
        let has_few_rows = self.groups.most() <= FEW_ROWS;
        if self.b.dtype().is_quantized() {
            // There is a kernel, as `reads_blocks` has checked.
            return Kernel::SmallM(self.b.dtype());
        }
        let is_bf16 = self.compute == DType::BF16 && self.b.dtype() == DType::BF16;
        if is_bf16 && self.has_small_groups() && small_m_gemm::takes(DType::BF16, self.depth) {
            return Kernel::SmallM(DType::BF16);
        }
        match self.form {
            Form::Nt if is_whole && (has_few_rows || self.has_few_tiles()) => Kernel::Vec,
            Form::Nt if is_whole && is_bf16 => Kernel::on_tensor_cores(on),
            Form::Nn if is_whole && is_bf16 && self.columns.is_multiple_of(8) => Kernel::on_tensor_cores(on),
            _ => Kernel::Plain,
        }
    }

    /// Returns whether a product without tensor cores, such as a router's, has so few tiles that most of a GPU would
    /// be idle. A warp for each column of eight rows is then faster, though it reads B again for every eight rows.
    fn has_few_tiles(&self) -> bool {
        match self.groups {
            Groups::One { rows } if self.b.dtype() == DType::F32 => are_few_tiles(rows, self.columns),
            _ => false,
        }
    }

    /// Returns whether a warp with few rows should take two columns at a time, because one column ends before enough
    /// loads are in flight.
    fn has_short_rows(&self, on: On<'_>) -> bool {
        if self.b.dtype().is_quantized() {
            return false;
        }
        let row_bytes = self.depth * self.b.dtype().size();
        let tiles = match self.groups {
            Groups::One { rows } => rows.div_ceil(FEW_ROWS),
            Groups::Many { offsets, rows, .. } => num_tiles(FEW_ROWS, rows, offsets.len() - 1),
        };
        let has_two = self.pair.is_none() && self.columns.is_multiple_of(2 * FEW_COLUMNS);
        let are_many = self.columns / (2 * FEW_COLUMNS) * tiles >= MIN_SHORT_BLOCKS;
        has_two && are_many && row_bytes <= MAX_SHORT_ROW && self.kernel(on) == Kernel::Vec
    }

    /// Returns the columns of a block's tile.
    fn tile_columns(&self, on: On<'_>) -> usize {
        let all = match self.kernel(on) {
            Kernel::Tensor | Kernel::Fp8 { .. } => TILE,
            Kernel::Hopper { .. } => HOPPER_COLUMNS,
            Kernel::Plain => return PLAIN_TILE,
            Kernel::Vec => return FEW_COLUMNS,
            Kernel::SmallM(dtype) => self.layout(on, dtype).tiles * small_m_gemm::LINES,
        };
        if self.pair.is_some() { all / 2 } else { all }
    }

    /// Returns the layout of blocks for few rows (`small_m_gemm.cuh`).
    fn layout(&self, on: On<'_>, dtype: DType) -> Layout {
        let (tiles, is_one) = match self.groups {
            Groups::One { rows } => (rows.div_ceil(small_m_gemm::ROWS), true),
            Groups::Many { offsets, rows, .. } => (num_tiles(self.small_m_height(), rows, offsets.len() - 1), false),
        };
        let lines = self.columns * if self.pair.is_some() { 2 } else { 1 };
        let blocks = |of_block| lines.div_ceil(of_block * small_m_gemm::LINES) * tiles;
        Layout::new(on, dtype, self.depth, self.groups.most(), is_one, blocks)
    }

    /// Returns the rows of a tile of the small-M kernels.
    fn small_m_height(&self) -> usize {
        if self.groups.most() > FEW_ROWS { small_m_gemm::ROWS } else { FEW_ROWS }
    }

    /// Returns the number of tiles that the columns are cut into.
    pub(super) fn column_tiles(&self, on: On<'_>) -> usize {
        self.columns.div_ceil(self.tile_columns(on))
    }

    /// Returns `[tiles, 3]`: `(group, first row, rows)` of each tile. Tiles of many groups may be without rows.
    fn tiles(&self, on: On<'_>) -> Tensor {
        let height = match self.kernel(on) {
            Kernel::Tensor | Kernel::Hopper { .. } | Kernel::Fp8 { .. } => TILE,
            Kernel::Plain => PLAIN_TILE,
            Kernel::SmallM(_) => self.small_m_height(),
            Kernel::Vec => FEW_ROWS,
        };
        match self.groups {
            Groups::One { rows } => {
                let tile = |first: usize| [0, first as u32, height.min(rows - first) as u32];
                on.cached_list(&(0..rows).step_by(height).flat_map(tile).collect::<Vec<_>>())
            }
            Groups::Many { offsets, rows, listed, .. } => listed
                .with_height(height, || list_tiles(on, offsets, height, num_tiles(height, rows, offsets.len() - 1))),
        }
    }

    /// Computes all sums and hands them to the epilogue. Quantized matrices without a kernel are dequantised to bf16
    /// first.
    ///
    /// # Safety
    ///
    /// The epilogue's arguments are those of its kernels for R rows of `columns` columns.
    pub(super) unsafe fn run(&self, on: On<'_>, epilogue: &Epilogue<'_>) {
        if self.is_there() {
            // SAFETY: the caller's promise.
            return unsafe { self.run_as_it_lies(on, epilogue) };
        }
        let offsets = match self.groups {
            Groups::One { .. } => None,
            Groups::Many { offsets, .. } => Some(offsets),
        };
        let b = &blocks::to_bf16(on, self.b, offsets, self.scattered);
        let addresses = self.scattered.map(|scattered| scattered.in_stack(on, b));
        let scattered =
            self.scattered.zip(addresses.as_ref()).map(|(scattered, addresses)| Scattered { addresses, ..scattered });
        // SAFETY: the caller's promise.
        unsafe { RowsProduct { b, scattered, compute: DType::BF16, ..*self }.run_as_it_lies(on, epilogue) };
    }

    /// Returns the number of rows and of groups.
    fn rows_and_groups(&self) -> (usize, usize) {
        match self.groups {
            Groups::One { rows } => (rows, 1),
            Groups::Many { offsets, rows, .. } => (rows, offsets.len() - 1),
        }
    }

    /// Returns whether groups have so few rows on average that most of a tile of tensor cores would be empty.
    fn has_small_groups(&self) -> bool {
        let (rows, groups) = self.rows_and_groups();
        let is_decoding = self.groups.most() <= FEW_ROWS || rows <= small_m_gemm::ROWS / 2 * groups && groups > 1;
        self.form == Form::Nt && self.scales.is_none() && is_decoding
    }

    /// Returns whether a small-M kernel takes the product with the matrices as they are stored.
    pub(super) fn is_small_m(&self, on: On<'_>) -> bool {
        self.is_there() && matches!(self.kernel(on), Kernel::SmallM(_))
    }

    /// Returns whether quantized matrices of this type and depth, one for each group of this product, are multiplied
    /// as they are stored. Groups of more rows than are taken at once read their blocks several times, and the rows
    /// again for every few columns; but dequantising four-bit blocks to bf16 first moves eight times their bytes.
    pub(super) fn reads_blocks(&self, dtype: DType, depth: usize) -> bool {
        let (rows, groups) = self.rows_and_groups();
        let are_few = self.groups.most() <= small_m_gemm::ROWS || rows <= small_m_gemm::ROWS * groups;
        dtype.is_quantized() && are_few && small_m_gemm::takes(dtype, depth)
    }

    /// Computes all sums with the matrices as they are stored.
    ///
    /// # Safety
    ///
    /// See [`run`](Self::run).
    unsafe fn run_as_it_lies(&self, on: On<'_>, epilogue: &Epilogue<'_>) {
        let (kernel, tiles) = (self.kernel(on), self.tiles(on));
        let grid = [self.column_tiles(on), tiles.len() / 3, 1];
        let is_fp8 = self.scales.is_some();
        let rounded = (kernel.uses_tensor_cores() && !is_fp8 && self.a.dtype() != DType::BF16)
            .then(|| elementwise::cast(on, self.a, DType::BF16));
        let is_to_be_ordered =
            matches!(kernel, Kernel::SmallM(_)) && !self.a_in_levels && self.a.rows() >= small_m_gemm::MANY_ROWS;
        let levels = small_m_gemm::in_level_order(on, self.a, self.b.dtype(), is_to_be_ordered);
        let a = levels.as_ref().or(rounded.as_ref()).unwrap_or(self.a);
        // Kernels copy FP8 numbers in pairs.
        let depth = if is_fp8 { self.depth / 2 } else { self.depth };
        let b_stride = match self.form {
            _ if matches!(kernel, Kernel::SmallM(_)) => small_m_gemm::row_bytes(self.b.dtype(), self.depth),
            Form::Nt => depth,
            _ => self.columns,
        };
        let a_in_levels = self.a_in_levels || levels.is_some();
        let mut args = self.operands(on, a, a_in_levels, &tiles, depth, b_stride).to_vec();
        args.extend_from_slice(&epilogue.args);
        let layout = if let Kernel::SmallM(dtype) = kernel { Some(self.layout(on, dtype)) } else { None };
        if let Some(layout) = layout {
            args.extend(layout.args());
            if epilogue.stored.is_some() {
                args.extend(nothing_to_combine());
            }
        }
        args.extend(kernel.last_arg(self.compute, grid[1]));
        let counters = kernel.is_of_hopper().then(|| on.gpu.counters(on.ctx.pool()));
        if let Some(counters) = &counters {
            // With counters blocks keep together (`hopper_tiles.cuh`).
            let counters = if on.gpu.options().without_pace { Arg::none() } else { on.read(counters) };
            args.extend([counters, (EPOCH_DEPTH - 1).into(), depth.div_ceil(EPOCH_DEPTH).into()]);
        }
        let map = kernel.is_of_hopper().then(|| self.b_map(on, b_stride));
        args.extend(map.as_ref().map(|map| on.read_or_none(map.as_ref())));
        args.extend(self.scales.into_iter().flatten().map(|scales| on.read(scales)));
        let (source, name) = kernel.source_and_name(epilogue.kernels);
        let launch = kernel.launch(source, &name, grid, &args);
        let launch = Launch { shared: layout.map_or(launch.shared, |layout| layout.shared), ..launch };
        let pending = epilogue.stored.and_then(|stored| self.pending(on, kernel, a, launch.grid, stored));
        // SAFETY: tiles lie within the rows, the gathered rows within A, and the groups' matrices within B, as the
        // operation's checks say; the epilogue is the caller's promise.
        unsafe {
            match pending {
                Some(product) => on.gpu.launch_pending(&launch, Pending::Product(product)),
                None => on.gpu.launch(&launch),
            }
        }
    }

    /// Declares the product where its kernel can be fused with the next launch.
    fn pending<'a>(
        &'a self,
        on: On<'_>,
        kernel: Kernel,
        a: &'a Tensor,
        grid: [usize; 3],
        Stored { to, base }: Stored<'a>,
    ) -> Option<PendingProduct<'a>> {
        let kernel = match kernel {
            Kernel::Vec => ProductKernel::Vec,
            Kernel::SmallM(_) => ProductKernel::SmallM,
            _ => return None,
        };
        let (columns, depth, b_is_bf16) = (self.columns, self.depth, self.b.dtype() == DType::BF16);
        let gather = on.read_or_none(self.gather);
        Some(PendingProduct { kernel, a: on.read(a), gather, b_is_bf16, columns, depth, to, base, grid })
    }

    /// Returns the arguments that every kernel begins with: A as it is read, a list of tiles, the depth and the
    /// stride of B.
    fn operands<'a>(
        &'a self,
        on: On<'_>,
        a: &'a Tensor,
        a_in_levels: bool,
        tiles: &'a Tensor,
        depth: usize,
        b_stride: usize,
    ) -> [Arg<'a>; 13] {
        [
            on.read(a),
            on.read_or_none(self.gather),
            on.read(self.scattered.map_or(self.b, |scattered| scattered.addresses)),
            on.read(tiles),
            small_m_gemm::kind_of(a.dtype(), a_in_levels),
            (self.b.dtype() == DType::BF16).into(),
            depth.into(),
            b_stride.into(),
            self.group_rows.into(),
            self.columns.into(),
            depth.into(),
            self.pair.unwrap_or(0).into(),
            self.scattered.is_some().into(),
        ]
    }

    /// Returns whether [`combined`](Self::combined) has a kernel: for up to [`ROWS`](small_m_gemm::ROWS) rows, each
    /// of a group of its own.
    pub(super) fn can_be_combined(&self, on: On<'_>) -> bool {
        let Groups::Many { rows, most: 1, .. } = self.groups else { return false };
        let is_whole = self.gather.is_none() && self.pair.is_none();
        (1..=small_m_gemm::ROWS).contains(&rows)
            && is_whole
            && matches!(self.kernel(on), Kernel::SmallM(_))
            && self.is_there()
    }

    /// Returns whether kernels can read the matrices as they are stored.
    fn is_there(&self) -> bool {
        !self.b.dtype().is_quantized() || self.reads_blocks(self.b.dtype(), self.depth)
    }

    /// Returns the sum of all rows' products, each times its row's weight, and of `base`, if there is one: `[1,
    /// columns]` f32.
    pub(super) fn combined(&self, on: On<'_>, weights: &Tensor, base: Option<&Tensor>) -> Tensor {
        let (rows, _) = self.rows_and_groups();
        let (dtype, tiles, mut y) = (self.b.dtype(), self.tiles(on), on.empty(&[1, self.columns], DType::F32));
        let b_stride = small_m_gemm::row_bytes(dtype, self.depth);
        let mut args = self.operands(on, self.a, self.a_in_levels, &tiles, self.depth, b_stride).to_vec();
        let blocks = self.columns.div_ceil(small_m_gemm::LINES);
        let Layout { stages, shared, .. } = Layout::for_one_tile(on, dtype, blocks);
        args.extend([on.read(weights), rows.into(), stages.into()]);
        args.extend([on.write(&mut y), on.read_or_none(base), false.into(), self.columns.into()]);
        let (source, kernel) = small_m_gemm::kernel("combined", dtype);
        let launch = Launch { source, kernel: &kernel, grid: [blocks, 1, 1], threads: 256, shared, args: &args };
        // SAFETY: the rows' tiles name groups that have matrices; a block writes its columns.
        unsafe { on.gpu.launch(&launch) };
        drop(args);
        y
    }

    /// Returns the TMA map of B for Hopper's kernels, in the GPU's memory. Boxes have a tile's columns, or a pair's
    /// half of them, where rows lie along the depth, and a stage's depth where they lie across it.
    fn b_map(&self, on: On<'_>, b_stride: usize) -> Option<Tensor> {
        if self.scattered.is_some() {
            return None;
        }
        let (rows, count) = match (self.groups, self.form) {
            (Groups::Many { offsets, .. }, _) => (self.group_rows, offsets.len() - 1),
            (Groups::One { .. }, Form::Nt) => (self.pair.unwrap_or(0) + self.columns, 1),
            (Groups::One { .. }, _) => (self.depth, 1),
        };
        let (box_rows, box_blocks) = match self.form {
            Form::Nt => (self.tile_columns(on), 1),
            _ => (HOPPER_DEPTH, HOPPER_COLUMNS / BOX_COLUMNS as usize),
        };
        let address = on.gpu.address(self.b);
        let matrices = Matrices { address, columns: b_stride, rows, count, box_rows, box_blocks };
        Some(on.cached_list(&on.gpu.tensor_map(&matrices)?))
    }

    /// Returns the sums as `[rows, columns]` of a type.
    pub(super) fn store(&self, on: On<'_>, rows: usize, out: DType) -> Tensor {
        self.store_onto(on, rows, out, None)
    }

    /// Returns the sums plus `base` (f32, same shape), if there is one.
    pub(super) fn store_onto(&self, on: On<'_>, rows: usize, out: DType, base: Option<&Tensor>) -> Tensor {
        let mut y = on.empty(&[rows, self.columns], out);
        self.store_sums(on, &mut y, base);
        y
    }

    /// Writes the sums of the groups' rows to `y`, `[rows, columns]` (f32 or bf16).
    pub(super) fn store_to(&self, on: On<'_>, y: &mut Tensor) {
        self.store_sums(on, y, None);
    }

    /// Hands the product to NVIDIA's library if it is a plain one for tensor cores. Returns whether the library took
    /// it.
    fn is_taken(&self, on: On<'_>, y: &mut Tensor, base: Option<&Tensor>) -> bool {
        let Groups::One { rows } = self.groups else { return false };
        let is_plain =
            self.gather.is_none() && self.scattered.is_none() && self.pair.is_none() && self.scales.is_none();
        if !is_plain || !on.gpu.takes_dense() || !self.kernel(on).uses_tensor_cores() {
            return false;
        }
        let RowsProduct { form, columns, depth, .. } = *self;
        if [self.a.len(), self.b.len(), y.len()] != [rows * depth, columns * depth, rows * columns] {
            return false;
        }
        let product = super::dense_product(form, [rows, columns, depth], y.dtype() == DType::BF16);
        let onto = base.map_or(Onto::Nothing, Onto::Tensor);
        // A base is f32, and the library has no product onto another type than the result's.
        (base.is_none() || !product.is_rounded) && on.gpu.dense(product, [&rounded(on, self.a), self.b], onto, y)
    }

    /// Writes the sums to `y`, by the library or by a kernel.
    fn store_sums(&self, on: On<'_>, y: &mut Tensor, base: Option<&Tensor>) {
        if self.is_taken(on, y, base) {
            return;
        }
        let is_bf16 = y.dtype() == DType::BF16;
        let kernels = match self.form {
            Form::Nt => ["rows_nt", "plain_rows_nt", "vec_rows_nt"],
            _ => ["rows_nn", "plain_rows_nn", ""],
        };
        let stored = Stored { to: on.write(y), base: on.read_or_none(base) };
        let args = vec![stored.to, stored.base, is_bf16.into(), self.columns.into()];
        // SAFETY: the output has a row for each row of the groups.
        unsafe {
            if self.has_short_rows(on) {
                let half = self.columns / 2;
                let kernels = [kernels[0], kernels[1], "vec_both_nt"];
                let epilogue = Epilogue { kernels, args, stored: None };
                return Self { columns: half, pair: Some(half), ..*self }.run(on, &epilogue);
            }
            let stored = (self.form == Form::Nt).then_some(stored);
            self.run(on, &Epilogue { kernels, args, stored });
        }
    }
}

/// Returns the tensor in bf16; the tensor itself if it is bf16.
pub(super) fn rounded(on: On<'_>, x: &Tensor) -> Tensor {
    if x.dtype() == DType::BF16 { x.clone() } else { elementwise::cast(on, x, DType::BF16) }
}
