//! A model in use that is spread over ranks: its layers over stages, and the experts of each stage over ranks.
//!
//! Rank 0, the root, makes all passes. It has the embedding, the output projection and the first stage's layers. The
//! first rank of each other stage computes that stage's layers for the root ([`moeworks_model::RemoteStages`]). The
//! other ranks of a stage hold experts alone and compute them for its first rank ([`moeworks_moe::RemoteExperts`]).
//! An answer is that of one rank, to the bit (`RemoteExperts` says under which condition, if experts are spread).

use std::time::Duration;

use moeworks_comm::{CommError, Communicator};
use moeworks_model::{
    Decoder, ModelConfig, ModelPart, RemoteStages, Stage, StagePart, StageRanks, WeightPlace, WeightTable, serve_stage,
};
use moeworks_moe::{OwnedLayer, RemoteExperts, serve_owned_experts};
use moeworks_ops::Context;
use moeworks_plan::{Placement, Placements, split_layers};

use crate::InferError;
use crate::open::{LoadedWeights, Model, OpenOptions, Source, WeightsToCheck};
use crate::system::System;

/// The time that ranks wait for one that still loads its weights.
const LOADING: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a megabyte.
const MEGABYTE: usize = 1_000_000;

/// The layout of ranks: rank `stage * ep + i` is rank i of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpreadLayout {
    /// The number of stages, each with consecutive layers.
    pub pp: usize,
    /// The number of ranks that the experts of a stage are spread over.
    pub ep: usize,
}

/// One rank's place among those that hold a model.
pub struct ModelSpread<'a> {
    comm: &'a dyn Communicator,
    layout: SpreadLayout,
    config: ModelConfig,
    /// The part of each stage.
    stages: Vec<StagePart>,
    placements: Placements,
}

/// The groups of ranks that a rank is in.
struct Groups {
    /// The first ranks of all stages; none on other ranks.
    roots: Option<Box<dyn Communicator>>,
    /// The ranks of this rank's stage.
    stage: Box<dyn Communicator>,
}

impl<'a> ModelSpread<'a> {
    /// Spreads the model of `source` over the ranks of `comm`, which are as many as `layout` says. Layers are shared
    /// out so that the stage with the most weights has as few as it can. Experts are placed as `given`, or
    /// consecutive experts on each rank, as evenly as possible; with more ranks than experts the last ones have none.
    ///
    /// # Errors
    /// Fails if the model has no experts or too few layers, cannot be cut into stages, or the given placement is not
    /// for this model and these ranks.
    pub fn new(
        comm: &'a dyn Communicator,
        layout: SpreadLayout,
        source: &Source,
        given: Option<Placements>,
    ) -> Result<Self, InferError> {
        comm.set_timeout(LOADING);
        let config = source.config()?;
        if layout.ep > 1 && config.moe_layers().is_empty() {
            return Err(InferError::NoExperts { num_ranks: layout.ep });
        }
        let stages = stages(&config, layout.pp)?;
        let even = || Placements::from(Placement::sharded(config.num_experts, layout.ep));
        let placements = given.unwrap_or_else(even);
        if layout.ep > 1 {
            check_placements(&placements, &config, layout.ep)?;
        }
        Ok(Self { comm, layout, config, stages, placements })
    }

    /// Returns whether this rank makes the passes.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Returns the number of this rank's stage.
    fn stage(&self) -> usize {
        self.comm.rank() / self.layout.ep
    }

    /// Returns this rank's number in its stage.
    fn rank_in_stage(&self) -> usize {
        self.comm.rank() % self.layout.ep
    }

    /// Loads the model of the root, once all other ranks have loaded their parts ([`serve_root`](Self::serve_root)).
    ///
    /// # Errors
    /// Fails as [`Model::open`] does, or if a rank was lost.
    pub fn open(&self, ctx: Context, source: &Source, options: OpenOptions) -> Result<Model, InferError> {
        let loaded = self.load(&ctx, source, options)?;
        let Groups { roots, stage } = self.ready()?;
        let config = loaded.config.clone();
        let decoder = match roots.filter(|_| self.layout.pp > 1) {
            None => Decoder::new(config)?,
            Some(roots) => Decoder::over_stages(config, self.stages[0].layers.len(), &RemoteStages::new(roots))?,
        };
        let decoder = match self.remote_experts(stage) {
            None => decoder,
            Some(remote) => decoder.with_remote_experts(&remote),
        };
        Model::assemble(ctx, source, options, decoder, loaded)
    }

    /// Loads the part of another rank and computes it for the root, until that [ends](Model::end_ranks).
    ///
    /// # Errors
    /// Fails if the files cannot be read, or if a rank was lost.
    pub fn serve_root(&self, ctx: &Context, source: &Source, options: OpenOptions) -> Result<(), InferError> {
        let LoadedWeights { config, weights, .. } = self.load(ctx, source, options)?;
        let weights = options.format.of(ctx, weights);
        let Groups { roots, stage } = self.ready()?;
        let Some(roots) = roots else {
            let layers = weights.held_layers(&config).into_iter().map(OwnedLayer::from).collect();
            // Experts that move away are then freed.
            drop(weights);
            return Ok(serve_owned_experts(ctx, &*stage, layers)?);
        };
        let (table, part) = (WeightTable::new(&config).into(), self.stages[self.stage()].clone());
        let mut layers = Stage::over_ranks(config, table, part, StageRanks::default())?;
        let remote = self.remote_experts(stage);
        if let Some(remote) = &remote {
            layers = layers.with_remote_experts(remote);
        }
        serve_stage(ctx, &layers, &weights, &*roots)?;
        remote.map_or(Ok(()), |remote| Ok(remote.end()?))
    }

    /// Returns the experts of the stage, on its first rank, if there are other ranks.
    fn remote_experts(&self, stage: Box<dyn Communicator>) -> Option<RemoteExperts> {
        (self.layout.ep > 1).then(|| RemoteExperts::new(stage, self.placements.clone()))
    }

    /// Returns the part of the weights that this rank loads.
    fn part(&self) -> ModelPart {
        let placements = || self.placements.clone();
        let of_stage = match (self.layout.ep, self.rank_in_stage()) {
            (1, _) => ModelPart::Whole,
            (_, 0) => ModelPart::Root(placements()),
            (_, rank) => ModelPart::Experts { placements: placements(), rank },
        };
        match self.layout.pp {
            1 => of_stage,
            _ => ModelPart::Stage { stage: self.stages[self.stage()].clone(), rest: Box::new(of_stage) },
        }
    }

    /// Loads and checks a part of the model.
    fn load(&self, ctx: &Context, source: &Source, options: OpenOptions) -> Result<LoadedWeights, InferError> {
        let (config, weights) = source.load_part(ctx, &self.part())?;
        let num_bytes: usize = weights.tensors().iter().map(|(_, tensor)| tensor.stored_bytes()).sum();
        let (rank, path, megabytes) = (self.comm.rank(), source.path().display(), num_bytes.div_ceil(MEGABYTE));
        tracing::info!("rank {rank} holds {}: {megabytes} MB of {path}", self.holding());
        if is_to_check(options.check, num_bytes)
            && let Some(tensor) = weights.first_not_finite(ctx)
        {
            tracing::warn!("{path}: tensor {tensor:?} holds NaN or infinity: the file may be damaged");
        }
        Ok(LoadedWeights { config, weights, part_checked: None })
    }

    /// Describes the part that this rank holds.
    fn holding(&self) -> String {
        let StagePart { layers, has_embedding, .. } = &self.stages[self.stage()];
        let (rank, config) = (self.rank_in_stage(), &self.config);
        // A model over stages has no encoder, whose layers would be numbered first.
        let is_here = |number: &usize| self.layout.pp == 1 || layers.contains(number);
        let first = config.moe_layer_numbers().into_iter().find(is_here);
        let placement = first.and_then(|number| self.placements.layer(number));
        let num_held = placement.map_or(0, |placement| placement.experts_of(rank).len());
        let experts = format!("{num_held} of {} experts", config.num_experts);
        let of_stage = format!("layers {} to {} of {}", layers.start, layers.end.saturating_sub(1), config.num_layers);
        let ends = if *has_embedding { ", the embedding and the output projection" } else { "" };
        match (self.layout, rank) {
            (SpreadLayout { pp: 1, .. }, 0) => format!("{experts} and all other weights"),
            (SpreadLayout { pp: 1, .. }, _) => experts,
            (SpreadLayout { ep: 1, .. }, _) => format!("{of_stage}{ends}"),
            (_, 0) => format!("{of_stage} with {experts}{ends}"),
            _ => format!("{experts} of {of_stage}"),
        }
    }

    /// Waits until all ranks have loaded. Returns communicators for the passes.
    fn ready(&self) -> Result<Groups, CommError> {
        let is_first = self.rank_in_stage() == 0;
        let roots = self.comm.split(is_first.then_some(0), self.stage())?;
        let stage = self.comm.split(Some(self.stage() as u32), self.rank_in_stage())?;
        let stage = stage.ok_or_else(|| CommError::Start("a rank is in no group".to_owned()))?;
        Ok(Groups { roots, stage })
    }
}

/// Shares the layers of a model out over `pp` stages by their weights. The first stage has the embedding and the
/// output projection, too.
fn stages(config: &ModelConfig, pp: usize) -> Result<Vec<StagePart>, InferError> {
    if pp == 1 {
        return Ok(vec![StagePart::whole(config.num_layers)]);
    }
    if !Stage::can_cut(config) || config.variant.expert_capacity > 0 {
        return Err(InferError::NoStages { num_stages: pp });
    }
    if pp > config.num_layers {
        return Err(InferError::FewLayers { num_stages: pp, num_layers: config.num_layers });
    }
    let mut sizes = vec![0.0; config.num_layers];
    for spec in WeightTable::new(config).specs() {
        let layer = match spec.place {
            WeightPlace::Layer(layer) => layer,
            _ => 0,
        };
        sizes[layer] += spec.shape.iter().product::<usize>() as f64;
    }
    let mut end = 0;
    let part = |count: usize| {
        let start = end;
        end += count;
        StagePart { layers: start..end, has_embedding: start == 0, has_head: start == 0 }
    };
    Ok(split_layers(&sizes, pp).into_iter().map(part).collect())
}

/// Returns whether a rank's part of the weights is checked for NaN and infinity.
fn is_to_check(which: WeightsToCheck, num_bytes: usize) -> bool {
    match which {
        WeightsToCheck::None => false,
        WeightsToCheck::All => true,
        WeightsToCheck::Auto => {
            System::default().usable_memory_bytes().is_none_or(|usable| num_bytes as u64 <= usable / 2)
        }
    }
}

/// Checks that a placement is for the layers and experts of a model, and for so many ranks.
///
/// # Errors
/// [`InferError::Placement`] if it is not.
pub fn check_placements(placements: &Placements, config: &ModelConfig, num_ranks: usize) -> Result<(), InferError> {
    let wrong = |problem: String| Err(InferError::Placement { problem });
    if placements.num_ranks() != num_ranks {
        return wrong(format!("is for {} ranks, but there are {num_ranks}", placements.num_ranks()));
    }
    if placements.num_experts() != config.num_experts {
        let (found, expected) = (placements.num_experts(), config.num_experts);
        return wrong(format!("is for {found} experts, but the model has {expected}"));
    }
    let missing = config.moe_layer_numbers().into_iter().find(|&number| placements.layer(number).is_none());
    missing.map_or(Ok(()), |number| wrong(format!("has no layer {number}, which has experts in the model")))
}

impl Model {
    /// Tells the other ranks that hold the model that no more passes come, if there are any.
    ///
    /// # Errors
    /// If a rank was lost.
    pub fn end_ranks(&self) -> Result<(), InferError> {
        Ok(self.decoder.end_ranks()?)
    }

    /// Returns why the other ranks that hold the model cannot go on, if they cannot.
    #[must_use]
    pub fn lost_rank(&self) -> Option<CommError> {
        self.decoder.lost_rank()
    }
}
