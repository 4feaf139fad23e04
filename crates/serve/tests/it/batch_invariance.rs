//! Batch invariance of the engine: the tokens and the bits of the log-probabilities of a request are those that it
//! has alone, whatever is in the batch, whatever pieces its prompt is read in, whatever the prefix cache had of it,
//! and however often it was preempted.
//!
//! `./test full` takes OLMoE's own shape and a thousand requests.

use std::collections::{BTreeSet, HashMap};

use moeworks_infer::generation::{Sampler, SamplingOptions, TokenLogprobs};
use moeworks_infer::open::Model;
use moeworks_model::{Decoder, ModelConfig, QkNorm, Tokenizer, WeightRole};
use moeworks_moe::ScoreOrder;
use moeworks_ops::{Context, elementwise, quantized};
use moeworks_serve::{Counts, Engine, Limits, Output, Request, SequenceId, WantedLogprobs};
use moeworks_tensor::DType;

use crate::random_turns::Random;

/// Tokens that are drawn in a turn, at which kernels may change.
const ROWS: [usize; 5] = [1, 4, 12, 16, 17];

/// The parts of OLMoE's shape by which a test's model may be narrower.
#[derive(Clone, Copy)]
struct Shape {
    width: usize,
    expert_width: usize,
    vocab_size: usize,
}

const OLMOE: Shape = Shape { width: 2048, expert_width: 1024, vocab_size: 50_304 };
const NARROW: Shape = Shape { width: 256, expert_width: 128, vocab_size: 512 };

/// Two layers of OLMoE with random weights of a type. Each tensor is converted as soon as it is there.
fn model(shape: Shape, dtype: DType) -> Model {
    let ctx = Context::cpu(2).with_batch_invariance(true);
    let num_heads = shape.width / 128;
    let config = ModelConfig {
        vocab_size: shape.vocab_size,
        width: shape.width,
        num_layers: 2,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: 128,
        qk_norm: QkNorm::Whole,
        num_experts: 64,
        top_k: 8,
        expert_width: shape.expert_width,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: false,
        tie_embeddings: false,
        max_seq_len: 4096,
        init_std: 0.05,
        ..ModelConfig::default()
    };
    let decoder = Decoder::new(config).unwrap();
    let weights = decoder.init(
        &ctx,
        7,
        Some(&mut |spec, tensor| match spec.role.is_product() {
            false => tensor,
            true if dtype.is_quantized() && spec.role == WeightRole::Embedding => tensor,
            true if dtype.is_quantized() => quantized::quantize(&ctx, &tensor, dtype),
            true => elementwise::cast(&ctx, &tensor, dtype),
        }),
    );
    Model { ctx, decoder, weights, tokenizer: Tokenizer::bytes(), stop_ids: Vec::new(), part_checked: None }
}

/// The request with this number: prompts of 1 to 53 tokens, many of which begin alike, greedy ones and seeded ones.
/// Every fourth wants the log-probabilities of its prompt, too.
fn request(index: usize, vocab_size: usize) -> Request {
    let token = |i: usize| (i.wrapping_mul(7919) % vocab_size) as u32;
    let shared = (0..index % 4 * 12).map(|i| token(i + index % 3));
    let own = (0..1 + index * 5 % 17).map(|i| token(index * 31 + i * i));
    let temperature = if index.is_multiple_of(2) { 0.0 } else { 0.9 };
    let options = SamplingOptions { temperature, seed: index as u64, ..SamplingOptions::default() };
    Request {
        prompt: shared.chain(own).collect(),
        max_new_tokens: 2 + index * 7 % 11,
        sampler: Sampler::new(options).unwrap(),
        stops: Vec::new(),
        stop_ids: Vec::new(),
        priority: (index % 3) as i32,
        shows_special: false,
        salt: Vec::new(),
        experts_from: None,
        logprobs: Some(WantedLogprobs { num_top: 3, of_prompt: index.is_multiple_of(4) }),
    }
}

/// The tokens and the bits of the log-probabilities of an answer, those of its prompt first.
type Answer = Vec<(u32, u32)>;

fn bits(logprobs: &TokenLogprobs) -> impl Iterator<Item = (u32, u32)> {
    std::iter::once(&logprobs.token).chain(&logprobs.top).map(|one| (one.id, one.logprob.to_bits()))
}

/// The answers that come, and the numbers of tokens that turns draw.
#[derive(Default)]
struct Answers {
    found: HashMap<SequenceId, Answer>,
    rows: BTreeSet<usize>,
}

impl Answers {
    fn take(&mut self, outputs: &[Output]) {
        self.rows.insert(outputs.len());
        for output in outputs {
            assert_eq!(output.failure, None);
            let answer = self.found.entry(output.sequence).or_default();
            answer.extend(output.prompt.iter().flat_map(|prompt| &prompt.logprobs).flat_map(bits));
            answer.extend(output.logprobs.iter().flat_map(bits));
        }
    }
}

/// The answers to requests that are alone, each in as few passes as there can be.
fn alone(model: &Model, num_requests: usize, vocab_size: usize) -> Vec<Answer> {
    let mut engine = Engine::new(model, Limits { has_prefix_cache: false, ..Limits::default() }).unwrap();
    let one = |index| {
        let id = engine.add(request(index, vocab_size)).unwrap();
        let mut answers = Answers::default();
        while engine.has_requests() {
            answers.take(&engine.turn().unwrap());
        }
        answers.found.remove(&id).unwrap()
    };
    (0..num_requests).map(one).collect()
}

/// Requests under way together: how many changes at random, so that prompts are read in many kinds of pieces.
struct Crowd<'a> {
    engine: Engine<'a>,
    random: Random,
    answers: Answers,
    ids: Vec<(usize, SequenceId)>,
}

impl Crowd<'_> {
    /// Makes turns with as many requests at a time as each of [`ROWS`] says in turn, later also with some more, until
    /// none of `indices` is left to come.
    fn serve(&mut self, mut indices: impl Iterator<Item = usize>, vocab_size: usize) {
        let (mut is_over, mut phase) = (false, 0);
        while !is_over || self.engine.has_requests() {
            let num_more = if phase < ROWS.len() { 0 } else { self.random.below(8) };
            let num_together = ROWS[phase % ROWS.len()] + num_more;
            phase += 1;
            for _ in 0..self.random.between(3, 6) {
                while self.num_requests() < num_together && !is_over {
                    match indices.next() {
                        Some(index) => self.ids.push((index, self.engine.add(request(index, vocab_size)).unwrap())),
                        None => is_over = true,
                    }
                }
                self.answers.take(&self.engine.turn().unwrap());
            }
        }
    }

    fn num_requests(&self) -> usize {
        let Counts { running, waiting, .. } = self.engine.counts();
        running + waiting
    }
}

/// Compares the answers of requests alone and together, under limits that cut prompts and preempt answers.
fn compare(shape: Shape, dtype: DType, num_requests: usize) {
    let model = model(shape, dtype);
    let expected = alone(&model, num_requests, shape.vocab_size);
    assert!(expected.iter().any(|answer| answer[0] != expected[0][0]), "answers differ from request to request");
    // Half of the requests come to the first engine, which reads most prompts at once.
    let all_limits = [(512, 16, 1024), (24, 4, 20), (33, 1, 90), (64, 16, 8)];
    let limits_of = |index: usize| [0, 0, 1, 0, 2, 0, 1, 3][index % 8];
    let (mut rows, mut hits, mut preemptions) = (BTreeSet::<usize>::new(), 0, 0);
    for (i, (turn_tokens, block_len, num_blocks)) in all_limits.into_iter().enumerate() {
        let limits = Limits { turn_tokens, block_len, num_blocks, max_running: 24, ..Limits::default() };
        let engine = Engine::new(&model, limits).unwrap();
        let mut crowd = Crowd { engine, random: Random(i as u64), answers: Answers::default(), ids: Vec::new() };
        crowd.serve((0..num_requests).filter(|&index| limits_of(index) == i), shape.vocab_size);
        for (index, id) in &crowd.ids {
            assert!(crowd.answers.found[id] == expected[*index], "{dtype:?}: request {index} under {limits:?}");
        }
        assert_eq!(crowd.engine.counts().free_blocks, num_blocks);
        rows.extend(&crowd.answers.rows);
        (hits, preemptions) =
            (hits + crowd.engine.counts().prefix_hits, preemptions + crowd.engine.counts().preemptions);
    }
    assert!(ROWS.iter().all(|count| rows.contains(count)), "{rows:?}");
    assert!(hits > 0 && preemptions > 0, "{hits} tokens were in the prefix cache, {preemptions} preemptions");
}

/// Compares both types of weights.
fn compare_all(shape: Shape, num_requests: usize) {
    for dtype in [DType::BF16, DType::Q4] {
        compare(shape, dtype, num_requests);
    }
}

#[test]
fn log_probabilities_have_the_same_bits_alone_and_among_others() {
    compare_all(NARROW, 200);
}

#[test]
fn log_probabilities_of_olmoes_shape_have_the_same_bits_alone_and_among_others() {
    if std::env::var_os("MOEWORKS_FULL").is_some() {
        compare_all(OLMOE, 1000);
    }
}
