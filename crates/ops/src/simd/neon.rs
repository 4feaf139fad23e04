//! The vectors of aarch64.

use core::arch::aarch64::{
    float32x4_t, uint16x8_t, uint32x4_t, vaddq_f32, vaddq_u32, vandq_u32, vbslq_u32, vceqq_f32, vcvt_f32_f16,
    vdupq_n_f32, vdupq_n_u32, vfmaq_f32, vget_high_u16, vget_low_u16, vgetq_lane_f32, vld1q_f32, vld1q_u16, vorrq_u32,
    vpaddq_f32, vreinterpret_f16_u16, vreinterpretq_f32_f64, vreinterpretq_f32_u16, vreinterpretq_f32_u32,
    vreinterpretq_f64_f32, vreinterpretq_u16_u32, vreinterpretq_u32_f32, vshlq_n_u32, vshrq_n_u32, vst1q_f32,
    vuzp2q_u16, vzip1q_f64, vzip2q_f64,
};

use moeworks_tensor::{bf16, f16};

use super::Level;

/// NEON, whose vectors are taken in pairs: its 32 registers make 16 pairs, as many vectors of 8 lanes as AVX2 has, so
/// that layouts for that level fit this one. Instructions take a number for all lanes from a lane of one register.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

impl Level for Neon {
    type Vector = [float32x4_t; 2];
    const WIDTH: usize = 8;
    const HAS_FMA: bool = true;

    #[inline(always)]
    fn splat(value: f32) -> Self::Vector {
        // SAFETY: every aarch64 CPU that this is compiled for has NEON; so also below.
        unsafe { [vdupq_n_f32(value); 2] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Vector {
        // SAFETY: as above, and the caller promises eight readable elements.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, [low, high]: Self::Vector) {
        // SAFETY: as above, and the caller promises eight writable elements.
        unsafe {
            vst1q_f32(to, low);
            vst1q_f32(to.add(4), high);
        }
    }

    #[inline(always)]
    fn vector_mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        // SAFETY: as above.
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    fn vector_add(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: as above.
        unsafe { [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const bf16) -> [Self::Vector; 2] {
        // SAFETY: as above, and the caller promises sixteen readable elements.
        unsafe { bf16_pairs(Self::load(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self::Vector {
        // SAFETY: as above, and the caller promises eight readable elements.
        unsafe { widened_halves(vld1q_u16(from.cast())) }
    }

    #[inline(always)]
    fn total([low, high]: Self::Vector) -> f32 {
        // SAFETY: as above.
        unsafe {
            let four = vaddq_f32(low, high);
            let [a, b, c, d] = [
                vgetq_lane_f32::<0>(four),
                vgetq_lane_f32::<1>(four),
                vgetq_lane_f32::<2>(four),
                vgetq_lane_f32::<3>(four),
            ];
            (a + c) + (b + d)
        }
    }

    #[inline(always)]
    fn totals(vectors: [Self::Vector; 4]) -> [f32; 4] {
        // SAFETY: as above, and four lanes are four numbers.
        unsafe {
            let [a, b, c, d] = vectors.map(|[low, high]| vaddq_f32(low, high));
            let one = vpaddq_f32(halves_added(a, b), halves_added(c, d));
            std::mem::transmute::<float32x4_t, [f32; 4]>(one)
        }
    }

    #[inline(always)]
    unsafe fn stream(to: *mut f32, value: Self::Vector) {
        // The CPU detects by itself that whole lines are written.
        // SAFETY: the caller's promise is handed on.
        unsafe { Self::store(to, value) }
    }

    #[inline(always)]
    fn round(vectors: [Self::Vector; 2]) -> Self::Vector {
        // SAFETY: as above.
        unsafe { vectors.map(|[low, high]| vreinterpretq_f32_u16(upper_words(nearest(low), nearest(high)))) }
    }
}

/// Returns the first elements of pairs of bf16, and the second ones.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
pub(crate) unsafe fn bf16_pairs(pairs: [float32x4_t; 2]) -> [[float32x4_t; 2]; 2] {
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        let (pairs, odd) = (pairs.map(|pairs| vreinterpretq_u32_f32(pairs)), vdupq_n_u32(0xffff_0000));
        [
            pairs.map(|pairs| vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))),
            pairs.map(|pairs| vreinterpretq_f32_u32(vandq_u32(pairs, odd))),
        ]
    }
}

/// Widens eight f16.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
pub(crate) unsafe fn widened_halves(halves: uint16x8_t) -> [float32x4_t; 2] {
    // SAFETY: the caller's machine has the instructions.
    unsafe { [vget_low_u16(halves), vget_high_u16(halves)].map(|half| vcvt_f32_f16(vreinterpret_f16_u16(half))) }
}

/// Returns the sums of the two halves of `a`, and then those of `b`.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn halves_added(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        let [a, b] = [a, b].map(|x| vreinterpretq_f64_f32(x));
        vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)))
    }
}

/// Returns lanes whose upper words are the nearest bf16, ties to even.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn nearest(lanes: float32x4_t) -> uint32x4_t {
    // SAFETY: the caller's machine has the instructions.
    unsafe {
        let bits = vreinterpretq_u32_f32(lanes);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        // The addition could turn a NaN into a number; a quiet NaN keeps a NaN in its upper word.
        vbslq_u32(vceqq_f32(lanes, lanes), rounded, vorrq_u32(bits, vdupq_n_u32(0x0040_0000)))
    }
}

/// Returns the upper words of both vectors, one after the other.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn upper_words(low: uint32x4_t, high: uint32x4_t) -> uint16x8_t {
    // SAFETY: the caller's machine has the instructions.
    unsafe { vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)) }
}
