//! Lists of the tiles of groups' rows, made once for each height.

use std::cell::OnceCell;

use moeworks_tensor::Tensor;

use super::grouped::FEW_ROWS;
use super::small_m_gemm;

/// The tiles of some groups' rows.
#[derive(Default)]
pub(super) struct TileLists {
    /// The tiles that the sort of few choices listed, and their height.
    few: Option<(usize, Tensor)>,
    /// The tiles of another height, listed when a product first needs them.
    others: OnceCell<(usize, Tensor)>,
}

/// Returns the rows of the tiles that the sort of the choices of `num_tokens` tokens lists: those of the kernels that
/// most weights take then.
pub(super) fn listed_height(num_tokens: usize) -> usize {
    if num_tokens <= FEW_ROWS { FEW_ROWS } else { small_m_gemm::ROWS }
}

/// Returns the most tiles of at most `height` rows that `rows` rows of `groups` groups can have: each group with rows
/// has at most one that is not full.
pub(super) fn num_tiles(height: usize, rows: usize, groups: usize) -> usize {
    rows / height + rows.min(groups)
}

impl TileLists {
    /// Begins with the tiles that the sort of the choices of `num_tokens` tokens listed, if there are any.
    pub(super) fn from_sort(tiles: Option<&Tensor>, num_tokens: usize) -> Self {
        let few = tiles.map(|tiles| (listed_height(num_tokens), tiles.clone()));
        Self { few, others: OnceCell::new() }
    }

    /// Returns the tiles of this height. `list` makes them if they do not exist yet.
    pub(super) fn with_height(&self, height: usize, list: impl Fn() -> Tensor) -> Tensor {
        if let Some((_, few)) = self.few.as_ref().filter(|few| few.0 == height) {
            return few.clone();
        }
        let (own, tiles) = self.others.get_or_init(|| (height, list()));
        if *own == height { tiles.clone() } else { list() }
    }
}
