//! Products of quantized rows with quantized weights: whole numbers within a block, f32 between blocks.

use moeworks_tensor::{BLOCK_LEN, Q4Block, Q8Block};

use super::block::Block;
use super::rows::Pair;
use crate::Isa;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile};
use crate::simd::kernel;

/// The most rows that are taken at once.
pub(super) const MAX_FEW: usize = 16;

/// Some rows of activations with a panel of rows of weights.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a, B> {
    /// The rows of weights, one after the other.
    pub(super) weights: &'a [B],
    /// Blocks of a row of weights.
    pub(super) num_blocks: usize,
    /// The rows of activations, each of `num_blocks.div_ceil(2)` pairs; at most [`MAX_FEW`].
    pub(super) a: &'a [&'a [Pair]],
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
}

/// A block type that every kernel takes.
pub(super) trait WeightBlock: Block {
    /// Two neighbouring blocks as unsigned bytes, each larger by [`OFFSET`](Self::OFFSET), and their scales, eight lanes each.
    ///
    /// # Safety
    /// The machine must have what [`Kernel::Vnni`] asks for, and two blocks must be readable.
    #[cfg(target_arch = "x86_64")]
    unsafe fn pair(first: *const Self, second: *const Self) -> core::arch::x86_64::__m512i;

    /// What is added to the weights to make them unsigned.
    const OFFSET: i8;

    /// The scale as it is stored.
    fn scale_bits(&self) -> u16;
}

impl WeightBlock for Q8Block {
    const OFFSET: i8 = i8::MIN; // 128 as an unsigned byte

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pair(first: *const Self, second: *const Self) -> core::arch::x86_64::__m512i {
        use core::arch::x86_64::{
            _mm256_loadu_si256, _mm512_castsi256_si512, _mm512_inserti64x4, _mm512_set1_epi8, _mm512_xor_si512,
        };
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm256_loadu_si256((&raw const (*first).values).cast());
            let second = _mm256_loadu_si256((&raw const (*second).values).cast());
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            _mm512_xor_si512(both, _mm512_set1_epi8(Self::OFFSET))
        }
    }

    #[inline(always)]
    fn scale_bits(&self) -> u16 {
        u16::from_le_bytes(self.scale)
    }
}

impl WeightBlock for Q4Block {
    const OFFSET: i8 = 8;

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pair(first: *const Self, second: *const Self) -> core::arch::x86_64::__m512i {
        use core::arch::x86_64::{
            _mm_loadu_si128, _mm256_broadcastsi128_si256, _mm512_and_si512, _mm512_castsi256_si512, _mm512_inserti64x4,
            _mm512_set_epi64, _mm512_set1_epi8, _mm512_srlv_epi64,
        };
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm256_broadcastsi128_si256(_mm_loadu_si128((&raw const (*first).values).cast()));
            let second = _mm256_broadcastsi128_si256(_mm_loadu_si128((&raw const (*second).values).cast()));
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            // The low halves of the bytes are the first 16 weights of a block, the high ones the others.
            let halves = _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
            _mm512_and_si512(halves, _mm512_set1_epi8(15))
        }
    }

    #[inline(always)]
    fn scale_bits(&self) -> u16 {
        u16::from_le_bytes(self.scale)
    }
}

/// Writes sum `[r][c]` to row `r % MAX_ROWS` of tile `r / MAX_ROWS * tile_step`, column c.
pub(super) fn run<B: WeightBlock>(kernel: Kernel, panel: Panel<'_, B>, tiles: &mut [Tile]) {
    let num_pairs = panel.num_blocks.div_ceil(2);
    assert!(panel.a.len() <= MAX_FEW && panel.a.iter().all(|row| row.len() == num_pairs), "rows of a panel");
    match kernel {
        Kernel::Plain(isa) => plain::<B>(isa, panel, tiles),
        // SAFETY: `Kernel::available` names this kernel only where the machine has its instructions; rows and weights are
        // as long as asserted.
        #[cfg(target_arch = "x86_64")]
        Kernel::Vnni => unsafe { vnni::run::<B>(panel, tiles) },
    }
}

kernel! {
    fn plain<S: Level, B: WeightBlock>(panel: Panel<'_, B>, tiles: &mut [Tile]) {
        let Panel { weights, num_blocks, a, tile_step, .. } = panel;
        for (column, weights) in weights.chunks_exact(num_blocks.max(1)).enumerate() {
            let mut sums = [0.0_f32; MAX_FEW];
            for (index, block) in weights.iter().enumerate() {
                let (ints, scale) = (block.ints(), block.scale());
                for (sum, a) in sums.iter_mut().zip(a) {
                    let pair = &a[index / 2];
                    let mut total = 0_i32;
                    for (w, x) in ints.iter().zip(&pair.values[index % 2 * BLOCK_LEN..][..BLOCK_LEN]) {
                        total += i32::from(*w) * i32::from(*x);
                    }
                    *sum = S::mul_add(total as f32, scale * pair.scales[index % 2], *sum);
                }
            }
            for (row, &sum) in sums.iter().enumerate().take(a.len()) {
                tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column] = sum;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod vnni {
    use core::arch::x86_64::{
        __m512, _mm_castsi128_ps, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm512_castps128_ps512,
        _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_load_si512, _mm512_mul_ps,
        _mm512_permutexvar_ps, _mm512_set_epi32, _mm512_set1_epi8, _mm512_setzero_ps, _mm512_setzero_si512,
        _mm512_sub_epi32,
    };

    use super::{Pair, Panel, WeightBlock};
    use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, prefetch_far};
    use crate::simd::{Avx512, Level};

    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C; rows of activations must have half as many
    /// pairs as rows of weights have blocks, rounded up.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn run<B: WeightBlock>(panel: Panel<'_, B>, tiles: &mut [Tile]) {
        let columns = panel.weights.len().checked_div(panel.num_blocks).unwrap_or(0);
        let num_passes = panel.a.len().div_ceil(4).max(1);
        let pass = panel.a.len().div_ceil(num_passes);
        let mut column = 0;
        while column < columns {
            // As many rows of weights as registers hold sums of.
            let count = if column + 4 <= columns { 4 } else { 1 };
            let ahead = if column + 2 * count <= columns {
                panel.weights.as_ptr().wrapping_add((column + count) * panel.num_blocks).cast()
            } else {
                panel.next
            };
            for first in (0..panel.a.len()).step_by(pass) {
                let part = Part { panel, column, first, ahead, tiles: &mut *tiles };
                // SAFETY: `count` rows of weights and as many rows of activations as are named exist.
                unsafe {
                    match (count, pass.min(panel.a.len() - first)) {
                        (4, 1) => part.sums::<4, 1>(),
                        (4, 2) => part.sums::<4, 2>(),
                        (4, 3) => part.sums::<4, 3>(),
                        (4, _) => part.sums::<4, 4>(),
                        (_, 1) => part.sums::<1, 1>(),
                        (_, 2) => part.sums::<1, 2>(),
                        (_, 3) => part.sums::<1, 3>(),
                        (_, _) => part.sums::<1, 4>(),
                    }
                }
            }
            column += count;
        }
    }

    /// Some rows of weights with some rows of activations.
    struct Part<'a, B> {
        panel: Panel<'a, B>,
        column: usize,
        first: usize,
        ahead: *const u8,
        tiles: &'a mut [Tile],
    }

    impl<B: WeightBlock> Part<'_, B> {
        /// # Safety
        /// As for [`run`]; `N` rows of weights and `R` rows of activations must exist.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
        unsafe fn sums<const N: usize, const R: usize>(self) {
            let Self { panel, column, first, ahead, tiles } = self;
            let num_blocks = panel.num_blocks;
            let a: [&[Pair]; R] = std::array::from_fn(|r| panel.a[first + r]);
            let weights = panel.weights[column * num_blocks..][..N * num_blocks].as_ptr();
            // The scale of the first block for the lower eight lanes, of the second for the upper ones.
            let lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut sums = [[_mm512_setzero_ps(); R]; N];
            for block in (0..num_blocks).step_by(2) {
                // The last block of an odd number counts once: the activations beside its repetition are zeros of scale 0.
                let second = usize::from(block + 1 < num_blocks);
                let mut x = [_mm512_setzero_si512(); R];
                let (mut corrections, mut x_scales) = (x, [_mm512_setzero_ps(); R]);
                for r in 0..R {
                    let pair = &a[r][block / 2];
                    // SAFETY: a pair is aligned to a cache line and begins with 64 bytes of numbers.
                    x[r] = unsafe { _mm512_load_si512(pair.values.as_ptr().cast()) };
                    let offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(B::OFFSET), x[r]);
                    corrections[r] = _mm512_sub_epi32(_mm512_setzero_si512(), offset);
                    // SAFETY: two scales are eight bytes.
                    let scales = unsafe { _mm_castsi128_ps(_mm_loadl_epi64(pair.scales.as_ptr().cast())) };
                    x_scales[r] = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(scales));
                }
                for (n, sums) in sums.iter_mut().enumerate() {
                    let at = n * num_blocks + block;
                    // A pair may be longer than a cache line: then its last byte is asked for as well.
                    prefetch_far(ahead.wrapping_add(at * size_of::<B>()));
                    if 2 * size_of::<B>() > 64 {
                        prefetch_far(ahead.wrapping_add((at + 2) * size_of::<B>() - 1));
                    }
                    // SAFETY: blocks of the rows taken above.
                    let (w, scales) = unsafe {
                        let (one, two) = (weights.add(at), weights.add(at + second));
                        let bits = u32::from((*one).scale_bits()) | (u32::from((*two).scale_bits()) << 16);
                        (B::pair(one, two), _mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32)))
                    };
                    let scales: __m512 = _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(scales));
                    for r in 0..R {
                        let totals = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(corrections[r], w, x[r]));
                        sums[r] = _mm512_fmadd_ps(totals, _mm512_mul_ps(scales, x_scales[r]), sums[r]);
                    }
                }
            }
            for (n, sums) in sums.iter().enumerate() {
                for (r, &sum) in sums.iter().enumerate() {
                    let row = first + r;
                    let place = row % MAX_ROWS * TILE_STRIDE + column + n;
                    tiles[row / MAX_ROWS * panel.tile_step].0[place] = Avx512::total(sum);
                }
            }
        }
    }
}
