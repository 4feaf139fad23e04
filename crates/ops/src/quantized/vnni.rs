//! Products of quantized rows with blocks by the byte dot product of AVX-512 VNNI.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_castps_si512, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_load_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_mask_add_ps, _mm512_mul_ps, _mm512_permutexvar_ps,
    _mm512_setzero_ps, _mm512_setzero_si512,
};

use super::blocks_of;
use super::kernel::Panel;
use super::lanes::{Lanes, PARTS};
use super::layouts::PART;
use super::rows::{Beside, Quad};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, prefetch_far};
use crate::simd::{Avx512, Level};

/// Bytes by which weights are asked for ahead of their use, at least. Less, and memory and products take turns.
const AHEAD_BYTES: usize = 8 << 10;

/// The most bytes of a unit of several blocks.
const MAX_UNIT_BYTES: usize = PARTS * 34;

/// What stands beside activations for a type of weights.
pub(super) const fn beside<B: Lanes>() -> Beside {
    match (B::IS_LONG, B::SHARED == PART) {
        (false, _) if B::HAS_LEAST => Beside::Least,
        (false, _) => Beside::Offset(B::OFFSET.cast_unsigned()),
        (true, true) => Beside::Parts,
        // What is larger than it should be by an offset has a least value of so many scales.
        (true, false) => Beside::Halves(if B::HAS_LEAST { 1 } else { B::OFFSET.cast_unsigned() }),
    }
}

/// # Safety
/// The machine must have AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C; rows of activations must have as many quads as hold
/// a row of weights.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn run<B: Lanes>(panel: Panel<'_>, tiles: &mut [Tile]) {
    let num_blocks = panel.depth / B::DTYPE.block_len();
    let weights = blocks_of::<B>(panel.weights);
    let columns = weights.len().checked_div(num_blocks).unwrap_or(0);
    let num_passes = panel.a.len().div_ceil(4).max(1);
    let pass = panel.a.len().div_ceil(num_passes);
    let rows_ahead = AHEAD_BYTES.div_ceil((num_blocks * size_of::<B>()).max(1)).next_multiple_of(4);
    let mut column = 0;
    while column < columns {
        // As many rows of weights as registers hold sums of.
        let count = if column + 4 <= columns { 4 } else { 1 };
        let ahead = if column + rows_ahead < columns {
            weights.as_ptr().wrapping_add((column + rows_ahead) * num_blocks)
        } else {
            panel.next.cast::<B>().wrapping_add((column + rows_ahead - columns) * num_blocks)
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
    /// What will be read some rows later.
    ahead: *const B,
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
        // Lengths that the compiler knows keep sums in registers.
        let mut a: [&[Quad]; R] = [&[]; R];
        a.copy_from_slice(&panel.a[first..first + R]);
        let weights = weights[column * num_blocks..][..N * num_blocks].as_ptr();
        let mut sums: Sums<N, R> = [[_mm512_setzero_ps(); R]; N];
        let whole = num_blocks / B::BLOCKS * B::BLOCKS;
        for block in (0..whole).step_by(B::BLOCKS) {
            for (n, sums) in sums.iter_mut().enumerate() {
                prefetch_bytes(ahead.wrapping_add(n * num_blocks + block).cast(), B::BLOCKS * size_of::<B>());
                // SAFETY: the unit is part of a row, and activations have as many quads as the row.
                unsafe { add_unit(weights.add(n * num_blocks + block), (a, block / B::BLOCKS * B::QUADS), sums) };
            }
        }
        if whole < num_blocks {
            for (n, sums) in sums.iter_mut().enumerate() {
                // What is not there counts as blocks of zeros.
                let mut unit = [0_u8; MAX_UNIT_BYTES];
                let len = (num_blocks - whole) * size_of::<B>();
                // SAFETY: the rest of a row is shorter than a unit of several blocks, which has room, and is readable.
                unsafe {
                    let rest = weights.add(n * num_blocks + whole).cast::<u8>();
                    unit.as_mut_ptr().copy_from_nonoverlapping(rest, len);
                    add_unit(unit.as_ptr().cast::<B>(), (a, whole / B::BLOCKS * B::QUADS), sums);
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

/// Asks for all cache lines that bytes lie on.
#[inline(always)]
fn prefetch_bytes(at: *const u8, len: usize) {
    for line in 0..len / 64 {
        prefetch_far(at.wrapping_add(64 * line));
    }
    prefetch_far(at.wrapping_add(len - 1));
}

/// Adds the products of a unit of weights with the quads from `at` on of `R` rows.
///
/// # Safety
/// As for [`run`]; the unit must be readable, and the rows must have its quads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_unit<B: Lanes, const R: usize>(unit: *const B, (a, at): ([&[Quad]; R], usize), sums: &mut [__m512; R]) {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = B::scales(unit);
        if !B::IS_LONG {
            let numbers = B::numbers(unit, 0);
            for (sum, a) in sums.iter_mut().zip(a) {
                *sum = with_short::<B>((numbers, scales), a.get_unchecked(at), *sum);
            }
            return;
        }
        let numbers = [B::numbers(unit, 0), B::numbers(unit, 1)];
        for (sum, a) in sums.iter_mut().zip(a) {
            *sum = with_long::<B>((numbers, scales), [a.get_unchecked(at), a.get_unchecked(at + 1)], *sum);
        }
    }
}

/// The sum and the products of four short blocks with a quad of activations.
///
/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn with_short<B: Lanes>((numbers, scales): ([__m512i; 2], [__m512; 2]), a: &Quad, mut sum: __m512) -> __m512 {
    // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
    unsafe {
        let others = _mm512_load_ps(a.beside[1].as_ptr());
        let start = if B::HAS_LEAST { _mm512_setzero_si512() } else { _mm512_castps_si512(others) };
        let totals = _mm512_cvtepi32_ps(dots(dots(start, numbers[0], &a.halves[0]), numbers[1], &a.halves[1]));
        sum = _mm512_fmadd_ps(totals, _mm512_mul_ps(scales[0], _mm512_load_ps(a.beside[0].as_ptr())), sum);
        if B::HAS_LEAST {
            sum = _mm512_fnmadd_ps(scales[1], others, sum);
        }
        sum
    }
}

/// The sum and the products of a long block with two quads of activations.
///
/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn with_long<B: Lanes>(
    (numbers, [scales, least]): ([[__m512i; 2]; 2], [__m512; 2]),
    a: [&Quad; 2],
    mut sum: __m512,
) -> __m512 {
    // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each, as lanes are.
    unsafe {
        let factors = _mm512_mul_ps(scales, _mm512_load_ps(a[0].beside[0].as_ptr()));
        let zero = _mm512_setzero_si512();
        if B::SHARED == PART {
            // The upper lanes are products of least values and sums already.
            sum = _mm512_mask_add_ps(sum, 0xff00, sum, factors);
        } else {
            let least = if B::HAS_LEAST { least } else { scales };
            sum = _mm512_fnmadd_ps(least, _mm512_load_ps(a[0].beside[1].as_ptr()), sum);
        }
        for quad in 0..2 {
            let lanes = [0, 1].map(|half| B::SCALE_LANES[quad][half].as_ptr().cast());
            let first = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[0]), factors);
            let products = dots(zero, numbers[quad][0], &a[quad].halves[0]);
            if B::SHARED == PART {
                let totals = dots(products, numbers[quad][1], &a[quad].halves[1]);
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), first, sum);
            } else {
                let second = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[1]), factors);
                let totals = dots(zero, numbers[quad][1], &a[quad].halves[1]);
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), first, sum);
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), second, sum);
            }
        }
        sum
    }
}

/// Sums of four products each of weights and activations, added to `start`.
///
/// # Safety
/// As for [`run`]; activations must be aligned to a cache line.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dots(start: __m512i, weights: __m512i, a: &[i8; 64]) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_dpbusd_epi32(start, weights, unsafe { _mm512_load_si512(a.as_ptr().cast()) })
}
