use moeworks_tensor::{Purpose, Random};

use super::*;

fn scores(seed: u64, count: usize) -> Vec<f32> {
    let random = Random::new(seed, Purpose::Test, 0);
    (0..count as u64).map(|i| random.normal(i)).collect()
}

#[test]
fn every_expert_takes_its_best_tokens_the_lower_index_at_a_tie() {
    // Three tokens, two experts.
    let scores = [0.5, 0.1, 0.5, 0.9, 0.2, 0.9];
    assert_eq!(expert_choice(&Context::cpu(2), &scores, 2, 2), [[0, 1], [1, 2]]);
    assert_eq!(expert_choice(&Context::cpu(2), &scores, 2, 9), [[0, 1, 2], [1, 2, 0]]);
    assert_eq!(expert_choice(&Context::cpu(2), &scores, 2, 0), [[0; 0], [0; 0]]);
    assert_eq!(expert_choice(&Context::cpu(2), &[], 2, 1), [[0; 0], [0; 0]]);
}

/// Returns the best sum of scores over all assignments within `room`, by brute force.
fn best_sum(scores: &[f32], num_experts: usize, room: &mut [usize]) -> f64 {
    if scores.is_empty() {
        return 0.0;
    }
    let (row, rest) = scores.split_at(num_experts);
    let mut best = f64::NEG_INFINITY;
    for e in 0..num_experts {
        if room[e] > 0 {
            room[e] -= 1;
            best = best.max(f64::from(row[e]) + best_sum(rest, num_experts, room));
            room[e] += 1;
        }
    }
    best
}

#[test]
fn the_auction_finds_the_best_balanced_assignment() {
    for seed in 0..60 {
        let (num_tokens, num_experts) = (1 + seed as usize % 8, 1 + seed as usize % 4);
        let scores = scores(seed, num_tokens * num_experts);
        let chosen = auction(&Context::cpu(2), &scores, num_experts);
        let mut room: Vec<usize> =
            (0..num_experts).map(|e| num_tokens / num_experts + usize::from(e < num_tokens % num_experts)).collect();
        let best = best_sum(&scores, num_experts, &mut room.clone());
        let mut sum = 0.0;
        for (token, &e) in chosen.iter().enumerate() {
            room[e as usize] -= 1; // fails if an expert has too many
            sum += f64::from(scores[token * num_experts + e as usize]);
        }
        let slack = 1e-3 * num_tokens as f64 * 8.0;
        assert!(sum <= best + 1e-5 && sum >= best - slack, "seed {seed}: {sum}, best {best}");
    }
}

#[test]
fn the_auction_is_balanced_where_all_tokens_want_the_same() {
    for wish in [0.0, 1.0, 1e6] {
        let (num_tokens, num_experts) = (64, 4);
        let scores: Vec<f32> = (0..num_tokens * num_experts).map(|i| if i % 4 == 2 { wish } else { 0.0 }).collect();
        let mut loads = [0; 4];
        auction(&Context::cpu(2), &scores, num_experts).iter().for_each(|&e| loads[e as usize] += 1);
        assert_eq!(loads, [16; 4]);
    }
    assert!(auction(&Context::cpu(2), &[], 4).is_empty());
}

#[test]
fn sinkhorn_makes_rows_and_columns_even() {
    let (num_tokens, num_experts) = (50, 6);
    let logits: Vec<f32> = scores(3, num_tokens * num_experts)
        .iter()
        .enumerate()
        .map(|(i, s)| 2.0 * s + (i % num_experts) as f32)
        .collect();
    let factors = sinkhorn(&Context::cpu(2), &logits, num_experts);
    let mut columns = vec![0.0; num_experts];
    for row in logits.chunks(num_experts) {
        let balanced: Vec<f64> = row.iter().zip(&factors).map(|(&l, &c)| f64::from(l + c).exp()).collect();
        // The row's factor makes its sum 1/T.
        let total: f64 = balanced.iter().sum();
        columns.iter_mut().zip(&balanced).for_each(|(c, b)| *c += b / total / num_tokens as f64);
    }
    for column in columns {
        assert!((column - 1.0 / num_experts as f64).abs() < 1e-4, "{column}");
    }
}

/// 1500 tokens, enough that bids and sums use several threads.
#[test]
fn assignments_are_the_same_on_any_number_of_threads() {
    let (num_tokens, num_experts) = (1500, 13);
    let scores = scores(5, num_tokens * num_experts);
    let run = |threads: usize| {
        let ctx = Context::cpu(threads);
        let factors: Vec<u32> = sinkhorn(&ctx, &scores, num_experts).iter().map(|c| c.to_bits()).collect();
        (auction(&ctx, &scores, num_experts), factors, expert_choice(&ctx, &scores, num_experts, 200))
    };
    let first = run(1);
    assert_eq!((run(2), run(3)), (first.clone(), first.clone()));
    let mut loads = vec![0; num_experts];
    first.0.iter().for_each(|&e| loads[e as usize] += 1);
    assert!(loads.iter().all(|&load| load == 115 || load == 116), "{loads:?}");
    // Swapping two tokens gains no more than the last increment.
    let score = |t: usize, e: u32| f64::from(scores[t * num_experts + e as usize]);
    for (a, b) in (0..num_tokens).zip((0..num_tokens).skip(7)) {
        let (own, other) = (first.0[a], first.0[b]);
        let gain = score(a, other) + score(b, own) - score(a, own) - score(b, other);
        assert!(gain < 0.01, "tokens {a} and {b} gain {gain}");
    }
}
