//! Layer norm against its definition in f64.

use moeworks_ops::Context;
use moeworks_ops::layer_norm::{LayerNormGrads, LayerNormWeights, layer_norm, layer_norm_backward};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, contexts, dot, doubles, finite_differences, normal_tensor, rounding, thread_counts};

const EPS: f32 = 1e-5;

fn reference(x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let width = weight.len();
    let rows = x.chunks_exact(width).flat_map(|row| {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (variance + f64::from(EPS)).sqrt();
        (0..width).map(move |i| (row[i] - mean) * scale * weight[i] + bias[i]).collect::<Vec<_>>()
    });
    rows.collect()
}

/// x, weight, bias, dy, y, dx, dweight, dbias.
fn run(ctx: &Context, seed: u64, shape: &[usize], width: usize, dtype: DType) -> [Tensor; 8] {
    let x = normal_tensor(ctx, seed, shape, dtype);
    let weight = normal_tensor(ctx, seed + 1, &[width], DType::F32);
    let bias = normal_tensor(ctx, seed + 3, &[width], DType::F32);
    let dy = normal_tensor(ctx, seed + 2, shape, DType::F32);
    let weights = LayerNormWeights { weight: &weight, bias: &bias };
    let (y, statistics) = layer_norm(ctx, &x, weights, EPS, dtype);
    let (mut dweight, mut dbias) = (ctx.zeros(&[width], DType::F32), ctx.zeros(&[width], DType::F32));
    let grads = LayerNormGrads { weight: &mut dweight, bias: &mut dbias };
    let dx = layer_norm_backward(ctx, &dy, &x, &statistics, &weight, Write::Add, grads);
    [x, weight, bias, dy, y, dx, dweight, dbias]
}

fn check(name: &str, ctx: &Context, shape: &[usize], width: usize, dtype: DType) {
    let [x, weight, bias, dy, y, dx, dweight, dbias] = run(ctx, 5, shape, width, dtype).map(|tensor| doubles(&tensor));
    let what = format!("{name}, {shape:?} by {width}, {dtype:?}");
    assert_close(&what, &y, &reference(&x, &weight, &bias), 5e-6 + rounding(dtype));
    let loss = |x: &[f64], weight: &[f64], bias: &[f64]| dot(&reference(x, weight, bias), &dy);
    assert_close(&what, &dx, &finite_differences(&x, |x| loss(x, &weight, &bias)), 2e-5);
    assert_close(&what, &dweight, &finite_differences(&weight, |weight| loss(&x, weight, &bias)), 2e-5);
    assert_close(&what, &dbias, &finite_differences(&bias, |bias| loss(&x, &weight, bias)), 2e-5);
}

#[test]
fn values_and_gradients_agree_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            check(&name, &ctx, &[1, 2], 2, dtype);
            check(&name, &ctx, &[7, 65], 65, dtype);
            check(&name, &ctx, &[3, 48], 16, dtype);
            check(&name, &ctx, &[37, 12], 12, dtype);
            check(&name, &ctx, &[0, 16], 16, dtype);
        }
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let results = thread_counts().map(|ctx| run(&ctx, 1, &[3000, 40], 40, DType::F32));
    for other in &results[1..] {
        assert!(results[0].iter().zip(other).all(|(a, b)| a.bytes() == b.bytes()));
    }
}

#[test]
fn a_large_mean_costs_no_digits_of_the_variance() {
    let ctx = Context::cpu(1);
    let values: Vec<f32> = (0..64).map(|i| 1000.0 + (i % 7) as f32).collect();
    let x = Tensor::from_slice(ctx.pool(), &[1, 64], &values);
    let (weight, bias) = (Tensor::from_slice(ctx.pool(), &[64], &[1.0_f32; 64]), ctx.zeros(&[64], DType::F32));
    let (y, _) = layer_norm(&ctx, &x, LayerNormWeights { weight: &weight, bias: &bias }, EPS, DType::F32);
    assert_close("y", &doubles(&y), &reference(&doubles(&x), &doubles(&weight), &doubles(&bias)), 1e-4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]
    #[test]
    fn random_shapes_agree_with_the_definition(rows in 0..20_usize, width in 2..70_usize, is_bf16: bool) {
        check("random", &Context::cpu(2), &[rows, width], width, if is_bf16 { DType::BF16 } else { DType::F32 });
    }
}
