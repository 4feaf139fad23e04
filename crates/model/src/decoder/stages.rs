//! The layers of a pass without losses, on this rank alone or on several.

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::Decoder;
use crate::config::ModelConfig;
use crate::kv_cache::{KvCache, LayerKv};
use crate::layers::{Pass, ResidualStream};
use crate::mode::Mode;
use crate::paged_kv_cache::{BlockCopy, PagedKvCache};
use crate::pass::BatchError;
use crate::remote_stages::{PassCache, RemoteStages, StagesPass};
use crate::stage::{Ids, RoutingHook, StagePart, StageRanks};
use crate::weights::{DecoderWeights, WeightTable};

/// The reason why expert ids are not given to a model over stages.
pub(super) const CHOSEN_BY_ROUTERS: &str = "routers choose the experts";

/// The cache that a pass appends to.
pub(super) enum CacheMut<'c> {
    None,
    Growing(&'c mut KvCache),
    Paged {
        cache: &'c mut PagedKvCache,
        /// The copies of blocks that other ranks have not made yet.
        copies: Vec<BlockCopy>,
    },
}

/// A pass after the layers of this rank.
pub(super) enum Layered {
    /// `[T, D]` f32: the residual stream after the last layer.
    Done(Tensor),
    /// The stream is on its way through the stages of other ranks.
    Away(StagesPass),
}

impl CacheMut<'_> {
    fn layers_mut(&mut self) -> Option<Vec<LayerKv<'_>>> {
        match self {
            Self::None => None,
            Self::Growing(cache) => Some(cache.layers_mut()),
            Self::Paged { cache, .. } => Some(cache.layers_mut()),
        }
    }
}

impl Decoder {
    /// Makes the decoder of the root of a model in use whose layers are on the ranks of `stages`. The root has the
    /// first `num_layers` layers, the embedding and the output projection; its weights are those of
    /// [`root_part`](Self::root_part). Methods that make passes return an error once a rank was lost.
    ///
    /// # Errors
    /// If a setting is out of range or the model cannot be cut into stages.
    pub fn over_stages(config: ModelConfig, num_layers: usize, stages: &RemoteStages) -> Result<Self, ConfigError> {
        config.validate()?;
        let table = WeightTable::new(&config).into();
        let stage = super::Stage::over_ranks(config, table, Self::root_part(num_layers), StageRanks::default())?;
        Ok(Self { stage, encoder: None, rest: Some(stages.clone()) })
    }

    /// Returns the part of the root of a model over stages, of which it has `num_layers` layers.
    #[must_use]
    pub fn root_part(num_layers: usize) -> StagePart {
        StagePart::whole(num_layers)
    }

    /// Returns the ranks that have the other layers, if these are on several.
    #[must_use]
    pub fn remote_stages(&self) -> Option<&RemoteStages> {
        self.rest.as_ref()
    }

    /// Embeds the tokens of a pass that keeps nothing and takes them through the layers of this rank.
    pub(super) fn begin_layers(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: Ids<'_>,
        mut cache: CacheMut<'_>,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Layered, BatchError> {
        self.check_on_stages(pass)?;
        let is_watched = hook.is_some();
        let stream = ResidualStream { x: self.stage.embed(pass, weights, ids), router_logits: None };
        let stream = self.stage.forward_layers(pass, weights, stream, cache.layers_mut(), hook);
        let Some(rest) = &self.rest else { return Ok(Layered::Done(stream.x)) };
        let of_pass = match &mut cache {
            CacheMut::None => PassCache::None,
            CacheMut::Growing(cache) => PassCache::Growing(cache),
            CacheMut::Paged { cache, copies } => PassCache::Paged { cache, copies: std::mem::take(copies) },
        };
        let sent = rest.send(pass, stream, of_pass, is_watched)?;
        if let CacheMut::Growing(cache) = cache {
            let elsewhere = self.stage.part.layers.end..self.config().num_layers;
            cache.append_elsewhere(pass.ctx, elsewhere, pass.sequences.len);
        }
        Ok(Layered::Away(sent))
    }

    /// Returns the residual stream after the last layer of a pass, `[T, D]` f32.
    pub(super) fn end_layers(
        &self,
        ctx: &Context,
        layered: Layered,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, BatchError> {
        match (layered, &self.rest) {
            (Layered::Done(x), _) => Ok(x),
            (Layered::Away(sent), Some(rest)) => Ok(rest.receive(ctx, self.config(), sent, hook)?),
            (Layered::Away(_), None) => unreachable!("only stages take a stream away"),
        }
    }

    /// Fails if other ranks have layers and cannot make such a pass.
    fn check_on_stages(&self, pass: &Pass<'_>) -> Result<(), BatchError> {
        match &self.rest {
            Some(_) if pass.mode != Mode::Infer => Err(BatchError::OnStages("passes follow the rules of use")),
            Some(_) if !pass.expert_ids.is_empty() => Err(BatchError::OnStages(CHOSEN_BY_ROUTERS)),
            _ => Ok(()),
        }
    }
}
