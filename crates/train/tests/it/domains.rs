//! Domains of ranks in training runs: the settings, and the size that follows the bandwidth.

use std::path::Path;
use std::sync::{Arc, Mutex};

use moeworks_comm::{Communicator, RankOptions, Throttled, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_moe::{DomainOptions, EpOptions, LevelDomain, Pace};
use moeworks_ops::Context;
use moeworks_plan::{DomainLevel, DomainWork, Exchange, Layout, Link, Links, Placement, Wire, choose_domains};
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelStart};
use moeworks_train::lr_schedule::{Decay, LrSchedule};
use moeworks_train::metrics::Record;
use moeworks_train::{Event, Ranks, Requests, RunFolder, StartOptions, TrainError, Trainer, TrainerSettings};

use crate::rebalance::skewed::{Sizes, Skewed};

const NUM_RANKS: usize = 4;
const NUM_STEPS: u64 = 80;
/// The step after which links are slower.
const SLOW_AFTER: u64 = 40;
/// The bytes a second of links before and afterwards.
const FAST: f64 = 3e6;
const SLOW: f64 = 1.5e5;
/// The seconds of computation before the experts of a pass.
const BEFORE_S: f64 = 4e-3;
const SIZES: Sizes = Sizes { width: 16, expert_width: 16, num_experts: NUM_RANKS, num_points: 96, period: 1 << 40 };
/// The bytes of a layer's exchange: 24 points with two choices, and an expert of three matrices.
const WORK: DomainWork = DomainWork { data_bytes: 3072.0, expert_bytes: 3072.0, hidden_s: 0.0 };

fn links(bytes_per_s: f64) -> Links {
    let link = Link { latency_s: 0.0, bytes_per_s };
    Links { node: link, cluster: link }
}

/// Trains a layer, over links that get slower in the middle of the run and with domains that follow them, or without.
fn train(dir: &Path, follows: bool) -> Vec<Record> {
    let records = Mutex::new(Vec::new());
    let lr = LrSchedule { peak: 1e-3, min_ratio: 1.0, warmup_steps: 0, total_steps: NUM_STEPS, decay: Decay::Constant };
    let settings = TrainerSettings { steps: NUM_STEPS, lr, ..TrainerSettings::default() };
    let result = try_run_ranks(&RankOptions::new(NUM_RANKS), |comm: &dyn Communicator| {
        let all = comm.split(Some(0), comm.rank())?.expect("all ranks");
        let comm = Throttled::new(all, links(if follows { FAST } else { 1e12 }));
        let shared = comm.links();
        let pace = follows.then_some(Pace { attention_forward_s: BEFORE_S, ..Pace::default() });
        let options = EpOptions { pace, ..Exchange::plain(Wire::F32).into() };
        let placement = Placement::sharded(SIZES.num_experts, NUM_RANKS);
        let mut ranks = Ranks::new(&comm, Layout::new(1, NUM_RANKS, 1), placement, options)?;
        if follows {
            ranks = ranks.choosing_domains(WORK, DomainOptions::consecutive(NUM_RANKS, 1))?;
        }
        let ranks = Arc::new(ranks);
        let task = Skewed::new(SIZES, Some(&ranks));
        let (folder, ctx) = (RunFolder::from(dir.to_owned()), Context::cpu(1));
        let start = StartOptions { folder, settings: settings.clone(), ctx, ranks: Some(ranks) };
        let mut trainer = Trainer::start(task, start)?;
        trainer.run(&Requests::default(), &mut |event| {
            let Event::Step { record, .. } = event else { return };
            if follows && record.step == SLOW_AFTER {
                shared.set(links(SLOW));
            }
            if comm.rank() == 0 {
                records.lock().expect("no panic").push(record.clone());
            }
        })
    });
    result.expect("trained");
    records.into_inner().expect("no panic")
}

fn figure(record: &Record, name: &str) -> f64 {
    let found = record.metrics.iter().find(|metric| metric.name == format!("domains/{name}"));
    found.unwrap_or_else(|| panic!("domains/{name} of step {}", record.step)).value
}

/// Computes the size of domains that the model asks for by the figures of a record.
fn foretold(record: &Record) -> f64 {
    let level = DomainLevel { size: NUM_RANKS, bytes_per_s: figure(record, "bytes_per_s") };
    let work = DomainWork { hidden_s: figure(record, "hidden_ms") / 1e3, ..WORK };
    choose_domains(&[level], &work)[0] as f64
}

/// Returns the records of the steps after which domains changed.
fn changes(records: &[Record]) -> Vec<&Record> {
    records.iter().filter(|record| figure(record, "foretold_ms") > 0.0).collect()
}

/// Says in what a run differs from one whose domains grow over fast links and shrink over slow ones.
fn difference_from_expected(records: &[Record]) -> Option<String> {
    let size = |step: u64| figure(&records[step as usize - 1], "ranks");
    let at: Vec<(u64, f64)> = changes(records).iter().map(|record| (record.step, size(record.step))).collect();
    let rates = [SLOW_AFTER, NUM_STEPS].map(|step| figure(&records[step as usize - 1], "bytes_per_s"));
    // Ranks that wait for a core measure less.
    let is_measured = [rates[0] / FAST, rates[1] / SLOW].iter().all(|share| (0.4..1.1).contains(share));
    let problem = if size(SLOW_AFTER) != 4.0 {
        "not all experts are gathered under what is computed"
    } else if size(NUM_STEPS) >= 4.0 {
        "slow links hide no experts"
    } else if at.len() != 2 {
        "there are other changes"
    } else if !is_measured {
        "other rates are measured"
    } else {
        return None;
    };
    Some(format!("{problem}: {at:?}, {rates:?}"))
}

#[test]
fn domains_follow_links_that_get_slower_and_the_losses_stay() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plain = train(&folder.path().join("plain"), false);
    // A machine that is busy with other work computes and sends at other rates, to which domains rightly follow.
    let mut differences = Vec::new();
    let is_as_expected = (0..4).any(|attempt| {
        let records = train(&folder.path().join(attempt.to_string()), true);
        for (record, plain) in records.iter().zip(&plain) {
            assert!((record.loss - plain.loss).abs() <= 1e-4 * plain.loss, "step {}", record.step);
        }
        assert_eq!(figure(&records[0], "ranks"), 1.0, "nothing is known of what hides experts");
        for change in changes(&records) {
            assert_eq!(figure(change, "ranks"), foretold(change), "step {}", change.step);
            assert!(figure(change, "foretold_ms") < 0.9 * figure(change, "foretold_ms_before"), "step {}", change.step);
        }
        differences.extend(difference_from_expected(&records));
        differences.len() == attempt
    });
    assert!(is_as_expected, "{differences:?}");
}

/// Returns the domains of a run on two nodes of two ranks.
fn domains_of(domain: &str) -> Result<Option<DomainOptions>, TrainError> {
    let settings = ["model.num_experts=4", "parallel.ep=4", "parallel.pin=false", domain];
    let overrides = settings.map(|setting| Override::parse(setting).expect("a setting")).to_vec();
    let config = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve()?;
    let options = RankOptions::new(NUM_RANKS).with_nodes(&[0, 0, 1, 1]);
    let of_ranks =
        try_run_ranks(&options, |comm| Ok::<_, TrainError>(Ranks::of_config(comm, &config, false)?.experts().domain()));
    Ok(of_ranks?.swap_remove(0))
}

#[test]
fn two_numbers_are_the_nodes_and_the_ranks_of_a_node_in_a_domain() {
    let sizes = |domain: &str| domains_of(domain).expect("valid").map(|options| options.levels);
    let level = |size, domain| LevelDomain { size, domain };
    assert_eq!(sizes("parallel.domain=1"), None);
    assert_eq!(sizes("parallel.domain=2"), Some(vec![level(4, 2)]));
    assert_eq!(sizes("parallel.domain=2,1"), Some(vec![level(2, 2), level(2, 1)]));
    assert_eq!(sizes("parallel.domain=\"1, 2\""), Some(vec![level(2, 1), level(2, 2)]));
}

#[test]
fn domains_that_do_not_divide_the_ranks_are_refused_in_one_line() {
    for (domain, expected) in [
        ("parallel.domain=3", "parallel.domain = 3: must divide parallel.ep times parallel.tp, 4"),
        ("parallel.domain=4,1", "parallel.domain = \"4,1\": must divide the 2 node(s) and the 2 rank(s) of each"),
        ("parallel.domain=2,0", "must be a number of ranks, or of nodes and of ranks of a node such as \"2,4\""),
        ("parallel.domain=many", "must be a number of ranks"),
        ("parallel.domain=1.5", "must be a whole number"),
        ("parallel.domain_keep_gradients=0.5", "parallel.domain_keep_gradients = 0.5: must be 1 without domains"),
    ] {
        let error = domains_of(domain).expect_err(domain).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{domain}: {error}");
    }
}

/// A language model of two layers, and a larger one of four.
const SMALL: &str = "model.width=64 model.num_layers=2 model.num_heads=4 model.num_kv_heads=4 model.head_dim=16 \
    model.num_experts=8 model.expert_width=128 model.top_k=2 model.max_seq_len=64 train.seq_len=64 train.batch_size=4 \
    train.steps=200 train.lr=0.003";
const LARGER: &str = "model.width=128 model.num_layers=4 model.num_heads=4 model.num_kv_heads=4 model.head_dim=32 \
    model.num_experts=8 model.expert_width=256 model.top_k=2 model.max_seq_len=64 train.seq_len=64 train.batch_size=8 \
    train.steps=250 train.lr=0.002";
const COMMON: &str = "train.precision=f32 train.threads=1 train.eval_every=0 train.sample_every=0 \
    train.checkpoint_every=0 parallel.pin=false parallel.timeout_s=600 data.paths=[\"../../../shared/data/text/tinyshakespeare.txt\"]";

/// The results of a run: the loss of the last 20 steps, the validation loss at the end, and the kilobytes that the
/// busiest rank sends a step.
struct Trained {
    loss: f64,
    val_loss: f64,
    kilobytes: f64,
}

/// Trains a language model on `tinyshakespeare.txt` with these settings.
fn train_text(settings: &[&str]) -> Trained {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let words = settings.iter().flat_map(|text| text.split_whitespace());
    let mut overrides: Vec<Override> = words.map(|setting| Override::parse(setting).expect("a setting")).collect();
    overrides.push(Override::new("data.cache_dir", folder.path().join("cache").display().to_string()));
    let config: RunConfig = ConfigLayers { overrides, ..ConfigLayers::default() }.resolve().expect("valid");
    let records: Mutex<Vec<Record>> = Mutex::default();
    let result = try_run_ranks(&RankOptions::new(config.parallel.num_ranks()), |comm| {
        let watch = Watch::default();
        let ranks = Some(Ranks::of_config(comm, &config, false)?);
        let start = LanguageModelStart::new(config.clone(), folder.path().join("run"), &watch);
        let mut trainer = LanguageModel::start(LanguageModelStart { ranks, ..start })?;
        trainer.run(&Requests::default(), &mut |event| {
            if let (Event::Step { record, .. }, 0) = (event, comm.rank()) {
                records.lock().expect("no panic").push(record.clone());
            }
        })
    });
    result.expect("trained");
    let records = records.into_inner().expect("no panic");
    let last = &records[records.len() - 20..];
    let sent = |record: &Record| {
        let ranks = record.ranks.iter().flat_map(|ranks| &ranks.ranks);
        ranks.map(|rank| (rank.node_bytes + rank.cluster_bytes) as f64 / 1e3).fold(0.0, f64::max)
    };
    Trained {
        loss: last.iter().map(|record| record.loss).sum::<f64>() / last.len() as f64,
        val_loss: records.iter().rev().find_map(|record| record.val_loss).unwrap_or(f64::NAN),
        kilobytes: last.iter().map(sent).sum::<f64>() / last.len() as f64,
    }
}

/// Prints losses and bytes of each of `variants` with one seed, beside the first.
fn print_losses(model: &str, seed: u64, variants: &[&str]) {
    let mut first = None;
    for variant in variants {
        let run = train_text(&[model, COMMON, variant, &format!("train.seed={seed}")]);
        let Trained { loss, val_loss, kilobytes } = run;
        let [of_loss, of_val, of_bytes] = *first.get_or_insert([loss, val_loss, kilobytes]);
        println!(
            "{variant}, seed {seed}: training loss {loss:.4} ({:+.2}%), validation loss {val_loss:.4} ({:+.2}%), \
             {kilobytes:.0} kB a step ({:.1}%)",
            (loss / of_loss - 1.0) * 100.0,
            (val_loss / of_val - 1.0) * 100.0,
            kilobytes / of_bytes * 100.0,
        );
    }
}

const SHARES: [&str; 7] = [
    "parallel.ep=4 parallel.domain=4",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.09",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.01",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.05 parallel.domain_base=mean",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.09 parallel.domain_keep_gradients=0.5",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.09 parallel.domain_keep_gradients=0.09",
    "parallel.ep=4 parallel.domain=4 parallel.domain_keep=0.5",
];

#[test]
#[ignore = "a measurement of minutes: cargo test -p moeworks-train --test it measure_compressed -- --ignored --nocapture"]
fn measure_compressed_experts() {
    (1..=3).for_each(|seed| print_losses(SMALL, seed, &SHARES));
}

#[test]
#[ignore = "a measurement of minutes: cargo test -p moeworks-train --test it measure_larger -- --ignored --nocapture"]
fn measure_larger_compressed_experts() {
    print_losses(LARGER, 1, &SHARES);
}

#[test]
#[ignore = "a measurement of minutes: cargo test -p moeworks-train --test it measure_wires -- --ignored --nocapture"]
fn measure_wires() {
    let variants = [
        "parallel.ep=2",
        "parallel.ep=2 parallel.wire=topk8:0.75",
        "parallel.ep=2 parallel.wire=topk8:0.85",
        "parallel.ep=2 parallel.wire=topk8:1",
        "parallel.ep=2 parallel.wire=topk:0.75",
        "parallel.ep=2 parallel.wire=topk:0.5 parallel.wire_backward=f16",
        "parallel.ep=2 parallel.wire=topk8:0.6 parallel.wire_backward=topk8:1",
        "parallel.ep=2 parallel.wire=topk8:0.5 parallel.wire_backward=topk8:0.85",
    ];
    (1..=3).for_each(|seed| print_losses(SMALL, seed, &variants));
}
