//! Products of a few rows, or some, with several matrices by one launch: between any two launches a GPU waits for longer than some take,
//! and one of these alone would keep a small part of it busy.

use moeworks_tensor::{DType, Tensor};

use super::grouped::FEW_ROWS;
use super::some_rows::{self, Layout};
use super::{On, THREADS, normed};
use crate::cuda::sources::GROUPED;
use crate::cuda::{Arg, Launch};

/// The most rows that are some.
const SOME_ROWS_AT_MOST: usize = 64;
/// Columns of blocks of few rows.
const FEW_COLUMNS: usize = 8;
/// Columns from which on tiles of more rows keep a GPU busy.
const MANY_COLUMNS: usize = 16_384;

/// Columns up to which blocks of so many are too few for a large GPU.
const MAX_NARROW: usize = 4096;

/// `x w^T` for several matrices, at least one.
pub(super) struct Each<'a> {
    pub(super) a: &'a Tensor,
    pub(super) bs: &'a [&'a Tensor],
    /// What the product with the first matrix comes on top of, f32.
    pub(super) base: Option<&'a Tensor>,
}

/// How many rows go through a launch's blocks, and how.
#[derive(Clone, Copy)]
enum Way {
    /// On the plain units.
    Few,
    /// On tensor cores.
    Some,
    /// The same of few rows with few columns, half as many in each block.
    Narrow,
}

impl Each<'_> {
    /// Matrices that one launch takes.
    const MOST: usize = 3;

    fn way(&self) -> Option<Way> {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let is_one_type = self.bs.iter().all(|b| b.dtype() == dtype);
        if self.bs.len() > Self::MOST || !is_one_type || !depth.is_multiple_of(8) || depth == 0 {
            return None;
        }
        let columns: usize = self.bs.iter().map(|b| b.rows()).sum();
        let are_some = dtype.is_quantized() || rows <= FEW_ROWS || columns < MANY_COLUMNS;
        let is_narrow = rows <= FEW_ROWS && columns <= MAX_NARROW;
        match rows {
            1..=SOME_ROWS_AT_MOST if are_some && some_rows::takes(dtype, depth) => {
                Some(if is_narrow { Way::Narrow } else { Way::Some })
            }
            // One alone has a kernel that does the same.
            1..=FEW_ROWS if !dtype.is_quantized() && self.bs.len() > 1 => Some(Way::Few),
            _ => None,
        }
    }

    /// The products as `out` (f32 or bf16), if there is a kernel for them.
    pub(super) fn products<const N: usize>(&self, on: On<'_>, out: DType) -> Option<[Tensor; N]> {
        let way = self.way()?;
        let mut ys: [Tensor; N] = std::array::from_fn(|i| on.empty(&[self.a.rows(), self.bs[i].rows()], out));
        self.store_to(on, way, &mut ys);
        Some(ys)
    }

    /// How blocks are laid out that multiply on tensor cores.
    fn layout(&self, on: On<'_>, way: Way) -> Option<Layout> {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let row_tiles = rows.div_ceil(some_rows::ROWS);
        let blocks = |tiles: usize| -> usize {
            self.bs.iter().map(|b| b.rows().div_ceil(tiles * some_rows::LINES) * row_tiles).sum()
        };
        match way {
            Way::Few => None,
            Way::Some => Some(Layout::new(on, (dtype, depth), (rows, true), blocks)),
            Way::Narrow => Some(Layout::of_one_tile(on, dtype, blocks(some_rows::LEAST_TILES))),
        }
    }

    fn store_to(&self, on: On<'_>, way: Way, ys: &mut [Tensor]) {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let levels = some_rows::in_levels(on, self.a, dtype, rows >= some_rows::MANY_ROWS);
        let a = levels.as_ref().unwrap_or(self.a);
        let columns: Vec<usize> = self.bs.iter().map(|b| b.rows()).chain([0; Self::MOST]).take(Self::MOST).collect();
        let layout = self.layout(on, way);
        let (height, width, stride) = match layout {
            None => (FEW_ROWS, FEW_COLUMNS, depth),
            Some(layout) => (some_rows::ROWS, layout.tiles * some_rows::LINES, some_rows::row_bytes(dtype, depth)),
        };
        let (source, kernel) = match way {
            Way::Few => (&GROUPED, "few_each".into()),
            Way::Some | Way::Narrow => some_rows::kernel("each", dtype),
        };
        let num_blocks = columns.iter().map(|columns| columns.div_ceil(width)).sum();
        // Normed rows lie in shared memory as bf16.
        let with_norm = layout.and_then(|layout| layout.with_norm(on, dtype, (rows, depth), num_blocks));
        let norm = with_norm.and_then(|layout| Some((normed::take(on, on.read(a), rows)?, layout)));
        let layout = norm.as_ref().map(|(_, layout)| *layout).or(layout);
        let shared = layout.map_or(0, |layout| layout.shared);
        let out_is_bf16 = ys[0].dtype() == DType::BF16;
        let none = || std::iter::repeat_with(Arg::none);
        let mut args = vec![on.read(a)];
        args.extend(self.bs.iter().map(|b| on.read(b)).chain(none()).take(Self::MOST));
        args.extend(ys.iter_mut().map(|y| on.write(y)).chain(none()).take(Self::MOST));
        args.push(on.read_or_none(self.base));
        args.extend(columns.into_iter().map(Arg::from));
        args.push(some_rows::kind_of(a.dtype(), levels.is_some()));
        args.extend([dtype == DType::BF16, out_is_bf16].map(Arg::from));
        args.extend([rows, depth, stride].map(Arg::from));
        match layout {
            None => args.push((dtype.of_activations() == DType::BF16).into()),
            Some(layout) => {
                args.extend(layout.args());
                args.extend(norm.map_or_else(normed::nothing, |(norm, _)| norm));
            }
        }
        let grid = [num_blocks, rows.div_ceil(height), 1];
        let launch = Launch { source, kernel: &kernel, grid, threads: THREADS, shared, args: &args };
        // SAFETY: a block reads its columns' rows of one matrix and the rows of A, and writes their sums; the base is as large as the
        // first result.
        unsafe { on.gpu.launch(&launch) };
    }
}
