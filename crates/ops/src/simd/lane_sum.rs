//! The sum of the lanes of a reduction, for every instruction set.

use super::LANES;

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
