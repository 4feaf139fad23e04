//! GPipe and 1F1B: one stage a rank.

use super::{Kind, Row, Size};

/// Returns the list of a rank in GPipe: all forwards, then all backwards from the last microbatch.
pub(super) fn gpipe_row(size: Size, rank: usize) -> Row {
    let mut row = Row::default();
    (0..size.microbatches).for_each(|microbatch| row.push(Kind::Forward, rank, microbatch));
    (0..size.microbatches).rev().for_each(|microbatch| row.push(Kind::Backward, rank, microbatch));
    row
}

/// Returns the list of a rank in 1F1B: p-1-r forwards, then a forward and a backward in turn.
pub(super) fn row(size: Size, rank: usize) -> Row {
    let mut row = Row::default();
    let ahead = (size.ranks - 1 - rank).min(size.microbatches);
    (0..ahead).for_each(|microbatch| row.push(Kind::Forward, rank, microbatch));
    for microbatch in 0..size.microbatches {
        if ahead + microbatch < size.microbatches {
            row.push(Kind::Forward, rank, ahead + microbatch);
        }
        row.push(Kind::Backward, rank, microbatch);
    }
    row
}

/// Returns the list of a rank in 1F1B with overlapped pairs.
///
/// The forward and the backward of a pair must not wait for each other on any rank. Counted in pairs, microbatch i is
/// forwarded on rank r at i + r, and its backward comes back to it at i + 2p - 1 - r: so the rank is 2(p-1-r) + 1
/// forwards ahead, where 1F1B is p-1-r.
pub(super) fn overlap_row(size: Size, rank: usize) -> Row {
    let mut row = Row::default();
    let ahead = (2 * (size.ranks - 1 - rank) + 1).min(size.microbatches);
    (0..ahead).for_each(|microbatch| row.push(Kind::Forward, rank, microbatch));
    for microbatch in 0..size.microbatches {
        if ahead + microbatch < size.microbatches {
            row.push_pair((rank, ahead + microbatch), (rank, microbatch), Kind::InputGrad);
        } else {
            row.push(Kind::InputGrad, rank, microbatch);
        }
        row.push(Kind::WeightGrad, rank, microbatch);
    }
    row
}
