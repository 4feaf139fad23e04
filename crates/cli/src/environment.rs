//! The environment variables that the commands read, all in one place. The other crates get their values as
//! arguments.
//!
//! MPI libraries read their own variables (`crates/comm`).

use std::env;
use std::path::PathBuf;

use moeworks_ops::MachineOptions;

/// The variables with the number of processes that a launcher started: Open MPI's, Hydra's (MPICH) and Slurm's.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"];

/// The types of terminals without escape codes, in which Ctrl-C is a signal and not a key.
const PLAIN_TERMINALS: [&str; 3] = ["dumb", "cons25", "emacs"];

/// Returns the options of the machine: libraries of GPUs, the folder of compiled kernels, and parts that are
/// left out or asked for.
pub(crate) fn machine() -> MachineOptions {
    MachineOptions::from_variables(|name| env::var_os(name))
}

/// Returns the value of a variable, or `None` if it is not set.
pub(crate) fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Returns the type of the terminal, `TERM`; empty if it is not set.
pub(crate) fn terminal() -> String {
    variable("TERM").unwrap_or_default()
}

/// Returns whether the terminal can pass single keys to a line editor.
pub(crate) fn terminal_gives_keys() -> bool {
    variable("TERM").is_some_and(|kind| !PLAIN_TERMINALS.contains(&kind.as_str()))
}

/// Returns the filter of the log, `RUST_LOG`.
pub(crate) fn log_filter() -> Option<String> {
    env::var("RUST_LOG").ok()
}

/// Returns whether a launcher reports that it started only one process.
pub(crate) fn is_launched_alone() -> bool {
    SIZES.iter().any(|name| env::var(name).is_ok_and(|size| size == "1"))
}

/// Returns the folders of `PATH`, in which programs are searched.
pub(crate) fn program_folders() -> Vec<PathBuf> {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect()
}

/// Returns the user's cache folder: `moeworks` in `$XDG_CACHE_HOME`, or in `~/.cache`.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    user_folder("XDG_CACHE_HOME", ".cache")
}

/// Returns the user's folder for state kept between calls: `moeworks` in `$XDG_STATE_HOME`, or in `~/.local/state`.
pub(crate) fn state_folder() -> Option<PathBuf> {
    user_folder("XDG_STATE_HOME", ".local/state")
}

/// Returns the folder `moeworks` in the folder that the variable `name` gives, or in the user's folder `usual`.
/// Relative paths are ignored, as the XDG base directory specification requires.
fn user_folder(name: &str, usual: &str) -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = absolute(name).or_else(|| Some(absolute("HOME")?.join(usual)))?;
    Some(folder.join("moeworks"))
}
