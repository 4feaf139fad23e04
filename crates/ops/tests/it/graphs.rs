//! Steps that are captured and go to a GPU together: results are those of kernels launched one by one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moeworks_gpu::Traffic;
use moeworks_ops::Activation;
use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_all_choices};
use moeworks_ops::elementwise::{add_assign, cast, fill, fill_normal};
use moeworks_ops::experts::{ExpertWeights, ForwardOptions, experts_forward_with};
use moeworks_ops::linear::linear_each;
use moeworks_ops::logits::logits;
use moeworks_ops::quantized::quantize;
use moeworks_ops::rms_norm::rms_norm;
use moeworks_ops::top_k::softmax_top_k_with;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::common::gpu_contexts;

/// `x` doubled so many times; each result but the last is dropped as soon as the next one was asked for.
fn doubled(ctx: &Context, x: &Tensor, times: usize) -> Tensor {
    (0..times).fold(x.clone(), |x, _| {
        let mut y = ctx.empty(x.shape(), DType::F32);
        fill(ctx, &mut y, 0.0);
        add_assign(ctx, &mut y, &x);
        add_assign(ctx, &mut y, &x);
        y
    })
}

fn numbers(ctx: &Context, len: usize) -> Tensor {
    let numbers: Vec<f32> = (0..len).map(|i| i as f32).collect();
    Tensor::from_slice(ctx.pool(), &[len], &numbers)
}

fn assert_doubled(y: &Tensor, times: i32) {
    for (i, y) in y.to_f32_vec().into_iter().enumerate() {
        assert_eq!(y, i as f32 * 2.0_f32.powi(times));
    }
}

fn since(ctx: &Context, before: &Traffic) -> Traffic {
    ctx.gpu().expect("a GPU").traffic().since(before)
}

#[test]
fn a_step_has_the_results_of_kernels_launched_one_by_one_whatever_its_sizes() {
    for (_, ctx) in gpu_contexts() {
        for len in [5, 5, 700, 5, 70_000] {
            let x = numbers(&ctx, len);
            assert_doubled(&ctx.capture_replay(|| doubled(&ctx, &x, 20)), 20);
        }
    }
}

#[test]
fn the_second_of_two_equal_steps_is_of_graphs_and_a_short_one_never() {
    for (_, ctx) in gpu_contexts() {
        let x = numbers(&ctx, 100);
        let step = |times| {
            let before = ctx.gpu().expect("a GPU").traffic();
            drop(ctx.capture_replay(|| doubled(&ctx, &x, times)));
            since(&ctx, &before)
        };
        // The first of them small, so that the GPU begins while the host puts the rest together: 12, 24 and the other
        // 24.
        assert_eq!((step(20).graphs, step(20).graphs, step(20).launches), (0, 3, 0));
        assert_eq!((step(2).graphs, step(2).graphs), (0, 0));
    }
}

#[test]
fn a_long_step_goes_in_several_graphs_with_the_same_results() {
    for (_, ctx) in gpu_contexts() {
        let x = numbers(&ctx, 40);
        for round in 0..4 {
            let before = ctx.gpu().expect("a GPU").traffic();
            let y = ctx.capture_replay(|| doubled(&ctx, &x, 72));
            let traffic = since(&ctx, &before);
            assert_doubled(&y, 72);
            // 216 launches, the first time by themselves, then 12, 24, 48, 96 and the rest.
            assert_eq!((traffic.launches, traffic.graphs), if round == 0 { (216, 0) } else { (0, 5) });
        }
    }
}

#[test]
fn what_is_read_within_a_step_is_there() {
    for (_, ctx) in gpu_contexts() {
        for _ in 0..3 {
            ctx.capture_replay(|| {
                let half = doubled(&ctx, &numbers(&ctx, 300), 10);
                assert_doubled(&half, 10);
                assert_doubled(&doubled(&ctx, &half, 10), 20);
            });
        }
    }
}

#[test]
fn a_step_that_panics_leaves_the_gpu_as_it_was() {
    for (_, ctx) in gpu_contexts() {
        let x = numbers(&ctx, 100);
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            ctx.capture_replay(|| {
                let _lost = doubled(&ctx, &x, 10);
                panic!("a step stops");
            })
        }));
        assert!(stopped.is_err());
        let before = ctx.gpu().expect("a GPU").traffic();
        assert_doubled(&doubled(&ctx, &x, 3), 3);
        assert!(since(&ctx, &before).launches >= 3, "kernels are launched at once again");
    }
}

/// Random numbers of a type.
fn random(ctx: &Context, shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut x = ctx.zeros(shape, DType::F32);
    fill_normal(&ctx.on_host(), &Random::new(seed, Purpose::Test, 0), 0.3, &mut x);
    cast(ctx, &x, dtype)
}

/// Returns the result of a step and the number of its launches.
fn launches<R>(ctx: &Context, step: impl FnOnce() -> R) -> (R, u64) {
    let before = ctx.gpu().expect("a GPU").traffic();
    let result = step();
    (result, since(ctx, &before).launches)
}

#[test]
fn products_of_few_rows_take_the_norm_before_them_with_the_same_bits() {
    let all = gpu_contexts().flat_map(|(_, ctx)| [1, 3, 8, 9].map(|rows| (ctx.clone(), rows)));
    for ((ctx, rows), (of_x, of_y)) in
        all.flat_map(|case| [DType::F32, DType::BF16].map(|of_x| (case.clone(), (of_x, DType::BF16))))
    {
        let (x, weight) = (random(&ctx, &[rows, 416], of_x, 1), random(&ctx, &[416], DType::F32, 2));
        // Few columns, and many: another kernel.
        let columns = if rows == 3 { [40, 4100] } else { [40, 72] };
        let ws = columns.map(|columns| random(&ctx, &[columns, 416], DType::BF16, columns as u64));
        let step = || {
            let (y, inv_rms) = rms_norm(&ctx, &x, &weight, 1e-5, of_y);
            let [a, b] = linear_each(&ctx, &y, [&ws[0], &ws[1]], DType::F32);
            [y, inv_rms, a, b]
        };
        let (apart, two) = launches(&ctx, step);
        let (together, one) = launches(&ctx, || ctx.capture_replay(step));
        for (apart, together) in apart.iter().zip(&together) {
            assert!(apart.bytes() == together.bytes(), "{rows} rows of {of_x:?}");
        }
        assert_eq!((two, one), (2, if rows <= 8 { 1 } else { 2 }), "{rows} rows");
    }
}

#[test]
fn a_norm_for_which_a_blocks_shared_memory_has_no_room_is_a_kernel_of_its_own() {
    // One that large GPUs have room for, and one that none has.
    for (ctx, depth) in gpu_contexts().flat_map(|(_, ctx)| [2048, 4096].map(|depth| (ctx.clone(), depth))) {
        let (x, weight) = (random(&ctx, &[8, depth], DType::F32, 1), random(&ctx, &[depth], DType::F32, 2));
        let w = quantize(&ctx, &random(&ctx, &[40, depth], DType::F32, 3), DType::Q8);
        let step = || {
            let (y, _) = rms_norm(&ctx, &x, &weight, 1e-5, DType::BF16);
            let [z] = linear_each(&ctx, &y, [&w], DType::F32);
            [y, z]
        };
        let (apart, together) = (step(), ctx.capture_replay(step));
        for (apart, together) in apart.iter().zip(&together) {
            assert!(apart.bytes() == together.bytes(), "depth {depth}");
        }
    }
}

/// A router's normed rows, scores and sorted choices.
fn decision(
    ctx: &Context,
    x: &Tensor,
    norm: &Tensor,
    w: &Tensor,
    k: usize,
    of_y: DType,
) -> (Vec<Tensor>, Option<SortedChoices>) {
    let (y, _) = rms_norm(ctx, x, norm, 1e-5, of_y);
    let scores = softmax_top_k_with(ctx, logits(ctx, &y, w), k, true, false);
    (vec![y, scores.probs, scores.ids, scores.weights], scores.sorted)
}

#[test]
fn a_router_for_few_tokens_is_one_kernel_with_the_same_decision() {
    let cases = [
        (1, 64, 8, DType::BF16),
        (2, 300, 8, DType::BF16),
        (5, 24, 2, DType::F32),
        (8, 300, 8, DType::BF16),
        (9, 64, 8, DType::BF16),
        (64, 20, 8, DType::F32),
        (65, 20, 2, DType::BF16),
    ];
    for ((_, ctx), (tokens, experts, k, of_y)) in gpu_contexts().flat_map(|ctx| cases.map(|case| (ctx.clone(), case))) {
        let what = format!("{tokens} tokens, {experts} experts");
        let (x, weight) = (random(&ctx, &[tokens, 96], DType::F32, 1), random(&ctx, &[96], DType::F32, 2));
        let w = random(&ctx, &[experts, 96], DType::F32, 3);
        let step = || decision(&ctx, &x, &weight, &w, k, of_y);
        let ((apart, _), three) = launches(&ctx, step);
        let by_hand = sort_all_choices(&Context::cpu(1), &apart[2], &apart[3], experts);
        // The second time counters have to be as they were.
        for _ in 0..2 {
            let ((together, sorted), count) = launches(&ctx, || ctx.capture_replay(step));
            for (apart, together) in apart.iter().zip(&together) {
                assert!(apart.bytes() == together.bytes(), "{what}");
            }
            // A norm of more than two rows is a launch of its own.
            let expected = if tokens <= 2 {
                1
            } else if tokens <= 64 {
                2
            } else {
                3
            };
            assert_eq!((three, count, sorted.is_some()), (3, expected, tokens <= 64), "{what}");
            let Some(sorted) = sorted else { continue };
            let lists = |sorted: &SortedChoices| {
                [&sorted.counts, &sorted.offsets, &sorted.tokens, &sorted.token_rows].map(|list| list.u32s().to_vec())
            };
            assert_eq!(lists(&sorted), lists(&by_hand), "{what}");
            assert_eq!(sorted.weights.bytes(), by_hand.weights.bytes(), "{what}");
            let tiles = sorted.few_tiles.expect("tiles");
            let rows: u32 = tiles.u32s().chunks(3).map(|tile| tile[2]).sum();
            assert_eq!(rows as usize, tokens * k, "{what}");
            let most = if tokens <= 8 { 8 } else { 32 };
            assert!(tiles.u32s().chunks(3).all(|tile| tile[2] <= most), "{what}");
        }
    }
}

#[test]
fn a_few_tokens_rows_are_combined_by_the_kernel_that_makes_them_with_the_same_bits() {
    let (d, f, e, k) = (96, 64, 6, 2);
    for ((_, ctx), (tokens, dtype)) in gpu_contexts()
        .flat_map(|ctx| [2, 3, 4, 5].map(|tokens| (ctx.clone(), tokens)))
        .flat_map(|(ctx, tokens)| [DType::BF16, DType::Q8].map(|dtype| (ctx.clone(), (tokens, dtype))))
    {
        let of = |shape: &[usize], seed| match dtype {
            DType::BF16 => random(&ctx, shape, dtype, seed),
            _ => quantize(&ctx, &random(&ctx, shape, DType::F32, seed), dtype),
        };
        let (gate_up, down) = (of(&[e, 2 * f, d], 1), of(&[e, d, f], 2));
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: Activation::SwiGlu };
        let (x, base) = (random(&ctx, &[tokens, d], DType::F32, 3), random(&ctx, &[tokens, d], DType::F32, 4));
        let ids: Vec<u32> = (0..tokens as u32).flat_map(|token| [token % 5, 5]).collect();
        let (ids, shares) =
            (Tensor::from_slice(ctx.pool(), &[tokens, k], &ids), random(&ctx, &[tokens, k], DType::F32, 5));
        let sorted = sort_all_choices(&ctx, &ids, &shares, e);
        for base in [None, Some(&base)] {
            let options = ForwardOptions { base, is_forward_only: true, ..ForwardOptions::default() };
            let step = || experts_forward_with(&ctx, &x, weights, sorted.rows(), options).0;
            let (apart, all) = launches(&ctx, step);
            let (together, fewer) = launches(&ctx, || ctx.capture_replay(step));
            assert!(apart.bytes() == together.bytes(), "{tokens} tokens of {dtype:?}");
            assert_eq!(all - fewer, u64::from(tokens <= 4), "{tokens} tokens of {dtype:?}");
        }
    }
}

#[test]
fn a_norm_of_combined_rows_is_made_by_the_kernel_that_combines_them_with_the_same_bits() {
    let (f, e, k) = (32, 6, 2);
    for ((_, ctx), (tokens, d)) in
        gpu_contexts().flat_map(|ctx| [(5, 96), (33, 2056), (33, 100)].map(|sizes| (ctx.clone(), sizes)))
    {
        let of = |shape: &[usize], seed| random(&ctx, shape, DType::BF16, seed);
        let (gate_up, down) = (of(&[e, 2 * f, d], 1), of(&[e, d, f], 2));
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: Activation::SwiGlu };
        let (x, norm) = (random(&ctx, &[tokens, d], DType::F32, 3), random(&ctx, &[d], DType::F32, 4));
        let ids: Vec<u32> = (0..tokens as u32).flat_map(|token| [token % 5, 5]).collect();
        let (ids, shares) =
            (Tensor::from_slice(ctx.pool(), &[tokens, k], &ids), random(&ctx, &[tokens, k], DType::F32, 5));
        let sorted = sort_all_choices(&ctx, &ids, &shares, e);
        for out in [DType::BF16, DType::F32] {
            let step = || {
                let options = ForwardOptions { base: Some(&x), is_forward_only: true, ..ForwardOptions::default() };
                let sums = experts_forward_with(&ctx, &x, weights, sorted.rows(), options).0;
                let (y, inv_rms) = rms_norm(&ctx, &sums, &norm, 1e-5, out);
                [sums, y, inv_rms]
            };
            let (apart, all) = launches(&ctx, step);
            let (together, fewer) = launches(&ctx, || ctx.capture_replay(step));
            for (apart, together) in apart.iter().zip(&together) {
                assert!(apart.bytes() == together.bytes(), "{tokens} tokens of {d} to {out:?}");
            }
            assert_eq!(all - fewer, u64::from(d % 8 == 0), "{tokens} tokens of {d} to {out:?}");
        }
    }
}
