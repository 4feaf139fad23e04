//! Tells the program which commit it is made of: by the files of the checkout, so that it needs no git. Without a
//! checkout it does not know.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=MOEWORKS_TARGET={}", env::var("TARGET").unwrap_or_default());
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../..");
    let commit = git_dir(&root).and_then(|git| {
        // The log changes with every commit. A file that is not there would ask for a rebuild each time.
        for file in [git.join("HEAD"), git.join("logs/HEAD")].iter().filter(|file| file.exists()) {
            println!("cargo:rerun-if-changed={}", file.display());
        }
        commit(&git)
    });
    let Some(commit) = commit else { return };
    let short = &commit[..7];
    let described = date(&root, &commit).map_or_else(|| format!(" ({short})"), |date| format!(" ({short} {date})"));
    println!("cargo:rustc-env=MOEWORKS_COMMIT={described}");
}

/// The folder of git of this very checkout; in a work tree `.git` is a file that names it.
fn git_dir(root: &Path) -> Option<PathBuf> {
    let git = root.join(".git");
    if git.is_dir() {
        return Some(git);
    }
    let text = fs::read_to_string(git).ok()?;
    Some(root.join(text.strip_prefix("gitdir:")?.trim()))
}

/// The commit that is checked out, as hexadecimal digits.
fn commit(git: &Path) -> Option<String> {
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let Some(name) = head.trim().strip_prefix("ref: ") else { return hash(&head) };
    // Work trees share references.
    let common = fs::read_to_string(git.join("commondir")).map_or(git.to_owned(), |common| git.join(common.trim()));
    let loose = fs::read_to_string(common.join(name)).ok();
    loose.and_then(|text| hash(&text)).or_else(|| {
        let packed = fs::read_to_string(common.join("packed-refs")).ok()?;
        packed.lines().find_map(|line| hash(line.strip_suffix(name)?.strip_suffix(' ')?))
    })
}

fn hash(text: &str) -> Option<String> {
    let text = text.trim();
    (text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_owned())
}

/// The day of the commit, if there is a git to ask: where it lies packed its file cannot be read otherwise.
fn date(root: &Path, commit: &str) -> Option<String> {
    let output = Command::new("git").args(["show", "-s", "--format=%cs", commit]).current_dir(root).output().ok()?;
    let date = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && date.len() == 10).then_some(date)
}
