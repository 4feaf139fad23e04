use serde_json::Value;

use super::Buckets;

/// `_relative_position_bucket` of transformers 5.23, near and far, at T5's sizes and others.
#[test]
fn distances_fall_in_the_ranges_that_they_do_in_transformers() {
    let expected: Value = serde_json::from_str(include_str!("../../tests/fixtures/switch/expected.json")).unwrap();
    let distances: Vec<isize> = serde_json::from_value(expected["distances"].clone()).unwrap();
    let cases = expected["buckets"].as_object().unwrap();
    assert_eq!(cases.len(), 6);
    for (case, wanted) in cases {
        let words: Vec<&str> = case.split(' ').collect();
        let [count, max_distance] = [0, 1].map(|i| words[i].parse().unwrap());
        let buckets = Buckets { count, max_distance, is_causal: words[2] == "causal" };
        let found: Vec<usize> = distances.iter().map(|&distance| buckets.bucket(distance)).collect();
        assert_eq!(serde_json::to_value(found).unwrap(), *wanted, "{case}");
    }
}
