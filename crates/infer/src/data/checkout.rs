//! The text that is always at hand: sources and documents of the checkout that the program stands in.

use std::fs;
use std::path::{Path, PathBuf};

/// Extensions of what people write; not of what programs write, such as lock files and data.
const EXTENSIONS: [&str; 34] = [
    "adoc", "bash", "c", "cc", "cfg", "cpp", "cu", "cuh", "css", "go", "h", "hpp", "html", "ini", "java", "jl", "js",
    "lua", "md", "proto", "py", "rb", "rs", "rst", "scala", "sh", "sql", "swift", "tex", "toml", "ts", "txt", "yaml",
    "yml",
];

/// Lock files whose extension is that of something people write.
const LOCK_FILES: [&str; 2] = ["pnpm-lock.yaml", "pnpm-lock.yml"];

/// Larger files of a checkout are data or made by programs.
const MAX_BYTES: u64 = 1_000_000;

/// Whether a file of the checkout is text to train on, by its name and size.
pub(super) fn is_document(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    EXTENSIONS.contains(&extension)
        && !LOCK_FILES.contains(&name)
        && fs::metadata(path).is_ok_and(|metadata| metadata.len() <= MAX_BYTES)
}

/// The checkout that `start` is in: the nearest folder above with a `.git`, else the farthest with a `Cargo.toml`.
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
