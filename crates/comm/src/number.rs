//! What can be reduced, and how.

use half::bf16;

/// How the values of several ranks become one. Sums are taken in the order of ranks, bf16 in f32 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum; whole numbers wrap around.
    Sum,
    /// The greatest; not a number if one is.
    Max,
    /// The least; not a number if one is.
    Min,
}

impl Reduce {
    pub(crate) const ALL: [Self; 3] = [Self::Sum, Self::Max, Self::Min];
}

/// The types that can be reduced.
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

    /// Bytes of one.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::BF16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::F64 | Self::U64 => 8,
        }
    }

    /// Reduces `sources` (one region of `bytes` bytes a rank, in the order of ranks) into each of `targets`, which may be
    /// some of them.
    ///
    /// # Safety
    /// All regions are valid for `bytes` bytes and aligned for the type; nobody else writes to any of them or reads from
    /// `targets` meanwhile. A target overlaps a source entirely or not at all, and no other target.
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

/// A type that can be reduced.
pub trait Number: bytemuck::Pod + Send + Sync {
    /// The matching kind.
    const KIND: NumberKind;
    /// What a sum is kept in.
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

/// Elements that are reduced at a time: the sums stay in the first-level cache while the sources stream by.
const BLOCK: usize = 1024;

/// # Safety
/// As [`NumberKind::reduce`], with `len` elements of `N`.
unsafe fn reduce_as<N: Number>(reduce: Reduce, sources: &[*const u8], targets: &[*mut u8], len: usize) {
    let Some((&first, rest)) = sources.split_first() else { return };
    let mut sums = Vec::with_capacity(BLOCK);
    for start in (0..len).step_by(BLOCK) {
        let count = BLOCK.min(len - start);
        // SAFETY: `start + count <= len` elements of a source are valid and aligned; the block is read before the targets,
        // which may be the same memory, are written.
        let block = |source: *const u8| unsafe { std::slice::from_raw_parts(source.cast::<N>().add(start), count) };
        sums.clear();
        sums.extend(block(first).iter().map(|x| x.widen()));
        for &source in rest {
            fold::<N>(reduce, &mut sums, block(source));
        }
        for &target in targets {
            // SAFETY: as above for the target; no slice of a source or of another target is alive.
            let out = unsafe { std::slice::from_raw_parts_mut(target.cast::<N>().add(start), count) };
            for (out, &sum) in out.iter_mut().zip(&sums) {
                *out = N::narrow(sum);
            }
        }
    }
}

fn fold<N: Number>(reduce: Reduce, sums: &mut [N::Wide], values: &[N]) {
    let pairs = sums.iter_mut().zip(values.iter().map(|x| x.widen()));
    match reduce {
        Reduce::Sum => pairs.for_each(|(sum, x)| *sum = N::add(*sum, x)),
        Reduce::Max => pairs.filter(|(best, x)| **best < *x || is_nan(*x)).for_each(|(best, x)| *best = x),
        Reduce::Min => pairs.filter(|(best, x)| **best > *x || is_nan(*x)).for_each(|(best, x)| *best = x),
    }
}

/// Once the best is not a number, nothing is less or greater than it: it stays.
fn is_nan<W: PartialOrd>(x: W) -> bool {
    x.partial_cmp(&x).is_none()
}
