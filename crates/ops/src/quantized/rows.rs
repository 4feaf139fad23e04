//! Rows of activations as 8-bit numbers, with a scale for each block of 32.

use bytemuck::{Pod, Zeroable};
use moeworks_tensor::{BLOCK_LEN, DType, Tensor};

use crate::Context;
use crate::simd::{Float, LANES, kernel, with_float};

/// Two neighbouring blocks of a row. A row with an odd number of them ends with a block of zeros and scale 0.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Pair {
    pub(super) values: [i8; 2 * BLOCK_LEN],
    pub(super) scales: [f32; 2],
    fill: [u32; 14],
}

impl Pair {
    /// What stands beside blocks that are not there.
    pub(super) const ZERO: Self = Self { values: [0; 2 * BLOCK_LEN], scales: [0.0; 2], fill: [0; 14] };
}

/// Quantized rows: element i of a block is about `scale * values[i]`, off by half a scale at most, where the scale is the
/// block's largest magnitude over 127. A block in which something is not finite has scale NaN.
pub(super) struct QuantizedRows {
    memory: Tensor,
    pairs_per_row: usize,
}

impl QuantizedRows {
    /// The rows of `x [R, K]`, f32 or bf16.
    pub(super) fn of(ctx: &Context, x: &Tensor) -> Self {
        let (rows, cols) = (x.rows(), x.cols());
        let pairs_per_row = cols.div_ceil(2 * BLOCK_LEN);
        let mut memory = ctx.empty(&[rows * pairs_per_row, size_of::<Pair>() / 4], DType::U32);
        let rows_per_task = (1 << 14) / cols.max(1) + 1;
        with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            let pairs: &mut [Pair] = bytemuck::cast_slice_mut(memory.u32s_mut());
            ctx.threads().run_pieces(pairs, (rows_per_task * pairs_per_row).max(1), |task, pairs| {
                let x = x[task * rows_per_task * cols..].chunks_exact(cols.max(1));
                for (x, pairs) in x.zip(pairs.chunks_exact_mut(pairs_per_row.max(1))) {
                    quantize_row::<T>(ctx.isa(), x, pairs);
                }
            });
        });
        Self { memory, pairs_per_row }
    }

    /// All pairs, row by row.
    pub(super) fn pairs(&self) -> &[Pair] {
        bytemuck::cast_slice(self.memory.u32s())
    }

    pub(super) fn pairs_per_row(&self) -> usize {
        self.pairs_per_row
    }
}

kernel! {
    fn quantize_row<S: Level, T: Float>(x: &[T], to: &mut [Pair]) {
        for (pair, to) in to.iter_mut().enumerate() {
            for half in 0..2 {
                let start = (2 * pair + half) * BLOCK_LEN;
                let values = &mut to.values[half * BLOCK_LEN..][..BLOCK_LEN];
                let Some(x) = x.get(start..start + BLOCK_LEN) else {
                    values.fill(0);
                    to.scales[half] = 0.0;
                    continue;
                };
                let (mut largest, mut not_finite) = ([0.0_f32; LANES], [0.0_f32; LANES]);
                for x in x.as_chunks::<LANES>().0 {
                    for i in 0..LANES {
                        let size = x[i].load().abs();
                        largest[i] = if size > largest[i] { size } else { largest[i] };
                        // Zero times what is not finite is NaN.
                        not_finite[i] += size * 0.0;
                    }
                }
                let largest = largest.iter().fold(0.0_f32, |a, &b| if b > a { b } else { a });
                to.scales[half] = largest / 127.0 + not_finite.iter().sum::<f32>();
                let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
                for (value, x) in values.iter_mut().zip(x) {
                    // Adding 1.5 * 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
                    *value = (x.load() * inverse + 12_582_912.0).to_bits() as i8;
                }
            }
        }
    }
}
