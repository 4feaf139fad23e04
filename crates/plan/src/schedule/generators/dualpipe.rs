//! DualPipe and DualPipeV: a rank has two stages, and each step of the schedule takes the two in turn.
//!
//! Both go through the same eight steps, which differ in how often each is repeated. "Near" is the stage of a rank
//! whose microbatches come to it first, "far" the other one. The weight gradients of a rank wait in one queue, first
//! in, first out.

use std::collections::VecDeque;

use super::{Kind, Row, Size, WeightCopy};

/// A stage of a rank with its microbatches.
struct Side {
    stage: usize,
    first: usize,
    forwards: usize,
    backwards: usize,
}

impl Side {
    fn new(stage: usize, first: usize) -> Self {
        Self { stage, first, forwards: 0, backwards: 0 }
    }

    fn next_forward(&mut self) -> (usize, usize) {
        self.forwards += 1;
        (self.stage, self.first + self.forwards - 1)
    }

    fn next_backward(&mut self) -> (usize, usize) {
        self.backwards += 1;
        (self.stage, self.first + self.backwards - 1)
    }
}

const NEAR: usize = 0;
const FAR: usize = 1;

struct DualRow {
    row: Row,
    sides: [Side; 2],
    waiting: VecDeque<(usize, usize)>,
}

impl DualRow {
    fn forward(&mut self, side: usize) {
        let (stage, microbatch) = self.sides[side].next_forward();
        self.row.push(Kind::Forward, stage, microbatch);
    }

    fn backward(&mut self, side: usize, is_split: bool) {
        let (stage, microbatch) = self.sides[side].next_backward();
        if is_split {
            self.row.push(Kind::InputGrad, stage, microbatch);
            self.waiting.push_back((stage, microbatch));
        } else {
            self.row.push(Kind::Backward, stage, microbatch);
        }
    }

    fn weight(&mut self) {
        if let Some((stage, microbatch)) = self.waiting.pop_front() {
            self.row.push(Kind::WeightGrad, stage, microbatch);
        }
    }

    fn pair(&mut self, forward: usize, backward: usize) {
        let forward = self.sides[forward].next_forward();
        let backward = self.sides[backward].next_backward();
        self.row.push_pair(forward, backward, Kind::Backward);
    }

    /// Goes through the eight steps. `outer` is the distance to the innermost rank, `inner` that from the outermost,
    /// counted from 1, and `main` how often the main step is repeated.
    fn steps(&mut self, outer: usize, inner: usize, main: usize) {
        (0..2 * outer).for_each(|_| self.forward(NEAR));
        for _ in 0..inner {
            self.forward(NEAR);
            self.forward(FAR);
        }
        for _ in 0..outer {
            self.backward(FAR, true);
            self.weight();
            self.forward(FAR);
        }
        for i in 0..main {
            if i == 0 && outer == 0 {
                self.forward(NEAR); // apart, so that the backward starts the sooner
                self.backward(FAR, false);
            } else {
                self.pair(NEAR, FAR);
            }
            self.pair(FAR, NEAR);
        }
        for _ in 0..outer {
            self.backward(FAR, false);
            self.pair(FAR, NEAR);
        }
        // Of these 2 x inner backwards the second half is split.
        for i in 0..2 * inner {
            self.backward(if i % 2 == 0 { FAR } else { NEAR }, i >= inner);
        }
        for _ in 0..outer {
            self.weight();
            self.backward(NEAR, true);
        }
        while !self.waiting.is_empty() {
            self.weight();
        }
    }
}

/// Returns the two copies of the weights: the first half of the microbatches goes from rank 0 up, the second from the
/// last down.
pub(super) fn copies(size: Size) -> Vec<WeightCopy> {
    let ranks = 0..size.ranks as u32;
    let num_microbatches = size.microbatches as u32 / 2;
    let up = WeightCopy { num_microbatches, stage_ranks: ranks.clone().collect() };
    let down = WeightCopy { num_microbatches, stage_ranks: ranks.rev().collect() };
    vec![up, down]
}

/// Returns the list of a rank in DualPipe.
pub(super) fn row(size: Size, rank: usize) -> Row {
    let half = size.microbatches / 2;
    let up = Side::new(rank, 0);
    let down = Side::new(size.ranks - 1 - rank, half);
    let from_end = rank.min(size.ranks - 1 - rank);
    let sides = if rank < size.ranks / 2 { [up, down] } else { [down, up] };
    let mut dual = DualRow { row: Row::default(), sides, waiting: VecDeque::new() };
    dual.steps(size.ranks / 2 - from_end - 1, from_end + 1, half - size.ranks + from_end + 1);
    dual.row
}

/// Returns the list of a rank in DualPipeV.
pub(super) fn v_row(size: Size, rank: usize) -> Row {
    let sides = [Side::new(rank, 0), Side::new(2 * size.ranks - 1 - rank, 0)];
    let mut dual = DualRow { row: Row::default(), sides, waiting: VecDeque::new() };
    dual.steps(size.ranks - rank - 1, rank + 1, size.microbatches - 2 * size.ranks + rank + 1);
    dual.row
}
