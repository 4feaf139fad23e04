//! The tile kernels: 32 rows of A by up to three vectors of columns of B.
//!
//! Six of the eight tile registers hold sums; A and B alternate in the other two. The part of A that a kernel reads
//! should stay in the L1 cache from one panel of B to the next, while B streams from the L2 cache. So B is loaded
//! with a non-temporal hint, without which the two evict each other.

use std::arch::asm;
use std::marker::PhantomData;

use super::{BLOCK, PARTS};
use crate::gemm::Span;
use crate::gemm::kernel::{MAX_VECTORS, TILE_STRIDE, Tile};
use crate::gemm::source::{Format, Source};

/// Sixteen rows of A, packed or in place.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    at: *const u8,
    /// Bytes from one row to the next, and from one block of the depth to the next.
    row: usize,
    step: usize,
    /// Units of depth.
    num_units: usize,
    of: PhantomData<&'a [u32]>,
}

impl<'a> Rows<'a> {
    /// Describes rows packed as blocks of sixteen units of depth, `[block][row][unit]`.
    #[inline(always)]
    pub(super) fn packed(units: &'a [u32], num_units: usize) -> Self {
        assert!(units.len() >= BLOCK * num_units, "packed rows");
        Self { at: units.as_ptr().cast(), row: 4 * BLOCK, step: 4 * BLOCK * BLOCK, num_units, of: PhantomData }
    }

    /// Describes the rows of a matrix from row `first` on, if they are bf16, evenly spaced, and whole blocks of
    /// depth.
    pub(super) fn in_place(source: &Source<'a>, first: usize, depth: Span, format: Format) -> Option<Self> {
        let Span { first: start, len: depth } = depth;
        let is_plain = source.indices.is_none() && source.blocks.is_none();
        if !is_plain || !depth.is_multiple_of(2 * BLOCK) || !source.is_direct(format) {
            return None;
        }
        let (at, last) =
            (source.direct(first, start, depth, format)?, source.direct(first + BLOCK - 1, start, depth, format)?);
        let row = source.row_step();
        let is_even = last.addr() == at.addr() + (BLOCK - 1) * row;
        is_even.then_some(Self { at: at.cast(), row, step: 4 * BLOCK, num_units: depth / 2, of: PhantomData })
    }
}

/// Memory that kernels prefetch while they multiply: any addresses.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Prefetch {
    pub(super) at: *const u8,
    /// Lines per block of the depth, at least one: consecutive ones, or with [`Later`] sums one line of each of so
    /// many rows.
    pub(super) count: usize,
}

/// The next call of a task that keeps partial sums between parts of the depth.
#[derive(Clone, Copy)]
pub(super) struct Later {
    /// The tiles that hold the sums of the next call.
    pub(super) sums: [usize; 2],
    /// Bytes from one prefetched row to the next.
    pub(super) row_step: usize,
}

/// Distances between rows that are multiples of this fall on too few sets of a cache for prefetched lines and those
/// in use.
pub(super) const FAR: usize = 4096;

/// The operands of a kernel call: one or two times sixteen rows of A and a packed panel of B, with its prefetches.
pub(super) struct Call<'a> {
    /// Either packed or in place, all equally spaced.
    pub(super) a: &'a [Rows<'a>],
    pub(super) b: &'a [u32],
    /// The width of the panel in columns.
    pub(super) width: usize,
    /// True if to continue the sums in the tiles.
    pub(super) is_continued: bool,
    /// Number of bf16 that an element is split into, one or [`PARTS`].
    pub(super) parts: usize,
    pub(super) ahead: Option<Prefetch>,
    pub(super) later: Option<Later>,
}

impl Call<'_> {
    /// Multiplies each sixteen rows with the panel: the sums of rows `i` go to two tiles from number `to[i]` on.
    ///
    /// # Safety
    /// [`Registers`](super::Registers) must be set up.
    #[inline(always)]
    pub(super) unsafe fn run(&self, tiles: &mut [Tile], to: &[usize]) {
        let (first, last) = (&self.a[0], self.a.len() - 1);
        assert!(to.len() == self.a.len() && to.iter().all(|&at| at + 2 <= tiles.len()), "places for sums");
        // Field by field: compared as vectors they would be loaded before they are stored, and wait for all stores of
        // sums.
        let Rows { row, step, num_units, .. } = self.a[last];
        let is_same = row == first.row && step == first.step && num_units == first.num_units;
        assert!(is_same && self.b.len() >= first.num_units * self.width, "operands of one depth");
        if first.num_units == 0 {
            return to.iter().for_each(|&at| tiles[at..at + 2].iter_mut().for_each(|tile| tile.0.fill(0.0)));
        }
        let kernel = match (last, self.width / BLOCK) {
            (1, 3) if self.parts == PARTS && self.later.is_some() => two_by_three_partial_bf16x3,
            (_, vectors) if self.parts == PARTS => KERNELS_BF16X3[last][vectors - 1],
            (1, 3) if self.later.is_some() => two_by_three_partial,
            (1, 3) if first.row.is_multiple_of(FAR) => two_by_three_far,
            (_, vectors) => KERNELS[last][vectors - 1],
        };
        // Narrower kernels do not prefetch separate rows.
        let asks = self.later.is_none() || (last, self.width) == (1, 3 * BLOCK);
        let sums = tiles.as_mut_ptr();
        let args = TileArgs {
            depth: first.num_units / (BLOCK * self.parts),
            a: [first.at, self.a[last].at],
            a_row: first.row,
            a_step: first.step * self.parts,
            b: self.b.as_ptr(),
            sums: [to[0], to[last]].map(|at| sums.wrapping_add(at).cast()),
            is_continued: self.is_continued,
            // Without prefetches, the line that is read next.
            ahead: self.ahead.filter(|_| asks).unwrap_or(Prefetch { at: self.b.as_ptr().cast(), count: 1 }),
            later_sums: self.later.map_or([to[0], to[last]], |later| later.sums).map(|at| sums.wrapping_add(at).cast()),
            row_step: self.later.map_or(0, |later| later.row_step),
        };
        // SAFETY: the operands and the sums are as long as the assertions here and in `Rows` say, and the registers
        // are set up.
        unsafe { kernel(&args) };
    }
}

/// The arguments of a kernel.
#[repr(C)]
struct TileArgs {
    /// Blocks of depth, at least one.
    depth: usize,
    /// The first of each sixteen rows of A, the bytes from one row to the next, and those from one block of the depth
    /// to the next.
    a: [*const u8; 2],
    a_row: usize,
    a_step: usize,
    /// The packed panel of B.
    b: *const u32,
    /// The sums of each sixteen rows, rows [`TILE_STRIDE`] apart.
    sums: [*mut f32; 2],
    /// True if to continue the sums in the tiles.
    is_continued: bool,
    ahead: Prefetch,
    /// The sums of the next call, and the bytes between prefetched rows.
    later_sums: [*mut f32; 2],
    row_step: usize,
}

/// # Safety The registers must be configured; A must be readable at `depth` blocks, B at as many times 16 units of
/// the panel's width, and the sums as the epilogue's tiles of that many rows.
type Kernel = unsafe fn(&TileArgs);

/// Defines a kernel: the tiles of sums (`$sum`, at `$place` of the block of rows `$rows`), the work for one block of
/// depth (`$step`), the parts of its elements, and its prefetches (`$ask`, by default consecutive lines).
macro_rules! tile_kernel {
    ($name:ident, $vectors:literal of $parts:literal, $sums:tt, $step:tt) => {
        tile_kernel!($name, $vectors of $parts, $sums, $step, [
            "mov {count}, [{args} + {ahead_at} + {count_at}]",
            "4:",
            "prefetcht1 [{ahead}]",
            "add {ahead}, 64",
            "dec {count}",
            "jnz 4b"
        ]);
    };
    (
        $name:ident, $vectors:literal of $parts:literal, [$($sum:literal $rows:literal $place:literal),+], [$($step:expr),+],
        [$($ask:literal),+]
    ) => {
        /// # Safety
        /// As for [`Kernel`].
        unsafe fn $name(args: &TileArgs) {
            // SAFETY: every load and store is inside what the caller promises; the registers written are listed. What
            // is asked for ahead may be any address.
            unsafe {
                asm!(
                    "mov {sums0}, [{args} + {sums_at}]",
                    "mov {sums1}, [{args} + {sums_at} + 8]",
                    "test {count}, {count}",
                    "jz 3f",
                    $(concat!("tileloadd ", $sum, ", [{", $rows, "} + {stride} + ", $place, "]"),)+
                    "jmp 5f",
                    "3:",
                    $(concat!("tilezero ", $sum),)+
                    "5:",
                    // From here to the end these point at the sums of the next call.
                    "mov {sums0}, [{args} + {later_at}]",
                    "mov {sums1}, [{args} + {later_at} + 8]",
                    "2:",
                    $($step,)+
                    $($ask,)+
                    "add {a0}, {a_step}",
                    "add {a1}, {a_step}",
                    concat!("add {b}, 1024 * ", $vectors, " * ", $parts),
                    "dec {depth}",
                    "jnz 2b",
                    "mov {sums0}, [{args} + {sums_at}]",
                    "mov {sums1}, [{args} + {sums_at} + 8]",
                    $(concat!("tilestored [{", $rows, "} + {stride} + ", $place, "], ", $sum),)+
                    "# {line} {row_step_at}",
                    args = in(reg) args,
                    sums_at = const std::mem::offset_of!(TileArgs, sums),
                    later_at = const std::mem::offset_of!(TileArgs, later_sums),
                    row_step_at = const std::mem::offset_of!(TileArgs, row_step),
                    ahead_at = const std::mem::offset_of!(TileArgs, ahead),
                    count_at = const std::mem::offset_of!(Prefetch, count),
                    // At first a flag, then the count of lines that are still to be prefetched.
                    count = inout(reg) u64::from(args.is_continued) => _,
                    a0 = inout(reg) args.a[0] => _,
                    a1 = inout(reg) args.a[1] => _,
                    b = inout(reg) args.b => _,
                    depth = inout(reg) args.depth => _,
                    a_row = in(reg) args.a_row,
                    a_step = in(reg) args.a_step,
                    b_row = in(reg) 64_usize * $vectors,
                    sums0 = out(reg) _,
                    sums1 = out(reg) _,
                    stride = in(reg) 4 * TILE_STRIDE,
                    ahead = inout(reg) args.ahead.at => _,
                    line = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

/// Loads part `$p` of a block of the depth of sixteen rows of A. The parts are consecutive, as they are in B.
macro_rules! load_a {
    ($tile:literal, $rows:literal, $p:literal) => {
        concat!("tileloadd ", $tile, ", [{", $rows, "} + {a_row} + 1024 * ", $p, "]\n")
    };
}

/// Loads part `$q` of vector `$vector` of a panel of B of so many vectors.
macro_rules! load_b {
    ($load:literal, $tile:literal, $vectors:literal, $q:literal, $vector:literal) => {
        concat!($load, " ", $tile, ", [{b} + {b_row} + 1024 * ", $vectors, " * ", $q, " + 64 * ", $vector, "]\n")
    };
}

macro_rules! multiply {
    ($sum:literal, $a:literal, $b:literal) => {
        concat!("tdpbf16ps ", $sum, ", ", $a, ", ", $b, "\n")
    };
}

/// Multiplies a block of depth: part `$p` of rows of A with part `$q` of a panel of B, whose tiles are loaded by
/// `$load`.
macro_rules! products {
    (two by three, $load:literal, $p:literal, $q:literal) => {
        concat!(
            load_a!("tmm6", "a0", $p),
            load_b!($load, "tmm7", 3, $q, 0),
            multiply!("tmm0", "tmm6", "tmm7"),
            load_a!("tmm6", "a1", $p),
            multiply!("tmm3", "tmm6", "tmm7"),
            load_b!($load, "tmm7", 3, $q, 1),
            multiply!("tmm4", "tmm6", "tmm7"),
            load_a!("tmm6", "a0", $p),
            multiply!("tmm1", "tmm6", "tmm7"),
            load_b!($load, "tmm7", 3, $q, 2),
            multiply!("tmm2", "tmm6", "tmm7"),
            load_a!("tmm6", "a1", $p),
            multiply!("tmm5", "tmm6", "tmm7"),
        )
    };
    (two by two, $load:literal, $p:literal, $q:literal) => {
        concat!(
            load_a!("tmm6", "a0", $p),
            load_b!($load, "tmm7", 2, $q, 0),
            multiply!("tmm0", "tmm6", "tmm7"),
            load_a!("tmm5", "a1", $p),
            multiply!("tmm3", "tmm5", "tmm7"),
            load_b!($load, "tmm7", 2, $q, 1),
            multiply!("tmm1", "tmm6", "tmm7"),
            multiply!("tmm4", "tmm5", "tmm7"),
        )
    };
    (two by one, $load:literal, $p:literal, $q:literal) => {
        concat!(
            load_a!("tmm6", "a0", $p),
            load_b!($load, "tmm7", 1, $q, 0),
            multiply!("tmm0", "tmm6", "tmm7"),
            load_a!("tmm5", "a1", $p),
            multiply!("tmm3", "tmm5", "tmm7"),
        )
    };
    (one by three, $load:literal, $p:literal, $q:literal) => {
        concat!(
            load_a!("tmm6", "a0", $p),
            load_b!($load, "tmm7", 3, $q, 0),
            multiply!("tmm0", "tmm6", "tmm7"),
            load_b!($load, "tmm5", 3, $q, 1),
            multiply!("tmm1", "tmm6", "tmm5"),
            load_b!($load, "tmm4", 3, $q, 2),
            multiply!("tmm2", "tmm6", "tmm4"),
        )
    };
    (one by two, $load:literal, $p:literal, $q:literal) => {
        concat!(
            load_a!("tmm6", "a0", $p),
            load_b!($load, "tmm7", 2, $q, 0),
            multiply!("tmm0", "tmm6", "tmm7"),
            load_b!($load, "tmm5", 2, $q, 1),
            multiply!("tmm1", "tmm6", "tmm5"),
        )
    };
    (one by one, $load:literal, $p:literal, $q:literal) => {
        concat!(load_a!("tmm6", "a0", $p), load_b!($load, "tmm7", 1, $q, 0), multiply!("tmm0", "tmm6", "tmm7"),)
    };
}

/// Defines the kernel of some rows and vectors for bf16x3.
///
/// It computes six of the nine products of A's three parts with B's three: the other three are below 2^-26 of the
/// sum. Tiles of B that are used once bypass the L1 cache.
macro_rules! kernel_bf16x3 {
    ($name:ident, $rows:ident by $vectors:ident $number:literal, $sums:tt $(, $ask:tt)?) => {
        tile_kernel!(
            $name, $number of 3, $sums,
            [
                products!($rows by $vectors, "tileloadd", 2, 0),
                products!($rows by $vectors, "tileloadd", 1, 0),
                products!($rows by $vectors, "tileloadd", 0, 0),
                products!($rows by $vectors, "tileloadd", 0, 1),
                products!($rows by $vectors, "tileloadd", 1, 1),
                products!($rows by $vectors, "tileloaddt1", 0, 2)
            ]
            $(, $ask)?
        );
    };
}

/// Defines the bf16 kernel of some rows and vectors, and the bf16x3 one.
macro_rules! both_kernels {
    ($name:ident $bf16x3:ident, $rows:ident by $vectors:ident $number:literal, $sums:tt) => {
        tile_kernel!($name, $number of 1, $sums, [products!($rows by $vectors, "tileloaddt1", 0, 0)]);
        kernel_bf16x3!($bf16x3, $rows by $vectors $number, $sums);
    };
}
both_kernels!(
    two_by_three two_by_three_bf16x3, two by three 3,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm2" "sums0" "128", "tmm3" "sums1" "0", "tmm4" "sums1" "64", "tmm5" "sums1" "128"]
);
both_kernels!(
    two_by_two two_by_two_bf16x3, two by two 2,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm3" "sums1" "0", "tmm4" "sums1" "64"]
);
both_kernels!(two_by_one two_by_one_bf16x3, two by one 1, ["tmm0" "sums0" "0", "tmm3" "sums1" "0"]);
both_kernels!(
    one_by_three one_by_three_bf16x3, one by three 3,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm2" "sums0" "128"]
);
both_kernels!(one_by_two one_by_two_bf16x3, one by two 2, ["tmm0" "sums0" "0", "tmm1" "sums0" "64"]);
both_kernels!(one_by_one one_by_one_bf16x3, one by one 1, ["tmm0" "sums0" "0"]);

// For a part of the depth, with partial sums in the L2 cache. The sums of the next call are prefetched to the L1
// cache, a sixteenth per block of the depth, and rows of A that are packed later to the L2 cache.
tile_kernel!(
    two_by_three_partial, 3 of 1,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm2" "sums0" "128", "tmm3" "sums1" "0", "tmm4" "sums1" "64", "tmm5" "sums1" "128"],
    [products!(two by three, "tileloaddt1", 0, 0)],
    [
        "prefetchw [{sums0}]",
        "prefetchw [{sums0} + 64]",
        "prefetchw [{sums0} + 128]",
        "prefetchw [{sums1}]",
        "prefetchw [{sums1} + 64]",
        "prefetchw [{sums1} + 128]",
        "add {sums0}, {stride}",
        "add {sums1}, {stride}",
        "mov {line}, {ahead}",
        "mov {count}, [{args} + {ahead_at} + {count_at}]",
        "4:",
        "prefetcht1 [{line}]",
        "add {line}, [{args} + {row_step_at}]",
        "dec {count}",
        "jnz 4b",
        "add {ahead}, 64"
    ]
);
// The bf16x3 version, in which a block of the depth is two lines.
kernel_bf16x3!(
    two_by_three_partial_bf16x3, two by three 3,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm2" "sums0" "128", "tmm3" "sums1" "0", "tmm4" "sums1" "64", "tmm5" "sums1" "128"],
    [
        "mov {line}, {ahead}",
        "mov {count}, [{args} + {ahead_at} + {count_at}]",
        "4:",
        "prefetcht1 [{line}]",
        "prefetcht1 [{line} + 64]",
        "add {line}, [{args} + {row_step_at}]",
        "dec {count}",
        "jnz 4b",
        "add {ahead}, 128"
    ]
);
// Rows of A that are [`FAR`] apart compete for few sets of the L1 cache: each of their tiles is loaded once, and
// tiles of B, which stay there, twice.
tile_kernel!(
    two_by_three_far, 3 of 1,
    ["tmm0" "sums0" "0", "tmm1" "sums0" "64", "tmm2" "sums0" "128", "tmm3" "sums1" "0", "tmm4" "sums1" "64", "tmm5" "sums1" "128"],
    [
        "tileloaddt1 tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 128]",
        "tdpbf16ps tmm2, tmm6, tmm7",
        "tileloaddt1 tmm6, [{a1} + {a_row}]",
        "tdpbf16ps tmm5, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm4, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm3, tmm6, tmm7"
    ]
);

/// Indexed by blocks of rows and vectors, each less one.
const KERNELS: [[Kernel; MAX_VECTORS]; 2] =
    [[one_by_one, one_by_two, one_by_three], [two_by_one, two_by_two, two_by_three]];
/// The bf16x3 kernels, indexed likewise.
const KERNELS_BF16X3: [[Kernel; MAX_VECTORS]; 2] = [
    [one_by_one_bf16x3, one_by_two_bf16x3, one_by_three_bf16x3],
    [two_by_one_bf16x3, two_by_two_bf16x3, two_by_three_bf16x3],
];
