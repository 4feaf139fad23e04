//! Epilogues of the experts' products: the activation in forward, its derivative in backward.

use std::ops::Range;

use moeworks_tensor::DType;

use super::Expert;
use crate::Activation;
use crate::activation::{activate, pull_back};
use crate::gemm::kernel::{MAX_ROWS, TILE_STRIDE, Tile, tile_lanes};
use crate::gemm::store::{Scratch, filled, load_stored, read_rows, round_rows, write_rows};
use crate::gemm::{Epilogue, Place, Span};
use crate::parallel::{Lent, prefetch_elements};
use crate::simd::{Float, Level};

/// The epilogue of the first product: writes `h`, if it is kept, and its activation.
pub(super) struct Activate<'a, T> {
    pub(super) activation: Activation,
    pub(super) f: usize,
    pub(super) experts: &'a [Expert],
    /// `[E, A F]`
    pub(super) bias: Option<&'a [f32]>,
    pub(super) h: Option<Lent<'a, T>>,
    pub(super) a: Lent<'a, T>,
}

impl<T: Float> Epilogue for Activate<'_, T> {
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        let (first, num_inputs) = (self.experts[at.group].1.start + at.rows.first, self.activation.num_inputs());
        for row in first..first + at.rows.len {
            for (input, h) in (0..num_inputs).filter_map(|input| Some((input, self.h.as_ref()?))) {
                h.prefetch((row * num_inputs + input) * self.f + at.columns.first, at.columns.len);
            }
            self.a.prefetch(row * self.f + at.columns.first, at.columns.len);
        }
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, h: &mut Tile, mut up: Option<&mut Tile>, scratch: &mut Scratch) {
        let Span { first: column, len: columns } = at.columns;
        let first = self.experts[at.group].1.start + at.rows.first;
        let num_inputs = self.activation.num_inputs();
        let num_rows = at.rows.len;
        for (input, tile) in [Some(&mut *h), up.as_deref_mut()].into_iter().flatten().enumerate() {
            if let Some(bias) = self.bias {
                let expert = self.experts[at.group].0;
                let bias = &bias[(expert * num_inputs + input) * self.f + column..][..columns];
                for row in tile.0.chunks_exact_mut(TILE_STRIDE).take(at.rows.len) {
                    row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
                }
            }
            match &self.h {
                Some(h) => write_rows::<S, T>(tile, &mut scratch.stored, num_rows, columns, |row| {
                    let start = ((first + row) * num_inputs + input) * self.f + column;
                    // SAFETY: tiles do not overlap, so this part of a row is this call's alone.
                    unsafe { h.range(start..start + columns) }
                }),
                None => round_rows::<S, T>(tile, &mut scratch.stored, at.rows.len),
            }
            // The activation is computed from `h` as it is stored, so that backward sees the same function.
            if T::DTYPE != DType::F32 {
                load_stored::<S, T>(tile, &scratch.stored, at.rows.len);
            }
        }
        let (up, lanes) = (up.map(|up| &up.0), tile_lanes::<S>());
        let of_up = |part: Range<usize>| up.map_or(&[][..], |up| &up[part]);
        if lanes == TILE_STRIDE && at.rows.len > MAX_ROWS / 2 {
            activate::<S>(self.activation, &mut h.0, of_up(0..MAX_ROWS * TILE_STRIDE));
        } else {
            for start in (0..at.rows.len).map(|row| row * TILE_STRIDE) {
                activate::<S>(self.activation, &mut h.0[start..start + lanes], of_up(start..start + lanes));
            }
        }
        write_rows::<S, T>(h, &mut scratch.stored, num_rows, columns, |row| {
            let start = (first + row) * self.f + column;
            // SAFETY: as above.
            unsafe { self.a.range(start..start + columns) }
        });
    }
}

/// The epilogue of `u = W2^T dy`: writes the gradient of `h` and each row's parts of `<u, a>`.
pub(super) struct PullBack<'a, T> {
    pub(super) activation: Activation,
    pub(super) f: usize,
    pub(super) experts: &'a [Expert],
    pub(super) row_weights: &'a [f32],
    pub(super) h: &'a [T],
    pub(super) dh: Lent<'a, T>,
    /// `[R, num_panels]`: the parts of `<u, a>`, one for each panel of columns.
    pub(super) parts: Lent<'a, f32>,
    pub(super) num_panels: usize,
}

impl<T: Float> Epilogue for PullBack<'_, T> {
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        let (first, num_inputs) = (self.experts[at.group].1.start + at.rows.first, self.activation.num_inputs());
        for row in first * num_inputs..(first + at.rows.len) * num_inputs {
            let start = row * self.f + at.columns.first;
            prefetch_elements(self.h.as_ptr().wrapping_add(start), at.columns.len);
            self.dh.prefetch(start, at.columns.len);
        }
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, u: &mut Tile, _second: Option<&mut Tile>, scratch: &mut Scratch) {
        let Span { first: column, len: columns } = at.columns;
        let num_rows = at.rows.len;
        let first = self.experts[at.group].1.start + at.rows.first;
        let num_inputs = self.activation.num_inputs();
        let start_of = |row: usize, input: usize| ((first + row) * num_inputs + input) * self.f + column;
        let u = &u.0;
        let Scratch { tiles: [h, up, a], stored } = scratch;
        for (input, tile) in [&mut *h, &mut *up].into_iter().enumerate().take(num_inputs) {
            read_rows::<S, T>(tile, stored, num_rows, columns, |row| &self.h[start_of(row, input)..][..columns]);
        }
        for row in 0..at.rows.len {
            let weight = self.row_weights[first + row];
            let of_row = row * TILE_STRIDE..row * TILE_STRIDE + tile_lanes::<S>();
            a.0[of_row.clone()].iter_mut().zip(&u[of_row]).for_each(|(da, u)| *da = weight * u);
        }
        filled::<S>(at.rows.len, |part| {
            let (a, h, up) = (&mut a.0[part.clone()], &mut h.0[part.clone()], &mut up.0[part]);
            pull_back::<S>(self.activation, a, h, up);
        });
        for row in 0..at.rows.len {
            let of_row = row * TILE_STRIDE..row * TILE_STRIDE + columns;
            let start = (first + row) * self.num_panels + at.panel;
            // SAFETY: there is one tile for each row and panel, so the element is this call's alone.
            let part = unsafe { self.parts.range(start..start + 1) };
            part[0] = dot(&u[of_row.clone()], &a.0[of_row]);
        }
        for (input, gradient) in [&*h, &*up].into_iter().enumerate().take(num_inputs) {
            write_rows::<S, T>(gradient, stored, num_rows, columns, |row| {
                let start = start_of(row, input);
                // SAFETY: tiles do not overlap, so this part of a row is this call's alone.
                unsafe { self.dh.range(start..start + columns) }
            });
        }
    }
}

/// Returns the dot product, summed in an order that the length fixes.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    crate::simd::sum_lanes(sums) + rest
}
