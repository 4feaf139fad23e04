use moeworks_moe::RouterKind;

use super::*;

#[test]
fn every_setting_has_a_comment_and_no_comment_is_left_over() {
    let mut names = print::names(&print::to_table(&RunConfig::default()));
    let mut comments: Vec<String> = print::comments().into_iter().map(|(name, _)| name).collect();
    names.sort();
    comments.sort();
    assert_eq!(names, comments);
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
