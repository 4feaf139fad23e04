//! Rows of quantized weights in place, with their scales inside the blocks or in a tensor of their own.

use moeworks_tensor::{DType, Lines, Tensor};

use crate::gemm::source::matrix_pieces;

/// Rows of weights of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights<'a> {
    pub(super) numbers: Lines<'a>,
    /// Empty if blocks hold their scales.
    pub(super) scales: Lines<'a>,
    pub(super) layout: Layout,
}

/// The type of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dtype: DType,
    /// True if scales are in a tensor of their own.
    pub(super) has_split_scales: bool,
}

/// The bytes of a row of weights: its blocks, and its scales if they are in a tensor of their own.
#[derive(Clone, Copy)]
pub(super) struct RowBytes<'a> {
    pub(super) numbers: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl<'a> Weights<'a> {
    /// Describes all rows of a tensor in one piece.
    pub(super) fn from_tensor(tensor: &'a Tensor) -> Self {
        let dtype = tensor.dtype();
        match tensor.lines() {
            Some([numbers, scales]) => Self { numbers, scales, layout: Layout { dtype, has_split_scales: true } },
            None => Self::packed(tensor.bytes(), dtype, tensor.cols()),
        }
    }

    /// Describes consecutive rows of `cols` weights.
    pub(super) fn packed(bytes: &'a [u8], dtype: DType, cols: usize) -> Self {
        let numbers = Lines::packed(bytes, cols / dtype.block_len() * dtype.size());
        Self { numbers, scales: Lines::packed(&[], 0), layout: Layout { dtype, has_split_scales: false } }
    }

    /// Skips the rows before `row`.
    #[inline(always)]
    pub(super) fn starting_at(self, row: usize) -> Self {
        Self { numbers: self.numbers.starting_at(row), scales: self.scales.starting_at(row), ..self }
    }

    /// Returns the bytes of a row.
    #[inline(always)]
    pub(super) fn row(self, index: usize) -> RowBytes<'a> {
        RowBytes { numbers: self.numbers.row(index), scales: self.scales.row(index) }
    }
}

/// Returns matrix `index` of a stack of matrices of `columns` rows each, or of twice as many if columns are paired,
/// in place: its first half and its second. Without pairs both are the whole matrix.
pub(crate) fn matrix(stack: &Tensor, index: usize, columns: usize, is_paired: bool) -> [Weights<'_>; 2] {
    let rows = columns * if is_paired { 2 } else { 1 };
    let all = match matrix_pieces(stack, index, rows) {
        Some([first, second]) if is_paired => return [Weights::from_tensor(first), Weights::from_tensor(second)],
        Some([whole]) => Weights::from_tensor(whole),
        _ => Weights::from_tensor(stack).starting_at(index * rows),
    };
    [all, all.starting_at(rows - columns)]
}
