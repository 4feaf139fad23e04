//! Checks of each scheme.

use super::*;

#[test]
fn switch_takes_one_expert() {
    let mut config = with(RouterKind::Switch, 1);
    config.jitter = Ramp::constant(0.1);
    check("switch", &config, noisy(), &best(1));
}

#[test]
fn noisy_top_k_learns_its_noise() {
    for (k, is_normalized) in [(2, true), (1, false), (3, true)] {
        let mut config = with(RouterKind::NoisyTopK, k);
        config.normalize_weights = is_normalized;
        check("noisy", &config, noisy(), &best(k));
        check("noisy, at rest", &config, quiet(), &best(k));
    }
    let mut config = with(RouterKind::TopK, 2);
    config.router.noise_std = "linear 0.8 to 0 over 0.5".parse().unwrap();
    let outcome = check("falling noise", &config, RouterInput { progress: 0.25, ..noisy() }, &best(2));
    let total: f64 = outcome.stats.smooth_load.iter().sum();
    assert!((total - (2 * T) as f64).abs() < 4.0, "a smooth load adds up to about K T: {total}");
}

#[test]
fn the_routers_input_may_lose_elements_and_the_logits_be_warm() {
    let mut config = with(RouterKind::TopK, 2);
    config.router.input_dropout = "step 0.3 to 0 over 0.5".parse().unwrap();
    (config.jitter, config.normalize_weights) = ("linear 0.4 to 0 over 0.5".parse().unwrap(), true);
    config.router.temperature = "linear 2 to 0.5 over 0.5".parse().unwrap();
    check("dropout and warmth", &config, RouterInput { progress: 0.25, ..noisy() }, &best(2));
    check("cold", &config, quiet(), &best(2));
}

#[test]
fn gshards_second_expert_comes_by_chance() {
    for (second, threshold) in
        [(SecondExpert::Random, 0.5_f32), (SecondExpert::Threshold, 0.2), (SecondExpert::Always, 0.5)]
    {
        let mut config = with(RouterKind::Gshard, 2);
        config.normalize_weights = true;
        let gshard = &mut config.router.schemes.gshard;
        (gshard.second, gshard.second_threshold) = (second, threshold);
        let outcome = check("gshard", &config, noisy(), &best(2));
        let random = Random::new(3, Purpose::Router, 8);
        for t in 0..T {
            let choices: Vec<(u32, f32)> = outcome.saved.routing().choices(t).collect();
            let probs = &outcome.saved.probs()[t * E..(t + 1) * E];
            let mut order: Vec<f32> = probs.to_vec();
            order.sort_by(|a, b| b.total_cmp(a));
            let share = order[1] / (order[0] + order[1]);
            let expected = match second {
                SecondExpert::Always => true,
                SecondExpert::Threshold => share > threshold,
                SecondExpert::Random => share / threshold > random.uniform((3 << 48) + t as u64),
            };
            assert_eq!(choices.len() == 2, expected, "{second:?}, token {t}: {share}");
            assert!((choices[0].1 - (1.0 - share)).abs() < 1e-5, "the first keeps its share of both");
        }
    }
}

/// Local groups of 4, 4 and 1 tokens, each with its own loss.
#[test]
fn gshards_loss_is_that_of_its_local_groups() {
    let mut config = with(RouterKind::Gshard, 2);
    (config.normalize_weights, config.router.local_group) = (true, 4);
    let groups = check("gshard, groups", &config, noisy(), &best(2)).stats.gshard_loss;
    config.router.local_group = 0;
    let whole = check("gshard, one group", &config, noisy(), &best(2)).stats.gshard_loss;
    assert!((groups - whole).abs() > 1e-4, "{groups} {whole}");
}

#[test]
fn the_cosine_router_learns_directions_and_a_temperature() {
    for k in [1, 2] {
        let mut config = with(RouterKind::Cosine, k);
        config.normalize_weights = k == 2;
        check("cosine", &config, quiet(), &best(k));
    }
    // Scaling a token changes nothing, and no logit exceeds the inverse temperature.
    let config = with(RouterKind::Cosine, 2);
    let ctx = Context::cpu(1);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::random(&ctx, &config, 5, 1.0);
    let x = tensor(&ctx, &[T, D], &draw(1, T * D));
    let larger = tensor(&ctx, &[T, D], &draw(1, T * D).iter().map(|x| 1024.0 * x).collect::<Vec<_>>());
    let probs =
        |weights: &MoeWeights, x: &Tensor| layer.forward(&ctx, weights, x, &RouterInput::default()).1.probs().to_vec();
    for (a, b) in probs(&weights, &x).iter().zip(probs(&weights, &larger)) {
        assert!((a - b).abs() < 1e-5);
    }
    let rms = layer.forward(&ctx, &weights, &x, &RouterInput::default()).1.stats().logit_rms();
    assert!(rms <= 2.0, "the temperature is 0.5: {rms}");
    // The temperature never falls below 0.01, where it has no gradient.
    weights.extras[1].tensor.f32s_mut()[0] = 9.0;
    let (_, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    assert!(saved.stats().logit_rms() <= 100.0);
}

/// With bf16 tokens the choice equals that of a projection in f64. Only the norm of a token's projection, which all
/// of its logits share, is rounded to bf16.
#[test]
fn the_cosine_router_decides_about_bf16_tokens_as_in_f64() {
    let ctx = Context::cpu(2);
    let (t, d, e, p) = (300, 96, 24, 40);
    let mut config = config(d, 2, e, 2);
    config.router = RouterConfig { kind: RouterKind::Cosine, ..RouterConfig::default() };
    config.router.schemes.cosine.dim = p;
    let weights = MoeWeights::random(&ctx, &config, 9, 0.3);
    let x = moeworks_ops::elementwise::cast(&ctx, &tensor(&ctx, &[t, d], &draw(7, t * d)), DType::BF16);
    let (_, saved) = MoeLayer::new(config).unwrap().forward(&ctx, &weights, &x, &RouterInput::default());
    let f64s = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (router, projection) = (f64s(weights.router.f32s()), f64s(weights.extras[0].tensor.f32s()));
    let x: Vec<f64> = x.bf16s().iter().map(|x| f64::from(x.to_f32())).collect();
    for (t, x) in x.chunks(d).enumerate() {
        let q: Vec<f64> = projection.chunks(d).map(|row| dot(row, x)).collect();
        let cosines: Vec<f64> = router.chunks(p).map(|m| dot(m, &q) / (dot(m, m) * dot(&q, &q)).sqrt()).collect();
        let order = sorted(&cosines);
        let chosen: Vec<u32> = saved.routing().choices(t).map(|(id, _)| id).collect();
        let lead = cosines[order[1] as usize] - cosines[order[2] as usize];
        let between = cosines[order[0] as usize] - cosines[order[1] as usize];
        assert!(chosen == order[..2] || lead.min(between) < 3e-6, "token {t}: {chosen:?}, {order:?}, lead {lead}");
        // The initial temperature is 0.5.
        let expected = softmax(&cosines.iter().map(|c| 2.0 * c).collect::<Vec<_>>());
        for (p, expected) in saved.probs()[t * e..(t + 1) * e].iter().zip(expected) {
            assert!((f64::from(*p) / expected - 1.0).abs() < 3e-3, "token {t}: {p}, {expected}");
        }
    }
}

#[test]
fn gumbel_routing_is_straight_through() {
    let mut config = with(RouterKind::Gumbel, 1);
    config.router.temperature = Ramp::constant(0.7);
    let outcome = check("gumbel", &config, noisy(), &best(1));
    assert!(outcome.saved.routing().expert_weights().iter().all(|&w| w == 1.0));
    config.top_k = 2;
    let outcome = check("gumbel of two", &config, noisy(), &best(2));
    assert!(outcome.saved.routing().expert_weights().iter().all(|&w| w == 0.5));
}

/// Logits 1, 2, 3 win with their softmax probabilities at every temperature.
#[test]
fn gumbel_noise_draws_by_the_softmax() {
    let ctx = Context::cpu(2);
    let mut config = config(3, 1, 3, 1);
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..3).for_each(|e| weights.router.f32s_mut()[3 * e] = (e + 1) as f32);
    let n = 100_000;
    let x: Vec<f64> = (0..n).flat_map(|_| [1.0, 0.0, 0.0]).collect();
    let x = tensor(&ctx, &[n, 3], &x);
    for (case, temperature) in [0.1, 0.5, 2.0].into_iter().enumerate() {
        config.router = RouterConfig {
            kind: RouterKind::Gumbel,
            temperature: Ramp::constant(temperature),
            ..RouterConfig::default()
        };
        let input = RouterInput::with_noise(Random::new(case as u64, Purpose::Router, 0));
        let (_, saved) = MoeLayer::new(config.clone()).unwrap().forward(&ctx, &weights, &x, &input);
        for (&count, expected) in saved.stats().tokens_per_expert.iter().zip([0.0900, 0.2447, 0.6652]) {
            let share = f64::from(count) / n as f64;
            let bound = 3.5 * (expected * (1.0 - expected) / n as f64).sqrt() + 5e-5;
            assert!((share - expected).abs() < bound, "temperature {temperature}: {share}, expected {expected}");
        }
    }
}

#[test]
fn experts_choose_their_tokens() {
    for k in [1, 2, 6] {
        let config = with(RouterKind::ExpertChoice, k);
        let outcome = check("expert choice", &config, quiet(), &|tokens| {
            let count = (k * T).div_ceil(E);
            let mut ids: Vec<Vec<u32>> = vec![Vec::new(); T];
            for e in 0..E {
                let column: Vec<f64> = tokens.iter().map(|token| token.probs[e]).collect();
                sorted(&column)[..count.min(T)].iter().for_each(|&t| ids[t as usize].push(e as u32));
            }
            for (ids, token) in ids.iter_mut().zip(tokens) {
                ids.sort_by(|&a, &b| token.probs[b as usize].total_cmp(&token.probs[a as usize]));
            }
            ids
        });
        assert_eq!(outcome.stats.tokens_per_expert, [(k * T).div_ceil(E) as u32; E], "each takes as many");
    }
    // Outside training tokens choose for themselves.
    let config = with(RouterKind::ExpertChoice, 2);
    let input = RouterInput { is_inference: true, ..quiet() };
    check("expert choice at inference", &config, input, &best(2));
}

#[test]
fn base_gives_every_expert_as_many_tokens() {
    let config = with(RouterKind::Base, 1);
    let numbers = numbers(&config);
    let outcome = run(&Context::cpu(2), &config, &quiet(), &numbers, &draw(9, T * D));
    let chosen: Vec<Vec<u32>> = outcome.saved.routing().expert_ids().iter().map(|&id| vec![id]).collect();
    check("base", &config, quiet(), &|_| chosen.clone());
    assert_eq!(outcome.stats.tokens_per_expert, [2, 2, 2, 1, 1, 1]);
    check("base at inference", &config, RouterInput { is_inference: true, ..quiet() }, &best(1));
}

#[test]
fn sinkhorn_balances_and_weighs_by_the_logits_themselves() {
    for k in [1, 2] {
        let config = with(RouterKind::Sinkhorn, k);
        let choose = |tokens: &[Token]| {
            let mut c = [1.0; E];
            for _ in 0..400 {
                let mut sums = [0.0; E];
                for token in tokens {
                    let total: f64 = token.logits.iter().zip(&c).map(|(l, c)| l.exp() * c).sum();
                    sums.iter_mut().zip(&token.logits).for_each(|(s, l)| *s += l.exp() / total / T as f64);
                }
                c = sums.map(|s| 1.0 / (E as f64 * s));
            }
            let balanced = |token: &Token| token.logits.iter().zip(&c).map(|(l, c)| l + c.ln()).collect::<Vec<_>>();
            tokens.iter().map(|token| sorted(&balanced(token))[..k].to_vec()).collect::<Vec<_>>()
        };
        check("sinkhorn", &config, quiet(), &choose);
    }
}

#[test]
fn a_hash_sends_equal_ids_to_equal_experts() {
    for k in [1, 3] {
        let config = with(RouterKind::Hash, k);
        let numbers = numbers(&config);
        let outcome = run(&Context::cpu(2), &config, &quiet(), &numbers, &draw(9, T * D));
        let routing = outcome.saved.routing().clone();
        let ids: Vec<Vec<u32>> = (0..T).map(|t| routing.choices(t).map(|(id, _)| id).collect()).collect();
        assert_eq!(ids[0], ids[3], "tokens 0 and 3 have one id");
        assert!(ids.iter().all(|ids| ids.len() == k && (1..k).all(|i| !ids[..i].contains(&ids[i]))));
        assert!(ids.iter().any(|other| *other != ids[0]));
        let none = MoeWeights::zeros(&Context::cpu(1), &config, DType::F32);
        assert!(none.router.is_empty(), "nothing is learned");
    }
    // Many ids spread evenly.
    let ctx = Context::cpu(2);
    let config = with(RouterKind::Hash, 1);
    let ids: Vec<u32> = (0..6000).collect();
    let x = ctx.zeros(&[6000, D], DType::F32);
    let input = RouterInput { token_ids: &ids, ..RouterInput::default() };
    let weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    let (_, saved) = MoeLayer::new(config).unwrap().forward(&ctx, &weights, &x, &input);
    assert!(saved.stats().tokens_per_expert.iter().all(|&n| (880..1120).contains(&n)));
}

#[test]
fn top_p_takes_as_many_experts_as_it_needs() {
    for p in [0.3_f32, 0.7, 1.0] {
        for is_normalized in [false, true] {
            let mut config = with(RouterKind::TopP, 2);
            (config.router.schemes.top_p.p, config.normalize_weights) = (p, is_normalized);
            check("top-p", &config, quiet(), &|tokens| {
                let of_token = |token: &Token| {
                    let order = sorted(&token.probs);
                    let mut sum = 0.0;
                    let needed = order.iter().take_while(|&&e| {
                        let is_needed = sum < f64::from(p);
                        sum += token.probs[e as usize];
                        is_needed
                    });
                    needed.copied().collect()
                };
                tokens.iter().map(of_token).collect()
            });
        }
    }
}

#[test]
fn relu_takes_every_expert_with_a_positive_logit() {
    for is_balanced in [false, true] {
        let mut config = with(RouterKind::Relu, 2);
        let relu = &mut config.router.schemes.relu;
        (relu.l1_start, relu.l1_balanced) = (0.3, is_balanced);
        check("relu", &config, quiet(), &|tokens| {
            let positive =
                |token: &Token| sorted(&token.gates).into_iter().filter(|&e| token.gates[e as usize] > 0.0).collect();
            tokens.iter().map(positive).collect()
        });
    }
}

/// The coefficient of the L1 loss holds the mean number of experts at K.
#[test]
fn relus_loss_holds_the_number_of_experts() {
    let ctx = Context::cpu(2);
    let (e, k, t) = (16, 3, 200);
    let mut config = config(e, 1, e, k);
    config.router = RouterConfig { kind: RouterKind::Relu, ..RouterConfig::default() };
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..e).for_each(|i| weights.router.f32s_mut()[i * e + i] = 1.0);
    let mut shift = 0.5; // what the loss would make of the logits' mean: more weight, lower logits
    let mut active = Vec::new();
    for step in 0..400_u64 {
        let random = Random::new(6, Purpose::Test, step);
        let x: Vec<f64> = (0..(t * e) as u64).map(|i| f64::from(random.normal(i)) + shift).collect();
        let (_, saved) = layer.forward(&ctx, &weights, &tensor(&ctx, &[t, e], &x), &RouterInput::default());
        let stats = saved.stats();
        active.push(stats.num_choices as f64 / t as f64);
        moeworks_moe::next_state(&config, &mut weights.state, std::slice::from_ref(&stats), 0, 0.5);
        let weight = f64::from(weights.state[0].tensor.f32s()[0]);
        // The L1 loss pulls the logits down, the rest of the loss pushes them up.
        shift += 0.02 * (0.5 - shift) - 0.02 * weight.min(5.0);
    }
    let late: f64 = active[300..].iter().sum::<f64>() / 100.0;
    assert!((late - k as f64).abs() < 0.15 * k as f64, "{late} experts a token");
}

#[test]
fn experts_without_computation_are_nothing_a_copy_or_a_mixture() {
    let mut config = with(RouterKind::TopK, 3);
    let router = &mut config.router;
    (router.zero_experts, router.copy_experts, router.constant_experts) = (1, 2, 2);
    check("moe++", &config, quiet(), &best(3));
    config.normalize_weights = true;
    check("moe++, normalised", &config, quiet(), &best(3));
    // Null experts do not count in the normalised weights.
    config.router.null_experts = 3;
    let outcome = check("null experts", &config, quiet(), &best(3));
    let routing = outcome.saved.routing();
    for t in 0..T {
        let sum: f32 = routing.choices(t).map(|(_, weight)| weight).sum();
        assert!((sum - 1.0).abs() < 1e-6 || routing.choices(t).all(|(id, _)| id as usize >= E + 5));
    }
}

#[test]
fn logits_of_the_layer_before_add_to_those_of_this_one() {
    for kind in [RouterKind::TopK, RouterKind::NoisyTopK, RouterKind::Cosine] {
        let mut config = with(kind, 2);
        (config.router.gate_residual, config.router.zero_experts, config.router.constant_experts) = (true, 1, 1);
        config.router.temperature = Ramp::constant(0.7);
        let outcome = check("residual", &config, noisy(), &best(2));
        let (logits, e) = (outcome.saved.logits().unwrap(), config.num_choosable());
        assert_eq!(logits.shape(), [T, e]);
        let (numbers, input) = (numbers(&config), noisy());
        let scheme = Scheme { config: &config, input, l1: 0.0 };
        for (t, logits) in logits.f32s().chunks(e).enumerate() {
            let clean = scheme.token(&numbers, t).clean;
            assert!(logits.iter().zip(clean).all(|(&a, b)| (f64::from(a) - b).abs() < 1e-4), "{kind:?}, token {t}");
        }
    }
    let ctx = Context::cpu(1);
    let mut config = with(RouterKind::TopK, 2);
    config.router.gate_residual = true;
    let numbers = numbers(&config);
    let (layer, weights) = (MoeLayer::new(config.clone()).unwrap(), layer_weights(&ctx, &config, &numbers));
    let x = tensor(&ctx, &[T, D], &numbers.x);
    // The first layer has no previous one: its matrix learns nothing, and old values of the gradient are cleared.
    let (_, saved) = layer.forward(&ctx, &weights, &x, &quiet());
    let (_, task) = layer.backward(&ctx, &weights, &saved, &x, &LossGrad::default());
    assert!(task.d_previous_logits().is_none());
    let mut grads = MoeWeights::zeros(&ctx, &config, DType::F32);
    grads.extras[0].tensor.f32s_mut().fill(7.0);
    task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
    assert!(grads.extras[0].tensor.f32s().iter().all(|&grad| grad == 0.0));
    config.router.kind = RouterKind::Hash;
    assert!(MoeLayer::new(config).unwrap_err().to_string().contains("router.gate_residual"));
}

#[test]
fn modalities_keep_to_their_experts_and_have_losses_of_their_own() {
    let mut config = with(RouterKind::TopK, 2);
    config.router.modality_boundaries = "100".to_owned();
    check("modalities that share", &config, quiet(), &best(2));
    config.router.modality_experts = "2, 1".to_owned();
    for scores in [ScoreFunction::Softmax, ScoreFunction::Sigmoid] {
        config.router.scores = scores;
        let outcome = check("modalities", &config, quiet(), &best(2));
        for (t, id) in TOKEN_IDS.into_iter().enumerate() {
            let is_second = id >= 100;
            assert!(outcome.saved.routing().choices(t).all(|(e, _)| if is_second { e >= 2 } else { e != 2 }));
        }
        assert_eq!(outcome.stats.modalities.iter().map(|m| m.num_tokens).collect::<Vec<_>>(), [5, 4]);
    }
}

#[test]
fn modalities_may_be_given_in_place_of_ids() {
    let ctx = Context::cpu(2);
    let mut by_id = with(RouterKind::TopK, 2);
    by_id.router.modality_experts = "2, 1".to_owned();
    let given = by_id.clone();
    by_id.router.modality_boundaries = "100".to_owned();
    let numbers = numbers(&given);
    let (weights, x) = (layer_weights(&ctx, &given, &numbers), tensor(&ctx, &[T, D], &numbers.x));
    let modalities = TOKEN_IDS.map(|id| u32::from(id >= 100));
    let route = |config: &MoeConfig, input: &RouterInput<'_>| {
        MoeLayer::new(config.clone()).unwrap().route(&ctx, &weights, &x, input).unwrap()
    };
    let expected = route(&by_id, &RouterInput { token_ids: &TOKEN_IDS, ..RouterInput::default() });
    assert_eq!(route(&given, &RouterInput { modalities: &modalities, ..RouterInput::default() }), expected);
}

#[test]
fn random_choices_fade() {
    let ctx = Context::cpu(2);
    let (n, e) = (4000, 8);
    let mut config = config(e, 1, e, 2);
    (config.router.random_share, config.router.random_fade) = (0.2, 0.4);
    let layer = MoeLayer::new(config.clone()).unwrap();
    let mut weights = MoeWeights::zeros(&ctx, &config, DType::F32);
    (0..e).for_each(|i| weights.router.f32s_mut()[i * e] = -(i as f32));
    let x = tensor(&ctx, &[n, e], &(0..n * e).map(|i| f64::from(u8::from(i % e == 0))).collect::<Vec<_>>());
    // The router ranks experts 0 and 1 highest.
    let share_of_others = |progress: f64| {
        let input = RouterInput { progress, ..RouterInput::with_noise(Random::new(2, Purpose::Router, 0)) };
        let stats = layer.forward(&ctx, &weights, &x, &input).1.stats();
        f64::from(stats.tokens_per_expert[2..].iter().sum::<u32>()) / (2 * n) as f64
    };
    for (progress, expected) in
        [(0.0, 0.75), (0.19, 0.75), (0.3, 0.75 * 0.75), (0.5, 0.75 * 0.25), (0.6, 0.0), (1.0, 0.0)]
    {
        assert!((share_of_others(progress) - expected).abs() < 0.02, "{progress}");
    }
}
