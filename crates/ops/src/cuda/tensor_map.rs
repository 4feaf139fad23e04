//! Maps of weights for tensor copies (TMA), by which one thread of Hopper's kernels asks for a whole box of a matrix.

use std::sync::OnceLock;

use super::{Backend, Gpu};

/// Set, it leaves tensor copies out: weights then come by copies of 16 bytes a thread, as rows of activations do. To compare, and where
/// a driver has trouble with them.
pub const NO_TENSOR_COPIES_VARIABLE: &str = "MOEWORKS_NO_TENSOR_COPIES";

/// What the driver makes of [`Matrices`]: 128 bytes that kernels read by address (CUDA driver API, "Tensor Map Object Management").
pub(super) type TensorMap = [u32; 32];

/// Columns of a box: elements of 16 bits that are a line of 128 bytes.
pub(crate) const BOX_COLUMNS: u32 = 64;
/// What addresses and rows must be multiples of, in bytes, and the most rows of a box.
const ALIGN: u64 = 16;
const MAX_BOX_ROWS: usize = 256;

/// `count` matrices of 16-bit elements, `[rows, columns]` each, one after the other, and the boxes that are copied: `box_rows` lines of
/// [`BOX_COLUMNS`], and of `box_blocks` such blocks of columns one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) address: u64,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    pub(crate) count: usize,
    pub(crate) box_rows: usize,
    pub(crate) box_blocks: usize,
}

/// What the driver is told: elements and bytes from one to the next of each dimension but the first, and the elements of a box.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Dimensions {
    pub(super) sizes: Vec<u64>,
    pub(super) steps: Vec<u64>,
    pub(super) of_box: Vec<u32>,
}

impl Matrices {
    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> u64 {
        self.columns as u64 * 2
    }

    /// Columns, rows and matrices; where a box has several blocks of columns the columns of one, rows, blocks and matrices. Several
    /// blocks by one instruction, as the thread that asks for them has no time for one each.
    pub(super) fn dimensions(&self) -> Dimensions {
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

    /// Whether the instruction can copy boxes of them.
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
    /// The map of such matrices; none where there are no tensor copies, or none of these sizes.
    pub(crate) fn tensor_map(&self, matrices: &Matrices) -> Option<TensorMap> {
        static ARE_LEFT_OUT: OnceLock<bool> = OnceLock::new();
        let are_left_out = *ARE_LEFT_OUT.get_or_init(|| std::env::var_os(NO_TENSOR_COPIES_VARIABLE).is_some());
        if are_left_out || !matrices.suit() {
            return None;
        }
        match &self.device.backend {
            Backend::Nvidia(device) => device.tensor_map(matrices),
            Backend::Emulated(device) => device.tensor_map(matrices),
        }
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
