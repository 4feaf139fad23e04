//! GEMMs in AMX tiles: 32 rows by three vectors of columns at a time, bf16 with f32 sums.
//!
//! A tile register holds 16 rows of 64 bytes. `tdpbf16ps` takes a tile of A (16 rows of 32 elements along the depth)
//! and one of B (16 pairs of consecutive elements along the depth, 16 columns) and adds their product to a tile of 16
//! by 16 f32 sums. So B is packed as for the dot-product kernels, pairs as units, and A in blocks of 16 rows by 16
//! units. The depth is padded with zeros to whole blocks.
//!
//! Tiles multiply so fast that fetching and packing dominate. In the form `A B^T` rows of B, the weights, are rows of
//! tiles in place: A and B are swapped ([`swap_ab`]) and only A is transposed. In the other forms ([`direct`])
//! consecutive rows of B are interleaved, and a task's panels of B stay in the L2 cache.
//!
//! Products of f32 are computed here if [`Isa::AmxF32`](crate::Isa::AmxF32) is chosen: each element is split into
//! three bf16 ([`bf16x3`]), of whose products six are summed. Sums that are [not finite](finite) are computed again
//! with vectors.
//!
//! The compiler has no stable intrinsics for tiles, so kernels are inline assembly.

mod bf16x3;
mod direct;
mod finite;
mod kernel;
mod pack;
pub(crate) mod strided;
mod swap_ab;
mod tiling;

use std::arch::asm;
use std::marker::PhantomData;

pub(super) use bf16x3::panels as pack_bf16x3;
pub(super) use pack::transposed_columns as pack_columns;
pub(super) use tiling::{cut_direct, cut_swapped};

/// Rows of a block of A, and units of its depth.
pub(super) const BLOCK: usize = 16;
/// The most rows of a kernel.
pub(super) const ROWS: usize = 2 * BLOCK;
/// Number of bf16 that an f32 is split into, for 24 bits.
pub(super) const PARTS: usize = 3;

/// Products of bf16 parts that make one product of f32.
pub(crate) const PRODUCTS_OF_BF16X3: f64 = 6.0;

/// Returns whether the CPU has tiles with a bf16 product and the system lets this process use them.
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

/// Requests the tiles' large register state, which Linux withholds from a process until it asks
/// (`Documentation/arch/x86/xstate.rst`).
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

/// The tile registers of this thread, configured as eight tiles of 16 rows of 64 bytes until this is dropped. It must
/// stay on its thread.
pub(crate) struct Registers(PhantomData<*mut ()>);

impl Registers {
    /// Configures the registers.
    ///
    /// # Safety
    /// [`is_available`] must have returned true, and the thread must not have another value of this type.
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
        Self(PhantomData)
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the instruction exists since the registers were configured; nothing is kept in them between
        // kernels.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Floating-point operations of a step of [`products`].
pub(crate) const FLOPS: usize = 4 * 2 * BLOCK * BLOCK * 2 * BLOCK;

/// Multiplies tiles of zeros in registers, four products a step, to measure the peak.
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

impl super::Work<'_> {
    /// Runs a task in tiles.
    pub(super) fn run_in_tiles(
        &self,
        scratch: &mut [u32],
        held: &mut super::scratch::ScratchSlot,
        epilogue: &dyn super::Finish,
    ) {
        let exact = finite::Exact { work: self, epilogue };
        let epilogue: &dyn super::Finish = if self.task.kernel.is_bf16x3() { &exact } else { epilogue };
        if self.task.kernel.is_swapped() {
            self.run_swap_ab_tiles(scratch, held, epilogue);
        } else {
            self.run_direct_tiles(scratch, held, epilogue);
        }
    }
}
