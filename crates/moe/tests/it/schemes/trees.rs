//! Checks of hierarchical routing against its reference and against a flat router.

use super::*;

impl Scheme<'_> {
    /// Computes the logits of a tree of clusters, node by node. Logits of the first level are unchanged; below it a
    /// child has its parent's logit plus the logarithm of its share. Those of a closed node are spread evenly.
    pub(super) fn tree(&self, numbers: &Numbers, x: &[f64]) -> (Vec<f64>, Vec<bool>, f64) {
        let router = &self.config.router;
        let mut arities: Vec<usize> =
            router.schemes.hierarchical.tree.split(", ").map(|n| n.parse().unwrap()).collect();
        arities.push(E / arities.iter().product::<usize>());
        let beam = match router.schemes.hierarchical.beam {
            0 => self.config.top_k,
            beam => beam,
        };
        let (mut logits, mut lower_z, mut row, mut nodes) = (vec![0.0; E], 0.0, 0, 1);
        let mut open: Vec<(usize, f64)> = vec![(0, 0.0)];
        for (level, &arity) in arities.iter().enumerate() {
            let is_last = level + 1 == arities.len();
            let vectors = if is_last { &numbers.router[..] } else { &numbers.extra("tree.weight")[row * D..] };
            (row, nodes) = (row + nodes * arity, nodes * arity);
            let mut children: Vec<(usize, f64)> = Vec::new();
            for &(parent, above) in &open {
                let scores: Vec<f64> = (0..arity).map(|c| dot(&vectors[(parent * arity + c) * D..][..D], x)).collect();
                let lse = if level == 0 { 0.0 } else { scores.iter().map(|s| s.exp()).sum::<f64>().ln() };
                lower_z += if arity > 1 { lse * lse } else { 0.0 };
                children.extend(scores.iter().enumerate().map(|(c, s)| (parent * arity + c, above + s - lse)));
            }
            let size = E / nodes;
            for &(node, score) in &children {
                logits[node * size..(node + 1) * size].fill(score - (size as f64).ln());
            }
            if is_last {
                let open: Vec<usize> = children.iter().map(|child| child.0).collect();
                return (logits, (0..E).map(|e| open.contains(&e)).collect(), lower_z);
            }
            children.sort_by(|a, b| b.1.total_cmp(&a.1));
            children.truncate(beam);
            open = children;
        }
        unreachable!("the last level returns")
    }
}

fn tree(shape: &str, beam: usize, top_k: usize) -> MoeConfig {
    let mut config = with(RouterKind::Hierarchical, top_k);
    let tree = &mut config.router.schemes.hierarchical;
    (tree.tree, tree.beam) = (shape.to_owned(), beam);
    config
}

/// Chooses the best `k` in open clusters.
fn best_open(k: usize) -> impl Fn(&[Token]) -> Vec<Vec<u32>> {
    let of_token = move |token: &Token| {
        let scores = token.logits.iter().zip(&token.open);
        let scores: Vec<f64> = scores.map(|(&l, &open)| if open { l } else { f64::NEG_INFINITY }).collect();
        sorted(&scores)[..k].to_vec()
    };
    move |tokens| tokens.iter().map(of_token).collect()
}

#[test]
fn a_tree_opens_the_likeliest_clusters() {
    for (shape, beam, k) in
        [("2", 0, 1), ("2", 1, 3), ("3", 0, 2), ("3", 2, 3), ("2", 2, 4), ("6", 2, 1), ("3, 2", 2, 2), ("2, 3", 3, 2)]
    {
        for is_normalized in [false, true] {
            let mut config = tree(shape, beam, k);
            config.normalize_weights = is_normalized;
            config.router.temperature = "linear 2 to 0.5 over 0.5".parse().unwrap();
            let name = format!("tree {shape:?}, {beam} open, {k} experts");
            check(&name, &config, RouterInput { progress: 0.1, ..quiet() }, &best_open(k));
        }
    }
    let mut config = tree("3", 2, 2);
    (config.jitter, config.router.input_dropout) = (Ramp::constant(0.2), Ramp::constant(0.2));
    check("a tree under noise", &config, noisy(), &best_open(2));
}

/// With a cluster for each expert, or without clusters, the decision and the weights equal those of a flat router.
#[test]
fn a_tree_of_one_level_is_a_flat_router() {
    let ctx = Context::cpu(2);
    let flat = with(RouterKind::TopK, 2);
    let x = tensor(&ctx, &[T, D], &draw(1, T * D));
    let run = |config: &MoeConfig, weights: &MoeWeights| {
        let layer = MoeLayer::new(config.clone()).unwrap();
        let saved = layer.forward(&ctx, weights, &x, &quiet()).1;
        let stats = saved.stats();
        (saved.routing().expert_ids().to_vec(), saved.routing().expert_weights().to_vec(), stats.z, stats.mean_prob)
    };
    let weights = MoeWeights::random(&ctx, &flat, 3, 1.0);
    let expected = run(&flat, &weights);
    // Every cluster has one expert, so that the level below chooses nothing.
    let config = tree("6", 6, 2);
    let mut clusters = MoeWeights::random(&ctx, &config, 4, 1.0);
    clusters.extras[0].tensor.f32s_mut().copy_from_slice(weights.router.f32s());
    let (ids, chosen, z, probs) = run(&config, &clusters);
    assert_eq!(ids, expected.0);
    assert!((z - expected.2).abs() < 1e-5, "{z} {}", expected.2);
    for (a, b) in chosen.iter().chain(&probs).zip(expected.1.iter().chain(&expected.3)) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

/// With every cluster open the choice follows the products of the probabilities, for every shape.
#[test]
fn open_clusters_hide_nothing() {
    for (shape, k) in [("2", 2), ("3", 3), ("3, 2", 1)] {
        let outcome = check("all open", &tree(shape, 6, k), quiet(), &best(k));
        for probs in outcome.saved.probs().chunks(E) {
            assert!((probs.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn a_tree_costs_as_its_open_clusters() {
    let products = |experts: usize, shape: &str, beam: usize, k: usize| {
        let mut config = config(8, 4, experts, k);
        config.router.kind = RouterKind::Hierarchical;
        let tree = &mut config.router.schemes.hierarchical;
        (tree.tree, tree.beam) = (shape.to_owned(), beam);
        MoeLayer::new(config.clone()).unwrap();
        (config.router_products(), config.extra_shapes().iter().map(|extra| extra.shape[0]).sum::<usize>())
    };
    assert_eq!(products(64, "8", 1, 1), (8 + 8, 8));
    assert_eq!(products(64, "8", 0, 2), (8 + 2 * 8, 8));
    assert_eq!(products(64, "4, 4", 2, 2), (4 + 2 * 4 + 2 * 4, 4 + 16));
    assert_eq!(products(64, "", 1, 1), (16, 8));
    assert_eq!(products(256, "", 2, 8), (16 + 32, 16));
    assert_eq!(products(7, "", 1, 1), (7, 0), "a prime number of experts has no clusters");
}

#[test]
fn a_random_choice_is_one_of_all_clusters() {
    let ctx = Context::cpu(2);
    let mut config = tree("3", 1, 1);
    (config.router.random_share, config.capacity_factor) = (1.0, 0.0);
    let weights = MoeWeights::random(&ctx, &config, 4, 1.0);
    let x = tensor(&ctx, &[600, D], &draw(1, D).repeat(600));
    let input = RouterInput { progress: 0.5, ..RouterInput::with_noise(Random::new(2, Purpose::Router, 0)) };
    let stats = MoeLayer::new(config).unwrap().forward(&ctx, &weights, &x, &input).1.stats();
    assert!(stats.tokens_per_expert.iter().all(|&n| (60..140).contains(&n)), "{:?}", stats.tokens_per_expert);
}

/// A token's choice does not depend on the tokens in the same batch.
#[test]
fn a_tree_chooses_token_by_token() {
    let ctx = Context::cpu(2);
    let config = tree("3", 2, 2);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let weights = MoeWeights::random(&ctx, &config, 4, 1.0);
    let numbers = draw(1, 70 * D);
    let route = |range: std::ops::Range<usize>| {
        let x = tensor(&ctx, &[range.len(), D], &numbers[range.start * D..range.end * D]);
        layer.route(&ctx, &weights, &x, &RouterInput::default()).unwrap().expert_ids().to_vec()
    };
    let parts = [route(0..35), route(35..36), route(36..70)].concat();
    assert_eq!(route(0..70), parts);
}

#[test]
fn a_tree_that_cannot_be_is_refused() {
    let refused = |change: fn(&mut MoeConfig), setting: &str| {
        let mut config = tree("3", 2, 2);
        change(&mut config);
        let error = MoeLayer::new(config).unwrap_err().to_string();
        assert!(error.contains(setting), "{error}");
    };
    refused(|c| c.router.schemes.hierarchical.tree = "4".to_owned(), "router.tree");
    refused(|c| c.router.schemes.hierarchical.tree = "1".to_owned(), "router.tree");
    refused(|c| c.router.schemes.hierarchical.tree = "3, 0".to_owned(), "router.tree");
    refused(|c| c.router.schemes.hierarchical.tree = "18446744073709551615, 3".to_owned(), "router.tree");
    refused(|c| c.router.schemes.hierarchical.tree = "three".to_owned(), "router.tree");
    refused(|c| (c.router.schemes.hierarchical.beam, c.top_k) = (1, 3), "router.tree_beam");
    refused(|c| c.router.scores = ScoreFunction::Sigmoid, "router.scores");
    refused(|c| c.router.expert_bias = true, "router.expert_bias");
    refused(|c| c.router.noise_std = Ramp::constant(0.1), "router.noise_std");
    refused(|c| c.router.zero_experts = 1, "router.zero_experts");
}
