//! Dispatch, experts and combine of a layer in chunks: while a chunk travels, experts compute another.
//!
//! All chunks of the dispatch are sent one after another. Experts compute each as soon as it is there and those
//! before it are done, and its results start back at once, behind what the rank still has to send (ScheMoE, EuroSys
//! 2024). A list in which something stands between experts and combine is carried out without this: chunks then
//! follow each other, and experts wait for the last.

use super::super::action::{Action, Entry, Kind};
use super::super::makespan::{Arrival, Span, cost_of};
use super::engine::{ChainState, Engine, Waiting};
use super::under_way::Happening;

/// The progress of the experts of a layer that computes chunk by chunk.
#[derive(Clone, Copy, Default)]
pub(super) struct ChunkedExperts {
    pub(super) num_arrived: u16,
    pub(super) num_computed: u16,
}

/// Returns the experts' computation that an all-to-all sends to; none for one that brings results back.
fn experts_of(kind: Kind) -> Option<Kind> {
    match kind {
        Kind::ForwardDispatch => Some(Kind::ForwardExperts),
        Kind::BackwardCombine => Some(Kind::BackwardExperts),
        _ => None,
    }
}

/// Returns the all-to-all that brings the results of experts back; none for other computations.
fn way_back(kind: Kind) -> Option<Kind> {
    match kind {
        Kind::ForwardExperts => Some(Kind::ForwardCombine),
        Kind::BackwardExperts => Some(Kind::BackwardDispatch),
        _ => None,
    }
}

impl ChainState {
    /// Takes the end of a transfer of `action`; returns whether more are to come before the chain can go on.
    pub(super) fn arrived_in_part(&mut self, action: Action) -> bool {
        match &mut self.in_chunks {
            Some(experts) if experts_of(action.kind).is_some() => {
                experts.num_arrived += 1;
                true
            }
            _ => self.num_left > 0,
        }
    }
}

impl Engine<'_, '_> {
    /// Returns the chunks of each all-to-all.
    pub(super) fn num_chunks(&self) -> u16 {
        self.transfers.chunks.max(1)
    }

    /// Queues the all-to-all at a place of a rank's list. Results of chunks have been queued one by one.
    pub(super) fn queue_all_to_all(&mut self, rank: u32, position: u32, action: Action) {
        let chain = self.chain_id(action) as usize;
        let goes_to_experts = experts_of(action.kind).is_some();
        if !goes_to_experts && self.chains[chain].in_chunks.is_some() {
            return;
        }
        let chunks = self.num_chunks();
        let is_chunked = goes_to_experts && chunks > 1 && self.can_chunk(rank, position, action);
        let state = &mut self.chains[chain];
        state.in_chunks = is_chunked.then(ChunkedExperts::default);
        (state.is_pending, state.num_left) = (true, chunks);
        let queue = &mut self.ranks[rank as usize].queue;
        queue.extend((0..chunks).map(|chunk| Waiting { action, position, is_first: chunk == 0 }));
        self.try_exchange(rank);
    }

    /// Returns whether the combine follows right after the experts that an all-to-all sends to.
    fn can_chunk(&self, rank: u32, position: u32, action: Action) -> bool {
        let after = &self.schedule.ranks[rank as usize][position as usize + 1..];
        let Some(experts) = experts_of(action.kind).map(|kind| Action { kind, ..action }) else { return false };
        let Some(at) = after.iter().position(|&entry| entry == Entry::One(experts)) else { return false };
        let combine = way_back(experts.kind).map(|kind| Entry::One(Action { kind, ..action }));
        combine.is_some() && after.get(at + 1).copied() == combine
    }

    /// Returns the progress of experts that are computed chunk by chunk; none for other computations.
    pub(super) fn experts_in_chunks(&self, action: Action) -> Option<ChunkedExperts> {
        way_back(action.kind).and_then(|_| self.chains[self.chain_id(action) as usize].in_chunks)
    }

    /// Starts the experts' next chunk, if it has arrived; returns whether it has.
    pub(super) fn start_chunk(&mut self, rank: u32, action: Action, experts: ChunkedExperts) -> bool {
        if experts.num_arrived <= experts.num_computed {
            return false;
        }
        let chain = self.chain_id(action) as usize;
        let (sent, at) = (self.chains[chain].start, self.chains[chain].end);
        let start = self.wait(rank, Some(Arrival { sent, at }));
        let seconds = cost_of(self.schedule, self.times, action).seconds / f64::from(self.num_chunks());
        let state = &mut self.ranks[rank as usize];
        (state.busy, state.is_computing) = (state.busy + seconds, true);
        let (position, end) = (state.position, start + seconds);
        let span = &mut self.spans[rank as usize][position as usize];
        *span = Span { start: if experts.num_computed == 0 { start } else { span.start }, end };
        self.push(end, Happening::Computed(rank));
        true
    }

    /// Ends a chunk of experts, and queues its results.
    pub(super) fn end_chunk(&mut self, rank: u32, action: Action, experts: ChunkedExperts) {
        let chunks = self.num_chunks();
        let num_computed = experts.num_computed + 1;
        let chain = self.chain_id(action) as usize;
        let state = &mut self.ranks[rank as usize];
        let position = state.position + 1;
        (state.is_computing, state.now) = (false, self.now);
        if let Some(kind) = way_back(action.kind) {
            let is_first = num_computed == 1;
            state.queue.push_back(Waiting { action: Action { kind, ..action }, position, is_first });
        }
        if num_computed == chunks {
            state.position = position;
        }
        let of = &mut self.chains[chain];
        of.in_chunks = Some(ChunkedExperts { num_computed, ..experts });
        // All chunks of the way there have arrived before the first of the way back starts.
        of.num_left = if num_computed == 1 { of.num_left + chunks } else { of.num_left };
        self.try_exchange(rank);
        self.go_on(rank);
    }
}
