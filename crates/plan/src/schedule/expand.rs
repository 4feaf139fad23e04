//! Schedules with more of their actions written out: all-to-alls, sends and receives.

use super::action::{Action, Chain, Entry, Kind};
use super::chains::{chain_index, chain_len};
use super::check::{CheckError, Checked, is_from_other_rank, message_peer};
use super::{Schedule, WeightCopy};

impl Checked<'_> {
    /// Returns the schedule with the parts of MoE layers in the place of F, B and W, and dispatch and combine as
    /// actions, where stage s has `moe_layers[s]` such layers.
    ///
    /// In a pair the layers of the forward and of the backward are interleaved, so that each all-to-all of one runs
    /// under a computation of the other; a W of the pair's own backward that follows it fills in (Megatron-Core's
    /// `overlap_moe_expert_parallel_comm` with `delay_wgrad_compute`). For each layer a pair becomes
    ///
    /// ```text
    /// computes:   FA      BE       WE  FE       BA  WA
    /// travels:    BC      FD       BD           FC
    /// ```
    ///
    /// Fails if the schedule is expanded already, or unless there is a number for each stage.
    pub fn with_all_to_alls(&self, moe_layers: &[u16]) -> Result<Schedule, CheckError> {
        let schedule = self.schedule();
        let (given, num_stages) = (moe_layers.len(), schedule.num_stages());
        if given != num_stages || !schedule.moe_layers.is_empty() || self.has_messages {
            let problem = format!("MoE layers of {given} stages for a schedule of {num_stages} stages");
            let must = "give a number for each stage of a schedule without all-to-alls, sends and receives";
            return Err(CheckError::Shape(format!("{problem}: {must}")));
        }
        let expand = |entries: &Vec<Entry>| {
            let mut out = Expansion { moe_layers, actions: Vec::with_capacity(entries.len() * 4) };
            let mut entries = entries.iter().peekable();
            while let Some(entry) = entries.next() {
                match *entry {
                    Entry::One(action) => out.push(action),
                    Entry::Pair(forward, backward) => {
                        let weight = Entry::One(Action { kind: Kind::WeightGrad, ..backward });
                        let fills =
                            backward.kind == Kind::Backward || entries.next_if(|next| **next == weight).is_some();
                        out.push_pair(forward, backward, fills);
                    }
                }
            }
            out.actions.into_iter().map(Entry::One).collect()
        };
        let ranks = schedule.ranks.iter().map(expand).collect();
        let moe_layers = if moe_layers.iter().all(|&layers| layers == 0) { Vec::new() } else { moe_layers.to_vec() };
        Ok(Schedule { moe_layers, ranks, ..copy_head(schedule) })
    }

    /// Returns the schedule with sends and receives as actions: a send right after its data is computed, a receive
    /// right before its data is needed.
    #[must_use]
    pub fn with_messages(&self) -> Schedule {
        let schedule = self.schedule();
        if self.has_messages {
            return schedule.clone();
        }
        let expand = |entries: &Vec<Entry>| {
            let mut out = Vec::with_capacity(entries.len() * 2);
            for entry in entries {
                let receives =
                    entry.actions().filter(|&action| begins(schedule, action) && is_from_other_rank(schedule, action));
                out.extend(receives.map(|action| Entry::One(message(action, Kind::ReceiveInput, Kind::ReceiveGrad))));
                out.push(*entry);
                let sends = entry.actions().filter(|&action| ends(schedule, action));
                let sends = sends.map(|action| message(action, Kind::SendOutput, Kind::SendGrad));
                out.extend(sends.filter(|&send| message_peer(schedule, send).is_some()).map(Entry::One));
            }
            out
        };
        Schedule { ranks: schedule.ranks.iter().map(expand).collect(), ..copy_head(schedule) }
    }
}

fn copy_head(schedule: &Schedule) -> Schedule {
    let copies: Vec<WeightCopy> = schedule.copies.clone();
    Schedule { name: schedule.name.clone(), copies, moe_layers: schedule.moe_layers.clone(), ranks: Vec::new() }
}

fn message(action: Action, forward: Kind, backward: Kind) -> Action {
    let kind = if action.kind.chain() == Chain::Forward { forward } else { backward };
    Action::new(kind, action.stage, action.microbatch)
}

fn begins(schedule: &Schedule, action: Action) -> bool {
    action.kind.chain() != Chain::Weight && chain_index(action, schedule.moe_layers_of(action.stage)) == Some(0)
}

fn ends(schedule: &Schedule, action: Action) -> bool {
    let layers = schedule.moe_layers_of(action.stage);
    let chain = action.kind.chain();
    chain != Chain::Weight && chain_index(action, layers).map(|index| index + 1) == Some(chain_len(chain, layers))
}

struct Expansion<'a> {
    moe_layers: &'a [u16],
    actions: Vec<Action>,
}

impl Expansion<'_> {
    fn layers(&self, action: Action) -> u16 {
        self.moe_layers[action.stage as usize]
    }

    fn part(&mut self, of: Action, layer: u16, kind: Kind) {
        self.actions.push(Action::part(kind, of.stage, of.microbatch, layer));
    }

    fn push(&mut self, action: Action) {
        let layers = self.layers(action);
        match action.kind.chain() {
            _ if layers == 0 => self.actions.push(action),
            Chain::Forward => {
                for layer in 0..layers {
                    self.push_forward_layer(action, layer);
                }
            }
            Chain::Backward => self.push_backward(action, action.kind == Kind::Backward),
            Chain::Weight => {
                for layer in (0..layers).rev() {
                    self.part(action, layer, Kind::WeightExperts);
                    self.part(action, layer, Kind::WeightAttention);
                }
            }
        }
    }

    fn push_forward_layer(&mut self, of: Action, layer: u16) {
        use Kind::{ForwardAttention, ForwardCombine, ForwardDispatch, ForwardExperts};
        for kind in [ForwardAttention, ForwardDispatch, ForwardExperts, ForwardCombine] {
            self.part(of, layer, kind);
        }
    }

    /// Pushes a backward; `fills` puts the weights' gradients of the experts under the all-to-all that follows them,
    /// and those of attention under that of the next layer.
    fn push_backward(&mut self, of: Action, fills: bool) {
        for layer in (0..self.layers(of)).rev() {
            self.push_backward_layer(of, layer, fills);
        }
        if fills {
            self.part(of, 0, Kind::WeightAttention);
        }
    }

    fn push_backward_layer(&mut self, of: Action, layer: u16, fills: bool) {
        self.begin_backward_layer(of, layer, fills);
        self.part(of, layer, Kind::BackwardExperts);
        self.part(of, layer, Kind::BackwardDispatch);
        if fills {
            self.part(of, layer, Kind::WeightExperts);
        }
        self.part(of, layer, Kind::BackwardAttention);
    }

    fn begin_backward_layer(&mut self, of: Action, layer: u16, fills: bool) {
        self.part(of, layer, Kind::BackwardCombine);
        if fills && layer + 1 < self.layers(of) {
            self.part(of, layer + 1, Kind::WeightAttention);
        }
    }

    fn push_pair(&mut self, forward: Action, backward: Action, fills: bool) {
        let (num_forward, num_backward) = (self.layers(forward), self.layers(backward));
        let whole = Action { kind: if fills { Kind::Backward } else { Kind::InputGrad }, ..backward };
        if num_forward == 0 || num_backward == 0 {
            self.push(whole);
            self.push(forward);
            return;
        }
        for slot in 0..num_forward.max(num_backward) {
            match (slot < num_forward, num_backward.checked_sub(slot + 1)) {
                (true, Some(layer)) => {
                    let forward = Layer { of: forward, layer: slot };
                    self.push_both_layers(forward, Layer { of: backward, layer }, fills);
                }
                (true, None) => self.push_forward_layer(forward, slot),
                (false, Some(layer)) => self.push_backward_layer(backward, layer, fills),
                (false, None) => {}
            }
        }
        if fills {
            self.part(backward, 0, Kind::WeightAttention);
        }
    }
    fn push_both_layers(&mut self, forward: Layer, backward: Layer, fills: bool) {
        self.begin_backward_layer(backward.of, backward.layer, fills);
        self.part(forward.of, forward.layer, Kind::ForwardAttention);
        self.part(forward.of, forward.layer, Kind::ForwardDispatch);
        self.part(backward.of, backward.layer, Kind::BackwardExperts);
        self.part(backward.of, backward.layer, Kind::BackwardDispatch);
        if fills {
            self.part(backward.of, backward.layer, Kind::WeightExperts);
        }
        self.part(forward.of, forward.layer, Kind::ForwardExperts);
        self.part(forward.of, forward.layer, Kind::ForwardCombine);
        self.part(backward.of, backward.layer, Kind::BackwardAttention);
    }
}

/// A MoE layer of the stage of an action.
#[derive(Clone, Copy)]
struct Layer {
    of: Action,
    layer: u16,
}
