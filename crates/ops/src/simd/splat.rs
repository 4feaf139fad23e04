//! Broadcast of a number to all lanes of a vector.

/// Broadcasts the 32 bits `at` units after `from`, by the integer instruction. Compilers choose the one for floats,
/// which competes with multiplications on Zen 4: tiles of 8 rows by 1 vector then compute 2.6 billion vector products
/// a second instead of 3.2 (f32) and 3.5 (pairs of bf16).
///
/// # Safety
/// The machine must have AVX-512 F, and the unit must be readable. It need not be aligned.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn splat_unit(from: *const u32, at: usize) -> core::arch::x86_64::__m512 {
    let all;
    // SAFETY: reads the unit alone, as the caller promises.
    unsafe {
        core::arch::asm!(
            "vpbroadcastd {all}, dword ptr [{from} + 4 * {at}]",
            all = lateout(zmm_reg) all,
            from = in(reg) from,
            at = in(reg) at,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    all
}
