//! Micro-kernels: a tile of up to 8 rows and 3 vectors of columns, held in registers over the whole depth.
//!
//! Depth is counted in units of 32 bits: one f32, or a pair of bf16 that the dot-product instruction takes together. So
//! one body serves both. A comes as a pointer for each row and a step between units, which covers rows of a row-major
//! matrix wherever they lie (rows gathered by token need no copy) as well as packed panels. B comes packed, a row of
//! vectors for each unit. The sums go to a small buffer from which the caller's epilogue takes them while it is in the
//! first-level cache; that costs about 1% and keeps epilogues out of the kernels.

use crate::simd::{Baseline, Level};
use crate::{Isa, gemm::Compute, gemm::source::Format};

/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 8;
/// Vectors of the widest tile.
pub(crate) const MAX_VECTORS: usize = 3;
/// Columns of the widest tile of the widest vectors; rows of a [`Tile`] are this far apart.
pub(crate) const TILE_STRIDE: usize = 16 * MAX_VECTORS;

/// Vectors of the widest tile of vectors of so many lanes. Sixteen registers hold 6 rows by 2 vectors or 4 by 3; the former load
/// fewer bytes for each product.
#[inline(always)]
pub(crate) const fn widest(lanes: usize) -> usize {
    if lanes == 8 { 2 } else { MAX_VECTORS }
}

/// Columns of the widest tile of a level's vectors: what lies behind them in the rows of a [`Tile`] nobody fills.
#[inline(always)]
pub(crate) const fn tile_lanes<S: Level>() -> usize {
    S::WIDTH * widest(S::WIDTH)
}

/// Where a kernel leaves its sums.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Tile(pub(crate) [f32; MAX_ROWS * TILE_STRIDE]);

/// What a kernel is called with.
pub(crate) struct TileArgs {
    /// Units of depth.
    pub(crate) depth: usize,
    /// The first unit of each row of A.
    pub(crate) a: [*const u32; MAX_ROWS],
    /// Units from one unit of a row of A to the next.
    pub(crate) a_step: usize,
    /// The packed panel of B.
    pub(crate) b: *const u32,
    /// The sums, rows [`TILE_STRIDE`] apart.
    pub(crate) tile: *mut f32,
    /// Whether to go on from the sums that are in `tile`.
    pub(crate) is_continued: bool,
    /// Memory that a later task will read, to be brought closer meanwhile: any address, and bytes from the one asked for
    /// with one unit to that with the next.
    pub(crate) ahead: (*const u8, usize),
}

/// # Safety
/// The machine must have the instructions of the kernel; `a` must be readable at `depth` units for each of the kernel's
/// rows, `b` at `depth` times its width, and `tile` must be a [`Tile`].
type Kernel = unsafe fn(&TileArgs);

/// All tile sizes of a kernel function. Those with more rows than the instruction set's largest tile, of `up to` so many, are never
/// called, and stand for smaller ones.
macro_rules! table {
    (halves $($function:tt)+) => {
        Some([
            $($function)+::<1> as Kernel, $($function)+::<2> as Kernel, $($function)+::<3> as Kernel,
            $($function)+::<4> as Kernel, $($function)+::<5> as Kernel, $($function)+::<6> as Kernel,
            $($function)+::<7> as Kernel, $($function)+::<8> as Kernel,
        ])
    };
    (@row $rows:literal, $($function:tt)+) => {
        [$($function)+::<$rows, 1> as Kernel, $($function)+::<$rows, 2> as Kernel, $($function)+::<$rows, 3> as Kernel]
    };
    (up to 4, $($function:tt)+) => {
        [
            table!(@row 1, $($function)+), table!(@row 2, $($function)+), table!(@row 3, $($function)+),
            table!(@row 4, $($function)+), table!(@row 1, $($function)+), table!(@row 1, $($function)+),
            table!(@row 1, $($function)+), table!(@row 1, $($function)+),
        ]
    };
    (up to 6, $($function:tt)+) => {
        [
            table!(@row 1, $($function)+), table!(@row 2, $($function)+), table!(@row 3, $($function)+),
            table!(@row 4, $($function)+), table!(@row 5, $($function)+), table!(@row 6, $($function)+),
            table!(@row 1, $($function)+), table!(@row 1, $($function)+),
        ]
    };
    ($($function:tt)+) => {
        [
            table!(@row 1, $($function)+), table!(@row 2, $($function)+), table!(@row 3, $($function)+),
            table!(@row 4, $($function)+), table!(@row 5, $($function)+), table!(@row 6, $($function)+),
            table!(@row 7, $($function)+), table!(@row 8, $($function)+),
        ]
    };
}
/// The kernels of one instruction set for one kind of unit.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// By rows and vectors, each less one.
    table: [[Kernel; MAX_VECTORS]; MAX_ROWS],
    /// Rows of the largest tile.
    pub(crate) rows: usize,
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// What a unit holds.
    pub(crate) compute: Compute,
    /// By rows less one, for half a vector, where halves are vectors, too.
    pub(crate) halves: Option<[Kernel; MAX_ROWS]>,
    /// Whether these are the tiles of [`amx`](super::amx) instead, which have a table of their own.
    pub(crate) are_tiles: bool,
}

impl Kernels {
    /// The kernels for products in `compute` on `isa`. Where the instruction set has no bf16 product these are f32
    /// kernels: the product of two bf16 is exact in f32, so results differ by the order of sums only.
    pub(crate) fn select(isa: Isa, compute: Compute) -> Self {
        match (isa, compute) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, Compute::Bf16) => Self {
                rows: super::amx::ROWS,
                are_tiles: true,
                ..Self::vectors(table!(x86::avx512_bf16), 8, 16, Compute::Bf16)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Compute::Bf16) => Self {
                halves: table!(halves x86::half_bf16),
                ..Self::vectors(table!(x86::avx512_bf16), 8, 16, Compute::Bf16)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx, _) => {
                Self { halves: table!(halves x86::half), ..Self::vectors(table!(x86::avx512), 8, 16, Compute::F32) }
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => Self::vectors(table!(up to 6, x86::avx2), 6, 8, Compute::F32),
            _ => Self::vectors(table!(up to 4, portable), 4, Baseline::WIDTH, Compute::F32),
        }
    }

    fn vectors(table: [[Kernel; MAX_VECTORS]; MAX_ROWS], rows: usize, lanes: usize, compute: Compute) -> Self {
        Self { table, rows, lanes, compute, halves: None, are_tiles: false }
    }

    /// What these kernels take of operands in `precision`.
    #[inline(always)]
    pub(crate) fn format(&self, precision: Compute) -> Format {
        Format { units: self.compute, precision, multiple: if self.are_tiles { 16 } else { 1 } }
    }

    /// Runs the kernel for `rows` rows and `vectors` vectors.
    ///
    /// # Safety
    /// As for [`Kernel`], with an instruction set that the machine has.
    #[inline(always)]
    pub(crate) unsafe fn run(&self, rows: usize, vectors: usize, args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe { self.table[rows - 1][vectors - 1](args) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Kernels {
    /// As [`run`](Self::run) for so many lanes: whole vectors, or half a one.
    ///
    /// # Safety
    /// As there. Only where there are halves.
    #[inline(always)]
    pub(crate) unsafe fn run_lanes(&self, rows: usize, lanes: usize, args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            match self.halves {
                Some(halves) if lanes < self.lanes => halves[rows - 1](args),
                _ => self.run(rows, lanes / self.lanes, args),
            }
        }
    }
}

/// A step of a product on vectors of 32-bit units.
pub(crate) trait Math {
    /// A vector of sums.
    type Sums: Copy;
    /// A vector of units.
    type Units: Copy;
    /// Lanes of both.
    const WIDTH: usize;

    fn zero() -> Self::Sums;
    unsafe fn load(from: *const f32) -> Self::Sums;
    unsafe fn store(to: *mut f32, sums: Self::Sums);
    unsafe fn units(from: *const u32) -> Self::Units;
    unsafe fn splat(from: *const u32) -> Self::Units;
    fn add_product(sums: Self::Sums, a: Self::Units, b: Self::Units) -> Self::Sums;
    fn prefetch(at: *const u32);
}

struct F32<S>(S);

impl<S: Level> Math for F32<S> {
    type Sums = S::Vector;
    type Units = S::Vector;
    const WIDTH: usize = S::WIDTH;

    #[inline(always)]
    fn zero() -> S::Vector {
        S::splat(0.0)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> S::Vector {
        // SAFETY: the caller's promise is handed on.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, sums: S::Vector) {
        // SAFETY: the caller's promise is handed on.
        unsafe { S::store(to, sums) }
    }

    #[inline(always)]
    unsafe fn units(from: *const u32) -> S::Vector {
        // SAFETY: the caller's promise is handed on.
        unsafe { S::load(from.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(from: *const u32) -> S::Vector {
        // SAFETY: the caller promises a readable unit, aligned as every unit is.
        S::splat(unsafe { *from.cast::<f32>() })
    }

    #[inline(always)]
    fn add_product(sums: S::Vector, a: S::Vector, b: S::Vector) -> S::Vector {
        S::vector_mul_add(a, b, sums)
    }

    #[inline(always)]
    fn prefetch(at: *const u32) {
        prefetch(at);
    }
}

/// Asks for the cache line at `at`, which may be any address, to be brought close.
#[inline(always)]
pub(crate) fn prefetch(at: *const u32) {
    // SAFETY: a prefetch reads nothing that the program sees and ignores addresses that are not mapped.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for the cache line at `at`, which may be any address, to be brought into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_far(at: *const u8) {
    // SAFETY: a prefetch reads nothing that the program sees and ignores addresses that are not mapped.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Units in a cache line.
const LINE: usize = 16;

/// Bytes of B by which a kernel reads ahead of itself, so that panels stream from the second-level cache.
const B_AHEAD: usize = 768;

/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn tile<M: Math, const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: rows, units of the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = [[M::zero(); VECTORS]; ROWS];
        if args.is_continued {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = M::load(args.tile.add(r * TILE_STRIDE + v * M::WIDTH));
                }
            }
        }
        let mut b = args.b;
        let mut at = 0;
        let (mut ahead, ahead_step) = args.ahead;
        for _ in 0..args.depth {
            for line in 0..(VECTORS * M::WIDTH).div_ceil(LINE) {
                M::prefetch(b.wrapping_add(B_AHEAD / 4 + line * LINE));
            }
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            let mut columns = [M::units(b); VECTORS];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = M::units(b.add(v * M::WIDTH));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = M::splat(args.a[r].add(at));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = M::add_product(*sum, row, column);
                }
            }
            b = b.add(VECTORS * M::WIDTH);
            at += args.a_step;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                M::store(args.tile.add(r * TILE_STRIDE + v * M::WIDTH), sum);
            }
        }
    }
}

/// # Safety
/// As for [`Kernel`].
unsafe fn portable<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile::<F32<Baseline>, ROWS, VECTORS>(args) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::{
        __m256, __m256bh, __m512, __m512bh, _mm256_dpbf16_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_storeu_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{F32, Math, TileArgs, tile};
    use crate::simd::{Avx2, Avx512};

    /// [`Math`] on pairs of bf16. Its functions are used in kernels alone that have the instructions.
    macro_rules! pairs {
        ($name:ident, $vector:ident, $pairs:ident, $width:literal, $zero:ident, $load:ident, $store:ident, $splat:ident, $dot:ident) => {
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
                unsafe fn splat(from: *const u32) -> $vector {
                    // SAFETY: see above; the caller promises a readable unit. Pairs of a file's bf16 begin at any even address.
                    unsafe { $splat(from.cast::<f32>().read_unaligned()) }
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
    pairs!(
        Bf16Dot,
        __m512,
        __m512bh,
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_dpbf16_ps
    );
    pairs!(
        HalfBf16Dot,
        __m256,
        __m256bh,
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_dpbf16_ps
    );

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

    /// # Safety
    /// As for [`super::Kernel`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
    pub(super) unsafe fn half_bf16<const ROWS: usize>(args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe { tile::<HalfBf16Dot, ROWS, 1>(args) }
    }

    /// # Safety
    /// As for [`super::Kernel`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) unsafe fn half<const ROWS: usize>(args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe { tile::<F32<Avx2>, ROWS, 1>(args) }
    }

    /// # Safety
    /// As for [`super::Kernel`].
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn avx2<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe { tile::<F32<Avx2>, ROWS, VECTORS>(args) }
    }
}
