//! Products of quantized activations with quantized weights: integers within a block, f32 between blocks.

use moeworks_tensor::DType;

use super::float8;
use super::layouts::{Block, PART, Scale};
use super::rows::{ActivationFormat, QUAD, Quad};
use super::weights::{Layout, Weights};
use super::{blocks_of, with_ints};
use crate::Isa;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::simd::kernel;

/// The most rows of activations that are taken at once.
pub(super) const MAX_FEW: usize = 16;

/// The operands of a panel: some rows of activations and the weight rows of some columns.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    /// The weight rows, and their number.
    pub(super) weights: Weights<'a>,
    pub(super) columns: usize,
    /// Elements of a weight row.
    pub(super) depth: usize,
    /// The rows of activations, at most [`MAX_FEW`], each of as many quads as hold `depth`.
    pub(super) a: &'a [&'a [Quad]],
    /// Tiles from the sums of [`MAX_ROWS`] rows to those of the next.
    pub(super) tile_step: usize,
    /// The weight rows that are read after this panel.
    pub(super) next: Weights<'a>,
}

/// Bytes of weights that are prefetched ahead of their use, at least. With fewer, or with a line left out, memory and
/// products alternate.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 8 << 10;

/// The most rows of activations that a weight row meets at once, so that all their sums fit the registers.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const MAX_PASS: usize = 4;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl Panel<'_> {
    /// Returns how many rows of activations a weight row meets at once, at most.
    pub(super) fn pass(&self) -> usize {
        self.a.len().div_ceil(self.a.len().div_ceil(MAX_PASS).max(1)).max(1)
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> Panel<'a> {
    /// Returns how many weight rows ahead of their use are prefetched.
    pub(super) fn rows_ahead(&self) -> usize {
        AHEAD_BYTES.div_ceil(self.weights.numbers.row_bytes().max(1))
    }

    /// Returns the weights that begin `rows_ahead` rows after a weight row, in this panel or the next.
    #[inline(always)]
    pub(super) fn ahead(&self, column: usize, rows_ahead: usize) -> Weights<'a> {
        let later = column + rows_ahead;
        if later < self.columns { self.weights.starting_at(later) } else { self.next.starting_at(later - self.columns) }
    }
}

/// Evaluates an expression with a name bound to the rows of a [pass](Panel::pass) as an array.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! with_rows {
    ($pass:expr, $rows:ident => $body:expr) => {
        match *$pass {
            [a] => {
                let $rows = [a];
                $body
            }
            [a, b] => {
                let $rows = [a, b];
                $body
            }
            [a, b, c] => {
                let $rows = [a, b, c];
                $body
            }
            [a, b, c, d] => {
                let $rows = [a, b, c, d];
                $body
            }
            _ => {}
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use with_rows;

/// The kernels for products with quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Loops that the compiler vectorises for the instruction set.
    Plain(Isa),
    /// The byte products of AVX2 (`vpmaddubsw`).
    #[cfg(target_arch = "x86_64")]
    DotAvx2,
    /// The byte dot product of AVX-512 VNNI.
    #[cfg(target_arch = "x86_64")]
    DotVnni,
    /// The byte dot product of Armv8.2.
    #[cfg(target_arch = "aarch64")]
    DotNeon,
    /// f32 multiply-adds of FP8 weights that F16C converts.
    #[cfg(target_arch = "x86_64")]
    Fp8Avx2,
    /// The dot product of bf16 pairs, of FP8 weights that AVX-512 VBMI converts by table lookup.
    #[cfg(target_arch = "x86_64")]
    Fp8Vbmi,
}

impl Kernel {
    /// Lists the kernels for weights of a type that can run with an instruction set, the fastest last.
    pub(super) fn available(isa: Isa, dtype: DType) -> Vec<Self> {
        let mut kernels = vec![Self::Plain(isa)];
        #[cfg(target_arch = "x86_64")]
        if dtype == DType::F8 {
            kernels.extend((isa >= Isa::Avx2).then_some(Self::Fp8Avx2));
            kernels.extend(float8::is_fast(isa).then_some(Self::Fp8Vbmi));
        } else {
            kernels.extend((isa >= Isa::Avx2).then_some(Self::DotAvx2));
            kernels.extend(has_vnni(isa).then_some(Self::DotVnni));
        }
        #[cfg(target_arch = "aarch64")]
        if dtype != DType::F8 && isa == Isa::Neon && std::arch::is_aarch64_feature_detected!("dotprod") {
            kernels.push(Self::DotNeon);
        }
        kernels
    }

    /// Returns the format in which this kernel takes activations for weights of a layout.
    pub(super) fn activation_format(self, layout: Layout) -> ActivationFormat {
        match self {
            Self::Plain(_) if layout.dtype == DType::F8 => ActivationFormat::Floats,
            Self::Plain(_) => ActivationFormat::Offset(0),
            #[cfg(target_arch = "aarch64")]
            Self::DotNeon => ActivationFormat::Offset(0),
            #[cfg(target_arch = "x86_64")]
            Self::DotAvx2 => with_ints!(layout, B => super::dot_avx2::activation_format::<B>()),
            #[cfg(target_arch = "x86_64")]
            Self::DotVnni => with_ints!(layout, B => super::dot_vnni::activation_format::<B>()),
            #[cfg(target_arch = "x86_64")]
            Self::Fp8Avx2 => ActivationFormat::Floats,
            #[cfg(target_arch = "x86_64")]
            Self::Fp8Vbmi => ActivationFormat::InterleavedFloats,
        }
    }
}

/// Returns whether the machine has the byte dot product of AVX-512 VNNI.
pub(super) fn has_vnni(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Computes the sums of a panel: sum `[r][c]` goes to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step`, column
/// c.
pub(super) fn run(kernel: Kernel, panel: Panel<'_>, tiles: &mut [Tile]) {
    let num_quads = panel.depth.div_ceil(QUAD);
    assert!(panel.a.len() <= MAX_FEW && panel.a.iter().all(|row| row.len() == num_quads), "rows of a panel");
    match kernel {
        Kernel::Plain(isa) if panel.weights.layout.dtype == DType::F8 => float8::plain(isa, panel, tiles),
        Kernel::Plain(isa) => with_ints!(panel.weights.layout, B => plain::<B>(isa, panel, tiles)),
        // SAFETY: `Kernel::available` names these kernels only where the machine has their instructions; rows are as
        // long as asserted.
        #[cfg(target_arch = "x86_64")]
        Kernel::DotAvx2 => with_ints!(panel.weights.layout, B => unsafe { super::dot_avx2::run::<B>(panel, tiles) }),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kernel::DotVnni => with_ints!(panel.weights.layout, B => unsafe { super::dot_vnni::run::<B>(panel, tiles) }),
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Kernel::DotNeon => with_ints!(panel.weights.layout, B => unsafe { super::dot_neon::run::<B>(panel, tiles) }),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kernel::Fp8Avx2 => unsafe { super::fp8_avx2::run(panel, tiles) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kernel::Fp8Vbmi => unsafe { float8::run(panel, tiles) },
    }
}

kernel! {
    fn plain<S: Level, B: Block>(panel: Panel<'_>, tiles: &mut [Tile]) {
        let Panel { weights, columns, a, tile_step, .. } = panel;
        for column in 0..columns {
            let scales = weights.scales.row(column);
            let mut sums = [0.0_f32; MAX_FEW];
            for (index, block) in blocks_of::<B>(weights.numbers.row(column)).iter().enumerate() {
                for part in 0..B::LEN / PART {
                    let at = index * (B::LEN / PART) + part;
                    add_part::<S, B>(block, part, &scales[index * B::SPLIT_BYTES..], a, at, &mut sums);
                }
            }
            write_column(&sums[..a.len()], column, tile_step, tiles);
        }
    }
}

/// Stores the sums of some rows in their column.
#[inline(always)]
pub(super) fn write_column(sums: &[f32], column: usize, tile_step: usize, tiles: &mut [Tile]) {
    for (row, &sum) in sums.iter().enumerate() {
        tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column] = sum;
    }
}

/// Half of a part.
const HALF: usize = PART / 2;

/// Adds the products of 32 weights, part `part` of a block, with numbers `32 * at` and later of each row of
/// activations.
#[inline(always)]
fn add_part<S: crate::simd::Level, B: Block>(
    block: &B,
    part: usize,
    split_scale: &[u8],
    a: &[&[Quad]],
    at: usize,
    sums: &mut [f32; MAX_FEW],
) {
    let ints = block.ints(part);
    for shared in 0..PART / B::SHARED {
        let Scale { scale, min } = block.scale(PART / B::SHARED * part + shared, split_scale);
        let range = shared * B::SHARED..(shared + 1) * B::SHARED;
        for (sum, a) in sums.iter_mut().zip(a) {
            let quad = &a[at / 4];
            let (mut total, mut plain) = (0_i32, 0_i32);
            for i in range.clone() {
                let x = i32::from(quad.halves[i / HALF][at % 4 * HALF + i % HALF]);
                total += i32::from(ints[i]) * x;
                plain += x;
            }
            let x_scale = quad.corrections[0][at % 4 * 4];
            *sum = S::mul_add(total as f32, scale * x_scale, *sum);
            if B::HAS_MIN {
                *sum = S::mul_add(plain as f32, -min * x_scale, *sum);
            }
        }
    }
}
