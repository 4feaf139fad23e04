//! Batches several small GEMMs that share an input into one launch, because launch latency would dominate, and
//! because one of them alone would keep only a small part of a GPU busy.

use moeworks_tensor::{DType, Tensor};

use super::grouped::FEW_ROWS;
use super::small_m_gemm::{self, Layout};
use super::{On, THREADS, fused_norm};
use moeworks_gpu::sources::GROUPED;
use moeworks_gpu::{Arg, Launch};

/// The most rows that tensor cores take here.
const MAX_ROWS: usize = 64;
/// Columns of a block of the vector kernel.
const VEC_COLUMNS: usize = 8;
/// The fewest columns for which tiles of more rows keep a GPU busy.
const MANY_COLUMNS: usize = 16_384;
/// The most columns that make too few blocks for a large GPU.
const MAX_NARROW: usize = 4096;

/// `x w^T` for several matrices, at least one.
pub(super) struct BatchedGemm<'a> {
    pub(super) a: &'a Tensor,
    pub(super) bs: &'a [&'a Tensor],
    /// The summand of the product with the first matrix, f32.
    pub(super) base: Option<&'a Tensor>,
}

/// The kernel that takes the batch.
#[derive(Clone, Copy)]
enum BatchKernel {
    /// Few rows on the plain units.
    Vec,
    /// Up to [`MAX_ROWS`] rows on tensor cores.
    SmallM,
    /// Few rows and few columns on tensor cores, half as many columns in each block.
    NarrowSmallM,
}

impl BatchedGemm<'_> {
    /// The most matrices that one launch takes.
    const MOST: usize = 3;

    /// Returns the kernel that takes the batch; none if none does.
    fn kernel(&self) -> Option<BatchKernel> {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let is_one_type = self.bs.iter().all(|b| b.dtype() == dtype);
        if self.bs.len() > Self::MOST || !is_one_type || !depth.is_multiple_of(8) || depth == 0 {
            return None;
        }
        let columns: usize = self.bs.iter().map(|b| b.rows()).sum();
        let are_some = dtype.is_quantized() || rows <= FEW_ROWS || columns < MANY_COLUMNS;
        let is_narrow = rows <= FEW_ROWS && columns <= MAX_NARROW;
        match rows {
            1..=MAX_ROWS if are_some && small_m_gemm::takes(dtype, depth) => {
                Some(if is_narrow { BatchKernel::NarrowSmallM } else { BatchKernel::SmallM })
            }
            // One product alone has a kernel that does the same.
            1..=FEW_ROWS if !dtype.is_quantized() && self.bs.len() > 1 => Some(BatchKernel::Vec),
            _ => None,
        }
    }

    /// Returns the products as `out` (f32 or bf16); none if there is no kernel for them.
    pub(super) fn products<const N: usize>(&self, on: On<'_>, out: DType) -> Option<[Tensor; N]> {
        let kernel = self.kernel()?;
        let mut ys: [Tensor; N] = std::array::from_fn(|i| on.empty(&[self.a.rows(), self.bs[i].rows()], out));
        self.store_to(on, kernel, &mut ys);
        Some(ys)
    }

    /// Returns the layout of blocks that multiply on tensor cores.
    fn layout(&self, on: On<'_>, kernel: BatchKernel) -> Option<Layout> {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let row_tiles = rows.div_ceil(small_m_gemm::ROWS);
        let blocks = |tiles: usize| -> usize {
            self.bs.iter().map(|b| b.rows().div_ceil(tiles * small_m_gemm::LINES) * row_tiles).sum()
        };
        match kernel {
            BatchKernel::Vec => None,
            BatchKernel::SmallM => Some(Layout::new(on, dtype, depth, rows, true, blocks)),
            BatchKernel::NarrowSmallM => Some(Layout::for_one_tile(on, dtype, blocks(small_m_gemm::LEAST_TILES))),
        }
    }

    /// Writes the products to `ys`.
    fn store_to(&self, on: On<'_>, kernel: BatchKernel, ys: &mut [Tensor]) {
        let (rows, depth, dtype) = (self.a.rows(), self.a.cols(), self.bs[0].dtype());
        let levels = small_m_gemm::in_level_order(on, self.a, dtype, rows >= small_m_gemm::MANY_ROWS);
        let a = levels.as_ref().unwrap_or(self.a);
        let columns: Vec<usize> = self.bs.iter().map(|b| b.rows()).chain([0; Self::MOST]).take(Self::MOST).collect();
        let layout = self.layout(on, kernel);
        let (height, width, stride) = match layout {
            None => (FEW_ROWS, VEC_COLUMNS, depth),
            Some(layout) => {
                (small_m_gemm::ROWS, layout.tiles * small_m_gemm::LINES, small_m_gemm::row_bytes(dtype, depth))
            }
        };
        let (source, kernel) = match kernel {
            BatchKernel::Vec => (&GROUPED, "vec_batched".into()),
            BatchKernel::SmallM | BatchKernel::NarrowSmallM => small_m_gemm::kernel("batched", dtype),
        };
        let num_blocks = columns.iter().map(|columns| columns.div_ceil(width)).sum();
        // Normed rows are stored in shared memory as bf16.
        let with_norm = layout.and_then(|layout| layout.with_norm(on, dtype, rows, depth, num_blocks));
        let norm = with_norm.and_then(|layout| Some((fused_norm::take(on, on.read(a), rows)?, layout)));
        let layout = norm.as_ref().map(|(_, layout)| *layout).or(layout);
        let shared = layout.map_or(0, |layout| layout.shared);
        let out_is_bf16 = ys[0].dtype() == DType::BF16;
        let none = || std::iter::repeat_with(Arg::none);
        let mut args = vec![on.read(a)];
        args.extend(self.bs.iter().map(|b| on.read(b)).chain(none()).take(Self::MOST));
        args.extend(ys.iter_mut().map(|y| on.write(y)).chain(none()).take(Self::MOST));
        args.push(on.read_or_none(self.base));
        args.extend(columns.into_iter().map(Arg::from));
        args.push(small_m_gemm::kind_of(a.dtype(), levels.is_some()));
        args.extend([dtype == DType::BF16, out_is_bf16].map(Arg::from));
        args.extend([rows, depth, stride].map(Arg::from));
        match layout {
            None => args.push((dtype.of_activations() == DType::BF16).into()),
            Some(layout) => {
                args.extend(layout.args());
                args.extend(norm.map_or_else(fused_norm::nothing, |(norm, _)| norm));
            }
        }
        let grid = [num_blocks, rows.div_ceil(height), 1];
        let launch = Launch { source, kernel: &kernel, grid, threads: THREADS, shared, args: &args };
        // SAFETY: a block reads its columns' rows of one matrix and the rows of A, and writes their sums; the base is
        // as large as the first result.
        unsafe { on.gpu.launch(&launch) };
    }
}
