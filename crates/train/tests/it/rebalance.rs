//! Experts that move between ranks while training goes on: losses stay those of a run in which they do not move.

pub(crate) mod skewed;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use moeworks_comm::{Communicator, RankOptions, Throttled, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_moe::{EpOptions, Pace};
use moeworks_ops::{Context, MachineOptions};
use moeworks_plan::{Exchange, Layout, Link, Links, Placement, RebalancePolicy, Wire};
use moeworks_train::config::{ConfigLayers, Override, PlacementChoice, Precision, RebalanceMode, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart, LanguageModelTrainer};
use moeworks_train::lr_schedule::{Decay, LrSchedule};
use moeworks_train::metrics::Record;
use moeworks_train::rebalance::{REBALANCE_JSONL, RebalanceSettings, RebalanceSource};
use moeworks_train::{
    Event, Ranks, Requests, RunFolder, StartOptions, TrainError, Trainer, TrainerSettings, resumed_config,
};

use skewed::{Sizes, Skewed};

/// A model of two MoE layers of six experts, whose steps take milliseconds.
const TINY: &str = "model.width=16 model.num_layers=2 model.num_heads=1 model.num_kv_heads=1 model.head_dim=16 \
    model.num_experts=6 model.expert_width=8 model.max_seq_len=16 train.seq_len=16 train.batch_size=8 train.steps=12 \
    train.lr=0.02 train.warmup_steps=0 train.eval_every=0 train.sample_every=0 train.checkpoint_every=0 \
    train.precision=f32 train.threads=1 train.schedule=constant parallel.pin=false rebalance.bytes_per_step=1";

const NUM_EXPERTS: usize = 6;
const NUM_LAYERS: usize = 2;

struct Place {
    folder: tempfile::TempDir,
    config: RunConfig,
}

/// The result of a run: the loss of each step, and the records on the root.
struct Run {
    records: Vec<Record>,
    dir: PathBuf,
}

impl Run {
    /// Returns a figure of rebalancing in each step.
    fn figures(&self, name: &str) -> Vec<f64> {
        let name = format!("rebalance/{name}");
        let of_record = |record: &Record| record.metrics.iter().find(|metric| metric.name == name).map(|m| m.value);
        self.records.iter().filter_map(of_record).collect()
    }

    /// Returns the layers and experts that moved, by the record of moves.
    fn moved(&self) -> BTreeSet<(u64, u64)> {
        let text = fs::read_to_string(self.dir.join(REBALANCE_JSONL)).expect("a record of moves");
        let mut moved = BTreeSet::new();
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let Some(copies) = line["copies"].as_array() else { continue };
            let layer = line["layer"].as_u64().expect("a layer");
            moved.extend(copies.iter().map(|copy| (layer, copy["expert"].as_u64().expect("an expert"))));
        }
        moved
    }

    fn assert_every_expert_moved(&self) {
        assert_eq!(self.moved().len(), NUM_EXPERTS * NUM_LAYERS, "each expert of each layer moved");
        let counted = self.figures("experts_moved").into_iter().fold(0.0, f64::max);
        assert_eq!(counted, (NUM_EXPERTS * NUM_LAYERS) as f64);
    }

    fn assert_losses(&self, expected: &Self, what: &str) {
        assert_eq!(self.records.len(), expected.records.len(), "{what}");
        for (record, expected) in self.records.iter().zip(&expected.records) {
            let (loss, wanted) = (record.loss, expected.loss);
            assert_eq!(record.step, expected.step, "{what}");
            assert!((loss - wanted).abs() <= 1e-5 * wanted, "{what}, step {}: {loss}, not {wanted}", record.step);
        }
    }
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let text = folder.path().join("text.txt");
        let words = ["night", "rose", "seven", "of", "a", "under", "iron", "blue", "said", "tree"];
        let text_of = |i: usize| words[(i * i + i / 7) % words.len()];
        let content: Vec<&str> = (0..4000).map(text_of).collect();
        fs::write(&text, content.join(" ")).expect("written");
        let mut overrides: Vec<Override> =
            TINY.split_whitespace().map(|setting| Override::parse(setting).expect("a setting")).collect();
        overrides.push(Override::new("data.paths", vec![text.display().to_string()]));
        overrides.push(Override::new("data.cache_dir", folder.path().join("cache").display().to_string()));
        let config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().expect("valid");
        Self { folder, config }
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.folder.path().join(name);
        fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    /// Writes a placement by which each expert is on another rank than by the one that training begins with.
    fn rotated(&self, num_ranks: usize) -> RebalanceMode {
        let sharded = Placement::sharded(NUM_EXPERTS, num_ranks);
        let line = |expert: usize| format!("{expert}: {}\n", (sharded.ranks_of(expert)[0] + 1) % num_ranks);
        let experts: String = (0..NUM_EXPERTS).map(line).collect();
        let text = format!("placement experts={NUM_EXPERTS} ranks={num_ranks}\n{experts}");
        RebalanceMode::File(self.file(&format!("rotated-{num_ranks}.placement"), &text))
    }

    /// Trains with settings that `change` made. `on_step` gets the rank and the step that it has finished.
    fn try_train(
        &self,
        name: &str,
        change: impl Fn(&mut RunConfig),
        on_step: impl Fn(usize, u64) + Sync,
    ) -> Result<Run, TrainError> {
        let mut config = self.config.clone();
        change(&mut config);
        config.validate()?;
        let dir = self.folder.path().join(name);
        let start = |ranks| {
            let watch = Watch::default();
            let start = LanguageModelStart::new(config.clone(), dir.clone(), &watch);
            LanguageModel::start(LanguageModelStart { ranks, ..start })
        };
        Ok(Run { records: on_all(&config, start, on_step)?, dir: dir.clone() })
    }

    fn train(&self, name: &str, change: impl Fn(&mut RunConfig)) -> Run {
        self.try_train(name, change, |_, _| ()).expect("trained")
    }

    /// Goes on with a copy of a run, up to step 12.
    fn go_on(&self, from: &Path, name: &str, change: impl Fn(&mut RunConfig)) -> Run {
        let dir = self.folder.path().join(name);
        copy_folder(from, &dir);
        let config = resumed_config(&dir, |mut config| {
            config.parallel = self.config.parallel.clone();
            config.train.steps = self.config.train.steps;
            change(&mut config);
            Ok(config)
        });
        let config = config.expect("settings with which it can go on");
        let start = |ranks| {
            LanguageModel::resume(LanguageModelResume {
                run_dir: dir.clone(),
                config: config.clone(),
                ranks,
                machine: MachineOptions::default(),
                watch: &Watch::default(),
            })
        };
        Run { records: on_all(&config, start, |_, _| ()).expect("trained"), dir: dir.clone() }
    }
}

/// Trains on the ranks of `config`. Returns the records of the root.
fn on_all(
    config: &RunConfig,
    start: impl Fn(Option<Ranks>) -> Result<LanguageModelTrainer, TrainError> + Sync,
    on_step: impl Fn(usize, u64) + Sync,
) -> Result<Vec<Record>, TrainError> {
    let records = Mutex::new(Vec::new());
    let run = |rank: usize, ranks: Option<Ranks>| {
        let mut trainer = start(ranks)?;
        trainer.run(&Requests::default(), &mut |event| {
            if let Event::Step { record, .. } = event {
                if rank == 0 {
                    records.lock().expect("no panic").push(record.clone());
                }
                on_step(rank, record.step);
            }
        })
    };
    match config.parallel.num_ranks() {
        1 => run(0, None).map(drop)?,
        num_ranks => try_run_ranks(&RankOptions::new(num_ranks), |comm| {
            run(comm.rank(), Some(Ranks::of_config(comm, config, false)?))
        })
        .map(drop)?,
    }
    Ok(records.into_inner().expect("no panic"))
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("made");
    for entry in fs::read_dir(from).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match path.is_dir() {
            true => copy_folder(&path, &to),
            false => drop(fs::copy(&path, &to).expect("copied")),
        }
    }
}

#[test]
fn every_expert_moves_with_its_moments_and_the_losses_stay() {
    let place = Place::new();
    for (dp, ep, zero) in [(1, 2, 0), (1, 4, 0), (2, 2, 1), (2, 2, 3)] {
        for precision in [Precision::F32, Precision::Bf16] {
            let what = format!("dp{dp}-ep{ep}-zero{zero}-{precision:?}");
            let layout = |config: &mut RunConfig| {
                (config.parallel.dp, config.parallel.ep, config.parallel.zero) = (dp, ep, zero);
                config.train.precision = precision;
            };
            let still = place.train(&format!("still-{what}"), layout);
            let moving = place.train(&what, |config| {
                layout(config);
                config.rebalance.mode = place.rotated(ep);
                config.rebalance.at_step = 3;
            });
            moving.assert_losses(&still, &what);
            moving.assert_every_expert_moved();
            let num_pauses = moving.figures("copies").into_iter().filter(|&copies| copies > 0.0).count();
            assert!(num_pauses >= NUM_LAYERS * NUM_EXPERTS / ep / 2, "{what}: spread over {num_pauses} pauses");
            assert!(still.figures("copies").is_empty(), "{what}: nothing is said where nothing moves");
        }
    }
}

#[test]
fn replicas_come_and_go_and_their_gradients_are_summed_with_any_sharding() {
    let place = Place::new();
    let text = format!("placement experts={NUM_EXPERTS} ranks=3\n0: *\n1: 2\n2: 0 1\n3: 0 2\n4: 1\n5: 0\n");
    let mode = RebalanceMode::File(place.file("replicas.placement", &text));
    for (dp, zero) in [(1, 0), (2, 1), (2, 2), (2, 3)] {
        let what = format!("dp{dp}-zero{zero}");
        let layout = |config: &mut RunConfig| {
            (config.parallel.dp, config.parallel.ep, config.parallel.zero) = (dp, 3, zero);
        };
        let still = place.train(&format!("still-{what}"), layout);
        let grown = place.train(&format!("grown-{what}"), |config| {
            layout(config);
            (config.rebalance.mode, config.rebalance.at_step) = (mode.clone(), 2);
        });
        grown.assert_losses(&still, &format!("replicas that come, {what}"));
        let shrunk = place.train(&format!("shrunk-{what}"), |config| {
            layout(config);
            config.parallel.placement = PlacementChoice::Everywhere;
            config.rebalance.mode = mode.clone();
        });
        shrunk.assert_losses(&still, &format!("replicas that go, {what}"));
    }
}

#[test]
fn a_checkpoint_of_replicas_whose_moments_are_sharded_goes_on_in_any_layout() {
    let place = Place::new();
    let whole = place.train("whole", |config| config.parallel.ep = 2);
    let half = place.train("half", |config| {
        (config.parallel.dp, config.parallel.ep, config.parallel.zero, config.train.steps) = (2, 2, 1, 5);
        config.parallel.placement = PlacementChoice::Everywhere;
    });
    let rest = Run { records: whole.records[5..].to_vec(), dir: whole.dir.clone() };
    for (name, [dp, ep, zero], placement) in [
        ("one", [1, 1, 0], PlacementChoice::Sharded),
        ("slices", [2, 2, 2], PlacementChoice::Sharded),
        ("replicas", [1, 3, 3], PlacementChoice::Everywhere),
    ] {
        let run = place.go_on(&half.dir, name, |config| {
            (config.parallel.dp, config.parallel.ep, config.parallel.zero) = (dp, ep, zero as u8);
            config.parallel.placement = placement.clone();
        });
        run.assert_losses(&rest, name);
    }
}

#[test]
fn a_checkpoint_in_the_middle_of_a_move_goes_on_in_any_layout() {
    let place = Place::new();
    let whole = place.train("whole", |config| config.parallel.ep = 2);
    let half = place.train("half", |config| {
        (config.parallel.ep, config.train.steps) = (2, 5);
        config.rebalance.mode = place.rotated(2);
    });
    let copies: f64 = half.figures("copies").iter().sum();
    assert!(copies > 0.0 && (copies as usize) < NUM_EXPERTS * NUM_LAYERS, "{copies} copies: it is in the middle");
    let mode = place.rotated(2);
    let cases: [(&str, [usize; 4], RebalanceMode); 5] = [
        ("one", [1, 1, 1, 0], RebalanceMode::Off),
        ("same", [1, 2, 1, 0], mode.clone()),
        ("three", [1, 3, 1, 0], RebalanceMode::Online),
        ("slices", [2, 2, 1, 1], mode),
        ("stages", [1, 2, 2, 0], RebalanceMode::Online),
    ];
    for (name, [dp, ep, pp, zero], mode) in cases {
        let run = place.go_on(&half.dir, name, |config| {
            let parallel = &mut config.parallel;
            (parallel.dp, parallel.ep, parallel.pp, parallel.zero) = (dp, ep, pp, zero as u8);
            (config.rebalance.mode, config.rebalance.every, config.rebalance.min_gain) = (mode.clone(), 2, 0.0);
        });
        let rest = Run { records: whole.records[5..].to_vec(), dir: whole.dir.clone() };
        run.assert_losses(&rest, name);
        if name == "same" {
            // What had moved is not moved again.
            run.assert_every_expert_moved_once_in_all(copies);
        }
    }
}

impl Run {
    /// Checks that a resumed run moved the experts that were left, after `before` copies.
    fn assert_every_expert_moved_once_in_all(&self, before: f64) {
        let copies: f64 = self.figures("copies").iter().sum();
        assert_eq!(before + copies, (NUM_EXPERTS * NUM_LAYERS) as f64);
        assert_eq!(self.moved().len(), NUM_EXPERTS * NUM_LAYERS, "the record of moves goes on");
    }
}

#[test]
fn a_rank_that_dies_while_experts_move_is_named_and_nothing_is_lost() {
    let place = Place::new();
    let whole = place.train("whole", |config| config.parallel.ep = 3);
    let moving = |config: &mut RunConfig| {
        (config.parallel.ep, config.train.checkpoint_every) = (3, 2);
        config.rebalance.mode = place.rotated(3);
    };
    let start = Instant::now();
    let failed = place.try_train("run", moving, |rank, step| assert!((rank, step) != (2, 3), "out of paper"));
    let said = failed.err().expect("a run that lost a rank has failed").to_string();
    assert!(said.starts_with("rank 2 died: panicked:") && said.contains("out of paper"), "{said}");
    assert!(start.elapsed().as_secs() < 60, "the others ended after {:?}", start.elapsed());
    let run_dir = place.folder.path().join("run");
    let resumed = place.go_on(&run_dir, "resumed", |config| {
        (config.parallel.ep, config.rebalance.mode) = (3, place.rotated(3));
    });
    assert_eq!(resumed.records[0].step, 3, "it goes on after the checkpoint of step 2");
    let rest = Run { records: whole.records[2..].to_vec(), dir: whole.dir.clone() };
    resumed.assert_losses(&rest, "resumed");
    assert_eq!(resumed.moved().len(), NUM_EXPERTS * NUM_LAYERS);
}

#[test]
fn online_moves_experts_by_any_policy_and_sizes_and_the_losses_stay() {
    let place = Place::new();
    // Six experts do not divide over four ranks; there are more spare slots than experts; seven ranks for six
    // experts.
    for (ep, spare, zero) in [(1, 1, 0), (2, 0, 0), (4, 1, 0), (2, 99, 0), (2, 2, 1), (7, 1, 0)] {
        let what = format!("ep{ep}-spare{spare}-zero{zero}");
        let layout = |config: &mut RunConfig| (config.parallel.ep, config.parallel.zero) = (ep, zero);
        let still = place.train(&format!("still-{what}"), layout);
        let moving = place.train(&what, |config| {
            layout(config);
            config.rebalance.mode = RebalanceMode::Online;
            (config.rebalance.every, config.rebalance.spare, config.rebalance.min_gain) = (2, spare, 0.0);
            config.rebalance.bytes_per_step = 0;
            config.rebalance.max_pause = 1.0;
        });
        moving.assert_losses(&still, &what);
        assert_eq!(moving.figures("copies").iter().sum::<f64>() > 0.0, ep > 1, "{what}");
    }
}

#[test]
fn placements_of_another_model_are_refused_in_one_line() {
    let place = Place::new();
    let refused = |ep: usize, zero: u8, text: &str| {
        let mode = RebalanceMode::File(place.file("wrong.placement", text));
        let change = |config: &mut RunConfig| {
            (config.parallel.ep, config.parallel.zero, config.rebalance.mode) = (ep, zero, mode.clone());
        };
        let error = place.try_train("refused", change, |_, _| ()).err().expect("refused").to_string();
        assert!(error.contains("wrong.placement: ") && !error.contains('\n'), "{error}");
        assert!(!place.folder.path().join("refused").exists(), "nothing is written");
        error
    };
    let of_eight = "placement experts=8 ranks=2\n0: 0\n1: 0\n2: 0\n3: 0\n4: 1\n5: 1\n6: 1\n7: 1\n";
    assert!(refused(2, 0, of_eight).contains("places 8 experts on 2 ranks, but model.num_experts is 6"));
    let of_two = "placement experts=6 ranks=2\n0: 0\n1: 0\n2: 0\n3: 1\n4: 1\n5: 1\n";
    assert!(refused(1, 0, of_two).contains("on 2 ranks, but"), "on one rank as well");
    assert!(refused(2, 0, "placement of nothing").contains("line 1"));
}

/// A model with little to compute, whose hot pair of experts changes every 20 steps.
const SMALL: Sizes = Sizes { width: 8, expert_width: 8, num_experts: 4, num_points: 64, period: 20 };

/// The number of ranks, their links, and waits that stand for computations.
#[derive(Clone, Copy)]
struct Slow {
    num_ranks: usize,
    links: Links,
    pace: Pace,
}

/// Trains the model whose load changes on two ranks. Returns the root's records.
fn train_skewed(dir: &Path, sizes: Sizes, steps: u64, rebalance: &RebalanceSettings) -> Vec<Record> {
    train_skewed_on(dir, sizes, steps, rebalance, None)
}

/// Trains as [`train_skewed`] does, perhaps over slow links.
fn train_skewed_on(
    dir: &Path,
    sizes: Sizes,
    steps: u64,
    rebalance: &RebalanceSettings,
    slow: Option<Slow>,
) -> Vec<Record> {
    let records = Mutex::new(Vec::new());
    let lr = LrSchedule { peak: 1e-2, min_ratio: 1.0, warmup_steps: 0, total_steps: steps, decay: Decay::Constant };
    let settings = TrainerSettings { steps, lr, rebalance: rebalance.clone(), ..TrainerSettings::default() };
    let num_ranks = slow.map_or(2, |slow| slow.num_ranks);
    let result = try_run_ranks(&RankOptions::new(num_ranks), |comm: &dyn Communicator| {
        let placement = Placement::sharded(sizes.num_experts, num_ranks);
        let all = comm.split(Some(0), comm.rank())?.expect("all ranks");
        let comm = match slow {
            Some(Slow { links, .. }) => Box::new(Throttled::new(all, links)) as Box<dyn Communicator>,
            None => all,
        };
        let options = EpOptions { pace: slow.map(|slow| slow.pace), ..Exchange::plain(Wire::F32).into() };
        let ranks = Arc::new(Ranks::new(&*comm, Layout::new(1, num_ranks, 1), placement, options)?);
        let task = Skewed::new(sizes, Some(&ranks));
        let (folder, ctx) = (RunFolder::from(dir.to_owned()), Context::cpu(1));
        let start = StartOptions { folder, settings: settings.clone(), ctx, ranks: Some(ranks) };
        let mut trainer = Trainer::start(task, start)?;
        trainer.run(&Requests::default(), &mut |event| {
            if let Event::Step { record, .. } = event
                && comm.rank() == 0
            {
                records.lock().expect("no panic").push(record.clone());
            }
        })
    });
    result.expect("trained");
    records.into_inner().expect("no panic")
}

/// Returns a figure of rebalancing in each step.
fn figures(records: &[Record], name: &str) -> Vec<f64> {
    let name = format!("rebalance/{name}");
    let of_record = |record: &Record| record.metrics.iter().find(|metric| metric.name == name).map(|m| m.value);
    records.iter().filter_map(of_record).collect()
}

#[test]
fn moments_travel_under_the_next_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sizes = Sizes { width: 32, expert_width: 64, num_experts: 8, num_points: 64, period: 100 };
    let link = Link { latency_s: 1e-5, bytes_per_s: 4e6 };
    let pace = Pace { attention_forward_s: 0.25, ..Pace::default() };
    let slow = Slow { num_ranks: 2, links: Links { node: link, cluster: link }, pace };
    let swapped = "placement experts=8 ranks=2\n0: 1\n1: 1\n2: 1\n3: 1\n4: 0\n5: 0\n6: 0\n7: 0\n";
    let placements = swapped.parse::<Placement>().expect("a placement").into();
    let source = RebalanceSource::File { placements, at_step: 1 };
    let settings = RebalanceSettings { source, bytes_per_step: 1 << 30, ..RebalanceSettings::default() };
    let still = train_skewed_on(&folder.path().join("still"), sizes, 5, &RebalanceSettings::default(), Some(slow));
    let records = train_skewed_on(&folder.path().join("moving"), sizes, 5, &settings, Some(slow));
    for (record, still) in records.iter().zip(&still) {
        assert!((record.loss - still.loss).abs() <= 1e-5 * still.loss, "step {}", record.step);
    }
    let sum = |name: &str| figures(&records, name).iter().sum::<f64>();
    assert_eq!((sum("copies"), figures(&records, "experts_moved")[4]), (8.0, 8.0));
    let (wire_s, pause_s) = (sum("bytes") / link.bytes_per_s, sum("pause_ms") / 1e3);
    assert!(pause_s < 0.6 * wire_s, "{pause_s} s of pauses, where experts travel for {wire_s} s");
}

#[test]
fn imbalance_falls_after_moves_and_follows_the_load() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let online = RebalanceSettings {
        source: RebalanceSource::Online,
        every: 5,
        policies: vec![RebalancePolicy::Moves],
        min_gain: 0.0,
        ..RebalanceSettings::default()
    };
    let still = train_skewed(&folder.path().join("still"), SMALL, 60, &RebalanceSettings::default());
    let records = train_skewed(&folder.path().join("moving"), SMALL, 60, &online);
    for (record, still) in records.iter().zip(&still) {
        assert!((record.loss - still.loss).abs() <= 1e-5 * still.loss, "step {}", record.step);
    }
    let imbalance: Vec<f64> = records
        .iter()
        .map(|record| {
            let figure = record.metrics.iter().find(|metric| metric.name == "rebalance/imbalance");
            figure.expect("a figure").value
        })
        .collect();
    let mut num_changes = 0;
    for period in imbalance.chunks(20) {
        assert!(period[15..].iter().all(|&value| value < 0.1), "the load is even at the end of a period: {period:?}");
        num_changes += usize::from(period[0] > 0.4);
    }
    assert!(num_changes >= 2, "the load was uneven at first, and after a change: {imbalance:?}");
}

/// Measures tokens a second over a whole run whose load changes every 200 steps: without moves, with a placement
/// made for the load of the first period, and online. Medians of three runs, in turns.
#[test]
#[ignore = "a measurement of minutes: cargo test -p moeworks-train --test it measure_rebalancing -- --ignored --nocapture"]
fn measure_rebalancing() {
    let sizes = Sizes { width: 64, expert_width: 256, num_experts: 8, num_points: 256, period: 200 };
    let steps = 800;
    let first = "placement experts=8 ranks=2\n0: 0\n1: 1\n2: 0\n3: 1\n4: 0\n5: 1\n6: 0\n7: 1\n";
    let first: Placement = first.parse().expect("a placement");
    let of_source = |source| RebalanceSettings { source, every: 20, ..RebalanceSettings::default() };
    let modes = [
        ("off", of_source(RebalanceSource::Off)),
        ("file", of_source(RebalanceSource::File { placements: first.into(), at_step: 20 })),
        ("online", of_source(RebalanceSource::Online)),
        (
            "online, moves",
            RebalanceSettings { policies: vec![RebalancePolicy::Moves], ..of_source(RebalanceSource::Online) },
        ),
    ];
    let mut rates = vec![Vec::new(); modes.len()];
    for turn in 0..3 {
        for ((name, settings), rates) in modes.iter().zip(&mut rates) {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let start = Instant::now();
            let records = train_skewed(&folder.path().join("run"), sizes, steps, settings);
            let rate = (steps as usize * sizes.num_points) as f64 / start.elapsed().as_secs_f64();
            let sum = |name: &str| -> f64 {
                let figures = records.iter().flat_map(|record| &record.metrics).filter(|metric| metric.name == name);
                figures.map(|metric| metric.value).fold(0.0, |sum, value| sum + value)
            };
            println!(
                "turn {turn}, {name}: {rate:.0} tokens/s, imbalance {:.3}, {} copies, {:.0} ms of pauses",
                sum("rebalance/imbalance") / steps as f64,
                sum("rebalance/copies"),
                sum("rebalance/pause_ms")
            );
            rates.push(rate);
        }
    }
    for ((name, _), mut rates) in modes.iter().zip(rates) {
        rates.sort_by(f64::total_cmp);
        println!("{name}: {:.0} tokens/s (median)", rates[1]);
    }
}
