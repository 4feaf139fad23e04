//! A stage: consecutive layers of a model, with the embedding before them and the output projection behind them where it has these.
//!
//! [`Decoder`](crate::Decoder) is the stage of all layers with both ends, an encoder a stage without output projection. A model cut into
//! stages computes what the whole does, to the bit: over a cut goes a [`ResidualStream`] forward and its gradient back; the losses on
//! routers, which look at all layers, come to a stage as values.

mod checks;
mod embed_and_head;
mod on_ranks;
mod training;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use moeworks_moe::{ConfigError, ExpertRanks, MoeLayer, MoeSaved};
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
use crate::layers::pieces::Pieces;
use crate::layers::relative::Relative;
use crate::layers::{EncoderOutput, Pass, RouterRules, Sequences};
use crate::mode::Mode;
use crate::pass::{PassOptions, TokenBatch};
use crate::rope_tables::RopeTables;
use crate::tensor_ranks::TensorRanks;
use crate::weights::{DecoderWeights, LayerWeights, WeightGroup, WeightPlace, WeightRole, WeightSpec, WeightTable};

/// A hook that sees what each MoE layer decided, with the layer's number.
pub type RoutingHook<'a> = &'a mut dyn FnMut(usize, &MoeSaved);

/// The part of a model that a stage has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePart {
    /// Its layers.
    pub layers: Range<usize>,
    /// Whether it embeds tokens.
    pub has_embedding: bool,
    /// Whether it has the last norm and the output projection.
    pub has_head: bool,
}

impl StagePart {
    /// The whole of a model of `num_layers` layers.
    #[must_use]
    pub fn whole(num_layers: usize) -> Self {
        Self { layers: 0..num_layers, has_embedding: true, has_head: true }
    }

    /// The parts of a model that is cut before each layer in `cuts`, ascending: the first has the embedding, the last the head.
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

    /// Whether the stage needs the tensor. Where the output projection is the embedding, a stage with either end needs that.
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

/// The stack of a model that a stage is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stack {
    Encoder,
    Decoder,
}

/// Consecutive layers of a model, with embedding and output projection where it has them: what it computes. Weights are arguments: those
/// of the whole model, or those that [`weights_of`](Self::weights_of) leaves.
#[derive(Debug)]
pub struct Stage {
    pub(crate) config: ModelConfig,
    pub(crate) part: StagePart,
    stack: Stack,
    layers: Vec<Layer>,
    /// Layers of the model, an encoder's included.
    num_layers: usize,
    rope: RopeTables,
    /// The ranks that hold the experts, if not all are here.
    pub(crate) ranks: Option<ExpertRanks>,
    /// The ranks that hold the matrices between them, if not all here.
    pub(crate) tensor: Option<TensorRanks>,
    /// The weights of the model.
    pub(crate) table: Arc<WeightTable>,
    /// Whether ranks of `tensor` have parts of the embedding, and of the output projection.
    cut_ends: CutEnds,
    /// The maker of whole weights, if ranks keep parts of them.
    pub(crate) gather: Option<Arc<dyn Gather>>,
}

/// The ends of a decoder that are cut over tensor-parallel ranks.
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

/// The ranks that hold a stage between them, if there are several.
#[derive(Clone, Default)]
pub struct StageRanks {
    /// The ranks that have tokens, and hold experts.
    pub experts: Option<ExpertRanks>,
    /// The ranks that hold the matrices of other layers between them.
    pub tensor: Option<TensorRanks>,
}

impl Stage {
    /// The stage `part` of a model of `config`, whose `vocab_size` must be set, with the weights of `table`. Fails if a setting is out of
    /// range, if the model has no such layers, and for a model with an encoder or relative positions, which is not cut.
    pub fn new(config: ModelConfig, table: Arc<WeightTable>, part: StagePart) -> Result<Self, ConfigError> {
        Self::over_ranks(config, table, part, StageRanks::default())
    }

    /// Makes one as [`new`](Self::new) does that lies on the ranks of `ranks`. Weights are this rank's parts.
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

    /// The encoder of a model whose decoder has `num_decoder_layers` layers; `config` is that of the encoder's layers.
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
        Self { config, part, stack, layers, num_layers, rope, ranks, tensor, table, cut_ends, gather }
    }

    /// The configuration of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The part of the model.
    #[must_use]
    pub fn part(&self) -> &StagePart {
        &self.part
    }

    /// The weights of this stage out of those of the whole model, whose memory they share: the tensors of other stages have no elements.
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

    /// The layer of the model with this number, which the stage must have.
    pub(crate) fn layer_block(&self, index: usize) -> &Layer {
        &self.layers[index - self.part.layers.start]
    }

    /// The layers' weights in this stage's stack.
    fn layer_weights<'w>(&self, weights: &'w DecoderWeights) -> &'w [LayerWeights] {
        match self.stack {
            Stack::Decoder => &weights.layers,
            Stack::Encoder => &weights.encoder.as_ref().expect(WRONG_KIND).layers,
        }
    }

    /// The whole weights of a layer; the pass goes on to `next`.
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

    /// The weights of a pass with whole tensors outside the layers, if `weights` are parts.
    pub(crate) fn gathered(&self, ctx: &Context, weights: &DecoderWeights) -> Option<DecoderWeights> {
        self.gather.as_ref().map(|gather| gather.outside(ctx, weights))
    }

    /// The rules of routers in a training pass over `token_ids`.
    pub(crate) fn training_rules<'a>(&self, token_ids: &'a [u32], options: &PassOptions) -> RouterRules<'a> {
        RouterRules::training(token_ids, options, self.num_layers)
    }

    /// A pass over `sequences`; `encoder_output` are the sources that a decoder's layers attend to.
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

    /// Makes the tokens of a pass those of `pieces`.
    pub(crate) fn set_pieces(&self, pass: &mut Pass<'_>, pieces: Pieces) {
        pass.positions = pieces.positions(pass.ctx);
        pass.rope = self.rope.get(&self.config, pieces.longest_end());
        pass.pieces = Some(pieces);
    }

    /// Keeps the pieces of a batch's sequences separate in a pass.
    pub(crate) fn set_documents(&self, pass: &mut Pass<'_>, batch: &TokenBatch<'_>) {
        if batch.has_pieces() {
            self.set_pieces(pass, Pieces::documents(batch.segments));
        }
    }

    /// The stream behind the stage's last layer in a pass that keeps nothing. `caches` are those of the whole model's layers; `hook` sees
    /// what each MoE layer decided.
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

    /// The stream before the stage's first layer: the embedded tokens, or that of the stage before.
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

/// Refuses a part that a model of `config` does not have, or that it is not cut into.
fn check_part(config: &ModelConfig, part: &StagePart) -> Result<(), ConfigError> {
    let Range { start, end } = part.layers;
    if start > end || end > config.num_layers {
        let expected = format!("must be layers of the model, which has {}", config.num_layers);
        return Err(ConfigError::new("layers", format!("{start}..{end}"), expected));
    }
    let has_relative = matches!(config.variant.positions, PositionKind::Relative { .. });
    if config.variant.encoder.is_some() || has_relative {
        let expected = "must be a model without encoder and relative positions: others are not cut into stages";
        return Err(ConfigError::new("model", "given", expected));
    }
    Ok(())
}

/// The layers `range` of a stack; `config` is that of the stack's layers.
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
