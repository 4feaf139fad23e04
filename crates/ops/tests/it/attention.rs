//! Attention against a plain f64 reference, its gradients against finite differences of that.

use moeworks_ops::Context;
use moeworks_ops::attention::{AttentionShape, attention, attention_backward};
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, contexts, dot, doubles, finite_differences, normal_tensor, rounding, thread_counts};

/// The definition, in f64: `o` and the log of the softmax's sum.
fn reference(q: &[f64], k: &[f64], v: &[f64], s: &AttentionShape) -> (Vec<f64>, Vec<f64>) {
    let (h, group) = (s.head_dim, s.num_heads / s.num_kv_heads);
    let mut o = vec![0.0; q.len()];
    let mut lse = vec![0.0; s.batch * s.num_heads * s.seq_len];
    for b in 0..s.batch {
        for head in 0..s.num_heads {
            for i in 0..s.seq_len {
                let at = ((b * s.seq_len + i) * s.num_heads + head) * h;
                let key_at = |j: usize| ((b * s.kv_capacity + j) * s.num_kv_heads + head / group) * h;
                let keys = i + s.kv_len - s.seq_len + 1;
                let scores: Vec<f64> =
                    (0..keys).map(|j| f64::from(s.scale) * dot(&q[at..at + h], &k[key_at(j)..key_at(j) + h])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                lse[(b * s.num_heads + head) * s.seq_len + i] = max + sum.ln();
                for (j, score) in scores.iter().enumerate() {
                    let p = (score - max).exp() / sum;
                    (0..h).for_each(|d| o[at + d] += p * v[key_at(j) + d]);
                }
            }
        }
    }
    (o, lse)
}

/// The gradients by the chain rule, in f64.
fn reference_grads(d_o: &[f64], q: &[f64], k: &[f64], v: &[f64], s: &AttentionShape) -> [Vec<f64>; 3] {
    let (h, group) = (s.head_dim, s.num_heads / s.num_kv_heads);
    let (o, lse) = reference(q, k, v, s);
    let scale = f64::from(s.scale);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for b in 0..s.batch {
        for head in 0..s.num_heads {
            for i in 0..s.seq_len {
                let at = ((b * s.seq_len + i) * s.num_heads + head) * h;
                let lse = lse[(b * s.num_heads + head) * s.seq_len + i];
                let delta = dot(&d_o[at..at + h], &o[at..at + h]);
                for j in 0..=i + s.kv_len - s.seq_len {
                    let key = ((b * s.kv_capacity + j) * s.num_kv_heads + head / group) * h;
                    let p = (scale * dot(&q[at..at + h], &k[key..key + h]) - lse).exp();
                    let ds = scale * p * (dot(&d_o[at..at + h], &v[key..key + h]) - delta);
                    for d in 0..h {
                        dq[at + d] += ds * k[key + d];
                        dk[key + d] += ds * q[at + d];
                        dv[key + d] += p * d_o[at + d];
                    }
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
    d_o: Tensor,
}

impl Case {
    fn new(ctx: &Context, shape: AttentionShape, dtype: DType, seed: u64) -> Self {
        let rows = [shape.batch * shape.seq_len, shape.num_heads * shape.head_dim];
        let kv_rows = [shape.batch * shape.kv_capacity, shape.num_kv_heads * shape.head_dim];
        Self {
            shape,
            q: normal_tensor(ctx, seed, &rows, dtype),
            k: normal_tensor(ctx, seed + 1, &kv_rows, dtype),
            v: normal_tensor(ctx, seed + 2, &kv_rows, dtype),
            d_o: normal_tensor(ctx, seed + 3, &rows, DType::F32),
        }
    }

    fn run(&self, ctx: &Context) -> [Tensor; 5] {
        let (o, lse) = attention(ctx, &self.q, &self.k, &self.v, &self.shape);
        let inputs = (&self.q, &self.k, &self.v);
        let (dq, dk, dv) = attention_backward(ctx, &self.d_o, inputs, (&o, &lse), &self.shape);
        [o, lse, dq, dk, dv]
    }

    fn check(&self, what: &str, ctx: &Context) {
        let [o, lse, dq, dk, dv] = self.run(ctx).map(|tensor| doubles(&tensor));
        let (q, k, v) = (doubles(&self.q), doubles(&self.k), doubles(&self.v));
        let (expected_o, expected_lse) = reference(&q, &k, &v, &self.shape);
        let [expected_dq, expected_dk, expected_dv] = reference_grads(&doubles(&self.d_o), &q, &k, &v, &self.shape);
        let slack = rounding(self.q.dtype());
        let what = |part: &str| format!("{what}, {part}, {:?}", self.shape);
        assert_close(&what("o"), &o, &expected_o, 1e-5 + slack);
        assert_close(&what("lse"), &lse, &expected_lse, 1e-5);
        // The gradients of q and k see o's rounding through rowsum(d_o o), the sum of h terms.
        let slack = slack * (self.shape.head_dim as f64).sqrt() * 4.0;
        assert_close(&what("dq"), &dq, &expected_dq, 5e-5 + slack);
        assert_close(&what("dk"), &dk, &expected_dk, 5e-5 + slack);
        assert_close(&what("dv"), &dv, &expected_dv, 5e-5 + slack);
    }
}

fn shape(batch: usize, (seq_len, kv_len): (usize, usize), heads: (usize, usize), head_dim: usize) -> AttentionShape {
    let (num_heads, num_kv_heads) = heads;
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape { batch, seq_len, kv_len, kv_capacity: kv_len + 3, num_heads, num_kv_heads, head_dim, scale }
}

/// Shapes on and around the edges of blocks and panels.
fn awkward_shapes() -> Vec<AttentionShape> {
    vec![
        shape(1, (1, 1), (1, 1), 1),
        shape(2, (1, 300), (4, 2), 64),
        shape(1, (64, 64), (2, 2), 16),
        shape(1, (65, 129), (1, 1), 8),
        shape(2, (33, 200), (6, 2), 20),
        shape(1, (130, 130), (3, 1), 48),
        shape(1, (257, 300), (2, 1), 40),
        shape(3, (7, 12), (4, 4), 3),
    ]
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
    let case = Case::new(&ctx, shape(2, (5, 9), (4, 2), 3), DType::F32, 7);
    let [_, _, dq, dk, dv] = case.run(&ctx).map(|tensor| doubles(&tensor));
    let (q, k, v, d_o) = (doubles(&case.q), doubles(&case.k), doubles(&case.v), doubles(&case.d_o));
    let loss = |q: &[f64], k: &[f64], v: &[f64]| dot(&reference(q, k, v, &case.shape).0, &d_o);
    assert_close("dq", &dq, &finite_differences(&q, |q| loss(q, &k, &v)), 1e-5);
    assert_close("dk", &dk, &finite_differences(&k, |k| loss(&q, k, &v)), 1e-5);
    assert_close("dv", &dv, &finite_differences(&v, |v| loss(&q, &k, v)), 1e-5);
}

#[test]
fn same_bits_on_any_number_of_threads() {
    for shape in [shape(1, (200, 300), (4, 2), 32), shape(3, (70, 70), (2, 2), 16)] {
        let results = thread_counts().map(|ctx| Case::new(&ctx, shape, DType::F32, 3).run(&ctx));
        for other in &results[1..] {
            assert!(results[0].iter().zip(other).all(|(a, b)| a.bytes() == b.bytes()));
        }
    }
}

#[test]
fn a_decoding_step_gives_the_bits_of_the_same_query_alone_or_close() {
    let ctx = Context::cpu(2);
    let full = Case::new(&ctx, shape(1, (150, 150), (4, 2), 32), DType::F32, 5);
    let (o, _) = attention(&ctx, &full.q, &full.k, &full.v, &full.shape);
    let last = Tensor::from_slice(ctx.pool(), &[1, 128], &full.q.f32s()[149 * 128..]);
    let step = AttentionShape { seq_len: 1, ..full.shape };
    let (o_step, _) = attention(&ctx, &last, &full.k, &full.v, &step);
    assert_close("o", &doubles(&o_step), &doubles(&o)[149 * 128..], 1e-6);
}

#[test]
fn large_scores_neither_overflow_nor_lose_the_largest() {
    let ctx = Context::cpu(1);
    let mut case = Case::new(&ctx, shape(1, (140, 140), (1, 1), 16), DType::F32, 1);
    moeworks_ops::elementwise::scale_assign(&ctx, &mut case.q, 100.0);
    moeworks_ops::elementwise::scale_assign(&ctx, &mut case.k, 100.0);
    let (o, _) = attention(&ctx, &case.q, &case.k, &case.v, &case.shape);
    let (expected, _) = reference(&doubles(&case.q), &doubles(&case.k), &doubles(&case.v), &case.shape);
    assert_close("o", &doubles(&o), &expected, 2e-2);
}

#[test]
fn a_nan_reaches_the_rows_that_see_it_and_no_earlier_ones() {
    let ctx = Context::cpu(1);
    let mut case = Case::new(&ctx, shape(1, (100, 100), (1, 1), 16), DType::F32, 1);
    case.k.f32s_mut()[40 * 16] = f32::NAN;
    let (o, _) = attention(&ctx, &case.q, &case.k, &case.v, &case.shape);
    for (row, o) in o.f32s().chunks_exact(16).enumerate() {
        assert!(o.iter().all(|o| o.is_nan() == (row >= 40)), "row {row}");
    }
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
        head_dim in 1..40_usize,
        is_bf16: bool,
        seed in 0..1000_u64,
    ) {
        let ctx = Context::cpu(2);
        let shape = shape(batch, (seq_len, seq_len + earlier), (num_kv_heads * group, num_kv_heads), head_dim);
        Case::new(&ctx, shape, if is_bf16 { DType::BF16 } else { DType::F32 }, seed).check("random", &ctx);
    }
}
