//! Asking for cache lines before they are needed.

/// Asks for the cache line at `at`, which may be any address, to be brought close.
#[inline(always)]
pub(crate) fn prefetch(at: *const u32) {
    // SAFETY: a prefetch reads nothing that the program sees and ignores addresses that are not mapped.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) at.addr(), options(nostack, preserves_flags, nomem));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Asks for the cache line at `at`, which may be any address, to be brought into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_far(at: *const u8) {
    // SAFETY: as in `prefetch`.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("prfm pldl2keep, [{}]", in(reg) at.addr(), options(nostack, preserves_flags, nomem));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
