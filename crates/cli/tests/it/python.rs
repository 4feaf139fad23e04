//! The Python environments that `./test` makes, for tests with programs of others.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Finds the interpreter `.venv-test/bin/python`, or the one that `MOEWORKS_PYTHON` names, if it has these modules.
/// Otherwise prints that `what` is skipped.
pub(crate) fn python_with(modules: &str, what: &str) -> Option<PathBuf> {
    let usual = || in_root(".venv-test/bin/python");
    let path = std::env::var_os("MOEWORKS_PYTHON").map_or_else(usual, PathBuf::from);
    has_modules(path, modules, what)
}

/// Finds the interpreter in `.venv-lmeval`, which `./test full` makes, or the one that `MOEWORKS_LMEVAL_PYTHON`
/// names. Without `MOEWORKS_FULL` nobody asks for it.
pub(crate) fn python_with_lm_eval() -> Option<PathBuf> {
    let named = std::env::var_os("MOEWORKS_LMEVAL_PYTHON").map(PathBuf::from);
    let is_wanted = named.is_some() || is_full();
    let path = named.unwrap_or_else(|| in_root(".venv-lmeval/bin/python"));
    if is_wanted { has_modules(path, "lm_eval", "lm-evaluation-harness") } else { None }
}

/// Returns whether tests take as long as they need for all that they promise (`./test full`).
pub(crate) fn is_full() -> bool {
    std::env::var_os("MOEWORKS_FULL").is_some()
}

fn in_root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Not by `eprintln!`, which the test harness keeps to itself when a test passes.
fn has_modules(path: PathBuf, modules: &str, what: &str) -> Option<PathBuf> {
    let found = Command::new(&path).args(["-c", &format!("import {modules}")]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(path);
    }
    let _ = writeln!(std::io::stderr(), "SKIPPED: {what}: {} lacks {modules}", path.display());
    None
}
