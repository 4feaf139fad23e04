//! The timeline of a schedule: start and end of each action, by given times.
//!
//! The check has found an order in which every run of a list comes after what it waits for, so one pass over the
//! actions finds all times: an action starts when its rank is free and its inputs are there. See [the module](super)
//! for the exact rules.

use super::Schedule;
use super::action::{Action, Chain, Entry, Kind};
use super::chains::chain_index;
use super::check::{Change, Checked, awaited, is_from_other_rank, source_stage};
use super::times::{PairTime, Times, TimesError};

/// The time of an entry: of a computation while the rank computes, of an all-to-all or a send while it is under way,
/// of a receive while the rank waits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// The start.
    pub start: f64,
    /// The end.
    pub end: f64,
}

impl Span {
    /// Returns the length.
    #[must_use]
    pub fn len(&self) -> f64 {
        self.end - self.start
    }

    /// Returns whether the span has no length.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }
}

/// The times of all actions of a schedule.
#[derive(Clone, Debug)]
pub struct Timeline<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) has_messages: bool,
    pub(super) times: &'a Times,
    /// The spans of the entries of each rank.
    pub spans: Vec<Vec<Span>>,
    /// The time from the start of the first action to the end of the last one.
    pub makespan: f64,
    /// The longest time that a rank takes from the start of its own first action to the end of its own last one.
    ///
    /// Zero-bubble papers count so, because a rank that starts late can also end late if steps follow each other.
    pub longest_span: f64,
    /// The time that each rank is in its computations.
    pub busy: Vec<f64>,
    /// The time of all messages and all-to-alls.
    pub communication: f64,
    /// The part of it during which a rank stood idle waiting for it.
    pub exposed: f64,
}

impl Timeline<'_> {
    /// Returns the share of the makespan in which ranks do not compute, on average.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let busy: f64 = self.busy.iter().sum::<f64>() / self.busy.len().max(1) as f64;
        if self.makespan > 0.0 { (1.0 - busy / self.makespan).max(0.0) } else { 0.0 }
    }

    /// Returns the bubble rate of the zero-bubble paper: the share of the longest span that the busiest rank does not
    /// compute.
    #[must_use]
    pub fn span_bubble(&self) -> f64 {
        let busy = self.busy.iter().copied().fold(0.0, f64::max);
        if self.longest_span > 0.0 { (1.0 - busy / self.longest_span).max(0.0) } else { 0.0 }
    }

    /// Returns the share of communication that no rank waited for; `None` if there is no communication.
    #[must_use]
    pub fn hidden(&self) -> Option<f64> {
        (self.communication > 0.0).then(|| 1.0 - self.exposed / self.communication)
    }

    /// Returns the memory of a rank over time: after each change its time and what the rank holds from then on.
    #[must_use]
    pub fn memory(&self, rank: usize) -> Vec<(f64, f64)> {
        let mut changes = Vec::new();
        for (entry, span) in self.schedule.ranks[rank].iter().zip(&self.spans[rank]) {
            for action in entry.actions() {
                let change = Change::of(action, self.schedule.moe_layers_of(action.stage));
                let (begin, end) = (change.begin(self.times, action.stage), change.end(self.times, action.stage));
                for (time, amount) in [(span.start, begin), (span.end, end)] {
                    if amount != 0.0 {
                        changes.push((time, amount));
                    }
                }
            }
        }
        changes.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut held = 0.0;
        for (_, amount) in &mut changes {
            held += *amount;
            *amount = held;
        }
        changes
    }
}

impl<'a> Checked<'a> {
    /// Computes the timeline for given times.
    pub fn timeline(&self, times: &'a Times) -> Result<Timeline<'a>, TimesError> {
        times.check(self.schedule.num_stages())?;
        let mut clock = Clock::new(self, times);
        for run in &self.runs {
            for position in run.start..run.end {
                clock.advance(run.rank as usize, position as usize);
            }
        }
        Ok(clock.into_timeline())
    }
}

/// The times of a rank as it goes through its list.
#[derive(Clone, Copy, Default)]
struct RankClock {
    /// When the rank can go on.
    now: f64,
    /// When its last all-to-all is done.
    all_to_all: f64,
    first: Option<f64>,
    busy: f64,
}

/// When the latest action of a chain is done, and when it started.
#[derive(Clone, Copy, Default)]
struct ChainClock {
    start: f64,
    end: f64,
}

struct Clock<'a> {
    schedule: &'a Schedule,
    has_messages: bool,
    times: &'a Times,
    num_microbatches: usize,
    ranks: Vec<RankClock>,
    /// For each stage and microbatch, the latest action of its forward and of its backward, and the send of their
    /// results, if any.
    chains: Vec<[ChainClock; 2]>,
    spans: Vec<Vec<Span>>,
    communication: f64,
    exposed: f64,
}

/// The time at which a result is available, and the start of its communication, if it is communicated.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    pub(super) sent: f64,
    pub(super) at: f64,
}

impl<'a> Clock<'a> {
    fn new(checked: &Checked<'a>, times: &'a Times) -> Self {
        let schedule = checked.schedule;
        let num_microbatches = schedule.num_microbatches();
        Self {
            schedule,
            has_messages: checked.has_messages,
            times,
            num_microbatches,
            ranks: vec![RankClock::default(); schedule.num_ranks()],
            chains: vec![[ChainClock::default(); 2]; schedule.num_stages() * num_microbatches],
            spans: schedule.ranks.iter().map(|entries| Vec::with_capacity(entries.len())).collect(),
            communication: 0.0,
            exposed: 0.0,
        }
    }

    fn advance(&mut self, rank: usize, position: usize) {
        let span = match self.schedule.ranks[rank][position] {
            Entry::Pair(forward, backward) => self.compute(rank, forward, Some(backward)),
            Entry::One(action) if action.kind.is_all_to_all() => self.start_all_to_all(rank, action),
            Entry::One(action) if action.kind.is_message() => self.message(rank, action),
            Entry::One(action) => self.compute(rank, action, None),
        };
        self.spans[rank].push(span);
    }

    fn chain(&mut self, action: Action) -> &mut ChainClock {
        let id = action.stage as usize * self.num_microbatches + action.microbatch as usize;
        &mut self.chains[id][usize::from(action.kind.chain() == Chain::Backward)]
    }

    /// Returns when the input of a computation is available.
    fn arrival(&mut self, action: Action) -> Option<Arrival> {
        if action.kind.chain() == Chain::Weight {
            return None;
        }
        if let Some(transfer) = awaited(self.schedule, self.has_messages, action) {
            let made = *self.chain(Action { stage: transfer.stage, ..action });
            self.communication += self.times.message;
            return Some(Arrival { sent: made.end, at: made.end + self.times.message });
        }
        if !action.kind.is_part() || chain_index(action, self.schedule.moe_layers_of(action.stage)) == Some(0) {
            return self.local_arrival(action);
        }
        // Experts and the layer after wait for the all-to-all before; other parts follow a computation of the same
        // rank.
        let before = *self.chain(action);
        Some(Arrival { sent: before.start, at: before.end })
    }

    /// Returns when the stage before on the same rank is done: its last all-to-all may still be under way. Of the
    /// last stage's backward that is its own forward.
    fn local_arrival(&mut self, action: Action) -> Option<Arrival> {
        if is_from_other_rank(self.schedule, action) {
            return None; // received by an action of its own
        }
        let source = match source_stage(self.schedule, action) {
            Some(stage) => Action { stage, ..action },
            None if action.kind.chain() == Chain::Backward => Action { kind: Kind::Forward, ..action },
            None => return None,
        };
        let before = *self.chain(source);
        Some(Arrival { sent: before.start, at: before.end })
    }

    /// Waits until a result is available; returns the time at which the rank goes on.
    fn wait(&mut self, rank: usize, arrival: Option<Arrival>) -> f64 {
        let now = self.ranks[rank].now;
        match arrival {
            Some(Arrival { sent, at }) if at > now => {
                self.exposed += at - now.max(sent);
                self.ranks[rank].now = at;
                at
            }
            _ => now,
        }
    }

    fn compute(&mut self, rank: usize, action: Action, with: Option<Action>) -> Span {
        let inputs = [self.arrival(action), with.and_then(|action| self.arrival(action))];
        let latest = inputs.into_iter().flatten().max_by(|a, b| a.at.total_cmp(&b.at));
        let start = self.wait(rank, latest);
        let own = self.cost(action);
        let cost = match with {
            Some(backward) => own.joined(self.cost(backward), self.times.pair),
            None => own,
        };
        let span = Span { start, end: start + cost.seconds };
        self.communication += cost.communication;
        self.exposed += cost.exposed;
        for action in std::iter::once(action).chain(with) {
            if action.kind.chain() != Chain::Weight {
                *self.chain(action) = ChainClock { start: span.end, end: span.end };
            }
        }
        let clock = &mut self.ranks[rank];
        clock.first.get_or_insert(start);
        clock.busy += cost.seconds;
        clock.now = span.end;
        span
    }

    fn start_all_to_all(&mut self, rank: usize, action: Action) -> Span {
        let index = chain_index(action, self.schedule.moe_layers_of(action.stage));
        let is_first = index == Some(0);
        let input = if is_first { self.arrival(action) } else { None };
        let layers = f64::from(self.schedule.moe_layers_of(action.stage).max(1));
        let of = self.times.stage(action.stage);
        let is_dispatch = matches!(action.kind, Kind::ForwardDispatch | Kind::BackwardDispatch);
        let seconds = if is_dispatch { of.dispatch } else { of.combine } / layers;
        let before = if is_first { 0.0 } else { self.chain(action).end };
        let clock = &mut self.ranks[rank];
        let start = clock.now.max(clock.all_to_all).max(before).max(input.map_or(0.0, |input| input.at));
        let span = Span { start, end: start + seconds };
        clock.all_to_all = span.end;
        clock.first.get_or_insert(start);
        self.communication += seconds;
        let under_way_since = input.map_or(start, |input| input.sent);
        *self.chain(action) = ChainClock { start: under_way_since, end: span.end };
        span
    }

    fn message(&mut self, rank: usize, action: Action) -> Span {
        if matches!(action.kind, Kind::SendOutput | Kind::SendGrad) {
            let now = self.ranks[rank].now;
            let chain = self.chain(action);
            let start = now.max(chain.end);
            *chain = ChainClock { start, end: start };
            return Span { start, end: start + self.times.message };
        }
        let start = self.ranks[rank].now;
        let arrival = self.arrival(action);
        Span { start, end: self.wait(rank, arrival) }
    }

    fn cost(&self, action: Action) -> Cost {
        cost_of(self.schedule, self.times, action)
    }

    fn into_timeline(self) -> Timeline<'a> {
        let end = |clock: &RankClock| clock.now.max(clock.all_to_all);
        let span = |clock: &RankClock| end(clock) - clock.first.unwrap_or(0.0);
        Timeline {
            schedule: self.schedule,
            has_messages: self.has_messages,
            times: self.times,
            makespan: self.ranks.iter().map(end).fold(0.0, f64::max),
            longest_span: self.ranks.iter().map(span).fold(0.0, f64::max),
            busy: self.ranks.iter().map(|clock| clock.busy).collect(),
            spans: self.spans,
            communication: self.communication,
            exposed: self.exposed,
        }
    }
}

/// Returns the time of a computation by itself, with the all-to-alls inside it.
pub(super) fn cost_of(schedule: &Schedule, times: &Times, action: Action) -> Cost {
    let of = times.stage(action.stage);
    let whole = match action.kind.chain() {
        Chain::Forward => of.forward,
        Chain::Weight => of.weight_grad,
        Chain::Backward if action.kind == Kind::Backward => of.input_grad + of.weight_grad,
        Chain::Backward => of.input_grad,
    };
    if action.kind.is_part() {
        let layers = f64::from(schedule.moe_layers_of(action.stage).max(1));
        let experts = matches!(action.kind, Kind::ForwardExperts | Kind::BackwardExperts | Kind::WeightExperts);
        let share = if experts { of.expert_share } else { 1.0 - of.expert_share };
        return Cost { seconds: whole * share / layers, communication: 0.0, exposed: 0.0 };
    }
    let communication = if action.kind.chain() == Chain::Weight { 0.0 } else { of.dispatch + of.combine };
    Cost { seconds: whole + communication, communication, exposed: communication }
}

/// The time of a computation, and that of the all-to-alls inside it.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    pub(super) seconds: f64,
    pub(super) communication: f64,
    pub(super) exposed: f64,
}

impl Cost {
    /// Returns the cost of an overlapped pair. The time that a pair saves counts as hidden communication.
    pub(super) fn joined(self, other: Self, pair: PairTime) -> Self {
        let sum = self.seconds + other.seconds;
        let seconds = match pair {
            PairTime::Sum => sum,
            PairTime::Share(share) => sum * share,
            PairTime::Fixed(seconds) => seconds,
        };
        let communication = self.communication + other.communication;
        Self { seconds, communication, exposed: (communication - (sum - seconds).max(0.0)).max(0.0) }
    }
}
