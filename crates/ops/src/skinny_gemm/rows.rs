//! Conversion of rows to f32, in the order in which the skinny kernels multiply them with weights.

use moeworks_tensor::{DType, bf16, f16};

use crate::gemm::Compute;
use crate::gemm::source::{Elements, Source, with_elements};
use crate::simd::{Float, Level, kernel};

/// An element type of weights, which are loaded in blocks of two vectors.
pub(crate) trait Weight: Float {
    /// Loads a block and widens it to f32. Elements of bf16 come in the order of [`place`](Self::place).
    ///
    /// # Safety
    /// Twice `S::WIDTH` elements must be readable at `from`.
    unsafe fn fetch<S: Level>(from: *const Self) -> [S::Vector; 2];

    /// Returns the place of a block's element `i` within the two vectors of `width` lanes.
    #[inline(always)]
    fn place(i: usize, width: usize) -> usize {
        let _ = width;
        i
    }

    /// Returns whether a block is one vector of bf16 pairs, which the pair dot product multiplies with A.
    #[inline(always)]
    fn is_dotted<S: Level>() -> bool {
        S::HAS_PAIR_DOT && Self::DTYPE == DType::BF16
    }

    /// Returns the 32-bit words that a block of a row of A takes.
    #[inline(always)]
    fn block_words<S: Level>() -> usize {
        if Self::is_dotted::<S>() { S::WIDTH } else { 2 * S::WIDTH }
    }
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn fetch<S: Level>(from: *const Self) -> [S::Vector; 2] {
        // SAFETY: the caller promises two readable vectors.
        unsafe { [S::load(from), S::load(from.add(S::WIDTH))] }
    }
}

impl Weight for f16 {
    #[inline(always)]
    unsafe fn fetch<S: Level>(from: *const Self) -> [S::Vector; 2] {
        // SAFETY: as above.
        unsafe { [S::load_halves(from), S::load_halves(from.add(S::WIDTH))] }
    }
}

impl Weight for bf16 {
    #[inline(always)]
    unsafe fn fetch<S: Level>(from: *const Self) -> [S::Vector; 2] {
        // SAFETY: the caller's promise is handed on.
        unsafe { S::load_pairs(from) }
    }

    #[inline(always)]
    fn place(i: usize, width: usize) -> usize {
        i / 2 + if i.is_multiple_of(2) { 0 } else { width }
    }
}

/// The most elements of a block, for buffers on the stack.
pub(super) const MAX_BLOCK: usize = 32;

/// Copies the elements of a partial block and fills it up with zeros.
#[inline(always)]
pub(super) fn partial_block<T: Weight>(from: &[T]) -> [T; MAX_BLOCK] {
    let mut block = [T::store(0.0); MAX_BLOCK];
    block[..from.len()].copy_from_slice(from);
    block
}

/// Converts the first `len` elements of a row to f32, rounded as the product asks, and fills the rest of `to` with
/// zeros.
pub(super) fn load_row(
    isa: crate::Isa,
    source: &Source<'_>,
    row: usize,
    len: usize,
    precision: Compute,
    to: &mut [f32],
) {
    let index = source.indices.map_or(row, |indices| indices[row] as usize);
    let start = source.offset + index * source.stride;
    with_elements!(source.elements, x => load_kernel(isa, &x[start..start + len], precision, to));
}

kernel! {
    fn load_kernel<S: Level, T: Float>(from: &[T], precision: Compute, to: &mut [f32]) {
        let (to, rest) = to.split_at_mut(from.len());
        match precision {
            Compute::F32 => to.iter_mut().zip(from).for_each(|(to, x)| *to = x.load()),
            Compute::Bf16 if T::DTYPE == DType::BF16 => {
                to.iter_mut().zip(from).for_each(|(to, x)| *to = x.load());
            }
            Compute::Bf16 => to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::store(x.load()).load()),
        }
        rest.fill(0.0);
    }
}

kernel! {
    bf16
    /// Spreads a row of whole blocks over `to`, where blocks of `num_rows` rows alternate: block b of row `row` goes
    /// to place `b * num_rows + row`, with its elements in the order of the weights' vectors or as bf16 pairs.
    pub(crate) fn spread<S: Level, T: Weight>(from: &[f32], row: usize, num_rows: usize, to: &mut [f32]) {
        let (block, words) = (2 * S::WIDTH, T::block_words::<S>());
        for (from, to) in from.chunks_exact(block).zip(to.chunks_exact_mut(num_rows * words)) {
            let to = &mut to[row * words..][..words];
            if T::is_dotted::<S>() {
                S::round_all(from, bytemuck::cast_slice_mut(to));
                continue;
            }
            for (i, &x) in from.iter().enumerate() {
                to[T::place(i, S::WIDTH)] = x;
            }
        }
    }
}

/// Returns the elements of a block on an instruction set.
pub(crate) fn block_len(isa: crate::Isa) -> usize {
    width_kernel(isa)
}

kernel! {
    fn width_kernel<S: Level>() -> usize {
        2 * S::WIDTH
    }
}
