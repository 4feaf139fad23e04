use super::*;

#[test]
fn a_weight_stands_behind_the_last_equals_sign_of_what_does_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for name in ["a=1", "b"] {
        std::fs::write(folder.path().join(name), "x").unwrap();
    }
    for (name, expected_path, weight) in [
        ("a=1", "a=1", None),
        ("a=1=0.5", "a=1", Some(0.5)),
        ("b=2", "b", Some(2.0)),
        ("b", "b", None),
        ("nowhere", "nowhere", None),
        ("*.txt=1e-3", "*.txt", Some(1e-3)),
        ("year=2020/x", "year=2020/x", None),
    ] {
        let given = path(name);
        let entry = WeightedPath::parse(&given).unwrap();
        assert_eq!((entry.path, entry.weight), (&*path(expected_path), weight), "{name}");
    }
    assert_eq!(WeightedPath::parse("-").unwrap().weight, None);
    assert_eq!(WeightedPath::parse("-=0.25").unwrap().weight, Some(0.25));
    assert!(has_weight("x=0.5") && has_weight("-=x") && !has_weight("-") && !has_weight("=0.5"));
}
