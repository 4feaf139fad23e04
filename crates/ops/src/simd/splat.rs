//! A number in all lanes of a vector.

/// The 32 bits `at` units behind `from`, in all lanes, by the instruction for integers. Compilers choose the one for floats, which takes
/// a place among multiplications on Zen 4: tiles of 8 rows by 1 vector then have 2.6 instead of 3.2 (f32) and 3.5 (pairs of bf16) G
/// products of vectors a second.
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
