//! Rotary position embedding (Su et al., 2104.09864): pairs of a head's elements are rotated by the angle
//! `position * frequency`, by default `theta^(-2i/h)` for pair i. Pairs are elements i and i + h/2 (the rotate-half
//! convention of Hugging Face) or neighbours (DeepSeek); part of a head may stay as it is.
//!
//! The gradient of a rotation is the inverse rotation, so backward is the same function with the other direction. A
//! table with an amplitude also scales; then backward scales too, as the transposed map does.

use std::sync::OnceLock;

use moeworks_tensor::{MemoryPool, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::deferred::List;
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, kernel, with_float};

/// The layout of a head: which of its elements are rotated, and which of them form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeLayout {
    /// Elements of a head.
    pub head_dim: usize,
    /// The first rotated element. Elements before it and behind the last pair stay as they are.
    pub start: usize,
    /// Pairs are neighbours; otherwise element i of the first half of the rotated elements is paired with element i
    /// of the second half.
    pub is_interleaved: bool,
}

/// Cosines and sines of every position and frequency, computed in f64.
#[derive(Clone, Debug)]
pub struct RopeTable {
    layout: RopeLayout,
    half: usize,
    max_len: usize,
    /// `[max_len, 2, half]`: the cosines of a position, then its sines.
    values: Vec<f32>,
    /// The values as a tensor for a GPU, made when it is first needed.
    tensor: OnceLock<Tensor>,
}

impl RopeTable {
    /// Makes the table for heads of `head_dim` elements (even), base `theta`, and positions below `max_len`.
    #[must_use]
    pub fn new(head_dim: usize, theta: f64, max_len: usize) -> Self {
        assert!(head_dim.is_multiple_of(2), "rope: a head of {head_dim} elements has no two halves");
        let layout = RopeLayout { head_dim, start: 0, is_interleaved: false };
        Self::with_frequencies(layout, &default_frequencies(head_dim, theta), 1.0, max_len)
    }

    /// Makes the table for pairs with these `frequencies` (radians a position). Cosines and sines are multiplied by
    /// `amplitude`.
    #[must_use]
    pub fn with_frequencies(layout: RopeLayout, frequencies: &[f64], amplitude: f64, max_len: usize) -> Self {
        let half = frequencies.len();
        assert!(layout.start + 2 * half <= layout.head_dim, "rope: {half} pairs in {layout:?}");
        let mut values = Vec::with_capacity(max_len * 2 * half);
        for position in 0..max_len {
            let angle = |frequency: &f64| position as f64 * frequency;
            values.extend(frequencies.iter().map(|frequency| (amplitude * angle(frequency).cos()) as f32));
            values.extend(frequencies.iter().map(|frequency| (amplitude * angle(frequency).sin()) as f32));
        }
        Self { layout, half, max_len, values, tensor: OnceLock::new() }
    }

    /// Returns the number of positions in the table.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Returns the number of elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.layout.head_dim
    }

    fn tensor(&self, pool: &MemoryPool) -> &Tensor {
        self.tensor.get_or_init(|| Tensor::from_slice(pool, &[self.values.len()], &self.values))
    }

    /// Checks that the rows of `x` can be rotated by these positions.
    fn check(&self, x: &Tensor, positions: List<'_, u32>) {
        let (rows, cols) = (x.rows(), x.cols());
        assert_eq!(positions.len(), rows, "rope: positions for x {:?}", x.shape());
        assert!(
            self.half > 0 && cols.is_multiple_of(self.head_dim()),
            "rope: x {:?}, heads of {}",
            x.shape(),
            self.head_dim()
        );
        let last = positions.iter().max().map_or(0, |&position| position as usize);
        assert!(rows == 0 || last < self.max_len, "rope: position {last} in a table of {}", self.max_len);
    }

    /// Returns the arguments of a GPU's kernels, with the sign of the angles.
    fn on_gpu(&self, ctx: &Context, sign: f32) -> cuda::elementwise::Rotation<'_> {
        let RopeLayout { head_dim, start, is_interleaved } = self.layout;
        let (angles, half) = (self.tensor(ctx.pool()), self.half);
        cuda::elementwise::Rotation { angles, head_dim, start, half, is_interleaved, sign }
    }

    /// Returns the arguments of a GPU's kernels for a forward rotation, after checking the positions for the rows of
    /// each of `xs`.
    pub(crate) fn for_rows(
        &self,
        ctx: &Context,
        xs: &[&Tensor],
        positions: &Tensor,
    ) -> cuda::elementwise::Rotation<'_> {
        xs.iter().for_each(|x| self.check(x, positions.into()));
        self.on_gpu(ctx, 1.0)
    }

    /// Returns a table with the same angles for heads of another layout.
    #[must_use]
    pub fn with_layout(&self, layout: RopeLayout) -> Self {
        assert!(layout.start + 2 * self.half <= layout.head_dim, "rope: {} pairs in {layout:?}", self.half);
        Self { layout, ..self.clone() }
    }
}

/// Returns `theta^(-2i/dim)` for the `dim / 2` pairs of `dim` rotated elements.
#[must_use]
pub fn default_frequencies(dim: usize, theta: f64) -> Vec<f64> {
    (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect()
}

/// The direction of [`rope`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By the position, for queries and keys.
    Forward,
    /// By the negative position, for their gradients.
    Inverse,
}

/// Rotates every head of every row of `x` `[T, H h]` (f32 or bf16) in place by the row's position. `positions` `[T]`
/// are below the table's length.
pub fn rope<'p>(
    ctx: &Context,
    x: &mut Tensor,
    table: &RopeTable,
    positions: impl Into<List<'p, u32>>,
    direction: Rotation,
) {
    let positions = positions.into();
    let (rows, cols) = (x.rows(), x.cols());
    table.check(x, positions);
    if cols == 0 {
        return;
    }
    let sign = if direction == Rotation::Forward { 1.0 } else { -1.0 };
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::rope(on, x, &table.on_gpu(ctx, sign), positions);
    }
    let (rows_per_task, positions) = ((PIECE / cols).max(1), &*positions);
    with_float!(x.dtype(), T => {
        ctx.threads().run_pieces(x.slice_mut::<T>(), rows_per_task * cols, |task, x| {
            let positions = &positions[piece_range(task, rows_per_task, rows)];
            if table.layout.is_interleaved {
                rotate_neighbours::<T>(ctx.isa(), x, cols, table, positions, sign);
            } else {
                rotate_halves::<T>(ctx.isa(), x, cols, table, positions, sign);
            }
        });
    });
}

/// Returns the cosines and the sines of a position.
#[inline(always)]
fn angles(table: &RopeTable, position: u32) -> (&[f32], &[f32]) {
    table.values[position as usize * 2 * table.half..][..2 * table.half].split_at(table.half)
}

kernel! {
    fn rotate_halves<S: Level, T: Float>(x: &mut [T], cols: usize, table: &RopeTable, positions: &[u32], sign: f32) {
        let RopeLayout { head_dim, start, .. } = table.layout;
        for (row, &position) in x.chunks_exact_mut(cols).zip(positions) {
            let (cos, sin) = angles(table, position);
            for head in row.chunks_exact_mut(head_dim) {
                let (low, high) = head[start..start + 2 * table.half].split_at_mut(table.half);
                for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (a, b, sin) = (low.load(), high.load(), sin * sign);
                    *low = T::store(S::mul_add(a, cos, -(b * sin)));
                    *high = T::store(S::mul_add(b, cos, a * sin));
                }
            }
        }
    }
}

kernel! {
    fn rotate_neighbours<S: Level, T: Float>(
        x: &mut [T],
        cols: usize,
        table: &RopeTable,
        positions: &[u32],
        sign: f32,
    ) {
        let RopeLayout { head_dim, start, .. } = table.layout;
        for (row, &position) in x.chunks_exact_mut(cols).zip(positions) {
            let (cos, sin) = angles(table, position);
            for head in row.chunks_exact_mut(head_dim) {
                let (pairs, _) = head[start..start + 2 * table.half].as_chunks_mut::<2>();
                for ((pair, &cos), &sin) in pairs.iter_mut().zip(cos).zip(sin) {
                    let (a, b, sin) = (pair[0].load(), pair[1].load(), sin * sign);
                    pair[0] = T::store(S::mul_add(a, cos, -(b * sin)));
                    pair[1] = T::store(S::mul_add(b, cos, a * sin));
                }
            }
        }
    }
}
