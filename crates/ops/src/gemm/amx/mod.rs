//! Products in the tiles of AMX: 32 rows by three vectors of columns at a time, bf16 with f32 sums.
//!
//! A tile register holds 16 rows of 64 bytes. `tdpbf16ps` takes a tile of A (16 rows of 32 elements along the depth) and
//! one of B (16 pairs of neighbours along the depth, 16 columns) and adds their product to a tile of 16 by 16 f32 sums.
//! So B is packed as for the dot-product kernels, pairs as units, and A in blocks of 16 rows by 16 units. The depth is
//! filled up with zeros to whole blocks.
//!
//! Of the eight tile registers six hold sums; A and B take turns in the other two. That asks for 32 bytes of B a clock
//! from the second-level cache, where four registers of sums would ask for as much with a third less arithmetic.
//!
//! The compiler has no stable functions for tiles, so they are written as assembly.

mod pack;

use std::arch::asm;

use super::kernel::{MAX_VECTORS, TILE_STRIDE, Tile};
use super::tasks::Panels;
use super::{Finish, Form, Place, Work};
pub(super) use pack::transposed_columns;

/// Rows of a block of A, and units of its depth.
pub(super) const BLOCK: usize = 16;
/// Rows that a kernel takes at most.
pub(super) const ROWS: usize = 2 * BLOCK;
/// Tiles of the epilogue that those rows are.
pub(super) const TILES: usize = ROWS / super::kernel::MAX_ROWS;

/// Whether the processor has tiles with a bf16 product and the system lets this process use them.
pub(crate) fn is_available() -> bool {
    static IS_AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IS_AVAILABLE.get_or_init(|| has_instructions() && ask_for_tiles())
}

fn has_instructions() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let leaves = core::arch::x86_64::__cpuid(0).eax;
    leaves >= 7 && core::arch::x86_64::__cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Linux keeps the tiles' large state from a process until it asks for it (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_os = "linux")]
fn ask_for_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call reads its two numbers and changes nothing but this process's permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_tiles() -> bool {
    false
}

/// The tile registers of this thread, set up as eight tiles of 16 rows of 64 bytes until this is dropped.
pub(crate) struct Registers(());

impl Registers {
    /// # Safety
    /// [`is_available`] must have said so.
    pub(crate) unsafe fn set_up() -> Self {
        #[repr(C, align(64))]
        struct Palette([u8; 64]);
        let mut palette = Palette([0; 64]);
        palette.0[0] = 1;
        for tile in 0..8 {
            palette.0[16 + 2 * tile] = 64;
            palette.0[48 + tile] = 16;
        }
        // SAFETY: the instruction exists, as the caller promises, and reads 64 bytes of a valid palette.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const palette, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: whoever set the registers up has the instruction; nobody holds anything in them between kernels.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// What a kernel is called with.
struct TileArgs {
    /// Blocks of depth, at least one.
    depth: usize,
    /// The first block of each sixteen rows of A; blocks of depth follow each other.
    a: [*const u32; 2],
    /// The packed panel of B.
    b: *const u32,
    /// The sums, rows [`TILE_STRIDE`] apart.
    sums: *mut f32,
    /// Whether to go on from the sums that are there.
    is_continued: bool,
}

/// # Safety
/// The registers must be set up; A readable at `depth` blocks, B at as many times 16 units of the panel's width, and the
/// sums as the epilogue's tiles of that many rows.
type Kernel = unsafe fn(&TileArgs);

/// A kernel: how sums are taken up (`$load`), what is done for one block of depth (`$step`), and how sums are left
/// (`$store`). The places of sums are 3072 bytes apart from one block of rows to the next, 64 from one vector to the next.
macro_rules! tile_kernel {
    ($name:ident, $vectors:literal, [$($sum:literal $place:literal),+], [$($step:literal),+]) => {
        /// # Safety
        /// As for [`Kernel`].
        unsafe fn $name(args: &TileArgs) {
            // SAFETY: every load and store is inside what the caller promises; the registers written are listed.
            unsafe {
                asm!(
                    "test {is_continued}, {is_continued}",
                    "jz 3f",
                    $(concat!("tileloadd ", $sum, ", [{sums} + {stride} + ", $place, "]"),)+
                    "jmp 2f",
                    "3:",
                    $(concat!("tilezero ", $sum),)+
                    "2:",
                    $($step,)+
                    "add {a0}, 1024",
                    "add {a1}, 1024",
                    concat!("add {b}, 1024 * ", $vectors),
                    "dec {depth}",
                    "jnz 2b",
                    $(concat!("tilestored [{sums} + {stride} + ", $place, "], ", $sum),)+
                    is_continued = in(reg) u64::from(args.is_continued),
                    a0 = inout(reg) args.a[0] => _,
                    a1 = inout(reg) args.a[1] => _,
                    b = inout(reg) args.b => _,
                    depth = inout(reg) args.depth => _,
                    a_row = in(reg) 4 * BLOCK,
                    b_row = in(reg) 64_usize * $vectors,
                    sums = in(reg) args.sums,
                    stride = in(reg) 4 * TILE_STRIDE,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

tile_kernel!(
    two_by_three, 3,
    ["tmm0" "0", "tmm1" "64", "tmm2" "128", "tmm3" "3072", "tmm4" "3136", "tmm5" "3200"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm6, [{a1} + {a_row}]",
        "tdpbf16ps tmm3, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm4, tmm6, tmm7",
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tdpbf16ps tmm1, tmm6, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 128]",
        "tdpbf16ps tmm2, tmm6, tmm7",
        "tileloadd tmm6, [{a1} + {a_row}]",
        "tdpbf16ps tmm5, tmm6, tmm7"
    ]
);
tile_kernel!(
    two_by_two, 2,
    ["tmm0" "0", "tmm1" "64", "tmm3" "3072", "tmm4" "3136"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm5, [{a1} + {a_row}]",
        "tdpbf16ps tmm3, tmm5, tmm7",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm6, tmm7",
        "tdpbf16ps tmm4, tmm5, tmm7"
    ]
);
tile_kernel!(
    two_by_one, 1,
    ["tmm0" "0", "tmm3" "3072"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm5, [{a1} + {a_row}]",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ]
);
tile_kernel!(
    one_by_three, 3,
    ["tmm0" "0", "tmm1" "64", "tmm2" "128"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm5, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm6, tmm5",
        "tileloadd tmm4, [{b} + {b_row} + 128]",
        "tdpbf16ps tmm2, tmm6, tmm4"
    ]
);
tile_kernel!(
    one_by_two, 2,
    ["tmm0" "0", "tmm1" "64"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7",
        "tileloadd tmm5, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm6, tmm5"
    ]
);
tile_kernel!(
    one_by_one, 1,
    ["tmm0" "0"],
    [
        "tileloadd tmm6, [{a0} + {a_row}]",
        "tileloadd tmm7, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm6, tmm7"
    ]
);

/// By blocks of rows and vectors, each less one.
const KERNELS: [[Kernel; MAX_VECTORS]; 2] =
    [[one_by_one, one_by_two, one_by_three], [two_by_one, two_by_two, two_by_three]];

/// Floating-point operations of a step of [`products`].
pub(crate) const FLOPS: usize = 4 * 2 * BLOCK * BLOCK * 2 * BLOCK;

/// Products of tiles of zeros, four in a step, on registers alone: what measures the peak.
///
/// # Safety
/// The machine must have tiles.
pub(crate) unsafe fn products(steps: usize) {
    // SAFETY: the caller's promise.
    let registers = unsafe { Registers::set_up() };
    // SAFETY: nothing but registers is used, and those are listed.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}",
            "jnz 2b",
            steps = inout(reg) steps.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem)
        );
    }
    drop(registers);
}

impl Work<'_> {
    /// Runs the task in tiles. The levels of the engine are the same as for kernels on vectors: B of the task is packed,
    /// then rows go by, each group of rows against all panels.
    pub(super) fn run_in_tiles(&self, scratch: &mut [u32], epilogue: &dyn Finish) {
        let Self { product, group, task, .. } = *self;
        // SAFETY: these kernels are selected only where the machine has tiles.
        let registers = unsafe { Registers::set_up() };
        let panels = Panels::of(group.columns, BLOCK);
        let num_tiles = product.num_tiles();
        let (b_room, rest) = scratch.split_at_mut(task.b_units);
        let (a_room, rest) = rest.split_at_mut(task.a_units);
        // The sums of the two halves of a pair lie one after the other, each as four tiles of the epilogue.
        let tiles = super::tile_slice(rest);
        let num_parts = group.depth.div_ceil(task.part).max(1);
        let mut room = super::Room::new();
        for part in 0..num_parts {
            let start = part * task.part;
            let depth = (group.depth - start).min(task.part);
            let num_units = self.format().units_of(depth);
            super::pack_b(self.isa, self, (start, depth), b_room);
            if product.form == Form::Tn {
                let columns = (task.rows.0, task.rows.1);
                pack::transposed_rows(&group.a, columns, (start, depth), a_room);
            }
            let mut next_tile = 0;
            for row in (0..task.rows.1).step_by(ROWS) {
                let rows = (task.rows.1 - row).min(ROWS);
                let a = if product.form == Form::Tn {
                    &a_room[row * num_units..]
                } else {
                    pack::rows(&group.a, (task.rows.0 + row, rows), (start, depth), a_room);
                    &*a_room
                };
                let mut b = &b_room[..];
                let mut ahead = self.ahead_of(row, start, depth);
                for panel in task.panels.0..task.panels.0 + task.panels.1 {
                    let (column, columns, width) = panels.panel(panel);
                    let at =
                        Place { group: task.group, rows: (task.rows.0 + row, rows), columns: (column, columns), panel };
                    if part + 1 == num_parts {
                        epilogue.ask_ahead(at);
                    }
                    ahead.advance();
                    let tiles = &mut tiles[next_tile..next_tile + TILES * num_tiles];
                    for tiles in tiles.chunks_exact_mut(TILES) {
                        let (now, later) = b.split_at(num_units * width);
                        b = later;
                        multiply((rows, width), num_units, (a, now), (tiles, part > 0));
                    }
                    if part + 1 == num_parts {
                        self.finish_rows(epilogue, at, tiles, &mut room);
                    }
                    if num_parts > 1 {
                        next_tile += TILES * num_tiles;
                    }
                }
            }
        }
        drop(registers);
    }
}

/// The sums of a group of rows and a panel of columns.
#[inline(always)]
fn multiply(
    (rows, width): (usize, usize),
    num_units: usize,
    (a, b): (&[u32], &[u32]),
    (tiles, is_continued): (&mut [Tile], bool),
) {
    if num_units == 0 {
        return tiles.iter_mut().for_each(|tile| tile.0.fill(0.0));
    }
    let blocks = rows.div_ceil(BLOCK);
    let a_blocks = [a, &a[(blocks - 1) * BLOCK * num_units..]];
    assert!(a_blocks[1].len() >= BLOCK * num_units && b.len() >= num_units * width && tiles.len() >= 2 * blocks);
    let args = TileArgs {
        depth: num_units / BLOCK,
        a: a_blocks.map(<[u32]>::as_ptr),
        b: b.as_ptr(),
        sums: tiles.as_mut_ptr().cast(),
        is_continued,
    };
    // SAFETY: the operands and the sums are as long as the assertion says, and the task has set the registers up.
    unsafe { KERNELS[blocks - 1][width / BLOCK - 1](&args) };
}

impl Work<'_> {
    /// Gives the sums to the epilogue, eight rows at a time.
    fn finish_rows(&self, epilogue: &dyn Finish, at: Place, tiles: &mut [Tile], room: &mut super::Room) {
        let (first, second) = tiles.split_at_mut(TILES);
        for (i, tile) in first.iter_mut().enumerate().take(at.rows.1.div_ceil(super::kernel::MAX_ROWS)) {
            let done = i * super::kernel::MAX_ROWS;
            let rows = (at.rows.0 + done, (at.rows.1 - done).min(super::kernel::MAX_ROWS));
            epilogue.finish(self.isa, Place { rows, ..at }, tile, second.get_mut(i), room);
        }
    }
}
