//! Products of quantized rows with quantized weights: whole numbers within a block, f32 between blocks.

use moeworks_tensor::DType;

use super::layouts::{Block, PART};
use super::rows::{Beside, QUAD, Quad};
use super::{blocks_of, with_block};
use crate::Isa;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::simd::kernel;

/// The most rows that are taken at once.
pub(super) const MAX_FEW: usize = 16;

/// Some rows of activations with a panel of rows of weights.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    /// The rows of weights, one after the other, and the type of their blocks.
    pub(super) weights: &'a [u8],
    pub(super) dtype: DType,
    /// Elements of a row of weights.
    pub(super) depth: usize,
    /// The rows of activations, each of as many quads as hold `depth`; at most [`MAX_FEW`].
    pub(super) a: &'a [&'a [Quad]],
    /// Every how many tiles the sums of the next [`MAX_ROWS`] rows go.
    pub(super) tile_step: usize,
    /// What will be read after this panel.
    pub(super) next: *const u8,
}

/// How whole numbers are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Loops that the compiler turns into vector code for the instruction set.
    Plain(Isa),
    /// The byte dot product of AVX-512 VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Kernel {
    /// The kernels that can run with an instruction set, the best last.
    pub(super) fn available(isa: Isa) -> Vec<Self> {
        let mut kernels = vec![Self::Plain(isa)];
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 && std::arch::is_x86_feature_detected!("avx512vnni") {
            kernels.push(Self::Vnni);
        }
        kernels
    }

    /// What this kernel wants beside activations for a type of weights.
    pub(super) fn beside(self, dtype: DType) -> Beside {
        match self {
            Self::Plain(_) => Beside::Offset(0),
            #[cfg(target_arch = "x86_64")]
            Self::Vnni => with_block!(dtype, B => super::vnni::beside::<B>()),
        }
    }
}

/// Writes sum `[r][c]` to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step`, column c.
pub(super) fn run(kernel: Kernel, panel: Panel<'_>, tiles: &mut [Tile]) {
    let num_quads = panel.depth.div_ceil(QUAD);
    assert!(panel.a.len() <= MAX_FEW && panel.a.iter().all(|row| row.len() == num_quads), "rows of a panel");
    with_block!(panel.dtype, B => match kernel {
        Kernel::Plain(isa) => plain::<B>(isa, panel, tiles),
        // SAFETY: `Kernel::available` names this kernel only where the machine has its instructions; rows and weights are
        // as long as asserted.
        #[cfg(target_arch = "x86_64")]
        Kernel::Vnni => unsafe { super::vnni::run::<B>(panel, tiles) },
    });
}

kernel! {
    fn plain<S: Level, B: Block>(panel: Panel<'_>, tiles: &mut [Tile]) {
        let Panel { weights, depth, a, tile_step, .. } = panel;
        let row_len = (depth / B::DTYPE.block_len()).max(1);
        for (column, weights) in blocks_of::<B>(weights).chunks_exact(row_len).enumerate() {
            let mut sums = [0.0_f32; MAX_FEW];
            for (index, block) in weights.iter().enumerate() {
                for part in 0..B::DTYPE.block_len() / PART {
                    let at = index * (B::DTYPE.block_len() / PART) + part;
                    add_part::<S, B>((block, part), (a, at), &mut sums);
                }
            }
            for (row, &sum) in sums.iter().enumerate().take(a.len()) {
                tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column] = sum;
            }
        }
    }
}

/// Half of a part.
const HALF: usize = PART / 2;

/// Adds the products of 32 weights with those numbers `at` of each row of activations.
#[inline(always)]
fn add_part<S: crate::simd::Level, B: Block>(
    (block, part): (&B, usize),
    (a, at): (&[&[Quad]], usize),
    sums: &mut [f32; MAX_FEW],
) {
    let ints = block.ints(part);
    for shared in 0..PART / B::SHARED {
        let (scale, least) = block.scale(PART / B::SHARED * part + shared);
        let range = shared * B::SHARED..(shared + 1) * B::SHARED;
        for (sum, a) in sums.iter_mut().zip(a) {
            let quad = &a[at / 4];
            let (mut total, mut plain) = (0_i32, 0_i32);
            for i in range.clone() {
                let x = i32::from(quad.halves[i / HALF][at % 4 * HALF + i % HALF]);
                total += i32::from(ints[i]) * x;
                plain += x;
            }
            let x_scale = quad.beside[0][at % 4 * 4];
            *sum = S::mul_add(total as f32, scale * x_scale, *sum);
            if B::HAS_LEAST {
                *sum = S::mul_add(plain as f32, -least * x_scale, *sum);
            }
        }
    }
}
