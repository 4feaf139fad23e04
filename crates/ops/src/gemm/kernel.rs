//! Micro-kernels: a tile of up to 8 rows and 3 vectors of columns, held in registers over the whole depth.
//!
//! Depth is counted in units of 32 bits: one f32, or a pair of bf16 that the dot-product instruction takes together,
//! so that one body serves both. A is given as a pointer per row and a step between units, which covers rows in place
//! (gathered rows need no copy) as well as packed panels. B is packed, a row of vectors for each unit, or is packed
//! by the kernel on the way. Sums go to a small tile, from which the caller's epilogue takes them while it is in the
//! L1 cache; that costs about 1% and keeps epilogues out of the kernels.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::Isa;
use crate::gemm::{Compute, source::Format, tasks::Blocking};
use crate::prefetch::{prefetch, prefetch_far};
use crate::simd::{Baseline, Level};

/// Rows of the largest tile.
pub(crate) const MAX_ROWS: usize = 8;
/// Rows of the largest tile with vectors of 8 lanes.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const ROWS_OF_8: usize = 6;
/// Vectors of the widest tile.
pub(crate) const MAX_VECTORS: usize = 3;
/// Columns of the widest tile with the widest vectors, and the distance between rows of a [`Tile`].
pub(crate) const TILE_STRIDE: usize = 16 * MAX_VECTORS;

/// Returns the vectors of the widest tile for vectors of so many lanes. Sixteen registers hold 6 rows by 2 vectors or
/// 4 by 3; the former load fewer bytes per product.
#[inline(always)]
pub(crate) const fn widest(lanes: usize) -> usize {
    if lanes == 8 { 2 } else { MAX_VECTORS }
}

/// Returns the columns of the widest tile for a level's vectors. Columns of a [`Tile`] beyond them are never filled.
#[inline(always)]
pub(crate) const fn tile_lanes<S: Level>() -> usize {
    S::WIDTH * widest(S::WIDTH)
}

/// The sums of a kernel, up to 8 rows by 48 columns.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Tile(pub(crate) [f32; MAX_ROWS * TILE_STRIDE]);

impl Tile {
    /// Prefetches so many rows and columns.
    #[inline(always)]
    pub(crate) fn prefetch(&self, rows: usize, columns: usize) {
        for row in self.0.chunks_exact(TILE_STRIDE).take(rows) {
            row[..columns].iter().step_by(LINE).for_each(|at| prefetch(std::ptr::from_ref(at).cast()));
        }
    }
}

/// A series of prefetches: any address, and the bytes from one prefetch to the next.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch {
    pub(crate) at: *const u8,
    pub(crate) step: usize,
}

/// The arguments of a kernel.
pub(crate) struct TileArgs {
    /// Units of depth.
    pub(crate) depth: usize,
    /// The first unit of each row of A.
    pub(crate) a: [*const u32; MAX_ROWS],
    /// Units from one unit of a row of A to the next: 1, or [`Kernels::rows`] if rows are packed.
    pub(crate) a_step: usize,
    /// The packed panel of B; for [`run_packing`](Kernels::run_packing) the first row of the panel's columns in B
    /// itself.
    pub(crate) b: *const u32,
    /// For [`run_packing`](Kernels::run_packing): the 32-bit words from the rows of a unit to those of the next, and
    /// the panel to be packed.
    pub(crate) packing: (usize, *mut u32),
    /// The sums, rows [`TILE_STRIDE`] apart.
    pub(crate) tile: *mut f32,
    /// True if to continue the sums that are in `tile`.
    pub(crate) is_continued: bool,
    /// Memory that a later task will read, prefetched once per unit, or once per [`Kernels::at_once`] units.
    pub(crate) ahead: Prefetch,
}

/// # Safety
/// The machine must have the instructions of the kernel; `a` must be readable at `depth` units for each of the
/// kernel's rows, `b` at `depth` times its width (or as said of [`Kernels::run_packing`]), and `tile` must be a
/// [`Tile`].
type Kernel = unsafe fn(&TileArgs);

/// Lists all tile sizes of a kernel function. Sizes with more rows than the instruction set's largest tile (`up to`
/// so many) are never called and repeat smaller ones.
macro_rules! table {
    (halves $($function:tt)+) => {
        Some([
            table!(@half 1, $($function)+), table!(@half 2, $($function)+), table!(@half 3, $($function)+),
            table!(@half 4, $($function)+), table!(@half 5, $($function)+), table!(@half 6, $($function)+),
            table!(@half 7, $($function)+), table!(@half 8, $($function)+),
        ])
    };
    (@half $rows:literal, $($function:tt)+) => {
        [$($function)+::<$rows, 0> as Kernel, $($function)+::<$rows, 1> as Kernel, $($function)+::<$rows, 2> as Kernel]
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
    /// Indexed by rows and vectors, each less one.
    table: [[Kernel; MAX_VECTORS]; MAX_ROWS],
    /// Rows of the largest tile.
    pub(crate) rows: usize,
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// The type that a unit holds.
    pub(crate) compute: Compute,
    /// Kernels whose last vector is half a vector, indexed by rows less one and whole vectors, on levels where half
    /// vectors exist.
    pub(crate) halves: Option<[[Kernel; MAX_VECTORS]; MAX_ROWS]>,
    /// Kernels, indexed by rows and vectors, each less one, that read a B with rows across the depth in place and
    /// pack it for later rows of C.
    packing: Option<[[Kernel; MAX_VECTORS]; MAX_ROWS]>,
    /// True if these stand for the AMX tiles of [`amx`](super::amx), which have a table of their own.
    pub(crate) are_tiles: bool,
    /// Number of bf16 that an element is split into: three for f32 in tiles, otherwise one.
    pub(crate) parts: usize,
    /// Units of depth for each line that kernels prefetch.
    pub(crate) at_once: usize,
    /// The sizes of tasks whose rows of A are used in place.
    pub(crate) blocking: Blocking,
}

impl Kernels {
    /// Selects the kernels for products in `compute` on `isa`. Instruction sets without a bf16 product use f32
    /// kernels: the product of two bf16 is exact in f32, so results differ only by the order of sums.
    pub(crate) fn select(isa: Isa, compute: Compute) -> Self {
        match (isa, compute) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx | Isa::AmxF32, Compute::Bf16) => Self {
                rows: super::amx::ROWS,
                are_tiles: true,
                ..Self::vectors(table!(x86::avx512_bf16), 8, 16, Compute::Bf16)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, Compute::Bf16) => Self {
                halves: table!(halves x86::half_bf16),
                packing: Some(table!(x86::packing_bf16)),
                ..Self::vectors(table!(x86::avx512_bf16), 8, 16, Compute::Bf16)
            },
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32, _) => {
                let (halves, packing) = (table!(halves x86::half), Some(table!(x86::packing)));
                let blocking = Blocking::for_f32(isa);
                Self { halves, packing, blocking, ..Self::vectors(table!(x86::avx512), 8, 16, Compute::F32) }
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => {
                let table = table!(up to 6, x86::avx2);
                Self { at_once: AT_ONCE, ..Self::vectors(table, ROWS_OF_8, 8, Compute::F32) }
            }
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon, _) => Self::vectors(table!(up to 6, neon::neon), ROWS_OF_8, 8, Compute::F32),
            _ => Self::vectors(table!(up to 4, portable), 4, Baseline::WIDTH, Compute::F32),
        }
    }

    /// Selects the kernels that compute f32 as bf16x3 in tiles, for groups of many rows.
    pub(crate) fn bf16x3(isa: Isa, compute: Compute) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if (isa, compute) == (Isa::AmxF32, Compute::F32) {
            return Some(Self { parts: super::amx::PARTS, ..Self::select(isa, Compute::Bf16) });
        }
        let _ = (isa, compute);
        None
    }

    fn vectors(table: [[Kernel; MAX_VECTORS]; MAX_ROWS], rows: usize, lanes: usize, compute: Compute) -> Self {
        let (halves, packing, blocking) = (None, None, Blocking::LONG);
        Self { table, rows, lanes, compute, halves, packing, are_tiles: false, parts: 1, at_once: 1, blocking }
    }

    /// Returns the format in which these kernels take operands of a product in `precision`.
    #[inline(always)]
    pub(crate) fn format(&self, precision: Compute) -> Format {
        Format { units: self.compute, precision, multiple: if self.are_tiles { 16 } else { 1 }, parts: self.parts }
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

    /// Returns whether [`run_packing`](Self::run_packing) exists.
    #[inline(always)]
    pub(crate) fn can_pack(&self) -> bool {
        self.packing.is_some()
    }

    /// Runs the kernel for a B that is not packed yet, and packs it.
    ///
    /// # Safety
    /// As for [`run`](Self::run), except that rows of `depth` units, with as many elements as the vectors have lanes,
    /// must be readable from `b` on, and the panel must be writable.
    #[inline(always)]
    pub(crate) unsafe fn run_packing(&self, rows: usize, vectors: usize, args: &TileArgs) {
        let packing = self.packing.as_ref().expect("kernels that pack");
        // SAFETY: the caller's promise is handed on.
        unsafe { packing[rows - 1][vectors - 1](args) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Kernels {
    /// Runs the kernel for so many lanes: up to three whole vectors, or half a vector after up to two whole ones.
    ///
    /// # Safety
    /// As for [`run`](Self::run). The level must have half vectors.
    #[inline(always)]
    pub(crate) unsafe fn run_lanes(&self, rows: usize, lanes: usize, args: &TileArgs) {
        // SAFETY: the caller's promise is handed on.
        unsafe {
            match self.halves {
                Some(halves) if !lanes.is_multiple_of(self.lanes) => halves[rows - 1][lanes / self.lanes](args),
                _ => self.run(rows, lanes / self.lanes, args),
            }
        }
    }
}

/// One step of a product on vectors of 32-bit units.
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
    /// Returns the unit `at` units after `row` in all lanes.
    unsafe fn splat(row: *const u32, at: usize) -> Self::Units;
    fn add_product(sums: Self::Sums, a: Self::Units, b: Self::Units) -> Self::Sums;
    fn prefetch(at: *const u32);
}

/// A [`Math`] whose vectors have halves that are vectors, too.
#[cfg(target_arch = "x86_64")]
trait Halves: Math {
    type Half: Math;

    /// Returns the first half of units that are all equal.
    fn half(units: Self::Units) -> <Self::Half as Math>::Units;
}

/// A [`Math`] that makes units from rows across the depth in place.
#[cfg(target_arch = "x86_64")]
trait Across: Math {
    /// Returns the units of `VECTORS` vectors of columns from `row` on; the rows of a unit take `step` words.
    unsafe fn across<const VECTORS: usize>(row: *const u32, step: usize) -> [Self::Units; VECTORS];
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
    unsafe fn splat(row: *const u32, at: usize) -> S::Vector {
        // SAFETY: the caller promises a readable unit.
        unsafe { S::splat_at(row.cast(), at) }
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

/// Units in a cache line.
const LINE: usize = 16;

/// Bytes of B that a kernel prefetches ahead of itself, so that panels stream from the L2 cache.
const B_AHEAD: usize = 768;

/// Units of depth per loop round of kernels with 8 lanes. These kernels prefetch little beyond their operands, at
/// constant distances, to spend few instructions besides products: with another program on the core's second thread,
/// a kernel gets half of the instruction slots, and instructions other than twelve products of 8 lanes soon dominate.
pub(crate) const AT_ONCE: usize = 4;

/// The sums of a tile, in registers.
type Sums<M, const ROWS: usize, const VECTORS: usize> = [[<M as Math>::Sums; VECTORS]; ROWS];

/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn tile<M: Math, const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: rows, units of the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = begin::<M, ROWS, VECTORS>(args);
        let mut b = args.b;
        let mut at = 0;
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for _ in 0..args.depth {
            for line in 0..(VECTORS * M::WIDTH).div_ceil(LINE) {
                M::prefetch(b.wrapping_add(B_AHEAD / 4 + line * LINE));
            }
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            add_unit::<M, ROWS, VECTORS>(&mut sums, &args.a, at, b);
            b = b.add(VECTORS * M::WIDTH);
            at += args.a_step;
        }
        end::<M, ROWS, VECTORS>(args, &sums);
    }
}

/// Computes a tile like [`tile`] from a B that is not packed yet, and packs it. Loading and storing B use execution
/// slots that products leave idle.
///
/// # Safety
/// As for [`Kernels::run_packing`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn tile_packing<M: Across + Math<Sums = V, Units = V>, V: Copy, const ROWS: usize, const VECTORS: usize>(
    args: &TileArgs,
) {
    // SAFETY: rows, their columns, the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = begin::<M, ROWS, VECTORS>(args);
        let (mut b, (step, mut to)) = (args.b, args.packing);
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for at in 0..args.depth {
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            let columns = M::across::<VECTORS>(b, step);
            for (v, &column) in columns.iter().enumerate() {
                M::store(to.add(v * M::WIDTH).cast(), column);
            }
            add_columns::<M, ROWS, VECTORS>(&mut sums, &args.a, at, &columns);
            (b, to) = (b.wrapping_add(step), to.add(VECTORS * M::WIDTH));
        }
        end::<M, ROWS, VECTORS>(args, &sums);
    }
}

/// Computes a tile like [`tile`] of `VECTORS` vectors and half of one after them, which share the loads of A.
///
/// # Safety
/// As for [`Kernel`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn tile_with_half<M: Halves, const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: as in `tile`.
    unsafe {
        let whole = VECTORS * M::WIDTH;
        let half_args = TileArgs { tile: args.tile.add(whole), ..*args };
        let mut sums = begin::<M, ROWS, VECTORS>(args);
        let mut half_sums = begin::<M::Half, ROWS, 1>(&half_args);
        let mut b = args.b;
        let mut at = 0;
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for _ in 0..args.depth {
            for line in 0..=VECTORS {
                M::prefetch(b.wrapping_add(B_AHEAD / 4 + line * LINE));
            }
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            let columns = units_of::<M, VECTORS>(b);
            let last = M::Half::units(b.add(whole));
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = M::splat(args.a[r], at);
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = M::add_product(*sum, row, column);
                }
                half_sums[r][0] = M::Half::add_product(half_sums[r][0], M::half(row), last);
            }
            b = b.add(whole + M::Half::WIDTH);
            at += args.a_step;
        }
        end::<M, ROWS, VECTORS>(args, &sums);
        end::<M::Half, ROWS, 1>(&half_args, &half_sums);
    }
}

/// Computes a tile like [`tile`], [`AT_ONCE`] units per round and one prefetch per round. Units of A are consecutive
/// or as far apart as in packed rows.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn tile_in_rounds<M: Math, const ROWS: usize, const VECTORS: usize, const PACKED: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        if args.a_step == 1 {
            rounds::<M, ROWS, VECTORS, 1>(args);
        } else {
            debug_assert_eq!(args.a_step, PACKED, "rows of A are in place or packed");
            rounds::<M, ROWS, VECTORS, PACKED>(args);
        }
    }
}

/// # Safety
/// As for [`Kernel`], with units of A that are `STEP` apart.
#[inline(always)]
unsafe fn rounds<M: Math, const ROWS: usize, const VECTORS: usize, const STEP: usize>(args: &TileArgs) {
    // SAFETY: rows, units of the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = begin::<M, ROWS, VECTORS>(args);
        let mut b = args.b;
        let mut at = 0;
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for _ in 0..args.depth / AT_ONCE {
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            for unit in 0..AT_ONCE {
                add_unit::<M, ROWS, VECTORS>(&mut sums, &args.a, at + unit * STEP, b.add(unit * VECTORS * M::WIDTH));
            }
            b = b.add(AT_ONCE * VECTORS * M::WIDTH);
            at += AT_ONCE * STEP;
        }
        for _ in 0..args.depth % AT_ONCE {
            add_unit::<M, ROWS, VECTORS>(&mut sums, &args.a, at, b);
            b = b.add(VECTORS * M::WIDTH);
            at += STEP;
        }
        end::<M, ROWS, VECTORS>(args, &sums);
    }
}

/// Loads the sums to continue, or zeros.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn begin<M: Math, const ROWS: usize, const VECTORS: usize>(args: &TileArgs) -> Sums<M, ROWS, VECTORS> {
    let mut sums = [[M::zero(); VECTORS]; ROWS];
    if args.is_continued {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the place is inside the tile.
                *sum = unsafe { M::load(args.tile.add(r * TILE_STRIDE + v * M::WIDTH)) };
            }
        }
    }
    sums
}

/// Adds the products of unit `at` of each row of A with a unit of a panel's columns.
///
/// # Safety
/// Both must be readable.
#[inline(always)]
unsafe fn add_unit<M: Math, const ROWS: usize, const VECTORS: usize>(
    sums: &mut Sums<M, ROWS, VECTORS>,
    a: &[*const u32; MAX_ROWS],
    at: usize,
    b: *const u32,
) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        add_columns::<M, ROWS, VECTORS>(sums, a, at, &units_of::<M, VECTORS>(b));
    }
}

/// Loads the units of `VECTORS` vectors of columns.
///
/// # Safety
/// They must be readable.
#[inline(always)]
unsafe fn units_of<M: Math, const VECTORS: usize>(b: *const u32) -> [M::Units; VECTORS] {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        let mut columns = [M::units(b); VECTORS];
        for (v, column) in columns.iter_mut().enumerate() {
            *column = M::units(b.add(v * M::WIDTH));
        }
        columns
    }
}

/// Adds the products of unit `at` of each row of A with units of columns in registers.
///
/// # Safety
/// The units of A must be readable.
#[inline(always)]
unsafe fn add_columns<M: Math, const ROWS: usize, const VECTORS: usize>(
    sums: &mut Sums<M, ROWS, VECTORS>,
    a: &[*const u32; MAX_ROWS],
    at: usize,
    columns: &[M::Units; VECTORS],
) {
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise is handed on.
        let row = unsafe { M::splat(a[r], at) };
        for (sum, &column) in sums.iter_mut().zip(columns) {
            *sum = M::add_product(*sum, row, column);
        }
    }
}

/// Stores the sums to the tile.
///
/// # Safety
/// As for [`Kernel`].
#[inline(always)]
unsafe fn end<M: Math, const ROWS: usize, const VECTORS: usize>(args: &TileArgs, sums: &Sums<M, ROWS, VECTORS>) {
    for (r, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: the place is inside the tile.
            unsafe { M::store(args.tile.add(r * TILE_STRIDE + v * M::WIDTH), sum) };
        }
    }
}

/// # Safety
/// As for [`Kernel`].
unsafe fn portable<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe { tile::<F32<Baseline>, ROWS, VECTORS>(args) }
}
