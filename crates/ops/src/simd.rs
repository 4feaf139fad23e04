//! Kernels written once and compiled for every instruction set.
//!
//! The kernels of memory-bound operations are plain loops that the compiler vectorises. [`kernel!`] compiles such a
//! loop once for each [`Isa`](crate::Isa) and defines a function that picks one. The body must have no branches that
//! depend on data and no calls that are not inlined. Sums keep [`LANES`] partial sums, so that every instruction set
//! adds in the same order and results differ by fused rounding at most.

mod lane_sum;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "x86_64")]
mod powers;
#[cfg(target_arch = "x86_64")]
pub(crate) mod rounding;
#[cfg(target_arch = "x86_64")]
mod splat;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod totals;

use moeworks_tensor::{DType, Element, bf16, f16};

pub(crate) use lane_sum::sum_lanes;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
#[cfg(target_arch = "x86_64")]
use splat::splat_unit;

/// Partial sums of a reduction: one AVX-512 register of f32, or two AVX2 ones.
pub(crate) const LANES: usize = 16;

/// An instruction set as a kernel's body sees it: vectors for kernels that keep their sums in registers, and whether
/// multiply-add is fused for those that leave vectors to the compiler.
///
/// Functions on vectors are sound only if the machine has the instruction set, which [`kernel!`] ensures.
pub(crate) trait Level: Copy {
    /// A vector of [`WIDTH`](Self::WIDTH) f32 lanes.
    type Vector: Copy;
    /// Lanes of a vector.
    const WIDTH: usize;
    /// True if a fused multiply-add is one instruction. Otherwise it would be a call of the C library.
    const HAS_FMA: bool;

    /// Returns `a * b + c`, fused if that is fast.
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        if Self::HAS_FMA { a.mul_add(b, c) } else { a * b + c }
    }

    /// Returns a vector with `value` in all lanes.
    fn splat(value: f32) -> Self::Vector;
    /// Returns a vector with the element `at` elements after `from` in all lanes.
    ///
    /// # Safety
    /// The element must be readable. It need not be aligned.
    #[inline(always)]
    unsafe fn splat_at(from: *const f32, at: usize) -> Self::Vector {
        // SAFETY: the caller's promise is handed on.
        Self::splat(unsafe { from.add(at).read_unaligned() })
    }
    /// Loads the lanes at `from`, which need not be aligned.
    ///
    /// # Safety
    /// `WIDTH` elements must be readable there.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// Stores the lanes to `to`, which need not be aligned.
    ///
    /// # Safety
    /// `WIDTH` elements must be writable there.
    unsafe fn store(to: *mut f32, value: Self::Vector);
    /// Returns `a * b + c` in each lane.
    fn vector_mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Returns `a + b` in each lane; some CPUs have units for it besides those for products.
    fn vector_add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Loads bf16 elements and widens them: those at even places, then those at odd ones, an order that a shift and a
    /// mask of 32-bit lanes give.
    ///
    /// # Safety
    /// Twice `WIDTH` elements must be readable there.
    unsafe fn load_pairs(from: *const bf16) -> [Self::Vector; 2];
    /// Loads f16 elements and widens them.
    ///
    /// # Safety
    /// `WIDTH` elements must be readable there.
    unsafe fn load_halves(from: *const f16) -> Self::Vector;
    /// Returns the sum of the lanes, adding halves first.
    fn total(lanes: Self::Vector) -> f32;
    /// Returns the [`total`](Self::total) of each vector: the same bits, in fewer steps if vectors can be mixed.
    #[inline(always)]
    fn totals(vectors: [Self::Vector; 4]) -> [f32; 4] {
        vectors.map(Self::total)
    }
    /// Stores the lanes to `to`, which must be aligned to the vector, bypassing the caches: for data that is not read
    /// again soon.
    ///
    /// # Safety
    /// `WIDTH` elements must be writable there; [`fence`] must follow before another thread reads them.
    unsafe fn stream(to: *mut f32, value: Self::Vector);
    /// True if the level has [`dot_pairs`](Self::dot_pairs).
    const HAS_PAIR_DOT: bool = false;
    /// Adds to each lane of `c` the two products of the bf16 pairs that the lanes of `a` and `b` hold.
    #[inline(always)]
    fn dot_pairs(_a: Self::Vector, _b: Self::Vector, _c: Self::Vector) -> Self::Vector {
        unreachable!("this level has no product of bf16 pairs")
    }
    /// Returns the bf16 pairs of the lanes of `low` (first in each pair) and `high`; rounds as
    /// [`round_all`](Self::round_all).
    #[inline(always)]
    fn pair(_low: Self::Vector, _high: Self::Vector) -> Self::Vector {
        unreachable!("this level has no product of bf16 pairs")
    }
    /// Returns the lanes of `low` and then those of `high` as bf16, and their [`pair`](Self::pair).
    #[inline(always)]
    fn round_and_pair(_low: Self::Vector, _high: Self::Vector) -> [Self::Vector; 2] {
        unreachable!("this level has no product of bf16 pairs")
    }
    /// Returns the bf16 pairs of two rows' elements, as products take them: of each eight elements the first four are
    /// in the first vector.
    ///
    /// # Safety
    /// Twice `WIDTH` elements must be readable at both.
    #[inline(always)]
    unsafe fn pairs_of_rows(_low: *const bf16, _high: *const bf16) -> [Self::Vector; 2] {
        unreachable!("this level has no product of bf16 pairs")
    }
    /// Returns the lanes of both vectors, one after the other, as bf16; rounds as [`round_all`](Self::round_all).
    #[inline(always)]
    fn round(vectors: [Self::Vector; 2]) -> Self::Vector {
        let (mut wide, mut rounded) = ([0.0; 2 * LANES], [bf16::ZERO; 2 * LANES]);
        // SAFETY: the arrays hold two vectors of the widest level, and half of them is read.
        unsafe {
            Self::store(wide.as_mut_ptr(), vectors[0]);
            Self::store(wide.as_mut_ptr().add(Self::WIDTH), vectors[1]);
            Self::round_all(&wide[..2 * Self::WIDTH], &mut rounded[..2 * Self::WIDTH]);
            Self::load(rounded.as_ptr().cast())
        }
    }
    /// Returns [`vmath::exp2_falling`](crate::vmath::exp2_falling) of each number.
    #[inline(always)]
    fn exp2_falling(mut x: [f32; LANES]) -> [f32; LANES] {
        for x in &mut x {
            *x = crate::vmath::exp2_falling::<Self>(*x);
        }
        x
    }
    /// Returns `2^x` of each number to within 3e-6, for results that are rounded to bf16.
    #[inline(always)]
    fn exp2_falling_for_bf16(x: [f32; LANES]) -> [f32; LANES] {
        Self::exp2_falling(x)
    }
    /// Rounds elements one by one as [`Float::store`] does. A level with an instruction for it may turn subnormals
    /// into zeros.
    #[inline(always)]
    fn round_all(from: &[f32], to: &mut [bf16]) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = bf16::store(x));
    }
}

/// Stores elements one by one, rounded if `T` is bf16.
#[inline(always)]
pub(crate) fn store_all<S: Level, T: Float>(from: &[f32], to: &mut [T]) {
    match T::DTYPE {
        DType::BF16 => S::round_all(from, bytemuck::cast_slice_mut(to)),
        _ => to.iter_mut().zip(from).for_each(|(to, &x)| *to = T::store(x)),
    }
}

/// Stores [`LANES`] elements, bypassing the caches; [`fence`] must follow before another thread reads them.
#[inline(always)]
pub(crate) fn stream_lanes<S: Level>(from: &[f32; LANES], to: &mut [f32; LANES]) {
    assert!(to.as_ptr().addr().is_multiple_of(4 * S::WIDTH), "streamed memory is aligned");
    for v in (0..LANES / S::WIDTH).map(|v| v * S::WIDTH) {
        // SAFETY: a vector from `v` on is inside both, and aligned where it is written.
        unsafe { S::stream(to.as_mut_ptr().add(v), S::load(from.as_ptr().add(v))) };
    }
}

/// Orders [`Level::stream`]s before everything that follows.
pub(crate) fn fence() {
    // SAFETY: every x86-64 CPU has the instruction.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

/// The target that the crate is compiled for, without features detected at run time.
#[derive(Clone, Copy)]
pub(crate) struct Baseline;

impl Level for Baseline {
    type Vector = [f32; 4];
    const WIDTH: usize = 4;
    const HAS_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

    #[inline(always)]
    fn splat(value: f32) -> [f32; 4] {
        [value; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller promises four readable elements; an array of f32 needs no more alignment than f32.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; 4]) {
        // SAFETY: the caller promises four writable elements.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(value) }
    }

    #[inline(always)]
    fn vector_mul_add(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        [
            Self::mul_add(a[0], b[0], c[0]),
            Self::mul_add(a[1], b[1], c[1]),
            Self::mul_add(a[2], b[2], c[2]),
            Self::mul_add(a[3], b[3], c[3]),
        ]
    }

    #[inline(always)]
    fn vector_add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [[f32; 4]; 2] {
        // SAFETY: the caller promises eight readable elements.
        let pairs = unsafe { from.cast::<[[bf16; 2]; 4]>().read_unaligned() };
        [pairs.map(|pair| pair[0].load()), pairs.map(|pair| pair[1].load())]
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> [f32; 4] {
        // SAFETY: the caller promises four readable elements.
        unsafe { from.cast::<[f16; 4]>().read_unaligned() }.map(f16::load)
    }

    #[inline(always)]
    fn total([a, b, c, d]: [f32; 4]) -> f32 {
        (a + c) + (b + d)
    }

    #[inline(always)]
    unsafe fn stream(to: *mut f32, value: [f32; 4]) {
        // SAFETY: the caller's promise is handed on.
        unsafe { Self::store(to, value) }
    }
}

/// Defines a level whose vectors are those of x86-64.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_level {
    (
        $(#[$meta:meta])* $name:ident, $vector:ident, $width:literal, $splat:ident, $load:ident, $store:ident, $fma:ident, $add:ident,
        $stream:ident, $load_int:ident, $shift:ident, $and:ident, $splat_int:ident, $cast:ident, $load_half:ident,
        $widen:ident, $total:path
        $(, $own:item)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Level for $name {
            type Vector = core::arch::x86_64::$vector;
            const WIDTH: usize = $width;
            const HAS_FMA: bool = true;

            #[inline(always)]
            fn splat(value: f32) -> Self::Vector {
                // SAFETY: `kernel!` uses this level only where the machine has its instructions.
                unsafe { core::arch::x86_64::$splat(value) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self::Vector {
                // SAFETY: as above, and the caller promises a vector of readable elements.
                unsafe { core::arch::x86_64::$load(from) }
            }

            #[inline(always)]
            unsafe fn store(to: *mut f32, value: Self::Vector) {
                // SAFETY: as above, and the caller promises a vector of writable elements.
                unsafe { core::arch::x86_64::$store(to, value) }
            }

            #[inline(always)]
            fn vector_mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
                // SAFETY: as in `splat`.
                unsafe { core::arch::x86_64::$fma(a, b, c) }
            }

            #[inline(always)]
            fn vector_add(a: Self::Vector, b: Self::Vector) -> Self::Vector {
                // SAFETY: as in `splat`.
                unsafe { core::arch::x86_64::$add(a, b) }
            }

            #[inline(always)]
            unsafe fn load_pairs(from: *const bf16) -> [Self::Vector; 2] {
                use core::arch::x86_64::{$and, $cast, $load_int, $shift, $splat_int};
                // SAFETY: as above, and the caller promises two vectors' worth of readable elements.
                unsafe {
                    let pairs = $load_int(from.cast());
                    [$cast($shift::<16>(pairs)), $cast($and(pairs, $splat_int(0xffff_0000_u32 as i32)))]
                }
            }

            #[inline(always)]
            unsafe fn load_halves(from: *const f16) -> Self::Vector {
                use core::arch::x86_64::{$load_half, $widen};
                // SAFETY: as above, and the caller promises as many readable elements as a vector has lanes.
                unsafe { $widen($load_half(from.cast())) }
            }

            #[inline(always)]
            fn total(lanes: Self::Vector) -> f32 {
                // SAFETY: as in `splat`.
                unsafe { $total(lanes) }
            }

            #[inline(always)]
            unsafe fn stream(to: *mut f32, value: Self::Vector) {
                // SAFETY: as above, and the caller promises an aligned vector of writable elements.
                unsafe { core::arch::x86_64::$stream(to, value) }
            }

            $($own)*
        }
    };
}

#[cfg(target_arch = "x86_64")]
x86_level!(
    /// AVX2 with FMA.
    Avx2, __m256, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps,
    _mm256_stream_ps, _mm256_loadu_si256, _mm256_slli_epi32, _mm256_and_si256, _mm256_set1_epi32, _mm256_castsi256_ps,
    _mm_loadu_si128, _mm256_cvtph_ps, totals::total_of_8,
    #[inline(always)]
    fn round([low, high]: [Self::Vector; 2]) -> Self::Vector {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_8(low, high) }
    }
);
#[cfg(target_arch = "x86_64")]
x86_level!(
    /// AVX-512 with F, BW, DQ and VL.
    Avx512, __m512, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps,
    _mm512_stream_ps, _mm512_loadu_si512, _mm512_slli_epi32, _mm512_and_si512, _mm512_set1_epi32, _mm512_castsi512_ps,
    _mm256_loadu_si256, _mm512_cvtph_ps, totals::total_of_16,
    #[inline(always)]
    unsafe fn splat_at(from: *const f32, at: usize) -> Self::Vector {
        // SAFETY: as in `splat`, and the caller promises a readable element.
        unsafe { splat_unit(from.cast(), at) }
    },
    #[inline(always)]
    fn totals(vectors: [Self::Vector; 4]) -> [f32; 4] {
        // SAFETY: as in `splat`.
        unsafe { totals::totals_of_16(vectors) }
    },
    #[inline(always)]
    fn round([low, high]: [Self::Vector; 2]) -> Self::Vector {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_16(low, high) }
    },
    #[inline(always)]
    fn exp2_falling(x: [f32; LANES]) -> [f32; LANES] {
        powers::powers_of!(x, FOR_F32)
    },
    #[inline(always)]
    fn exp2_falling_for_bf16(x: [f32; LANES]) -> [f32; LANES] {
        powers::powers_of!(x, FOR_BF16)
    }
);
#[cfg(target_arch = "x86_64")]
x86_level!(
    /// AVX-512 with F, BW, DQ, VL and BF16, whose conversion and product it uses.
    Avx512Bf16, __m512, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps,
    _mm512_stream_ps, _mm512_loadu_si512, _mm512_slli_epi32, _mm512_and_si512, _mm512_set1_epi32, _mm512_castsi512_ps,
    _mm256_loadu_si256, _mm512_cvtph_ps, totals::total_of_16,
    #[inline(always)]
    unsafe fn splat_at(from: *const f32, at: usize) -> Self::Vector {
        // SAFETY: as in `splat`, and the caller promises a readable element.
        unsafe { splat_unit(from.cast(), at) }
    },
    #[inline(always)]
    fn totals(vectors: [Self::Vector; 4]) -> [f32; 4] {
        // SAFETY: as in `splat`.
        unsafe { totals::totals_of_16(vectors) }
    },
    const HAS_PAIR_DOT: bool = true;,
    #[inline(always)]
    fn dot_pairs(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        use core::arch::x86_64::{__m512, __m512bh, _mm512_dpbf16_ps};
        // SAFETY: as in `splat`; the transmutes rename 512 bits.
        unsafe {
            let pairs = |x| std::mem::transmute::<__m512, __m512bh>(x);
            _mm512_dpbf16_ps(c, pairs(a), pairs(b))
        }
    },
    #[inline(always)]
    fn pair(low: Self::Vector, high: Self::Vector) -> Self::Vector {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_and_pair(low, high)[1] }
    },
    #[inline(always)]
    fn round_and_pair(low: Self::Vector, high: Self::Vector) -> [Self::Vector; 2] {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_and_pair(low, high) }
    },
    #[inline(always)]
    fn round([low, high]: [Self::Vector; 2]) -> Self::Vector {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_and_pair(low, high)[0] }
    },
    #[inline(always)]
    unsafe fn pairs_of_rows(low: *const bf16, high: *const bf16) -> [Self::Vector; 2] {
        use core::arch::x86_64::{
            _mm512_castsi512_ps, _mm512_loadu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
        };
        // SAFETY: as in `splat`, and the caller promises readable elements.
        unsafe {
            let (low, high) = (_mm512_loadu_si512(low.cast()), _mm512_loadu_si512(high.cast()));
            [_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high)].map(|x| _mm512_castsi512_ps(x))
        }
    },
    #[inline(always)]
    fn round_all(from: &[f32], to: &mut [bf16]) {
        // SAFETY: as in `splat`.
        unsafe { rounding::round_by_instruction(from, to) }
    },
    #[inline(always)]
    fn exp2_falling(x: [f32; LANES]) -> [f32; LANES] {
        powers::powers_of!(x, FOR_F32)
    },
    #[inline(always)]
    fn exp2_falling_for_bf16(x: [f32; LANES]) -> [f32; LANES] {
        powers::powers_of!(x, FOR_BF16)
    }
);

/// Defines a kernel: `kernel! { fn name<S: Level, T: Bound>(args) -> Result { body } }` defines `name::<T>(isa,
/// args)`, which runs the body compiled for `isa`. Inside the body `S` is the [`Level`]. With `bf16` in front, the
/// body is also compiled for machines with AVX-512 BF16, for kernels that round much or multiply pairs. With `bf16 if
/// condition;` that is so only for types for which the constant condition holds.
macro_rules! kernel {
    (bf16 if $has_own:expr; $($rest:tt)*) => { $crate::simd::kernel! { @define $has_own; $($rest)* } };
    (bf16 $($rest:tt)*) => { $crate::simd::kernel! { @define true; $($rest)* } };
    (@define $has_own:expr; $(#[$meta:meta])* $vis:vis fn $name:ident<$S:ident: Level $(, $T:ident: $bound:path)*>(
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<$($T: $bound),*>(isa: $crate::Isa, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body<$S: $crate::simd::Level $(, $T: $bound)*>($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn avx2<$($T: $bound),*>($($arg: $type),*) $(-> $result)? {
                body::<$crate::simd::Avx2 $(, $T)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512<$($T: $bound),*>($($arg: $type),*) $(-> $result)? {
                body::<$crate::simd::Avx512 $(, $T)*>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
            fn avx512_bf16<$($T: $bound),*>($($arg: $type),*) $(-> $result)? {
                body::<$crate::simd::Avx512Bf16 $(, $T)*>($($arg),*)
            }
            match isa {
                $crate::Isa::Portable => body::<$crate::simd::Baseline $(, $T)*>($($arg),*),
                // Every machine of this kind has these instructions, and all code is compiled for them.
                #[cfg(target_arch = "aarch64")]
                $crate::Isa::Neon => body::<$crate::simd::Neon $(, $T)*>($($arg),*),
                // SAFETY: a context holds only instruction sets that the machine has.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe { avx2::<$($T),*>($($arg),*) },
                // SAFETY: as above. A branch that a constant rules out is not compiled, nor is what it calls.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512Bf16 | $crate::Isa::Amx | $crate::Isa::AmxF32 if const { $has_own } => unsafe {
                    avx512_bf16::<$($T),*>($($arg),*)
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 | $crate::Isa::Avx512Bf16 | $crate::Isa::Amx | $crate::Isa::AmxF32 => unsafe {
                    avx512::<$($T),*>($($arg),*)
                },
                // Instruction sets of other CPU architectures.
                _ => body::<$crate::simd::Baseline $(, $T)*>($($arg),*),
            }
        }
    };
    ($($rest:tt)*) => { $crate::simd::kernel! { @define false; $($rest)* } };
}
pub(crate) use kernel;

/// An element type that is computed with as f32.
pub(crate) trait Float: Element {
    /// Returns the exact value.
    fn load(self) -> f32;
    /// Returns the nearest element, ties to even; NaN stays NaN.
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

impl Float for f16 {
    /// Widens as the CPU instruction does, except that a signalling NaN stays as it is.
    #[inline(always)]
    fn load(self) -> f32 {
        /// The difference of the exponent biases of f16 and f32, and the exponent bits of an f16 in an f32.
        const APART: u32 = 112 << 23;
        const EXPONENT: u32 = 0x1f << 23;
        let bits = u32::from(self.to_bits());
        let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let widened = match rest & EXPONENT {
            // The least exponent belongs to subnormals: it is that of the smallest normal numbers, without their
            // leading one.
            0 => (f32::from_bits(rest + APART + (1 << 23)) - f32::from_bits(APART + (1 << 23))).to_bits(),
            EXPONENT => rest + 2 * APART,
            _ => rest + APART,
        };
        f32::from_bits(sign | widened)
    }

    #[inline(always)]
    fn store(value: f32) -> Self {
        Self::from_f32(value)
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
            dtype => panic!("expected a float type, found {dtype:?}"),
        }
    };
}
pub(crate) use with_float;

/// Evaluates an expression like [`with_float!`], for tensors that are only read and may therefore also be f16.
macro_rules! with_stored {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            moeworks_tensor::DType::F16 => {
                type $T = moeworks_tensor::f16;
                $body
            }
            dtype => $crate::simd::with_float!(dtype, $T => $body),
        }
    };
}
pub(crate) use with_stored;
