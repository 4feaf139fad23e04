//! Prefetching of cache lines.

/// Defines a function that prefetches the cache line at any address, by x86-64's or aarch64's hint.
macro_rules! prefetch {
    ($(#[$meta:meta])* $name:ident, $pointee:ty, $hint:ident, $operation:literal) => {
        $(#[$meta])*
        #[inline(always)]
        pub(crate) fn $name(at: *const $pointee) {
            // SAFETY: a prefetch reads nothing that the program sees and ignores addresses that are not mapped.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::$hint }>(at.cast());
            }
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                core::arch::asm!(
                    concat!("prfm ", $operation, ", [{}]"), in(reg) at.addr(), options(nostack, preserves_flags, nomem)
                );
            }
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            let _ = at;
        }
    };
}

prefetch!(
    /// Prefetches a line into the nearest cache.
    prefetch, u32, _MM_HINT_T0, "pldl1keep"
);
prefetch!(
    /// Prefetches a line into the second-level cache.
    prefetch_far, u8, _MM_HINT_T1, "pldl2keep"
);
