//! The x86-64 kernels.

use core::arch::x86_64::{
    __m256, __m256bh, __m512, __m512bh, _mm256_dpbf16_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm512_castps512_ps256, _mm512_castsi256_si512, _mm512_castsi512_ps, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::{
    Across, F32, Halves, Math, ROWS_OF_8, TileArgs, tile, tile_in_rounds, tile_packing, tile_with_half, units_of,
};
use crate::gemm::pack::interleave;
use crate::simd::{Avx2, Avx512, Level};

/// Implements [`Math`] for bf16 pairs. It is used only in kernels compiled with the instructions.
macro_rules! pairs {
    ($name:ident, $vector:ident, $pairs:ident, $width:literal, $zero:ident, $load:ident, $store:ident, $level:ident, $dot:ident) => {
        struct $name;

        impl Math for $name {
            type Sums = $vector;
            type Units = $vector;
            const WIDTH: usize = $width;

            #[inline(always)]
            fn zero() -> $vector {
                // SAFETY: see above.
                unsafe { $zero() }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> $vector {
                // SAFETY: see above; the caller promises readable memory.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(to: *mut f32, sums: $vector) {
                // SAFETY: see above; the caller promises writable memory.
                unsafe { $store(to, sums) }
            }

            #[inline(always)]
            unsafe fn units(from: *const u32) -> $vector {
                // SAFETY: see above; the caller promises readable memory.
                unsafe { $load(from.cast()) }
            }

            #[inline(always)]
            unsafe fn splat(row: *const u32, at: usize) -> $vector {
                // SAFETY: see above; the caller promises a readable unit. Pairs of bf16 in a file may begin at any
                // even address.
                unsafe { $level::splat_at(row.cast(), at) }
            }

            #[inline(always)]
            fn add_product(sums: $vector, a: $vector, b: $vector) -> $vector {
                let pairs = |x| {
                    // SAFETY: renames the bits of a vector.
                    unsafe { std::mem::transmute::<$vector, $pairs>(x) }
                };
                // SAFETY: see above.
                unsafe { $dot(sums, pairs(a), pairs(b)) }
            }

            #[inline(always)]
            fn prefetch(at: *const u32) {
                super::prefetch(at);
            }
        }
    };
}
pairs!(Bf16Dot, __m512, __m512bh, 16, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, Avx512, _mm512_dpbf16_ps);
pairs!(HalfBf16Dot, __m256, __m256bh, 8, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, Avx2, _mm256_dpbf16_ps);

impl Halves for Bf16Dot {
    type Half = HalfBf16Dot;

    #[inline(always)]
    fn half(units: __m512) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm512_castps512_ps256(units) }
    }
}

impl Halves for F32<Avx512> {
    type Half = F32<Avx2>;

    #[inline(always)]
    fn half(units: __m512) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm512_castps512_ps256(units) }
    }
}

impl Across for F32<Avx512> {
    #[inline(always)]
    unsafe fn across<const VECTORS: usize>(row: *const u32, _step: usize) -> [__m512; VECTORS] {
        // SAFETY: the caller's promise is handed on.
        unsafe { units_of::<Self, VECTORS>(row) }
    }
}

/// A unit is two rows, whose elements are interleaved in registers.
impl Across for Bf16Dot {
    #[inline(always)]
    unsafe fn across<const VECTORS: usize>(row: *const u32, step: usize) -> [__m512; VECTORS] {
        // SAFETY: see above; the caller promises so many elements of both rows.
        unsafe {
            let rows: [*const u32; 2] = [row, row.add(step / 2)];
            let mut columns = [Self::zero(); VECTORS];
            for v in (0..VECTORS).step_by(2) {
                let halves = rows.map(|row| row.add(v * Self::WIDTH / 2));
                if v + 1 < VECTORS {
                    let units = interleave(halves.map(|at| _mm512_loadu_si512(at.cast())));
                    columns[v] = _mm512_castsi512_ps(units[0]);
                    columns[v + 1] = _mm512_castsi512_ps(units[1]);
                } else {
                    let units = interleave(halves.map(|at| _mm512_castsi256_si512(_mm256_loadu_si256(at.cast()))));
                    columns[v] = _mm512_castsi512_ps(units[0]);
                }
            }
            columns
        }
    }
}

/// # Safety
/// As for [`super::Kernels::run_packing`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn packing_bf16<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile_packing::<Bf16Dot, _, ROWS, VECTORS>(args) }
}

/// # Safety
/// As for [`super::Kernels::run_packing`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn packing<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile_packing::<F32<Avx512>, _, ROWS, VECTORS>(args) }
}

/// # Safety
/// As for [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn avx512_bf16<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile::<Bf16Dot, ROWS, VECTORS>(args) }
}

/// # Safety
/// As for [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn avx512<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile::<F32<Avx512>, ROWS, VECTORS>(args) }
}

/// Computes a tile of `VECTORS` vectors and half of one.
///
/// # Safety
/// As for [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn half_bf16<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        match VECTORS {
            0 => tile::<HalfBf16Dot, ROWS, 1>(args),
            _ => tile_with_half::<Bf16Dot, ROWS, VECTORS>(args),
        }
    }
}

/// Computes a tile of `VECTORS` vectors and half of one.
///
/// # Safety
/// As for [`super::Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn half<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        match VECTORS {
            0 => tile::<F32<Avx2>, ROWS, 1>(args),
            _ => tile_with_half::<F32<Avx512>, ROWS, VECTORS>(args),
        }
    }
}

/// # Safety
/// As for [`super::Kernel`].
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(super) unsafe fn avx2<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile_in_rounds::<F32<Avx2>, ROWS, VECTORS, ROWS_OF_8>(args) }
}
