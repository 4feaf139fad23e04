//! The aarch64 kernels; two NEON vectors make one vector of the [level](Neon).
//!
//! The largest tile uses 24 of the 32 registers for sums. Its products take single lanes of A from registers that
//! hold two to six elements, so that no instruction is spent on broadcasts: 24 products per unit with 8 other
//! instructions, 7 if A is packed.

use core::arch::aarch64::{float32x2_t, vfmaq_lane_f32, vfmaq_laneq_f32, vld1_f32, vld1q_f32};

use super::{F32, Math, Prefetch, ROWS_OF_8, Sums, TileArgs, add_unit, begin, end, tile};
use crate::prefetch::prefetch_far;
use crate::simd::Neon;

/// Vectors of the level in the widest tile, and NEON vectors.
const WIDEST: usize = 2;
const QUADS: usize = 2 * WIDEST;
/// Elements of a NEON vector, and of a row of a panel for the widest tile.
const QUAD: usize = 4;
const COLUMNS: usize = QUADS * QUAD;

type Large = Sums<F32<Neon>, ROWS_OF_8, WIDEST>;

/// # Safety
/// As for [`super::Kernel`].
pub(super) unsafe fn neon<const ROWS: usize, const VECTORS: usize>(args: &TileArgs) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        match (ROWS, VECTORS, args.a_step) {
            (ROWS_OF_8, WIDEST, 1) => in_place(args),
            (ROWS_OF_8, WIDEST, ROWS_OF_8) => packed(args),
            _ => tile::<F32<Neon>, ROWS, VECTORS>(args),
        }
    }
}

/// Computes the largest tile with rows of A in place, two units at a time. With four the compiler keeps more of A
/// than registers hold.
///
/// # Safety
/// As for [`super::Kernel`].
#[inline(always)]
unsafe fn in_place(args: &TileArgs) {
    // SAFETY: rows, units of the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = begin::<F32<Neon>, ROWS_OF_8, WIDEST>(args);
        let mut b: *const f32 = args.b.cast();
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for pair in 0..args.depth / 2 {
            for _ in 0..2 {
                prefetch_far(ahead);
                ahead = ahead.wrapping_add(ahead_step);
            }
            let a: [float32x2_t; ROWS_OF_8] = std::array::from_fn(|r| vld1_f32(args.a[r].cast::<f32>().add(2 * pair)));
            add_lane::<0>(&mut sums, &a, b);
            add_lane::<1>(&mut sums, &a, b.add(COLUMNS));
            b = b.add(2 * COLUMNS);
        }
        if !args.depth.is_multiple_of(2) {
            add_unit::<F32<Neon>, ROWS_OF_8, WIDEST>(&mut sums, &args.a, args.depth - 1, b.cast());
        }
        end::<F32<Neon>, ROWS_OF_8, WIDEST>(args, &sums);
    }
}

/// Adds the products of one lane of each row of A with a row of a panel.
///
/// # Safety
/// The row must be readable.
#[inline(always)]
unsafe fn add_lane<const LANE: i32>(sums: &mut Large, a: &[float32x2_t; ROWS_OF_8], b: *const f32) {
    for quad in 0..QUADS {
        // SAFETY: the caller's promise.
        let columns = unsafe { vld1q_f32(b.add(quad * QUAD)) };
        for (sums, &a) in sums.iter_mut().zip(a) {
            let sum = &mut sums[quad / 2][quad % 2];
            // SAFETY: all machines of this kind have NEON.
            *sum = unsafe { vfmaq_lane_f32::<LANE>(*sum, columns, a) };
        }
    }
}

/// Computes the largest tile with packed rows of A: the six rows' elements of a unit are consecutive.
///
/// # Safety
/// As for [`super::Kernel`].
#[inline(always)]
unsafe fn packed(args: &TileArgs) {
    // SAFETY: rows, units of the panel and places in the tile are inside what the caller promises.
    unsafe {
        let mut sums = begin::<F32<Neon>, ROWS_OF_8, WIDEST>(args);
        let (mut a, mut b): (*const f32, *const f32) = (args.a[0].cast(), args.b.cast());
        let Prefetch { at: mut ahead, step: ahead_step } = args.ahead;
        for _ in 0..args.depth {
            prefetch_far(ahead);
            ahead = ahead.wrapping_add(ahead_step);
            let (four, two) = (vld1q_f32(a), vld1_f32(a.add(QUAD)));
            for quad in 0..QUADS {
                let columns = vld1q_f32(b.add(quad * QUAD));
                let [s0, s1, s2, s3, s4, s5] = sums.each_mut().map(|sums| &mut sums[quad / 2][quad % 2]);
                *s0 = vfmaq_laneq_f32::<0>(*s0, columns, four);
                *s1 = vfmaq_laneq_f32::<1>(*s1, columns, four);
                *s2 = vfmaq_laneq_f32::<2>(*s2, columns, four);
                *s3 = vfmaq_laneq_f32::<3>(*s3, columns, four);
                *s4 = vfmaq_lane_f32::<0>(*s4, columns, two);
                *s5 = vfmaq_lane_f32::<1>(*s5, columns, two);
            }
            a = a.add(ROWS_OF_8);
            b = b.add(COLUMNS);
        }
        end::<F32<Neon>, ROWS_OF_8, WIDEST>(args, &sums);
    }
}
