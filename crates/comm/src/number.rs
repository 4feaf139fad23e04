//! Reductions and the number types that they work on.

use half::bf16;

/// The operation that combines the values of several ranks. Sums are taken in the order of ranks, except sums of f32
/// that an MPI library takes in its own order where that is faster. bf16 is summed in f32 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum. Integers wrap around.
    Sum,
    /// The maximum; NaN if any value is NaN.
    Max,
    /// The minimum; NaN if any value is NaN.
    Min,
}

impl Reduce {
    pub(crate) const ALL: [Self; 3] = [Self::Sum, Self::Max, Self::Min];
}

/// A number type that can be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberKind {
    /// `f32`
    F32,
    /// `bf16`
    BF16,
    /// `f64`
    F64,
    /// `u32`
    U32,
    /// `u64`
    U64,
}

impl NumberKind {
    pub(crate) const ALL: [Self; 5] = [Self::F32, Self::BF16, Self::F64, Self::U32, Self::U64];

    /// Returns the bytes of one number.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::BF16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::F64 | Self::U64 => 8,
        }
    }

    /// Reduces `sources`, one region of `bytes` bytes for each rank in the order of ranks, into each of `targets`. A
    /// target may be one of the sources.
    ///
    /// # Safety
    /// All regions are valid for `bytes` bytes and aligned for the type. Nobody else writes to any of them or reads
    /// from `targets` meanwhile. A target overlaps a source entirely or not at all, and no other target.
    pub(crate) unsafe fn reduce(self, reduce: Reduce, sources: &[*const u8], targets: &[*mut u8], bytes: usize) {
        let len = bytes / self.size();
        // SAFETY: the caller's promise, for the type that this kind stands for.
        unsafe {
            match self {
                Self::F32 => reduce_as::<f32>(reduce, sources, targets, len),
                Self::BF16 => reduce_as::<bf16>(reduce, sources, targets, len),
                Self::F64 => reduce_as::<f64>(reduce, sources, targets, len),
                Self::U32 => reduce_as::<u32>(reduce, sources, targets, len),
                Self::U64 => reduce_as::<u64>(reduce, sources, targets, len),
            }
        }
    }
}

/// A reduction: an operation on numbers of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) number: NumberKind,
    pub(crate) reduce: Reduce,
}

/// A type that can be reduced.
pub trait Number: bytemuck::Pod + Send + Sync {
    /// The value that names the type at run time.
    const KIND: NumberKind;
    /// The type that a sum is accumulated in.
    #[doc(hidden)]
    type Wide: Copy + PartialOrd;
    #[doc(hidden)]
    fn widen(self) -> Self::Wide;
    #[doc(hidden)]
    fn narrow(wide: Self::Wide) -> Self;
    #[doc(hidden)]
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! number {
    ($type:ty, $kind:ident, $wide:ty, $widen:expr, $narrow:expr, $add:expr) => {
        impl Number for $type {
            const KIND: NumberKind = NumberKind::$kind;
            type Wide = $wide;
            fn widen(self) -> $wide {
                $widen(self)
            }
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            fn add(a: $wide, b: $wide) -> $wide {
                $add(a, b)
            }
        }
    };
}

number!(f32, F32, f32, |x| x, |x| x, |a, b| a + b);
number!(bf16, BF16, f32, bf16::to_f32, bf16::from_f32, |a, b| a + b);
number!(f64, F64, f64, |x| x, |x| x, |a, b| a + b);
number!(u32, U32, u32, |x| x, |x| x, u32::wrapping_add);
number!(u64, U64, u64, |x| x, |x| x, u64::wrapping_add);

/// The number of elements reduced at a time: they stay in registers over all sources, so that memory is read once.
const BLOCK: usize = 32;

/// # Safety
/// The promises of [`NumberKind::reduce`] hold, with `len` elements of `N`.
unsafe fn reduce_as<N: Number>(reduce: Reduce, sources: &[*const u8], targets: &[*mut u8], len: usize) {
    let greater = |best: N::Wide, x: N::Wide| if best < x || is_nan(x) { x } else { best };
    let less = |best: N::Wide, x: N::Wide| if best > x || is_nan(x) { x } else { best };
    // SAFETY: the caller's promise.
    unsafe {
        match reduce {
            Reduce::Sum => reduce_by::<N>(sources, targets, len, N::add),
            Reduce::Max => reduce_by::<N>(sources, targets, len, greater),
            Reduce::Min => reduce_by::<N>(sources, targets, len, less),
        }
    }
}

/// # Safety
/// The promises of [`reduce_as`] hold.
unsafe fn reduce_by<N: Number>(
    sources: &[*const u8],
    targets: &[*mut u8],
    len: usize,
    combine: impl Fn(N::Wide, N::Wide) -> N::Wide + Copy,
) {
    let whole = len - len % BLOCK;
    // SAFETY: blocks of `BLOCK` elements up to `whole`, and single ones from there to `len`, lie within all regions.
    unsafe {
        for start in (0..whole).step_by(BLOCK) {
            reduce_block::<N, BLOCK>(sources, targets, start, combine);
        }
        for start in whole..len {
            reduce_block::<N, 1>(sources, targets, start, combine);
        }
    }
}

/// Reduces the `B` elements from `start` on. They are read before any target is written, which may be the same
/// memory.
///
/// # Safety
/// The promises of [`reduce_as`] hold, with at least `start + B` elements.
#[inline(always)]
unsafe fn reduce_block<N: Number, const B: usize>(
    sources: &[*const u8],
    targets: &[*mut u8],
    start: usize,
    combine: impl Fn(N::Wide, N::Wide) -> N::Wide,
) {
    // SAFETY: the caller's promise; an array of numbers is aligned as one of them.
    let load = |source: *const u8| unsafe { source.cast::<N>().add(start).cast::<[N; B]>().read() };
    let Some((&first, rest)) = sources.split_first() else { return };
    // Plain loops over arrays stay in registers; with `map` the compiler spills them.
    let mut values = load(first);
    let mut results = [values[0].widen(); B];
    for i in 0..B {
        results[i] = values[i].widen();
    }
    for &source in rest {
        values = load(source);
        for i in 0..B {
            results[i] = combine(results[i], values[i].widen());
        }
    }
    for i in 0..B {
        values[i] = N::narrow(results[i]);
    }
    for &target in targets {
        // SAFETY: as above; nothing that was read is referred to any more.
        unsafe { target.cast::<N>().add(start).cast::<[N; B]>().write(values) };
    }
}

/// Returns whether `x` is NaN. Nothing compares less or greater than NaN, so that it stays the best once it is.
fn is_nan<W: PartialOrd>(x: W) -> bool {
    x.partial_cmp(&x).is_none()
}
