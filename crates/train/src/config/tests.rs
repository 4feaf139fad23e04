use std::ops::Bound;

use moeworks_moe::{Ramp, Range, RouterKind, ScoreOrder};
use moeworks_plan::RankOrder;

use super::*;

/// Returns the number of a table's value, if it is one.
fn number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64))
}

#[test]
fn every_setting_has_one_row_with_a_comment_and_a_range_where_it_is_a_number() {
    let defaults = print::to_table(&RunConfig::default());
    let rows = setting_rows();
    let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    let mut printed = print::names(&defaults);
    names.sort_unstable();
    printed.sort();
    assert_eq!(names, printed);
    for row in rows.iter().filter(|row| !row.is_section) {
        assert!(row.comment.len() > 5, "{}: has no comment", row.name);
        let value =
            row.name.split('.').try_fold(&toml::Value::Table(defaults.clone()), |value, key| value.get(key)).cloned();
        let is_number = value.as_ref().is_some_and(|value| number(value).is_some());
        assert_eq!(row.range != Range::Any, is_number, "{}: {:?} with the range {:?}", row.name, value, row.range);
    }
}

/// Returns values at each bound of a range and next to it, as TOML, and whether the range contains them.
fn tries(range: Range) -> Vec<(String, bool)> {
    let mut tries = Vec::new();
    match range {
        Range::Any => {}
        Range::Whole { least, most } => {
            tries.push((least.to_string(), true));
            tries.push((most.to_string(), true));
            tries.extend(least.checked_sub(1).map(|below| (below.to_string(), false)));
            let above = most.checked_add(1).filter(|above| i64::try_from(*above).is_ok());
            tries.extend(above.map(|above| (above.to_string(), false)));
        }
        Range::Number { low, high } => {
            for (bound, inside) in [(low, 1.0), (high, -1.0)] {
                let (Bound::Included(at) | Bound::Excluded(at)) = bound else { continue };
                // Small enough to be near, but large enough to differ in an f32.
                let step = inside * 1e-6 * at.abs().max(1.0);
                let is_included = bound == Bound::Included(at);
                let beside = if is_included { at - step } else { at + step };
                tries.extend([(format!("{at:?}"), is_included), (format!("{beside:?}"), !is_included)]);
            }
        }
    }
    tries
}

#[test]
fn every_bound_of_every_setting_is_held_from_both_sides() {
    let mut num_tries = 0;
    for row in setting_rows() {
        for (value, is_in) in tries(row.range) {
            num_tries += 1;
            let given = format!("{}={value}", row.name);
            let layers = ConfigLayers { overrides: vec![Override::parse(&given).unwrap()], ..ConfigLayers::default() };
            let expected = format!("must be {}", row.range);
            match layers.resolve() {
                // A value in its range may still conflict with other settings.
                Ok(_) => assert!(is_in, "{given} is accepted, but it {expected}"),
                Err(ConfigError::Value { setting, value: shown, expected: said, .. })
                    if setting == row.name && said == expected =>
                {
                    assert!(!is_in, "{given} is refused: {said}");
                    let [shown, value]: [f64; 2] = [&shown, &value].map(|text| text.parse().unwrap());
                    assert!((shown - value).abs() <= 1e-6 * value.abs(), "{given} is shown as {shown}");
                }
                Err(error) => assert!(is_in, "{given}: {error}, but it {expected}"),
            }
        }
    }
    assert!(num_tries > 150, "{num_tries} values were tried");
}

#[test]
fn settings_of_before_are_read_by_their_old_names() {
    let resolve = |overrides: &[&str]| {
        let overrides = overrides.iter().map(|text| Override::parse(text).unwrap()).collect();
        ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().unwrap()
    };
    let config = resolve(&["model.softmax_before_topk=false", "parallel.apart=true"]);
    assert_eq!(config.model.score_order, ScoreOrder::TopKThenSoftmax);
    assert_eq!(config.parallel.rank_order, RankOrder::DpInner);
    assert_eq!(config, resolve(&["model.score_order=top_k_then_softmax", "parallel.rank_order=dp_inner"]));
    let text = "[model]\nsoftmax_before_topk = false\n[parallel]\napart = true\n";
    assert_eq!(toml::from_str::<RunConfig>(text).unwrap(), config);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("old.toml");
    std::fs::write(&file, text).unwrap();
    assert_eq!(ConfigLayers { file: Some(file), ..ConfigLayers::default() }.resolve().unwrap(), config);
    for (name, old) in setting_rows().iter().filter_map(|row| Some((&row.name, row.old_name.as_ref()?))) {
        assert!(print::names(&print::to_table(&config)).contains(name), "{old} is {name}");
    }
}

#[test]
fn separate_documents_are_refused_where_a_sequence_is_looked_at_as_a_whole() {
    let mut config = RunConfig::default();
    config.data.separate_documents = true;
    config.validate().unwrap();
    config.train.sequence_coef = Ramp::constant(0.01);
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("data.separate_documents = true: must be false with train.sequence_coef"), "{error}");
}

#[test]
fn the_table_of_schemes_says_the_defaults_of_their_settings_and_knows_those_that_come_with_them() {
    let table = print::to_table(&RunConfig::default());
    let router = table["model"]["router"].as_table().unwrap();
    let names = print::names(&table);
    for doc in RouterKind::ALL.iter().map(|kind| kind.doc()) {
        for setting in doc.settings {
            assert_eq!(setting.default.parse::<toml::Value>().unwrap(), router[setting.name], "{}", setting.name);
        }
        for (setting, value) in doc.companions {
            assert!(names.iter().any(|name| name == setting), "{setting}");
            value.parse::<toml::Value>().unwrap();
        }
    }
}

#[test]
fn a_setting_of_no_scheme_is_refused_in_a_file_that_a_run_keeps() {
    let error = toml::from_str::<RunConfig>("[model.router]\ncosine_dims = 3\n").unwrap_err();
    assert!(error.message().contains("unknown field `cosine_dims`"), "{error}");
}

#[test]
fn every_preset_is_valid_and_prints_what_it_reads() {
    for (name, _) in PRESETS {
        let config = ConfigLayers { preset: Some(name.into()), ..ConfigLayers::default() }.resolve().unwrap();
        assert_eq!(toml::from_str::<RunConfig>(&print_config(&config)).unwrap(), config, "{name}");
    }
}
