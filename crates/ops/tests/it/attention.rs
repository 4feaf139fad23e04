//! Attention against a plain f64 reference, its gradients against finite differences of that.

use moeworks_ops::Context;
use moeworks_ops::attention::{
    AttentionInputs, AttentionSaved, AttentionShape, attention, attention_backward, attention_with_sinks,
    sinks_backward,
};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor, bf16};
use proptest::prelude::*;

use crate::common::{
    assert_close, assert_within, contexts, dot, doubles, finite_differences, normal_tensor, rounding, thread_counts,
};

/// The definition, in f64: `o` and the log of the softmax's sum.
pub(crate) fn reference(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    sinks: Option<&[f64]>,
    s: &AttentionShape,
) -> (Vec<f64>, Vec<f64>) {
    let (h, w, group) = (s.head_dim, s.value_dim, s.num_heads / s.num_kv_heads);
    let mut o = vec![0.0; q.len() / h * w];
    let mut lse = vec![0.0; s.batch * s.num_heads * s.seq_len];
    for b in 0..s.batch {
        for head in 0..s.num_heads {
            for i in 0..s.seq_len {
                let row = (b * s.seq_len + i) * s.num_heads + head;
                let key_row = |j: usize| (b * s.kv_capacity + j) * s.num_kv_heads + head / group;
                let q = &q[row * h..][..h];
                let scores: Vec<f64> =
                    keys(i, s).map(|j| f64::from(s.scale) * dot(q, &k[key_row(j) * h..][..h])).collect();
                let sink = sinks.map(|sinks| sinks[head]);
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().copied().chain(sink).map(|x| (x - max).exp()).sum();
                lse[(b * s.num_heads + head) * s.seq_len + i] = max + sum.ln();
                for (j, score) in keys(i, s).zip(&scores) {
                    let p = (score - max).exp() / sum;
                    (0..w).for_each(|d| o[row * w + d] += p * v[key_row(j) * w + d]);
                }
            }
        }
    }
    (o, lse)
}

/// The keys that query i sees.
fn keys(i: usize, s: &AttentionShape) -> std::ops::Range<usize> {
    let end = i + s.kv_len - s.seq_len + 1;
    s.window.map_or(0, |window| end.saturating_sub(window))..end
}

/// The gradients by the chain rule, in f64.
pub(crate) fn reference_grads(
    d_o: &[f64],
    q: &[f64],
    k: &[f64],
    v: &[f64],
    sinks: Option<&[f64]>,
    s: &AttentionShape,
) -> [Vec<f64>; 3] {
    let (h, w, group) = (s.head_dim, s.value_dim, s.num_heads / s.num_kv_heads);
    let (o, lse) = reference(q, k, v, sinks, s);
    let scale = f64::from(s.scale);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for b in 0..s.batch {
        for head in 0..s.num_heads {
            for i in 0..s.seq_len {
                let row = (b * s.seq_len + i) * s.num_heads + head;
                let at = row * h;
                let lse = lse[(b * s.num_heads + head) * s.seq_len + i];
                let d_o = &d_o[row * w..][..w];
                let delta = dot(d_o, &o[row * w..][..w]);
                for j in keys(i, s) {
                    let key_row = (b * s.kv_capacity + j) * s.num_kv_heads + head / group;
                    let key = key_row * h;
                    let p = (scale * dot(&q[at..at + h], &k[key..key + h]) - lse).exp();
                    let ds = scale * p * (dot(d_o, &v[key_row * w..][..w]) - delta);
                    for d in 0..h {
                        dq[at + d] += ds * k[key + d];
                        dk[key + d] += ds * q[at + d];
                    }
                    (0..w).for_each(|d| dv[key_row * w + d] += p * d_o[d]);
                }
            }
        }
    }
    [dq, dk, dv]
}

struct Case {
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Option<Tensor>,
    d_o: Tensor,
}

impl Case {
    fn new(ctx: &Context, shape: AttentionShape, dtype: DType, seed: u64) -> Self {
        let (rows, kv_rows) = (shape.batch * shape.seq_len, shape.batch * shape.kv_capacity);
        let (h, w) = (shape.head_dim, shape.value_dim);
        Self {
            shape,
            q: normal_tensor(ctx, seed, &[rows, shape.num_heads * h], dtype),
            k: normal_tensor(ctx, seed + 1, &[kv_rows, shape.num_kv_heads * h], dtype),
            v: normal_tensor(ctx, seed + 2, &[kv_rows, shape.num_kv_heads * w], dtype),
            sinks: None,
            d_o: normal_tensor(ctx, seed + 3, &[rows, shape.num_heads * w], DType::F32),
        }
    }

    fn with_sinks(mut self, ctx: &Context, seed: u64) -> Self {
        self.sinks = Some(normal_tensor(ctx, seed + 4, &[self.shape.num_heads], DType::F32));
        self
    }

    fn run(&self, ctx: &Context) -> [Tensor; 5] {
        let inputs = AttentionInputs { q: &self.q, k: &self.k, v: &self.v, sinks: self.sinks.as_ref() };
        let (o, lse) = attention_with_sinks(ctx, inputs, &self.shape);
        let saved = AttentionSaved { o: &o, lse: &lse };
        let (dq, dk, dv) = attention_backward(ctx, &self.d_o, inputs, saved, &self.shape);
        [o, lse, dq, dk, dv]
    }

    fn check(&self, what: &str, ctx: &Context) {
        let [o, lse, dq, dk, dv] = self.run(ctx).map(|tensor| doubles(&tensor));
        let (q, k, v) = (doubles(&self.q), doubles(&self.k), doubles(&self.v));
        let sinks = self.sinks.as_ref().map(doubles);
        let (expected_o, expected_lse) = reference(&q, &k, &v, sinks.as_deref(), &self.shape);
        let [expected_dq, expected_dk, expected_dv] =
            reference_grads(&doubles(&self.d_o), &q, &k, &v, sinks.as_deref(), &self.shape);
        let slack = rounding(self.q.dtype());
        let what = |part: &str| format!("{what}, {part}, {:?}", self.shape);
        // The softmax's weights are rounded, too: each adds its share of the size of its value.
        let sizes: Vec<f64> = v.iter().map(|v| v.abs()).collect();
        let (weighed_sizes, _) = reference(&q, &k, &sizes, sinks.as_deref(), &self.shape);
        let weights_slack: Vec<f64> = weighed_sizes.iter().map(|size| slack * size).collect();
        assert_within(&what("o"), &o, &expected_o, 1e-5 + slack, &weights_slack);
        assert_close(&what("lse"), &lse, &expected_lse, 1e-5);
        // The gradients of q and k see o's rounding through rowsum(d_o o), a sum over the elements of a head of
        // values.
        let slack = slack * (self.shape.value_dim.max(self.shape.head_dim) as f64).sqrt() * 4.0;
        assert_close(&what("dq"), &dq, &expected_dq, 5e-5 + slack);
        assert_close(&what("dk"), &dk, &expected_dk, 5e-5 + slack);
        assert_close(&what("dv"), &dv, &expected_dv, 5e-5 + slack);
    }
}

/// A shape with numbers of queries and keys, and of query heads and key heads.
fn shape(batch: usize, lengths: [usize; 2], heads: [usize; 2], head_dim: usize) -> AttentionShape {
    let ([seq_len, kv_len], [num_heads, num_kv_heads]) = (lengths, heads);
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape {
        batch,
        seq_len,
        kv_len,
        kv_capacity: kv_len + 3,
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim: head_dim,
        window: None,
        scale,
    }
}

/// Shapes on and around the edges of blocks and panels.
fn awkward_shapes() -> Vec<AttentionShape> {
    vec![
        shape(1, [1, 1], [1, 1], 1),
        shape(2, [1, 300], [4, 2], 64),
        shape(1, [64, 64], [2, 2], 16),
        shape(1, [65, 129], [1, 1], 8),
        shape(2, [33, 200], [6, 2], 20),
        shape(1, [130, 130], [3, 1], 48),
        shape(1, [257, 300], [2, 1], 40),
        shape(3, [7, 12], [4, 4], 3),
        AttentionShape { value_dim: 20, ..shape(1, [70, 140], [4, 2], 36) },
        AttentionShape { value_dim: 48, window: Some(7), ..shape(2, [70, 200], [4, 2], 16) },
        AttentionShape { window: Some(1), ..shape(1, [20, 30], [2, 2], 8) },
        AttentionShape { window: Some(130), ..shape(1, [300, 300], [2, 1], 16) },
        AttentionShape { window: Some(64), ..shape(1, [1, 500], [4, 2], 16) },
        AttentionShape { window: Some(900), ..shape(1, [150, 150], [2, 1], 8) },
        // More blocks of keys than one in both passes, and rows of which some see no key of the first.
        shape(1, [270, 600], [2, 1], 24),
        AttentionShape { window: Some(90), ..shape(1, [300, 900], [2, 1], 16) },
        shape(1, [90, 170], [6, 2], 128),
        AttentionShape { value_dim: 72, window: Some(100), ..shape(2, [40, 230], [5, 1], 96) },
        // Heads of more than 128: latent attention's, and the largest that GPUs have kernels for.
        AttentionShape { value_dim: 128, ..shape(1, [70, 150], [2, 1], 192) },
        AttentionShape { window: Some(50), ..shape(1, [66, 100], [2, 2], 256) },
        AttentionShape { value_dim: 136, ..shape(2, [1, 600], [2, 1], 200) },
        // Single queries: ranges of keys on their edges, and more keys than the most ranges of the shortest length.
        shape(1, [1, 32], [2, 2], 16),
        shape(2, [1, 33], [6, 2], 20),
        AttentionShape { value_dim: 24, ..shape(1, [1, 2100], [2, 1], 8) },
        AttentionShape { value_dim: 3, window: Some(1), ..shape(3, [1, 70], [4, 1], 5) },
        shape(2, [2, 1030], [8, 2], 64),
        AttentionShape { window: Some(700), ..shape(1, [1, 1500], [3, 1], 32) },
        // As many queries of a key head as GPUs share keys among warps for, one more, and fewer: keys on the edges of
        // warps' quarters.
        shape(1, [1, 80], [16, 1], 128),
        shape(1, [17, 49], [1, 1], 64),
        AttentionShape { value_dim: 72, window: Some(60), ..shape(2, [3, 144], [5, 1], 104) },
        AttentionShape { value_dim: 128, ..shape(1, [2, 65], [8, 1], 192) },
    ]
}

/// The cache of latent attention: one head of keys, which are values as well, wider than other heads.
#[test]
fn keys_that_are_values_agree_with_the_definition() {
    let shapes = [
        shape(1, [1, 70], [16, 1], 576),
        shape(2, [1, 300], [5, 1], 576),
        AttentionShape { window: Some(40), ..shape(1, [7, 150], [20, 1], 512) },
        shape(1, [3, 33], [40, 1], 264),
        shape(2, [40, 40], [2, 1], 320),
        shape(1, [1, 1], [3, 1], 288),
    ];
    for (name, ctx) in contexts() {
        for (seed, shape) in shapes.into_iter().enumerate() {
            let case = Case::new(&ctx, shape, DType::BF16, 10 * seed as u64);
            let case = if seed % 2 == 0 { case } else { case.with_sinks(&ctx, seed as u64) };
            let inputs = AttentionInputs { q: &case.q, k: &case.k, v: &case.k, sinks: case.sinks.as_ref() };
            let (o, lse) = attention_with_sinks(&ctx, inputs, &shape);
            let (q, k, sinks) = (doubles(&case.q), doubles(&case.k), case.sinks.as_ref().map(doubles));
            let (expected_o, expected_lse) = reference(&q, &k, &k, sinks.as_deref(), &shape);
            let sizes: Vec<f64> = k.iter().map(|k| k.abs()).collect();
            let (weighed_sizes, _) = reference(&q, &k, &sizes, sinks.as_deref(), &shape);
            let slack = rounding(DType::BF16);
            let weights_slack: Vec<f64> = weighed_sizes.iter().map(|size| slack * size).collect();
            assert_within(&format!("{name}, {shape:?}"), &doubles(&o), &expected_o, 1e-5 + slack, &weights_slack);
            assert_close(&format!("{name}, {shape:?}, lse"), &doubles(&lse), &expected_lse, 1e-5);
        }
    }
}

#[test]
fn sinks_take_their_share_of_the_softmax() {
    for (name, ctx) in contexts() {
        for (seed, shape) in awkward_shapes().into_iter().enumerate() {
            for dtype in [DType::F32, DType::BF16] {
                Case::new(&ctx, shape, dtype, 10 * seed as u64).with_sinks(&ctx, seed as u64).check(&name, &ctx);
            }
        }
    }
}

#[test]
fn gradients_of_sinks_are_those_of_finite_differences() {
    let shape = AttentionShape { value_dim: 5, window: Some(4), ..shape(2, [70, 73], [4, 2], 3) };
    for (name, ctx) in contexts() {
        let case = Case::new(&ctx, shape, DType::F32, 7).with_sinks(&ctx, 3);
        let [o, lse, ..] = case.run(&ctx);
        let sinks = case.sinks.as_ref().unwrap();
        let (q, k, v, d_o) = (doubles(&case.q), doubles(&case.k), doubles(&case.v), doubles(&case.d_o));
        let loss = |sinks: &[f64]| dot(&reference(&q, &k, &v, Some(sinks), &shape).0, &d_o);
        let expected = finite_differences(&doubles(sinks), loss);
        // What was there before does not matter, or is added to.
        let mut d_sinks = Tensor::from_slice(ctx.pool(), &[4], &[f32::NAN; 4]);
        for (write, times) in [(Write::Replace, 1.0), (Write::Add, 2.0)] {
            let saved = AttentionSaved { o: &o, lse: &lse };
            sinks_backward(&ctx, &case.d_o, saved, sinks, &shape, write, &mut d_sinks);
            let expected: Vec<f64> = expected.iter().map(|d| times * d).collect();
            assert_close(&format!("sinks on {name}"), &doubles(&d_sinks), &expected, 2e-5);
        }
    }
}

#[test]
fn agrees_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for (seed, shape) in awkward_shapes().into_iter().enumerate() {
            for dtype in [DType::F32, DType::BF16] {
                Case::new(&ctx, shape, dtype, 10 * seed as u64).check(&name, &ctx);
            }
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let ctx = Context::cpu(2);
    let case = Case::new(&ctx, shape(2, [5, 9], [4, 2], 3), DType::F32, 7);
    let [_, _, dq, dk, dv] = case.run(&ctx).map(|tensor| doubles(&tensor));
    let (q, k, v, d_o) = (doubles(&case.q), doubles(&case.k), doubles(&case.v), doubles(&case.d_o));
    let loss = |q: &[f64], k: &[f64], v: &[f64]| dot(&reference(q, k, v, None, &case.shape).0, &d_o);
    assert_close("dq", &dq, &finite_differences(&q, |q| loss(q, &k, &v)), 1e-5);
    assert_close("dk", &dk, &finite_differences(&k, |k| loss(&q, k, &v)), 1e-5);
    assert_close("dv", &dv, &finite_differences(&v, |v| loss(&q, &k, v)), 1e-5);
}

#[test]
fn same_bits_on_any_number_of_threads() {
    for shape in [shape(1, [200, 300], [4, 2], 32), shape(3, [70, 70], [2, 2], 16), shape(2, [1, 700], [4, 2], 32)] {
        for dtype in [DType::F32, DType::BF16] {
            let results = thread_counts().map(|ctx| Case::new(&ctx, shape, dtype, 3).run(&ctx));
            for other in &results[1..] {
                assert!(results[0].iter().zip(other).all(|(a, b)| a.bytes() == b.bytes()));
            }
        }
    }
}

#[test]
fn a_decoding_step_gives_the_bits_of_the_same_query_alone_or_close() {
    let ctx = Context::cpu(2);
    let full = Case::new(&ctx, shape(1, [150, 150], [4, 2], 32), DType::F32, 5);
    let (o, _) = attention(&ctx, &full.q, &full.k, &full.v, &full.shape);
    let last = Tensor::from_slice(ctx.pool(), &[1, 128], &full.q.f32s()[149 * 128..]);
    let step = AttentionShape { seq_len: 1, ..full.shape };
    let (o_step, _) = attention(&ctx, &last, &full.k, &full.v, &step);
    assert_close("o", &doubles(&o_step), &doubles(&o)[149 * 128..], 1e-6);
}

#[test]
fn large_scores_neither_overflow_nor_lose_the_largest() {
    let ctx = Context::cpu(1);
    let mut case = Case::new(&ctx, shape(1, [140, 140], [1, 1], 16), DType::F32, 1);
    moeworks_ops::elementwise::scale_assign(&ctx, &mut case.q, 100.0);
    moeworks_ops::elementwise::scale_assign(&ctx, &mut case.k, 100.0);
    let (o, _) = attention(&ctx, &case.q, &case.k, &case.v, &case.shape);
    let (expected, _) = reference(&doubles(&case.q), &doubles(&case.k), &doubles(&case.v), None, &case.shape);
    assert_close("o", &doubles(&o), &expected, 2e-2);
}

#[test]
fn a_nan_reaches_the_rows_that_see_it_and_no_earlier_ones() {
    let ctx = Context::cpu(1);
    for dtype in [DType::F32, DType::BF16] {
        let mut case = Case::new(&ctx, shape(1, [100, 100], [1, 1], 16), dtype, 1);
        match dtype {
            DType::F32 => case.k.f32s_mut()[40 * 16] = f32::NAN,
            _ => case.k.bf16s_mut()[40 * 16] = bf16::NAN,
        }
        let (o, _) = attention(&ctx, &case.q, &case.k, &case.v, &case.shape);
        for (row, o) in doubles(&o).chunks_exact(16).enumerate() {
            assert!(o.iter().all(|o| o.is_nan() == (row >= 40)), "row {row} in {dtype:?}");
        }
    }
}

#[test]
fn a_nan_among_the_keys_of_a_decoding_step_stays_with_its_heads() {
    let ctx = Context::cpu(2);
    let mut case = Case::new(&ctx, shape(1, [1, 100], [4, 2], 16), DType::F32, 1);
    case.k.f32s_mut()[40 * 32 + 16] = f32::NAN;
    let (o, lse) = attention(&ctx, &case.q, &case.k, &case.v, &case.shape);
    for (head, o) in o.f32s().chunks_exact(16).enumerate() {
        assert!(o.iter().all(|o| o.is_nan() == (head >= 2)), "head {head}");
    }
    assert!(lse.f32s().iter().enumerate().all(|(head, lse)| lse.is_nan() == (head >= 2)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn agrees_with_the_definition_on_random_shapes(
        batch in 1..3_usize,
        seq_len in 1..90_usize,
        earlier in prop_oneof![Just(0_usize), 0..200_usize],
        num_kv_heads in 1..4_usize,
        group in 1..4_usize,
        (head_dim, value_dim) in (1..40_usize, 1..40_usize),
        window in proptest::option::of(1..100_usize),
        is_bf16: bool,
        seed in 0..1000_u64,
    ) {
        let ctx = Context::cpu(2);
        let shape = shape(batch, [seq_len, seq_len + earlier], [num_kv_heads * group, num_kv_heads], head_dim);
        let shape = AttentionShape { value_dim, window, ..shape };
        Case::new(&ctx, shape, if is_bf16 { DType::BF16 } else { DType::F32 }, seed).check("random", &ctx);
    }
}
