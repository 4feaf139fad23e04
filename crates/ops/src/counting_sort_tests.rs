use super::*;
use crate::test_data::gpus;

/// Sorts on some threads; every GPU must find the same.
fn sort(ids: &[u32], k: usize, num_experts: usize, limit: Option<u32>, num_threads: usize) -> SortedChoices {
    let cpu = Context::cpu(num_threads);
    let sorted = sort_on(&cpu, ids, k, num_experts, limit);
    let is_whole = limit.is_none() && !ids.is_empty() && ids.iter().all(|&id| (id as usize) < num_experts);
    let wholes = gpus().chain([cpu]).filter(|_| is_whole).map(|ctx| sort_whole_on(&ctx, ids, k, num_experts));
    for other in gpus().map(|ctx| sort_on(&ctx, ids, k, num_experts, limit)).chain(wholes) {
        assert_eq!(lists(&other), lists(&sorted));
        assert_eq!(other.tokens.u32s(), sorted.tokens.u32s());
        assert_eq!(other.weights.f32s(), sorted.weights.f32s());
        assert_eq!(other.token_rows.u32s(), sorted.token_rows.u32s());
    }
    sorted
}

/// Returns the counts and the offsets.
fn lists(sorted: &SortedChoices) -> (&[u32], &[u32]) {
    (sorted.counts.u32s(), sorted.offsets.u32s())
}

/// Sorts with the function that takes every choice for an expert.
fn sort_whole_on(ctx: &Context, ids: &[u32], k: usize, num_experts: usize) -> SortedChoices {
    let (ids, weights) = tensors(ctx, ids, k);
    sort_all_choices(ctx, &ids, &weights, num_experts)
}

fn sort_on(ctx: &Context, ids: &[u32], k: usize, num_experts: usize, limit: Option<u32>) -> SortedChoices {
    let (ids, weights) = tensors(ctx, ids, k);
    sort_choices(ctx, &ids, &weights, num_experts, limit)
}

/// Returns the choices, each with its place as its weight.
fn tensors(ctx: &Context, ids: &[u32], k: usize) -> (Tensor, Tensor) {
    let shape = [ids.len() / k, k];
    let weights: Vec<f32> = (0..ids.len()).map(|i| i as f32).collect();
    (Tensor::from_slice(ctx.pool(), &shape, ids), Tensor::from_slice(ctx.pool(), &shape, &weights))
}

#[test]
fn first_choices_come_before_second_ones() {
    // The tokens choose (0, 1), (1, 0) and (0, 2).
    let sorted = sort(&[0, 1, 1, 0, 0, 2], 2, 4, None, 1);
    assert_eq!(lists(&sorted), (&[3, 2, 1, 0][..], &[0, 3, 5, 6, 6][..]));
    assert_eq!(sorted.tokens.u32s(), [0, 2, 1, 1, 0, 2]);
    assert_eq!(sorted.weights.f32s(), [0.0, 4.0, 3.0, 2.0, 1.0, 5.0]);
    assert_eq!(sorted.token_rows.u32s(), [0, 4, 3, 2, 1, 5]);
}

#[test]
fn choices_beyond_the_limit_have_no_row() {
    let sorted = sort(&[0, 1, 1, 0, 0, 2], 2, 4, Some(1), 1);
    assert_eq!(lists(&sorted), (&[3, 2, 1, 0][..], &[0, 1, 2, 3, 3][..]));
    assert_eq!(sorted.tokens.u32s(), [0, 1, 2]);
    assert_eq!(sorted.token_rows.u32s(), [0, NO_ROW, 1, NO_ROW, NO_ROW, 2]);
}

#[test]
fn an_id_beyond_the_experts_is_no_choice() {
    let none = u32::MAX;
    let sorted = sort(&[0, none, none, 4, 1, 0], 2, 4, Some(1), 2);
    assert_eq!(lists(&sorted), (&[2, 1, 0, 0][..], &[0, 1, 2, 2, 2][..]));
    assert_eq!(sorted.token_rows.u32s(), [0, NO_ROW, NO_ROW, NO_ROW, 1, NO_ROW]);
}

#[test]
fn no_choice_gives_no_row() {
    let sorted = sort(&[], 3, 5, Some(2), 2);
    assert_eq!(lists(&sorted), (&[0; 5][..], &[0; 6][..]));
    assert!(sorted.tokens.is_empty() && sorted.token_rows.is_empty());
}

/// Compares many blocks on several threads with a stable sort by (expert, rank, token).
#[test]
fn many_blocks_sort_as_a_stable_sort_does() {
    sorts_as_a_stable_sort_does(2500, 3, 7);
}

#[test]
fn many_choices_of_many_experts_sort_as_a_stable_sort_does() {
    // Nearly as many experts as a GPU's block can hold.
    sorts_as_a_stable_sort_does(300, 11, 1000);
}

fn sorts_as_a_stable_sort_does(num_tokens: usize, k: usize, num_experts: u32) {
    let ids: Vec<u32> = (0..num_tokens * k).map(|i| (i * i + i / 7) as u32 % num_experts).collect();
    for limit in [None, Some(0), Some(100), Some(700)] {
        let mut expected: Vec<(u32, usize, usize)> = (0..num_tokens * k).map(|i| (ids[i], i % k, i / k)).collect();
        expected.sort_unstable();
        let mut kept: Vec<&(u32, usize, usize)> = Vec::new();
        for e in 0..num_experts {
            let of_expert = expected.iter().filter(|choice| choice.0 == e);
            kept.extend(of_expert.take(limit.map_or(usize::MAX, |limit| limit as usize)));
        }
        for num_threads in [1, 2, 3] {
            let sorted = sort(&ids, k, num_experts as usize, limit, num_threads);
            let offsets = sorted.offsets.u32s();
            let tokens: Vec<usize> = sorted.tokens.u32s().iter().map(|&t| t as usize).collect();
            assert_eq!(tokens, kept.iter().map(|choice| choice.2).collect::<Vec<_>>());
            for (row, &&(e, rank, token)) in kept.iter().enumerate() {
                assert!((offsets[e as usize]..offsets[e as usize + 1]).contains(&(row as u32)));
                assert_eq!(sorted.token_rows.u32s()[token * k + rank] as usize, row);
                assert_eq!(sorted.weights.f32s()[row], (token * k + rank) as f32);
            }
            let dropped = sorted.token_rows.u32s().iter().filter(|&&row| row == NO_ROW).count();
            assert_eq!(dropped + kept.len(), num_tokens * k);
        }
    }
}
