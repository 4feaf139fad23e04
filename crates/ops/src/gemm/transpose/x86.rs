//! Transposition of 16 rows by 16 units with AVX-512, and of 8 by 8 with AVX2.

use core::arch::x86_64::{
    __m128, __m128i, __m256, __m256i, __m512, _mm_loadu_ps, _mm256_and_si256, _mm256_castpd_ps, _mm256_castps_pd,
    _mm256_castps_si256, _mm256_castps128_ps256, _mm256_castsi256_ps, _mm256_cvtph_ps, _mm256_insertf128_ps,
    _mm256_set1_epi32, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_unpackhi_pd, _mm256_unpackhi_ps,
    _mm256_unpacklo_pd, _mm256_unpacklo_ps, _mm512_and_si512, _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps_si512,
    _mm512_castps128_ps512, _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cvtepi32_epi16, _mm512_cvtph_ps,
    _mm512_insertf32x4, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps,
    _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use moeworks_tensor::DType;

use crate::gemm::source::Format;
use crate::simd::Float;

/// Writes unit u of row r to `to[u * width + r]`, as far as whole blocks go, and returns the number of units. Does
/// nothing if elements would have to be rounded.
///
/// # Safety
/// The machine must have AVX-512 F and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(in crate::gemm) unsafe fn units<T: Float>(
    rows: &[&[T]; 16],
    format: Format,
    width: usize,
    to: &mut [u32],
) -> usize {
    write_blocks!(16, rows, format, (width, to), transpose, widened::<T>, _mm512_storeu_ps)
}

/// Returns the first elements of 16 pairs of f16 or bf16, and the second ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn widened<T: Float>(pairs: __m512) -> [__m512; 2] {
    let pairs = _mm512_castps_si512(pairs);
    if T::DTYPE == DType::F16 {
        return [pairs, _mm512_srli_epi32::<16>(pairs)].map(|half| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)));
    }
    let high = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(high)]
}

/// Writes unit u of row r to `to[u * width + r]` for the first `lanes` rows, which are sixteen or eight.
///
/// # Safety
/// The machine must have AVX-512 F and DQ; `num_units` units must be readable from each pointer on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(crate) unsafe fn words(rows: &[*const u32; 16], num_units: usize, width: usize, lanes: usize, to: &mut [u32]) {
    assert!(matches!(lanes, 8 | 16) && lanes <= width, "lanes of a unit");
    assert!(num_units == 0 || to.len() >= (num_units - 1) * width + lanes, "space for the transposed rows");
    let blocks = num_units / 16;
    for block in 0..blocks {
        let from = rows.map(|row| row.wrapping_add(16 * block).cast());
        // SAFETY: 16 units of each row are readable by the caller's promise, and each unit's lanes are inside `to`.
        unsafe {
            let to = to.as_mut_ptr().add(16 * block * width);
            for (unit, column) in transpose(&from).into_iter().enumerate() {
                let to = to.add(unit * width).cast();
                if lanes == 16 {
                    _mm512_storeu_ps(to, column);
                } else {
                    _mm256_storeu_ps(to, _mm512_castps512_ps256(column));
                }
            }
        }
    }
    for unit in 16 * blocks..num_units {
        for (to, row) in to[unit * width..][..lanes].iter_mut().zip(rows) {
            // SAFETY: the unit is one of those that the caller promises; pairs of bf16 in a file may begin at any
            // even address.
            *to = unsafe { row.add(unit).read_unaligned() };
        }
    }
}

/// # Safety
/// 16 elements must be readable at each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(in crate::gemm) unsafe fn transpose(from: &[*const f32; 16]) -> [__m512; 16] {
    let mut columns = [_mm512_setzero_ps(); 16];
    for quarter in 0..4 {
        // Vector r holds four elements of each of the rows r, r + 4, r + 8 and r + 12, so that a transposition of 4 x
        // 4 inside each 128-bit part leaves the rows in order.
        let mut parts = [_mm512_setzero_ps(); 4];
        for (r, part) in parts.iter_mut().enumerate() {
            // SAFETY: inside the 16 elements that the caller promises.
            let load = |row: usize| -> __m128 { unsafe { _mm_loadu_ps(from[row].add(4 * quarter)) } };
            let v = _mm512_castps128_ps512(load(r));
            let v = _mm512_insertf32x4::<1>(v, load(r + 4));
            let v = _mm512_insertf32x4::<2>(v, load(r + 8));
            *part = _mm512_insertf32x4::<3>(v, load(r + 12));
        }
        let [a, b, c, d] = parts;
        let (ab_low, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let low = |x, y| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
        let high = |x, y| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
        columns[4 * quarter] = low(ab_low, cd_low);
        columns[4 * quarter + 1] = high(ab_low, cd_low);
        columns[4 * quarter + 2] = low(ab_high, cd_high);
        columns[4 * quarter + 3] = high(ab_high, cd_high);
    }
    columns
}

/// Transposes units of eight rows like [`units`].
///
/// # Safety
/// The machine must have AVX2 and F16C.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(in crate::gemm) unsafe fn units_of_8<T: Float>(
    rows: &[&[T]; 8],
    format: Format,
    width: usize,
    to: &mut [u32],
) -> usize {
    write_blocks!(8, rows, format, (width, to), transpose_8, widened_8::<T>, _mm256_storeu_ps)
}

/// Widens eight pairs like [`widened`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn widened_8<T: Float>(pairs: __m256) -> [__m256; 2] {
    let pairs = _mm256_castps_si256(pairs);
    if T::DTYPE == DType::F16 {
        // SAFETY: the transmute renames 256 bits.
        let halves = unsafe { std::mem::transmute::<__m256i, [u16; 16]>(pairs) };
        let (mut low, mut high) = ([0_u16; 8], [0_u16; 8]);
        for (i, pair) in halves.as_chunks::<2>().0.iter().enumerate() {
            (low[i], high[i]) = (pair[0], pair[1]);
        }
        // SAFETY: the transmute renames 128 bits.
        let widened = |half| _mm256_cvtph_ps(unsafe { std::mem::transmute::<[u16; 8], __m128i>(half) });
        return [widened(low), widened(high)];
    }
    let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high)]
}

/// # Safety
/// 8 elements must be readable at each pointer.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
unsafe fn transpose_8(from: &[*const f32; 8]) -> [__m256; 8] {
    let mut columns = [_mm256_setzero_ps(); 8];
    for half in 0..2 {
        // Vector r holds four elements of the rows r and r + 4, as in `transpose`.
        let mut parts = [_mm256_setzero_ps(); 4];
        for (r, part) in parts.iter_mut().enumerate() {
            // SAFETY: inside the 8 elements that the caller promises.
            let load = |row: usize| -> __m128 { unsafe { _mm_loadu_ps(from[row].add(4 * half)) } };
            *part = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(load(r)), load(r + 4));
        }
        let [a, b, c, d] = parts;
        let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let low = |x, y| _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));
        let high = |x, y| _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(x), _mm256_castps_pd(y)));
        columns[4 * half] = low(ab_low, cd_low);
        columns[4 * half + 1] = high(ab_low, cd_low);
        columns[4 * half + 2] = low(ab_high, cd_high);
        columns[4 * half + 3] = high(ab_high, cd_high);
    }
    columns
}
