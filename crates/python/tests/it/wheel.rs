//! The wheel: built by maturin, installed in an environment that has nothing else, and used there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use super::HERE;

/// The first steps of a user, without PyTorch and NumPy.
const SESSION: &str = r#"
import importlib.metadata, os, sys
import moeworks

assert moeworks.__version__ == importlib.metadata.version("moeworks"), moeworks.__version__
names = {str(file) for file in importlib.metadata.files("moeworks")}
assert {"moeworks/py.typed", "moeworks/_native.pyi", "moeworks/tutel/moe.py"} <= names, names
assert all(any(name.endswith(text) for name in names) for text in ("LICENSE-APACHE", "LICENSE-MIT")), names
assert "markdown" in importlib.metadata.metadata("moeworks")["Description-Content-Type"]
tiny = {
    "model": {"width": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "num_experts": 4,
              "top_k": 2, "expert_width": 32, "max_seq_len": 64},
    "train": {"steps": 2, "seq_len": 32, "batch_size": 2},
    "data.tokenizer": "bytes",
}
with open("text.txt", "w") as file:
    file.write("the quick brown fox. " * 200)
run = moeworks.train(tiny, data="text.txt", out="run")
model, tokenizer = moeworks.load(run.path)
assert isinstance(moeworks.generate(model, tokenizer, "the", max_tokens=3), str)
for module in ("ops", "nn", "routers", "transformers", "tutel"):
    try:
        __import__("moeworks." + module)
    except ImportError as error:
        assert "PyTorch 2.10" in str(error), error
    else:
        raise AssertionError(module)
print("used")
"#;

/// Runs a command and returns its output, unless it fails.
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = || [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert!(output.status.success(), "{command:?}: {}", text());
    output
}

/// Returns maturin: `MOEWORKS_MATURIN`, or that of the environment that `./test full` makes.
fn maturin() -> Option<PathBuf> {
    let usual = Path::new(HERE).join("../../.venv-maturin/bin/maturin");
    env::var_os("MOEWORKS_MATURIN").map(PathBuf::from).or_else(|| usual.exists().then_some(usual))
}

/// Builds the wheel in `folder`, with the profile of the tests.
fn build(maturin: &Path, folder: &Path) -> PathBuf {
    let programs = env::current_exe().expect("a path");
    let target = programs.ancestors().nth(3).expect("the target folder");
    let out = folder.join("wheels");
    let mut command = Command::new(maturin);
    command.args(["build", "--locked", "--profile", "dev", "--compatibility", "linux", "--target-dir"]).arg(target);
    command.arg("--out").arg(&out).arg("--manifest-path").arg(Path::new(HERE).join("Cargo.toml"));
    // The test was just built from the same dependencies.
    run(command.env("CARGO_NET_OFFLINE", "true"));
    let wheels: Vec<_> = fs::read_dir(&out).expect("wheels").map(|entry| entry.expect("a file").path()).collect();
    assert_eq!(wheels.len(), 1, "{wheels:?}");
    wheels[0].clone()
}

#[test]
fn the_wheel_works_in_a_bare_environment_and_has_the_program() {
    let Some(maturin) = maturin().filter(|_| env::var_os("MOEWORKS_FULL").is_some()) else {
        println!("SKIPPED: the wheel is built by ./test full, where maturin can be installed");
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wheel");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    let wheel = build(&maturin, &folder);
    let name = wheel.file_name().expect("a name").to_string_lossy().into_owned();
    assert!(name.contains("-cp311-abi3-linux_"), "{name}");
    let environment = folder.join("env");
    run(Command::new("python3").args(["-m", "venv"]).arg(&environment));
    let program = |name: &str| {
        let mut command = Command::new(environment.join("bin").join(name));
        command.env_remove("PYTHONPATH").current_dir(&folder);
        command
    };
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"];
    run(program("python").args(install).arg(&wheel));
    let used = run(program("python").args(["-c", SESSION]));
    assert!(String::from_utf8_lossy(&used.stdout).ends_with("used\n"), "{used:?}");
    let version = run(program("moeworks").arg("--version"));
    assert!(String::from_utf8_lossy(&version.stdout).contains(env!("CARGO_PKG_VERSION")), "{version:?}");
    run(program("moeworks").args(["generate", "run", "--prompt", "the", "--max-tokens", "2"]));
    let wrong = program("moeworks").args(["inspect", "nothing-there"]).output().expect("the program starts");
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
    fs::remove_dir_all(&folder).expect("nothing is left");
}
