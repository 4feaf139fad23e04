//! Steps that are collected and go to a GPU together: results are those of kernels launched one by one.

use std::panic::{AssertUnwindSafe, catch_unwind};

use moeworks_ops::Context;
use moeworks_ops::cuda::Traffic;
use moeworks_ops::elementwise::{add_assign, fill};
use moeworks_tensor::{DType, Tensor};

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
            assert_doubled(&ctx.repeated(|| doubled(&ctx, &x, 20)), 20);
        }
    }
}

#[test]
fn the_second_of_two_equal_steps_is_of_graphs_and_a_short_one_never() {
    for (_, ctx) in gpu_contexts() {
        let x = numbers(&ctx, 100);
        let step = |times| {
            let before = ctx.gpu().expect("a GPU").traffic();
            drop(ctx.repeated(|| doubled(&ctx, &x, times)));
            since(&ctx, &before)
        };
        // The first of them small, so that the GPU begins while the host puts the rest together.
        assert_eq!((step(20).graphs, step(20).graphs, step(20).launches), (0, 2, 0));
        assert_eq!((step(2).graphs, step(2).graphs), (0, 0));
    }
}

#[test]
fn a_long_step_goes_in_several_graphs_with_the_same_results() {
    for (_, ctx) in gpu_contexts() {
        let x = numbers(&ctx, 40);
        for round in 0..4 {
            let before = ctx.gpu().expect("a GPU").traffic();
            let y = ctx.repeated(|| doubled(&ctx, &x, 72));
            let traffic = since(&ctx, &before);
            assert_doubled(&y, 72);
            // 216 launches, the first time by themselves.
            assert_eq!((traffic.launches, traffic.graphs), if round == 0 { (216, 0) } else { (0, 4) });
        }
    }
}

#[test]
fn what_is_read_within_a_step_is_there() {
    for (_, ctx) in gpu_contexts() {
        for _ in 0..3 {
            ctx.repeated(|| {
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
            ctx.repeated(|| {
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
