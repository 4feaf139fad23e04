//! Text that is always available: sources and documents of the checkout that contains the current folder.

use std::fs;
use std::path::{Path, PathBuf};

/// Extensions of files that people write, not of files that programs write, such as lock files and data.
const EXTENSIONS: [&str; 34] = [
    "adoc", "bash", "c", "cc", "cfg", "cpp", "cu", "cuh", "css", "go", "h", "hpp", "html", "ini", "java", "jl", "js",
    "lua", "md", "proto", "py", "rb", "rs", "rst", "scala", "sh", "sql", "swift", "tex", "toml", "ts", "txt", "yaml",
    "yml",
];

/// Lock files with an extension of files that people write.
const LOCK_FILES: [&str; 2] = ["pnpm-lock.yaml", "pnpm-lock.yml"];

/// The largest file that is read from a checkout; larger ones are data or made by programs.
const MAX_BYTES: u64 = 1_000_000;

/// Returns whether a file of the checkout is text to train on, by its name and size.
pub(super) fn is_document(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    EXTENSIONS.contains(&extension)
        && !LOCK_FILES.contains(&name)
        && fs::metadata(path).is_ok_and(|metadata| metadata.len() <= MAX_BYTES)
}

/// Returns the checkout that contains `start`: the nearest parent with a `.git`, otherwise the farthest with a
/// `Cargo.toml`.
pub(super) fn root(start: &Path) -> Option<PathBuf> {
    let mut cargo = None;
    for folder in start.ancestors() {
        if folder.join(".git").exists() {
            return Some(folder.into());
        }
        if folder.join("Cargo.toml").exists() {
            cargo = Some(folder.into());
        }
    }
    cargo
}
