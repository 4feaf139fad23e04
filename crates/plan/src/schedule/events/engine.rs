//! The ranks: each goes through its list, computes, and waits for results.

use std::collections::{BinaryHeap, VecDeque};

use super::super::Schedule;
use super::super::action::{Action, Chain, Entry, Kind};
use super::super::chains::chain_index;
use super::super::check::{Checked, awaited, is_from_other_rank, message_peer, releases, source_stage};
use super::super::makespan::{Arrival, Cost, Span, Timeline, cost_of};
use super::super::times::Times;
use super::chunks::ChunkedExperts;
use super::under_way::{Event, Happening, ListPlace, Purpose, UnderWay};
use super::{LinkRecord, Simulation, Transfers};
use crate::network::{LevelBytes, LinkUse, Shares};

/// The state of a microbatch's forward or backward in a stage.
#[derive(Clone, Copy, Default)]
pub(super) struct ChainState {
    /// When the latest action started and ended, as the timeline has it.
    pub(super) start: f64,
    pub(super) end: f64,
    /// True while an all-to-all of the chain waits or is under way.
    pub(super) is_pending: bool,
    /// The chunks of its all-to-alls that wait or are under way.
    pub(super) num_left: u16,
    /// The experts of its layer, if they are computed chunk by chunk.
    pub(super) in_chunks: Option<ChunkedExperts>,
    /// True if a send follows as soon as nothing is pending.
    pub(super) has_send: bool,
    /// The place of that send in its rank's list.
    pub(super) send_position: u32,
    /// True once the message to the next stage has arrived.
    pub(super) is_received: bool,
    pub(super) sent: f64,
    pub(super) received: f64,
}

/// The chain that a result comes from, and how.
#[derive(Clone, Copy)]
struct Input {
    chain: u32,
    is_message: bool,
}

/// An all-to-all, or a chunk of it, that waits for its turn.
#[derive(Clone, Copy)]
pub(super) struct Waiting {
    pub(super) action: Action,
    pub(super) position: u32,
    /// False of the chunks that follow another one.
    pub(super) is_first: bool,
}

#[derive(Default)]
pub(super) struct RankState {
    pub(super) position: u32,
    /// When the rank can go on.
    pub(super) now: f64,
    pub(super) is_computing: bool,
    pub(super) is_done: bool,
    pub(super) first: Option<f64>,
    pub(super) busy: f64,
    pub(super) queue: VecDeque<Waiting>,
    pub(super) is_exchanging: bool,
    /// When its last all-to-all is done.
    pub(super) all_to_all: f64,
}

pub(super) struct Engine<'a, 'b> {
    pub(super) schedule: &'a Schedule,
    pub(super) has_messages: bool,
    pub(super) times: &'a Times,
    pub(super) transfers: &'b Transfers,
    pub(super) num_microbatches: usize,
    pub(super) ranks: Vec<RankState>,
    pub(super) chains: Vec<ChainState>,
    pub(super) spans: Vec<Vec<Span>>,
    pub(super) under_way: Vec<UnderWay>,
    pub(super) free: Vec<u32>,
    /// The transfer of each flow.
    pub(super) of_flow: Vec<u32>,
    pub(super) shares: Shares,
    pub(super) events: BinaryHeap<Event>,
    pub(super) num_events: u64,
    pub(super) number: u64,
    pub(super) sums: Vec<Span>,
    pub(super) levels: Vec<LevelBytes>,
    pub(super) communication: f64,
    pub(super) exposed: f64,
    pub(super) now: f64,
}

impl<'a, 'b> Engine<'a, 'b> {
    pub(super) fn new(checked: &Checked<'a>, times: &'a Times, transfers: &'b Transfers) -> Self {
        let schedule = checked.schedule;
        let num_microbatches = schedule.num_microbatches();
        Self {
            schedule,
            has_messages: checked.has_messages,
            times,
            transfers,
            num_microbatches,
            ranks: schedule.ranks.iter().map(|_| RankState::default()).collect(),
            chains: vec![ChainState::default(); 2 * schedule.num_stages() * num_microbatches],
            spans: schedule.ranks.iter().map(|entries| vec![Span::default(); entries.len()]).collect(),
            under_way: Vec::new(),
            free: Vec::new(),
            of_flow: Vec::new(),
            shares: Shares::new(transfers.traffic.num_links()),
            events: BinaryHeap::new(),
            num_events: 0,
            number: 0,
            sums: if transfers.sums.is_empty() { Vec::new() } else { vec![Span::default(); schedule.num_ranks()] },
            levels: vec![LevelBytes::default(); transfers.traffic.level_names.len()],
            communication: 0.0,
            exposed: 0.0,
            now: 0.0,
        }
    }

    pub(super) fn run(&mut self) {
        for rank in 0..self.ranks.len() as u32 {
            self.go_on(rank);
        }
        while let Some(event) = self.events.pop() {
            self.now = event.time;
            match event.of {
                Happening::Computed(rank) => {
                    self.num_events += 1;
                    self.end_computation(rank);
                }
                Happening::Passed { transfer, version } => {
                    // A transfer whose share has changed has another event.
                    if self.under_way[transfer as usize].version == version {
                        self.num_events += 1;
                        self.pass(transfer);
                    }
                }
            }
        }
    }

    pub(super) fn push(&mut self, time: f64, of: Happening) {
        self.number += 1;
        self.events.push(Event { time, number: self.number, of });
    }

    pub(super) fn chain_id(&self, action: Action) -> u32 {
        let id = action.stage as usize * self.num_microbatches + action.microbatch as usize;
        (2 * id + usize::from(action.kind.chain() == Chain::Backward)) as u32
    }

    fn chain(&self, id: u32) -> &ChainState {
        &self.chains[id as usize]
    }

    fn layer_index(&self, action: Action) -> Option<u32> {
        chain_index(action, self.schedule.moe_layers_of(action.stage))
    }

    /// Returns what an action waits for, if anything.
    fn input(&self, action: Action) -> Option<Input> {
        if action.kind.chain() == Chain::Weight {
            return None;
        }
        if let Some(transfer) = awaited(self.schedule, self.has_messages, action) {
            let chain = self.chain_id(Action { stage: transfer.stage, ..action });
            return Some(Input { chain, is_message: true });
        }
        if action.kind.is_part() && self.layer_index(action) != Some(0) {
            return Some(Input { chain: self.chain_id(action), is_message: false });
        }
        if is_from_other_rank(self.schedule, action) {
            return None;
        }
        let source = match source_stage(self.schedule, action) {
            Some(stage) => Action { stage, ..action },
            None if action.kind.chain() == Chain::Backward => Action { kind: Kind::Forward, ..action },
            None => return None,
        };
        Some(Input { chain: self.chain_id(source), is_message: false })
    }

    fn is_there(&self, input: Option<Input>) -> bool {
        input.is_none_or(|input| {
            let chain = self.chain(input.chain);
            if input.is_message { chain.is_received } else { !chain.is_pending }
        })
    }

    fn arrival(&self, input: Option<Input>) -> Option<Arrival> {
        input.map(|input| {
            let chain = self.chain(input.chain);
            let (sent, at) = if input.is_message { (chain.sent, chain.received) } else { (chain.start, chain.end) };
            Arrival { sent, at }
        })
    }

    /// Goes through the list of a rank until it computes or has to wait.
    pub(super) fn go_on(&mut self, rank: u32) {
        let schedule = self.schedule;
        let entries = &schedule.ranks[rank as usize];
        while !self.ranks[rank as usize].is_computing {
            let position = self.ranks[rank as usize].position;
            let Some(&entry) = entries.get(position as usize) else {
                self.finish(rank);
                return;
            };
            let first = entry.first();
            match entry {
                Entry::One(action) if action.kind.is_all_to_all() => self.queue_all_to_all(rank, position, action),
                Entry::One(action) if matches!(action.kind, Kind::SendOutput | Kind::SendGrad) => {
                    self.send_when_ready(rank, position, action);
                }
                Entry::One(action) if action.kind.is_message() => {
                    if !self.receive(rank, position, action) {
                        return;
                    }
                }
                _ => {
                    let with = if let Entry::Pair(_, backward) = entry { Some(backward) } else { None };
                    if !self.start_computation(rank, first, with) {
                        return;
                    }
                    continue;
                }
            }
            self.ranks[rank as usize].position += 1;
        }
    }

    /// Starts a computation whose inputs are there; returns whether they are.
    fn start_computation(&mut self, rank: u32, action: Action, with: Option<Action>) -> bool {
        if let Some(chunk) = self.experts_in_chunks(action) {
            return self.start_chunk(rank, action, chunk);
        }
        let inputs = [self.input(action), with.and_then(|action| self.input(action))];
        if !inputs.iter().all(|&input| self.is_there(input)) {
            return false;
        }
        let arrivals = inputs.into_iter().filter_map(|input| self.arrival(input));
        let latest = arrivals.max_by(|a, b| a.at.total_cmp(&b.at));
        let start = self.wait(rank, latest);
        let own = cost_of(self.schedule, self.times, action);
        let Cost { seconds, communication, exposed } = match with {
            Some(backward) => own.joined(cost_of(self.schedule, self.times, backward), self.times.pair),
            None => own,
        };
        self.communication += communication;
        self.exposed += exposed;
        let state = &mut self.ranks[rank as usize];
        state.first.get_or_insert(start);
        state.busy += seconds;
        state.is_computing = true;
        let (position, end) = (state.position, start + seconds);
        self.spans[rank as usize][position as usize] = Span { start, end };
        self.push(end, Happening::Computed(rank));
        true
    }

    /// Waits until a result is available; returns the time at which the rank goes on.
    pub(super) fn wait(&mut self, rank: u32, arrival: Option<Arrival>) -> f64 {
        let now = self.ranks[rank as usize].now;
        match arrival {
            Some(Arrival { sent, at }) if at > now => {
                self.exposed += at - now.max(sent);
                self.ranks[rank as usize].now = at;
                at
            }
            _ => now,
        }
    }

    fn end_computation(&mut self, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        let position = state.position;
        let first = self.schedule.ranks[rank as usize][position as usize].first();
        if let Some(chunk) = self.experts_in_chunks(first) {
            return self.end_chunk(rank, first, chunk);
        }
        let state = &mut self.ranks[rank as usize];
        state.position += 1;
        state.is_computing = false;
        state.now = self.now;
        for action in self.schedule.ranks[rank as usize][position as usize].actions() {
            if action.kind.chain() == Chain::Weight {
                continue;
            }
            let chain = self.chain_id(action);
            let state = &mut self.chains[chain as usize];
            (state.start, state.end) = (self.now, self.now);
            if releases(self.schedule, self.has_messages, action) {
                self.send_result(rank, action, None);
            }
        }
        self.try_exchange(rank);
        self.go_on(rank);
    }

    /// Sends the result of a chain to the rank of the next stage, if that is another one.
    pub(super) fn send_result(&mut self, rank: u32, action: Action, position: Option<u32>) {
        let kind = if action.kind.chain() == Chain::Forward { Kind::SendOutput } else { Kind::SendGrad };
        let send = Action::new(kind, action.stage, action.microbatch);
        let Some(to) = message_peer(self.schedule, send) else { return };
        let chain = self.chain_id(action);
        self.chains[chain as usize].sent = self.now;
        let messages = self.transfers.messages.get(rank as usize);
        let id = messages.and_then(|messages| messages.iter().find(|&&(of, _)| of == to)).map(|&(_, id)| id);
        let span = position.map(|position| ListPlace { rank, position });
        self.start_transfer(Purpose::Message { chain, to }, id, self.times.message, span);
    }

    fn send_when_ready(&mut self, rank: u32, position: u32, action: Action) {
        let chain = self.chain_id(action);
        let state = &mut self.chains[chain as usize];
        if state.is_pending {
            (state.has_send, state.send_position) = (true, position);
            return;
        }
        (state.start, state.end) = (self.now, self.now);
        self.send_result(rank, action, Some(position));
    }

    /// Receives a message if it has arrived; returns whether it has.
    fn receive(&mut self, rank: u32, position: u32, action: Action) -> bool {
        let input = self.input(action);
        if !self.is_there(input) {
            return false;
        }
        let start = self.ranks[rank as usize].now;
        let end = self.wait(rank, self.arrival(input));
        self.spans[rank as usize][position as usize] = Span { start, end };
        true
    }

    /// Starts the next all-to-all of a rank, if it can.
    pub(super) fn try_exchange(&mut self, rank: u32) {
        let state = &self.ranks[rank as usize];
        let Some(&Waiting { action, position, is_first }) = state.queue.front() else { return };
        let index = self.layer_index(action);
        let input = if index == Some(0) { self.input(action) } else { None };
        if state.is_exchanging || !self.is_there(input) {
            return;
        }
        let arrival = self.arrival(input);
        let chain = self.chain_id(action);
        let of = self.times.stage(action.stage);
        let layers = f64::from(self.schedule.moe_layers_of(action.stage).max(1));
        let is_dispatch = matches!(action.kind, Kind::ForwardDispatch | Kind::BackwardDispatch);
        let seconds = if is_dispatch { of.dispatch } else { of.combine } / layers / f64::from(self.num_chunks());
        let state = &mut self.ranks[rank as usize];
        state.queue.pop_front();
        state.is_exchanging = true;
        state.first.get_or_insert(self.now);
        if is_first {
            self.chains[chain as usize].start = arrival.map_or(self.now, |arrival| arrival.sent);
        }
        let id = self.transfers.all_to_alls.get(rank as usize).copied().flatten().map(|of| of.of(action.kind));
        self.start_transfer(Purpose::AllToAll { rank, action }, id, seconds, Some(ListPlace { rank, position }));
    }

    /// Begins what follows a rank's list, once all of its all-to-alls are done.
    fn finish(&mut self, rank: u32) {
        let state = &mut self.ranks[rank as usize];
        if state.is_done || state.is_exchanging || !state.queue.is_empty() {
            return;
        }
        state.is_done = true;
        if !self.sums.is_empty() {
            let id = self.transfers.sums[rank as usize];
            self.start_transfer(Purpose::Sum { rank }, id, 0.0, None);
        }
    }

    pub(super) fn into_simulation(self) -> Simulation<'a> {
        let end = |state: &RankState| state.now.max(state.all_to_all);
        let span = |state: &RankState| end(state) - state.first.unwrap_or(0.0);
        let makespan = self.ranks.iter().map(end).fold(0.0, f64::max);
        let updated = |(rank, sum): (usize, &Span)| sum.end + self.transfers.update_s.get(rank).copied().unwrap_or(0.0);
        let step = self.sums.iter().enumerate().map(updated).fold(makespan, f64::max);
        let uses = self.shares.link_uses(self.now);
        let record =
            |(of, &level): (&LinkUse, &u8)| LinkRecord { level: level.into(), busy_s: of.busy_s, most: of.most };
        Simulation {
            sums: self.sums,
            step,
            levels: self.levels,
            links: uses.iter().zip(&self.transfers.traffic.levels).map(record).collect(),
            num_events: self.num_events,
            timeline: Timeline {
                schedule: self.schedule,
                has_messages: self.has_messages,
                times: self.times,
                makespan,
                longest_span: self.ranks.iter().map(span).fold(0.0, f64::max),
                busy: self.ranks.iter().map(|state| state.busy).collect(),
                spans: self.spans,
                communication: self.communication,
                exposed: self.exposed,
            },
        }
    }
}
