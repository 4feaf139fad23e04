//! Small products of bf16 matrices in place, for operations whose operands stay in the L1 and L2 caches: attention.

use std::arch::asm;

use super::{BLOCK, Registers};

/// A matrix of 32-bit words, possibly a part of a wider one.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) words: &'a [f32],
    /// Words from one row to the next.
    pub(crate) stride: usize,
}

impl Matrix<'_> {
    fn has(&self, rows: usize, cols: usize) -> bool {
        self.words.len() >= (rows - 1) * self.stride + cols
    }
}

/// The sizes of a product, all multiples of sixteen.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The inner dimension in words of two bf16.
    pub(crate) inner: usize,
}

impl Registers {
    /// Computes `c = a b`, or `c += a b` with `add`. Operands `a [rows, inner]` and `b [inner, cols]` are words of
    /// two bf16 that are consecutive along the inner dimension; `c` is f32 with rows `c_stride` apart.
    pub(crate) fn multiply(&self, size: Size, a: Matrix<'_>, b: Matrix<'_>, add: bool, c: &mut [f32], c_stride: usize) {
        let Size { rows, cols, inner } = size;
        assert!([rows, cols, inner].iter().all(|size| size.is_multiple_of(BLOCK)), "whole tiles");
        if rows == 0 || cols == 0 || inner == 0 {
            assert!(rows == 0 || cols == 0 || add, "a product of nothing");
            return;
        }
        let is_inside = c.len() >= (rows - 1) * c_stride + cols;
        assert!(is_inside && a.has(rows, inner) && b.has(inner, cols), "a product inside its operands");
        for col in (0..cols).step_by(2 * BLOCK) {
            let kernels = &KERNELS[usize::from(col + BLOCK < cols)];
            for row in (0..rows).step_by(2 * BLOCK) {
                let args = Args {
                    depth: inner / BLOCK,
                    a: a.words.as_ptr().wrapping_add(row * a.stride),
                    a_row: 4 * a.stride,
                    b: b.words.as_ptr().wrapping_add(col),
                    b_row: 4 * b.stride,
                    c: c.as_mut_ptr().wrapping_add(row * c_stride + col),
                    c_row: 4 * c_stride,
                    add,
                };
                // SAFETY: the assertions keep whole tiles inside the three slices, and the registers are set up.
                unsafe { kernels[usize::from(row + BLOCK < rows)](&args) };
            }
        }
    }
}

/// The arguments of a kernel; distances between rows are in bytes.
struct Args {
    /// Blocks of sixteen words, at least one.
    depth: usize,
    a: *const f32,
    a_row: usize,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    add: bool,
}

/// # Safety
/// The registers must be configured, and the kernel's rows and columns of all operands must exist.
type Kernel = unsafe fn(&Args);

/// Defines a kernel: the registers of its sums with the place of each, and the work for one block of depth.
macro_rules! tile_kernel {
    ($name:ident, [$($sum:literal $rows:literal $place:literal),+], [$($step:literal),+]) => {
        /// # Safety
        /// As for [`Kernel`].
        unsafe fn $name(args: &Args) {
            let below = |at: *const f32, row: usize| at.cast::<u8>().wrapping_add(BLOCK * row);
            // SAFETY: every load and store is inside what the caller promises; the registers written are listed.
            unsafe {
                asm!(
                    "# {a1} {c1}",
                    "test {add}, {add}",
                    "jz 3f",
                    $(concat!("tileloadd ", $sum, ", [{", $rows, "} + {c_row} + ", $place, "]"),)+
                    "jmp 2f",
                    "3:",
                    $(concat!("tilezero ", $sum),)+
                    "2:",
                    $($step,)+
                    "add {a0}, 64",
                    "add {a1}, 64",
                    "add {b}, {b_step}",
                    "dec {depth}",
                    "jnz 2b",
                    $(concat!("tilestored [{", $rows, "} + {c_row} + ", $place, "], ", $sum),)+
                    add = in(reg) u64::from(args.add),
                    a0 = inout(reg) args.a => _,
                    a1 = inout(reg) below(args.a, args.a_row) => _,
                    a_row = in(reg) args.a_row,
                    b = inout(reg) args.b => _,
                    b_row = in(reg) args.b_row,
                    b_step = in(reg) BLOCK * args.b_row,
                    c0 = in(reg) args.c,
                    c1 = in(reg) below(args.c, args.c_row),
                    c_row = in(reg) args.c_row,
                    depth = inout(reg) args.depth => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}
tile_kernel!(
    two_by_two,
    ["tmm0" "c0" "0", "tmm1" "c0" "64", "tmm2" "c1" "0", "tmm3" "c1" "64"],
    [
        "tileloadd tmm4, [{a0} + {a_row}]",
        "tileloadd tmm6, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {a_row}]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ]
);
tile_kernel!(
    two_by_one,
    ["tmm0" "c0" "0", "tmm2" "c1" "0"],
    [
        "tileloadd tmm4, [{a0} + {a_row}]",
        "tileloadd tmm6, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a1} + {a_row}]",
        "tdpbf16ps tmm2, tmm5, tmm6"
    ]
);
tile_kernel!(
    one_by_two,
    ["tmm0" "c0" "0", "tmm1" "c0" "64"],
    [
        "tileloadd tmm4, [{a0} + {a_row}]",
        "tileloadd tmm6, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {b_row} + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7"
    ]
);
tile_kernel!(
    one_by_one,
    ["tmm0" "c0" "0"],
    [
        "tileloadd tmm4, [{a0} + {a_row}]",
        "tileloadd tmm6, [{b} + {b_row}]",
        "tdpbf16ps tmm0, tmm4, tmm6"
    ]
);

/// Indexed by blocks of columns and of rows, each less one.
const KERNELS: [[Kernel; 2]; 2] = [[one_by_one, two_by_one], [one_by_two, two_by_two]];
