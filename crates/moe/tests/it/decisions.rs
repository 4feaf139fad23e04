//! Decisions of every scheme on logits that are whole numbers, so that ties are frequent and exact and no product
//! rounds. They are compared with a choice by sorting, for several numbers of threads, and with the tokens split into
//! parts.

use std::collections::BTreeSet;

use moeworks_moe::{
    HashTable, MoeConfig, MoeLayer, MoeWeights, NO_EXPERT, Ramp, RouterConfig, RouterInput, RouterKind, Routing,
    RoutingError, ScoreFunction, SecondExpert, balanced_hash, clustered_hash,
};
use moeworks_ops::Context;
use moeworks_tensor::{Purpose, Random, Tensor};
use proptest::prelude::*;

use crate::{config, kinds, tensor};

const E: usize = 8;

fn of_kind(kind: RouterKind, top_k: usize) -> MoeConfig {
    let mut config = config(E, 2, E, top_k);
    config.router = RouterConfig { kind, ..RouterConfig::default() };
    config.router.schemes.cosine.dim = 4;
    config
}

/// Returns weights of a router whose logits are its input.
fn identity(ctx: &Context, config: &MoeConfig) -> MoeWeights {
    let mut weights = MoeWeights::random(ctx, config, 3, 0.5);
    if config.router_shape() == [E, E] {
        let values = weights.router.f32s_mut();
        values.fill(0.0);
        (0..E).for_each(|e| values[e * E + e] = 1.0);
    }
    weights
}

/// Returns whole numbers from `-half` to `half`.
fn logits(seed: u64, num_tokens: usize, half: u64) -> Vec<f64> {
    let random = Random::new(seed, Purpose::Test, 40);
    (0..(num_tokens * E) as u64).map(|i| random.below(i, 2 * half + 1) as f64 - half as f64).collect()
}

fn route(ctx: &Context, config: &MoeConfig, x: &[f64], input: &RouterInput<'_>) -> Result<Routing, RoutingError> {
    let x: Tensor = tensor(ctx, &[x.len() / E, E], x);
    MoeLayer::new(config.clone()).unwrap().route(ctx, &identity(ctx, config), &x, input)
}

/// Returns the experts of each token.
fn experts(routing: &Routing) -> Vec<Vec<u32>> {
    (0..routing.num_tokens()).map(|t| routing.choices(t).map(|(expert, _)| expert).collect()).collect()
}

/// Returns the experts by falling logit, the lower index first at a tie.
fn order(logits: &[f64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    order
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let total: f64 = logits.iter().map(|l| l.exp()).sum();
    logits.iter().map(|l| l.exp() / total).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn tokens_choose_by_sorting_and_the_lowest_index_wins_a_tie(
        seed: u64, half in 0_u64..4, num_tokens in 1_usize..200, k in 1_usize..=E, is_sigmoid: bool,
    ) {
        let ctx = Context::cpu(2);
        let x = logits(seed, num_tokens, half);
        for kind in [RouterKind::TopK, RouterKind::NoisyTopK, RouterKind::Gumbel, RouterKind::Switch, RouterKind::Gshard] {
            let k = match kind {
                RouterKind::Switch => 1,
                RouterKind::Gshard => 2,
                _ => k,
            };
            let mut config = of_kind(kind, k);
            config.router.schemes.gshard.second = SecondExpert::Always;
            if is_sigmoid && kind == RouterKind::TopK {
                config.router.scores = ScoreFunction::Sigmoid;
            }
            let routing = route(&ctx, &config, &x, &RouterInput::default()).unwrap();
            for (experts, logits) in experts(&routing).iter().zip(x.chunks(E)) {
                prop_assert_eq!(&experts[..], &order(logits)[..k], "{:?}", kind);
            }
        }
    }

    #[test]
    fn a_tokens_own_number_of_experts_is_that_of_sorting(seed: u64, half in 0_u64..4, num_tokens in 1_usize..200) {
        let ctx = Context::cpu(2);
        let x = logits(seed, num_tokens, half);
        let relu = route(&ctx, &of_kind(RouterKind::Relu, 2), &x, &RouterInput::default()).unwrap();
        for (experts, logits) in experts(&relu).iter().zip(x.chunks(E)) {
            let expected: Vec<u32> = order(logits).into_iter().filter(|&e| logits[e as usize] > 0.0).collect();
            prop_assert_eq!(experts, &expected);
        }
        // No sum of softmax shares of whole logits equals this number.
        let p = 0.371_3;
        let mut config = of_kind(RouterKind::TopP, 2);
        config.router.schemes.top_p.p = p as f32;
        let top_p = route(&ctx, &config, &x, &RouterInput::default()).unwrap();
        for (experts, logits) in experts(&top_p).iter().zip(x.chunks(E)) {
            let (probs, mut sum) = (softmax(logits), 0.0);
            let is_needed = |e: &u32| {
                let is_needed = sum < p;
                sum += probs[*e as usize];
                is_needed
            };
            let expected: Vec<u32> = order(logits).into_iter().take_while(is_needed).collect();
            prop_assert_eq!(experts, &expected);
        }
    }

    #[test]
    fn joint_schemes_balance_whatever_the_logits(seed: u64, half in 0_u64..4, num_tokens in 1_usize..200) {
        let ctx = Context::cpu(2);
        let mut x = logits(seed, num_tokens, half);
        // A common preference, stronger for some seeds.
        x.iter_mut().enumerate().for_each(|(i, x)| *x += ((i % E) as u64 * (seed % 5)) as f64);
        for (kind, k) in [(RouterKind::ExpertChoice, 2), (RouterKind::Base, 1)] {
            let routing = route(&ctx, &of_kind(kind, k), &x, &RouterInput::default()).unwrap();
            let mut loads = [0; E];
            experts(&routing).iter().flatten().for_each(|&e| loads[e as usize] += 1);
            let expected: Vec<usize> = match kind {
                RouterKind::Base => (0..E).map(|e| num_tokens / E + usize::from(e < num_tokens % E)).collect(),
                _ => vec![(k * num_tokens).div_ceil(E).min(num_tokens); E],
            };
            prop_assert_eq!(&loads[..], &expected[..], "{:?}", kind);
        }
    }

    #[test]
    fn decisions_do_not_depend_on_threads_or_on_how_tokens_are_shared_out(
        seed: u64, num_tokens in 2_usize..300, at in 0.0..1.0_f64, progress in 0.0..1.0_f64,
    ) {
        let x = logits(seed, num_tokens, 3);
        let ids: Vec<u32> = (0..num_tokens as u32).map(|t| t % 37).collect();
        let noise = Random::new(seed, Purpose::Router, 5);
        let input = RouterInput { token_ids: &ids, progress, ..RouterInput::with_noise(noise) };
        for (kind, k) in kinds() {
            let mut config = of_kind(kind, k);
            if kind != RouterKind::Hierarchical {
                config.router.noise_std = Ramp::constant(0.3);
            }
            let mut random = config.clone();
            (random.router.random_share, random.router.random_fade) = (0.2, 0.5);
            config = if MoeLayer::new(random.clone()).is_ok() { random } else { config };
            let whole = route(&Context::cpu(1), &config, &x, &input).unwrap();
            for threads in [2, 3] {
                prop_assert_eq!(&whole, &route(&Context::cpu(threads), &config, &x, &input).unwrap(), "{:?}", kind);
            }
            if matches!(kind, RouterKind::ExpertChoice | RouterKind::Base | RouterKind::Sinkhorn) {
                continue;
            }
            let first = (at * num_tokens as f64) as usize;
            let mut parts = Vec::new();
            for (range, first_token) in [(0..first, 0), (first..num_tokens, first)] {
                let input = RouterInput { token_ids: &ids[range.clone()], first_token, ..input };
                let part = route(&Context::cpu(2), &config, &x[range.start * E..range.end * E], &input).unwrap();
                parts.extend(experts(&part));
            }
            prop_assert_eq!(experts(&whole), parts, "{:?}", kind);
        }
    }
}

/// Logits at both ends of f32's range, whose differences and exponentials overflow.
#[test]
fn the_largest_logits_are_decided() {
    let ctx = Context::cpu(2);
    let extremes = [3e38, -3e38, 1e30, -1e30, 0.0, 1e-40, f64::from(f32::MAX), f64::from(f32::MIN)];
    for seed in 0..20 {
        let random = Random::new(seed, Purpose::Test, 41);
        // With every other seed all tokens prefer the same experts.
        let pick = |i: usize| random.below(if seed % 2 == 0 { i } else { i % E } as u64, 8) as usize;
        let x: Vec<f64> = (0..150 * E).map(|i| extremes[pick(i)]).collect();
        for (kind, k) in kinds()
            .filter(|(kind, _)| !matches!(kind, RouterKind::Cosine | RouterKind::Hierarchical | RouterKind::LowRank))
        {
            let config = of_kind(kind, k);
            let routing = route(&ctx, &config, &x, &RouterInput::default()).unwrap();
            assert!(routing.expert_weights().iter().all(|w| w.is_finite()), "{kind:?}, seed {seed}");
            for chosen in experts(&routing) {
                let distinct: BTreeSet<u32> = chosen.iter().copied().filter(|e| (*e as usize) < E).collect();
                assert_eq!(distinct.len(), chosen.len(), "{kind:?}, seed {seed}: {chosen:?}");
            }
        }
    }
    // A temperature below 1 overflows them.
    let mut config = of_kind(RouterKind::TopK, 2);
    config.router.temperature = Ramp::constant(0.5);
    let error = route(&ctx, &config, &[3e38; E], &RouterInput::default()).unwrap_err();
    assert!(matches!(error, RoutingError::NotFinite { token: 0, expert: 0, .. }), "{error}");
}

#[test]
fn what_is_not_finite_is_refused_by_every_scheme_with_logits() {
    let ctx = Context::cpu(2);
    for (kind, k) in kinds().filter(|(kind, _)| *kind != RouterKind::Hash) {
        for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let mut x = logits(1, 150, 3);
            x[140 * E + 2] = bad;
            let error = route(&ctx, &of_kind(kind, k), &x, &RouterInput::default()).unwrap_err();
            let is_named = matches!(error, RoutingError::NotFinite { token: 140, .. });
            assert!(is_named && error.to_string().contains("140"), "{kind:?}: {error}");
        }
    }
}

/// Counts with ties, with one id above an even share, and with unused ids.
#[test]
fn a_balanced_hash_sends_each_expert_about_as_many_tokens() {
    let counts: Vec<u64> = (1..=500).map(|rank| 10_000 / rank).collect();
    for k in [1, 2, 3] {
        let table = balanced_hash(&counts, E, k);
        let mut loads = [0; E];
        for (row, count) in table.chunks(k).zip(&counts) {
            assert!((1..k).all(|i| !row[..i].contains(&row[i])), "{row:?}");
            row.iter().for_each(|&e| loads[e as usize] += count);
        }
        // The first id may exceed an even share alone; the other experts fill up below it.
        let (least, most) = (*loads.iter().min().unwrap(), *loads.iter().max().unwrap());
        assert!(most - least <= 40 || most == counts[0], "{k}: {loads:?}");
    }
    assert_eq!(balanced_hash(&[5, 5, 0, 5], 2, 1), [0, 1, 1, 0]);
}

#[test]
fn a_clustered_hash_sends_near_embeddings_to_one_expert_and_to_the_nearest_centre() {
    let ctx = Context::cpu(2);
    let random = Random::new(4, Purpose::Test, 0);
    // Four clusters of 25 points around the corners of a square, far from each other.
    let corner = |id: u64| [(id % 4 % 2) as f32 * 50.0, (id % 4 / 2) as f32 * 50.0];
    let points: Vec<f32> = (0..100)
        .flat_map(|id| corner(id).into_iter().zip(0..).map(move |(x, i)| x + random.normal(2 * id + i)))
        .collect();
    for seed in 0..5 {
        let table = clustered_hash(&ctx, &points, 2, 4, 1, seed);
        assert!((0..100).all(|id| table[id] == table[id % 4]), "seed {seed}: {table:?}");
        assert!((1..4).all(|id| !table[..id].contains(&table[id])), "seed {seed}: {table:?}");
        assert_eq!(table, clustered_hash(&Context::cpu(1), &points, 2, 4, 1, seed), "any number of threads");
    }
    // In the end every id is nearest to the mean of its own cluster, and its second expert is the next nearest.
    let scattered: Vec<f32> = (0..300).map(|i| random.normal(1000 + i)).collect();
    let table = clustered_hash(&ctx, &scattered, 3, 5, 2, 1);
    let mut centres = [([0.0_f64; 3], 0.0); 5];
    for (row, point) in table.chunks(2).zip(scattered.chunks(3)) {
        let (sum, count) = &mut centres[row[0] as usize];
        (0..3).for_each(|i| sum[i] += f64::from(point[i]));
        *count += 1.0;
    }
    for (row, point) in table.chunks(2).zip(scattered.chunks(3)) {
        let distance = |(sum, count): &([f64; 3], f64)| -> f64 {
            (0..3).map(|i| (sum[i] / count - f64::from(point[i])).powi(2)).sum()
        };
        let mut order: Vec<u32> = (0..5).collect();
        order.sort_by(|&a, &b| distance(&centres[a as usize]).total_cmp(&distance(&centres[b as usize])));
        assert_eq!(row, &order[..2]);
    }
    // Fewer distinct points than clusters, and no points at all.
    let table = clustered_hash(&ctx, &[1.0, 1.0, 2.0], 1, 5, 3, 0);
    assert!(table[..3] == table[3..6] && table[6] != table[0], "{table:?}");
    assert!(clustered_hash(&ctx, &[], 4, 3, 2, 0).is_empty());
}

#[test]
fn a_layer_follows_its_hash_table_and_hashes_what_the_table_lacks() {
    let ctx = Context::cpu(2);
    let mut config = of_kind(RouterKind::Hash, 2);
    let ids = [3, 0, 3, 2, 9, 1];
    let input = RouterInput { token_ids: &ids, ..RouterInput::default() };
    let random = route(&ctx, &config, &logits(1, ids.len(), 1), &input).unwrap();
    (config.router.schemes.hash.table, config.router.num_token_ids) = (HashTable::Balanced, 4);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, moeworks_tensor::DType::F32);
    let x = ctx.zeros(&[ids.len(), E], moeworks_tensor::DType::F32);
    let empty = layer.route(&ctx, &weights, &x, &input).unwrap();
    assert_eq!(experts(&empty), experts(&random), "a table without entries is a random hash");
    weights.set_hash_table(&[7, 6, 5, 4, NO_EXPERT, 2, 1, 0]);
    let filled = experts(&layer.route(&ctx, &weights, &x, &input).unwrap());
    let random = experts(&random);
    assert_eq!(filled[0], [1, 0]);
    assert_eq!(filled[1], [7, 6]);
    assert_eq!(filled[5], [5, 4]);
    // An empty entry, and an id beyond the table.
    assert_eq!((&filled[3], &filled[4]), (&random[3], &random[4]));
}
