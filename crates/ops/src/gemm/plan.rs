//! The choice of the kernel that takes a product, as a value that can be printed.
//!
//! Sizes, types and the layout of B's rows decide, with the instruction set: never what is in memory, nor the number of threads. How many
//! tasks a product is cut into is decided later, and does not change the order of its sums.

use std::fmt;

use moeworks_tensor::DType;

use super::kernel::{Kernels, widest};
use super::source::{Elements, Source};
use super::{Compute, Form, Group, Product};
use crate::Isa;

/// The most rows of a group that skinny kernels take.
pub(crate) const MAX_SKINNY: usize = 16;
/// The most that they take where swapping A and B is there, too, and of f32 with AVX-512 alone, whose machines keep up with memory longer.
const MAX_UNSWAPPED: usize = 4;
const MAX_UNSWAPPED_AVX512: usize = 8;
/// The most where pairs of bf16 are multiplied, which takes half the products, and rows of A lie in the first-level cache: where they have
/// at most [`CLOSE_PAIRS`] elements.
const MAX_UNSWAPPED_PAIRS: usize = 12;
/// Elements of rows of A that stay in two thirds of a first-level cache of 32 KiB beside the weights that pass by.
const CLOSE_PAIRS: usize = 10_000;
/// Bytes of all groups' weights, about, from which on they hardly lie in a cache.
const MEMORY_BYTES: usize = 1 << 20;
/// The most rows of a group for which packing them is better than packing B.
pub(crate) const MAX_SWAPPED: usize = 256;
/// Rows of a group up to which its B takes longer to fetch than to be multiplied in tiles.
pub(super) const FEW_TILE_ROWS: usize = 160;
/// The most rows (the depth of a gradient) that are taken as outer products; where vectors are wide and there are no tiles, since sums then
/// go from registers to where they belong by whole lines; and where tiles take products of f32 in three parts.
const MAX_OUTER: usize = 16;
const MAX_OUTER_WIDE: usize = 256;
const MAX_OUTER_BESIDE_BF16X3: usize = 96;
/// Lanes of the widest vector.
const WIDE_LANES: usize = 16;

/// The kernels that there are for products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmKernel {
    /// Few rows of A: each weight is read once, where it lies, and nothing is packed.
    Skinny,
    /// A gradient of few tokens: outer products, written past the caches.
    SkinnyGradient,
    /// B is packed into panels, rows of A are used where they lie.
    Packed,
    /// Both operands are packed, since rows of both run across the depth.
    BothPacked,
    /// A is packed, so that lanes are its rows, and rows of B are read where they lie.
    SwapAb,
    /// Tiles of AMX with B packed.
    TilesDirect,
    /// Tiles of AMX with A and B swapped.
    TilesSwapAb,
    /// [`TilesDirect`](Self::TilesDirect) of f32 as three bf16 each.
    Bf16x3Direct,
    /// [`TilesSwapAb`](Self::TilesSwapAb) of f32 as three bf16 each.
    Bf16x3SwapAb,
    /// Blocks of weights by rows that are quantized to eight bits, in whole numbers.
    QuantizedDot,
}

impl GemmKernel {
    /// Returns whether A takes the place of B.
    #[must_use]
    pub fn is_swapped(self) -> bool {
        matches!(self, Self::SwapAb | Self::TilesSwapAb | Self::Bf16x3SwapAb)
    }

    /// Returns whether an f32 is taken as three bf16.
    #[must_use]
    pub fn is_bf16x3(self) -> bool {
        matches!(self, Self::Bf16x3Direct | Self::Bf16x3SwapAb)
    }

    fn has_tiles(self) -> bool {
        self.is_bf16x3() || matches!(self, Self::TilesDirect | Self::TilesSwapAb)
    }

    /// The tiles' kernel for a product of so many rows.
    fn in_tiles(problem: &GemmProblem, parts: usize) -> Self {
        // In parts neither operand can be used as it lies.
        let is_swapped = problem.form == Form::Nt && (parts == 1 || problem.rows <= FEW_TILE_ROWS);
        match (is_swapped, parts > 1) {
            (true, true) => Self::Bf16x3SwapAb,
            (true, false) => Self::TilesSwapAb,
            (false, true) => Self::Bf16x3Direct,
            (false, false) => Self::TilesDirect,
        }
    }
}

/// The way in which quantized weights become numbers for a product of floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dequantize {
    /// By the product itself, some rows at a time.
    InProduct,
    /// Before the product, as bf16 in memory.
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
    /// Further elements before later rows, if there are any.
    pub gap: usize,
    /// Whether rows are gathered by index.
    pub is_gathered: bool,
}

impl RowLayout {
    /// The layout of a whole matrix with rows of so many elements.
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

    fn of(source: &Source<'_>, depth: usize) -> Self {
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

    /// Whether rows can be used in units of such kernels where they lie, or some at a time once they are widened: if places in a row are
    /// whole units.
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

/// A product of a list, as far as the choice of its kernel depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmProblem {
    /// The layout of both operands.
    pub form: Form,
    /// The type in which products are taken.
    pub compute: Compute,
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result; of paired ones half.
    pub columns: usize,
    /// Terms of each sum.
    pub depth: usize,
    /// Whether columns come in pairs.
    pub is_paired: bool,
    /// Products of the list.
    pub num_groups: usize,
    /// The most rows of any of them.
    pub most_rows: usize,
    /// The layout of B's rows.
    pub b: RowLayout,
    /// Whether the result is a gradient in whole rows, which outer products may write.
    pub is_gradient: bool,
}

impl GemmProblem {
    /// A linear layer's forward, `x [rows, depth] w^T` with `w [columns, depth]` of some type.
    #[must_use]
    pub fn linear([rows, columns, depth]: [usize; 3], weights: DType) -> Self {
        let compute = if weights.is_quantized() { Compute::Bf16 } else { Compute::of(weights) };
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

    /// The gradient of its input, `dy [rows, depth] w` with `w [depth, columns]`.
    #[must_use]
    pub fn linear_backward_input(sizes: [usize; 3], weights: DType) -> Self {
        let [_, columns, _] = sizes;
        let b = RowLayout { stride: columns, ..RowLayout::whole(weights, sizes[2]) };
        Self { form: Form::Nn, b, ..Self::linear(sizes, weights) }
    }

    /// The gradient of its weights, `dy^T x` with `dy [depth, rows]` and `x [depth, columns]`.
    #[must_use]
    pub fn linear_backward_weight(sizes: [usize; 3], compute: DType) -> Self {
        Self { form: Form::Tn, is_gradient: true, ..Self::linear_backward_input(sizes, compute) }
    }

    pub(crate) fn of(product: &Product<'_>, group: &Group<'_>, most_rows: usize) -> Self {
        Self {
            form: product.form,
            compute: product.compute,
            rows: group.rows,
            columns: group.columns,
            depth: group.depth,
            is_paired: product.is_paired,
            num_groups: product.groups.len(),
            most_rows,
            b: RowLayout::of(&group.b, group.depth),
            is_gradient: false,
        }
    }

    fn num_tiles(&self) -> usize {
        if self.is_paired { 2 } else { 1 }
    }

    /// Whether A and B can change places in the kernels' vectors, or in their tiles.
    fn can_swap(&self, kernels: &Kernels) -> bool {
        (kernels.halves.is_some() || kernels.are_tiles)
            && self.form == Form::Nt
            && !self.b.is_gathered
            && self.b.is_in_units(kernels, self.compute, self.depth)
            && self.depth > 0
            && self.rows <= MAX_SWAPPED
    }

    /// Whether rows of f32 had better be packed as lanes: from some rows on that is faster than loading vectors of each of them for every
    /// vector of weights, where these come from memory. Sums with weights in caches stay in many lanes, which round less.
    fn is_better_swapped(&self, kernels: &Kernels) -> bool {
        let bytes = self.b.row_bytes * self.columns * self.num_tiles() * self.num_groups;
        bytes >= MEMORY_BYTES && self.can_swap(kernels)
    }

    fn is_skinny(&self, kernels: &Kernels, isa: Isa) -> bool {
        let most = match self.compute {
            _ if !self.is_better_swapped(kernels) => MAX_SKINNY,
            // Rows of weights would be widened for few products.
            _ if kernels.compute == Compute::F32 && self.b.dtype == DType::BF16 => MAX_SKINNY,
            Compute::F32 if isa == Isa::Avx512 => MAX_UNSWAPPED_AVX512,
            Compute::F32 => MAX_UNSWAPPED,
            Compute::Bf16 if kernels.are_tiles => MAX_UNSWAPPED,
            Compute::Bf16 => (CLOSE_PAIRS / self.depth).clamp(MAX_UNSWAPPED, MAX_UNSWAPPED_PAIRS),
        };
        self.form != Form::Tn && (1..=most).contains(&self.rows) && self.columns > 0 && self.depth > 0
    }

    /// Whether products of f32 are faster as several of bf16 in tiles: where the operands' elements are used often enough to make up for
    /// splitting them.
    fn is_worth_bf16x3(&self) -> bool {
        const MIN: usize = 96;
        /// Rows across the depth are split as they are paired.
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
    /// The most rows that it gets at once, if groups are cut into pieces of rows: all groups of a list are, or none.
    pub row_pieces: Option<usize>,
    /// The way in which weights in blocks become floats, if they do.
    pub dequantize: Option<Dequantize>,
    level: &'static str,
    /// Rows and columns of the kernel's largest tile.
    tile: [usize; 2],
    form: Form,
}

impl GemmPlan {
    /// Chooses the kernel for a product with an instruction set. With batch invariance all numbers of rows get kernels that sum in one
    /// order.
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
        let (kernels, bf16x3) = (Kernels::select(isa, compute), Kernels::in_parts(isa, compute));
        Self { isa, is_batch_invariant, kernels, bf16x3 }
    }

    /// Chooses for all groups of a list.
    pub(crate) fn choose_all(&self, product: &Product<'_>) -> Vec<GemmPlan> {
        let most_rows = product.groups.iter().map(|group| group.rows).max().unwrap_or(0);
        product.groups.iter().map(|group| self.choose(&GemmProblem::of(product, group, most_rows))).collect()
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
        // Eight blocks at a time become units beside products with A and B swapped, where vectors are wide.
        let can_swap = self.kernels.halves.is_some() && !self.kernels.are_tiles;
        let is_in_product = self.isa >= Isa::Avx512 && can_swap && problem.rows <= MAX_SWAPPED;
        let dequantize = if is_in_product { Dequantize::InProduct } else { Dequantize::Before };
        let floats = GemmProblem { b: RowLayout { dtype: DType::BF16, ..problem.b }, ..*problem };
        GemmPlan { dequantize: Some(dequantize), ..self.choose_float(&floats) }
    }

    fn choose_float(&self, problem: &GemmProblem) -> GemmPlan {
        let kernels = &self.kernels;
        let is_invariant = self.is_batch_invariant && problem.form != Form::Tn;
        // All kernels but the skinny ones sum in one order, if A and B can be swapped or there are tiles.
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

    /// The most tokens of a gradient that is taken as outer products.
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
