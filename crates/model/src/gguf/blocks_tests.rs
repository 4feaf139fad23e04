use std::path::Path;

use serde_json::Value;

use super::*;

/// Blocks of every type, with the values that llama.cpp's `gguf` package decodes.
#[test]
fn blocks_of_every_type_hold_the_numbers_that_their_makers_find() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/blocks.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(cases.len(), TYPES.len());
    for case in cases {
        let name = case["type"].as_str().unwrap();
        let entry = TYPES.iter().find(|entry| entry.name == name).expect(name);
        let bytes: Vec<u8> = case["bytes"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u8).collect();
        let values: Vec<f32> = case["values"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        let mut found = vec![f32::NAN; values.len()];
        GgmlType(entry).decode(&bytes, &mut found);
        for (i, (a, b)) in found.iter().zip(&values).enumerate() {
            // A scale times an integer minus a least value, which may be rounded in another order.
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1.0), "{name}[{i}]: {a}, expected {b}");
        }
    }
}
