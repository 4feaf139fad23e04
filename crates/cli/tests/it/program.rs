//! Runs the program as a user does, on a model so small that a step takes milliseconds.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{env, fs};

/// A temporary folder for one test, with a text to train on.
pub(crate) struct Workplace {
    dir: tempfile::TempDir,
}

/// The settings of the tiny model, for `--set`.
pub(crate) const TINY: [&str; 17] = [
    "model.width=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_dim=16",
    "model.num_experts=4",
    "model.expert_width=24",
    "model.max_seq_len=64",
    "train.seq_len=32",
    "train.batch_size=2",
    "train.warmup_steps=2",
    "train.eval_every=0",
    "train.eval_batches=2",
    "train.sample_every=0",
    "train.checkpoint_every=2",
    "train.precision=f32",
    "train.threads=2",
];

/// The variable with the folder of compiled kernels, shared by tests because compiling takes long.
const KERNEL_CACHE: &str = "MOEWORKS_KERNEL_CACHE";

fn kernel_cache() -> PathBuf {
    let folder = |variable: &str| env::var_os(variable).map(PathBuf::from);
    let of_user = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    let in_user = || Some(of_user()?.join("moeworks/kernels"));
    folder(KERNEL_CACHE).or_else(in_user).unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into())
}

impl Workplace {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let line = |i: usize| format!("Line {i} of a text that is easy to learn, number {}.\n", i * 7 % 100);
        fs::write(dir.path().join("text.txt"), (0..400).map(line).collect::<String>()).expect("written");
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file with `content` and returns its path as text.
    pub(crate) fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::write(&path, content).expect("written");
        path.display().to_string()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moeworks"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env(KERNEL_CACHE, kernel_cache())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the program starts")
    }

    /// Runs a line of `sh`, in which "$M" is the program.
    pub(crate) fn shell(&self, script: &str) -> Output {
        self.shell_of("sh", script)
    }

    /// Runs a line of another shell, in which "$M" is the program.
    pub(crate) fn shell_of(&self, shell: &str, script: &str) -> Output {
        let program = self.command(&[]);
        let mut shell = Command::new(shell);
        shell.args(["-c", script]).current_dir(self.dir.path()).env("M", program.get_program()).stdin(Stdio::null());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        shell.output().expect("a shell starts")
    }

    /// Builds the command that trains the tiny model on the text for `steps` steps into the folder `out`, with the
    /// arguments
    /// `more`.
    pub(crate) fn train_command(&self, out: &str, steps: u64, more: &[&str]) -> Command {
        let steps = format!("train.steps={steps}");
        let mut args = vec!["train", "--data", "text.txt", "--out", out, "--set", &steps];
        for setting in TINY {
            args.extend(["--set", setting]);
        }
        args.extend(more);
        self.command(&args)
    }

    pub(crate) fn train(&self, out: &str, steps: u64, more: &[&str]) -> Output {
        self.train_command(out, steps, more).output().expect("the program starts")
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn assert_success(output: &Output) {
    assert!(output.status.success(), "{:?}\n{}", output.status, stderr(output));
}

/// Reads the losses of a run by step, as written in its metrics.
pub(crate) fn losses(run: &Path) -> Vec<(u64, String)> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    text.lines()
        .map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).expect("a JSON line");
            (value["step"].as_u64().expect("a step"), value["train/loss"].to_string())
        })
        .collect()
}

/// Reads the machine-independent part of a run's records: the step and the figures of the MoE layers.
pub(crate) fn routing_records(run: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let figures = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).expect("a JSON line");
        value.as_object_mut().expect("an object").retain(|name, _| name == "step" || name.starts_with("moe/"));
        value
    };
    text.lines().map(figures).collect()
}

/// Reads the files from which training resumes.
pub(crate) fn state(run: &Path, step: u64) -> (Vec<u8>, Vec<u8>) {
    let dir = run.join("checkpoints").join(format!("step-{step:08}"));
    let read = |name: &str| fs::read(dir.join(name)).expect(name);
    (read("model.safetensors"), read("optimizer.safetensors"))
}
