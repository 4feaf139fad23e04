//! Products of quantized rows with blocks by the byte dot product of AVX-512 VNNI.

use core::arch::x86_64::{
    __m128, __m512, __m512i, _mm_castsi128_ps, _mm_loadl_epi64, _mm_movelh_ps, _mm_mul_ps, _mm512_castps128_ps512,
    _mm512_castps512_ps128, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_load_si512, _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set_epi32, _mm512_set1_epi8,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_i64x2, _mm512_sub_epi32,
};

use super::blocks_of;
use super::kernel::Panel;
use super::lanes::Lanes;
use super::rows::Pair;
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, prefetch_far};
use crate::simd::{Avx512, Level};

/// # Safety
/// The machine must have AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C; rows of activations must have as many pairs as hold
/// a row of weights.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn run<B: Lanes>(panel: Panel<'_>, tiles: &mut [Tile]) {
    let num_blocks = panel.depth / B::DTYPE.block_len();
    let weights = blocks_of::<B>(panel.weights);
    let columns = weights.len().checked_div(num_blocks).unwrap_or(0);
    let num_passes = panel.a.len().div_ceil(4).max(1);
    let pass = panel.a.len().div_ceil(num_passes);
    let mut column = 0;
    while column < columns {
        // As many rows of weights as registers hold sums of.
        let count = if column + 4 <= columns { 4 } else { 1 };
        let ahead = if column + 2 * count <= columns {
            weights.as_ptr().wrapping_add((column + count) * num_blocks).cast()
        } else {
            panel.next
        };
        for first in (0..panel.a.len()).step_by(pass) {
            let part = Part { panel, weights, num_blocks, column, first, ahead, tiles: &mut *tiles };
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
    panel: Panel<'a>,
    weights: &'a [B],
    /// Blocks of a row of weights.
    num_blocks: usize,
    column: usize,
    first: usize,
    ahead: *const u8,
    tiles: &'a mut [Tile],
}

/// Sums of `N` rows of weights with `R` rows of activations.
type Sums<const N: usize, const R: usize> = [[__m512; R]; N];

impl<B: Lanes> Part<'_, B> {
    /// # Safety
    /// As for [`run`]; `N` rows of weights and `R` rows of activations must exist.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn sums<const N: usize, const R: usize>(self) {
        let Self { panel, weights, num_blocks, column, first, ahead, tiles } = self;
        let a: [&[Pair]; R] = std::array::from_fn(|r| panel.a[first + r]);
        let weights = weights[column * num_blocks..][..N * num_blocks].as_ptr();
        let mut sums: Sums<N, R> = [[_mm512_setzero_ps(); R]; N];
        // SAFETY: the caller's promise.
        unsafe {
            match B::NIBBLES {
                Some(_) => add_fours(weights, num_blocks, a, ahead, &mut sums),
                None => add_units(weights, num_blocks, a, ahead, &mut sums),
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

/// Adds the products of whole rows, unit by unit.
///
/// # Safety
/// As for [`run`]; `N` rows of `num_blocks` blocks must be readable from `weights` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_units<B: Lanes, const N: usize, const R: usize>(
    weights: *const B,
    num_blocks: usize,
    a: [&[Pair]; R],
    ahead: *const u8,
    sums: &mut Sums<N, R>,
) {
    for block in (0..num_blocks).step_by(B::BLOCKS) {
        // The last short block of an odd number counts once: the activations beside its repetition are zeros of scale 0.
        let second = (block + B::BLOCKS - 1).min(num_blocks - 1);
        // No closures where vectors are about: what calls them has not the instructions, so that they would stay calls.
        let mut units = [[weights; 2]; N];
        for (n, unit) in units.iter_mut().enumerate() {
            *unit = [weights.wrapping_add(n * num_blocks + block), weights.wrapping_add(n * num_blocks + second)];
        }
        let mut scales = [[_mm512_setzero_ps(); 2]; N];
        for (scales, &unit) in scales.iter_mut().zip(&units) {
            // SAFETY: blocks of the rows taken above.
            *scales = unsafe { B::scales(unit) };
        }
        for pair in 0..B::PAIRS {
            for n in 0..N {
                let at = (n * num_blocks + block) * size_of::<B>() + pair * bytes_of_pair::<B>();
                prefetch_bytes(ahead.wrapping_add(at), bytes_of_pair::<B>());
            }
            let at = block / B::BLOCKS * B::PAIRS + pair;
            // SAFETY: the blocks are there.
            unsafe { add_pair::<B, N, R>((&units, pair), &scales, (a, at), sums) };
        }
    }
}

/// What is longer than a cache line may lie on three: then its last byte is asked for as well as its first.
#[inline(always)]
fn prefetch_bytes(at: *const u8, len: usize) {
    prefetch_far(at);
    if len > 64 {
        prefetch_far(at.wrapping_add(len - 1));
    }
}

/// As [`add_units`], four blocks of four-bit numbers at a time: the first 16 numbers of each make one vector and the others a second,
/// so that 128 products become floats at once and take their scales together.
///
/// # Safety
/// As for [`add_units`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_fours<B: Lanes, const N: usize, const R: usize>(
    weights: *const B,
    num_blocks: usize,
    a: [&[Pair]; R],
    ahead: *const u8,
    sums: &mut Sums<N, R>,
) {
    let Some(nibbles) = B::NIBBLES else { return };
    let lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    let last = num_blocks - 1;
    for block in (0..num_blocks).step_by(4) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut rows = [FourRow::ZERO; R];
            for (row, a) in rows.iter_mut().zip(a) {
                *row = FourRow::of::<B>(&a[block / 2..]);
            }
            for (n, sums) in sums.iter_mut().enumerate() {
                let row = weights.wrapping_add(n * num_blocks);
                prefetch_bytes(ahead.wrapping_add((n * num_blocks + block) * size_of::<B>()), 4 * size_of::<B>());
                // What is not there counts as the last block: the activations beside it are zeros of scale 0.
                let (first, second) = (row.wrapping_add(block), row.wrapping_add((block + 1).min(last)));
                let (third, fourth) =
                    (row.wrapping_add((block + 2).min(last)), row.wrapping_add((block + 3).min(last)));
                let [low, high] = nibbles.of_four([first, second, third, fourth]);
                let [of_first, _] = B::scales([first, second]);
                let [of_third, _] = B::scales([third, fourth]);
                let scales = _mm_movelh_ps(_mm512_castps512_ps128(of_first), _mm512_castps512_ps128(of_third));
                for (row, sum) in rows.iter().zip(sums) {
                    let totals = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(row.correction, low, row.low), high, row.high);
                    let scales = _mm512_castps128_ps512(_mm_mul_ps(scales, row.scales));
                    *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), _mm512_permutexvar_ps(lanes, scales), *sum);
                }
            }
        }
    }
}

/// Four blocks of a row's numbers as [`Nibbles::of_four`] has those of weights, minus the [offset](Lanes::OFFSET) times their sums,
/// and their scales.
#[derive(Clone, Copy)]
struct FourRow {
    low: __m512i,
    high: __m512i,
    correction: __m512i,
    scales: __m128,
}

impl FourRow {
    // SAFETY: any bits are numbers.
    const ZERO: Self = unsafe { std::mem::zeroed() };

    /// # Safety
    /// As for [`run`]; there must be a pair.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn of<B: Lanes>(pairs: &[Pair]) -> Self {
        let (first, second) = (&pairs[0], pairs.get(1).unwrap_or(&Pair::ZERO));
        // SAFETY: a pair is aligned to a cache line and begins with 64 bytes of numbers; two scales are eight bytes.
        let (values, scales) = unsafe {
            let of_first = _mm_castsi128_ps(_mm_loadl_epi64(first.scales.as_ptr().cast()));
            let of_second = _mm_castsi128_ps(_mm_loadl_epi64(second.scales.as_ptr().cast()));
            let values = [first.values.as_ptr(), second.values.as_ptr()];
            let values = [_mm512_load_si512(values[0].cast()), _mm512_load_si512(values[1].cast())];
            (values, _mm_movelh_ps(of_first, of_second))
        };
        let low = _mm512_shuffle_i64x2::<0b10_00_10_00>(values[0], values[1]);
        let high = _mm512_shuffle_i64x2::<0b11_01_11_01>(values[0], values[1]);
        let (zero, offset) = (_mm512_setzero_si512(), _mm512_set1_epi8(B::OFFSET));
        let sum = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, low), offset, high);
        Self { low, high, correction: _mm512_sub_epi32(zero, sum), scales }
    }
}

const fn bytes_of_pair<B: Lanes>() -> usize {
    B::BLOCKS * size_of::<B>() / B::PAIRS
}

/// A row's numbers, minus the [offset](Lanes::OFFSET) times their sums, their sums times their scale, and their scales.
#[derive(Clone, Copy)]
struct Row {
    x: __m512i,
    correction: __m512i,
    sum: __m512,
    scales: __m512,
}

impl Row {
    // SAFETY: any bits are numbers.
    const ZERO: Self = unsafe { std::mem::zeroed() };

    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn of<B: Lanes>(pair: &Pair) -> Self {
        let zero = _mm512_setzero_si512();
        // SAFETY: a pair is aligned to a cache line and begins with 64 bytes of numbers; two scales are eight bytes.
        let (x, scales) = unsafe {
            let scales = _mm_castsi128_ps(_mm_loadl_epi64(pair.scales.as_ptr().cast()));
            (_mm512_load_si512(pair.values.as_ptr().cast()), _mm512_castps128_ps512(scales))
        };
        // The scale of the first 32 numbers for the lower eight lanes, of the others for the upper ones.
        let scales = _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), scales);
        let mut row = Self { x, correction: zero, sum: _mm512_setzero_ps(), scales };
        if B::OFFSET != 0 {
            row.correction = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(B::OFFSET), x));
        }
        if B::HAS_LEAST {
            let sum = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(1), x);
            row.sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales);
        }
        row
    }
}

/// Adds the products of 64 weights of each row.
///
/// # Safety
/// As for [`run`]; the units' blocks must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_pair<B: Lanes, const N: usize, const R: usize>(
    (units, pair): (&[[*const B; 2]; N], usize),
    scales: &[[__m512; 2]; N],
    (a, at): ([&[Pair]; R], usize),
    sums: &mut Sums<N, R>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = _mm512_loadu_si512(B::SCALE_LANES[pair].as_ptr().cast());
        let mut rows = [Row::ZERO; R];
        for (row, a) in rows.iter_mut().zip(a) {
            *row = Row::of::<B>(&a[at]);
        }
        for ((&unit, scales), sums) in units.iter().zip(scales).zip(sums) {
            let bytes = B::bytes(unit, pair);
            let (scale, least) = (_mm512_permutexvar_ps(lanes, scales[0]), _mm512_permutexvar_ps(lanes, scales[1]));
            for (row, sum) in rows.iter().zip(sums) {
                let totals = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(row.correction, bytes, row.x));
                *sum = _mm512_fmadd_ps(totals, _mm512_mul_ps(scale, row.scales), *sum);
                if B::HAS_LEAST {
                    *sum = _mm512_fnmadd_ps(least, row.sum, *sum);
                }
            }
        }
    }
}
