//! Products with FP8 weights by AVX2. The floats are read as f16 with the same bits, which are 256 times too small,
//! and F16C converts them to f32.

use core::arch::x86_64::{
    __m256, __m256i, _mm256_add_ps, _mm256_and_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmpeq_epi8,
    _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_load_si256, _mm256_loadu_si256, _mm256_or_si256,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256,
    _mm256_slli_epi16, _mm256_slli_epi32, _mm256_srai_epi16, _mm256_testz_si256,
};

use super::blocks_of;
use super::float8::{Floats, with_floats};
use super::kernel::{MAX_FEW, Panel, with_rows, write_column};
use super::rows::Quad;
use crate::gemm::kernel::Tile;
use crate::prefetch::prefetch_far;
use crate::simd::{Avx2, Level};

/// Avx512Blocks of a vector of f32, and floats read at a time.
const LANES: usize = 8;
const FLOATS: usize = 32;

/// Computes the sums of a panel as [`kernel::run`](super::kernel::run) does.
///
/// # Safety
/// The machine must have AVX2, FMA and F16C; rows of activations must have as many quads as a row of weights has
/// blocks.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run(panel: Panel<'_>, tiles: &mut [Tile]) {
    // SAFETY: the caller's promise.
    with_floats!(panel.weights.layout, B => unsafe { columns::<B>(panel, tiles) });
}

/// # Safety
/// As for [`run`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn columns<B: Floats>(panel: Panel<'_>, tiles: &mut [Tile]) {
    let Panel { weights, columns, a, tile_step, .. } = panel;
    let (pass, rows_ahead) = (panel.pass(), panel.rows_ahead());
    for column in 0..columns {
        let row = Row {
            blocks: blocks_of::<B>(weights.numbers.row(column)),
            scales: weights.scales.row(column),
            ahead: panel.ahead(column, rows_ahead).numbers.address(0),
        };
        let mut all = [0.0; MAX_FEW];
        for (a, sums) in a.chunks(pass).zip(all.chunks_mut(pass)) {
            // SAFETY: the caller's promise.
            with_rows!(a, rows => unsafe { row.sums(rows, sums) });
        }
        write_column(&all[..a.len()], column, tile_step, tiles);
    }
}

/// A row of weights.
struct Row<'a, B> {
    blocks: &'a [B],
    /// Its scales, if they are in a tensor of their own.
    scales: &'a [u8],
    /// The bytes of a row some rows later, to be prefetched.
    ahead: *const u8,
}

impl<B: Floats> Row<'_, B> {
    /// Computes the sums with some rows of activations.
    ///
    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums<const R: usize>(&self, a: [&[Quad]; R], to: &mut [f32]) {
        let mut totals = [_mm256_setzero_ps(); R];
        for (index, block) in self.blocks.iter().enumerate() {
            for line in (0..size_of::<B>()).step_by(64) {
                prefetch_far(self.ahead.wrapping_add(index * size_of::<B>() + line));
            }
            let scale = _mm256_set1_ps(256.0 * block.scale(&self.scales[index * B::SPLIT_BYTES..]));
            let mut parts = [[_mm256_setzero_ps(); 2]; R];
            let mut nan = _mm256_setzero_si256();
            for (at, floats) in block.values().as_chunks::<FLOATS>().0.iter().enumerate() {
                // SAFETY: 32 bytes are read.
                let floats = unsafe { _mm256_loadu_si256(floats.as_ptr().cast()) };
                nan = _mm256_or_si256(nan, are_nan(floats));
                let numbers = numbers(floats);
                for (parts, a) in parts.iter_mut().zip(a) {
                    for (half, numbers) in numbers.into_iter().enumerate() {
                        let x = activations(&a[index], 2 * at + half);
                        for (part, (number, x)) in parts.iter_mut().zip(numbers.into_iter().zip(x)) {
                            *part = _mm256_fmadd_ps(number, x, *part);
                        }
                    }
                }
            }
            // As f16 they were numbers.
            let scale = if _mm256_testz_si256(nan, nan) == 1 { scale } else { _mm256_set1_ps(f32::NAN) };
            for (total, [first, second]) in totals.iter_mut().zip(parts) {
                *total = _mm256_fmadd_ps(_mm256_add_ps(first, second), scale, *total);
            }
        }
        to.iter_mut().zip(totals).for_each(|(to, total)| *to = Avx2::total(total));
    }
}

/// Returns all ones where a float is NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn are_nan(floats: __m256i) -> __m256i {
    let size = _mm256_set1_epi8(0x7f);
    _mm256_cmpeq_epi8(_mm256_and_si256(floats, size), size)
}

/// Converts 32 floats to f32 divided by 256: for either half of them the even elements and the odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn numbers(floats: __m256i) -> [[__m256; 2]; 2] {
    // In a word's upper byte all bits except the sign move one place down.
    let as_halves =
        |words: __m256i| _mm256_and_si256(_mm256_srai_epi16::<1>(words), _mm256_set1_epi16(0xbf80_u16.cast_signed()));
    let (even, odd) = (as_halves(_mm256_slli_epi16::<8>(floats)), as_halves(floats));
    let first = |words: __m256i| _mm256_cvtph_ps(_mm256_castsi256_si128(words));
    let second = |words: __m256i| _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words));
    [[first(even), first(odd)], [second(even), second(odd)]]
}

/// Widens the sixteen activations number `at` to f32: the even elements and the odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn activations(a: &Quad, at: usize) -> [__m256; 2] {
    let pairs = &a.floats()[at * 2 * LANES..][..2 * LANES];
    // SAFETY: sixteen bf16 are read; a quad is aligned to a cache line.
    let pairs = unsafe { _mm256_load_si256(pairs.as_ptr().cast()) };
    let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    [_mm256_slli_epi32::<16>(pairs), _mm256_and_si256(pairs, upper)].map(|bits| _mm256_castsi256_ps(bits))
}
