use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;

use super::*;
use crate::hf::families::FAMILIES;
use crate::hf::family::Family;
use crate::hf::keys::Keys;

/// The `config.json` of a family's fixture.
fn fixture(family: &Family) -> Map<String, Value> {
    let name = if family.model_type == "switch_transformers" { "switch" } else { family.model_type };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns the keys that the family's reader asks a file for.
fn asked(family: &Family, map: &Map<String, Value>) -> BTreeSet<String> {
    let keys = Keys::new(map);
    (family.read)(&keys).unwrap();
    keys.check(&family.keys).unwrap();
    keys.asked()
}

#[test]
fn the_keys_that_a_table_has_as_used_are_those_that_the_reader_asks_for() {
    for family in FAMILIES {
        let plain = fixture(family);
        let mut scaled = plain.clone();
        if family.keys.used().any(|key| key == "rope_parameters") {
            scaled.insert("rope_parameters".to_owned(), json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}));
        }
        let found: BTreeSet<String> = asked(family, &plain).union(&asked(family, &scaled)).cloned().collect();
        let listed: BTreeSet<String> = family.keys.used().map(str::to_owned).collect();
        assert_eq!(found, listed, "{}", family.model_type);
    }
}

#[test]
fn no_key_is_in_two_tables() {
    for family in FAMILIES {
        let KeyTable { harmless, refused, .. } = family.keys;
        for key in family.keys.used() {
            assert!(!HARMLESS.contains(&key) && !harmless.contains(&key), "{}: {key}", family.model_type);
            assert!(!refused.iter().any(|entry| entry.key == key), "{}: {key}", family.model_type);
        }
        for entry in family.keys.refused() {
            assert!(
                !HARMLESS.contains(&entry.key) && !is_bookkeeping(entry.key),
                "{}: {}",
                family.model_type,
                entry.key
            );
        }
    }
}

/// Lists every refused key, with a value that is refused and those that are accepted.
#[test]
fn refused_keys_are_refused_unless_they_are_off() {
    for family in FAMILIES {
        let map = fixture(family);
        let check = |key: &str, value: Value| {
            let mut map = map.clone();
            map.insert(key.to_owned(), value);
            family.keys.check(&map)
        };
        for entry in family.keys.refused() {
            let error = check(entry.key, json!(7.5)).unwrap_err();
            assert!(error.contains(entry.key) && error.contains("must be"), "{}: {error}", family.model_type);
            for off in entry.off.iter().copied().chain(["null"]) {
                let value: Value = serde_json::from_str(off).unwrap();
                assert!(check(entry.key, value).is_ok(), "{}: {} = {off}", family.model_type, entry.key);
            }
        }
        assert_eq!(check("some_new_scale", json!(2.0)).unwrap(), ["some_new_scale"], "{}", family.model_type);
        for key in ["_anything", "image_token_id", "use_cache", "auto_map", "unsloth_fixed"] {
            assert_eq!(check(key, json!("x")).unwrap(), Vec::<String>::new(), "{}: {key}", family.model_type);
        }
        assert_eq!(family.keys.check(&map).unwrap(), Vec::<String>::new(), "{}", family.model_type);
    }
}
