//! Training runs as processes of `mpirun` in which one rank is killed, hangs, or differs from the others.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::program::{Workplace, assert_success, losses, stderr};
use crate::ranks::{CONSTANT, launchers, process_command};

/// Layouts on three ranks: experts on each, or all weights in slices that are gathered layer by layer (ZeRO 3).
const LAYOUTS: [&[&str]; 2] = [&["--ep", "3"], &["--dp", "3", "--set", "parallel.zero=3"]];
/// The time limit for the other ranks to end: twice the documented one, because a testing machine may be busy.
const PROMPTLY: Duration = Duration::from_secs(60);
/// The time limit for a run to make its first steps on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `found` returns a value; `what` names it in the error.
pub(crate) fn wait_for<T>(patience: Duration, what: &str, found: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < patience, "no {what} for {patience:?}");
        sleep(Duration::from_millis(50));
    }
}

/// Lists every launcher with every layout.
fn cases() -> impl Iterator<Item = ((PathBuf, bool), &'static [&'static str])> {
    launchers().into_iter().flat_map(|launcher| LAYOUTS.map(|layout| (launcher.clone(), layout)))
}

/// Finds the process of rank `rank` of the run in `folder`.
pub(crate) fn process_of(folder: &Path, rank: usize) -> Option<u32> {
    let folder = folder.canonicalize().ok()?;
    let names = [format!("OMPI_COMM_WORLD_RANK={rank}"), format!("PMI_RANK={rank}")];
    let is_it = |pid: &u32| {
        let of_process = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let environment = of_process("environ");
        fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == folder)
            && environment.split(|byte| *byte == 0).any(|entry| names.iter().any(|name| entry == name.as_bytes()))
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it)
}

/// A launcher process, which is killed at the end of the test.
pub(crate) struct Run(Child);

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a run of three ranks with the given layout and waits for its first checkpoint. The run has more steps than
/// any test waits for.
pub(crate) fn under_way(work: &Workplace, mpirun: &Path, layout: &[&str]) -> Run {
    let settings = [&CONSTANT[..], &["--set", "train.threads=1"], layout].concat();
    let mut command = process_command(mpirun, 3, &work.train_command("run", 1_000_000, &settings));
    let log = fs::File::create(work.path("stderr.txt")).expect("a file");
    // MPICH's launcher reports how a process ended on standard output.
    let both = log.try_clone().expect("the same file");
    let child = command.stdout(both).stderr(log).spawn().expect("mpirun starts");
    let run = Run(child);
    // Any checkpoint will do: a fast run may remove its first one before it is seen.
    let is_checkpoint = |entry: fs::DirEntry| entry.file_name().to_string_lossy().starts_with("step-").then_some(());
    let checkpoint = || fs::read_dir(work.path("run/checkpoints")).ok()?.flatten().find_map(is_checkpoint);
    wait_for(PATIENCE, "checkpoint", checkpoint);
    run
}

pub(crate) fn signal(name: &str, pid: u32) {
    signal_all(name, &[pid]);
}

/// Sends a signal to several processes at once: the end of one may end the others.
pub(crate) fn signal_all(name: &str, pids: &[u32]) {
    let args = pids.iter().map(u32::to_string);
    let sent = Command::new("kill").arg(name).args(args).status().expect("kill runs");
    assert!(sent.success(), "{name} for processes {pids:?}");
}

/// Sends a signal to rank 2 and returns the run's output until its end, which must come within [`PROMPTLY`].
pub(crate) fn end_by(work: &Workplace, mut run: Run, name: &str) -> String {
    let pid = wait_for(PATIENCE, "process of rank 2", || process_of(&work.path(""), 2));
    signal(name, pid);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = run.0.try_wait().expect("mpirun is our child") {
            break status;
        }
        assert!(start.elapsed() < PROMPTLY, "the others still run after {PROMPTLY:?}");
        sleep(Duration::from_millis(50));
    };
    assert!(!status.success(), "a run that lost a rank has failed");
    fs::read_to_string(work.path("stderr.txt")).expect("what it said")
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_in_a_step_is_named_and_nothing_is_lost() {
    for ((mpirun, _), layout) in cases() {
        let work = Workplace::new();
        let said = end_by(&work, under_way(&work, &mpirun, layout), "-KILL");
        assert!(said.contains("rank 2"), "{said}");
        // The run resumes from its last checkpoint.
        let (last, _) = losses(&work.path("run")).pop().expect("steps");
        let steps = (last + 4).to_string();
        let on_one = ["--ep", "1", "--dp", "1", "--set", "parallel.zero=0", "--set", "train.threads=2"];
        let resumed = work.run(&[&["train", "--resume", "run", "--steps", &steps][..], &on_one].concat());
        assert_success(&resumed);
        assert_success(&work.train("whole", last + 4, &CONSTANT));
        let (run, whole) = (losses(&work.path("run")), losses(&work.path("whole")));
        assert_eq!(run.len(), whole.len(), "every step once");
        for ((step, loss), (_, expected)) in run.iter().zip(&whole) {
            let (loss, expected): (f64, f64) = (loss.parse().unwrap(), expected.parse().unwrap());
            assert!((loss - expected).abs() <= 1e-4 * expected, "step {step}: {loss}, not {expected}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_hangs_in_a_step_is_named_by_the_watchdog() {
    for ((mpirun, _), layout) in cases() {
        let work = Workplace::new();
        let run = under_way(&work, &mpirun, &[layout, &["--set", "parallel.timeout_s=4"]].concat());
        let said = end_by(&work, run, "-STOP");
        assert!(said.contains("rank 2 hung: nothing from it for"), "{said}");
    }
}

#[test]
fn what_all_ranks_were_given_wrong_is_said_once() {
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        for (wrong, line) in [
            (&["--set", "train.lr=fast"][..], "train.lr = \"fast\": must be a number"),
            (&["--fast"], "unexpected argument '--fast' found"),
            (&["--config", "none.toml"], "none.toml: the configuration cannot be read"),
        ] {
            let output =
                process_command(&mpirun, 3, &work.train_command("run", 1, wrong)).output().expect("mpirun starts");
            let said = stderr(&output);
            assert!(!output.status.success(), "{said}");
            let lines: Vec<&str> = said.lines().filter(|said| said.starts_with("error: ")).collect();
            assert!(matches!(lines[..], [one] if one.contains(line)), "{line} in {said}");
            assert!(!work.path("run").exists(), "nothing is begun");
        }
    }
}

#[test]
fn processes_that_are_not_like_rank_0_are_refused_at_the_start() {
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        let like_rank_0 = work.train_command("run", 2, &["--ep", "2", "--set", "train.threads=1"]);
        // Rank 1 gets another configuration, and then another program: one more byte at its end.
        let program = Path::new(env!("CARGO_BIN_EXE_moeworks"));
        let other_program = work.path("moeworks");
        let mut bytes = fs::read(program).expect("the program");
        bytes.push(0);
        fs::write(&other_program, bytes).expect("written");
        make_executable(&other_program);
        let other_settings =
            work.train_command("run", 2, &["--ep", "2", "--set", "train.threads=1", "--set", "train.lr=1"]);
        for (program, arguments, what) in
            [(program, &other_settings, "configuration"), (&*other_program, &like_rank_0, "program")]
        {
            let mut command = process_command(&mpirun, 1, &like_rank_0);
            command.args([":", "-n", "1"]).arg(program).args(arguments.get_args());
            let output = command.output().expect("mpirun runs");
            assert!(!output.status.success());
            let said = stderr(&output);
            assert!(said.contains(&format!("rank 1 has another {what} than rank 0")), "{said}");
            assert!(!work.path("run").exists(), "nothing was begun");
        }
    }
}

/// Makes a file executable.
fn make_executable(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its owner may");
    }
}
