//! Runs whose ranks are threads, one of which panics or hangs in the middle.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use moeworks_comm::{RankOptions, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_ops::MachineOptions;
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart};
use moeworks_train::metrics::{METRICS_JSONL, read_records};
use moeworks_train::{Event, Ranks, Requests, TrainError, resumed_config};

/// A model whose steps take milliseconds, with a checkpoint every other step.
const TINY: &str = "model.width=16 model.num_layers=2 model.num_heads=1 model.num_kv_heads=1 model.head_dim=16 \
    model.num_experts=6 model.expert_width=8 model.max_seq_len=16 train.seq_len=16 train.batch_size=6 \
    train.eval_every=0 train.sample_every=0 train.checkpoint_every=2 train.precision=f32 train.threads=1 \
    train.schedule=constant parallel.pin=false";

/// The last step of the runs.
const STEPS: u64 = 9;

struct Place {
    folder: tempfile::TempDir,
    config: RunConfig,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "A text that is short and easily learnt. ".repeat(100)).expect("written");
        let mut overrides: Vec<Override> =
            TINY.split_whitespace().map(|setting| Override::parse(setting).expect("a setting")).collect();
        overrides.push(Override::parse(&format!("train.steps={STEPS}")).expect("a setting"));
        overrides.push(Override::new("data.paths", vec![text.display().to_string()]));
        overrides.push(Override::new("data.cache_dir", folder.path().join("cache").display().to_string()));
        let config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().expect("valid");
        Self { folder, config }
    }

    fn run_dir(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Trains on `num_ranks` ranks that wait for each other for `timeout_s` seconds. `on_step` gets the rank and the
    /// step that it has finished, while the other ranks continue.
    fn train(
        &self,
        name: &str,
        num_ranks: usize,
        timeout_s: u64,
        on_step: impl Fn(usize, u64) + Sync,
    ) -> Result<(), TrainError> {
        let mut config = self.config.clone();
        (config.parallel.ep, config.parallel.timeout_s) = (num_ranks, timeout_s);
        try_run_ranks(&RankOptions::new(num_ranks), |comm| {
            let ranks = Some(Ranks::of_config(comm, &config, false)?);
            let watch = Watch::default();
            let start = LanguageModelStart::new(config.clone(), self.run_dir(name), &watch);
            let mut trainer = LanguageModel::start(LanguageModelStart { ranks, ..start })?;
            trainer.run(&Requests::default(), &mut |event| {
                if let Event::Step { record, .. } = event {
                    on_step(comm.rank(), record.step);
                }
            })
        })
        .map(drop)
    }
}

fn losses(run_dir: &Path) -> Vec<(u64, f64)> {
    let records = read_records(&run_dir.join(METRICS_JSONL)).expect("records");
    records.map(|record| record.expect("readable")).map(|record| (record.step, record.loss)).collect()
}

#[test]
fn a_rank_that_panics_in_a_step_is_named_and_nothing_is_lost() {
    let place = Place::new();
    let start = Instant::now();
    let failed = place.train("run", 3, 25, |rank, step| assert!((rank, step) != (2, 5), "out of paper"));
    let said = failed.expect_err("a run that lost a rank has failed").to_string();
    assert!(said.starts_with("rank 2 died: panicked:") && said.contains("out of paper"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(30), "the others ended after {:?}", start.elapsed());
    // The run resumes from the checkpoint of step 4, on one rank.
    let run_dir = place.run_dir("run");
    let config = resumed_config(&run_dir, |mut config| {
        config.parallel.ep = 1;
        Ok(config)
    });
    let resume = LanguageModelResume {
        run_dir: run_dir.clone(),
        config: config.expect("it can"),
        ranks: None,
        machine: MachineOptions::default(),
        watch: &Watch::default(),
    };
    let mut resumed = LanguageModel::resume(resume).expect("resumed");
    assert_eq!(resumed.progress().step, 4);
    resumed.run(&Requests::default(), &mut |_| ()).expect("trained");
    place.train("whole", 1, 25, |_, _| ()).expect("trained");
    let (run, whole) = (losses(&run_dir), losses(&place.run_dir("whole")));
    assert_eq!(run.len() as u64, STEPS, "every step once");
    for ((step, loss), (expected_step, expected)) in run.into_iter().zip(whole) {
        assert_eq!(step, expected_step);
        assert!((loss - expected).abs() <= 1e-5 * expected, "step {step}: {loss}, not {expected}");
    }
}

#[test]
fn a_rank_that_hangs_in_a_step_is_named_by_the_others() {
    let place = Place::new();
    // A thread cannot be ended from outside; this one returns long after the others have given up.
    let failed = place.train("run", 3, 2, |rank, step| {
        if (rank, step) == (1, 3) {
            std::thread::sleep(Duration::from_secs(5));
        }
    });
    let said = failed.expect_err("a run that lost a rank has failed").to_string();
    assert!(said.starts_with("rank 1 hung: nothing from it for"), "{said}");
}
