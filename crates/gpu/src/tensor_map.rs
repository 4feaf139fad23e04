//! Maps of matrices for tensor copies (TMA), by which one thread of Hopper's kernels asks for a whole box of a
//! matrix.

use crate::Gpu;

/// The driver's form of [`Matrices`]: 128 bytes that kernels read by address (CUDA driver API, "Tensor Map Object
/// Management").
pub type TensorMap = [u32; 32];

/// Columns of a box: elements of 16 bits that are a line of 128 bytes.
pub const BOX_COLUMNS: u32 = 64;
/// The alignment of addresses and rows in bytes.
const ALIGN: u64 = 16;
/// The most rows of a box.
const MAX_BOX_ROWS: usize = 256;

/// Matrices of 16-bit elements one after the other, and the boxes of them that are copied: `box_rows` lines of
/// [`BOX_COLUMNS`], of `box_blocks` such blocks of columns.
#[derive(Clone, Copy, Debug)]
pub struct Matrices {
    /// The address of the first matrix on the GPU.
    pub address: u64,
    /// Columns of each matrix.
    pub columns: usize,
    /// Rows of each matrix.
    pub rows: usize,
    /// The number of matrices.
    pub count: usize,
    /// Rows of a box.
    pub box_rows: usize,
    /// Blocks of columns of a box.
    pub box_blocks: usize,
}

/// The dimensions as the driver takes them: elements of each, bytes from one to the next of each except the first,
/// and elements of a box.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Dimensions {
    pub(crate) sizes: Vec<u64>,
    pub(crate) steps: Vec<u64>,
    pub(crate) of_box: Vec<u32>,
}

impl Matrices {
    /// Returns the bytes of a row.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.columns as u64 * 2
    }

    /// Returns columns, rows and matrices; or, where a box has several blocks of columns, the columns of a block,
    /// rows, blocks and matrices. One instruction copies several blocks, because the thread that issues copies has no
    /// time for one each.
    pub(crate) fn dimensions(&self) -> Dimensions {
        let (columns, rows, count) = (self.columns as u64, self.rows as u64, self.count as u64);
        let (row, of_matrix) = (self.row_bytes(), self.row_bytes() * rows);
        if self.box_blocks == 1 {
            let of_box = vec![BOX_COLUMNS, self.box_rows as u32, 1];
            return Dimensions { sizes: vec![columns, rows, count], steps: vec![row, of_matrix], of_box };
        }
        let block = u64::from(BOX_COLUMNS);
        Dimensions {
            sizes: vec![block, rows, columns / block, count],
            steps: vec![row, block * 2, of_matrix],
            of_box: vec![BOX_COLUMNS, self.box_rows as u32, self.box_blocks as u32, 1],
        }
    }

    /// Returns whether the instruction can copy boxes of them.
    fn suit(&self) -> bool {
        let sizes = [self.columns, self.rows, self.count, self.box_rows, self.box_blocks];
        sizes.iter().all(|&size| size > 0 && u32::try_from(size).is_ok())
            && self.box_rows <= MAX_BOX_ROWS
            && (self.box_blocks == 1 || self.columns.is_multiple_of(BOX_COLUMNS as usize))
            && self.address.is_multiple_of(ALIGN)
            && self.row_bytes().is_multiple_of(ALIGN)
    }
}

impl Gpu {
    /// Returns the map of these matrices; none where there are no tensor copies, or none of these sizes.
    #[must_use]
    pub fn tensor_map(&self, matrices: &Matrices) -> Option<TensorMap> {
        if self.options().without_tensor_copies || !matrices.suit() {
            return None;
        }
        self.device.backend.tensor_map(matrices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_too_many_rows_or_whose_rows_or_addresses_are_no_whole_chunks_have_no_tensor_copies() {
        let whole = Matrices { address: 256, columns: 72, rows: 3, count: 2, box_rows: 128, box_blocks: 1 };
        assert!(whole.suit());
        assert!(!Matrices { address: 264, ..whole }.suit());
        assert!(!Matrices { columns: 76, ..whole }.suit());
        assert!(!Matrices { rows: 0, ..whole }.suit());
        assert!(!Matrices { rows: 1 << 32, ..whole }.suit());
        assert!(!Matrices { box_rows: 257, ..whole }.suit());
        assert!(!Matrices { box_blocks: 2, ..whole }.suit());
        assert!(Matrices { box_blocks: 2, columns: 128, ..whole }.suit());
    }

    #[test]
    fn boxes_of_several_blocks_count_blocks_as_a_dimension() {
        let one = Matrices { address: 256, columns: 192, rows: 5, count: 3, box_rows: 64, box_blocks: 1 };
        let lists = |sizes: &[u64], steps: &[u64], of_box: &[u32]| Dimensions {
            sizes: sizes.to_vec(),
            steps: steps.to_vec(),
            of_box: of_box.to_vec(),
        };
        assert_eq!(one.dimensions(), lists(&[192, 5, 3], &[384, 1920], &[64, 64, 1]));
        let several = Matrices { box_blocks: 2, ..one };
        assert_eq!(several.dimensions(), lists(&[64, 5, 3, 3], &[384, 128, 1920], &[64, 64, 2, 1]));
    }
}
