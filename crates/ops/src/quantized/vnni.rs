//! Products of quantized rows with blocks by the byte dot product of AVX-512 VNNI.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_castps_si512, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_fnmadd_ps, _mm512_load_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_mask_add_ps, _mm512_mul_ps,
    _mm512_permutexvar_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};

use super::blocks_of;
use super::kernel::Panel;
use super::lanes::{Lanes, PARTS};
use super::layouts::PART;
use super::rows::{Beside, Quad};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, prefetch_far};
use crate::simd::{Avx512, Level};

/// Bytes by which weights are asked for ahead of their use, at least. With less, or if a line is left out, memory and products take turns.
const AHEAD_BYTES: usize = 8 << 10;

/// What stands beside activations for a type of weights.
pub(super) const fn beside<B: Lanes>() -> Beside {
    match (B::IS_LONG, B::SHARED == PART) {
        (false, _) if B::HAS_LEAST => Beside::Least,
        (false, _) if B::IS_PAIRED => Beside::Pairs(B::OFFSET.cast_unsigned()),
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
    let Panel { weights, columns, next, depth, .. } = panel;
    assert_eq!(weights.numbers.row_bytes(), depth / B::LEN * size_of::<B>(), "bytes of a row of weights");
    let num_passes = panel.a.len().div_ceil(MAX_PASS).max(1);
    let pass = panel.a.len().div_ceil(num_passes).max(1);
    let rows_ahead = AHEAD_BYTES.div_ceil(weights.numbers.row_bytes().max(1));
    for column in 0..columns {
        let later = column + rows_ahead;
        let (ahead, row) = if later < columns { (weights, later) } else { (next, later - columns) };
        if B::APART > 0 {
            prefetch_bytes(ahead.scales.address(row), ahead.scales.row_bytes().max(1));
        }
        let ahead: *const B = ahead.numbers.address(row).cast();
        let (blocks, scales) = (blocks_of(weights.numbers.row(column)), weights.scales.row(column));
        for (index, a) in panel.a.chunks(pass).enumerate() {
            let row = Row { blocks, scales, ahead, to: (index * pass, column, panel.tile_step) };
            // SAFETY: the caller's promise.
            unsafe {
                match *a {
                    [a] => row.sums([a], tiles),
                    [a, b] => row.sums([a, b], tiles),
                    [a, b, c] => row.sums([a, b, c], tiles),
                    [a, b, c, d] => row.sums([a, b, c, d], tiles),
                    _ => {}
                }
            }
        }
    }
}

/// The most rows of activations that a row of weights meets at once: so many that registers hold all that goes with them.
const MAX_PASS: usize = 4;

/// A row of weights: they are taken one by one, so that memory is read in one stream.
struct Row<'a, B> {
    blocks: &'a [B],
    /// Its scales, if they are elsewhere.
    scales: &'a [u8],
    /// What will be read some rows later.
    ahead: *const B,
    /// The first row of the sums and their column, and every how many tiles the next [`MAX_ROWS`] rows go.
    to: (usize, usize, usize),
}

/// Two vectors of sums, so that additions need not wait for each other.
#[derive(Clone, Copy)]
struct Sums([__m512; 2]);

impl<B: Lanes> Row<'_, B> {
    /// Writes the sums with some rows of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn sums<const R: usize>(&self, a: [&[Quad]; R], tiles: &mut [Tile]) {
        let mut sums = [Sums([_mm512_setzero_ps(); 2]); R];
        let units = self.blocks.chunks_exact(B::BLOCKS);
        let unit_scales = B::BLOCKS * B::APART;
        assert!(self.scales.len() >= self.blocks.len() * B::APART, "scales of a row");
        let rest = units.remainder();
        let mut at = 0;
        for unit in units {
            prefetch_bytes(self.ahead.wrapping_add(at * B::BLOCKS).cast(), B::BLOCKS * size_of::<B>());
            // SAFETY: the unit and its scales are whole, and activations have as many quads as the row.
            unsafe {
                let scales = self.scales.as_ptr().add(at * unit_scales);
                add_unit((unit.as_ptr(), scales), (a, at * B::QUADS), &mut sums);
            }
            at += 1;
        }
        if !rest.is_empty() {
            // What is not there counts as blocks of zeros.
            let mut unit = [B::zeroed(); PARTS];
            unit[..rest.len()].copy_from_slice(rest);
            let scales = unit_of_scales::<B>(&self.scales[at * unit_scales..]);
            // SAFETY: as above; units of several blocks have `PARTS`.
            unsafe { add_unit((unit.as_ptr(), scales.as_ptr()), (a, at * B::QUADS), &mut sums) };
        }
        let (first, column, tile_step) = self.to;
        for (row, Sums([products, others])) in (first..).zip(sums) {
            // Of products with scales and least values in one vector the upper lanes alone are sums.
            let lanes = if B::IS_LONG && B::SHARED == PART { 0xff00 } else { 0xffff };
            let sum = _mm512_mask_add_ps(products, lanes, products, others);
            tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column] = Avx512::total(sum);
        }
    }
}

/// The scales of fewer blocks than a unit has, where they are elsewhere, and zeros for the others.
pub(super) fn unit_of_scales<B: Lanes>(scales: &[u8]) -> [u8; PARTS] {
    const { assert!(B::BLOCKS * B::APART <= PARTS) };
    let mut all = [0; PARTS];
    let len = scales.len().min(B::BLOCKS * B::APART);
    all[..len].copy_from_slice(&scales[..len]);
    all
}

/// Asks for all cache lines that bytes lie on.
#[inline(always)]
fn prefetch_bytes(at: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        prefetch_far(at.wrapping_add(line));
    }
    prefetch_far(at.wrapping_add(len - 1));
}

/// Adds the products of a unit of weights with the quads from `at` on of `R` rows.
///
/// # Safety
/// As for [`run`]; the unit and its scales must be readable, and the rows must have its quads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add_unit<B: Lanes, const R: usize>(
    (unit, scales): (*const B, *const u8),
    (a, at): ([&[Quad]; R], usize),
    sums: &mut [Sums; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = B::scales(unit, scales);
        if !B::IS_LONG {
            let numbers = B::numbers(unit, 0);
            for (sums, a) in sums.iter_mut().zip(a) {
                sums.add_short::<B>((numbers, scales), a.get_unchecked(at));
            }
            return;
        }
        let numbers = [B::numbers(unit, 0), B::numbers(unit, 1)];
        for (sums, a) in sums.iter_mut().zip(a) {
            sums.add_long::<B>((numbers, scales), [a.get_unchecked(at), a.get_unchecked(at + 1)]);
        }
    }
}

impl Sums {
    /// Adds the products of four short blocks with a quad of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn add_short<B: Lanes>(&mut self, (numbers, scales): ([__m512i; 2], [__m512; 2]), a: &Quad) {
        let Self([products, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each.
        unsafe {
            let beside = _mm512_load_ps(a.beside[1].as_ptr());
            let start = if B::HAS_LEAST { _mm512_setzero_si512() } else { _mm512_castps_si512(beside) };
            let totals = _mm512_cvtepi32_ps(dots(dots(start, numbers[0], &a.halves[0]), numbers[1], &a.halves[1]));
            let factors = _mm512_mul_ps(scales[0], _mm512_load_ps(a.beside[0].as_ptr()));
            *products = _mm512_fmadd_ps(totals, factors, *products);
            if B::HAS_LEAST {
                *others = _mm512_fnmadd_ps(scales[1], beside, *others);
            }
        }
    }

    /// Adds the products of a long block with two quads of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")]
    unsafe fn add_long<B: Lanes>(
        &mut self,
        (numbers, [scales, least]): ([[__m512i; 2]; 2], [__m512; 2]),
        a: [&Quad; 2],
    ) {
        let Self([products, others]) = self;
        // SAFETY: the arrays of a quad are aligned to a cache line and of 64 bytes each, as lanes are.
        unsafe {
            let factors = _mm512_mul_ps(scales, _mm512_load_ps(a[0].beside[0].as_ptr()));
            let zero = _mm512_setzero_si512();
            if B::SHARED == PART {
                // The upper lanes are products of least values and sums already.
                *others = _mm512_add_ps(*others, factors);
            } else {
                let least = if B::HAS_LEAST { least } else { scales };
                *others = _mm512_fnmadd_ps(least, _mm512_load_ps(a[0].beside[1].as_ptr()), *others);
            }
            for quad in 0..2 {
                let lanes = [0, 1].map(|half| B::SCALE_LANES[quad][half].as_ptr().cast());
                let first = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[0]), factors);
                let totals = dots(zero, numbers[quad][0], &a[quad].halves[0]);
                if B::SHARED == PART {
                    let totals = dots(totals, numbers[quad][1], &a[quad].halves[1]);
                    *products = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), first, *products);
                } else {
                    let second = _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[1]), factors);
                    *products = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), first, *products);
                    let totals = dots(zero, numbers[quad][1], &a[quad].halves[1]);
                    *others = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), second, *others);
                }
            }
        }
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
