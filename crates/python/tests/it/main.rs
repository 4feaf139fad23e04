//! Tests of the Python package: each file of tests in a process of its own, on the extension module that Cargo built.
//!
//! Tests that need PyTorch and transformers take `MOEWORKS_PYTHON`, or `.venv-test/bin/python` in the workspace's
//! root, which `./test` makes; the others take that or any Python from 3.11 on. Without one a test says that it is
//! skipped.

mod wheel;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The package's folder.
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Returns a Python that can run `code`.
fn python(code: &str) -> Option<PathBuf> {
    let usual = Path::new(HERE).join("../../.venv-test/bin/python");
    let candidates = [env::var_os("MOEWORKS_PYTHON").map(PathBuf::from), Some(usual), Some("python3".into())];
    candidates
        .into_iter()
        .flatten()
        .find(|python| Command::new(python).args(["-c", code]).output().is_ok_and(|output| output.status.success()))
}

/// Makes the package as a wheel has it: the Python files and the extension module beside them.
fn package() -> PathBuf {
    let programs = env::current_exe().expect("a path");
    let library = programs.with_file_name("lib_native.so");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    let module = folder.join("moeworks");
    copy_sources(&Path::new(HERE).join("python/moeworks"), &module);
    replace(&library, &module.join("_native.abi3.so"));
    folder
}

/// Copies the files of Python in a folder, and those in the folders below.
fn copy_sources(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("the package") {
        let path = entry.expect("a file").path();
        let copy = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_sources(&path, &copy);
        } else if path.extension().is_some_and(|extension| ["py", "pyi", "typed"].iter().any(|name| extension == *name))
        {
            replace(&path, &copy);
        }
    }
}

/// Puts a copy of a file in a place where another test may be reading.
fn replace(from: &Path, to: &Path) {
    let is_new = |to: &Path| Some(fs::metadata(to).ok()?.modified().ok()? >= fs::metadata(from).ok()?.modified().ok()?);
    if is_new(to) == Some(true) {
        return;
    }
    let written = to.with_extension(format!("{:?}", std::thread::current().id()));
    fs::copy(from, &written).expect("a copy");
    fs::rename(&written, to).expect("in its place");
}

/// Runs a file of tests with a Python that has `modules`.
fn run(file: &str, modules: &str) {
    let code = format!("import sys{modules}; assert sys.version_info >= (3, 11)");
    let Some(python) = python(&code) else {
        println!("SKIPPED: {file} needs Python 3.11 or newer{modules}; ./test makes an environment");
        return;
    };
    // Threads of PyTorch that wait busily take the cores from tests beside them.
    let output = Command::new(python)
        .arg(Path::new(HERE).join("tests/run.py"))
        .arg(file)
        .env("PYTHONPATH", package())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .expect("Python starts");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
    println!("{text}");
}

#[test]
fn models_load_generate_evaluate_convert_and_train_without_pytorch() {
    run("test_models.py", "");
}

#[test]
fn operators_match_loops_in_pytorch() {
    run("test_ops.py", ", torch");
}

#[test]
fn operators_live_with_the_threads_of_pytorch_and_python() {
    run("test_threads.py", ", torch");
}

#[test]
fn layers_match_the_blocks_of_model_families() {
    run("test_nn.py", ", torch");
}

#[test]
fn routing_schemes_match_plain_code() {
    run("test_routers.py", ", torch, numpy");
}

#[test]
fn examples_and_recipes_run() {
    run("test_examples.py", ", torch");
}

#[test]
fn every_class_of_experts_in_transformers_matches_its_eager_code() {
    run("test_transformers.py", ", torch, transformers");
}

#[test]
fn adapters_of_peft_are_computed_from_their_factors() {
    run("test_peft.py", ", torch, transformers, peft");
}

#[test]
fn scripts_and_layers_for_tutel_run() {
    run("test_tutel.py", ", torch");
}

#[test]
fn losses_match_those_that_tutel_recorded() {
    run("test_tutel_golden.py", ", torch");
}
