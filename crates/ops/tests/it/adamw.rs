//! AdamW against its definition in f64 over several steps.

use moeworks_ops::Context;
use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::elementwise::cast;
use moeworks_tensor::{DType, Tensor};

use crate::common::{assert_close, contexts, doubles, normals, thread_counts};

const STEPS: u64 = 5;

fn step(number: u64) -> AdamWStep {
    let lr = 0.01 / number as f64;
    AdamWStep { lr, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: number, grad_scale: 0.5 }
}

fn grad(number: u64, len: usize) -> Vec<f32> {
    normals(100 + number, len)
}

/// The parameter and both moments after [`STEPS`] steps, with the bf16 copy of the last.
fn run(ctx: &Context, len: usize) -> [Tensor; 4] {
    let mut param = Tensor::from_slice(ctx.pool(), &[len], &normals(1, len));
    let (mut m, mut v) = (ctx.zeros(&[len], DType::F32), ctx.zeros(&[len], DType::F32));
    let mut copy = ctx.zeros(&[len], DType::BF16);
    for number in 1..=STEPS {
        let grad = Tensor::from_slice(ctx.pool(), &[len], &grad(number, len));
        let compute = (number == STEPS).then_some(&mut copy);
        adamw(ctx, &step(number), AdamWTensors { param: &mut param, grad: &grad, m: &mut m, v: &mut v, compute });
    }
    [param, m, v, copy]
}

/// Loshchilov and Hutter's algorithm 2, in f64, with the order of PyTorch: decay first.
fn reference(len: usize) -> [Vec<f64>; 3] {
    let mut param: Vec<f64> = normals(1, len).into_iter().map(f64::from).collect();
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    for number in 1..=STEPS {
        let s = step(number);
        let (correction1, correction2) = (1.0 - s.beta1.powi(number as i32), 1.0 - s.beta2.powi(number as i32));
        for (i, g) in grad(number, len).into_iter().enumerate() {
            let g = f64::from(g) * f64::from(s.grad_scale);
            param[i] *= 1.0 - s.lr * s.weight_decay;
            m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
            v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
            param[i] -= s.lr * (m[i] / correction1) / ((v[i] / correction2).sqrt() + s.eps);
        }
    }
    [param, m, v]
}

#[test]
fn agrees_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for len in [0, 1, 17, 1000, 40_000] {
            let tensors = run(&ctx, len);
            for (actual, expected) in tensors.iter().zip(reference(len)) {
                assert_close(&format!("{name}, {len}"), &doubles(actual), &expected, 1e-6);
            }
            assert_eq!(tensors[3].bf16s(), cast(&ctx, &tensors[0], DType::BF16).bf16s(), "{name}");
        }
    }
}

#[test]
fn a_gradient_in_bf16_counts_as_the_numbers_that_it_is() {
    for (name, ctx) in contexts() {
        let narrow = cast(&ctx, &Tensor::from_slice(ctx.pool(), &[40_001], &normals(3, 40_001)), DType::BF16);
        let results = [DType::BF16, DType::F32].map(|dtype| {
            let grad = &cast(&ctx, &narrow, dtype);
            let [mut param, mut m, mut v] = [4, 5, 6].map(|seed| {
                let values: Vec<f32> = normals(seed, narrow.len()).iter().map(|x| x.abs()).collect();
                Tensor::from_slice(ctx.pool(), &[narrow.len()], &values)
            });
            adamw(&ctx, &step(2), AdamWTensors { param: &mut param, grad, m: &mut m, v: &mut v, compute: None });
            [param, m, v]
        });
        assert!(results[0].iter().zip(&results[1]).all(|(a, b)| a.bytes() == b.bytes()), "{name}");
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let results = thread_counts().map(|ctx| run(&ctx, 100_000));
    for other in &results[1..] {
        assert!(results[0].iter().zip(other).all(|(a, b)| a.bytes() == b.bytes()));
    }
}

#[test]
fn a_zero_gradient_at_the_first_step_only_decays() {
    let ctx = Context::cpu(1);
    let (mut param, grad) = (Tensor::from_slice(ctx.pool(), &[1], &[2.0_f32]), ctx.zeros(&[1], DType::F32));
    let (mut m, mut v) = (ctx.zeros(&[1], DType::F32), ctx.zeros(&[1], DType::F32));
    adamw(&ctx, &step(1), AdamWTensors { param: &mut param, grad: &grad, m: &mut m, v: &mut v, compute: None });
    assert!((f64::from(param.f32s()[0]) - 2.0 * (1.0 - 0.01 * 0.1)).abs() < 1e-6);
}

#[test]
fn a_late_step_is_not_corrected_and_stays_finite() {
    let ctx = Context::cpu(1);
    let (mut param, grad) = (ctx.zeros(&[1], DType::F32), Tensor::from_slice(ctx.pool(), &[1], &[1.0_f32]));
    let (mut m, mut v) = (ctx.zeros(&[1], DType::F32), ctx.zeros(&[1], DType::F32));
    let step = AdamWStep { step: u64::MAX, lr: 1.0, grad_scale: 1.0, weight_decay: 0.0, ..step(1) };
    adamw(&ctx, &step, AdamWTensors { param: &mut param, grad: &grad, m: &mut m, v: &mut v, compute: None });
    // 0.1 of a gradient of one over the root of 0.01 of its square.
    assert!((param.f32s()[0] + 1.0).abs() < 1e-5, "{}", param.f32s()[0]);
}
