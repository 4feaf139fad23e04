//! Findings on routers and the load of experts.

use moeworks_model::BalanceKind;
use moeworks_model::model_cost::{Kept, shape};
use moeworks_moe::share;

use super::figures::{Choices, LayerFigures, RunFigures};
use super::finding::{Figure, Finding, Over, Remedy, Topic};
use super::settings::Remedies;
use crate::config::RunConfig;

/// Above this share of ln E a token's distribution decides nothing.
const UNIFORM: f64 = 0.985;
/// Steps after which a router should have decided.
const LEAST_STEPS: u64 = 100;
/// Records before a router is judged at all.
const LEAST_RECORDS: usize = 5;
/// Below this share of experts in use the load has collapsed.
const LEAST_DIVERSITY: f64 = 0.75;
/// Above this share of the largest possible excess of one expert the load has collapsed.
const MOST_EXCESS: f64 = 0.5;
/// The share of experts in use below which a hot expert counts: the rest is uneven, too.
const HOT_DIVERSITY: f64 = 0.93;
/// Above this share of experts without a token the load has collapsed.
const MOST_DEAD: f64 = 0.05;
/// Above this share of dropped choices something is to be done.
const MOST_DROPPED: f64 = 0.01;
/// Layers of which figures are shown.
const SHOWN: usize = 3;

/// Finds layers where few experts take most tokens.
pub(super) fn collapsed(run: &RunFigures) -> Option<Finding> {
    let choices = run.choices().filter(|choices| choices.top_k < choices.num_experts)?;
    if run.window.num_records < LEAST_RECORDS {
        return None;
    }
    let mut worst: Vec<&LayerFigures> =
        run.window.layers.iter().filter(|layer| has_collapsed(layer, choices)).collect();
    worst.sort_by(|a, b| a.load.expert_diversity().total_cmp(&b.load.expert_diversity()));
    let first = worst.first()?;
    let figure = |layer: &&LayerFigures| {
        let load = |name: &str, value: f64| Figure::new(layer.named(name), value, Over::WindowLoad);
        [
            load("max_over_mean", layer.load.max_over_mean()),
            load("expert_diversity", layer.load.expert_diversity()),
            load("dead_expert_frac", layer.load.dead_expert_frac()),
            Figure::mean(layer.named("mean_prob_entropy"), layer.mean_prob_entropy),
        ]
    };
    let share_of_layers = worst.len() as f64 / run.window.layers.len() as f64;
    Some(Finding {
        topic: Topic::RouterCollapsed,
        summary: format!(
            "few experts take most tokens in {} of {} MoE layers: in layer {} the busiest expert has {:.2} times its even share \
             and experts are as good as {:.1} of {}",
            worst.len(),
            run.window.layers.len(),
            first.load.layer,
            first.load.max_over_mean(),
            first.load.expert_diversity() * first.num_experts() as f64,
            first.num_experts(),
        ),
        at_stake: share_of_layers * (1.0 - first.load.expert_diversity()),
        figures: worst.iter().take(SHOWN).flat_map(figure).collect(),
        remedies: more_even(run),
    })
}

fn has_collapsed(layer: &LayerFigures, choices: Choices) -> bool {
    let most = choices.num_experts as f64 / choices.top_k as f64;
    let excess = (layer.load.max_over_mean() - 1.0) / (most - 1.0);
    layer.load.num_choices() > 0
        && (layer.load.expert_diversity() < LEAST_DIVERSITY
            || (excess > MOST_EXCESS && layer.load.expert_diversity() < HOT_DIVERSITY)
            || layer.load.dead_expert_frac() > MOST_DEAD)
}

/// Returns remedies for an uneven load.
fn more_even(run: &RunFigures) -> Vec<Remedy> {
    let (make, train, router) = (Remedies::new(&run.settings), &run.settings.train, &run.settings.model.router);
    if router.kind.doc().is_synthetic {
        let expected = "choices by the router in place of a load that is forced";
        return make.set("model.router.kind", "top_k", expected).into_iter().collect();
    }
    let coef = train.balance_coef.at(run.progress());
    let expected = "a load nearer to even; a load of 1 is even (max_over_mean)";
    let balance = if train.balance == BalanceKind::None || coef == 0.0 {
        let kind = if train.balance == BalanceKind::None { "layer".to_owned() } else { name_of(train.balance) };
        make.set_all(&[("train.balance", kind), ("train.balance_coef", coef.max(0.01).to_string())], expected)
    } else {
        make.set("train.balance_coef", (3.0 * coef).max(0.01), expected)
    };
    let jitter = run.settings.model.jitter.range().1 == 0.0;
    let is_young = run.window.last_step < 20 * train.warmup_steps;
    let warmup = 2 * train.warmup_steps;
    let remedies = [
        balance,
        (!router.expert_bias)
            .then(|| make.set("model.router.expert_bias", true, "balance by a bias on the choice, without a loss"))
            .flatten(),
        jitter.then(|| make.set("model.jitter", "0.01", "tokens near two experts try both")).flatten(),
        is_young
            .then(|| make.set("train.warmup_steps", warmup, "routers that do not settle before experts have learned"))
            .flatten(),
    ];
    remedies.into_iter().flatten().collect()
}

/// Returns the name of a kind of balance loss in settings.
fn name_of(kind: BalanceKind) -> String {
    let value = serde_json::to_value(kind).ok();
    value.and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_else(|| "layer".to_owned())
}

/// Finds routers that give every expert almost the same probability.
pub(super) fn uniform(run: &RunFigures) -> Option<Finding> {
    let choices = run.choices()?;
    let router = &run.settings.model.router;
    let (layers, num_records) = (&run.window.layers, run.window.num_records);
    let is_flat = |layer: &&LayerFigures| layer.entropy_share() > UNIFORM;
    let mut flat: Vec<&LayerFigures> = layers.iter().filter(is_flat).collect();
    if num_records < LEAST_RECORDS || 2 * flat.len() < layers.len() || router.kind.doc().is_synthetic {
        return None;
    }
    let remedies = more_decided(run);
    // A router begins undecided: without a setting that keeps it so, it gets time.
    if run.window.last_step < LEAST_STEPS && !is_kept_flat(&run.settings, run.progress()) {
        return None;
    }
    flat.sort_by(|a, b| b.entropy_share().total_cmp(&a.entropy_share()));
    let first = flat.first()?;
    let figure = |layer: &&LayerFigures| {
        [
            Figure::mean(layer.named("router_entropy"), layer.router_entropy),
            Figure::new(format!("ln {}", layer.num_experts()), (layer.num_experts() as f64).ln(), Over::Computed),
            Figure::mean(layer.named("router_logit_rms"), layer.logit_rms),
        ]
    };
    let share_of_layers = flat.len() as f64 / layers.len() as f64;
    Some(Finding {
        topic: Topic::RouterUniform,
        summary: format!(
            "routers hardly decide in {} of {} MoE layers: in layer {} a token's entropy is {:.2}% of that of equal \
             probabilities",
            flat.len(),
            layers.len(),
            first.load.layer,
            100.0 * first.entropy_share(),
        ),
        at_stake: share_of_layers * (1.0 - share(choices.top_k as u64, choices.num_experts as u64)),
        figures: flat.iter().take(SHOWN).flat_map(figure).collect(),
        remedies,
    })
}

/// Returns whether a setting keeps routers undecided.
fn is_kept_flat(settings: &RunConfig, progress: f64) -> bool {
    let (train, model) = (&settings.train, &settings.model);
    model.router.temperature.at(progress) > 2.0
        || train.balance_coef.at(progress) > 0.3
        || model.jitter.at(progress) > 0.3
        || model.router.noise_std.at(progress) > 1.0
        || model.router.input_dropout.at(progress) > 0.5
}

/// Returns remedies for routers that hardly decide.
fn more_decided(run: &RunFigures) -> Vec<Remedy> {
    let (make, progress) = (Remedies::new(&run.settings), run.progress());
    let (train, model) = (&run.settings.train, &run.settings.model);
    let temperature = model.router.temperature.at(progress);
    let cooler = if temperature > 1.0 { "1.0".to_owned() } else { (temperature / 2.0).to_string() };
    let coef = train.balance_coef.at(progress);
    let expected = "a lower router_entropy: experts that differ between tokens";
    let remedies = [
        make.set("model.router.temperature", cooler, expected),
        (coef > 0.02 && train.balance != BalanceKind::None)
            .then(|| make.set("train.balance_coef", coef / 10.0, "routers that follow the text more than the balance"))
            .flatten(),
        (model.jitter.at(progress) > 0.05).then(|| make.set("model.jitter", "0.01", "less noise on choices")).flatten(),
        (model.router.noise_std.at(progress) > 0.1)
            .then(|| make.set("model.router.noise_std", "0.0", "no noise on choices"))
            .flatten(),
        (train.local_entropy_coef.range().1 == 0.0)
            .then(|| make.set("train.local_entropy_coef", "0.01", expected))
            .flatten(),
    ];
    remedies.into_iter().flatten().collect()
}

/// Finds choices that are dropped because experts are full.
pub(super) fn dropped(run: &RunFigures) -> Option<Finding> {
    let window = &run.window;
    if window.drop_rate.partial_cmp(&MOST_DROPPED) != Some(std::cmp::Ordering::Greater) {
        return None;
    }
    let by_drops = |a: &&LayerFigures, b: &&LayerFigures| a.drop_rate.total_cmp(&b.drop_rate);
    let worst = window.layers.iter().filter(|layer| layer.drop_rate.is_finite()).max_by(by_drops)?;
    let by_load = |a: &&LayerFigures, b: &&LayerFigures| a.load.max_over_mean().total_cmp(&b.load.max_over_mean());
    let busiest = window.layers.iter().max_by(by_load)?;
    let load = |of: &LayerFigures| Figure::new(of.named("max_over_mean"), of.load.max_over_mean(), Over::WindowLoad);
    let mut figures = vec![
        Figure::mean("moe/drop_rate", window.drop_rate),
        Figure::mean(worst.named("drop_rate"), worst.drop_rate),
        load(worst),
    ];
    if busiest.load.layer != worst.load.layer {
        figures.push(load(busiest));
    }
    Some(Finding {
        topic: Topic::DroppedTokens,
        summary: format!(
            "{:.1}% of all choices are dropped because their experts are full, {:.1}% in layer {}",
            100.0 * window.drop_rate,
            100.0 * worst.drop_rate,
            worst.load.layer
        ),
        at_stake: window.drop_rate,
        figures,
        remedies: more_room(run, busiest.load.max_over_mean().max(1.0)),
    })
}

/// Returns remedies for dropped choices, where the busiest expert has `busiest` times its even share.
fn more_room(run: &RunFigures, busiest: f64) -> Vec<Remedy> {
    let (make, model) = (Remedies::new(&run.settings), &run.settings.model);
    // A quarter above the load of the window, since single steps vary.
    let enough = (1.1 * busiest * 4.0).ceil() / 4.0;
    let is_limited = model.capacity_factor > 0.0;
    let has_room = is_limited && enough > f64::from(model.capacity_factor) && enough <= 2.5;
    let expected = format!("almost no drops at this load, whose busiest expert has {busiest:.2} times its even share");
    let rerouted = "full experts pass their tokens on to the next best one";
    let remedies = [
        has_room.then(|| make.set("model.capacity_factor", enough, expected)).flatten(),
        is_limited
            .then(|| make.set("model.capacity_factor", "0.0", "no drops at all; memory follows the load"))
            .flatten(),
        // Below 1 all experts together have too little room.
        (model.capacity_factor >= 1.0).then(|| make.set("model.router.overflow", "reroute", rerouted)).flatten(),
    ];
    let balance = if busiest > 1.5 { more_even(run) } else { Vec::new() };
    remedies.into_iter().flatten().chain(balance.into_iter().take(1)).collect()
}

/// Finds more experts a token than routers make use of, or than sparsity has a use for.
pub(super) fn top_k(run: &RunFigures) -> Option<Finding> {
    let Choices { num_experts, top_k } = run.choices()?;
    let model = &run.settings.model;
    if model.router.fixed_top_k().is_some() || top_k < 2 || run.window.last_step < LEAST_STEPS {
        return None;
    }
    let entropies: Vec<f64> = run.window.layers.iter().map(|layer| layer.router_entropy).collect();
    let entropy = entropies.iter().sum::<f64>() / entropies.len() as f64;
    let effective = entropy.exp();
    let fewer = if effective < 0.5 * top_k as f64 {
        effective.ceil().max(1.0) as usize
    } else if 2 * top_k > num_experts && num_experts >= 4 {
        num_experts / 4
    } else {
        return None;
    };
    let saved = expert_share(&run.settings)? * (1.0 - fewer as f64 / top_k as f64);
    let expected = format!("about {:.0}% fewer operations a token", 100.0 * saved);
    Some(Finding {
        topic: Topic::TopK,
        summary: format!(
            "{top_k} of {num_experts} experts compute for each token, and a token's probabilities are as spread as over \
             {effective:.1} experts"
        ),
        at_stake: saved,
        figures: vec![
            Figure::mean("router_entropy, mean of the layers", entropy),
            Figure::new("model.top_k", top_k as f64, Over::Computed),
            Figure::new("experts", num_experts as f64, Over::Computed),
        ],
        remedies: Remedies::new(&run.settings).set("model.top_k", fewer, expected).into_iter().collect(),
    })
}

/// Returns the share of routed experts in a model's operations.
fn expert_share(settings: &RunConfig) -> Option<f64> {
    let train = &settings.train;
    let kept = Kept { precision: train.precision, checkpoint_layers: train.checkpoint_layers };
    let shape = shape(&settings.model, &settings.weight_table().ok()?, train.seq_len, kept);
    Some(shape.expert_flops() / (shape.dense_flops + shape.expert_flops()))
}
