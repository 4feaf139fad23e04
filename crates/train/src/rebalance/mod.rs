//! Experts that move between ranks while training goes on, so that the load of ranks is even.
//!
//! After each step the `Rebalancer` adds the load of experts to its window. When a decision is due it asks
//! [`rebalance_layer`] for each layer, with the load summed over all ranks and rates that all ranks agree on, so
//! that every rank decides the same; ranks compare their decisions. The experts then move a few at a time, so that
//! the pause is bounded ([`placement_step`]): a placement on the way is in force for the steps in between. Results do
//! not depend on placements but for rounding.
//!
//! A move takes part of two steps. In the update of a step the experts that move are updated first, and sent while
//! the others are updated (`Rebalancer::start`). After the step their weights must have arrived, and the placement
//! is put in force (`Rebalancer::after_step`). Their moments travel on under the next step's passes, until its
//! update (`Rebalancer::finish_moments`).

mod log;
mod settings;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use moeworks_comm::Reduce;
use moeworks_plan::{
    Bandit, ExpertTransfer, LayerChange, LayerLoads, Placement, Placements, RankLoads, RebalancePolicy, RebalanceRates,
    RebalanceRules, ReplicaSharing, expert_transfers, most_copies, placement_step, rebalance_layer,
};

use crate::error::TrainError;
use crate::metrics::{NamedFigure, Record};
use crate::parallel::{ExpertState, LayerMove, LayerOnItsWay, MomentsOnTheirWay, Ranks};
pub use log::REBALANCE_JSONL;
use log::{ChangedLayer, Decision, MoveLine, RebalanceLog};
pub use settings::{RebalanceSettings, RebalanceSource};
use window::Window;

/// Bytes a second at which experts are expected to travel until a move was measured.
const FIRST_RATE: f64 = 1e9;

/// The placements in force in a checkpoint, from which a resumed run goes on.
pub(crate) const PLACEMENT_FILE: &str = "placement.txt";

/// The part of a trainer that moves experts.
pub(crate) struct Rebalancer {
    settings: RebalanceSettings,
    /// The numbers of the MoE layers.
    layers: Vec<usize>,
    window: Window,
    policies: Vec<RebalancePolicy>,
    bandit: Bandit,
    /// The policy by whose last decision the experts are placed.
    last_policy: Option<RebalancePolicy>,
    rates: RebalanceRates,
    /// True if a move was measured.
    has_measured_rate: bool,
    /// Seconds of a step when that was last measured.
    step_s: f64,
    /// The placements to which layers are moving.
    targets: BTreeMap<usize, Placement>,
    /// The moves that start in the next update.
    planned: Vec<NextMove>,
    /// The moves that have started.
    on_their_way: Vec<(NextMove, LayerOnItsWay)>,
    /// Moments that the next update waits for.
    moments: Vec<MomentsOnTheirWay>,
    /// Seconds for which this rank has waited for moments since the last pause; none if none were on their way.
    moments_wait_s: Option<f64>,
    /// The experts that have moved, with their layers.
    moved: BTreeSet<(usize, usize)>,
    /// True if the experts of a placement file have begun to move.
    has_begun: bool,
    log: Option<RebalanceLog>,
}

/// The moves between two steps.
#[derive(Default)]
struct Moves {
    num_copies: usize,
    /// The most bytes that a rank sends or receives.
    num_bytes: usize,
    /// The most seconds for which a rank waited for experts, with the time of putting them in their places.
    pause_s: f64,
}

/// A layer's next step on its way.
struct NextMove {
    layer: usize,
    to: Placement,
    transfers: Vec<ExpertTransfer>,
    /// The most bytes that a rank sends or receives.
    num_bytes: usize,
}

impl Rebalancer {
    /// Creates the rebalancer of a run after `step` steps; none where nothing can move. `log_dir` is the run's folder
    /// on the rank that writes.
    pub(crate) fn new(
        settings: &RebalanceSettings,
        ranks: &Ranks,
        layers: Vec<usize>,
        log_dir: Option<&Path>,
        step: u64,
    ) -> Result<Option<Self>, TrainError> {
        let experts = ranks.experts();
        if settings.source == RebalanceSource::Off || experts.group().size() == 1 || layers.is_empty() {
            return Ok(None);
        }
        let placements = experts.placements();
        let of_layers: Vec<(usize, Placement)> =
            layers.iter().filter_map(|&layer| Some((layer, placements.layer(layer)?.clone()))).collect();
        if of_layers.is_empty() {
            return Ok(None);
        }
        experts.set_placements(Placements::per_layer(of_layers));
        Ok(Some(Self {
            window: Window::new(layers.len(), placements.num_experts()),
            policies: settings.policies.clone(),
            bandit: Bandit::new(settings.policies.len().max(1)),
            last_policy: None,
            rates: RebalanceRates { row_s: 0.0, bytes_per_s: FIRST_RATE, sum_bytes_per_s: FIRST_RATE },
            has_measured_rate: false,
            step_s: 0.0,
            targets: BTreeMap::new(),
            planned: Vec::new(),
            on_their_way: Vec::new(),
            moments: Vec::new(),
            moments_wait_s: None,
            moved: BTreeSet::new(),
            has_begun: false,
            log: log_dir.map(|dir| RebalanceLog::open(dir, step)).transpose()?,
            settings: settings.clone(),
            layers,
        }))
    }

    /// Returns the indices of the tensors whose experts move next, on this rank.
    pub(crate) fn planned_places(&self, ranks: &Ranks) -> Vec<usize> {
        self.planned.iter().flat_map(|next| ranks.expert_places(next.layer)).collect()
    }

    /// Starts the planned moves, whose experts have been updated. All ranks call this in the same update.
    pub(crate) fn start(&mut self, ranks: &Ranks, state: &mut ExpertState<'_>) -> Result<(), TrainError> {
        for next in std::mem::take(&mut self.planned) {
            let started = ranks.start_layer_move(&LayerMove { layer: next.layer, to: &next.to }, state)?;
            self.on_their_way.push((next, started));
        }
        Ok(())
    }

    /// Waits for moments on their way. All ranks call this before the same update, and before a checkpoint.
    pub(crate) fn finish_moments(&mut self, ranks: &Ranks, state: &mut ExpertState<'_>) -> Result<(), TrainError> {
        if self.moments.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        for moments in self.moments.drain(..) {
            let [first, second] = &mut state.moments;
            ranks.finish_moments(state.at, moments, [&mut **first, &mut **second])?;
        }
        ranks.meter().record("moments of experts", start);
        self.moments_wait_s = Some(self.moments_wait_s.unwrap_or(0.0) + start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Puts the placements of moves that have started in force after the step of `record`. Decides what moves next,
    /// unless this was the last step. Adds figures to the record. All ranks call this after the same step.
    pub(crate) fn after_step(
        &mut self,
        ranks: &Ranks,
        state: &mut ExpertState<'_>,
        record: &mut Record,
        is_last: bool,
    ) -> Result<(), TrainError> {
        let imbalance = self.imbalance(ranks, record)?;
        self.window.add(record);
        let moves = self.finish(ranks, state, record.step)?;
        self.window.add_pause(moves.pause_s);
        if !is_last && self.planned.is_empty() {
            self.decide(ranks, record.step)?;
            self.planned = self.choose_next(ranks);
        }
        let figures = [
            ("imbalance", imbalance),
            ("copies", moves.num_copies as f64),
            ("bytes", moves.num_bytes as f64),
            ("pause_ms", moves.pause_s * 1e3),
            ("pause_share", moves.pause_s / (record.step_ms / 1e3).max(1e-9)),
            ("experts_moved", self.moved.len() as f64),
        ];
        let named = |(name, value)| NamedFigure { name: format!("rebalance/{name}"), value };
        record.metrics.extend(figures.into_iter().map(named));
        Ok(())
    }

    /// Computes the mean over layers of the imbalance of a step's load by the placements in force.
    fn imbalance(&self, ranks: &Ranks, record: &Record) -> Result<f64, TrainError> {
        let placements = ranks.experts().placements();
        let mut sum = 0.0;
        for layer in &record.layers {
            let Some(placement) = placements.layer(layer.layer) else { continue };
            let loads: Vec<f64> = window::loads(layer, placement.num_experts()).map(|load| load as f64).collect();
            sum += RankLoads::by_source(placement, &loads, ranks.experts().nodes())?.imbalance();
        }
        Ok(sum / record.layers.len().max(1) as f64)
    }

    /// Decides what moves next, if that is due.
    fn decide(&mut self, ranks: &Ranks, step: u64) -> Result<(), TrainError> {
        let is_due = self.targets.is_empty()
            && match &self.settings.source {
                RebalanceSource::Off => false,
                RebalanceSource::File { at_step, .. } => !self.has_begun && step >= *at_step,
                RebalanceSource::Online => self.window.num_steps() >= self.settings.every,
            };
        if !is_due {
            return Ok(());
        }
        self.measure(ranks)?;
        match self.settings.source.clone() {
            RebalanceSource::File { placements, .. } => self.begin(ranks, &placements),
            _ => self.decide_by_load(ranks, step)?,
        }
        let targets = self.targets.iter().map(|(layer, target)| format!("layer {layer}\n{target}")).collect::<String>();
        ranks.check_same("decision on placements", &targets)
    }

    /// Measures the time of a step and of a token of an expert over the window, the same on all ranks.
    fn measure(&mut self, ranks: &Ranks) -> Result<(), TrainError> {
        let mut slowest = [self.window.seconds()];
        ranks.world().all_reduce(&mut slowest, Reduce::Max)?;
        let mut expert_s = [ranks.experts().take_expert_seconds()];
        ranks.world().all_reduce(&mut expert_s, Reduce::Sum)?;
        self.step_s = slowest[0] / self.window.num_steps().max(1) as f64;
        let num_rows = self.window.num_rows();
        self.rates.row_s = if num_rows > 0.0 { expert_s[0] / num_rows } else { 0.0 };
        // Ranks that come earlier to a sum wait for the others, so the fastest has seen the sum's own time.
        let mut sum_rate = [ranks.take_replica_sums().bytes_per_s()];
        ranks.world().all_reduce(&mut sum_rate, Reduce::Max)?;
        if sum_rate[0] > 0.0 {
            self.rates.sum_bytes_per_s = sum_rate[0];
        }
        Ok(())
    }

    /// Begins to move the experts to the placements of a file.
    fn begin(&mut self, ranks: &Ranks, placements: &Placements) {
        self.has_begun = true;
        let current = ranks.experts().placements();
        for &layer in &self.layers {
            if let Some(target) = placements.layer(layer).filter(|target| current.layer(layer) != Some(target)) {
                self.targets.insert(layer, target.clone());
            }
        }
    }

    /// Decides by the load of the window. Its time counts for the policy of the decision before.
    fn decide_by_load(&mut self, ranks: &Ranks, step: u64) -> Result<(), TrainError> {
        if let Some(arm) = self.policies.iter().position(|policy| Some(*policy) == self.last_policy) {
            self.bandit.observe(arm, self.step_s);
        }
        let arm = self.bandit.choose();
        let policy = self.policies[arm];
        let mut changes = Vec::new();
        for (place, &layer) in self.layers.iter().enumerate() {
            changes.extend(self.change(ranks, policy, place)?.map(|change| ChangedLayer { layer, change }));
        }
        self.last_policy = Some(policy);
        self.write_decision(step, policy, &changes)?;
        self.targets = changes.into_iter().map(|changed| (changed.layer, changed.change.placement)).collect();
        self.window.clear();
        Ok(())
    }

    /// Decides about the MoE layer with `place` others before it.
    fn change(&self, ranks: &Ranks, policy: RebalancePolicy, place: usize) -> Result<Option<LayerChange>, TrainError> {
        let experts = ranks.experts();
        let (placements, layer) = (experts.placements(), self.layers[place]);
        let Some(placement) = placements.layer(layer) else { return Ok(None) };
        let (num_experts, num_ranks) = (placement.num_experts(), placement.num_ranks());
        let slots = num_experts.div_ceil(num_ranks).saturating_add(self.settings.spare).min(num_experts);
        let rules = RebalanceRules {
            slots_per_rank: slots,
            max_moves: self.settings.max_moves,
            may_replicate: self.settings.spare > 0,
            num_steps: self.settings.every,
            min_gain: self.settings.min_gain,
            sharing: ReplicaSharing::BySource,
        };
        let loads = LayerLoads {
            placement,
            loads: &self.window.mean_loads(place),
            steps: self.window.steps(place),
            expert_bytes: ranks.expert_bytes(layer) as f64,
            gradient_bytes: ranks.expert_gradient_bytes(layer) as f64,
        };
        Ok(rebalance_layer(loads, policy, &rules, &self.rates, experts.nodes())?)
    }

    fn write_decision(
        &mut self,
        step: u64,
        policy: RebalancePolicy,
        changes: &[ChangedLayer],
    ) -> Result<(), TrainError> {
        let means = self.policies.iter().enumerate().map(|(arm, policy)| (policy.name(), self.bandit.mean(arm)));
        let decision =
            Decision { step, policy, step_s: self.step_s, rates: self.rates, means: means.collect(), changes };
        if let Some(log) = &mut self.log {
            let num_copies: usize = changes.iter().map(|changed| changed.change.num_copies).sum();
            tracing::info!("step {step}: {} moves {num_copies} experts of {} layers", policy.name(), changes.len());
            log.write(&decision.json())?;
        }
        Ok(())
    }

    /// Waits for the weights of moves that have started and puts their placements in force.
    fn finish(&mut self, ranks: &Ranks, state: &mut ExpertState<'_>, step: u64) -> Result<Moves, TrainError> {
        let waited = self.moments_wait_s.take();
        if self.on_their_way.is_empty() && waited.is_none() {
            return Ok(Moves::default());
        }
        let (start, mut done) = (Instant::now(), Vec::new());
        for (next, on_its_way) in self.on_their_way.drain(..) {
            self.moments.push(ranks.finish_layer_move(on_its_way, state)?);
            done.push(next);
        }
        ranks.meter().record("move experts", start);
        let mut pause = [start.elapsed().as_secs_f64() + waited.unwrap_or(0.0)];
        ranks.world().all_reduce(&mut pause, Reduce::Max)?;
        let moves = Moves {
            num_copies: done.iter().map(|next| next.transfers.len()).sum(),
            num_bytes: done.iter().map(|next| next.num_bytes).sum(),
            pause_s: pause[0],
        };
        self.observe_rate(moves.num_bytes as f64 / moves.pause_s.max(1e-9));
        self.note(&done, step, &moves)?;
        Ok(moves)
    }

    /// Chooses the next step of layers on their way, within the limit of bytes.
    fn choose_next(&self, ranks: &Ranks) -> Vec<NextMove> {
        let (experts, mut left) = (ranks.experts(), self.bytes_limit());
        let placements = experts.placements();
        let mut chosen = Vec::new();
        for (&layer, target) in &self.targets {
            let Some(current) = placements.layer(layer) else { continue };
            let expert_bytes = ranks.expert_bytes(layer).max(1);
            let max_copies = left / expert_bytes;
            if max_copies == 0 && !chosen.is_empty() {
                break;
            }
            let to = placement_step(current, target, experts.nodes(), max_copies);
            let transfers = expert_transfers(current, &to, experts.nodes());
            let num_bytes = most_copies(&transfers, current.num_ranks()) * expert_bytes;
            left = left.saturating_sub(num_bytes);
            let is_there = to == *target;
            chosen.push(NextMove { layer, to, transfers, num_bytes });
            if !is_there {
                break;
            }
        }
        chosen
    }

    /// Returns the bytes that a rank may send or receive between two steps.
    fn bytes_limit(&self) -> usize {
        match self.settings.bytes_per_step {
            0 => (self.settings.max_pause * self.step_s * self.rates.bytes_per_s) as usize,
            bytes => usize::try_from(bytes).unwrap_or(usize::MAX),
        }
    }

    /// Takes a measured rate into account.
    fn observe_rate(&mut self, bytes_per_s: f64) {
        if bytes_per_s > 0.0 {
            let old = if self.has_measured_rate { self.rates.bytes_per_s } else { bytes_per_s };
            self.rates.bytes_per_s = (old + bytes_per_s) / 2.0;
            self.has_measured_rate = true;
        }
    }

    /// Notes what has moved, and forgets the targets that are reached.
    fn note(&mut self, next: &[NextMove], step: u64, moves: &Moves) -> Result<(), TrainError> {
        for NextMove { layer, to, transfers, .. } in next {
            self.moved.extend(transfers.iter().map(|transfer| (*layer, transfer.expert)));
            if self.targets.get(layer) == Some(to) {
                self.targets.remove(layer);
            }
        }
        let Some(log) = &mut self.log else { return Ok(()) };
        for NextMove { layer, transfers, .. } in next {
            let is_complete = !self.targets.contains_key(layer);
            log.write(&MoveLine { step, layer: *layer, transfers, is_complete, moves_pause_s: moves.pause_s }.json())?;
        }
        Ok(())
    }
}
