//! A model in use whose experts are spread over ranks.
//!
//! Rank 0, the root, has the model with its share of the experts, and makes all passes. The other ranks hold their
//! experts alone, and compute them for the root until it ends. An answer is that of one rank, to the bit
//! ([`moeworks_moe::RemoteExperts`] says under which condition).

use std::time::Duration;

use moeworks_comm::{CommError, Communicator};
use moeworks_model::{Decoder, ModelConfig, ModelPart};
use moeworks_moe::{OwnedLayer, RemoteExperts, serve_owned_experts};
use moeworks_ops::Context;
use moeworks_plan::{Placement, Placements};

use crate::InferError;
use crate::open::{LoadedWeights, Model, OpenOptions, Source, WeightsToCheck};
use crate::system::System;

/// The time that ranks wait for one that still loads its weights.
const LOADING: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a megabyte.
const MEGABYTE: usize = 1_000_000;

/// One rank's place among those that hold the experts of a model.
pub struct ExpertSpread<'a> {
    comm: &'a dyn Communicator,
    placements: Placements,
}

impl<'a> ExpertSpread<'a> {
    /// Spreads the experts of the model of `source` over the ranks of `comm`: as `given`, or consecutive experts on
    /// each rank, as evenly as possible. With more ranks than experts the last ones have none.
    ///
    /// # Errors
    /// Fails if the model has no experts, or the given placement is not for this model and these ranks.
    pub fn new(comm: &'a dyn Communicator, source: &Source, given: Option<Placements>) -> Result<Self, InferError> {
        comm.set_timeout(LOADING);
        let config = source.config()?;
        if config.moe_layers().is_empty() {
            return Err(InferError::NoExperts { num_ranks: comm.size() });
        }
        let even = || Placements::from(Placement::sharded(config.num_experts, comm.size()));
        let placements = given.unwrap_or_else(even);
        check_placements(&placements, &config, comm.size())?;
        Ok(Self { comm, placements })
    }

    /// Returns whether this rank makes the passes.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Loads the model of the root, once all other ranks have loaded their experts
    /// ([`serve_experts`](Self::serve_experts)).
    ///
    /// # Errors
    /// Fails as [`Model::open`] does, or if a rank was lost.
    pub fn open(&self, ctx: Context, source: &Source, options: OpenOptions) -> Result<Model, InferError> {
        let loaded = self.load(&ctx, source, options, &ModelPart::Root(self.placements.clone()))?;
        let remote = RemoteExperts::new(self.ready()?, self.placements.clone());
        let decoder = Decoder::new(loaded.config.clone())?.with_remote_experts(&remote);
        Model::assemble(ctx, source, options, decoder, loaded)
    }

    /// Loads the experts of another rank and computes them for the root, until it [ends](Model::end_ranks).
    ///
    /// # Errors
    /// Fails if the files cannot be read, or if a rank was lost.
    pub fn serve_experts(&self, ctx: &Context, source: &Source, options: OpenOptions) -> Result<(), InferError> {
        let part = ModelPart::Experts { placements: self.placements.clone(), rank: self.comm.rank() };
        let LoadedWeights { config, weights, .. } = self.load(ctx, source, options, &part)?;
        let weights = options.format.of(ctx, weights);
        let layers = weights.held_layers(&config).into_iter().map(OwnedLayer::from).collect();
        // Experts that move away are then freed.
        drop(weights);
        let comm = self.ready()?;
        Ok(serve_owned_experts(ctx, &*comm, layers)?)
    }

    /// Loads and checks a part of the model.
    fn load(
        &self,
        ctx: &Context,
        source: &Source,
        options: OpenOptions,
        part: &ModelPart,
    ) -> Result<LoadedWeights, InferError> {
        let (config, weights) = source.load_part(ctx, part)?;
        let num_bytes: usize = weights.tensors().iter().map(|(_, tensor)| tensor.stored_bytes()).sum();
        let (rank, path) = (self.comm.rank(), source.path().display());
        let first = config.moe_layer_numbers().first().and_then(|&number| self.placements.layer(number));
        let num_held = first.map_or(0, |placement| placement.experts_of(rank).len());
        let (num_experts, megabytes) = (config.num_experts, num_bytes.div_ceil(MEGABYTE));
        let rest = if rank == 0 { " and all other weights" } else { "" };
        tracing::info!("rank {rank} holds {num_held} of {num_experts} experts{rest}: {megabytes} MB of {path}");
        if is_to_check(options.check, num_bytes)
            && let Some(tensor) = weights.first_not_finite(ctx)
        {
            tracing::warn!("{path}: tensor {tensor:?} holds NaN or infinity: the file may be damaged");
        }
        Ok(LoadedWeights { config, weights, part_checked: None })
    }

    /// Waits until all ranks have loaded. Returns a communicator for the experts.
    fn ready(&self) -> Result<Box<dyn Communicator>, CommError> {
        let comm = self.comm.split(Some(0), self.comm.rank())?;
        comm.ok_or_else(|| CommError::Start("a rank is in no group".to_owned()))
    }
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
    /// Tells the ranks that hold the model's experts that no more passes come, if there are any.
    ///
    /// # Errors
    /// If a rank was lost.
    pub fn end_ranks(&self) -> Result<(), InferError> {
        self.decoder.remote_experts().map_or(Ok(()), |remote| Ok(remote.end()?))
    }

    /// Returns why ranks that hold the model's experts cannot go on, if they cannot.
    #[must_use]
    pub fn lost_rank(&self) -> Option<CommError> {
        self.decoder.remote_experts().and_then(RemoteExperts::failure)
    }
}
