use moeworks_moe::RouterKind;

use super::*;
use crate::config::{ConfigLayers, Override, RunConfig};

fn base() -> RunConfig {
    let mut config = RunConfig::default();
    config.train.steps = 1000;
    config
}

fn study(only: &[&str]) -> Study {
    let only = only.iter().map(|&name| name.to_owned()).collect();
    Study { base: base(), runs_dir: "runs".into(), num_seeds: 1, only }
}

fn finding(name: &'static str, losses: &[f64], balance: Option<Balance>) -> Finding {
    let variant = Variant { name, what: format!("what {name} is"), config: base() };
    let curve = vec![(1e12, 3.0), (2e12, losses[0])];
    Finding {
        variant,
        parameters: (14_000_000, 5_000_000),
        flops: 2e12,
        val_losses: losses.to_vec(),
        curve,
        balance,
        seconds: 12.0,
    }
}

#[test]
fn every_variant_has_the_floating_point_operations_of_the_base() {
    let variants = study(&[]).variants().unwrap();
    let budget = step_flops(&base()) * 1000.0;
    for variant in &variants {
        let flops = step_flops(&variant.config) * variant.config.train.steps as f64;
        assert!((flops / budget - 1.0).abs() < 1e-3, "{}: {flops} of {budget}", variant.name);
    }
    let names: Vec<&str> = variants.iter().map(|variant| variant.name).collect();
    assert_eq!(names[..6], ["dense", "top-k", "top-1", "top-1-sigmoid", "shared", "fine"]);
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len());
}

#[test]
fn the_dense_model_has_the_active_size_of_the_base_and_the_others_at_most_a_few_more() {
    let variants = study(&[]).variants().unwrap();
    let size = |config: &RunConfig| {
        Parameters::new(&config.model)
            .parts
            .iter()
            .filter(|part| part.name != "routers")
            .map(|part| part.active)
            .sum::<u64>()
    };
    for variant in &variants {
        assert_eq!(size(&variant.config), size(&base()), "{}", variant.name);
    }
    assert_eq!(variants[0].config.model.num_experts, 0);
}

#[test]
fn a_variant_that_there_is_not_is_named() {
    let error = study(&["top-k", "top-7"]).variants().unwrap_err().to_string();
    assert!(error.contains("top-7") && error.contains("dense, top-k, top-1"), "{error}");
    let some = study(&["jitter", "dense"]).variants().unwrap();
    assert_eq!(some.iter().map(|variant| variant.name).collect::<Vec<_>>(), ["dense", "jitter"]);
}

#[test]
fn the_page_lists_the_best_first_and_compares_with_dense() {
    let balance = Balance {
        experts_per_token: 2.0,
        cv: 0.25,
        max_over_mean: 1.5,
        drop_rate: 0.02,
        reroute_rate: 0.0,
        specialization: 0.5,
    };
    let findings = [
        finding("dense", &[2.0, 2.25], None),
        finding("top-k", &[1.75, 1.85], Some(balance)),
        finding("worse", &[2.25, 2.5], Some(balance)),
    ];
    let page = report(&Study { num_seeds: 2, ..study(&[]) }, &findings, "plot.svg", "moeworks study");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert!(
        rows[0].starts_with("| top-k | 1.8000 ± 0.0500 | -0.3250 ± 0.0750 | 2 | 0.250 | 1.50 | 2% | 0% | 50% | 12 |"),
        "{}",
        rows[0]
    );
    assert!(rows[1].starts_with("| dense | 2.1250 ± 0.1250 |  | "), "{}", rows[1]);
    assert!(rows[2].starts_with("| worse | 2.3750 ± 0.1250 | +0.2500 ± 0.0000"), "{}", rows[2]);
    let cells = |row: &str| row.matches('|').count();
    assert!(rows.iter().all(|row| cells(row) == cells(rows[0])), "{page}");
    assert!(page.contains("![validation loss](plot.svg)") && page.contains("- `worse`: what worse is"));
}

#[test]
fn the_plot_has_a_line_and_a_dot_for_each_and_no_number_that_is_none() {
    let findings = [
        finding("dense", &[2.0], None),
        finding("a<b", &[1.5, 1.6], Some(Balance::default())),
        finding("lost", &[f64::NAN], Some(Balance::default())),
    ];
    let svg = plot(&findings);
    assert_eq!((svg.matches("<circle").count(), svg.matches("class=\"line").count()), (2, 2));
    assert!(svg.contains("a&lt;b") && !svg.contains("NaN") && !svg.contains("lost"));
    for some in [&findings[..1], &[]] {
        let svg = plot(some);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}

#[test]
fn every_kind_of_router_that_the_program_knows_is_in_the_study_and_every_scheme_is_possible_in_it() {
    let overrides = BASE.iter().map(|setting| Override::parse(setting).unwrap()).collect();
    let base = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().unwrap();
    let possible = variants::variants(&base, Path::new("dense"));
    for (name, variant) in &possible {
        assert!(variant.is_ok(), "{name}: {variant:?}");
    }
    for kind in RouterKind::ALL.iter().filter(|kind| !kind.doc().is_synthetic) {
        let mut variants = possible.iter().flat_map(|(_, variant)| variant);
        assert!(variants.any(|of| of.config.model.router.kind == *kind), "{kind:?}");
    }
}

#[test]
fn what_a_base_does_not_allow_is_left_out_or_refused_where_it_is_asked_for() {
    let mut odd = study(&[]);
    odd.base.model.num_experts = 6;
    let names: Vec<&str> = odd.variants().unwrap().iter().map(|variant| variant.name).collect();
    assert!(names.contains(&"top-k") && !names.contains(&"device-limited"), "{names:?}");
    odd.only = vec!["device-limited".to_owned()];
    assert!(odd.variants().unwrap_err().to_string().contains("num_groups"));
}

#[test]
fn balance_is_the_mean_over_runs_layers_and_the_last_tenth_of_the_steps() {
    let record = |step: u64| {
        let tokens_per_expert = if step == 20 { vec![30, 10] } else { vec![20, 20] };
        let layer =
            |layer| LayerRecord { layer, tokens_per_expert: tokens_per_expert.clone(), ..LayerRecord::default() };
        Record { step, layers: vec![layer(0), layer(2)], ..Record::default() }
    };
    let run: Vec<Record> = (1..=20).map(record).collect();
    // The last two of 20 steps: one is even, one is 3 to 1.
    let found = balance(&[run.clone(), run], 20).unwrap();
    assert_eq!((found.cv, found.max_over_mean, found.experts_per_token), (0.25, 1.25, 2.0));
    assert_eq!((found.drop_rate, found.specialization.is_nan()), (0.0, true));
    assert_eq!(balance(&[vec![Record::default()]], 20), None, "a dense model");
}
