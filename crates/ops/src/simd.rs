//! One body, compiled for every instruction set.
//!
//! The kernels of memory-bound operations are plain loops that the compiler turns into vector code. [`kernel!`] compiles
//! such a loop once for each [`Isa`](crate::Isa) and makes a function that picks one. The body must be free of branches that depend on
//! data and of calls that are not inlined; sums keep [`LANES`] partial sums, so that every instruction set adds in the
//! same order and results differ by fused rounding at most.

use moeworks_tensor::{Element, bf16};

/// Partial sums of a reduction: one AVX-512 register of f32, or two AVX2 ones.
pub(crate) const LANES: usize = 16;

/// What a body has to know of the instruction set that it is compiled for.
pub(crate) trait Level: Copy {
    /// Whether a fused multiply-add is one instruction. Without that it would be a call of the C library.
    const HAS_FMA: bool;

    /// `a * b + c`, fused where that is fast.
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        if Self::HAS_FMA { a.mul_add(b, c) } else { a * b + c }
    }
}

/// The target that the crate is compiled for, without anything found at run time.
#[derive(Clone, Copy)]
pub(crate) struct Baseline;

/// x86-64 from AVX2 upwards.
#[derive(Clone, Copy)]
pub(crate) struct Fused;

impl Level for Baseline {
    const HAS_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
}

impl Level for Fused {
    const HAS_FMA: bool = true;
}

/// `kernel! { fn name<S: Level, T: Bound>(args) -> Result { body } }` defines `name::<T>(isa, args)`, which runs the body
/// compiled for `isa`; inside the body `S` is the [`Level`].
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$S:ident: Level $(, $T:ident: $bound:path)*>(
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<$($T: $bound),*>(isa: $crate::Isa, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<$S: $crate::simd::Level $(, $T: $bound)*>($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2<$($T: $bound),*>($($arg: $type),*) $(-> $result)? {
                body::<$crate::simd::Fused $(, $T)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512<$($T: $bound),*>($($arg: $type),*) $(-> $result)? {
                body::<$crate::simd::Fused $(, $T)*>($($arg),*)
            }
            match isa {
                $crate::Isa::Portable => body::<$crate::simd::Baseline $(, $T)*>($($arg),*),
                // SAFETY: a context holds only instruction sets that the machine has.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe { avx2::<$($T),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 | $crate::Isa::Avx512Bf16 => unsafe { avx512::<$($T),*>($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => body::<$crate::simd::Baseline $(, $T)*>($($arg),*),
            }
        }
    };
}
pub(crate) use kernel;

/// An element that is computed with as f32.
pub(crate) trait Float: Element {
    /// The value; exact.
    fn load(self) -> f32;
    /// The nearest element, ties to even; NaN stays NaN.
    fn store(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        value
    }
}

// Written without branches, unlike the conversions of the `half` crate, so that loops over them vectorise.
impl Float for bf16 {
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let quiet = bits | 0x0040_0000;
        Self::from_bits(((if value.is_nan() { quiet } else { rounded }) >> 16) as u16)
    }
}

/// Evaluates an expression with a type name bound to the element type of a float tensor.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            moeworks_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            moeworks_tensor::DType::BF16 => {
                type $T = moeworks_tensor::bf16;
                $body
            }
            moeworks_tensor::DType::U32 => panic!("an operation on floats is given integers"),
        }
    };
}
pub(crate) use with_float;

/// Adds up the lanes of a reduction, halves first, in one order for every instruction set.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
