//! Attention of sequences of different length, against the definition of each and against the bits that each gets
//! alone.

use moeworks_ops::attention::{
    AttentionGrads, AttentionHeads, AttentionInputs, AttentionOutput, AttentionSaved, AttentionShape, KeyRows,
    RaggedSequence, RaggedShape, attention_backward, attention_ragged, attention_ragged_backward, attention_with_sinks,
    sinks_backward, sinks_ragged_backward,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use proptest::prelude::*;

use crate::attention::{reference, reference_grads};
use crate::common::{assert_close, assert_within, contexts, doubles, gpu_contexts, normal_tensor, rounding, tensor};

/// Rows of keys and values of all cases.
const KEY_ROWS: usize = 640;

/// The rows of a sequence's keys.
#[derive(Clone, Debug)]
enum Rows {
    From(usize),
    Blocks(usize, Vec<u32>),
}

#[derive(Clone, Debug)]
struct Sequence {
    num_queries: usize,
    num_keys: usize,
    rows: Rows,
}

impl Sequence {
    fn from(first: usize, num_queries: usize, num_keys: usize) -> Self {
        Self { num_queries, num_keys, rows: Rows::From(first) }
    }

    /// A sequence in blocks drawn from all rows.
    fn scattered(block_len: usize, num_queries: usize, num_keys: usize, seed: u64) -> Self {
        let random = Random::new(seed, Purpose::Test, 9);
        let draw = |i| random.below(i, (KEY_ROWS / block_len) as u64) as u32;
        let blocks = (0..num_keys.div_ceil(block_len) as u64).map(draw).collect();
        Self { num_queries, num_keys, rows: Rows::Blocks(block_len, blocks) }
    }

    fn keys(&self) -> KeyRows<'_> {
        match &self.rows {
            &Rows::From(first) => KeyRows::Consecutive { first },
            Rows::Blocks(block_len, blocks) => KeyRows::Blocks { blocks, block_len: *block_len },
        }
    }

    fn row(&self, token: usize) -> usize {
        match &self.rows {
            Rows::From(first) => first + token,
            Rows::Blocks(block_len, blocks) => blocks[token / block_len] as usize * block_len + token % block_len,
        }
    }

    fn ragged(&self) -> RaggedSequence<'_> {
        RaggedSequence { num_queries: self.num_queries, num_keys: self.num_keys, keys: self.keys() }
    }
}

/// One query and one key; keys around the edge of a block; queries in pieces; long enough for several blocks and
/// ranges; no queries.
fn adversarial_lists() -> Vec<Vec<Sequence>> {
    let shared = |num_queries, num_keys| Sequence {
        num_queries,
        num_keys,
        rows: Rows::Blocks(16, vec![7, 7, 30, 2, 39, 0, 8, 9, 10, 11, 12, 31, 32, 33, 34, 35, 36]),
    };
    vec![
        vec![],
        vec![Sequence::from(3, 1, 1)],
        vec![Sequence::from(0, 0, 5), Sequence::from(0, 63, 63), Sequence::from(0, 64, 64), Sequence::from(7, 65, 65)],
        vec![Sequence::from(9, 1, 63), Sequence::from(100, 1, 64), Sequence::from(1, 1, 65), Sequence::from(0, 1, 600)],
        vec![Sequence::from(0, 130, 300), Sequence::from(8, 1, 129), Sequence::from(300, 2, 257), shared(17, 270)],
        vec![shared(1, 33), shared(1, 270), shared(5, 64), Sequence::scattered(16, 1, 200, 5), shared(0, 0)],
        vec![Sequence::scattered(1, 1, 70, 1), Sequence::scattered(3, 40, 100, 2), Sequence::scattered(128, 1, 500, 3)],
        vec![Sequence::scattered(256, 3, 400, 4), Sequence::scattered(7, 1, 333, 6), Sequence::from(640 - 65, 65, 65)],
    ]
}

fn heads([num_heads, num_kv_heads]: [usize; 2], head_dim: usize, window: Option<usize>) -> AttentionHeads {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim: head_dim, window, scale }
}

/// Groups of 1, 4 and 8 heads, windows shorter than a block, values of another size.
fn several_heads() -> Vec<AttentionHeads> {
    vec![
        heads([2, 2], 16, None),
        heads([4, 1], 32, Some(7)),
        AttentionHeads { value_dim: 20, ..heads([8, 1], 24, None) },
        AttentionHeads { value_dim: 40, ..heads([8, 2], 8, Some(100)) },
    ]
}

/// Documents of one row of training, with rows between them that belong to none.
fn documents() -> Vec<Sequence> {
    let lengths = [(0, 70), (70, 1), (75, 300), (376, 0), (376, 64), (445, 129)];
    lengths.map(|(first, len)| Sequence::from(first, len, len)).to_vec()
}

struct Case {
    heads: AttentionHeads,
    sequences: Vec<Sequence>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Option<Tensor>,
}

/// A sequence alone: tensors of its rows and their shape.
struct Alone {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape,
}

impl Case {
    fn new(ctx: &Context, heads: AttentionHeads, sequences: Vec<Sequence>, dtype: DType, seed: u64) -> Self {
        let rows: usize = sequences.iter().map(|sequence| sequence.num_queries).sum();
        let draw = |seed, shape: [usize; 2]| normal_tensor(ctx, seed, &shape, dtype);
        Self {
            q: draw(seed, [rows, heads.num_heads * heads.head_dim]),
            k: draw(seed + 1, [KEY_ROWS, heads.num_kv_heads * heads.head_dim]),
            v: draw(seed + 2, [KEY_ROWS, heads.num_kv_heads * heads.value_dim]),
            sinks: seed.is_multiple_of(2).then(|| normal_tensor(ctx, seed + 3, &[heads.num_heads], DType::F32)),
            heads,
            sequences,
        }
    }

    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs { q: &self.q, k: &self.k, v: &self.v, sinks: self.sinks.as_ref() }
    }

    fn run(&self, ctx: &Context) -> AttentionOutput {
        let sequences: Vec<_> = self.sequences.iter().map(Sequence::ragged).collect();
        attention_ragged(ctx, self.inputs(), &RaggedShape { heads: self.heads, sequences: &sequences })
    }

    fn run_backward(&self, ctx: &Context, d_o: &Tensor, output: &AttentionOutput) -> AttentionGrads {
        let sequences: Vec<_> = self.sequences.iter().map(Sequence::ragged).collect();
        let shape = RaggedShape { heads: self.heads, sequences: &sequences };
        attention_ragged_backward(ctx, d_o, self.inputs(), output, &shape)
    }

    fn alone(&self, ctx: &Context, index: usize) -> Alone {
        let AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim, window, scale } = self.heads;
        let sequence = &self.sequences[index];
        let keys = |x: &Tensor| gathered(ctx, x, (0..sequence.num_keys).map(|token| sequence.row(token)));
        let (seq_len, kv_len) = (sequence.num_queries, sequence.num_keys);
        let shape = AttentionShape {
            batch: 1,
            seq_len,
            kv_len,
            kv_capacity: kv_len,
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            window,
            scale,
        };
        let first = self.first_query(index);
        Alone { q: gathered(ctx, &self.q, first..first + seq_len), k: keys(&self.k), v: keys(&self.v), shape }
    }

    /// The sequences that have queries.
    fn with_queries(&self) -> impl Iterator<Item = usize> {
        (0..self.sequences.len()).filter(|&index| self.sequences[index].num_queries > 0)
    }

    fn first_query(&self, index: usize) -> usize {
        self.sequences[..index].iter().map(|sequence| sequence.num_queries).sum()
    }

    /// The part of a sequence in a tensor with rows of `width` elements for each query.
    fn of_queries<'a, T>(&self, index: usize, all: &'a [T], width: usize) -> &'a [T] {
        &all[self.first_query(index) * width..][..self.sequences[index].num_queries * width]
    }

    /// Holds outputs to the definition.
    fn check(&self, what: &str, ctx: &Context) {
        let AttentionOutput { o, lse } = self.run(ctx);
        let (o, lse, sinks) = (doubles(&o), doubles(&lse), self.sinks.as_ref().map(doubles));
        let slack = rounding(self.q.dtype());
        for index in 0..self.sequences.len() {
            let Alone { q, k, v, shape } = self.alone(ctx, index);
            let what =
                |part: &str| format!("{what}, {part} of sequence {index} of {:?}, {:?}", self.sequences, self.heads);
            let (q, k, v) = (doubles(&q), doubles(&k), doubles(&v));
            let (expected_o, expected_lse) = reference(&q, &k, &v, sinks.as_deref(), &shape);
            // The softmax's weights are rounded, too: each adds its share of the size of its value.
            let sizes: Vec<f64> = v.iter().map(|v| v.abs()).collect();
            let (weighed_sizes, _) = reference(&q, &k, &sizes, sinks.as_deref(), &shape);
            let further: Vec<f64> = weighed_sizes.iter().map(|size| slack * size).collect();
            let found = self.of_queries(index, &o, shape.num_heads * shape.value_dim);
            assert_within(&what("o"), found, &expected_o, 1e-5 + slack, &further);
            assert_close(&what("lse"), self.of_queries(index, &lse, shape.num_heads), &expected_lse, 1e-5);
        }
    }

    /// Holds outputs to the bits of each sequence alone.
    fn check_bits(&self, what: &str, ctx: &Context) {
        let AttentionOutput { o, lse } = self.run(ctx);
        for index in self.with_queries() {
            let Alone { q, k, v, shape } = self.alone(ctx, index);
            let (own_o, own_lse) =
                attention_with_sinks(ctx, AttentionInputs { q: &q, k: &k, v: &v, sinks: self.sinks.as_ref() }, &shape);
            let width = shape.num_heads * shape.value_dim * o.dtype().size();
            let are_same = self.of_queries(index, o.bytes(), width) == own_o.bytes()
                && self.of_queries(index, lse.bytes(), 4 * shape.num_heads) == own_lse.bytes();
            assert!(are_same, "{what}, sequence {index} of {:?}, {:?}", self.sequences, self.heads);
        }
    }
}

/// Copies of some rows.
fn gathered(ctx: &Context, x: &Tensor, rows: impl Iterator<Item = usize>) -> Tensor {
    let (cols, all) = (x.cols(), x.to_f32_vec());
    let found: Vec<f32> = rows.flat_map(|row| all[row * cols..][..cols].iter().copied()).collect();
    tensor(ctx, &[found.len() / cols, cols], &found, x.dtype())
}

/// The contexts of the host, each with and without batch invariance.
fn host_contexts() -> Vec<(String, Context)> {
    let isas = Isa::available().into_iter().map(|isa| (format!("{isa:?}"), Context::cpu(2).with_isa(isa)));
    let all = isas.chain([1, 3].map(|threads| (format!("{threads} threads"), Context::cpu(threads))));
    let with_both = |(name, ctx): (String, Context)| {
        [(format!("{name}, invariant"), ctx.clone().with_batch_invariance(true)), (name, ctx)]
    };
    all.flat_map(with_both).collect()
}

fn for_each_case(ctx: &Context, mut look: impl FnMut(&Case)) {
    // A GPU computes sequences one by one: few cases show that their rows are found, and emulation is slow.
    let (num_lists, num_heads) = if ctx.gpu().is_some() { (5, 2) } else { (usize::MAX, usize::MAX) };
    for (seed, sequences) in adversarial_lists().into_iter().enumerate().take(num_lists) {
        for (number, heads) in several_heads().into_iter().enumerate().take(num_heads) {
            for dtype in [DType::F32, DType::BF16] {
                look(&Case::new(ctx, heads, sequences.clone(), dtype, (10 * seed + number) as u64));
            }
        }
    }
}

#[test]
fn each_sequence_agrees_with_the_definition() {
    for (name, ctx) in contexts() {
        for_each_case(&ctx, |case| case.check(&name, &ctx));
    }
}

#[test]
fn each_sequence_has_the_bits_that_it_has_alone() {
    for (name, ctx) in host_contexts().into_iter().chain(gpu_contexts()) {
        for_each_case(&ctx, |case| case.check_bits(&name, &ctx));
    }
}

/// A shared prefix, then blocks of their own: what a prefix cache makes of sequences that begin alike.
#[test]
fn sequences_that_share_blocks_see_the_same_prefix() {
    let ctx = Context::cpu(2);
    let blocks = |own: u32| Rows::Blocks(32, vec![3, 9, own]);
    let sequences = vec![
        Sequence { num_queries: 80, num_keys: 80, rows: blocks(4) },
        Sequence { num_queries: 70, num_keys: 70, rows: blocks(15) },
    ];
    let mut case = Case::new(&ctx, heads([4, 2], 16, None), sequences, DType::F32, 1);
    let q = case.q.to_f32_vec();
    let prefix = 64 * case.q.cols();
    case.q.f32s_mut()[80 * 64..][..prefix].copy_from_slice(&q[..prefix]);
    let o = case.run(&ctx).o;
    assert_eq!(o.f32s()[..prefix], o.f32s()[80 * 64..][..prefix]);
    case.check_bits("shared", &ctx);
}

/// Latent attention keeps one head of keys, which are values as well.
#[test]
fn keys_that_are_values_have_the_bits_of_each_sequence_alone() {
    for (name, ctx) in host_contexts().into_iter().chain(gpu_contexts()) {
        for sequences in [4, 5].map(|list| adversarial_lists()[list].clone()) {
            let mut case = Case::new(&ctx, heads([16, 1], 576, None), sequences, DType::BF16, 3);
            case.v = case.k.clone();
            let inputs = AttentionInputs { q: &case.q, k: &case.k, v: &case.k, sinks: None };
            let sequences: Vec<_> = case.sequences.iter().map(Sequence::ragged).collect();
            let shape = RaggedShape { heads: case.heads, sequences: &sequences };
            let o = attention_ragged(&ctx, inputs, &shape).o;
            for index in case.with_queries() {
                let Alone { q, k, shape, .. } = case.alone(&ctx, index);
                let (own, _) = attention_with_sinks(&ctx, AttentionInputs { q: &q, k: &k, v: &k, sinks: None }, &shape);
                assert!(case.of_queries(index, o.bytes(), 16 * 576 * 2) == own.bytes(), "{name}, sequence {index}");
            }
        }
    }
}

#[test]
fn gradients_of_documents_agree_with_the_definition() {
    for (name, ctx) in contexts() {
        let num_heads = if ctx.gpu().is_some() { 1 } else { usize::MAX };
        for (seed, heads) in several_heads().into_iter().enumerate().take(num_heads) {
            for dtype in [DType::F32, DType::BF16] {
                let case = Case::new(&ctx, heads, documents(), dtype, seed as u64);
                check_grads(&name, &ctx, &case);
            }
        }
    }
}

fn d_o_of(ctx: &Context, case: &Case) -> Tensor {
    normal_tensor(ctx, 77, &[case.q.rows(), case.heads.num_heads * case.heads.value_dim], DType::F32)
}

fn check_grads(name: &str, ctx: &Context, case: &Case) {
    let (d_o, sinks) = (d_o_of(ctx, case), case.sinks.as_ref().map(doubles));
    let AttentionGrads { dq, dk, dv } = case.run_backward(ctx, &d_o, &case.run(ctx));
    let [dq, mut dk, mut dv] = [dq, dk, dv].map(|x| doubles(&x));
    let slack = 5e-5 + rounding(case.q.dtype()) * (case.heads.value_dim.max(case.heads.head_dim) as f64).sqrt() * 4.0;
    for (index, sequence) in case.sequences.iter().enumerate() {
        let Alone { q, k, v, shape } = case.alone(ctx, index);
        let d_o = doubles(&d_o);
        let d_o = case.of_queries(index, &d_o, shape.num_heads * shape.value_dim);
        let [own_dq, own_dk, own_dv] =
            reference_grads(d_o, &doubles(&q), &doubles(&k), &doubles(&v), sinks.as_deref(), &shape);
        let what = |part: &str| format!("{name}, {part} of document {index}, {:?}", case.heads);
        assert_close(&what("dq"), case.of_queries(index, &dq, q.cols()), &own_dq, slack);
        for (part, all, own, width) in [("dk", &mut dk, own_dk, k.cols()), ("dv", &mut dv, own_dv, v.cols())] {
            let found = &mut all[sequence.row(0) * width..][..own.len()];
            assert_close(&what(part), found, &own, slack);
            found.fill(0.0);
        }
    }
    assert!(dk.iter().chain(&dv).all(|&d| d == 0.0), "{name}: rows of no document have gradients");
}

#[test]
fn gradients_of_documents_have_the_bits_of_each_alone() {
    for (name, ctx) in host_contexts().into_iter().chain(gpu_contexts()) {
        let num_heads = if ctx.gpu().is_some() { 1 } else { usize::MAX };
        for (seed, heads) in several_heads().into_iter().enumerate().take(num_heads) {
            for dtype in [DType::F32, DType::BF16] {
                let case = Case::new(&ctx, heads, documents(), dtype, seed as u64);
                check_bits_of_grads(&name, &ctx, &case);
            }
        }
    }
}

fn check_bits_of_grads(name: &str, ctx: &Context, case: &Case) {
    let (d_o, output) = (d_o_of(ctx, case), case.run(ctx));
    let AttentionGrads { dq, dk, dv } = case.run_backward(ctx, &d_o, &output);
    for index in case.with_queries() {
        let (Alone { q, k, v, shape }, sequence) = (case.alone(ctx, index), &case.sequences[index]);
        let first = case.first_query(index);
        let own_d_o = gathered(ctx, &d_o, first..first + sequence.num_queries);
        let inputs = AttentionInputs { q: &q, k: &k, v: &v, sinks: case.sinks.as_ref() };
        let (o, lse) = attention_with_sinks(ctx, inputs, &shape);
        let saved = AttentionSaved { o: &o, lse: &lse };
        let (own_dq, own_dk, own_dv) = attention_backward(ctx, &own_d_o, inputs, saved, &shape);
        let of_keys = |all: &Tensor, own: &Tensor| {
            all.f32s()[sequence.row(0) * own.cols()..][..own.len()]
                .iter()
                .zip(own.f32s())
                .all(|(a, b)| same_bits(*a, *b))
        };
        let are_same =
            case.of_queries(index, dq.f32s(), q.cols()).iter().zip(own_dq.f32s()).all(|(a, b)| same_bits(*a, *b))
                && of_keys(&dk, &own_dk)
                && of_keys(&dv, &own_dv);
        assert!(are_same, "{name}, document {index}, {:?}", case.heads);
    }
}

fn same_bits(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits()
}

#[test]
fn gradients_of_sinks_are_the_sums_over_sequences() {
    for (name, ctx) in contexts() {
        let case = Case::new(&ctx, heads([4, 2], 16, Some(60)), documents(), DType::F32, 2);
        let (d_o, output, sinks) = (d_o_of(&ctx, &case), case.run(&ctx), case.sinks.as_ref().expect("sinks"));
        let mut expected = [0.0_f64; 4];
        for index in case.with_queries() {
            let (Alone { q, k, v, shape }, sequence) = (case.alone(&ctx, index), &case.sequences[index]);
            let first = case.first_query(index);
            let own_d_o = gathered(&ctx, &d_o, first..first + sequence.num_queries);
            let inputs = AttentionInputs { q: &q, k: &k, v: &v, sinks: Some(sinks) };
            let (o, lse) = attention_with_sinks(&ctx, inputs, &shape);
            let mut own = ctx.zeros(&[4], DType::F32);
            let saved = AttentionSaved { o: &o, lse: &lse };
            sinks_backward(&ctx, &own_d_o, saved, sinks, &shape, Write::Replace, &mut own);
            expected.iter_mut().zip(doubles(&own)).for_each(|(sum, own)| *sum += own);
        }
        let sequences: Vec<_> = case.sequences.iter().map(Sequence::ragged).collect();
        let shape = RaggedShape { heads: case.heads, sequences: &sequences };
        let mut found = Tensor::from_slice(ctx.pool(), &[4], &[f32::NAN; 4]);
        for (write, times) in [(Write::Replace, 1.0), (Write::Add, 2.0)] {
            sinks_ragged_backward(&ctx, &d_o, &output, sinks, &shape, write, &mut found);
            let expected: Vec<f64> = expected.iter().map(|d| times * d).collect();
            assert_close(&format!("sinks on {name}"), &doubles(&found), &expected, 2e-5);
        }
    }
}

#[test]
#[should_panic(expected = "sequences share rows of keys")]
fn gradients_of_sequences_that_share_keys_are_refused() {
    let ctx = Context::cpu(1);
    let sequences = vec![Sequence::from(0, 10, 10), Sequence::from(9, 10, 10)];
    let case = Case::new(&ctx, heads([2, 1], 8, None), sequences, DType::F32, 1);
    let _ = case.run_backward(&ctx, &d_o_of(&ctx, &case), &case.run(&ctx));
}

#[test]
#[should_panic(expected = "attention: sequence 1 of 640 rows of keys")]
fn a_sequence_with_too_few_blocks_is_refused() {
    let ctx = Context::cpu(1);
    let short = Sequence { num_queries: 1, num_keys: 33, rows: Rows::Blocks(16, vec![0, 1]) };
    let case = Case::new(&ctx, heads([2, 1], 8, None), vec![Sequence::from(0, 1, 1), short], DType::F32, 1);
    let _ = case.run(&ctx);
}

#[test]
#[should_panic(expected = "attention: sequence 0 of 640 rows of keys")]
fn a_block_beyond_the_rows_is_refused() {
    let ctx = Context::cpu(1);
    let far = Sequence { num_queries: 1, num_keys: 33, rows: Rows::Blocks(16, vec![0, 40, 2]) };
    let case = Case::new(&ctx, heads([2, 1], 8, None), vec![far], DType::F32, 1);
    let _ = case.run(&ctx);
}

fn any_sequence() -> impl Strategy<Value = Sequence> {
    let queries = prop_oneof![Just(1_usize), 0..80_usize];
    let earlier = prop_oneof![Just(0_usize), 0..150_usize];
    (queries, earlier, proptest::option::of(1..70_usize), 0..1000_u64).prop_map(
        |(num_queries, earlier, block_len, seed)| {
            let num_keys = num_queries + earlier;
            match block_len {
                None => Sequence::from(seed as usize % (KEY_ROWS - num_keys), num_queries, num_keys),
                Some(block_len) => Sequence::scattered(block_len, num_queries, num_keys, seed),
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn random_lists_agree_with_the_definition_and_with_each_alone(
        sequences in proptest::collection::vec(any_sequence(), 0..7),
        num_kv_heads in 1..3_usize,
        group in prop_oneof![Just(1_usize), Just(4_usize), Just(8_usize)],
        (head_dim, value_dim) in (1..40_usize, 1..40_usize),
        window in proptest::option::of(1..100_usize),
        is_bf16: bool,
        seed in 0..1000_u64,
    ) {
        let ctx = Context::cpu(2);
        let heads = AttentionHeads { value_dim, ..heads([num_kv_heads * group, num_kv_heads], head_dim, window) };
        let case = Case::new(&ctx, heads, sequences, if is_bf16 { DType::BF16 } else { DType::F32 }, seed);
        case.check("random", &ctx);
        case.check_bits("random", &ctx);
    }
}
