use proptest::prelude::*;

use super::*;
use crate::test_data::{gpus, kinds};

fn top_k(ctx: &Context, logits: &[f32], width: usize, k: usize, normalize: bool) -> TopK {
    let logits = Tensor::from_slice(ctx.pool(), &[logits.len() / width, width], logits);
    softmax_top_k(ctx, logits, k, normalize)
}

/// The indices of the k largest, lowest index first among equals, NaN last.
fn sorted_ids(row: &[f32], k: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    let key = |&id: &u32| {
        let x = f64::from(row[id as usize]);
        (x.is_nan(), if x.is_nan() { 0.0 } else { -x })
    };
    ids.sort_by(|a, b| key(a).partial_cmp(&key(b)).unwrap());
    ids[..k].to_vec()
}

#[test]
fn ties_go_to_the_lowest_index_and_nan_comes_last() {
    let cases: [(&[f32], &[u32]); 5] = [
        (&[1.0, 3.0, 3.0, 2.0], &[1, 2, 3, 0]),
        (&[0.0, -0.0, 0.0, -0.0], &[0, 1, 2, 3]),
        (&[f32::NAN, -1.0, f32::NEG_INFINITY, 5.0], &[3, 1, 2, 0]),
        (&[f32::NAN; 4], &[0, 1, 2, 3]),
        (&[f32::NEG_INFINITY, f32::INFINITY, -f32::NAN, f32::MIN], &[1, 3, 0, 2]),
    ];
    for (logits, expected) in cases {
        for k in 1..=4 {
            for ctx in kinds() {
                assert_eq!(top_k(&ctx, logits, 4, k, false).ids.u32s(), &expected[..k], "{logits:?}");
            }
        }
    }
}

/// Returns the tiles of at most eight rows of groups.
fn tiles_of(offsets: &[u32]) -> Vec<[u32; 3]> {
    let of_group = |(group, ends): (usize, &[u32])| {
        let (first, end) = (ends[0], ends[1]);
        (first..end).step_by(8).map(move |at| [group as u32, at, (end - at).min(8)]).collect::<Vec<_>>()
    };
    offsets.windows(2).enumerate().flat_map(of_group).collect()
}

#[test]
fn a_gpu_sorts_the_choices_of_few_rows_by_the_way() {
    let cases = [(1, 64, 8), (3, 5, 5), (8, 128, 9), (8, 1024, 64), (2, 1, 1), (9, 16, 2)];
    for (ctx, (rows, width, k)) in gpus().flat_map(|ctx| cases.map(|case| (ctx.clone(), case))) {
        let what = format!("{rows} rows, {k} of {width}");
        let random = moeworks_tensor::Random::new(7, moeworks_tensor::Purpose::Test, width as u64);
        let mut logits: Vec<f32> = (0..(rows * width) as u64).map(|i| random.normal(i)).collect();
        logits[0] = f32::NAN;
        let logits = |ctx: &Context| Tensor::from_slice(ctx.pool(), &[rows, width], &logits);
        let found = softmax_top_k_with(&ctx, logits(&ctx), k, true, false);
        let host = Context::cpu(1);
        let expected = softmax_top_k(&host, logits(&host), k, true);
        assert_eq!(found.ids.u32s(), expected.ids.u32s(), "{what}");
        let Some(sorted) = found.sorted else {
            assert!(rows > 8, "{what}: not sorted");
            continue;
        };
        let by_hand = crate::counting_sort::sort_all_choices(&host, &found.ids, &found.weights, width);
        for (a, b) in [(&sorted.counts, &by_hand.counts), (&sorted.offsets, &by_hand.offsets)] {
            assert_eq!(a.u32s(), b.u32s(), "{what}");
        }
        for (a, b) in [(&sorted.tokens, &by_hand.tokens), (&sorted.token_rows, &by_hand.token_rows)] {
            assert_eq!(a.u32s(), b.u32s(), "{what}");
        }
        let bits = |x: &Tensor| x.f32s().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&sorted.weights), bits(&by_hand.weights), "{what}");
        let (tiles, listed) = (tiles_of(by_hand.offsets.u32s()), sorted.few_tiles.expect("tiles"));
        let (tiles_there, rest) = listed.u32s().as_chunks::<3>().0.split_at(tiles.len());
        assert_eq!(tiles_there, tiles, "{what}");
        assert!(rest.iter().all(|tile| tile[2] == 0), "{what}: tiles without rows");
    }
}

#[test]
fn a_row_of_zeros_has_the_entropy_and_the_log_sum_exp_of_its_width() {
    let ctx = Context::cpu(1);
    for width in [1_usize, 8, 64, 128] {
        let scores = top_k(&ctx, &vec![0.0; 3 * width], width, 1, false);
        let log = (width as f64).ln();
        assert!((scores.sums.lse_squared / 3.0 - log * log).abs() < 1e-5 * (1.0 + log));
        assert!((scores.sums.entropy / 3.0 - log).abs() < 1e-6 * (1.0 + log));
    }
}

proptest! {
    #[test]
    fn every_instruction_set_finds_what_sorting_finds(
        (width, k, logits) in (1_usize..70).prop_flat_map(|width| {
            let value = prop_oneof![-5.0_f32..5.0, Just(0.0), Just(-200.0), Just(f32::NEG_INFINITY), (-3..3_i8).prop_map(f32::from)];
            (Just(width), 1..=width, proptest::collection::vec(value, width * 3))
        }),
        normalize: bool,
    ) {
        for ctx in kinds() {
            let scores = top_k(&ctx, &logits, width, k, normalize);
            for (t, row) in logits.chunks(width).enumerate() {
                prop_assert_eq!(&scores.ids.u32s()[t * k..][..k], &sorted_ids(row, k)[..]);
                let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                if total == 0.0 {
                    continue; // every logit is negative infinity
                }
                prop_assert!((f64::from(scores.lse.f32s()[t]) - total.ln()).abs() < 1e-4);
                let chosen: f64 = sorted_ids(row, k).iter().map(|&id| f64::from(row[id as usize]).exp()).sum();
                for (i, &id) in sorted_ids(row, k).iter().enumerate() {
                    let e = f64::from(row[id as usize]).exp();
                    let expected = if normalize { e / chosen } else { e / total };
                    prop_assert!((f64::from(scores.weights.f32s()[t * k + i]) - expected).abs() < 1e-6);
                }
                for (p, x) in scores.probs.f32s()[t * width..][..width].iter().zip(row) {
                    prop_assert!((f64::from(*p) - f64::from(*x).exp() / total).abs() < 1e-6);
                }
            }
        }
    }
}

/// Sums over many tasks are the same bits on any number of threads.
#[test]
fn threads_do_not_change_a_bit() {
    let (rows, width, k) = (1000, 13, 4);
    let logits: Vec<f32> = (0..rows * width).map(|i| ((i * 7919) % 1000) as f32 / 250.0 - 2.0).collect();
    let run = |num_threads| {
        let ctx = Context::cpu(num_threads);
        let scores = top_k(&ctx, &logits, width, k, true);
        let dweights: Vec<f32> = logits[..rows * k].to_vec();
        let grads = ScoreGrads { weights: (&dweights).into(), probs: &logits[..width], lse_squared: 0.1 };
        let dlogits = softmax_top_k_backward(&ctx, &scores, true, grads);
        ((*scores.sums).clone(), scores.probs.f32s().to_vec(), dlogits.f32s().to_vec())
    };
    assert!((2..=3).all(|num_threads| run(num_threads) == run(1)));
}

/// Gradients of `sum g w + sum b p + c sum lse^2` against f64 finite differences.
#[test]
fn gradients_match_finite_differences() {
    let (rows, width) = (3, 6);
    let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin() * 2.0).collect::<Vec<f32>>();
    let (logits, b, c) = (wave(rows * width, 1.7), wave(width, 0.9), 0.3_f32);
    for (k, normalize) in [(1, false), (1, true), (2, false), (3, true), (6, false), (6, true)] {
        let g = wave(rows * k, 2.3);
        let loss = |logits: &[f64]| {
            let mut loss = 0.0;
            for (t, row) in logits.chunks(width).enumerate() {
                let total: f64 = row.iter().map(|x| x.exp()).sum();
                let ids = sorted_ids(&row.iter().map(|&x| x as f32).collect::<Vec<_>>(), k);
                let chosen: f64 = ids.iter().map(|&id| row[id as usize].exp()).sum();
                for (i, &id) in ids.iter().enumerate() {
                    let weight = row[id as usize].exp() / if normalize { chosen } else { total };
                    loss += f64::from(g[t * k + i]) * weight;
                }
                loss += row.iter().zip(&b).map(|(x, &b)| f64::from(b) * x.exp() / total).sum::<f64>();
                loss += f64::from(c) * total.ln().powi(2);
            }
            loss
        };
        let exact: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        for ctx in kinds() {
            let scores = top_k(&ctx, &logits, width, k, normalize);
            let grads = ScoreGrads { weights: (&g).into(), probs: &b, lse_squared: c };
            let dlogits = softmax_top_k_backward(&ctx, &scores, normalize, grads);
            for i in 0..exact.len() {
                let moved = |step: f64| {
                    let mut logits = exact.clone();
                    logits[i] += step;
                    loss(&logits)
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((f64::from(dlogits.f32s()[i]) - expected).abs() < 2e-5, "k {k}, normalize {normalize}, {i}");
            }
        }
    }
}

/// Ids out of range are no choices; sums are in f64 on every device.
#[test]
fn sums_of_choices_count_first_ones_and_add_all_weights_up() {
    let (num_tokens, k, num_experts) = (700, 3, 5);
    let ids: Vec<u32> =
        (0..num_tokens * k).map(|i| if i % 11 == 0 { u32::MAX } else { (i * 7 / 3 % 5) as u32 }).collect();
    let weights: Vec<f32> = (0..num_tokens * k).map(|i| (i % 97) as f32 / 97.0).collect();
    let choices = || ids.iter().zip(&weights).enumerate();
    for ctx in gpus().chain([Context::cpu(2)]) {
        let tensors = [
            Tensor::from_slice(ctx.pool(), &[num_tokens, k], &ids),
            Tensor::from_slice(ctx.pool(), &[num_tokens, k], &weights),
        ];
        let sums = choice_sums(&ctx, &tensors[0], &tensors[1], num_experts);
        for e in 0..num_experts {
            let own = |&(_, (&id, _)): &(usize, (&u32, &f32))| id == e as u32;
            let firsts = choices().filter(own).filter(|(i, _)| i % k == 0).count();
            let weight: f64 = choices().filter(own).map(|(_, (_, &weight))| f64::from(weight)).sum();
            assert_eq!(sums.firsts[e] as usize, firsts);
            assert!(
                (sums.weights[e] - weight).abs() <= 1e-12 * weight,
                "{}: {}, not {weight}",
                ctx.describe(),
                sums.weights[e]
            );
        }
    }
}
