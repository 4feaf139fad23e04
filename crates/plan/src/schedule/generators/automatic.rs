//! The automatic scheduler of the zero-bubble paper (section 3.1): a schedule for given times under a limit on
//! memory.
//!
//! It goes microbatch by microbatch and keeps the time at which each rank is free. Before the first backward each
//! rank takes as many forwards as its memory allows and as there is time for. From then on each rank takes a forward
//! and a backward in turn. A W is put before either of them where the wait for its input is longer than a W; where it
//! is shorter, but would make the bubble of the rank larger than the largest of all ranks; and where the memory is
//! full. The rest of W comes last. Three decisions can go either way; all eight combinations are tried, and the
//! shortest schedule is kept.

use super::super::times::Times;
use super::{Entry, Kind, Row, Size};

/// The decisions that can go either way.
#[derive(Clone, Copy)]
struct Choices {
    /// A forward may make the first backward late.
    bubble_before_backward: bool,
    /// A forward is left out if the next rank is not in need of it before its own next backward.
    prefer_backward: bool,
    /// A W is also put into a short wait that would not make the largest bubble larger.
    greedy_weight: bool,
}

/// Returns the lists of all ranks. Each limit is at least the activations of one microbatch.
pub(super) fn schedule(size: Size, times: &Times, limits: &[f64]) -> Vec<Vec<Entry>> {
    let choices = (0..8).map(|bits| Choices {
        bubble_before_backward: bits & 4 == 0,
        prefer_backward: bits & 2 == 0,
        greedy_weight: bits & 1 == 0,
    });
    let mut best: Option<Planner<'_>> = None;
    for choices in choices {
        let mut planner = Planner::new(size, times, limits, choices);
        planner.plan();
        if best.as_ref().is_none_or(|best| planner.longest_span() < best.longest_span()) {
            best = Some(planner);
        }
    }
    best.map_or_else(Vec::new, |best| best.ranks.into_iter().map(|rank| rank.row.entries).collect())
}

/// The state of a rank.
struct RankState {
    row: Row,
    /// When the rank is free.
    now: f64,
    start: f64,
    /// The time it has waited since its first forward.
    bubble: f64,
    /// The memory it holds.
    held: f64,
    forwards: usize,
    backwards: usize,
    weights: usize,
}

struct Planner<'a> {
    num_ranks: usize,
    num_microbatches: usize,
    times: &'a Times,
    limits: &'a [f64],
    choices: Choices,
    ranks: Vec<RankState>,
    /// The ends of the forwards and backwards, by rank and microbatch.
    forward_ends: Vec<f64>,
    backward_ends: Vec<f64>,
    largest_bubble: f64,
}

impl<'a> Planner<'a> {
    fn new(size: Size, times: &'a Times, limits: &'a [f64], choices: Choices) -> Self {
        let state = |_| RankState {
            row: Row { entries: Vec::with_capacity(3 * size.microbatches) },
            now: 0.0,
            start: 0.0,
            bubble: 0.0,
            held: 0.0,
            forwards: 0,
            backwards: 0,
            weights: 0,
        };
        Self {
            num_ranks: size.ranks,
            num_microbatches: size.microbatches,
            times,
            limits,
            choices,
            ranks: (0..size.ranks).map(state).collect(),
            forward_ends: vec![0.0; size.ranks * size.microbatches],
            backward_ends: vec![0.0; size.ranks * size.microbatches],
            largest_bubble: 0.0,
        }
    }

    fn longest_span(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.now - rank.start).fold(0.0, f64::max)
    }

    fn plan(&mut self) {
        self.warm_up();
        for microbatch in 1..self.num_microbatches {
            for rank in self.ranks_to_forward() {
                self.make_room(rank);
                self.fill_wait(rank, self.forward_arrival(rank, self.ranks[rank].forwards));
                self.forward(rank);
            }
            for rank in (0..self.num_ranks).rev() {
                self.fill_wait(rank, self.backward_arrival(rank, microbatch));
                if rank == 0 && self.ranks[rank].forwards == self.num_microbatches {
                    while self.has_weight(rank) {
                        self.weight(rank);
                    }
                }
                self.backward(rank);
            }
        }
        for rank in 0..self.num_ranks {
            while self.has_weight(rank) {
                self.weight(rank);
            }
        }
    }

    /// Gives each rank its forwards before the first backward, and that.
    fn warm_up(&mut self) {
        (0..self.num_ranks).for_each(|rank| self.forward(rank));
        let mut more = self.warm_up_forwards();
        for rank in 1..self.num_ranks {
            // A rank stays behind the one before it, which has forwards left for it to wait for.
            if more[rank] > 0 && more[rank] >= more[rank - 1] && 1 + more[rank - 1] < self.num_microbatches {
                more[rank] = more[rank - 1].saturating_sub(1);
            }
        }
        for (rank, &more) in more.iter().enumerate() {
            (0..more).for_each(|_| self.forward(rank));
        }
        (0..self.num_ranks).rev().for_each(|rank| self.backward(rank));
    }

    /// Returns how many forwards each rank has memory and time for, after its first one and before its first
    /// backward.
    fn warm_up_forwards(&self) -> Vec<usize> {
        let mut more = vec![0; self.num_ranks];
        let mut backward_end = 0.0;
        for rank in (0..self.num_ranks).rev() {
            let of = self.times.stage(rank as u32);
            let (mut held, mut now) = (self.ranks[rank].held, self.ranks[rank].now);
            let arrival = if rank + 1 == self.num_ranks { now } else { backward_end + self.times.message };
            while 1 + more[rank] < self.num_microbatches && held + of.activation <= self.limits[rank] {
                let is_late = now >= arrival || (self.choices.bubble_before_backward && now + of.forward > arrival);
                if is_late {
                    break;
                }
                held += of.activation;
                now += of.forward;
                more[rank] += 1;
            }
            backward_end = now.max(arrival) + of.input_grad;
        }
        more
    }

    /// Returns the ranks that take a forward in this round: none takes one if a later rank with forwards left does
    /// not.
    fn ranks_to_forward(&self) -> Vec<usize> {
        let mut takes: Vec<bool> = (0..self.num_ranks).map(|rank| self.wants_forward(rank)).collect();
        for rank in (1..self.num_ranks).rev() {
            takes[rank - 1] &= takes[rank];
        }
        (0..self.num_ranks).filter(|&rank| takes[rank]).collect()
    }

    fn wants_forward(&self, rank: usize) -> bool {
        let state = &self.ranks[rank];
        if state.forwards >= self.num_microbatches {
            return false;
        }
        let Some(next) = self.ranks.get(rank + 1) else { return true };
        if !self.choices.prefer_backward || state.forwards < next.forwards + 2 {
            return true;
        }
        let next_times = self.times.stage(rank as u32 + 1);
        let next_backward = next.now + next_times.forward + next_times.input_grad + self.times.message;
        if state.now >= next_backward {
            return false;
        }
        let with_room = state.now + self.times.stage(rank as u32).forward + self.time_to_make_room(rank);
        with_room <= next_backward || next_backward - state.now > self.largest_bubble - state.bubble
    }

    /// Returns the time of the weight gradients that must come before a forward for its memory.
    fn time_to_make_room(&self, rank: usize) -> f64 {
        let (of, state) = (self.times.stage(rank as u32), &self.ranks[rank]);
        let waiting = state.backwards - state.weights;
        let held = |weights: usize| state.held + of.activation - weights as f64 * of.weight_grad_input;
        let needed = (0..waiting).find(|&weights| held(weights) <= self.limits[rank]).unwrap_or(waiting);
        needed as f64 * of.weight_grad
    }

    fn has_weight(&self, rank: usize) -> bool {
        self.ranks[rank].weights < self.ranks[rank].backwards
    }

    /// Puts weight gradients until there is room for the activations of a forward.
    fn make_room(&mut self, rank: usize) {
        let activation = self.times.stage(rank as u32).activation;
        while self.has_weight(rank) && self.ranks[rank].held + activation > self.limits[rank] {
            self.weight(rank);
        }
    }

    /// Puts weight gradients into the wait for an input.
    fn fill_wait(&mut self, rank: usize, arrival: Option<f64>) {
        let Some(arrival) = arrival else { return };
        let weight = self.times.stage(rank as u32).weight_grad;
        while self.has_weight(rank) && self.ranks[rank].now + weight <= arrival && weight > 0.0 {
            self.weight(rank);
        }
        let wait = arrival - self.ranks[rank].now;
        if self.has_weight(rank) && wait > 0.0 {
            let is_large = wait > self.largest_bubble - self.ranks[rank].bubble;
            if is_large || self.choices.greedy_weight {
                self.weight(rank);
            }
        }
    }

    fn forward_arrival(&self, rank: usize, microbatch: usize) -> Option<f64> {
        let before = rank.checked_sub(1)?;
        Some(self.forward_ends[before * self.num_microbatches + microbatch] + self.times.message)
    }

    fn backward_arrival(&self, rank: usize, microbatch: usize) -> Option<f64> {
        let next = Some(rank + 1).filter(|&next| next < self.num_ranks)?;
        Some(self.backward_ends[next * self.num_microbatches + microbatch] + self.times.message)
    }

    fn forward(&mut self, rank: usize) {
        let of = *self.times.stage(rank as u32);
        let microbatch = self.ranks[rank].forwards;
        let arrival = self.forward_arrival(rank, microbatch);
        let end = self.work(rank, arrival, of.forward);
        self.forward_ends[rank * self.num_microbatches + microbatch] = end;
        let state = &mut self.ranks[rank];
        state.held += of.activation;
        state.forwards += 1;
        state.row.push(Kind::Forward, rank, microbatch);
    }

    fn backward(&mut self, rank: usize) {
        let of = *self.times.stage(rank as u32);
        let microbatch = self.ranks[rank].backwards;
        let arrival = self.backward_arrival(rank, microbatch);
        let end = self.work(rank, arrival, of.input_grad);
        self.backward_ends[rank * self.num_microbatches + microbatch] = end;
        let state = &mut self.ranks[rank];
        state.held -= of.activation - of.weight_grad_input;
        state.backwards += 1;
        state.row.push(Kind::InputGrad, rank, microbatch);
    }

    fn weight(&mut self, rank: usize) {
        let of = *self.times.stage(rank as u32);
        self.work(rank, None, of.weight_grad);
        let state = &mut self.ranks[rank];
        let microbatch = state.weights;
        state.held -= of.weight_grad_input;
        state.weights += 1;
        state.row.push(Kind::WeightGrad, rank, microbatch);
    }

    /// Lets a rank work once its input is there; returns the end.
    fn work(&mut self, rank: usize, arrival: Option<f64>, seconds: f64) -> f64 {
        let state = &mut self.ranks[rank];
        let start = state.now.max(arrival.unwrap_or(0.0));
        if state.forwards > 0 {
            state.bubble += start - state.now;
            self.largest_bubble = self.largest_bubble.max(state.bubble);
        } else {
            state.start = start;
        }
        state.now = start + seconds;
        state.now
    }
}
