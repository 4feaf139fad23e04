//! Models cut into stages, weight gradients as tasks, and the order of layers and microbatches: none of them changes
//! a bit.

use std::sync::Arc;

use moeworks_model::{
    BatchError, Decoder, DecoderWeights, GradTarget, LatentAttention, Mode, ModelConfig, PassOptions, PassOrder,
    PassStats, QkNorm, ResidualStream, RouterNoise, Stage, StageOutputGrads, StagePart, StageSaved, TokenBatch,
    Variant, WeightGradTask, WeightGrads, WeightTable, router_losses,
};
use moeworks_moe::{LayerStats, Ramp, RouterConfig, RouterKind};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_same_bits, batch, next_ids, random_ids, small_config};
use crate::decoder::fill_residuals;

const SEQ_LEN: usize = 9;

/// A model of OLMoE's kind with experts in every layer.
fn olmoe() -> ModelConfig {
    ModelConfig { num_layers: 4, moe_every: 1, qk_norm: QkNorm::Whole, jitter: Ramp::constant(0.05), ..small_config() }
}

/// Models with features that a cut into stages could break.
pub(crate) fn models() -> [(&'static str, ModelConfig); 6] {
    let variant = Variant { dense_layers: vec![0], ..Variant::default() };
    let dense_first = ModelConfig { variant, shared_width: 8, capacity_factor: 1.0, ..olmoe() };
    let latent = LatentAttention { query_rank: 12, kv_rank: 16, plain_dim: 6, rotary_dim: 4 };
    let variant = Variant { latent: Some(latent), value_dim: 7, ..Variant::default() };
    let latent =
        ModelConfig { variant, head_dim: 10, num_kv_heads: 4, qk_norm: QkNorm::None, num_layers: 3, ..olmoe() };
    let router = RouterConfig { gate_residual: true, ..RouterConfig::default() };
    // A dense layer between, which passes the logits on.
    let variant = Variant { dense_layers: vec![1], ..Variant::default() };
    let gating_residual = ModelConfig { router, variant, ..olmoe() };
    let router = RouterConfig { kind: RouterKind::Hash, ..RouterConfig::default() };
    let by_ids = ModelConfig { router, ..olmoe() };
    let tied = ModelConfig { tie_embeddings: true, ..small_config() };
    [
        ("OLMoE's kind", olmoe()),
        ("dense first layer", dense_first),
        ("latent attention", latent),
        ("gating residual", gating_residual),
        ("experts by ids", by_ids),
        ("tied embedding", tied),
    ]
}

fn options() -> PassOptions {
    PassOptions {
        balance_coef: 0.01,
        z_coef: 0.001,
        sequence_coef: 0.01,
        noise: Some(RouterNoise { seed: 5, step: 9 }),
        grad_scale: 0.02,
        ..PassOptions::default()
    }
}

struct Model {
    ctx: Context,
    decoder: Decoder,
    weights: DecoderWeights,
    inputs: Vec<u32>,
    targets: Vec<u32>,
}

impl Model {
    fn new(config: &ModelConfig, dtype: DType, num_sequences: usize) -> Self {
        let (ctx, decoder) = (Context::cpu(2), Decoder::new(config.clone()).unwrap());
        let mut weights = decoder.init(&ctx, 7, None);
        fill_residuals(&mut weights);
        let weights = weights.compute_copy(&ctx, dtype);
        let inputs = random_ids(config.vocab_size, num_sequences * SEQ_LEN, 1);
        let targets = next_ids(&inputs, SEQ_LEN);
        Self { ctx, decoder, weights, inputs, targets }
    }

    fn batch(&self) -> TokenBatch<'_> {
        batch(&self.inputs, &self.targets, SEQ_LEN)
    }

    /// Returns the tokens in so many microbatches.
    fn microbatches(&self, count: usize) -> Vec<TokenBatch<'_>> {
        let len = self.inputs.len() / count;
        let pieces = self.inputs.chunks(len).zip(self.targets.chunks(len));
        pieces.map(|(inputs, targets)| batch(inputs, targets, SEQ_LEN)).collect()
    }

    /// Returns gradients with values that every pass has to replace.
    fn stale_grads(&self) -> DecoderWeights {
        let grads = self.weights.zeros_like(&self.ctx);
        grads.map_tensors(|tensor| {
            let mut stale = self.ctx.zeros(tensor.shape(), DType::F32);
            stale.f32s_mut().fill(9.0);
            stale
        })
    }

    fn step(&self, batches: &[TokenBatch<'_>], options: &PassOptions) -> (Vec<PassStats>, DecoderWeights) {
        let mut grads = self.stale_grads();
        let target = GradTarget::new(Write::Replace, &mut grads);
        let stats = self.decoder.forward_backward(&self.ctx, &self.weights, batches, options, target).unwrap();
        (stats, grads)
    }

    fn stages(&self, cuts: &[usize]) -> Vec<StageWithWeights> {
        let config = self.decoder.config();
        let part = |part| {
            let stage = Stage::new(config.clone(), Arc::new(WeightTable::new(config)), part).unwrap();
            let weights = stage.weights_of(&self.ctx, &self.weights);
            let grads = stage.weights_of(&self.ctx, &self.stale_grads());
            StageWithWeights { stage, weights, grads }
        };
        StagePart::cut(config.num_layers, cuts).into_iter().map(part).collect()
    }

    /// Runs a training step of the stages, one after the other, forward and backward.
    fn step_in_stages(&self, stages: &mut [StageWithWeights], options: &PassOptions, when: WeightGrads) -> Step {
        let (ctx, batch) = (&self.ctx, self.batch());
        let (mut stream, mut saved, mut stats): (_, Vec<StageSaved<'_>>, Vec<LayerStats>) =
            (None, Vec::new(), Vec::new());
        let (halves, mut grads): (Vec<_>, Vec<_>) =
            stages.iter_mut().map(|of| ((&of.stage, &of.weights), &mut of.grads)).unzip();
        for (stage, weights) in &halves {
            let forward = stage.forward(ctx, weights, &batch, options, stream.take()).unwrap();
            stats.extend_from_slice(forward.saved.stats());
            stream = forward.stream;
            saved.push(forward.saved);
        }
        let mut loss_grads = router_losses(self.decoder.config(), &stats, options).grads;
        let (mut loss, mut tasks, mut embedding): (_, Vec<(usize, WeightGradTask)>, Option<Tensor>) =
            (None, Vec::new(), None);
        let mut stream: Option<ResidualStream> = None;
        for (index, saved) in saved.into_iter().enumerate().rev() {
            let ((stage, weights), grads) = (halves[index], &mut *grads[index]);
            let is_shared = stage.part().has_embedding && stage.config().tie_embeddings;
            if let Some(shared) = embedding.take_if(|_| is_shared) {
                grads.embedding = shared;
            }
            let own = loss_grads.split_off(loss_grads.len() - saved.stats().len());
            let output = StageOutputGrads { stream: stream.take(), loss_grads: own };
            let target = GradTarget::new(Write::Replace, grads);
            let back = stage.backward(ctx, weights, saved, output, target, when).unwrap();
            stream = back.stream;
            loss = loss.or(back.loss);
            tasks.extend(back.tasks.into_iter().map(|task| (index, task)));
            if stage.part().has_head {
                embedding = Some(grads.embedding.copied(ctx.pool()));
            }
        }
        assert!(stream.is_none() && loss_grads.is_empty());
        Step { loss_sum: loss.unwrap().loss_sum, stats, tasks }
    }
}

struct StageWithWeights {
    stage: Stage,
    weights: DecoderWeights,
    grads: DecoderWeights,
}

struct Step {
    loss_sum: f64,
    stats: Vec<LayerStats>,
    /// The tasks, with the index of their stage.
    tasks: Vec<(usize, WeightGradTask)>,
}

/// Compares every gradient of the whole model, bit by bit, with that of the first stage that has its weight; for a
/// shared embedding this has the sum.
fn assert_same_grads(what: &str, stages: &[StageWithWeights], whole: &DecoderWeights) {
    let of_stages: Vec<_> = stages.iter().map(|of| of.grads.tensors()).collect();
    // Some routers have no weight.
    let tensors = whole.tensors().into_iter().enumerate().filter(|(_, (_, tensor))| !tensor.is_empty());
    for (index, (name, expected)) in tensors {
        let found = of_stages.iter().map(|tensors| tensors[index].1).find(|tensor| !tensor.is_empty());
        let found = found.unwrap_or_else(|| panic!("{what}: no stage has {name}"));
        assert!(found.bytes() == expected.bytes(), "{what}: the gradient of {name} differs");
    }
}

/// Every single cut, and one cut into three.
fn cuts(num_layers: usize) -> Vec<Vec<usize>> {
    let single = (0..=num_layers).map(|cut| vec![cut]);
    single.chain([vec![1, num_layers - 1]]).collect()
}

#[test]
fn stages_give_the_loss_and_every_gradient_of_the_whole_to_the_bit() {
    for (name, config) in models() {
        for dtype in [DType::F32, DType::BF16] {
            let model = Model::new(&config, dtype, 3);
            for checkpoint_layers in [false, true] {
                let options = PassOptions { checkpoint_layers, ..options() };
                let (stats, whole) = model.step(&[model.batch()], &options);
                for cuts in cuts(config.num_layers) {
                    let what = format!("{name}, {dtype:?}, checkpoints {checkpoint_layers}, cut at {cuts:?}");
                    let mut stages = model.stages(&cuts);
                    let step = model.step_in_stages(&mut stages, &options, WeightGrads::AtOnce);
                    assert_eq!((step.loss_sum, &step.stats), (stats[0].loss_sum, &stats[0].layers), "{what}");
                    assert!(step.tasks.is_empty());
                    assert_same_grads(&what, &stages, &whole);
                }
            }
        }
    }
}

#[test]
fn stages_give_the_logits_of_the_whole_to_the_bit() {
    for (name, config) in models() {
        for dtype in [DType::F32, DType::BF16] {
            let model = Model::new(&config, dtype, 2);
            let whole = model.decoder.logits(&model.ctx, &model.weights, &model.inputs, 2, None).unwrap();
            let loss = model.decoder.evaluate(&model.ctx, &model.weights, &model.batch(), None).unwrap().loss_sum;
            for cuts in cuts(config.num_layers) {
                let stages = model.stages(&cuts);
                let through = |stream, of: &StageWithWeights| {
                    Some(of.stage.infer(&model.ctx, &of.weights, &model.batch(), Mode::Infer, stream).unwrap())
                };
                let stream = stages.iter().fold(None, through).unwrap();
                let StageWithWeights { stage, weights, .. } = stages.last().unwrap();
                let logits = stage.logits(&model.ctx, weights, &stream);
                assert!(logits.bytes() == whole.bytes(), "{name}, {dtype:?}, cut at {cuts:?}");
                assert_eq!(stage.loss(&model.ctx, weights, &stream, &model.targets).loss_sum, loss);
            }
        }
    }
}

#[test]
fn weight_gradients_that_are_run_late_and_in_any_order_have_the_same_bits() {
    for (name, config) in models() {
        for dtype in [DType::F32, DType::BF16] {
            // With one sequence experts have so few rows that their gradients are computed with those of inputs.
            for num_sequences in [1, 12] {
                let model = Model::new(&config, dtype, num_sequences);
                let (_, whole) = model.step(&[model.batch()], &options());
                for is_reversed in [true, false] {
                    let mut stages = model.stages(&[1]);
                    let mut tasks = model.step_in_stages(&mut stages, &options(), WeightGrads::Later).tasks;
                    assert_eq!(tasks.len(), 2 * config.num_layers, "one for attention, one for the feed-forward");
                    if is_reversed {
                        tasks.reverse();
                    } else {
                        tasks.rotate_left(3);
                    }
                    for (stage, task) in tasks {
                        assert!(stages[stage].stage.part().layers.contains(&task.layer()));
                        task.run(&model.ctx, &mut stages[stage].grads);
                    }
                    assert_same_grads(&format!("{name}, {dtype:?}, {num_sequences} sequences"), &stages, &whole);
                }
            }
        }
    }
}

#[test]
fn both_orders_of_layers_and_microbatches_give_the_same_bits() {
    for (name, config) in models() {
        for dtype in [DType::F32, DType::BF16] {
            let model = Model::new(&config, dtype, 12);
            for (count, checkpoint_layers) in [(1, false), (2, false), (3, true), (4, false)] {
                let batches = model.microbatches(count);
                let options = PassOptions { checkpoint_layers, ..options() };
                let (stats, grads) = model.step(&batches, &options);
                let by_layer = PassOptions { order: PassOrder::LayerByLayer, ..options };
                let (same, same_grads) = model.step(&batches, &by_layer);
                assert_eq!(stats.len(), count);
                for (one, other) in stats.iter().zip(&same) {
                    assert_eq!((one.loss_sum, &one.layers), (other.loss_sum, &other.layers), "{name}, {dtype:?}");
                    assert_eq!((one.balance_loss, one.z_loss), (other.balance_loss, other.z_loss));
                }
                assert_same_bits(&grads, &same_grads);
            }
        }
    }
}

#[test]
fn a_pass_over_microbatches_is_one_pass_for_each_that_adds_up() {
    let model = Model::new(&olmoe(), DType::BF16, 6);
    let batches = model.microbatches(3);
    let (stats, grads) = model.step(&batches, &options());
    let mut sum = model.stale_grads();
    for (micro, batch) in batches.iter().enumerate() {
        let noise = Some(RouterNoise { seed: 5, step: 9 + micro as u64 });
        let write = if micro == 0 { Write::Replace } else { Write::Add };
        let (target, options) = (GradTarget::new(write, &mut sum), PassOptions { noise, ..options() });
        let one = model.decoder.forward_backward(&model.ctx, &model.weights, &[*batch], &options, target).unwrap();
        assert_eq!((one[0].loss_sum, &one[0].layers), (stats[micro].loss_sum, &stats[micro].layers));
    }
    assert_same_bits(&grads, &sum);
}

#[test]
fn who_is_told_of_whole_gradients_hears_of_each_layer_once_after_the_last_microbatch() {
    let model = Model::new(&olmoe(), DType::F32, 4);
    for order in [PassOrder::MicrobatchByMicrobatch, PassOrder::LayerByLayer] {
        let options = PassOptions { order, ..options() };
        let (_, whole) = model.step(&model.microbatches(2), &options);
        let (mut grads, mut told) = (model.stale_grads(), Vec::new());
        let mut done = |layer: usize, grads: &mut DecoderWeights| {
            let of_layer = |grads: &DecoderWeights| grads.layers[layer].attention.o.weight.f32s().to_vec();
            assert_eq!(of_layer(grads), of_layer(&whole));
            told.push(layer);
        };
        let target = GradTarget { done: Some(&mut done), ..GradTarget::new(Write::Replace, &mut grads) };
        let batches = model.microbatches(2);
        model.decoder.forward_backward(&model.ctx, &model.weights, &batches, &options, target).unwrap();
        assert_eq!(told, [3, 2, 1, 0]);
    }
}

#[test]
fn a_stage_refuses_layers_that_there_are_not_and_streams_that_it_does_not_take() {
    let model = Model::new(&olmoe(), DType::F32, 1);
    let table = Arc::new(WeightTable::new(model.decoder.config()));
    let new = |layers| {
        let part = StagePart { layers, has_embedding: true, has_head: false };
        Stage::new(model.decoder.config().clone(), Arc::clone(&table), part)
    };
    let error = new(2..5).unwrap_err();
    assert_eq!(error.to_string(), "layers = 2..5: must be layers of the model, which has 4");
    let stage = new(0..2).unwrap();
    let (ctx, weights, batch, options) = (&model.ctx, &model.weights, model.batch(), options());
    let stream = stage.forward(ctx, weights, &batch, &options, None).unwrap().stream;
    let error = stage.forward(ctx, weights, &batch, &options, stream).err();
    assert_eq!(error, Some(BatchError::Stream { is_missing: false }));
    let forward = stage.forward(ctx, weights, &batch, &options, None).unwrap();
    let mut grads = model.stale_grads();
    let target = GradTarget::new(Write::Replace, &mut grads);
    let error =
        stage.backward(ctx, weights, forward.saved, StageOutputGrads::default(), target, WeightGrads::AtOnce).err();
    assert_eq!(error, Some(BatchError::Stream { is_missing: true }));
}
