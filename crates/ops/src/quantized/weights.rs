//! Rows of weights in blocks where they lie: their scales with their numbers, or elsewhere.

use moeworks_tensor::{DType, Lines, Tensor};

use crate::gemm::source::matrix_pieces;

/// Rows of weights of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights<'a> {
    pub(super) numbers: Lines<'a>,
    /// Without bytes where blocks have their scales.
    pub(super) scales: Lines<'a>,
    pub(super) layout: Layout,
}

/// What the bytes of rows mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dtype: DType,
    /// Whether scales are elsewhere.
    pub(super) is_apart: bool,
}

impl<'a> Weights<'a> {
    /// All rows of a tensor in one piece.
    pub(super) fn of(tensor: &'a Tensor) -> Self {
        let dtype = tensor.dtype();
        match tensor.lines() {
            Some([numbers, scales]) => Self { numbers, scales, layout: Layout { dtype, is_apart: true } },
            None => Self::packed(tensor.bytes(), (dtype, tensor.cols())),
        }
    }

    /// Rows of so many weights one behind the other.
    pub(super) fn packed(bytes: &'a [u8], (dtype, cols): (DType, usize)) -> Self {
        let numbers = Lines::packed(bytes, cols / dtype.block_len() * dtype.size());
        Self { numbers, scales: Lines::packed(&[], 0), layout: Layout { dtype, is_apart: false } }
    }

    /// Those from one on.
    #[inline(always)]
    pub(super) fn starting_at(self, row: usize) -> Self {
        Self { numbers: self.numbers.starting_at(row), scales: self.scales.starting_at(row), ..self }
    }
}

/// Matrix `index` of a stack of matrices of `columns` rows each, or of twice that if they are paired: the first half and the second,
/// where they lie. Without pairs both are the matrix.
pub(crate) fn matrix(stack: &Tensor, index: usize, (columns, is_paired): (usize, bool)) -> [Weights<'_>; 2] {
    let rows = columns * if is_paired { 2 } else { 1 };
    let all = match matrix_pieces(stack, index, rows) {
        Some([first, second]) if is_paired => return [Weights::of(first), Weights::of(second)],
        Some([whole]) => Weights::of(whole),
        _ => Weights::of(stack).starting_at(index * rows),
    };
    [all, all.starting_at(rows - columns)]
}
