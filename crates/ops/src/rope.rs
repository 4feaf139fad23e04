//! Rotary position embedding (Su et al., 2104.09864) in the rotate-half convention of Hugging Face: elements i and
//! i + h/2 of a head are rotated by the angle `position * theta^(-2i/h)`.
//!
//! The gradient of a rotation is the inverse rotation, so backward is the same function with the other direction.

use moeworks_tensor::Tensor;

use crate::Context;
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, kernel, with_float};

/// Cosines and sines of every position and frequency, computed in f64.
#[derive(Clone, Debug)]
pub struct RopeTable {
    half: usize,
    max_len: usize,
    /// `[max_len, 2, half]`: the cosines of a position, then its sines.
    values: Vec<f32>,
}

impl RopeTable {
    /// The table for heads of `head_dim` elements (even), base `theta`, positions below `max_len`.
    #[must_use]
    pub fn new(head_dim: usize, theta: f64, max_len: usize) -> Self {
        assert!(head_dim.is_multiple_of(2), "rope: a head of {head_dim} elements has no two halves");
        let half = head_dim / 2;
        let mut values = Vec::with_capacity(max_len * head_dim);
        let frequencies: Vec<f64> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        for position in 0..max_len {
            values.extend(frequencies.iter().map(|frequency| (position as f64 * frequency).cos() as f32));
            values.extend(frequencies.iter().map(|frequency| (position as f64 * frequency).sin() as f32));
        }
        Self { half, max_len, values }
    }

    /// Positions that the table has.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        2 * self.half
    }
}

/// Which way [`rope`] turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position: what queries and keys get.
    Forward,
    /// Back: what their gradients get.
    Inverse,
}

/// Rotates every head of every row of `x` `[T, H h]` (f32 or bf16) in place by the row's position. `positions` `[T]` are
/// below the table's length.
pub fn rope(ctx: &Context, x: &mut Tensor, table: &RopeTable, positions: &[u32], direction: Rotation) {
    let (rows, cols) = (x.rows(), x.cols());
    assert_eq!(positions.len(), rows, "rope: positions for x {:?}", x.shape());
    assert!(
        table.half > 0 && cols.is_multiple_of(table.head_dim()),
        "rope: x {:?}, heads of {}",
        x.shape(),
        table.head_dim()
    );
    let last = positions.iter().max().map_or(0, |&position| position as usize);
    assert!(rows == 0 || last < table.max_len, "rope: position {last} in a table of {}", table.max_len);
    if cols == 0 {
        return;
    }
    let rows_per_task = (PIECE / cols).max(1);
    let sign = if direction == Rotation::Forward { 1.0 } else { -1.0 };
    with_float!(x.dtype(), T => {
        ctx.threads().run_pieces(x.slice_mut::<T>(), rows_per_task * cols, |task, x| {
            let positions = &positions[piece_range(task, rows_per_task, rows)];
            rotate_kernel::<T>(ctx.isa(), x, cols, table, positions, sign);
        });
    });
}

kernel! {
    fn rotate_kernel<S: Level, T: Float>(x: &mut [T], cols: usize, table: &RopeTable, positions: &[u32], sign: f32) {
        let half = table.half;
        for (row, &position) in x.chunks_exact_mut(cols).zip(positions) {
            let (cos, sin) = table.values[position as usize * 2 * half..][..2 * half].split_at(half);
            for head in row.chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (a, b, sin) = (low.load(), high.load(), sin * sign);
                    *low = T::store(S::mul_add(a, cos, -(b * sin)));
                    *high = T::store(S::mul_add(b, cos, a * sin));
                }
            }
        }
    }
}
