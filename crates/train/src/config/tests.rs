use super::*;

#[test]
fn every_setting_has_a_comment_and_no_comment_is_left_over() {
    let mut names = print::names(&print::to_table(&RunConfig::default()));
    let mut comments: Vec<String> = print::COMMENTS.iter().map(|(name, _)| (*name).to_string()).collect();
    names.sort();
    comments.sort();
    assert_eq!(names, comments);
}

#[test]
fn every_preset_is_valid_and_prints_what_it_reads() {
    for (name, _) in PRESETS {
        let config = ConfigLayers { preset: Some(name.into()), ..ConfigLayers::default() }.resolve().unwrap();
        assert_eq!(toml::from_str::<RunConfig>(&print_config(&config)).unwrap(), config, "{name}");
    }
}
