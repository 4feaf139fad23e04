//! The head and its loss against their definition in f64.

use std::sync::{Barrier, Mutex};

use moeworks_ops::Context;
use moeworks_ops::head_loss::{
    HeadGrads, HeadLoss, IGNORE, VocabularyPart, head_loss, head_loss_backward, head_loss_backward_of_part,
    head_loss_of_part,
};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, below, contexts, dot, doubles, finite_differences, normal_tensor, thread_counts};

fn logits(x: &[f64], w: &[f64], cols: usize) -> Vec<Vec<f64>> {
    x.chunks_exact(cols).map(|x| w.chunks_exact(cols).map(|w| dot(x, w)).collect()).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| (x - max).exp() / sum).collect()
}

fn reference_loss(x: &[f64], w: &[f64], targets: &[u32], cols: usize) -> f64 {
    let rows = logits(x, w, cols).into_iter().zip(targets).filter(|(_, target)| **target != IGNORE);
    rows.map(|(row, &target)| -softmax(&row)[target as usize].ln()).sum()
}

/// `dx` and `dw` of the sum of the losses.
fn reference_grads(x: &[f64], w: &[f64], targets: &[u32], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    for (t, (row, &target)) in logits(x, w, cols).iter().zip(targets).enumerate() {
        if target == IGNORE {
            continue;
        }
        for (v, p) in softmax(row).into_iter().enumerate() {
            let d = p - f64::from(u8::from(v == target as usize));
            for i in 0..cols {
                dx[t * cols + i] += d * w[v * cols + i];
                dw[v * cols + i] += d * x[t * cols + i];
            }
        }
    }
    (dx, dw)
}

/// Random targets, every fifth ignored.
fn targets(len: usize, vocabulary: usize) -> Vec<u32> {
    let mut targets = below(3, len, vocabulary as u32);
    targets.iter_mut().step_by(5).for_each(|target| *target = IGNORE);
    targets
}

fn run(ctx: &Context, tokens: usize, cols: usize, vocabulary: usize, dtype: DType) -> (HeadLoss, [Tensor; 4]) {
    let (x, w) = (normal_tensor(ctx, 1, &[tokens, cols], dtype), normal_tensor(ctx, 2, &[vocabulary, cols], dtype));
    let targets = targets(tokens, vocabulary);
    let mut dw = ctx.zeros(&[vocabulary, cols], DType::F32);
    let (loss, dx) = head_loss_backward(ctx, &x, &w, &targets, 0.5, Write::Add, &mut dw);
    let forward = head_loss(ctx, &x, &w, &targets);
    assert_eq!((loss.num_targets, loss.num_correct), (forward.num_targets, forward.num_correct));
    assert!((loss.loss_sum - forward.loss_sum).abs() <= 1e-9 * forward.loss_sum.abs());
    (loss, [x, w, dx, dw])
}

fn check(name: &str, ctx: &Context, tokens: usize, cols: usize, vocabulary: usize, dtype: DType) {
    let (loss, tensors) = run(ctx, tokens, cols, vocabulary, dtype);
    let [x, w, dx, dw] = tensors.map(|tensor| doubles(&tensor));
    let targets = targets(tokens, vocabulary);
    let what = format!("{name}: {tokens} tokens of {cols}, {vocabulary} classes, {dtype:?}");
    let expected = reference_loss(&x, &w, &targets, cols);
    assert!((loss.loss_sum - expected).abs() <= 2e-6 * expected.max(1.0), "{what}: {} and {expected}", loss.loss_sum);
    let counted = logits(&x, &w, cols).into_iter().zip(&targets).filter(|(_, target)| **target != IGNORE);
    let correct = counted.clone().filter(|(row, target)| {
        let best = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().position(|&x| x == best) == Some(**target as usize)
    });
    assert_eq!((loss.num_targets, loss.num_correct), (counted.clone().count(), correct.count()), "{what}");
    let (expected_dx, expected_dw) = reference_grads(&x, &w, &targets, cols);
    // Products in bf16 round the logits' gradients, which are at most one, to eight bits. With many classes most of
    // them are too small to count beside the few large ones when the product adds them in f32.
    let many = (vocabulary as f64 / 1000.0).max(1.0);
    let slack = if dtype == DType::BF16 { 1.0 / 64.0 } else { 1e-5 * many };
    let halves = |values: Vec<f64>| values.into_iter().map(|x| 0.5 * x).collect::<Vec<_>>();
    assert_close(&what, &dx, &halves(expected_dx), slack);
    assert_close(&what, &dw, &halves(expected_dw), slack);
}

#[test]
fn agrees_with_the_definition_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            check(&name, &ctx, 1, 1, 1, dtype);
            check(&name, &ctx, 33, 20, 65, dtype);
            check(&name, &ctx, 70, 16, 257, dtype);
            check(&name, &ctx, 0, 4, 9, dtype);
        }
    }
}

#[test]
fn several_chunks_are_one_batch() {
    // 40,000 classes leave 256 tokens to a chunk.
    check("chunks", &Context::cpu(2), 300, 2, 40_000, DType::F32);
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let ctx = Context::cpu(1);
    let (_, tensors) = run(&ctx, 6, 4, 7, DType::F32);
    let [x, w, dx, dw] = tensors.map(|tensor| doubles(&tensor));
    let targets = targets(6, 7);
    assert_close("dx", &dx, &finite_differences(&x, |x| 0.5 * reference_loss(x, &w, &targets, 4)), 1e-5);
    assert_close("dw", &dw, &finite_differences(&w, |w| 0.5 * reference_loss(&x, w, &targets, 4)), 1e-5);
}

#[test]
fn the_gradient_of_the_weight_is_added_or_replaces() {
    let ctx = Context::cpu(1);
    let (x, w) = (normal_tensor(&ctx, 1, &[300, 3], DType::F32), normal_tensor(&ctx, 2, &[40_000, 3], DType::F32));
    let targets = targets(300, 40_000);
    let (mut added, mut replaced) = (ctx.zeros(&[40_000, 3], DType::F32), ctx.zeros(&[40_000, 3], DType::F32));
    replaced.f32s_mut().fill(f32::NAN);
    _ = head_loss_backward(&ctx, &x, &w, &targets, 1.0, Write::Add, &mut added);
    _ = head_loss_backward(&ctx, &x, &w, &targets, 1.0, Write::Replace, &mut replaced);
    assert_close("dw", &doubles(&added), &doubles(&replaced), 1e-6);
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let results = thread_counts().map(|ctx| run(&ctx, 500, 32, 300, DType::F32));
    for (loss, tensors) in &results[1..] {
        assert_eq!(loss.loss_sum.to_bits(), results[0].0.loss_sum.to_bits());
        assert!(tensors.iter().zip(&results[0].1).all(|(a, b)| a.bytes() == b.bytes()));
    }
}

#[test]
fn ignored_tokens_alone_cost_nothing_and_get_zeros() {
    let ctx = Context::cpu(1);
    let (x, w) = (normal_tensor(&ctx, 1, &[5, 8], DType::F32), normal_tensor(&ctx, 2, &[9, 8], DType::F32));
    let mut dw = ctx.zeros(&[9, 8], DType::F32);
    let (loss, dx) = head_loss_backward(&ctx, &x, &w, &[IGNORE; 5], 1.0, Write::Replace, &mut dw);
    assert_eq!(loss, HeadLoss::default());
    assert!(dx.f32s().iter().chain(dw.f32s()).all(|&x| x == 0.0));
}

#[test]
fn large_logits_do_not_overflow_and_a_nan_shows() {
    for (name, ctx) in contexts() {
        let w = Tensor::from_slice(ctx.pool(), &[3, 1], &[1.0_f32, -1.0, 0.0]);
        let x = Tensor::from_slice(ctx.pool(), &[2, 1], &[1e30_f32, -1e30]);
        let loss = head_loss(&ctx, &x, &w, &[0, 1]);
        assert_eq!((loss.loss_sum, loss.num_correct), (0.0, 2), "{name}");
        let x = Tensor::from_slice(ctx.pool(), &[1, 1], &[f32::NAN]);
        assert!(head_loss(&ctx, &x, &w, &[0]).loss_sum.is_nan(), "{name}");
    }
}

#[test]
#[should_panic(expected = "target Some(9) of 9 classes")]
fn targets_beyond_the_vocabulary_are_refused() {
    let ctx = Context::cpu(1);
    _ = head_loss(&ctx, &ctx.zeros(&[1, 2], DType::F32), &ctx.zeros(&[9, 2], DType::F32), &[9]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn agrees_with_the_definition_on_random_shapes(tokens in 0..60_usize, cols in 1..40_usize, vocabulary in 1..90_usize) {
        check("random", &Context::cpu(2), tokens, cols, vocabulary, DType::F32);
    }
}

/// The loss and both gradients by `num_parts` ranks that hold the classes between them.
fn run_in_parts(tokens: usize, cols: usize, vocabulary: usize, num_parts: usize) -> (HeadLoss, [Vec<f32>; 2]) {
    let starts: Vec<usize> = (0..=num_parts).map(|part| (vocabulary * part).div_ceil(num_parts)).collect();
    let (barrier, told) = (Barrier::new(num_parts), Mutex::new(vec![Vec::new(); num_parts]));
    let targets = targets(tokens, vocabulary);
    let rank = |rank: usize| {
        let ctx = Context::cpu(1);
        let x = normal_tensor(&ctx, 1, &[tokens, cols], DType::F32);
        let whole = normal_tensor(&ctx, 2, &[vocabulary, cols], DType::F32);
        let rows = &whole.f32s()[starts[rank] * cols..starts[rank + 1] * cols];
        let w = Tensor::from_slice(ctx.pool(), &[rows.len() / cols, cols], rows);
        let mut gather = |own: &[f32]| {
            told.lock().unwrap()[rank] = own.to_vec();
            barrier.wait();
            let all = told.lock().unwrap().concat();
            barrier.wait();
            all
        };
        let mut part = VocabularyPart { starts: &starts, rank, gather: &mut gather };
        let forward = head_loss_of_part(&ctx, &x, (&w).into(), &targets, &mut part);
        let mut dw = ctx.zeros(w.shape(), DType::F32);
        let grads = HeadGrads { weight: &mut dw, bias: None, write: Write::Add };
        let (loss, dx) = head_loss_backward_of_part(&ctx, &x, (&w).into(), &targets, 0.5, &mut part, grads);
        assert_eq!(loss, forward);
        (loss, dx.f32s().to_vec(), dw.f32s().to_vec())
    };
    let parts: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_parts).map(|r| scope.spawn(move || rank(r))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(parts.iter().all(|part| part.0 == parts[0].0), "all ranks know the same");
    let dx = (0..tokens * cols).map(|i| parts.iter().map(|part| part.1[i]).sum()).collect();
    (parts[0].0, [dx, parts.iter().flat_map(|part| part.2.clone()).collect()])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn parts_of_the_vocabulary_give_the_loss_of_the_whole(
        tokens in 1..400_usize,
        cols in 1..12_usize,
        vocabulary in 5..90_usize,
        num_parts in 1..5_usize,
    ) {
        let (expected, [.., dx, dw]) = run(&Context::cpu(1), tokens, cols, vocabulary, DType::F32);
        let (loss, [dx_of_parts, dw_of_parts]) = run_in_parts(tokens, cols, vocabulary, num_parts);
        prop_assert_eq!((loss.num_targets, loss.num_correct), (expected.num_targets, expected.num_correct));
        prop_assert!((loss.loss_sum - expected.loss_sum).abs() <= 1e-6 * expected.loss_sum.max(1.0));
        for (found, expected) in [(dx_of_parts, dx), (dw_of_parts, dw)] {
            let scale = expected.f32s().iter().fold(1e-6_f32, |max, x| max.max(x.abs()));
            for (found, expected) in found.iter().zip(expected.f32s()) {
                prop_assert!((found - expected).abs() <= 1e-5 * scale, "{found}, not {expected}");
            }
        }
    }
}
