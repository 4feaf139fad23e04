//! Computes sums of f32 again that were not finite as bf16x3.
//!
//! An infinite element, or one above the largest bf16, is split into parts that are infinite or NaN, and every
//! product with them is NaN. So only the sums have to be checked.

use core::arch::x86_64::{_mm512_fpclass_ps_mask, _mm512_load_ps};

use super::BLOCK;
use crate::Isa;
use crate::gemm::kernel::{Kernels, MAX_ROWS, TILE_STRIDE, Tile};
use crate::gemm::plan::GemmKernel;
use crate::gemm::scratch::ScratchSlot;
use crate::gemm::store::Scratch;
use crate::gemm::tasks::Task;
use crate::gemm::{Compute, Finish, Place, Span, Work};

/// Elements of the depth that are summed at once in the second computation.
const PART: usize = 2048;

/// The epilogue of a bf16x3 task, which repairs sums before passing them on.
pub(super) struct Exact<'a> {
    pub(super) work: &'a Work<'a>,
    pub(super) epilogue: &'a dyn Finish,
}

impl Finish for Exact<'_> {
    fn finish(&self, isa: Isa, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch) {
        if is_finite(tile, at) && second.as_ref().is_none_or(|second| is_finite(second, at)) {
            return self.epilogue.finish(isa, at, tile, second, scratch);
        }
        let sums = [Some(&*tile), second.as_deref()];
        sum_again(self.work, at, &Mended { sums, epilogue: self.epilogue });
    }

    fn prefetch(&self, at: Place) {
        self.epilogue.prefetch(at);
    }
}

/// An epilogue that keeps the finite sums of the first computation.
struct Mended<'a> {
    sums: [Option<&'a Tile>; 2],
    epilogue: &'a dyn Finish,
}

impl Finish for Mended<'_> {
    fn finish(&self, isa: Isa, at: Place, tile: &mut Tile, mut second: Option<&mut Tile>, scratch: &mut Scratch) {
        for (tile, sums) in [Some(&mut *tile), second.as_deref_mut()].into_iter().zip(self.sums) {
            let (Some(tile), Some(sums)) = (tile, sums) else { continue };
            tile.0.iter_mut().zip(&sums.0).filter(|(_, sum)| sum.is_finite()).for_each(|(to, &sum)| *to = sum);
        }
        self.epilogue.finish(isa, at, tile, second, scratch);
    }

    fn prefetch(&self, _: Place) {}
}

/// Returns whether all sums of a tile are finite.
fn is_finite(tile: &Tile, at: Place) -> bool {
    // SAFETY: bf16x3 tasks exist only on machines with tiles.
    unsafe { is_finite_in_vectors(tile, at.rows.len, at.columns.len) }
}

/// # Safety
/// The machine must have AVX-512 F and DQ.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn is_finite_in_vectors(tile: &Tile, rows: usize, columns: usize) -> bool {
    /// Both kinds of NaN, and both infinities.
    const NOT_FINITE: i32 = 0x01 | 0x80 | 0x08 | 0x10;
    let mut found = 0;
    for row in tile.0.chunks_exact(TILE_STRIDE).take(rows) {
        for (column, sums) in (0..columns).step_by(BLOCK).zip(row.chunks_exact(BLOCK)) {
            // SAFETY: sixteen sums are there; tiles and their rows begin with a cache line.
            let classes = _mm512_fpclass_ps_mask::<NOT_FINITE>(unsafe { _mm512_load_ps(sums.as_ptr()) });
            // Columns beyond the panel's are never filled.
            let are_there = if columns - column >= BLOCK { u16::MAX } else { (1 << (columns - column)) - 1 };
            found |= classes & are_there;
        }
    }
    found == 0
}

/// Computes the sums of a tile's rows and columns in f32 with vectors.
#[cold]
fn sum_again(work: &Work<'_>, at: Place, epilogue: &dyn Finish) {
    let Work { product, group, isa, .. } = *work;
    let (kernels, num_tiles) = (Kernels::select(isa, Compute::F32), product.num_tiles());
    let part = group.depth.min(PART).next_multiple_of(2);
    let b_units = part * TILE_STRIDE * num_tiles;
    let a_units = part * MAX_ROWS;
    let mut memory = vec![Tile([0.0; _]); num_tiles + (a_units + b_units).div_ceil(MAX_ROWS * TILE_STRIDE)];
    // SAFETY: an f32 may be read and written as any 32 bits.
    let (_, scratch, _) = unsafe { memory.align_to_mut::<u32>() };
    let task = Task {
        group: at.group,
        rows: at.rows,
        panels: Span::new(at.panel, 1),
        part,
        b_units,
        a_units,
        kernel: GemmKernel::Packed,
    };
    Work { product, group, task: &task, next: None, kernels, isa }.run(scratch, &mut ScratchSlot::default(), epilogue);
}
