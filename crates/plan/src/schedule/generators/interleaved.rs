//! Interleaved 1F1B: v stages a rank, stage s on rank s mod p.

use super::{Kind, Row, Size};

impl Size {
    /// Returns stage and microbatch of the k-th forward (or backward) of a rank: p microbatches in one of its stages,
    /// then the same in the next; backwards begin at the last stage.
    fn interleaved(self, rank: usize, k: usize, is_forward: bool) -> (usize, usize) {
        let (round, within) = (k / (self.ranks * self.virtual_stages), k % (self.ranks * self.virtual_stages));
        let chunk = within / self.ranks;
        let chunk = if is_forward { chunk } else { self.virtual_stages - 1 - chunk };
        (chunk * self.ranks + rank, round * self.ranks + within % self.ranks)
    }

    /// Returns the forwards of a rank before its first steady forward: 2(p-1-r) + (v-1)p.
    fn interleaved_warmup(self, rank: usize) -> usize {
        2 * (self.ranks - 1 - rank) + (self.virtual_stages - 1) * self.ranks
    }
}

/// Returns the list of a rank in interleaved 1F1B.
pub(super) fn row(size: Size, rank: usize) -> Row {
    let mut row = Row::default();
    let total = size.microbatches * size.virtual_stages;
    let ahead = size.interleaved_warmup(rank).min(total);
    let forward = |row: &mut Row, k| {
        let (stage, microbatch) = size.interleaved(rank, k, true);
        row.push(Kind::Forward, stage, microbatch);
    };
    (0..ahead).for_each(|k| forward(&mut row, k));
    for k in 0..total {
        if ahead + k < total {
            forward(&mut row, ahead + k);
        }
        let (stage, microbatch) = size.interleaved(rank, k, false);
        row.push(Kind::Backward, stage, microbatch);
    }
    row
}

/// Returns the list of a rank in interleaved 1F1B with overlapped pairs: the first steady forward comes before them,
/// so that the forward of a pair is never the one that its backward waits for.
pub(super) fn overlap_row(size: Size, rank: usize) -> Row {
    let mut row = Row::default();
    let total = size.microbatches * size.virtual_stages;
    let ahead = (size.interleaved_warmup(rank) + 1).min(total);
    for k in 0..ahead {
        let (stage, microbatch) = size.interleaved(rank, k, true);
        row.push(Kind::Forward, stage, microbatch);
    }
    for k in 0..total {
        let (stage, microbatch) = size.interleaved(rank, k, false);
        if ahead + k < total {
            row.push_pair(size.interleaved(rank, ahead + k, true), (stage, microbatch), Kind::InputGrad);
        } else {
            row.push(Kind::InputGrad, stage, microbatch);
        }
        row.push(Kind::WeightGrad, stage, microbatch);
    }
    row
}
