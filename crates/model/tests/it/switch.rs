//! Switch Transformers compared with `transformers`: an encoder reads, a decoder answers.

use std::path::PathBuf;

use moeworks_model::hf::{SaveOptions, load_model, save_model};
use moeworks_model::safetensors::SafetensorsFile;
use moeworks_model::{
    BalanceKind, BatchError, Decoder, DecoderWeights, GradTarget, KvCache, PassOptions, PassStats, RouterNoise,
    SourceBatch, TokenBatch, Tokenizer,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;
use serde_json::{Value, json};

use crate::common::{assert_close, assert_same_bits, batch, fixture, greedy};
use crate::fixtures::{TOLERANCE, assert_as_expected, compare_gradients, expected_json, save_and_load};

/// A fixture with the results of `transformers`.
pub(crate) struct Case {
    ctx: Context,
    dir: PathBuf,
    decoder: Decoder,
    weights: DecoderWeights,
    expected: Value,
    sources: Vec<u32>,
    /// The decoder's inputs and targets.
    answers: [Vec<u32>; 2],
    num_sequences: usize,
}

impl Case {
    pub(crate) fn of(dir: PathBuf) -> Self {
        Self::on(Context::cpu(2), dir)
    }

    pub(crate) fn on(ctx: Context, dir: PathBuf) -> Self {
        let (config, weights) = load_model(&ctx, &dir).unwrap();
        let weights = weights.compute_copy(&ctx, DType::F32);
        let expected = expected_json(&dir);
        let rows = |key: &str| -> Vec<Vec<u32>> { serde_json::from_value(expected[key].clone()).unwrap() };
        let start_id = config.variant.encoder.as_ref().unwrap().start_id;
        let shifted = |row: &Vec<u32>| [&[start_id], &row[..row.len() - 1]].concat();
        let labels = rows("label_ids");
        let answers = [labels.iter().flat_map(shifted).collect(), labels.concat()];
        let (sources, num_sequences) = (rows("source_ids").concat(), labels.len());
        let decoder = Decoder::new(config).unwrap();
        Self { ctx, dir, decoder, weights, expected, sources, answers, num_sequences }
    }

    fn sources(&self) -> SourceBatch<'_> {
        SourceBatch { ids: &self.sources, num_sequences: self.num_sequences }
    }

    fn answers(&self) -> TokenBatch<'_> {
        let answers = batch(&self.answers[0], &self.answers[1], self.answers[0].len() / self.num_sequences);
        TokenBatch { sources: &self.sources, ..answers }
    }

    /// The losses and gradients of one training step.
    fn step(&self, options: &PassOptions) -> (PassStats, DecoderWeights) {
        let Self { ctx, decoder, weights, .. } = self;
        let mut grads = weights.map_named(|_, tensor| {
            let mut rest = ctx.zeros(tensor.shape(), DType::F32);
            rest.f32s_mut().fill(9.0);
            rest
        });
        let how = Write::Replace;
        let stats = decoder
            .forward_backward(ctx, weights, &[self.answers()], options, GradTarget::new(how, &mut grads))
            .unwrap()
            .remove(0);
        (stats, grads)
    }

    fn options(&self) -> PassOptions {
        let coefficient = |key: &str| self.expected[key].as_f64().unwrap() as f32;
        PassOptions {
            balance: BalanceKind::Layer,
            balance_coef: coefficient("aux_coef"),
            z_coef: coefficient("z_coef"),
            grad_scale: 1.0 / self.answers[1].len() as f32,
            ..PassOptions::default()
        }
    }

    /// Compares the losses of one step, and every gradient.
    pub(crate) fn compare_step(&self) {
        let (stats, grads) = self.step(&self.options());
        assert_eq!(stats.num_targets, self.answers[1].len());
        assert_as_expected(&self.expected, "cross_entropy", stats.mean_loss());
        assert_as_expected(&self.expected, "aux_loss", stats.balance_loss);
        assert_as_expected(&self.expected, "z_loss", stats.z_loss);
        compare_gradients(&self.ctx, &grads, &self.dir.join("grads"));
    }

    /// Compares logits and loss of answers, greedy ids, and the folder written and read again. Returns the number of
    /// dropped tokens.
    pub(crate) fn compare(&self) -> usize {
        let Self { ctx, dir, decoder, weights, .. } = self;
        let memory = decoder.encode(ctx, weights, &self.sources(), None).unwrap();
        let logits = decoder.logits(ctx, weights, &self.answers[0], memory.num_sequences(), Some(&memory)).unwrap();
        let tensors = SafetensorsFile::open(&dir.join("expected.safetensors")).unwrap();
        assert_close("logits", logits.f32s(), tensors.tensor(ctx, "logits").unwrap().f32s(), TOLERANCE);
        let stats = decoder.evaluate(ctx, weights, &self.answers(), None).unwrap();
        assert_as_expected(&self.expected, "cross_entropy", stats.mean_loss());
        assert_eq!(stats.layers.len(), decoder.config().moe_layers().len());
        assert_eq!(self.greedy(), self.wanted_greedy());
        save_and_load(ctx, decoder, weights, dir, "switch_transformers");
        stats.layers.iter().map(|layer| layer.num_dropped).sum()
    }

    fn greedy(&self) -> Vec<u32> {
        let Self { ctx, decoder, weights, .. } = self;
        let ids = &self.sources[..self.sources.len() / self.num_sequences];
        let memory = decoder.encode(ctx, weights, &SourceBatch { ids, num_sequences: 1 }, None).unwrap();
        let config = decoder.config();
        let start = config.variant.encoder.as_ref().unwrap().start_id;
        greedy(ctx, decoder, weights, &mut KvCache::with_encoder_output(config, memory), &[start], 12)
    }

    /// Returns the expected greedy ids without the one that the decoder begins with.
    fn wanted_greedy(&self) -> Vec<u32> {
        let ids: Vec<u32> = serde_json::from_value(self.expected["greedy"].clone()).unwrap();
        ids[1..].to_vec()
    }
}

#[test]
fn switch_matches_transformers() {
    let case = Case::of(fixture("switch"));
    assert!(case.compare() > 0, "the fixture should exceed its capacity");
    case.compare_step();
}

#[test]
fn switch_with_untied_embeddings_and_router_biases_matches_transformers() {
    let case = Case::of(fixture("switch_untied"));
    assert!(case.compare() > 0, "the fixture should exceed its capacity");
    case.compare_step();
}

#[test]
fn a_step_with_noise_gives_the_same_gradients_when_layers_are_computed_again() {
    let case = Case::of(fixture("switch"));
    let options = PassOptions { noise: Some(RouterNoise { seed: 1, step: 3 }), ..case.options() };
    let (stats, grads) = case.step(&options);
    assert!((stats.z_loss - case.step(&case.options()).0.z_loss).abs() > 1e-6, "the noise should be seen");
    let (_, again) = case.step(&PassOptions { checkpoint_layers: true, ..options });
    assert_same_bits(&again, &grads);
}

#[test]
fn gradients_of_two_batches_add_up() {
    let case = Case::of(fixture("switch_untied"));
    let (_, grads) = case.step(&case.options());
    let (_, mut sum) = case.step(&case.options());
    let (ctx, options) = (&case.ctx, case.options());
    case.decoder
        .forward_backward(ctx, &case.weights, &[case.answers()], &options, GradTarget::new(Write::Add, &mut sum))
        .unwrap();
    for ((name, sum), (_, once)) in sum.tensors().into_iter().zip(grads.tensors()) {
        let twice: Vec<f32> = once.f32s().iter().map(|x| 2.0 * x).collect();
        assert_close(&name, sum.f32s(), &twice, 1e-5);
    }
}

#[test]
fn sources_are_read_apart_from_each_other() {
    let case = Case::of(fixture("switch"));
    let memory = case.decoder.encode(&case.ctx, &case.weights, &case.sources(), None).unwrap();
    let all =
        case.decoder.logits(&case.ctx, &case.weights, &case.answers[0], memory.num_sequences(), Some(&memory)).unwrap();
    let (source_len, answer_len) =
        (case.sources.len() / case.num_sequences, case.answers[0].len() / case.num_sequences);
    let ids = &case.sources[source_len..2 * source_len];
    let memory = case.decoder.encode(&case.ctx, &case.weights, &SourceBatch { ids, num_sequences: 1 }, None).unwrap();
    assert_eq!((memory.num_sequences(), memory.seq_len()), (1, source_len));
    let answer = &case.answers[0][answer_len..2 * answer_len];
    let one = case.decoder.logits(&case.ctx, &case.weights, answer, memory.num_sequences(), Some(&memory)).unwrap();
    let row = answer_len * case.decoder.config().vocab_size;
    assert_close("logits", one.f32s(), &all.f32s()[row..2 * row], 1e-6);
}

#[test]
fn what_a_model_with_an_encoder_does_not_do_is_said() {
    let case = Case::of(fixture("switch"));
    let Case { ctx, decoder, weights, .. } = &case;
    let step = batch(&[1, 2], &[2, 3], 2);
    assert_eq!(decoder.evaluate(ctx, weights, &step, None).unwrap_err(), BatchError::NoSource);
    assert_eq!(decoder.logits(ctx, weights, &[1, 2], 1, None).unwrap_err(), BatchError::NoSource);
    let mut cache = KvCache::new(decoder.config());
    assert_eq!(decoder.forward_cached(ctx, weights, &mut cache, &[1], None).unwrap_err(), BatchError::NoSource);
    let mut grads = weights.zeros_like(ctx);
    let options = PassOptions::default();
    let error = decoder
        .forward_backward(ctx, weights, &[step], &options, GradTarget::new(Write::Replace, &mut grads))
        .unwrap_err();
    assert_eq!(error, BatchError::NoSource);
    let empty = SourceBatch { ids: &[], num_sequences: 1 };
    assert_eq!(decoder.encode(ctx, weights, &empty, None).err(), Some(BatchError::Empty));
    let unknown = SourceBatch { ids: &[64], num_sequences: 1 };
    assert!(matches!(decoder.encode(ctx, weights, &unknown, None).err(), Some(BatchError::Id { .. })));
    let fewer = TokenBatch { sources: &case.sources[1..], ..case.answers() };
    let error = decoder.evaluate(ctx, weights, &fewer, None).unwrap_err();
    assert!(matches!(error, BatchError::Length { what: "sources", .. }), "{error}");
    let (config, weights) = load_model(ctx, &fixture("llama")).unwrap();
    let plain = Decoder::new(config).unwrap();
    assert_eq!(plain.encode(ctx, &weights, &case.sources(), None).err(), Some(BatchError::NoEncoder));
    assert_eq!(plain.evaluate(ctx, &weights, &case.answers(), None).err(), Some(BatchError::NoEncoder));
}

/// Otherwise `transformers` would begin an answer with the id that ends a text.
#[test]
fn a_folder_without_an_origin_says_what_an_answer_begins_with() {
    let (case, to) = (Case::of(fixture("switch")), tempfile::tempdir().unwrap());
    let tokenizer = Tokenizer::from_dir(&case.dir).unwrap();
    let options = SaveOptions { tokenizer: Some(&tokenizer), ..SaveOptions::default() };
    save_model(to.path(), case.decoder.config(), &case.weights, &options).unwrap();
    for name in ["generation_config.json", "config.json"] {
        let text = std::fs::read_to_string(to.path().join(name)).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["decoder_start_token_id"], &json["eos_token_id"]), (&json!(3), &json!(1)), "{name}");
    }
}

#[test]
fn a_source_is_encoded_as_transformers_does() {
    let (expected, tokenizer) = (expected_json(&fixture("switch")), Tokenizer::from_dir(&fixture("switch")).unwrap());
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (64, Some(1)));
    assert_eq!(tokenizer.sentinels(), [63, 62, 61, 60, 59, 58]);
    let texts: Vec<String> = serde_json::from_value(expected["texts"].clone()).unwrap();
    let ids: Vec<Vec<u32>> = texts.iter().map(|text| tokenizer.encode_source(text).unwrap()).collect();
    assert_eq!(json!(ids), expected["text_ids"]);
    let answer: Vec<u32> = serde_json::from_value(expected["answer"].clone()).unwrap();
    assert_eq!(tokenizer.decode(&answer).unwrap(), expected["answer_plain"]);
    assert_eq!(tokenizer.decode_with_special(&answer).unwrap(), expected["answer_text"]);
}
