//! A stage: consecutive layers of a model, with the embedding before them and the head after them if it has these.
//!
//! [`Decoder`](crate::Decoder) is the stage of all layers with both ends; an encoder is a stage without head. A model
//! that is cut into stages computes the same as the whole, to the bit. A [`ResidualStream`] crosses a cut forward,
//! and its gradient backward. The losses on routers, which depend on all layers, reach a stage as values.

mod checks;
mod embed_and_head;
mod on_ranks;
mod training;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use moeworks_moe::{ConfigError, ExpertRanks, MoeLayer, MoeSaved, RemoteExperts};
use moeworks_ops::Context;

pub(crate) use self::embed_and_head::{Ids, LossTargets};
pub use self::on_ranks::TextPart;
pub(crate) use self::training::TrainingPass;
pub use self::training::{GradTarget, LayerDone, StageBackward, StageForward, StageOutputGrads, StageSaved};
use crate::config::{ModelConfig, PositionKind};
use crate::gather::{Gather, after};
use crate::kv_cache::LayerKv;
use crate::layers::attention::{AttentionBlock, WRONG_KIND};
use crate::layers::cross::CrossBlock;
use crate::layers::feed_forward::FeedForwardBlock;
use crate::layers::layer::{Layer, NextLayer, ResidualStream};
use crate::layers::norm::Norm;
use crate::layers::relative::Relative;
use crate::layers::segments::Segments;
use crate::layers::{EncoderOutput, Pass, RouterRules, Sequences};
use crate::mode::Mode;
use crate::pass::{PassOptions, TokenBatch};
use crate::rope_tables::RopeTables;
use crate::tensor_ranks::TensorRanks;
use crate::weights::{DecoderWeights, LayerWeights, WeightGroup, WeightPlace, WeightRole, WeightSpec, WeightTable};

/// A hook that sees the routing of each MoE layer, with the layer's number.
pub type RoutingHook<'a> = &'a mut dyn FnMut(usize, &MoeSaved);

/// The part of a model that a stage has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePart {
    /// The range of its layers.
    pub layers: Range<usize>,
    /// True if it has the embedding.
    pub has_embedding: bool,
    /// True if it has the final norm and the output projection.
    pub has_head: bool,
}

impl StagePart {
    /// Returns the whole of a model of `num_layers` layers.
    #[must_use]
    pub fn whole(num_layers: usize) -> Self {
        Self { layers: 0..num_layers, has_embedding: true, has_head: true }
    }

    /// Cuts a model before each layer in `cuts`, ascending: the first part has the embedding, the last one the head.
    #[must_use]
    pub fn cut(num_layers: usize, cuts: &[usize]) -> Vec<Self> {
        let starts = std::iter::once(0).chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([num_layers]);
        let part = |(index, (start, end))| Self {
            layers: start..end,
            has_embedding: index == 0,
            has_head: index == cuts.len(),
        };
        starts.zip(ends).enumerate().map(part).collect()
    }

    /// Returns true if the stage needs the tensor. A tied embedding is needed at both ends.
    #[must_use]
    pub fn holds(&self, spec: &WeightSpec, is_tied: bool) -> bool {
        match (spec.place, spec.role) {
            (WeightPlace::Layer(layer), _) => self.layers.contains(&layer),
            (_, WeightRole::Embedding) => self.has_embedding || is_tied && self.has_head,
            (_, WeightRole::Positions) => self.has_embedding,
            _ => self.has_head,
        }
    }
}

/// The stack of a model that a stage belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stack {
    Encoder,
    Decoder,
}

/// The computation of consecutive layers of a model, with embedding and head if it has these. Weights are arguments:
/// those of the whole model, or those that [`weights_of`](Self::weights_of) returns.
#[derive(Debug)]
pub struct Stage {
    pub(crate) config: ModelConfig,
    pub(crate) part: StagePart,
    stack: Stack,
    layers: Vec<Layer>,
    /// The number of layers of the model, including an encoder's.
    num_layers: usize,
    rope: RopeTables,
    /// The ranks that the experts are spread over, if any.
    pub(crate) ranks: Option<ExpertRanks>,
    /// The ranks that hold the experts of a model in use, if any.
    pub(crate) remote: Option<RemoteExperts>,
    /// The ranks that shard the matrices, if any.
    pub(crate) tensor: Option<TensorRanks>,
    /// The table of the model's weights.
    pub(crate) table: Arc<WeightTable>,
    /// The sharding of the embedding and the output projection over ranks of `tensor`.
    cut_ends: CutEnds,
    /// The gathering of sharded weights, if ranks keep shards.
    pub(crate) gather: Option<Arc<dyn Gather>>,
}

/// The ends of a decoder that tensor parallelism shards.
#[derive(Clone, Copy, Debug)]
struct CutEnds {
    embedding: bool,
    head: bool,
}

impl CutEnds {
    fn new(table: &WeightTable) -> Self {
        let head = if table.is_tied() { WeightRole::Embedding } else { WeightRole::Head };
        Self { embedding: table.is_cut_outside(WeightRole::Embedding), head: table.is_cut_outside(head) }
    }
}

/// The ranks of a stage, if there are several.
#[derive(Clone, Default)]
pub struct StageRanks {
    /// The ranks that have tokens, and that the experts are spread over.
    pub experts: Option<ExpertRanks>,
    /// The ranks that shard the matrices of other layers.
    pub tensor: Option<TensorRanks>,
}

impl Stage {
    /// Makes the stage `part` of a model of `config`, whose `vocab_size` must be set, with the weights of `table`.
    /// Fails if a setting is out of range, if the model has no such layers, and for a model with an encoder or
    /// relative positions, which cannot be cut.
    pub fn new(config: ModelConfig, table: Arc<WeightTable>, part: StagePart) -> Result<Self, ConfigError> {
        Self::over_ranks(config, table, part, StageRanks::default())
    }

    /// Makes a stage on the ranks of `ranks`; see [`new`](Self::new). Weights are this rank's parts.
    pub fn over_ranks(
        config: ModelConfig,
        table: Arc<WeightTable>,
        part: StagePart,
        ranks: StageRanks,
    ) -> Result<Self, ConfigError> {
        check_part(&config, &part)?;
        Self::on_ranks(config, table, part, ranks)
    }

    pub(crate) fn on_ranks(
        config: ModelConfig,
        table: Arc<WeightTable>,
        part: StagePart,
        ranks: StageRanks,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        if config.vocab_size == 0 {
            return Err(ConfigError::new("vocab_size", 0, "must be at least 1"));
        }
        let layers = layers(&config, Stack::Decoder, part.layers.clone(), &ranks, &table)?;
        Ok(Self::from_layers(config, part, Stack::Decoder, layers, ranks, table))
    }

    /// Makes the encoder of a model whose decoder has `num_decoder_layers` layers; `config` is that of the encoder's
    /// layers.
    pub(crate) fn encoder(
        config: ModelConfig,
        table: Arc<WeightTable>,
        num_decoder_layers: usize,
    ) -> Result<Self, ConfigError> {
        let part = StagePart { has_head: false, ..StagePart::whole(config.num_layers) };
        let layers = layers(&config, Stack::Encoder, part.layers.clone(), &StageRanks::default(), &table)?;
        let num_layers = config.num_layers + num_decoder_layers;
        let stage = Self::from_layers(config, part, Stack::Encoder, layers, StageRanks::default(), table);
        Ok(Self { num_layers, ..stage })
    }

    fn from_layers(
        config: ModelConfig,
        part: StagePart,
        stack: Stack,
        layers: Vec<Layer>,
        ranks: StageRanks,
        table: Arc<WeightTable>,
    ) -> Self {
        let StageRanks { experts: ranks, tensor } = ranks;
        let num_layers = config.num_encoder_layers() + config.num_layers;
        let (rope, cut_ends, gather) = (RopeTables::default(), CutEnds::new(&table), None);
        Self { config, part, stack, layers, num_layers, rope, ranks, remote: None, tensor, table, cut_ends, gather }
    }

    /// Spreads the experts of a stage in use over the ranks of `remote`.
    pub(crate) fn set_remote_experts(&mut self, remote: &RemoteExperts) {
        for layer in &mut self.layers {
            let number = layer.number;
            let moe = layer.feed_forward.moe.take();
            layer.feed_forward.moe = moe.map(|moe| moe.with_remote_experts(remote.layer(number)));
        }
        self.remote = Some(remote.clone());
    }

    /// Returns whether a model of `config` can be cut into stages: one without encoder and relative positions.
    #[must_use]
    pub fn can_cut(config: &ModelConfig) -> bool {
        let has_relative = matches!(config.variant.positions, PositionKind::Relative { .. });
        config.variant.encoder.is_none() && !has_relative
    }

    /// Returns the configuration of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the part of the model.
    #[must_use]
    pub fn part(&self) -> &StagePart {
        &self.part
    }

    /// Returns this stage's weights out of those of the whole model, with shared memory; the tensors of other stages
    /// are empty.
    #[must_use]
    pub fn weights_of(&self, ctx: &Context, weights: &DecoderWeights) -> DecoderWeights {
        let mut specs = self.table.specs().iter();
        weights.map_tensors(|tensor| {
            let spec = specs.next().expect("the table is of the same model");
            match self.part.holds(spec, self.table.is_tied()) {
                true => tensor.clone(),
                false => ctx.empty(&[0], tensor.dtype()),
            }
        })
    }

    /// Returns the model's layer `index`, which the stage must have.
    pub(crate) fn layer_block(&self, index: usize) -> &Layer {
        &self.layers[index - self.part.layers.start]
    }

    /// Returns the layers' weights in this stage's stack.
    fn layer_weights<'w>(&self, weights: &'w DecoderWeights) -> &'w [LayerWeights] {
        match self.stack {
            Stack::Decoder => &weights.layers,
            Stack::Encoder => &weights.encoder.as_ref().expect(WRONG_KIND).layers,
        }
    }

    /// Returns the whole weights of a layer; `next` is the layer that follows in the pass, which may be prefetched.
    pub(crate) fn whole_layer<'w>(
        &self,
        ctx: &Context,
        weights: &'w DecoderWeights,
        index: usize,
        next: Option<usize>,
    ) -> Cow<'w, LayerWeights> {
        match &self.gather {
            None => Cow::Borrowed(&self.layer_weights(weights)[index]),
            Some(gather) => Cow::Owned(gather.layer(ctx, weights, index, next)),
        }
    }

    /// Returns weights that are whole outside the layers, if `weights` are shards.
    pub(crate) fn gathered(&self, ctx: &Context, weights: &DecoderWeights) -> Option<DecoderWeights> {
        self.gather.as_ref().map(|gather| gather.outside(ctx, weights))
    }

    /// Returns the rules of routers in a training pass over `token_ids`.
    pub(crate) fn training_rules<'a>(&self, token_ids: &'a [u32], options: &PassOptions) -> RouterRules<'a> {
        RouterRules::training(token_ids, options, self.num_layers)
    }

    /// Begins a pass over `sequences`; a decoder's layers attend to `encoder_output`.
    pub(crate) fn pass<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        mode: Mode,
        sequences: Sequences,
        router: RouterRules<'a>,
        encoder_output: Option<EncoderOutput>,
    ) -> Pass<'a> {
        let mut pass = Pass::new(ctx, mode, sequences, router);
        let lens = [sequences.len, sequences.end()];
        match self.stack {
            Stack::Encoder => {
                let relative = weights.encoder.as_ref().expect(WRONG_KIND).relative.as_ref();
                pass.relative = Relative::of(&self.config, relative, false, lens);
            }
            Stack::Decoder => {
                pass.relative = Relative::of(&self.config, weights.relative.as_ref(), true, lens);
                pass.rope = self.rope.get(&self.config, sequences.end());
                pass.tensor = self.tensor.as_ref();
                pass.encoder_output = encoder_output;
            }
        }
        pass
    }

    /// Divides the tokens of a pass into `segments`.
    pub(crate) fn set_segments(&self, pass: &mut Pass<'_>, segments: Segments) {
        pass.positions = segments.positions(pass.ctx);
        pass.rope = self.rope.get(&self.config, segments.longest_end());
        pass.segments = Some(segments);
    }

    /// Keeps the segments of a batch's sequences apart in a pass.
    pub(crate) fn set_documents(&self, pass: &mut Pass<'_>, batch: &TokenBatch<'_>) {
        if batch.has_pieces() {
            self.set_segments(pass, Segments::documents(batch.segments));
        }
    }

    /// Returns the residual stream after the stage's last layer in a pass that keeps nothing. `caches` are those of
    /// the whole model's layers; `hook` sees the routing of each MoE layer.
    pub(crate) fn forward_layers(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        mut stream: ResidualStream,
        caches: Option<Vec<LayerKv<'_>>>,
        mut hook: Option<RoutingHook<'_>>,
    ) -> ResidualStream {
        let end = self.part.layers.end;
        let whole = |index: usize| self.whole_layer(pass.ctx, weights, index, after(index, end));
        let mut caches = caches.map(|caches| caches.into_iter().skip(self.part.layers.start));
        for (place, layer) in self.layers.iter().enumerate() {
            let w = whole(layer.index);
            let next_weights = || whole(layer.index + 1);
            let next = self.layers.get(place + 1).map(|layer| NextLayer { layer, weights: &next_weights });
            let cache = caches.as_mut().and_then(Iterator::next);
            let (behind, saved) = layer.forward(pass, &w, &stream, cache, next);
            stream = behind;
            if let (Some(hook), Some(saved)) = (&mut hook, saved.moe()) {
                hook(layer.index, saved);
            }
        }
        stream
    }

    /// Returns the residual stream before the stage's first layer: the embedded tokens, or that of the stage before.
    fn entry(
        &self,
        pass: &Pass<'_>,
        weights: &DecoderWeights,
        ids: Ids<'_>,
        from: Option<ResidualStream>,
    ) -> ResidualStream {
        from.unwrap_or_else(|| ResidualStream { x: self.embed(pass, weights, ids), router_logits: None })
    }
}

/// Fails if the model has no such part, or cannot be cut.
fn check_part(config: &ModelConfig, part: &StagePart) -> Result<(), ConfigError> {
    let Range { start, end } = part.layers;
    if start > end || end > config.num_layers {
        let expected = format!("must be layers of the model, which has {}", config.num_layers);
        return Err(ConfigError::new("layers", format!("{start}..{end}"), expected));
    }
    if !Stage::can_cut(config) {
        let expected = "must be a model without encoder and relative positions: others are not cut into stages";
        return Err(ConfigError::new("model", "given", expected));
    }
    Ok(())
}

/// Makes the layers `range` of a stack; `config` is that of the stack's layers.
fn layers(
    config: &ModelConfig,
    stack: Stack,
    range: Range<usize>,
    ranks: &StageRanks,
    table: &WeightTable,
) -> Result<Vec<Layer>, ConfigError> {
    let moe_config = config.moe();
    let is_cut = |i, group| stack == Stack::Decoder && table.is_cut_in_layer(i, group);
    let split = ranks.tensor.as_ref().map(TensorRanks::split);
    let layer = |i: usize| {
        let moe_layer = || match &ranks.experts {
            None => MoeLayer::new(moe_config.clone()),
            Some(ranks) => MoeLayer::expert_parallel(moe_config.clone(), ranks.layer(i)),
        };
        let moe = config.is_moe_layer(i).then(moe_layer).transpose()?;
        Ok(Layer {
            index: i,
            number: config.num_encoder_layers() + i,
            moe_index: config.is_moe_layer(i).then(|| (0..i).filter(|&i| config.is_moe_layer(i)).count()),
            attention: AttentionBlock::new(config, i, split.filter(|_| is_cut(i, WeightGroup::Attention))),
            cross: config.variant.encoder.is_some().then(|| CrossBlock::new(config, i)),
            feed_forward: FeedForwardBlock {
                moe,
                activation: config.activation.into(),
                norm: Norm { eps: config.norm_eps },
                residual_multiplier: config.variant.residual_multiplier,
                is_cut: is_cut(i, WeightGroup::Dense),
            },
            expert_capacity: config.variant.expert_capacity,
        })
    };
    range.map(layer).collect()
}
