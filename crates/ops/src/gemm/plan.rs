//! The choice of the kernel that computes a product, as a value that can be printed.
//!
//! It depends on sizes, types, the layout of B's rows and the instruction set, never on the contents of memory or the
//! number of threads. The cut into tasks comes later and does not change the order of sums.

use std::fmt;

use moeworks_tensor::DType;

use super::kernel::{Kernels, widest};
use super::source::{Elements, Source};
use super::{Compute, Form, Group, Product};
use crate::Isa;

/// The most rows of a group that skinny kernels take.
pub(crate) const MAX_SKINNY: usize = 16;
/// The most rows that they take if A and B can be swapped: in general, and in f32 with AVX-512 alone, where skinny
/// kernels keep up with memory for more rows.
const MAX_UNSWAPPED: usize = 4;
const MAX_UNSWAPPED_AVX512: usize = 8;
/// The most rows that they take where bf16 pairs are multiplied, which halves the products, and the rows of A, of at
/// most [`CLOSE_PAIRS`] elements in all, stay in the L1 cache.
const MAX_UNSWAPPED_PAIRS: usize = 12;
/// Elements of A that fit two thirds of an L1 cache of 32 KiB, next to the weights that stream past.
const CLOSE_PAIRS: usize = 10_000;
/// Bytes of all groups' weights from which on they are assumed to come from memory and not from a cache.
const MEMORY_BYTES: usize = 1 << 20;
/// The most rows of a group for which packing A is faster than packing B.
pub(crate) const MAX_SWAPPED: usize = 256;
/// Rows of a group up to which fetching B takes longer than multiplying it in tiles.
pub(super) const FEW_TILE_ROWS: usize = 160;
/// The most rows that outer products take (the depth of a weight gradient): in general; with 16 lanes and without
/// tiles, where sums are written as whole lines; and next to tiles for f32 as three bf16.
const MAX_OUTER: usize = 16;
const MAX_OUTER_WIDE: usize = 256;
const MAX_OUTER_BESIDE_BF16X3: usize = 96;
/// Lanes of the widest vector.
const WIDE_LANES: usize = 16;

/// The kernels of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// Few rows of A: each weight is read once, in place, and nothing is packed.
    Skinny,
    /// A weight gradient of few tokens, as outer products whose stores bypass the caches.
    SkinnyGradient,
    /// B is packed into panels, rows of A are used in place.
    Packed,
    /// Both operands are packed, because rows of both run across the depth.
    BothPacked,
    /// A and B are swapped: A is packed, so that its rows are lanes, and rows of B are used in place.
    SwapAb,
    /// AMX tiles with B packed.
    TilesDirect,
    /// AMX tiles with A and B swapped.
    TilesSwapAb,
    /// [`TilesDirect`](Self::TilesDirect) for f32, each element as three bf16.
    Bf16x3Direct,
    /// [`TilesSwapAb`](Self::TilesSwapAb) for f32, each element as three bf16.
    Bf16x3SwapAb,
    /// Integer dot products of quantized weights with rows quantized to int8.
    QuantizedDot,
}

impl GemmKernel {
    /// Returns whether A and B are swapped.
    #[must_use]
    pub fn is_swapped(self) -> bool {
        matches!(self, Self::SwapAb | Self::TilesSwapAb | Self::Bf16x3SwapAb)
    }

    /// Returns whether an f32 is split into three bf16.
    #[must_use]
    pub fn is_bf16x3(self) -> bool {
        matches!(self, Self::Bf16x3Direct | Self::Bf16x3SwapAb)
    }

    fn has_tiles(self) -> bool {
        self.is_bf16x3() || matches!(self, Self::TilesDirect | Self::TilesSwapAb)
    }

    /// Returns the AMX kernel for a product whose elements are split into `parts` bf16.
    fn in_tiles(problem: &GemmProblem, parts: usize) -> Self {
        // Split operands cannot be used in place.
        let is_swapped = problem.form == Form::Nt && (parts == 1 || problem.rows <= FEW_TILE_ROWS);
        match (is_swapped, parts > 1) {
            (true, true) => Self::Bf16x3SwapAb,
            (true, false) => Self::TilesSwapAb,
            (false, true) => Self::Bf16x3Direct,
            (false, false) => Self::TilesDirect,
        }
    }
}

/// The time at which quantized weights are converted to floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dequantize {
    /// Inside the product, some rows at a time.
    InProduct,
    /// Before the product, to bf16 in memory.
    Before,
}

/// The layout of B's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// The type of its elements.
    pub dtype: DType,
    /// Bytes of a row as long as the depth.
    pub row_bytes: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements before the first row.
    pub offset: usize,
    /// Elements added to the offset of rows in the second half of the matrix, if its halves are apart.
    pub gap: usize,
    /// True if rows are gathered by index.
    pub is_gathered: bool,
}

impl RowLayout {
    /// Returns the layout of a whole matrix with rows of `width` elements.
    #[must_use]
    pub fn whole(dtype: DType, width: usize) -> Self {
        Self {
            dtype,
            row_bytes: width.div_ceil(dtype.block_len()) * dtype.size(),
            stride: width,
            offset: 0,
            gap: 0,
            is_gathered: false,
        }
    }

    fn from_source(source: &Source<'_>, depth: usize) -> Self {
        Self {
            dtype: match source.elements {
                Elements::F32(_) => DType::F32,
                Elements::Bf16(_) => DType::BF16,
                Elements::F16(_) => DType::F16,
            },
            row_bytes: source.bytes_of(depth),
            stride: source.stride,
            offset: source.offset,
            gap: source.gap.map_or(0, |(_, gap)| gap),
            is_gathered: source.indices.is_some(),
        }
    }

    /// Returns whether rows can be used in units of these kernels, in place or after widening: all places in a row
    /// must be whole units.
    fn is_in_units(&self, kernels: &Kernels, compute: Compute, depth: usize) -> bool {
        let format = kernels.format(compute);
        let elements = format.elements_of(1);
        let is_taken = match self.dtype {
            DType::F32 => format.units == Compute::F32 && format.precision == Compute::F32,
            DType::BF16 => format.parts == 1 || format.units == Compute::F32,
            _ => true,
        };
        is_taken && [depth, self.stride, self.offset, self.gap].iter().all(|len| len.is_multiple_of(elements))
    }
}

/// The properties of a product that the choice of its kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmProblem {
    /// The layout of both operands.
    pub form: Form,
    /// The type of the factors.
    pub compute: Compute,
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result; half of them if they are paired.
    pub columns: usize,
    /// Terms of each sum.
    pub depth: usize,
    /// True if columns come in pairs.
    pub is_paired: bool,
    /// Number of products in the list.
    pub num_groups: usize,
    /// The most rows of any product in the list.
    pub most_rows: usize,
    /// The layout of B's rows.
    pub b: RowLayout,
    /// True if the result is a weight gradient in whole rows, which outer products may write.
    pub is_gradient: bool,
}

impl GemmProblem {
    /// Describes a linear layer's forward: `x [rows, depth] w^T`, with `w [columns, depth]` of type `weights`.
    #[must_use]
    pub fn linear([rows, columns, depth]: [usize; 3], weights: DType) -> Self {
        let compute = if weights.is_quantized() { Compute::Bf16 } else { Compute::from_dtype(weights) };
        Self {
            form: Form::Nt,
            compute,
            rows,
            columns,
            depth,
            is_paired: false,
            num_groups: 1,
            most_rows: rows,
            b: RowLayout::whole(weights, depth),
            is_gradient: false,
        }
    }

    /// Describes the gradient of its input: `dy [rows, depth] w`, with `w [depth, columns]`.
    #[must_use]
    pub fn linear_backward_input(sizes: [usize; 3], weights: DType) -> Self {
        let [_, columns, _] = sizes;
        let b = RowLayout { stride: columns, ..RowLayout::whole(weights, sizes[2]) };
        Self { form: Form::Nn, b, ..Self::linear(sizes, weights) }
    }

    /// Describes the gradient of its weights: `dy^T x`, with `dy [depth, rows]` and `x [depth, columns]`.
    #[must_use]
    pub fn linear_backward_weight(sizes: [usize; 3], compute: DType) -> Self {
        Self { form: Form::Tn, is_gradient: true, ..Self::linear_backward_input(sizes, compute) }
    }

    pub(crate) fn from_group(product: &Product<'_>, group: &Group<'_>, most_rows: usize) -> Self {
        Self {
            form: product.form,
            compute: product.compute,
            rows: group.rows,
            columns: group.columns,
            depth: group.depth,
            is_paired: product.is_paired,
            num_groups: product.groups.len(),
            most_rows,
            b: RowLayout::from_source(&group.b, group.depth),
            is_gradient: false,
        }
    }

    fn num_tiles(&self) -> usize {
        if self.is_paired { 2 } else { 1 }
    }

    /// Returns whether A and B can be swapped.
    fn can_swap(&self, kernels: &Kernels) -> bool {
        (kernels.halves.is_some() || kernels.are_tiles)
            && self.form == Form::Nt
            && !self.b.is_gathered
            && self.b.is_in_units(kernels, self.compute, self.depth)
            && self.depth > 0
            && self.rows <= MAX_SWAPPED
    }

    /// Returns whether swapping is faster than a skinny kernel once there are enough rows, which holds for weights
    /// from memory. Products with cached weights stay with skinny kernels, whose sums over many lanes round less.
    fn is_better_swapped(&self, kernels: &Kernels) -> bool {
        let bytes = self.b.row_bytes * self.columns * self.num_tiles() * self.num_groups;
        bytes >= MEMORY_BYTES && self.can_swap(kernels)
    }

    fn is_skinny(&self, kernels: &Kernels, isa: Isa) -> bool {
        let most = match self.compute {
            _ if !self.is_better_swapped(kernels) => MAX_SKINNY,
            // Rows of weights would have to be widened for few products.
            _ if kernels.compute == Compute::F32 && self.b.dtype == DType::BF16 => MAX_SKINNY,
            Compute::F32 if isa == Isa::Avx512 => MAX_UNSWAPPED_AVX512,
            Compute::F32 => MAX_UNSWAPPED,
            Compute::Bf16 if kernels.are_tiles => MAX_UNSWAPPED,
            Compute::Bf16 => (CLOSE_PAIRS / self.depth).clamp(MAX_UNSWAPPED, MAX_UNSWAPPED_PAIRS),
        };
        self.form != Form::Tn && (1..=most).contains(&self.rows) && self.columns > 0 && self.depth > 0
    }

    /// Returns whether f32 is faster as bf16x3 in tiles: operands must be used often enough to pay for splitting
    /// them.
    fn is_worth_bf16x3(&self) -> bool {
        const MIN: usize = 96;
        /// Rows across the depth are split while they are paired.
        const MIN_ACROSS: usize = 48;
        let rows = if self.form == Form::Nn { MIN_ACROSS } else { MIN };
        self.rows >= rows && self.columns * self.num_tiles() >= MIN && self.depth >= MIN
    }
}

/// A kernel for a product, and the way in which it gets its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmPlan {
    /// The kernel.
    pub kernel: GemmKernel,
    /// The most rows per piece, if groups are cut into pieces of rows: all groups of a list are cut, or none.
    pub row_pieces: Option<usize>,
    /// The time at which quantized weights are converted to floats, if they are.
    pub dequantize: Option<Dequantize>,
    level: &'static str,
    /// Rows and columns of the kernel's largest tile.
    tile: [usize; 2],
    form: Form,
}

impl GemmPlan {
    /// Chooses the kernel for a product on an instruction set. A batch-invariant choice sums in one order for all
    /// numbers of rows.
    #[must_use]
    pub fn choose(problem: &GemmProblem, isa: Isa, is_batch_invariant: bool) -> Self {
        Chooser::new(isa, problem.compute, is_batch_invariant).choose(problem)
    }
}

/// The choice of kernels for products of one type: [`GemmPlan::choose`] for many groups.
pub(crate) struct Chooser {
    isa: Isa,
    is_batch_invariant: bool,
    pub(crate) kernels: Kernels,
    pub(crate) bf16x3: Option<Kernels>,
}

impl Chooser {
    pub(crate) fn new(isa: Isa, compute: Compute, is_batch_invariant: bool) -> Self {
        let (kernels, bf16x3) = (Kernels::select(isa, compute), Kernels::bf16x3(isa, compute));
        Self { isa, is_batch_invariant, kernels, bf16x3 }
    }

    /// Chooses for all groups of a list.
    pub(crate) fn choose_all(&self, product: &Product<'_>) -> Vec<GemmPlan> {
        let most_rows = product.groups.iter().map(|group| group.rows).max().unwrap_or(0);
        product.groups.iter().map(|group| self.choose(&GemmProblem::from_group(product, group, most_rows))).collect()
    }

    pub(crate) fn choose(&self, problem: &GemmProblem) -> GemmPlan {
        if problem.b.dtype.is_quantized() { self.choose_quantized(problem) } else { self.choose_float(problem) }
    }

    fn choose_quantized(&self, problem: &GemmProblem) -> GemmPlan {
        if self.is_batch_invariant || problem.rows <= MAX_SKINNY {
            let is_cut = self.is_batch_invariant && problem.most_rows > MAX_SKINNY;
            let row_pieces = is_cut.then_some(MAX_SKINNY);
            return GemmPlan { row_pieces, ..self.plan(problem, GemmKernel::QuantizedDot, &self.kernels) };
        }
        // Eight rows of blocks at a time become units inside products with A and B swapped, if vectors have 16 lanes.
        let can_swap = self.kernels.halves.is_some() && !self.kernels.are_tiles;
        let is_in_product = self.isa >= Isa::Avx512 && can_swap && problem.rows <= MAX_SWAPPED;
        let dequantize = if is_in_product { Dequantize::InProduct } else { Dequantize::Before };
        let floats = GemmProblem { b: RowLayout { dtype: DType::BF16, ..problem.b }, ..*problem };
        GemmPlan { dequantize: Some(dequantize), ..self.choose_float(&floats) }
    }

    fn choose_float(&self, problem: &GemmProblem) -> GemmPlan {
        let kernels = &self.kernels;
        let is_invariant = self.is_batch_invariant && problem.form != Form::Tn;
        // All kernels except the skinny ones sum in one order, if A and B can be swapped or there are tiles.
        let has_one_order = kernels.halves.is_some() || kernels.are_tiles;
        if is_invariant && !has_one_order && problem.most_rows > MAX_SKINNY {
            let rows = problem.rows.min(MAX_SKINNY);
            let plan = self.choose_float(&GemmProblem { rows, most_rows: rows, ..*problem });
            return GemmPlan { row_pieces: Some(MAX_SKINNY), ..plan };
        }
        if !(is_invariant && has_one_order) && problem.is_skinny(kernels, self.isa) {
            return self.plan(problem, GemmKernel::Skinny, kernels);
        }
        if problem.is_gradient && problem.depth <= self.most_outer() {
            return self.plan(problem, GemmKernel::SkinnyGradient, kernels);
        }
        let bf16x3 = self.bf16x3.as_ref().filter(|_| !is_invariant && problem.is_worth_bf16x3());
        let kernels = bf16x3.unwrap_or(kernels);
        let kernel = match problem.form {
            _ if kernels.are_tiles => GemmKernel::in_tiles(problem, kernels.parts),
            _ if problem.can_swap(kernels) => GemmKernel::SwapAb,
            Form::Tn => GemmKernel::BothPacked,
            Form::Nt | Form::Nn => GemmKernel::Packed,
        };
        self.plan(problem, kernel, kernels)
    }

    /// Returns the most tokens of a weight gradient that is computed as outer products.
    fn most_outer(&self) -> usize {
        match self.bf16x3 {
            Some(_) => MAX_OUTER_BESIDE_BF16X3,
            None if self.kernels.lanes == WIDE_LANES && !self.kernels.are_tiles => MAX_OUTER_WIDE,
            None => MAX_OUTER,
        }
    }

    fn plan(&self, problem: &GemmProblem, kernel: GemmKernel, kernels: &Kernels) -> GemmPlan {
        let columns = widest(kernels.lanes) * kernels.lanes;
        let level = match kernels.lanes {
            _ if kernel.has_tiles() => "amx",
            WIDE_LANES if kernels.compute == Compute::Bf16 => "avx512-bf16",
            WIDE_LANES => "avx512",
            _ if self.isa == Isa::Neon => "neon",
            _ if self.isa == Isa::Portable => "portable",
            _ => "avx2",
        };
        GemmPlan {
            kernel,
            row_pieces: None,
            dequantize: None,
            level,
            tile: [kernels.rows, columns],
            form: problem.form,
        }
    }
}

impl fmt::Display for GemmPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, tile: [rows, columns], .. } = *self;
        let form = match self.form {
            Form::Nt => "nt",
            Form::Nn => "nn",
            Form::Tn => "tn",
        };
        let part = if self.kernel.is_bf16x3() { " bf16x3" } else { "" };
        match self.kernel {
            GemmKernel::Skinny | GemmKernel::SkinnyGradient => write!(f, "{level} skinny {form}")?,
            GemmKernel::Packed => write!(f, "{level} {rows}x{columns} {form}, B packed")?,
            GemmKernel::BothPacked => write!(f, "{level} {rows}x{columns} {form}, both packed")?,
            GemmKernel::SwapAb => write!(f, "{level} {rows}x{columns} {form}, swap_ab")?,
            GemmKernel::TilesDirect | GemmKernel::Bf16x3Direct => {
                write!(f, "{level}{part} {rows}x{columns} {form}, direct")?;
            }
            GemmKernel::TilesSwapAb | GemmKernel::Bf16x3SwapAb => {
                write!(f, "{level}{part} {rows}x{columns} {form}, swap_ab")?;
            }
            GemmKernel::QuantizedDot => write!(f, "{level} int8 dots of blocks")?,
        }
        if let Some(most) = self.row_pieces {
            write!(f, ", {most} rows at a time")?;
        }
        match self.dequantize {
            Some(Dequantize::InProduct) => write!(f, ", dequantized in the product"),
            Some(Dequantize::Before) => write!(f, ", dequantized before"),
            None => Ok(()),
        }
    }
}
