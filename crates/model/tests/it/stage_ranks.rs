//! Models whose layers are spread over ranks: each rank loads its part of the files, and logits, statistics and
//! routing have the bits of one rank.

use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};
use moeworks_model::gguf::GgufFile;
use moeworks_model::hf::load_part;
use moeworks_model::{
    BatchError, Decoder, DecoderWeights, KvCache, ModelConfig, ModelPart, PagedKvCache, RemoteStages, SequencePart,
    Stage, StagePart, StageRanks, TokenBatch, WantedLogits, WeightTable, serve_stage,
};
use moeworks_moe::{LayerStats, MoeSaved};
use moeworks_ops::Context;

use crate::common::fixture;
use crate::expert_ranks::{FOLDERS, GGUFS, Load, Loaded};
use crate::ragged::windowed;
use crate::stages::models;

fn num_bytes(weights: &DecoderWeights) -> usize {
    weights.tensors().iter().map(|(_, tensor)| tensor.num_bytes()).sum()
}

/// The choices of one MoE layer.
#[derive(Debug, PartialEq)]
struct Choices {
    layer: usize,
    expert_ids: Vec<u32>,
    weights: Vec<f32>,
    num_dropped: usize,
}

impl Choices {
    fn new(layer: usize, saved: &MoeSaved) -> Self {
        let (routing, dispatch) = (saved.routing(), saved.dispatch());
        let (expert_ids, weights) = (routing.expert_ids().to_vec(), routing.expert_weights().to_vec());
        Self { layer, expert_ids, weights, num_dropped: dispatch.num_dropped() }
    }
}

/// Results of all kinds of passes.
#[derive(Debug, Default, PartialEq)]
struct Found {
    whole: Vec<f32>,
    cached: Vec<Vec<f32>>,
    ragged: Vec<Vec<f32>>,
    loss: f64,
    layers: Vec<LayerStats>,
    choices: Vec<Choices>,
}

/// A model on the rank that makes the passes.
struct Model<'a> {
    ctx: &'a Context,
    decoder: &'a Decoder,
    weights: &'a DecoderWeights,
}

impl Model<'_> {
    fn ids(&self, count: usize) -> Vec<u32> {
        let vocab_size = self.decoder.config().vocab_size as u32;
        (0..count as u32).map(|i| (i * 7 + 3) % vocab_size).collect()
    }

    fn found(&self) -> Result<Found, BatchError> {
        let Self { ctx, decoder, weights } = *self;
        let (ids, mut choices) = (self.ids(24), Vec::new());
        let whole = decoder.logits(ctx, weights, &ids, 2, None)?.to_f32_vec();
        // Documents in a sequence do not see each other.
        let segments = [8, 3, 5, 8];
        let segments = if decoder.check_ragged().is_ok() { &segments[..] } else { &[] };
        let batch = TokenBatch { segments, ..TokenBatch::without_targets(&ids, 3) };
        let mut hook = |layer: usize, saved: &MoeSaved| choices.push(Choices::new(layer, saved));
        let stats = decoder.evaluate(ctx, weights, &batch, Some(&mut hook))?;
        // The second cache is another one in the memory of the first, perhaps.
        let cached = [self.cached()?, self.cached()?].concat();
        let ragged = self.ragged()?;
        Ok(Found { whole, cached, ragged, loss: stats.loss_sum, layers: stats.layers, choices })
    }

    /// Returns the logits of a text that grows, is shortened and grows again.
    fn cached(&self) -> Result<Vec<Vec<f32>>, BatchError> {
        let ids = self.ids(40);
        let mut cache = KvCache::new(self.decoder.config());
        let next = |cache: &mut KvCache, count: usize| {
            let ids = &ids[cache.len()..cache.len() + count];
            Ok::<_, BatchError>(self.decoder.forward_cached(self.ctx, self.weights, cache, ids, None)?.to_f32_vec())
        };
        let mut logits = vec![next(&mut cache, 12)?, next(&mut cache, 1)?, next(&mut cache, 1)?];
        for len in [9, 11, 0] {
            cache.truncate(len);
            logits.extend([next(&mut cache, 20)?, next(&mut cache, 1)?]);
        }
        Ok(logits)
    }

    /// Returns the logits of sequences of different lengths, one of which begins with a copy of another's block.
    fn ragged(&self) -> Result<Vec<Vec<f32>>, BatchError> {
        let Self { ctx, decoder, weights } = *self;
        let ids = self.ids(200);
        let mut cache = PagedKvCache::new(decoder.config(), 99, 4);
        let part = |ids, start, blocks, logits| SequencePart { ids, start, blocks, logits, ..SequencePart::default() };
        let first =
            [part(&ids[..7], 0, &[6, 1, 2][..], WantedLogits::All), part(&ids[3..8], 0, &[0, 4], WantedLogits::None)];
        let mut hook = |_: usize, _: &MoeSaved| ();
        let mut logits = vec![decoder.forward_ragged(ctx, weights, &mut cache, &first, Some(&mut hook))?.to_f32_vec()];
        cache.copy_block(ctx, 6, 8);
        let second = [
            part(&ids[8..9], 5, &[0, 4][..], WantedLogits::Last),
            part(&ids[7..9], 7, &[6, 1, 2], WantedLogits::Last),
            part(&ids[9..12], 4, &[8, 5], WantedLogits::All),
        ];
        logits.push(decoder.forward_ragged(ctx, weights, &mut cache, &second, None)?.to_f32_vec());
        if decoder.config().max_seq_len >= 150 {
            // So many tokens that stages may divide them among several passes.
            let blocks: Vec<u32> = (10..99).collect();
            let third = [
                part(&ids[12..15], 7, &[8, 5, 9][..], WantedLogits::All),
                part(&ids[..130], 0, &blocks[..33], WantedLogits::All),
                part(&ids[50..170], 0, &blocks[33..63], WantedLogits::Last),
                part(&ids[9..10], 9, &[6, 1, 2], WantedLogits::Last),
            ];
            logits.push(decoder.forward_ragged(ctx, weights, &mut cache, &third, Some(&mut hook))?.to_f32_vec());
        }
        Ok(logits)
    }
}

/// Cuts the layers of a model evenly; the first part has both ends.
fn parts(num_layers: usize, num_stages: usize) -> Vec<StagePart> {
    let bound = |stage: usize| num_layers * stage / num_stages;
    let part = |stage: usize| StagePart {
        layers: bound(stage)..bound(stage + 1),
        has_embedding: stage == 0,
        has_head: stage == 0,
    };
    (0..num_stages).map(part).collect()
}

/// Returns what the root of so many stages finds, and the bytes of the weights of each rank.
fn on_stages(ctx: &Context, load: Load<'_>, num_layers: usize, num_stages: usize) -> Vec<(Found, usize)> {
    let parts = parts(num_layers, num_stages);
    let rank = |comm: &dyn Communicator| {
        let part = parts[comm.rank()].clone();
        let whole = Box::new(ModelPart::Whole);
        let (config, weights) = load(ctx, &ModelPart::Stage { stage: part.clone(), rest: whole });
        let (own, num_bytes) = (comm.split(Some(0), comm.rank())?.expect("a group"), num_bytes(&weights));
        if comm.rank() > 0 {
            let table = WeightTable::new(&config).into();
            let stage = Stage::over_ranks(config, table, part, StageRanks::default()).unwrap();
            serve_stage(ctx, &stage, &weights, &*own)?;
            return Ok::<_, CommError>((Found::default(), num_bytes));
        }
        let stages = RemoteStages::new(own);
        let decoder = Decoder::over_stages(config, part.layers.len(), &stages).unwrap();
        let model = Model { ctx, decoder: &decoder, weights: &weights };
        let found = model.found().map_err(|error| CommError::Start(error.to_string()))?;
        decoder.end_ranks()?;
        Ok((found, num_bytes))
    };
    try_run_ranks::<_, CommError>(&RankOptions::new(num_stages), rank).unwrap()
}

fn assert_same(name: &str, ctx: &Context, load: Load<'_>) {
    let (config, weights) = load(ctx, &ModelPart::Whole);
    let (num_layers, whole) = (config.num_layers, num_bytes(&weights));
    let decoder = Decoder::new(config).unwrap();
    let expected = Model { ctx, decoder: &decoder, weights: &weights }.found().unwrap();
    assert!(expected.choices.iter().all(|choices| choices.num_dropped == 0), "{name}");
    for num_stages in 2..=num_layers.min(3) {
        let found = on_stages(ctx, load, num_layers, num_stages);
        assert_eq!(found[0].0, expected, "{name}: {num_stages} stages");
        let held: usize = found.iter().map(|(_, num_bytes)| num_bytes).sum();
        assert_eq!(held, whole, "{name}: each weight is on one rank");
        assert!(found.iter().all(|(_, num_bytes)| *num_bytes < whole), "{name}: no rank has all weights");
    }
}

#[test]
fn folders_over_stages_give_the_bits_of_one_rank() {
    let ctx = Context::cpu(1);
    // A model with an encoder is not spread over stages.
    for name in FOLDERS.into_iter().filter(|name| *name != "switch") {
        assert_same(name, &ctx, &|ctx, part| load_part(ctx, &fixture(name), part).unwrap());
    }
}

#[test]
fn gguf_files_over_stages_give_the_bits_of_one_rank() {
    let ctx = Context::cpu(1);
    for name in GGUFS {
        let path = fixture("gguf").join(format!("{name}.gguf"));
        assert_same(name, &ctx, &|ctx, part| GgufFile::open(&path).unwrap().load_part(ctx, part).unwrap());
    }
}

/// Returns the weights of a part of the model that `config` and a seed make.
fn made(ctx: &Context, config: &ModelConfig, part: &ModelPart) -> Loaded {
    let weights = Decoder::new(config.clone()).unwrap().init(ctx, 7, None);
    let ModelPart::Stage { stage, .. } = part else { return (config.clone(), weights) };
    // The root of stages in use has both ends, so that a tied embedding is on one rank.
    let table = WeightTable::new(config).into();
    let stage = Stage::new(config.clone(), table, stage.clone()).unwrap();
    (config.clone(), stage.weights_of(ctx, &weights))
}

#[test]
fn models_that_pass_more_than_the_stream_give_the_bits_of_one_rank_over_three() {
    for ctx in [Context::cpu(1), Context::cpu(1).with_batch_invariance(true)] {
        for (name, config) in models().into_iter().chain([("windows", windowed())]) {
            let config = ModelConfig { max_seq_len: 1000, num_layers: 3, ..config };
            assert_same(name, &ctx, &|ctx, part| made(ctx, &config, part));
        }
    }
}
