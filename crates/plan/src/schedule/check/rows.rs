//! The part of the check that looks at one rank's list at a time.

use std::collections::HashSet;

use super::super::action::{Action, Chain, Entry, Kind};
use super::super::chains::{backward_before_weight, chain_action, chain_index, chain_len};
use super::super::text::{MAX_COPIES, is_pair};
use super::{Change, CheckError, Peaks, Place, Schedule};

/// Fails unless copies, stages and ranks fit each other, and there are at least as many actions as needed.
pub(super) fn check_shape(schedule: &Schedule) -> Result<(), CheckError> {
    let shape = |problem: String| Err(CheckError::Shape(problem));
    let (num_ranks, num_stages) = (schedule.num_ranks(), schedule.num_stages());
    let name = &schedule.name;
    if name.is_empty() || name.trim() != name || name.contains(|c: char| c == '#' || c.is_control()) {
        return shape(format!("the name is {name:?}: must be one line without # and spaces around it"));
    }
    if num_ranks == 0 || num_stages == 0 {
        return shape(format!("{num_ranks} ranks and {num_stages} stages: there must be at least 1 of each"));
    }
    if schedule.copies.len() > MAX_COPIES {
        return shape(format!("{} copies of the weights: there can be at most {MAX_COPIES}", schedule.copies.len()));
    }
    for (copy, of) in schedule.copies.iter().enumerate() {
        if of.stage_ranks.len() != num_stages || of.num_microbatches == 0 {
            let (stages, microbatches) = (of.stage_ranks.len(), of.num_microbatches);
            let must = format!("must have {num_stages} stages and at least 1 microbatch");
            return shape(format!("copy {copy} has {stages} stages and {microbatches} microbatches: {must}"));
        }
        if let Some(stage) = of.stage_ranks.iter().position(|&rank| rank as usize >= num_ranks) {
            let rank = of.stage_ranks[stage];
            return shape(format!(
                "stage {stage} is on rank {rank}: the schedule has {num_ranks} ranks, counted from 0"
            ));
        }
    }
    if !schedule.moe_layers.is_empty() && schedule.moe_layers.len() != num_stages {
        let given = schedule.moe_layers.len();
        return shape(format!("MoE layers of {given} stages: the schedule has {num_stages} stages"));
    }
    let total: u64 = schedule.copies.iter().map(|copy| u64::from(copy.num_microbatches)).sum();
    if total > u64::from(u32::MAX) {
        return shape(format!("{total} microbatches: there can be at most {}", u32::MAX));
    }
    check_enough(schedule)
}

/// Fails if a rank has fewer actions than it needs at least, before anything is allocated in proportion to the
/// microbatches.
fn check_enough(schedule: &Schedule) -> Result<(), CheckError> {
    let mut needed = vec![0_u128; schedule.num_ranks()];
    for copy in &schedule.copies {
        for (&rank, stage) in copy.stage_ranks.iter().zip(0..) {
            let each = u128::from(least_actions(schedule.moe_layers_of(stage)));
            needed[rank as usize] += each * u128::from(copy.num_microbatches);
        }
    }
    for (rank, (entries, needed)) in schedule.ranks.iter().zip(needed).enumerate() {
        let given: usize = entries.iter().map(|entry| entry.actions().count()).sum();
        if (given as u128) < needed {
            let action = first_missing(schedule, rank);
            return Err(CheckError::Missing { rank, action });
        }
    }
    Ok(())
}

fn least_actions(layers: u16) -> u32 {
    let len = |chain| chain_len(chain, layers);
    if layers == 0 { 2 } else { len(Chain::Forward) + len(Chain::Backward) + len(Chain::Weight) }
}

/// Returns the first missing action of a rank with too few actions. The search ends after at most one candidate more
/// than the rank has actions.
fn first_missing(schedule: &Schedule, rank: usize) -> Action {
    let given: HashSet<Action> = schedule.ranks[rank].iter().flat_map(Entry::actions).collect();
    let first_of = |copy: usize| schedule.copies[..copy].iter().map(|of| of.num_microbatches).sum::<u32>();
    let needed = schedule.stages_of(rank).into_iter().flat_map(|(copy, stage)| {
        let layers = schedule.moe_layers_of(stage);
        let first = first_of(copy);
        (first..first + schedule.copies[copy].num_microbatches).flat_map(move |microbatch| {
            let of = Action::new(Kind::Forward, stage, microbatch);
            [Chain::Forward, Chain::Backward, Chain::Weight].into_iter().flat_map(move |chain| {
                (0..chain_len(chain, layers)).map(move |index| chain_action(chain, index, of, layers))
            })
        })
    });
    let is_there = |action: &Action| {
        let whole = Action { kind: Kind::Backward, ..*action };
        given.contains(action) || (action.kind.chain() != Chain::Forward && given.contains(&whole))
    };
    let missing = { needed }.find(|action| !is_there(action));
    missing.unwrap_or(Action::new(Kind::Forward, 0, 0))
}

/// Progress of all microbatches in all stages.
struct Progress<'a> {
    schedule: &'a Schedule,
    has_messages: bool,
    num_microbatches: usize,
    /// The number of actions done, for each stage, microbatch and chain.
    done: Vec<[u32; 3]>,
    /// The messages sent and received, one bit each for each stage and microbatch.
    messages: Vec<u8>,
    /// The microbatches whose outputs and whose gradients each stage sent, in order.
    sent: [Vec<Vec<u32>>; 2],
    /// The receives of each stage, inputs and gradients.
    received: [Vec<Vec<Place>>; 2],
}

/// Fails unless each action occurs once, on its rank and after the actions of this rank that it needs. Returns the
/// peaks of each rank.
pub(super) fn check_rows(schedule: &Schedule, has_messages: bool) -> Result<Vec<Peaks>, CheckError> {
    let num_microbatches = schedule.num_microbatches();
    let size = schedule.num_stages() * num_microbatches;
    let lists = if has_messages { schedule.num_stages() * schedule.copies.len() } else { 0 };
    let mut progress = Progress {
        schedule,
        has_messages,
        num_microbatches,
        done: vec![[0; 3]; size],
        messages: vec![0; if has_messages { size } else { 0 }],
        sent: [vec![Vec::new(); lists], vec![Vec::new(); lists]],
        received: [vec![Vec::new(); lists], vec![Vec::new(); lists]],
    };
    let mut peaks = Vec::with_capacity(schedule.num_ranks());
    for (rank, entries) in schedule.ranks.iter().enumerate() {
        peaks.push(progress.check_row(rank, entries)?);
    }
    progress.check_complete()?;
    progress.check_message_order()?;
    Ok(peaks)
}

impl Progress<'_> {
    fn check_row(&mut self, rank: usize, entries: &[Entry]) -> Result<Peaks, CheckError> {
        let mut held = Held::default();
        for (position, entry) in entries.iter().enumerate() {
            let at = |action| Place { rank, position, action };
            if let Entry::Pair(forward, backward) = *entry
                && !is_pair(forward, backward)
            {
                let problem = format!("{entry} is not a pair: expected an F and then a B or BW");
                return Err(CheckError::Form { place: at(forward), problem });
            }
            for action in entry.actions() {
                self.check_action(at(action))?;
            }
            for action in entry.actions() {
                self.finish(at(action));
                held.begin(Change::of(action, self.schedule.moe_layers_of(action.stage)));
            }
            for action in entry.actions() {
                held.end(Change::of(action, self.schedule.moe_layers_of(action.stage)));
            }
        }
        Ok(held.peaks)
    }

    fn id(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.num_microbatches + microbatch as usize
    }

    fn is_done(&self, chain: Chain, of: Action) -> bool {
        let layers = self.schedule.moe_layers_of(of.stage);
        self.done[self.id(of.stage, of.microbatch)][chain as usize] == chain_len(chain, layers)
    }

    fn check_action(&self, place: Place) -> Result<(), CheckError> {
        let Action { stage, microbatch, .. } = place.action;
        let (num_stages, num_microbatches) = (self.schedule.num_stages(), self.num_microbatches);
        let range = |what, value, count| Err(CheckError::Range { place, what, value, count });
        if stage as usize >= num_stages {
            return range("stage", stage, num_stages);
        }
        let Some(right) = self.schedule.rank_of(stage, microbatch) else {
            return range("microbatch", microbatch, num_microbatches);
        };
        if right as usize != place.rank {
            return Err(CheckError::WrongRank { place, right });
        }
        if place.action.kind.is_message() { self.check_message(place) } else { self.check_work(place) }
    }

    fn check_work(&self, place: Place) -> Result<(), CheckError> {
        let action = place.action;
        let layers = self.schedule.moe_layers_of(action.stage);
        let Some(index) = chain_index(action, layers) else {
            return Err(form_error(place, layers));
        };
        let done = self.done[self.id(action.stage, action.microbatch)];
        let chain = action.kind.chain();
        let repeated =
            done[chain as usize] > index || (action.kind == Kind::Backward && done[Chain::Weight as usize] > 0);
        if repeated {
            return Err(CheckError::Repeated { place });
        }
        let early = |chain, index| Err(CheckError::Early { place, needed: chain_action(chain, index, action, layers) });
        if done[chain as usize] < index {
            return early(chain, done[chain as usize]);
        }
        let backward = done[Chain::Backward as usize];
        if chain == Chain::Weight && backward < backward_before_weight(index, layers) {
            return early(Chain::Backward, backward);
        }
        if chain == Chain::Backward && index == 0 && !self.is_done(Chain::Forward, action) {
            return early(Chain::Forward, done[Chain::Forward as usize]);
        }
        if chain == Chain::Weight || index > 0 { Ok(()) } else { self.check_input(place) }
    }

    /// Fails if the input of a chain comes from the same rank, or by a receive of it, and that is not before the
    /// action.
    fn check_input(&self, place: Place) -> Result<(), CheckError> {
        let action = place.action;
        let chain = action.kind.chain();
        let Some(source) = source_stage(self.schedule, action) else { return Ok(()) };
        let source = Action { stage: source, ..action };
        if self.schedule.rank_of(source.stage, source.microbatch) == Some(place.rank as u32) {
            let layers = self.schedule.moe_layers_of(source.stage);
            let done = self.done[self.id(source.stage, source.microbatch)][chain as usize];
            if done < chain_len(chain, layers) {
                return Err(CheckError::Early { place, needed: chain_action(chain, done, source, layers) });
            }
        } else if self.has_messages {
            let kind = if chain == Chain::Forward { Kind::ReceiveInput } else { Kind::ReceiveGrad };
            if self.messages[self.id(action.stage, action.microbatch)] & message_bit(kind) == 0 {
                return Err(CheckError::Early { place, needed: Action::new(kind, action.stage, action.microbatch) });
            }
        }
        Ok(())
    }

    fn check_message(&self, place: Place) -> Result<(), CheckError> {
        let action = place.action;
        let Some(other) = message_peer(self.schedule, action) else {
            let problem = "is a message that nobody needs: no other rank has the stage at its other end".to_owned();
            return Err(CheckError::Form { place, problem });
        };
        debug_assert_ne!(other as usize, place.rank);
        if self.messages[self.id(action.stage, action.microbatch)] & message_bit(action.kind) != 0 {
            return Err(CheckError::Repeated { place });
        }
        let chain = action.kind.chain();
        if matches!(action.kind, Kind::SendOutput | Kind::SendGrad) && !self.is_done(chain, action) {
            let layers = self.schedule.moe_layers_of(action.stage);
            let done = self.done[self.id(action.stage, action.microbatch)][chain as usize];
            return Err(CheckError::Early { place, needed: chain_action(chain, done, action, layers) });
        }
        Ok(())
    }

    fn finish(&mut self, place: Place) {
        let Action { stage, microbatch, kind, .. } = place.action;
        let id = self.id(stage, microbatch);
        let chain = kind.chain();
        if kind.is_message() {
            self.messages[id] |= message_bit(kind);
            let list = self.channel(stage, microbatch);
            match kind {
                Kind::SendOutput | Kind::SendGrad => self.sent[chain as usize][list].push(microbatch),
                _ => self.received[chain as usize][list].push(place),
            }
            return;
        }
        self.done[id][chain as usize] += 1;
        if kind == Kind::Backward {
            self.done[id][Chain::Weight as usize] += 1;
        }
    }

    fn channel(&self, stage: u32, microbatch: u32) -> usize {
        self.schedule.copy_of(microbatch).unwrap_or(0) * self.schedule.num_stages() + stage as usize
    }

    fn check_complete(&self) -> Result<(), CheckError> {
        for stage in 0..self.schedule.num_stages() as u32 {
            let layers = self.schedule.moe_layers_of(stage);
            for microbatch in 0..self.num_microbatches as u32 {
                let of = Action::new(Kind::Forward, stage, microbatch);
                let rank = self.schedule.rank_of(stage, microbatch).map_or(0, |rank| rank as usize);
                let id = self.id(stage, microbatch);
                for chain in [Chain::Forward, Chain::Backward, Chain::Weight] {
                    let done = self.done[id][chain as usize];
                    if done < chain_len(chain, layers) {
                        return Err(CheckError::Missing { rank, action: chain_action(chain, done, of, layers) });
                    }
                }
                if self.has_messages {
                    self.check_messages_of(rank, of)?;
                }
            }
        }
        Ok(())
    }

    fn check_messages_of(&self, rank: usize, of: Action) -> Result<(), CheckError> {
        for kind in [Kind::ReceiveInput, Kind::SendOutput, Kind::ReceiveGrad, Kind::SendGrad] {
            let action = Action { kind, ..of };
            let is_there = self.messages[self.id(of.stage, of.microbatch)] & message_bit(kind) != 0;
            if !is_there && message_peer(self.schedule, action).is_some() {
                return Err(CheckError::Missing { rank, action });
            }
        }
        Ok(())
    }

    /// Fails unless the messages of each stage to its neighbour are received in the order in which they are sent.
    fn check_message_order(&self) -> Result<(), CheckError> {
        for (chain, received) in self.received.iter().enumerate() {
            for place in received.iter().flatten() {
                let Action { stage, microbatch, .. } = place.action;
                let own = &received[self.channel(stage, microbatch)];
                let Some(source) = source_stage(self.schedule, place.action) else { continue };
                let sent = &self.sent[chain][self.channel(source, microbatch)];
                if own.first().is_some_and(|first| first == place) {
                    let wrong = own.iter().zip(sent).find(|(place, sent)| place.action.microbatch != **sent);
                    if let Some((&place, &sent)) = wrong {
                        return Err(CheckError::MessageOrder {
                            place,
                            right: Action { microbatch: sent, ..place.action },
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

fn form_error(place: Place, layers: u16) -> CheckError {
    let Action { stage, layer, kind, .. } = place.action;
    if kind.is_part() && layers > 0 {
        return CheckError::Range { place, what: "layer", value: layer.into(), count: layers.into() };
    }
    let problem = match (kind.is_part(), layers) {
        (true, _) => format!("is a part of a MoE layer, but stage {stage} has no MoE layers: use F, B, W or BW"),
        _ => format!("is a whole stage, but stage {stage} has {layers} MoE layers: use their parts, from FA to WA"),
    };
    CheckError::Form { place, problem }
}

/// Returns the stage that an F or a B gets its input from; none for the first of a chain.
pub(in crate::schedule) fn source_stage(schedule: &Schedule, action: Action) -> Option<u32> {
    match action.kind.chain() {
        Chain::Forward => action.stage.checked_sub(1),
        _ => Some(action.stage + 1).filter(|&stage| (stage as usize) < schedule.num_stages()),
    }
}

/// Returns whether the input of an F or a B comes from another rank.
pub(in crate::schedule) fn is_from_other_rank(schedule: &Schedule, action: Action) -> bool {
    let rank_of = |stage| schedule.rank_of(stage, action.microbatch);
    source_stage(schedule, action).is_some_and(|stage| rank_of(stage) != rank_of(action.stage))
}

/// Returns the rank at the other end of a message; `None` if that stage does not exist or is on the same rank.
pub(in crate::schedule) fn message_peer(schedule: &Schedule, action: Action) -> Option<u32> {
    let stage = match action.kind {
        Kind::SendOutput | Kind::ReceiveGrad => Some(action.stage + 1),
        _ => action.stage.checked_sub(1),
    };
    let own = schedule.rank_of(action.stage, action.microbatch);
    schedule.rank_of(stage?, action.microbatch).filter(|&other| Some(other) != own)
}

fn message_bit(kind: Kind) -> u8 {
    1 << (kind as u8 - Kind::SendOutput as u8)
}

/// The memory that a rank holds as it goes through its list.
#[derive(Default)]
struct Held {
    activations: usize,
    weight_grads: usize,
    peaks: Peaks,
}

impl Held {
    fn begin(&mut self, change: Change) {
        if change == Change::Forward {
            self.activations += 1;
            self.record();
        }
    }

    fn end(&mut self, change: Change) {
        match change {
            Change::InputGrad => {
                self.activations -= 1;
                self.weight_grads += 1;
            }
            Change::Backward => self.activations -= 1,
            Change::WeightGrad => self.weight_grads -= 1,
            Change::Forward | Change::None => {}
        }
        self.record();
    }

    fn record(&mut self) {
        let peaks = &mut self.peaks;
        peaks.activations = peaks.activations.max(self.activations);
        peaks.weight_grads = peaks.weight_grads.max(self.weight_grads);
        peaks.held = peaks.held.max(self.activations + self.weight_grads);
    }
}
