//! Micro-kernels: a tile of up to 8 rows and 3 vectors of columns, held in registers over the whole depth.
//!
//! Depth is counted in units of 32 bits: one f32, or a pair of bf16 that the dot-product instruction takes together. So
//! one body serves both. A comes as a pointer for each row and a step between units, which covers rows of a row-major
//! matrix wherever they lie (rows gathered by token need no copy) as well as packed panels. B comes packed, a row of
//! vectors for each unit, or is packed by the way. The sums go to a small buffer from which the caller's epilogue takes
//! them while it is in the first-level cache; that costs about 1% and keeps epilogues out of the kernels.

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
/// Rows of the largest tile of vectors of 8 lanes.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const ROWS_OF_8: usize = 6;
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

impl Tile {
    /// Asks for so many rows and columns to be brought close.
    #[inline(always)]
    pub(crate) fn ask_for(&self, rows: usize, columns: usize) {
        for row in self.0.chunks_exact(TILE_STRIDE).take(rows) {
            row[..columns].iter().step_by(LINE).for_each(|at| prefetch(std::ptr::from_ref(at).cast()));
        }
    }
}

/// What a kernel is called with.
pub(crate) struct TileArgs {
    /// Units of depth.
    pub(crate) depth: usize,
    /// The first unit of each row of A.
    pub(crate) a: [*const u32; MAX_ROWS],
    /// Units from one unit of a row of A to the next: 1, or [`Kernels::rows`] where rows are packed.
    pub(crate) a_step: usize,
    /// The packed panel of B; for [`run_packing`](Kernels::run_packing) the columns' elements of the first row.
    pub(crate) b: *const u32,
    /// What that does: words of 32 bits from the rows that are a unit to the next ones, and where the panel goes.
    pub(crate) packing: (usize, *mut u32),
    /// The sums, rows [`TILE_STRIDE`] apart.
    pub(crate) tile: *mut f32,
    /// Whether to go on from the sums that are in `tile`.
    pub(crate) is_continued: bool,
    /// Memory that a later task will read, to be brought closer meanwhile: any address, and bytes from the one asked for
    /// with one unit, or with [`Kernels::at_once`] of them, to the next.
    pub(crate) ahead: (*const u8, usize),
}

/// # Safety
/// The machine must have the instructions of the kernel; `a` must be readable at `depth` units for each of the kernel's
/// rows, `b` at `depth` times its width (or as said of [`Kernels::run_packing`]), and `tile` must be a [`Tile`].
type Kernel = unsafe fn(&TileArgs);

/// All tile sizes of a kernel function. Those with more rows than the instruction set's largest tile, of `up to` so many, are never
/// called, and stand for smaller ones.
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
    /// By rows and vectors, each less one.
    table: [[Kernel; MAX_VECTORS]; MAX_ROWS],
    /// Rows of the largest tile.
    pub(crate) rows: usize,
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// What a unit holds.
    pub(crate) compute: Compute,
    /// By rows less one and the whole vectors beside it, for half a vector, where halves are vectors, too.
    pub(crate) halves: Option<[[Kernel; MAX_VECTORS]; MAX_ROWS]>,
    /// By rows and vectors, each less one: kernels that read a B whose rows run across the depth where it lies, and pack it for the rows
    /// of C that come after theirs.
    packing: Option<[[Kernel; MAX_VECTORS]; MAX_ROWS]>,
    /// Whether these are the tiles of [`amx`](super::amx) instead, which have a table of their own.
    pub(crate) are_tiles: bool,
    /// Parts of bf16 that they take elements in: one but for f32 in tiles.
    pub(crate) parts: usize,
    /// Units of depth for each line that kernels ask for ahead.
    pub(crate) at_once: usize,
    /// How tasks whose rows of A are used in place are cut.
    pub(crate) blocking: Blocking,
}

impl Kernels {
    /// The kernels for products in `compute` on `isa`. Where the instruction set has no bf16 product these are f32
    /// kernels: the product of two bf16 is exact in f32, so results differ by the order of sums only.
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
                let blocking = Blocking::of_f32(isa);
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

    /// Those that take products of f32 as several of bf16 in tiles: for groups of many rows.
    pub(crate) fn in_parts(isa: Isa, compute: Compute) -> Option<Self> {
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

    /// What these kernels take of operands in `precision`.
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

    /// Whether there is [`run_packing`](Self::run_packing).
    #[inline(always)]
    pub(crate) fn can_pack(&self) -> bool {
        self.packing.is_some()
    }

    /// As [`run`](Self::run) for a B that is not packed yet, which this does beside.
    ///
    /// # Safety
    /// As there, but for B: the rows of `depth` units must be readable from `b` on for as many elements as the vectors have lanes, and the
    /// panel must be writable.
    #[inline(always)]
    pub(crate) unsafe fn run_packing(&self, rows: usize, vectors: usize, args: &TileArgs) {
        let packing = self.packing.as_ref().expect("kernels that pack");
        // SAFETY: the caller's promise is handed on.
        unsafe { packing[rows - 1][vectors - 1](args) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Kernels {
    /// As [`run`](Self::run) for so many lanes: up to three whole vectors, or half a one and up to two before it.
    ///
    /// # Safety
    /// As there. Only where there are halves.
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
    /// The unit `at` units behind `row`, in all lanes.
    unsafe fn splat(row: *const u32, at: usize) -> Self::Units;
    fn add_product(sums: Self::Sums, a: Self::Units, b: Self::Units) -> Self::Sums;
    fn prefetch(at: *const u32);
}

/// A [`Math`] whose vectors have halves that are vectors, too.
#[cfg(target_arch = "x86_64")]
trait Halves: Math {
    type Half: Math;

    /// The first half of units that are all alike.
    fn half(units: Self::Units) -> <Self::Half as Math>::Units;
}

/// A [`Math`] that makes units of rows that run across the depth, where these lie.
#[cfg(target_arch = "x86_64")]
trait Across: Math {
    /// The units of `VECTORS` vectors of columns from `row` on, of rows of which those of a unit take `step` words.
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

/// Bytes of B by which a kernel reads ahead of itself, so that panels stream from the second-level cache.
const B_AHEAD: usize = 768;

/// Units of depth in one round of a loop of kernels with 8 lanes. They ask for little beyond their operands, at one constant
/// distance after another, so that few instructions besides products are left: where another program has the core's other
/// thread, a kernel gets half of the places for instructions, and twelve products of 8 lanes are soon outnumbered.
pub(crate) const AT_ONCE: usize = 4;

/// Sums of a tile, in registers.
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
        let (mut ahead, ahead_step) = args.ahead;
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

/// As [`tile`] for a B that is not packed yet, which this does beside: bringing it to registers and to the panel takes the places that
/// products leave.
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
        let (mut ahead, ahead_step) = args.ahead;
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

/// As [`tile`] for `VECTORS` vectors and half of one behind them: they share what is loaded of A.
///
/// # Safety
/// As for [`Kernel`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn tile_beside<M: Halves, const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: as in `tile`.
    unsafe {
        let whole = VECTORS * M::WIDTH;
        let half_args = TileArgs { tile: args.tile.add(whole), ..*args };
        let mut sums = begin::<M, ROWS, VECTORS>(args);
        let mut half_sums = begin::<M::Half, ROWS, 1>(&half_args);
        let mut b = args.b;
        let mut at = 0;
        let (mut ahead, ahead_step) = args.ahead;
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

/// As [`tile`], [`AT_ONCE`] units at a time, of rows of A whose units follow each other or lie as far apart as packed rows
/// do. What is asked for ahead is a line for each round.
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
        let (mut ahead, ahead_step) = args.ahead;
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

/// The sums to begin with.
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

/// Adds the products of the units of A's rows that are `at` units behind their first with the units of a panel's columns.
///
/// # Safety
/// They must be readable.
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

/// The units of so many vectors of columns.
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

/// [`add_unit`] with the columns' units at hand.
///
/// # Safety
/// As there.
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

/// Leaves the sums in the tile.
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
