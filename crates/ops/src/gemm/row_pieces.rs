//! Groups cut into pieces of few rows, for batch invariance: every row then meets the same kernel. Needed where only
//! the skinny kernels use weights in place.

use crate::gemm::kernel::Tile;
use crate::gemm::store::Scratch;
use crate::gemm::{Finish, Group, Place, Product, Span, Tasks, with_tasks};
use crate::{Context, Isa};

/// Consecutive rows of a group.
#[derive(Clone, Copy)]
pub(crate) struct RowPiece {
    pub(crate) group: usize,
    pub(crate) first: usize,
    pub(crate) rows: usize,
}

/// Cuts groups, given by their numbers of rows, into pieces of at most `most` rows.
pub(crate) fn row_pieces(rows_of_groups: impl Iterator<Item = usize>, most: usize) -> Vec<RowPiece> {
    let of_group = |(group, rows): (usize, usize)| {
        (0..rows).step_by(most).map(move |first| RowPiece { group, first, rows: (rows - first).min(most) })
    };
    rows_of_groups.enumerate().flat_map(of_group).collect()
}

/// The epilogue of a list of pieces: passes each tile on to the epilogue of the whole groups.
pub(crate) struct OfPieces<'a> {
    pub(crate) inner: &'a dyn Finish,
    pub(crate) pieces: &'a [RowPiece],
}

impl OfPieces<'_> {
    fn place(&self, at: Place) -> Place {
        let piece = self.pieces[at.group];
        Place { group: piece.group, rows: Span::new(piece.first + at.rows.first, at.rows.len), ..at }
    }
}

impl Finish for OfPieces<'_> {
    fn finish(&self, isa: Isa, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch) {
        self.inner.finish(isa, self.place(at), tile, second, scratch);
    }

    fn prefetch(&self, at: Place) {
        self.inner.prefetch(self.place(at));
    }
}

/// Calls `work` with the tasks of all products, in pieces of at most `most` rows.
pub(super) fn with_row_pieces(
    ctx: &Context,
    product: &Product<'_>,
    most: usize,
    epilogue: &dyn Finish,
    work: impl FnOnce(Tasks<'_>),
) {
    let pieces = row_pieces(product.groups.iter().map(|group| group.rows), most);
    let groups: Vec<Group<'_>> = pieces
        .iter()
        .map(|piece| {
            let group = product.groups[piece.group];
            Group { a: group.a.skip_rows(piece.first), rows: piece.rows, ..group }
        })
        .collect();
    let epilogue = OfPieces { inner: epilogue, pieces: &pieces };
    with_tasks(ctx, &Product { groups: &groups, ..*product }, &epilogue, None, work);
}
