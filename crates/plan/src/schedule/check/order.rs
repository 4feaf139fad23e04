//! The part of the check that carries the schedule out, without times: an order of the work, or ranks that wait for
//! each other.

use super::super::action::{Action, Chain, Entry, Kind};
use super::super::chains::{chain_action, chain_index, chain_len};
use super::rows::{is_from_other_rank, source_stage};
use super::{CheckError, Place, Run, Schedule};

/// An output or a gradient that one rank waits for and another makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::schedule) struct Transfer {
    /// The forward, or the backward.
    pub(in crate::schedule) is_grad: bool,
    /// The stage that makes it.
    pub(in crate::schedule) stage: u32,
    /// The rank that makes it.
    pub(in crate::schedule) rank: u32,
    pub(in crate::schedule) microbatch: u32,
}

/// Returns the output or gradient that an action needs from another rank.
pub(in crate::schedule) fn awaited(schedule: &Schedule, has_messages: bool, action: Action) -> Option<Transfer> {
    let waits = match action.kind {
        Kind::ReceiveInput | Kind::ReceiveGrad => true,
        Kind::Forward | Kind::InputGrad | Kind::Backward => !has_messages,
        Kind::ForwardAttention | Kind::BackwardCombine => {
            !has_messages && chain_index(action, schedule.moe_layers_of(action.stage)) == Some(0)
        }
        _ => false,
    };
    if !waits || !is_from_other_rank(schedule, action) {
        return None;
    }
    let stage = source_stage(schedule, action)?;
    let rank = schedule.rank_of(stage, action.microbatch)?;
    let is_grad = action.kind.chain() == Chain::Backward;
    Some(Transfer { is_grad, stage, rank, microbatch: action.microbatch })
}

/// Returns whether an action provides the input of another stage: it ends a chain, or sends its result.
pub(in crate::schedule) fn releases(schedule: &Schedule, has_messages: bool, action: Action) -> bool {
    let layers = || schedule.moe_layers_of(action.stage);
    match action.kind {
        Kind::SendOutput | Kind::SendGrad => true,
        Kind::Forward | Kind::InputGrad | Kind::Backward => !has_messages,
        Kind::ForwardCombine | Kind::BackwardAttention => {
            let len = chain_len(action.kind.chain(), layers());
            !has_messages && chain_index(action, layers()) == Some(len - 1)
        }
        _ => false,
    }
}

struct Execution<'a> {
    schedule: &'a Schedule,
    has_messages: bool,
    num_microbatches: usize,
    /// The number of entries done, for each rank.
    done: Vec<u32>,
    /// The output or gradient that each rank waits for.
    waits_for: Vec<Option<Transfer>>,
    /// The outputs and gradients that exist, one bit each for each stage and microbatch.
    released: Vec<u8>,
    /// Ranks that can go on.
    ready: Vec<u32>,
}

/// Finds an order in which ranks go through their lists, or ranks that wait for each other.
pub(super) fn find_order(schedule: &Schedule, has_messages: bool) -> Result<Vec<Run>, CheckError> {
    let (num_ranks, num_microbatches) = (schedule.num_ranks(), schedule.num_microbatches());
    let mut execution = Execution {
        schedule,
        has_messages,
        num_microbatches,
        done: vec![0; num_ranks],
        waits_for: vec![None; num_ranks],
        released: vec![0; schedule.num_stages() * num_microbatches],
        ready: (0..num_ranks as u32).rev().collect(),
    };
    let mut runs = Vec::with_capacity(schedule.num_entries());
    while let Some(rank) = execution.ready.pop() {
        let start = execution.done[rank as usize];
        execution.go_on(rank);
        let end = execution.done[rank as usize];
        if end > start {
            runs.push(Run { rank, start, end });
        }
    }
    execution.check_done()?;
    Ok(runs)
}

impl Execution<'_> {
    /// Goes through the list of a rank until it has to wait.
    fn go_on(&mut self, rank: u32) {
        let schedule = self.schedule;
        let entries = &schedule.ranks[rank as usize];
        while let Some(entry) = entries.get(self.done[rank as usize] as usize) {
            self.waits_for[rank as usize] = self.missing_input(entry);
            if self.waits_for[rank as usize].is_some() {
                return;
            }
            self.done[rank as usize] += 1;
            for action in entry.actions() {
                if releases(schedule, self.has_messages, action) {
                    self.release(action);
                }
            }
        }
    }

    fn missing_input(&self, entry: &Entry) -> Option<Transfer> {
        let mut inputs = entry.actions().filter_map(|action| awaited(self.schedule, self.has_messages, action));
        inputs.find(|transfer| self.released[self.id(transfer.stage, transfer.microbatch)] & bit(transfer.is_grad) == 0)
    }

    fn id(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.num_microbatches + microbatch as usize
    }

    fn release(&mut self, action: Action) {
        let is_grad = action.kind.chain() == Chain::Backward;
        let id = self.id(action.stage, action.microbatch);
        self.released[id] |= bit(is_grad);
        let stage = if is_grad { action.stage.checked_sub(1) } else { Some(action.stage + 1) };
        let Some(rank) = stage.and_then(|stage| self.schedule.rank_of(stage, action.microbatch)) else { return };
        let is_awaited = self.waits_for[rank as usize].is_some_and(|transfer| {
            transfer.is_grad == is_grad && transfer.stage == action.stage && transfer.microbatch == action.microbatch
        });
        if is_awaited {
            self.waits_for[rank as usize] = None;
            self.ready.push(rank);
        }
    }

    fn check_done(&self) -> Result<(), CheckError> {
        let place = |rank: usize| {
            let position = self.done[rank] as usize;
            let action = self.schedule.ranks[rank].get(position)?.first();
            Some(Place { rank, position, action })
        };
        for (rank, waits_for) in self.waits_for.iter().enumerate() {
            let Some(transfer) = waits_for else { continue };
            let Transfer { is_grad, stage, rank: other, microbatch } = *transfer;
            let of = Action::new(Kind::Forward, stage, microbatch);
            let needed = self.needed_action(is_grad, of);
            if let (Some(place), Some(holder)) = (place(rank), place(other as usize)) {
                return Err(CheckError::Deadlock { place, needed, holder });
            }
        }
        Ok(())
    }

    /// Returns the action that makes an output or a gradient available.
    fn needed_action(&self, is_grad: bool, of: Action) -> Action {
        if self.has_messages {
            return Action { kind: if is_grad { Kind::SendGrad } else { Kind::SendOutput }, ..of };
        }
        let layers = self.schedule.moe_layers_of(of.stage);
        let chain = if is_grad { Chain::Backward } else { Chain::Forward };
        chain_action(chain, chain_len(chain, layers) - 1, of, layers)
    }
}

fn bit(is_grad: bool) -> u8 {
    if is_grad { 2 } else { 1 }
}
