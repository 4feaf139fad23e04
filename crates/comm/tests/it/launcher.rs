//! MPI launchers, which start ranks as processes: those in `.venv-mpi/*` at the root of the checkout, where `./test`
//! puts them, and the one on the path. A launcher starts the test program that asks for it again, with the one
//! ignored test that plays a rank. The tests of other crates that run on hosts use this file too.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use moeworks_comm::mpi::LIBRARY_VARIABLE;

/// The variable that names the case a rank plays.
pub(crate) const CASE: &str = "MOEWORKS_TEST_CASE";

/// The variable with a file for reports: once a process is killed, MPICH's launcher drops the output of the others.
pub(crate) const LOG: &str = "MOEWORKS_TEST_LOG";

/// A launcher with the library that its processes load.
#[derive(Clone)]
pub(crate) struct Launcher {
    /// The command line before the launcher's name.
    pub(crate) before: Vec<String>,
    pub(crate) program: PathBuf,
    pub(crate) library: Option<PathBuf>,
    pub(crate) is_open_mpi: bool,
    pub(crate) flags: Vec<String>,
    /// The first folder of the path, if not that of the program.
    pub(crate) first_on_path: Option<PathBuf>,
    /// The test that plays a rank.
    pub(crate) player: &'static str,
}

/// The variable with which tests take every MPI library, as `./test full` does.
const FULL: &str = "MOEWORKS_FULL";

/// Returns a launcher for the ignored test `player`: Open MPI's if there is one, or another. With `MOEWORKS_FULL` it
/// returns [all](all_launchers).
pub(crate) fn launchers(player: &'static str) -> Vec<Launcher> {
    let all = all_launchers(player);
    if env::var_os(FULL).is_some() {
        return all;
    }
    let one = all.iter().find(|launcher| launcher.is_open_mpi).or(all.first()).cloned();
    one.into_iter().collect()
}

/// Returns all launchers that exist, for the ignored test `player`.
pub(crate) fn all_launchers(player: &'static str) -> Vec<Launcher> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let kept = fs::read_dir(root.join(".venv-mpi")).into_iter().flatten().flatten();
    let mut programs: Vec<PathBuf> = kept.map(|entry| entry.path().join("bin/mpirun")).filter(|p| p.exists()).collect();
    programs.sort();
    let path = env::var_os("PATH").unwrap_or_default();
    programs.extend(env::split_paths(&path).map(|folder| folder.join("mpirun")).find(|program| program.exists()));
    let launchers: Vec<Launcher> = programs.into_iter().flat_map(|program| with_libraries(program, player)).collect();
    if launchers.is_empty() {
        println!("SKIPPED: there is no mpirun, neither in .venv-mpi nor on the path");
    }
    launchers
}

fn with_libraries(program: PathBuf, player: &'static str) -> Vec<Launcher> {
    let version = Command::new(&program).arg("--version").output().expect("mpirun runs");
    let is_open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
    // As root; more ranks than cores.
    let flags: &[&str] =
        if is_open_mpi { &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] } else { &[] };
    let standard = program.with_file_name("../lib/libmpi_abi.so.1");
    let libraries = [None, Some(standard).filter(|path| path.exists())];
    let own = libraries.into_iter().enumerate().filter(|(index, library)| *index == 0 || library.is_some());
    let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
    let launcher = |library| Launcher {
        before: Vec::new(),
        program: program.clone(),
        library,
        is_open_mpi,
        flags: flags.clone(),
        first_on_path: None,
        player,
    };
    own.map(|(_, library)| launcher(library)).collect()
}

impl Launcher {
    pub(crate) fn run(&self, num_ranks: usize, case: &str, log: &Path) -> Output {
        let program = self.program.clone().into_os_string();
        let mut line = self.before.iter().map(OsString::from).chain([program]);
        let mut command = Command::new(line.next().expect("a program"));
        command.args(line).args(&self.flags);
        command.arg("-n").arg(num_ranks.to_string()).arg(env::current_exe().expect("this program has a path"));
        command.args([self.player, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        let folder = self.program.parent().expect("a program has a folder");
        let first = self.first_on_path.clone().unwrap_or_else(|| folder.to_path_buf());
        let others = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths(std::iter::once(first).chain(env::split_paths(&others)));
        command
            .env("PATH", path.expect("folders without colons"))
            .env(CASE, case)
            .env(LOG, log)
            .env("RUST_BACKTRACE", "0");
        if let Some(library) = &self.library {
            command.env(LIBRARY_VARIABLE, library);
        }
        command.output().expect("mpirun runs")
    }
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
