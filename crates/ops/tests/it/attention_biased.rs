//! Attention with a bias by distance against a plain f64 reference, its gradients against finite differences of that.

use moeworks_ops::Context;
use moeworks_ops::attention::{
    AttentionInputs, AttentionSaved, AttentionShape, BiasedGrads, ScoreRule, attention, attention_backward,
    attention_biased, attention_biased_backward,
};
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{
    assert_close, contexts, dot, doubles, finite_differences, normal_tensor, normals, rounding, thread_counts,
};

/// The definition, in f64.
fn reference(q: &[f64], k: &[f64], v: &[f64], bias: Option<&[f64]>, is_causal: bool, s: &AttentionShape) -> Vec<f64> {
    let (h, w, group) = (s.head_dim, s.value_dim, s.num_heads / s.num_kv_heads);
    let mut o = vec![0.0; s.batch * s.seq_len * s.num_heads * w];
    for (row, o) in o.chunks_exact_mut(w).enumerate() {
        let (token, head) = (row / s.num_heads, row % s.num_heads);
        let (batch, query) = (token / s.seq_len, token % s.seq_len);
        let position = query as isize + s.kv_len as isize - s.seq_len as isize;
        let key_row = |j: usize| (batch * s.kv_capacity + j) * s.num_kv_heads + head / group;
        let score = |j: usize| {
            let place = (j as isize - position + s.kv_len as isize - 1) as usize;
            let bias = bias.map_or(0.0, |bias| bias[head * (s.seq_len + s.kv_len - 1) + place]);
            let is_seen = !is_causal || j as isize <= position;
            let product = dot(&q[row * h..][..h], &k[key_row(j) * h..][..h]);
            if is_seen { f64::from(s.scale) * product + bias } else { f64::NEG_INFINITY }
        };
        let scores: Vec<f64> = (0..s.kv_len).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
        for (j, score) in scores.iter().enumerate() {
            let p = (score - max).exp() / sum;
            o.iter_mut().zip(&v[key_row(j) * w..]).for_each(|(o, v)| *o += p * v);
        }
    }
    o
}

struct Case {
    shape: AttentionShape,
    is_causal: bool,
    bias: Option<Vec<f32>>,
    qkv: [Tensor; 3],
}

impl Case {
    fn new(ctx: &Context, shape: AttentionShape, is_causal: bool, has_bias: bool, dtype: DType) -> Self {
        let (rows, kv_rows) = (shape.batch * shape.seq_len, shape.batch * shape.kv_capacity);
        let AttentionShape { seq_len, kv_len, num_heads, num_kv_heads, head_dim, value_dim, .. } = shape;
        let qkv = [
            normal_tensor(ctx, 1, &[rows, num_heads * head_dim], dtype),
            normal_tensor(ctx, 2, &[kv_rows, num_kv_heads * head_dim], dtype),
            normal_tensor(ctx, 3, &[kv_rows, num_kv_heads * value_dim], dtype),
        ];
        Self { shape, is_causal, bias: has_bias.then(|| normals(4, num_heads * (seq_len + kv_len - 1))), qkv }
    }

    fn run(&self, ctx: &Context) -> Tensor {
        let [q, k, v] = &self.qkv;
        let rule = ScoreRule { bias: self.bias.as_deref(), is_causal: self.is_causal };
        attention_biased(ctx, q, k, v, &rule, &self.shape)
    }

    fn d_o(&self, ctx: &Context) -> Tensor {
        let rows = self.shape.batch * self.shape.seq_len;
        normal_tensor(ctx, 5, &[rows, self.shape.num_heads * self.shape.value_dim], self.qkv[0].dtype())
    }

    fn backward(&self, ctx: &Context) -> BiasedGrads {
        let [q, k, v] = &self.qkv;
        let rule = ScoreRule { bias: self.bias.as_deref(), is_causal: self.is_causal };
        attention_biased_backward(ctx, &self.d_o(ctx), q, k, v, &rule, &self.shape)
    }

    fn bias(&self) -> Option<Vec<f64>> {
        self.bias.as_ref().map(|bias| bias.iter().copied().map(f64::from).collect())
    }

    /// Gradients of queries, keys, values and bias by the chain rule of the definition, in f64.
    fn reference_grads(&self, ctx: &Context) -> [Vec<f64>; 4] {
        let s = &self.shape;
        let (h, w, group) = (s.head_dim, s.value_dim, s.num_heads / s.num_kv_heads);
        let [q, k, v] = self.qkv.each_ref().map(doubles);
        let (d_o, bias, distances) = (doubles(&self.d_o(ctx)), self.bias(), s.seq_len + s.kv_len - 1);
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![0.0; x.len()]);
        let mut d_bias = vec![0.0; s.num_heads * distances];
        for (row, d_o) in d_o.chunks_exact(w).enumerate() {
            let (token, head) = (row / s.num_heads, row % s.num_heads);
            let (batch, query) = (token / s.seq_len, token % s.seq_len);
            let num_seen = if self.is_causal { query + s.kv_len - s.seq_len + 1 } else { s.kv_len };
            let key_row = |j: usize| (batch * s.kv_capacity + j) * s.num_kv_heads + head / group;
            let place = |j: usize| head * distances + j + s.seq_len - 1 - query;
            let score = |j: usize| {
                let bias = bias.as_ref().map_or(0.0, |bias| bias[place(j)]);
                (f64::from(s.scale) * dot(&q[row * h..][..h], &k[key_row(j) * h..][..h]) + bias).exp()
            };
            let sum: f64 = (0..num_seen).map(score).sum();
            let d_weight = |j: usize| dot(d_o, &v[key_row(j) * w..][..w]);
            let delta: f64 = (0..num_seen).map(|j| score(j) / sum * d_weight(j)).sum();
            for j in 0..num_seen {
                let p = score(j) / sum;
                let d_score = p * (d_weight(j) - delta);
                d_bias[place(j)] += d_score;
                for d in 0..h {
                    dq[row * h + d] += f64::from(s.scale) * d_score * k[key_row(j) * h + d];
                    dk[key_row(j) * h + d] += f64::from(s.scale) * d_score * q[row * h + d];
                }
                (0..w).for_each(|d| dv[key_row(j) * w + d] += p * d_o[d]);
            }
        }
        [dq, dk, dv, d_bias]
    }

    fn check_backward(&self, what: &str, ctx: &Context) {
        let what = format!("{what}, causal {}, {:?}", self.is_causal, self.shape);
        let (found, expected) = (self.backward(ctx), self.reference_grads(ctx));
        for (found, expected) in found.qkv.iter().zip(&expected) {
            assert_close(&what, &doubles(found), expected, 1e-4);
        }
        assert_eq!(found.bias.is_some(), self.bias.is_some());
        if let Some(bias) = found.bias {
            let bias: Vec<f64> = bias.into_iter().map(f64::from).collect();
            assert_close(&what, &bias, &expected[3], 1e-4);
        }
    }

    fn check(&self, what: &str, ctx: &Context) {
        let [q, k, v] = self.qkv.each_ref().map(doubles);
        let expected = reference(&q, &k, &v, self.bias().as_deref(), self.is_causal, &self.shape);
        let tolerance = 1e-5 + rounding(self.qkv[0].dtype());
        let what = format!("{what}, causal {}, {:?}", self.is_causal, self.shape);
        assert_close(&what, &doubles(&self.run(ctx)), &expected, tolerance);
    }
}

/// `[batch, seq_len, kv_len, spare rows]`, `[G, heads a group, h, value width]`.
fn shape(
    [batch, seq_len, kv_len, spare]: [usize; 4],
    [kv_heads, group, head_dim, value_dim]: [usize; 4],
) -> AttentionShape {
    AttentionShape {
        batch,
        seq_len,
        kv_len,
        kv_capacity: kv_len + spare,
        num_heads: kv_heads * group,
        num_kv_heads: kv_heads,
        head_dim,
        value_dim,
        window: None,
        scale: 0.7,
    }
}

/// An encoder longer than a block of keys, a decoder's prefill and step, both kinds of cross-attention; with whether
/// they are causal and have a bias.
fn usual_shapes() -> [(AttentionShape, (bool, bool)); 5] {
    [
        (shape([2, 150, 150, 0], [2, 1, 16, 16]), (false, true)),
        (shape([1, 70, 140, 3], [1, 2, 8, 5]), (true, true)),
        (shape([1, 1, 33, 7], [3, 1, 9, 9]), (true, true)),
        (shape([2, 67, 5, 0], [2, 1, 16, 24]), (false, false)),
        (shape([2, 1, 200, 0], [2, 1, 16, 16]), (false, false)),
    ]
}

#[test]
fn every_instruction_set_gives_the_definition() {
    for (what, ctx) in contexts() {
        for (dtype, (shape, kind)) in
            [DType::F32, DType::BF16].into_iter().flat_map(|dtype| usual_shapes().map(|s| (dtype, s)))
        {
            let case = Case::new(&ctx, shape, kind.0, kind.1, dtype);
            case.check(&what, &ctx);
            case.check_backward(&what, &ctx);
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let ctx = Context::cpu(2);
    let case = Case::new(&ctx, shape([2, 4, 6, 1], [2, 2, 3, 4]), true, true, DType::F32);
    let ([q, k, v], d_o) = (case.qkv.each_ref().map(doubles), doubles(&case.d_o(&ctx)));
    let bias = case.bias().unwrap();
    let loss = |q: &[f64], k: &[f64], v: &[f64], bias: &[f64]| {
        dot(&reference(q, k, v, Some(bias), case.is_causal, &case.shape), &d_o)
    };
    let expected = [
        finite_differences(&q, |q| loss(q, &k, &v, &bias)),
        finite_differences(&k, |k| loss(&q, k, &v, &bias)),
        finite_differences(&v, |v| loss(&q, &k, v, &bias)),
        finite_differences(&bias, |bias| loss(&q, &k, &v, bias)),
    ];
    for (found, expected) in case.reference_grads(&ctx).iter().zip(&expected) {
        assert_close("gradients", found, expected, 1e-6);
    }
}

#[test]
fn without_bias_and_causal_it_is_plain_attention() {
    let ctx = Context::cpu(2);
    let case = Case::new(&ctx, shape([2, 80, 90, 0], [2, 2, 16, 16]), true, false, DType::F32);
    let [q, k, v] = &case.qkv;
    let (o, lse) = attention(&ctx, q, k, v, &case.shape);
    assert_close("o", &doubles(&case.run(&ctx)), &doubles(&o), 1e-5);
    let inputs = AttentionInputs { q, k, v, sinks: None };
    let saved = AttentionSaved { o: &o, lse: &lse };
    let (dq, dk, dv) = attention_backward(&ctx, &case.d_o(&ctx), inputs, saved, &case.shape);
    for (found, expected) in case.backward(&ctx).qkv.iter().zip([dq, dk, dv]) {
        assert_close("gradients", &doubles(found), &doubles(&expected), 1e-5);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let [one, two, three] = thread_counts().map(|ctx| {
        let case = Case::new(&ctx, shape([2, 130, 130, 0], [3, 1, 16, 16]), false, true, DType::F32);
        let BiasedGrads { qkv, bias } = case.backward(&ctx);
        (case.run(&ctx).to_f32_vec(), qkv.map(|d| d.to_f32_vec()), bias)
    });
    assert!(one == two && two == three);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_shapes_give_the_definition(
        batch in 1_usize..3, seq_len in 0_usize..70, keys in 1_usize..140, spare in 0_usize..3,
        kv_heads in 1_usize..3, group in 1_usize..3, head_dim in 1_usize..20, value_dim in 1_usize..20,
        is_causal: bool, has_bias: bool,
    ) {
        let ctx = Context::cpu(2);
        let kv_len = if is_causal { seq_len + keys } else { keys };
        let shape = shape([batch, seq_len, kv_len, spare], [kv_heads, group, head_dim, value_dim]);
        let case = Case::new(&ctx, shape, is_causal, has_bias, DType::F32);
        case.check("random", &ctx);
        case.check_backward("random", &ctx);
    }
}
