//! The text that is always at hand: sources and documents of the checkout that the program stands in.

use std::path::{Path, PathBuf};

/// Extensions of what people write; not of what programs write, such as lock files and data.
const EXTENSIONS: [&str; 34] = [
    "adoc", "bash", "c", "cc", "cfg", "cpp", "cu", "cuh", "css", "go", "h", "hpp", "html", "ini", "java", "jl", "js",
    "lua", "md", "proto", "py", "rb", "rs", "rst", "scala", "sh", "sql", "swift", "tex", "toml", "ts", "txt", "yaml",
    "yml",
];

/// Whether a file of the checkout is text to train on, by its name.
pub(super) fn is_document(path: &Path) -> bool {
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|extension| EXTENSIONS.contains(&extension))
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
