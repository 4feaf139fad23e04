//! Checks of expert ids passed to a layer.

use moeworks_moe::{ExpertIds, FixedCapacity, Overflow, RoutingError};

use super::*;
use crate::kinds;

/// Returns experts that no router would choose: a run of neighbours for each token.
fn neighbours(k: usize, num_experts: usize) -> Vec<Vec<u32>> {
    (0..T).map(|t| (0..k).map(|i| ((5 * t + i) % num_experts) as u32).collect()).collect()
}

fn expert_ids(config: &MoeConfig, ids: &[Vec<u32>]) -> ExpertIds {
    MoeLayer::new(config.clone()).unwrap().expert_ids(&Context::cpu(1), T, &ids.concat()).unwrap()
}

/// Checks a pass with the experts of [`neighbours`].
fn check_given(name: &str, config: &MoeConfig, k: usize, input: RouterInput<'_>) {
    let ids = neighbours(k, config.num_choosable());
    let given = expert_ids(config, &ids);
    let outcome = check(name, config, RouterInput { expert_ids: Some(&given), ..input }, &|_| ids.clone());
    assert_eq!(
        outcome.saved.routing().expert_ids(),
        ids.concat(),
        "{name}: the layer took the experts that it was given"
    );
}

#[test]
fn weights_and_gradients_are_those_of_the_experts_handed_in() {
    for is_normalized in [false, true] {
        let plain = MoeConfig { normalize_weights: is_normalized, ..with(RouterKind::TopK, 3) };
        check_given("softmax", &plain, 3, quiet());
        let mut scores = plain.clone();
        (scores.router.scores, scores.router.expert_bias) = (ScoreFunction::Sigmoid, true);
        (scores.router.num_groups, scores.router.top_groups, scores.router.routed_scale) = (3, 2, 1.5);
        check_given("sigmoid", &scores, 3, quiet());
        let mut mixed = plain;
        (mixed.router.copy_experts, mixed.router.constant_experts, mixed.router.null_experts) = (1, 1, 1);
        check_given("zero-computation experts", &mixed, 3, quiet());
    }
    let falling = RouterInput { progress: 0.1, ..noisy() };
    for (kind, k, input) in [
        (RouterKind::Switch, 1, noisy()),
        (RouterKind::NoisyTopK, 2, noisy()),
        (RouterKind::Gumbel, 2, noisy()),
        (RouterKind::Cosine, 2, quiet()),
        (RouterKind::LowRank, 2, quiet()),
        (RouterKind::Base, 1, quiet()),
        (RouterKind::Sinkhorn, 2, quiet()),
        (RouterKind::Hash, 2, quiet()),
        (RouterKind::Forced, 2, quiet()),
        (RouterKind::DenseToSparse, 2, falling),
    ] {
        check_given(kind.name(), &with(kind, k), k, input);
    }
    // A number of experts other than K.
    for (kind, k, given) in [(RouterKind::TopP, 2, 3), (RouterKind::Relu, 2, 4), (RouterKind::DenseToSparse, 2, 4)] {
        check_given(kind.name(), &with(kind, k), given, quiet());
    }
}

#[test]
fn a_token_may_be_handed_fewer_experts_than_others() {
    let config = MoeConfig { normalize_weights: true, ..with(RouterKind::TopK, 3) };
    let mut ids = neighbours(3, E);
    ids[1][2] = NO_EXPERT;
    ids[4][1..].fill(NO_EXPERT);
    ids[7].fill(NO_EXPERT);
    let given = expert_ids(&config, &ids);
    let expected = ids.iter().map(|ids| ids.iter().copied().filter(|&id| id != NO_EXPERT).collect::<Vec<u32>>());
    let expected: Vec<Vec<u32>> = expected.collect();
    let outcome = check("gaps", &config, RouterInput { expert_ids: Some(&given), ..quiet() }, &|_| expected.clone());
    assert_eq!(outcome.stats.num_choices, 3 * T - 6);
}

/// Returns layers of every scheme that accepts ids, and with every option of the router.
fn layers() -> Vec<MoeConfig> {
    let mut layers = Vec::new();
    for (kind, k) in kinds() {
        let mut config = with(kind, k);
        config.router.schemes.gshard.second = SecondExpert::Always;
        if config.router.takes_expert_ids() {
            layers.extend([false, true].map(|normalize_weights| MoeConfig { normalize_weights, ..config.clone() }));
        }
    }
    let top_k = with(RouterKind::TopK, 2);
    let mut add = |change: &dyn Fn(&mut MoeConfig)| {
        let mut config = top_k.clone();
        change(&mut config);
        layers.push(config);
    };
    for overflow in [Overflow::Drop, Overflow::Priority, Overflow::Reroute] {
        add(&|config| (config.capacity_factor, config.router.overflow) = (0.7, overflow));
    }
    add(&|config| (config.capacity_factor, config.router.local_group) = (-0.6, 4));
    add(&|config| (config.router.zero_experts, config.router.copy_experts, config.router.null_experts) = (1, 2, 1));
    add(&|config| (config.router.constant_experts, config.capacity_factor) = (2, 1.0));
    add(&|config| (config.router.scores, config.router.expert_bias) = (ScoreFunction::Sigmoid, true));
    add(&|config| (config.router.num_groups, config.router.top_groups) = (3, 1));
    add(&|config| (config.router.random_share, config.router.random_fade) = (0.3, 0.5));
    add(&|config| config.router.sparsemixer_jitter = 0.3);
    add(&|config| config.router.gate_residual = true);
    add(&|config| config.jitter = Ramp::constant(0.1));
    add(&|config| config.router.noise_std = Ramp::constant(0.5));
    layers
}

#[test]
fn handing_back_the_ids_of_a_pass_gives_its_bits() {
    let ctx = Context::cpu(2);
    let capacity = Some(FixedCapacity { num_tokens: 2, group_tokens: 3 });
    let layers = layers();
    assert!(layers.len() > 30, "{}", layers.len());
    for config in layers {
        let (numbers, dy) = (numbers(&config), draw(9, T * D));
        for input in [
            quiet(),
            noisy(),
            RouterInput { progress: 0.2, ..noisy() },
            RouterInput { is_inference: true, ..quiet() },
            RouterInput { capacity, ..quiet() },
        ] {
            let first = run(&ctx, &config, &input, &numbers, &dy);
            let ids = first.saved.expert_ids().expect("a scheme that takes ids");
            let second = run(&ctx, &config, &RouterInput { expert_ids: Some(&ids), ..input }, &numbers, &dy);
            assert!(first.saved.routing() == second.saved.routing(), "{config:?}");
            assert!(first.y.bytes() == second.y.bytes() && first.grads == second.grads, "{config:?}");
            // A rerouted choice is not rerouted again.
            let stats = LayerStats { num_rerouted: first.stats.num_rerouted, ..second.stats };
            assert_eq!(stats, first.stats, "{config:?}");
        }
    }
}

#[test]
fn a_list_that_cannot_be_handed_in_is_refused() {
    let ctx = Context::cpu(1);
    let refused = |config: &MoeConfig, num_tokens: usize, ids: &[u32]| {
        MoeLayer::new(config.clone()).unwrap().expert_ids(&ctx, num_tokens, ids).unwrap_err()
    };
    let top_k = with(RouterKind::TopK, 2);
    assert_eq!(refused(&top_k, 2, &[0, 1, 2]), RoutingError::NumIds { num_ids: 3, num_tokens: 2, top_k: 2 });
    assert_eq!(
        refused(&top_k, 2, &[0, 1, 2, 3, 4, 5]).to_string(),
        "6 expert ids for 2 tokens: must be 2 for each token"
    );
    let outside = RoutingError::Expert { token: 1, choice: 0, expert: E as u32, num_experts: E };
    assert_eq!(refused(&top_k, 2, &[0, 1, E as u32, 3]), outside);
    assert_eq!(refused(&top_k, 2, &[0, 1, 3, 3]), RoutingError::Twice { token: 1, expert: 3 });
    assert_eq!(refused(&top_k, 0, &[0]), RoutingError::NumIds { num_ids: 1, num_tokens: 0, top_k: 2 });
    let any = with(RouterKind::TopP, 2);
    assert_eq!(refused(&any, 2, &[0, 1, 2]), RoutingError::NumIds { num_ids: 3, num_tokens: 2, top_k: 1 });
    assert_eq!(refused(&any, 1, &[0; E + 1]), RoutingError::NumIds { num_ids: E + 1, num_tokens: 1, top_k: E });
    for (kind, reason) in [
        (RouterKind::ExpertChoice, "experts choose their tokens"),
        (RouterKind::Hierarchical, "clusters"),
        (RouterKind::Gshard, "router.second"),
    ] {
        let error = refused(&with(kind, 2), 1, &[0, 1]).to_string();
        assert!(error.contains(kind.name()) && error.contains(reason), "{error}");
    }
}

#[test]
fn no_ids_come_back_from_a_scheme_that_takes_none() {
    let config = with(RouterKind::ExpertChoice, 2);
    let outcome = run(&Context::cpu(1), &config, &quiet(), &numbers(&config), &draw(9, T * D));
    assert!(outcome.saved.expert_ids().is_none());
}
