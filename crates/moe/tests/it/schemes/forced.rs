//! Checks of forced routing.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Returns a layer with forced routing and these settings, given as in a file.
fn forced(mut settings: serde_json::Value, top_k: usize) -> MoeConfig {
    settings["kind"] = json!("forced");
    let mut config = with(RouterKind::TopK, top_k);
    config.router = serde_json::from_value(settings).expect("settings");
    config
}

#[test]
fn forced_balance_goes_by_position_and_weighs_by_the_logits() {
    for (first_token, k) in [(0, 1), (0, 2), (7, 3), (5, 6)] {
        for is_normalized in [false, true] {
            let mut config = forced(json!({"forced_load": "balanced"}), k);
            config.normalize_weights = is_normalized;
            let input = RouterInput { first_token, ..quiet() };
            let of_token = |t: usize| (0..k).map(|i| (((first_token + t) * k + i) % E) as u32).collect();
            check("forced, balanced", &config, input, &|_| (0..T).map(of_token).collect());
        }
    }
}

#[test]
fn a_forced_load_has_the_gradients_of_its_weights() {
    for settings in [json!({"forced_load": "zipf"}), json!({"forced_load": "hot", "forced_hot_share": 0.9})] {
        for k in [1, 2] {
            let config = forced(settings.clone(), k);
            let numbers = numbers(&config);
            let outcome = run(&Context::cpu(2), &config, &noisy(), &numbers, &draw(9, T * D));
            let chosen: Vec<Vec<u32>> = outcome.saved.routing().expert_ids().chunks(k).map(<[u32]>::to_vec).collect();
            check("forced, skewed", &config, noisy(), &|_| chosen.clone());
            assert!(outcome.grads[1].iter().any(|&grad| grad != 0.0), "the router learns");
        }
    }
}

/// Returns the load of `n` tokens, as shares of the choices.
fn shares(settings: serde_json::Value, top_k: usize, n: usize) -> Vec<f64> {
    let ctx = Context::cpu(2);
    let config = forced(settings, top_k);
    let weights = MoeWeights::random(&ctx, &config, 3, 1.0);
    let x = ctx.zeros(&[n, D], DType::F32);
    let (_, saved) = MoeLayer::new(config).unwrap().forward(&ctx, &weights, &x, &RouterInput::default());
    let counts = saved.stats().tokens_per_expert;
    assert_eq!(counts.iter().sum::<u32>() as usize, n * top_k, "every token has K experts");
    counts.iter().map(|&count| f64::from(count) / (n * top_k) as f64).collect()
}

#[test]
fn the_loads_are_those_that_were_asked_for() {
    let n = 30_000;
    assert_eq!(shares(json!({}), 2, n), [1.0 / E as f64; E], "perfectly balanced");
    let near = |found: &[f64], expected: &[f64]| {
        for (found, expected) in found.iter().zip(expected) {
            let bound = 4.0 * (expected * (1.0 - expected) / n as f64).sqrt() + 1e-9;
            assert!((found - expected).abs() < bound, "{found}, expected {expected}");
        }
    };
    let sum: f64 = (1..=E).map(|i| (i as f64).powf(-1.5)).sum();
    let zipf: Vec<f64> = (1..=E).map(|i| (i as f64).powf(-1.5) / sum).collect();
    near(&shares(json!({"forced_load": "zipf", "forced_zipf": 1.5}), 1, n), &zipf);
    let hot = json!({"forced_load": "hot", "forced_hot_experts": 2, "forced_hot_share": 0.8});
    near(&shares(hot, 1, n), &[0.4, 0.4, 0.05, 0.05, 0.05, 0.05]);
    // All first choices go to one expert, and second choices to the others.
    let all = json!({"forced_load": "hot", "forced_hot_share": 1.0});
    assert_eq!(shares(all.clone(), 1, n)[0], 1.0);
    assert_eq!(shares(all, 2, n)[0], 0.5);
}

#[test]
fn a_forced_load_that_cannot_be_is_refused() {
    for (settings, setting) in [
        (json!({"forced_zipf": -1.0}), "router.forced_zipf"),
        (json!({"forced_hot_share": 1.5}), "router.forced_hot_share"),
        (json!({"forced_hot_experts": 0}), "router.forced_hot_experts"),
        (json!({"forced_hot_experts": 7}), "router.forced_hot_experts"),
        (json!({"expert_bias": true}), "router.expert_bias"),
    ] {
        let error = MoeLayer::new(forced(settings, 1)).unwrap_err().to_string();
        assert!(error.starts_with(setting), "{error}");
    }
}

proptest! {
    /// The choice follows from positions, so that pieces of a batch get the experts of the whole batch, in training
    /// and inference.
    #[test]
    fn pieces_of_a_batch_have_its_experts(cut in 1_usize..T, load in 0_usize..3, k in 1_usize..4, in_use in any::<bool>()) {
        let ctx = Context::cpu(1);
        let load = ["balanced", "zipf", "hot"][load];
        let config = forced(json!({"forced_load": load}), k);
        let layer = MoeLayer::new(config.clone()).unwrap();
        let weights = MoeWeights::random(&ctx, &config, 3, 1.0);
        let route = |first_token: usize, n: usize| {
            let x = tensor(&ctx, &[n, D], &draw(60 + first_token as u64, n * D));
            let input = RouterInput { first_token, is_inference: in_use, ..RouterInput::default() };
            layer.route(&ctx, &weights, &x, &input).unwrap().expert_ids().to_vec()
        };
        prop_assert_eq!([route(0, cut), route(cut, T - cut)].concat(), route(0, T));
    }
}
