//! A crate uses only crates on lower floors (ARCHITECTURE.md).

use std::process::Command;

/// The floors of the house, from the ground. Crates of one floor do not use each other.
const FLOORS: [&[&str]; 10] = [
    &["moeworks-plan", "moeworks-tensor"],
    &["moeworks-gpu"],
    &["moeworks-ops"],
    &["moeworks-comm"],
    &["moeworks-moe"],
    &["moeworks-model"],
    &["moeworks-infer"],
    &["moeworks-train", "moeworks-serve"],
    &["moeworks-bench"],
    &["moeworks"],
];

fn floor(name: &str) -> Option<usize> {
    FLOORS.iter().position(|crates| crates.contains(&name))
}

#[test]
fn crates_use_only_crates_on_lower_floors() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() >= 9, "the workspace has its crates");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let own = floor(name).unwrap_or_else(|| panic!("{name} stands on no floor: add it to FLOORS"));
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let used = dependency["name"].as_str().expect("a name");
            if let Some(below) = floor(used) {
                assert!(below < own, "{name} (floor {own}) must not use {used} (floor {below})");
            }
        }
    }
}
