//! Messages, all-to-alls and sums under way, from their first seconds through their bytes to their end; and events in
//! the order of their times.

use std::cmp::Ordering;

use super::super::action::Action;
use super::super::check::releases;
use super::super::makespan::Span;
use super::engine::Engine;
use crate::network::{Phase, TransferId};

/// A place in a rank's list.
#[derive(Clone, Copy)]
pub(super) struct ListPlace {
    pub(super) rank: u32,
    pub(super) position: u32,
}

/// The purpose of a transfer.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    /// A message from a chain to another rank.
    Message { chain: u32, to: u32 },
    /// An all-to-all of a rank.
    AllToAll { rank: u32, action: Action },
    /// The sum of gradients of a rank.
    Sum { rank: u32 },
}

#[derive(Clone, Copy)]
pub(super) struct UnderWay {
    pub(super) purpose: Purpose,
    pub(super) id: Option<TransferId>,
    pub(super) phase: u32,
    /// The flow, while bytes pass.
    pub(super) flow: Option<u32>,
    pub(super) version: u32,
    pub(super) start: f64,
    /// The rank and the place in its list whose span this is.
    pub(super) span: Option<ListPlace>,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) struct Event {
    pub(super) time: f64,
    /// The number of the event: those of the same time come in the order in which they were made.
    pub(super) number: u64,
    pub(super) of: Happening,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Happening {
    /// A rank has computed.
    Computed(u32),
    /// A transfer goes on: its first seconds, or its bytes, are over.
    Passed { transfer: u32, version: u32 },
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest event is the greatest, for the heap.
    fn cmp(&self, other: &Self) -> Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}

impl<'b> Engine<'_, 'b> {
    pub(super) fn start_transfer(
        &mut self,
        purpose: Purpose,
        id: Option<TransferId>,
        seconds: f64,
        span: Option<ListPlace>,
    ) {
        let transfer = UnderWay { purpose, id, phase: 0, flow: None, version: 0, start: self.now, span };
        let index = match self.free.pop() {
            Some(index) => {
                let version = self.under_way[index as usize].version;
                self.under_way[index as usize] = UnderWay { version, ..transfer };
                index
            }
            None => {
                self.under_way.push(transfer);
                self.under_way.len() as u32 - 1
            }
        };
        let fixed = self.phase(index).map_or(0.0, |phase| phase.fixed_s);
        self.pass_at(index, self.now + seconds + fixed);
    }

    fn phase(&self, transfer: u32) -> Option<&'b Phase> {
        let of = &self.under_way[transfer as usize];
        self.transfers.traffic.phases(of.id?).get(of.phase as usize)
    }

    /// Makes the event of a transfer, in the place of one that it may have.
    fn pass_at(&mut self, transfer: u32, time: f64) {
        let of = &mut self.under_way[transfer as usize];
        of.version = of.version.wrapping_add(1);
        let version = of.version;
        self.push(time, Happening::Passed { transfer, version });
    }

    /// Carries a transfer on: from its first seconds to its bytes, from a phase to the next, or to its end.
    pub(super) fn pass(&mut self, transfer: u32) {
        let phase = self.phase(transfer);
        let of = &mut self.under_way[transfer as usize];
        if let Some(flow) = of.flow.take() {
            of.phase += 1;
            self.shares.end(flow, self.now);
            self.follow_changes();
        } else if let Some(phase) = phase.filter(|phase| !phase.uses.is_empty()) {
            let flow = self.shares.start(phase, self.now);
            self.under_way[transfer as usize].flow = Some(flow);
            let num = self.of_flow.len().max(flow as usize + 1);
            self.of_flow.resize(num, 0);
            self.of_flow[flow as usize] = transfer;
            self.follow_changes();
            return;
        } else {
            of.phase += 1;
        }
        match self.phase(transfer).map(|phase| phase.fixed_s) {
            Some(fixed) => self.pass_at(transfer, self.now + fixed),
            None => self.end_transfer(transfer),
        }
    }

    /// Moves the ends of transfers whose shares have changed.
    fn follow_changes(&mut self) {
        for index in 0..self.shares.changed().len() {
            let flow = self.shares.changed()[index];
            let end = self.shares.end_of(flow).max(self.now);
            self.pass_at(self.of_flow[flow as usize], end);
        }
    }

    fn end_transfer(&mut self, transfer: u32) {
        let UnderWay { purpose, id, start, span, .. } = self.under_way[transfer as usize];
        self.under_way[transfer as usize].version = self.under_way[transfer as usize].version.wrapping_add(1);
        self.free.push(transfer);
        if let Some(id) = id {
            for (sum, of) in self.levels.iter_mut().zip(self.transfers.traffic.bytes(id)) {
                sum.sent += of.sent;
                sum.received += of.received;
            }
        }
        let whole = Span { start, end: self.now };
        if let Some(ListPlace { rank, position }) = span {
            // Chunks of an all-to-all are one span.
            let span = &mut self.spans[rank as usize][position as usize];
            *span = Span { start: if span.end > 0.0 { span.start } else { start }, end: self.now };
        }
        match purpose {
            Purpose::Message { chain, to } => {
                self.communication += whole.len();
                let state = &mut self.chains[chain as usize];
                (state.is_received, state.received) = (true, self.now);
                self.try_exchange(to);
                self.go_on(to);
            }
            Purpose::AllToAll { rank, action } => self.end_all_to_all(rank, action, whole),
            Purpose::Sum { rank } => self.sums[rank as usize] = whole,
        }
    }

    fn end_all_to_all(&mut self, rank: u32, action: Action, span: Span) {
        self.communication += span.len();
        let state = &mut self.ranks[rank as usize];
        state.is_exchanging = false;
        state.all_to_all = span.end;
        let chain = self.chain_id(action);
        let of = &mut self.chains[chain as usize];
        of.end = span.end;
        of.num_left -= 1;
        if of.arrived_in_part(action) {
            // Experts that waited for the chunk go on before the next transfer begins.
            self.go_on(rank);
            self.try_exchange(rank);
            return;
        }
        of.is_pending = false;
        if std::mem::take(&mut of.has_send) {
            let position = of.send_position;
            (of.start, of.end) = (span.end, span.end);
            self.send_result(rank, action, Some(position));
        } else if releases(self.schedule, self.has_messages, action) {
            self.send_result(rank, action, None);
        }
        self.try_exchange(rank);
        self.go_on(rank);
    }
}
