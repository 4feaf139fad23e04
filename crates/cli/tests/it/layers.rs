//! The order of crates: each uses only crates of lower layers (ARCHITECTURE.md).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The layers of crates, lowest first. Crates of the same layer do not use each other.
const FLOORS: [&[&str]; 11] = [
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
    &["moeworks-python"],
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

/// The files besides the program's own that may read environment variables: for MPI libraries, and for the devices of
/// tests.
const READERS: [&str; 4] = ["comm/src/mpi/", "gpu/src/testing.rs", "cli/src/environment.rs", "cli/build.rs"];

/// Collects all Rust files under `dir`.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn environment_variables_are_read_at_the_door_alone() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of all crates");
    let mut files = Vec::new();
    for entry in fs::read_dir(crates).expect("a folder") {
        let dir = entry.expect("an entry").path();
        if dir.join("src").is_dir() {
            sources(&dir.join("src"), &mut files);
        }
    }
    assert!(files.len() > 300, "all sources are read");
    let reads = |file: &&PathBuf| {
        let text = fs::read_to_string(file).expect("text");
        ["env::var", "var_os(", "env::vars", "from_env("].iter().any(|way| text.contains(way))
    };
    let name = |file: &PathBuf| file.strip_prefix(crates).expect("in the folder").display().to_string();
    let readers: Vec<String> =
        files.iter().filter(reads).map(name).filter(|name| !name.ends_with("tests.rs")).collect();
    let others: Vec<&String> =
        readers.iter().filter(|name| !READERS.iter().any(|reader| name.starts_with(reader))).collect();
    assert!(others.is_empty(), "read in crates/cli/src/environment.rs and handed on: {others:?}");
    assert!(readers.iter().any(|name| name == "cli/src/environment.rs"), "the door is found");
}
