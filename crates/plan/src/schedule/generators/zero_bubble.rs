//! The zero-bubble schedules made by hand: ZB-H1, ZB-H2 and ZB-V.

use super::{Kind, Row, Size};

/// Returns the list of a rank in ZB-H1: 1F1B, with r weight gradients waiting on rank r, so that each rank holds as
/// much as the first, and at the end they fill the wait between backwards.
pub(super) fn h1_row(size: Size, rank: usize) -> Row {
    delayed_row(size, rank, size.ranks - 1 - rank, rank)
}

/// Returns the list of a rank in ZB-H2: twice the forwards of 1F1B before the first backward, 2r weight gradients
/// waiting.
pub(super) fn h2_row(size: Size, rank: usize) -> Row {
    delayed_row(size, rank, 2 * (size.ranks - 1 - rank), 2 * rank)
}

/// Returns F and B in turn after `ahead` forwards, each B followed by a W once more than `delay` of them wait.
fn delayed_row(size: Size, rank: usize, ahead: usize, delay: usize) -> Row {
    let mut row = Row::default();
    let ahead = ahead.min(size.microbatches);
    (0..ahead).for_each(|microbatch| row.push(Kind::Forward, rank, microbatch));
    for microbatch in 0..size.microbatches {
        if ahead + microbatch < size.microbatches {
            row.push(Kind::Forward, rank, ahead + microbatch);
        }
        row.push(Kind::InputGrad, rank, microbatch);
        if let Some(waiting) = microbatch.checked_sub(delay) {
            row.push(Kind::WeightGrad, rank, waiting);
        }
    }
    for microbatch in size.microbatches.saturating_sub(delay)..size.microbatches {
        row.push(Kind::WeightGrad, rank, microbatch);
    }
    row
}

/// The list of a rank with two stages, and how far each stage is.
struct VRow {
    row: Row,
    stages: [usize; 2],
    num_microbatches: usize,
    forward: [usize; 2],
    backward: [usize; 2],
    weight: [usize; 2],
}

impl VRow {
    fn push(&mut self, kind: Kind, chunk: usize) {
        let next = match kind {
            Kind::Forward => &mut self.forward,
            Kind::InputGrad => &mut self.backward,
            _ => &mut self.weight,
        };
        if next[chunk] < self.num_microbatches {
            self.row.push(kind, self.stages[chunk], next[chunk]);
        }
        next[chunk] += 1;
    }

    fn push_both_grads(&mut self, chunk: usize) {
        self.push(Kind::InputGrad, chunk);
        self.push(Kind::WeightGrad, chunk);
    }
}

/// Returns the list of a rank in ZB-V: stage r and stage 2p-1-r on rank r.
///
/// The pattern is made for at least 2p-1 microbatches; with fewer, the missing ones are left out.
pub(super) fn v_row(size: Size, rank: usize) -> Row {
    let pattern = size.microbatches.max(2 * size.ranks - 1);
    let mut v = VRow {
        row: Row::default(),
        stages: [rank, 2 * size.ranks - 1 - rank],
        num_microbatches: size.microbatches,
        forward: [0; 2],
        backward: [0; 2],
        weight: [0; 2],
    };
    (0..2 * (size.ranks - rank) - 1).for_each(|_| v.push(Kind::Forward, 0));
    for _ in 0..rank {
        v.push(Kind::Forward, 1);
        v.push(Kind::Forward, 0);
    }
    for _ in 0..size.ranks - rank {
        v.push(Kind::Forward, 1);
        v.push_both_grads(1);
    }
    while v.forward[1] < v.forward[0] || v.forward[0] < pattern {
        if v.forward[0] < pattern {
            v.push(Kind::Forward, 0);
        }
        v.push_both_grads(0);
        v.push(Kind::Forward, 1);
        v.push_both_grads(1);
    }
    for _ in 0..rank {
        v.push(Kind::InputGrad, 0);
        v.push(Kind::InputGrad, 1);
    }
    for _ in 0..size.ranks - rank {
        v.push_both_grads(0);
    }
    for chunk in [1, 0] {
        while v.weight[chunk] < v.backward[chunk] {
            v.push(Kind::WeightGrad, chunk);
        }
    }
    v.row
}
