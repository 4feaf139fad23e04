//! Every routing scheme, through the program: training, bit-exact resumption, evaluation and generation.

use std::fs;
use std::path::Path;

use moeworks_moe::RouterKind;

use crate::program::{Workplace, assert_success, losses, state, stderr, stdout};

/// The settings of a scheme, each after `--set`; the first names it.
const SCHEMES: [&[&str]; 21] = [
    &["model.router.kind=switch"],
    &["model.router.kind=noisy_top_k"],
    &["model.router.kind=gshard", "model.router.local_group=32"],
    &["model.router.kind=cosine", "model.router.cosine_dim=8"],
    &["model.router.kind=gumbel"],
    &["model.router.kind=expert_choice"],
    &["model.router.kind=base"],
    &["model.router.kind=sinkhorn"],
    &["model.router.kind=hash"],
    &["model.router.kind=top_p"],
    &["model.router.kind=relu"],
    &["model.router.kind=hierarchical", "model.router.tree='2'", "model.router.tree_beam=1"],
    &["model.router.kind=low_rank", "model.router.low_rank_dim=3"],
    &["model.router.kind=dense_to_sparse", "model.router.dense_share=1"],
    &["model.router.kind=forced", "model.router.forced_load=zipf"],
    &["model.router.scores=sigmoid", "model.router.expert_bias=true", "train.balance=none", "train.sequence_coef=1e-4"],
    &[
        "model.router.num_groups=2",
        "model.router.top_groups=1",
        "train.device_coef=0.05",
        "train.communication_coef='linear 0.02 to 0 over 0.5'",
        "model.router.routed_scale=2.5",
    ],
    &[
        "model.router.overflow=priority",
        "model.capacity_factor=1",
        "model.router.noise_std=0.25",
        "train.load_coef=0.01",
    ],
    &["model.router.overflow=reroute", "model.capacity_factor=1", "model.router.random_share=0.5"],
    &[
        "model.router.zero_experts=1",
        "model.router.copy_experts=1",
        "model.router.constant_experts=2",
        "model.router.null_experts=1",
    ],
    &[
        "model.router.modality_boundaries=97",
        "model.router.modality_experts='1, 1'",
        "train.local_entropy_coef=0.01",
        "train.global_entropy_coef='linear 0.1 to 0 over 0.5'",
        "model.router.input_dropout=0.1",
    ],
];

fn settings<'a>(scheme: &[&'a str]) -> Vec<&'a str> {
    scheme.iter().flat_map(|setting| ["--set", setting]).collect()
}

/// Copies a run's folder.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).expect("copied");
        }
    }
}

#[test]
fn every_scheme_trains_resumes_evaluates_and_generates() {
    for (i, scheme) in SCHEMES.into_iter().enumerate() {
        let work = Workplace::new();
        let precision = if i % 2 == 0 { "train.precision=bf16" } else { "train.precision=f32" };
        let mut more = settings(scheme);
        more.extend(["--set", precision]);
        assert_success(&work.train("whole", 6, &more));
        // The copy is in the state of a run killed in step 6.
        copy(&work.path("whole"), &work.path("cut"));
        fs::remove_dir_all(work.path("cut/checkpoints/step-00000006")).expect("removed");
        assert_success(&work.run(&["train", "--resume", "cut"]));
        assert_eq!(losses(&work.path("whole")), losses(&work.path("cut")), "{scheme:?}");
        assert_eq!(state(&work.path("whole"), 6), state(&work.path("cut"), 6), "{scheme:?}");
        let losses: Vec<f64> =
            losses(&work.path("whole")).iter().map(|(_, loss)| loss.parse().expect("a loss")).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()) && losses[5] < losses[0], "{scheme:?}: {losses:?}");
        let evaluated = work.run(&["evaluate", "whole", "--data", "text.txt", "--max-sequences", "2", "--json"]);
        assert_success(&evaluated);
        assert!(stdout(&evaluated).contains("perplexity"), "{scheme:?}");
        assert_success(&work.run(&["generate", "whole", "--prompt", "Line", "--max-tokens", "4"]));
    }
}

#[test]
fn every_kind_of_the_table_is_among_the_schemes() {
    for kind in RouterKind::ALL.iter().skip(1) {
        let setting = format!("model.router.kind={}", kind.name());
        assert!(SCHEMES.iter().any(|scheme| scheme[0] == setting), "{setting}");
    }
}

/// The losses equal those of one rank up to rounding, and they fall.
#[test]
fn low_rank_dense_to_sparse_and_forced_routing_learn_on_two_ranks_what_they_learn_on_one() {
    const TOLERANCE: f64 = 2e-4;
    for scheme in [&["low_rank", "low_rank_normalize=true"][..], &["dense_to_sparse", "dense_share=0.8"], &["forced"]] {
        let work = Workplace::new();
        let kind = format!("model.router.kind={}", scheme[0]);
        let mut settings = vec!["--set".to_owned(), kind];
        settings.extend(scheme[1..].iter().flat_map(|more| ["--set".to_owned(), format!("model.router.{more}")]));
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        assert_success(&work.train("one", 6, &settings));
        assert_success(&work.train("two", 6, &[&settings[..], &["--ep", "2"]].concat()));
        let numbers = |run| losses(&work.path(run)).into_iter().map(|(_, loss)| loss.parse().expect("a loss"));
        let (one, two): (Vec<f64>, Vec<f64>) = (numbers("one").collect(), numbers("two").collect());
        assert_eq!(one.len(), 6);
        assert!(one[5] < one[0], "{scheme:?}: {one:?}");
        for (one, two) in one.iter().zip(&two) {
            assert!((one - two).abs() <= TOLERANCE * one, "{scheme:?}: {one} on one rank, {two} on two");
        }
    }
}

#[test]
fn a_scheme_brings_what_it_was_published_with_and_gives_way_to_what_is_said() {
    let work = Workplace::new();
    let print = |more: &[&str]| {
        let mut args = vec!["train", "--print-config"];
        args.extend(more);
        let output = work.run(&args);
        assert_success(&output);
        stdout(&output)
    };
    let switch = print(&["--set", "model.router.kind=switch"]);
    for line in ["kind = \"switch\"", "top_k = 1", "capacity_factor = 1.25", "jitter = 0.01"] {
        assert!(switch.contains(line), "{line} in\n{switch}");
    }
    let given = print(&["--set", "model.capacity_factor=2", "--set", "model.router.kind=switch"]);
    assert!(given.contains("capacity_factor = 2.0"), "{given}");
    let file = work.file(
        "c.toml",
        "[model]\njitter = 0.5\n[model.router]\nkind = \"switch\"\n[train]\nz_coef = \"cosine 0.01 to 0.001\"\n",
    );
    let from_file = print(&["--config", &file]);
    for line in ["jitter = 0.5", "top_k = 1", "z_coef = \"cosine 0.01 to 0.001 over 1\""] {
        assert!(from_file.contains(line), "{line} in\n{from_file}");
    }
    // The printed configuration can be used unchanged.
    let again = work.file("again.toml", &from_file);
    assert_eq!(print(&["--config", &again]), from_file);
}

#[test]
fn a_wrong_setting_of_the_router_is_one_line() {
    let work = Workplace::new();
    for (setting, expected) in [
        ("model.router.kind=best", "model.router.kind = \"best\": unknown variant"),
        ("model.router.kin=top_k", "model.router.kin: unknown setting; near names: model.router.kind"),
        ("model.router=1", "model.router: unknown setting"),
        ("model.router.top_p=0", "model.router.top_p = 0: must be above 0 and at most 1"),
        ("model.router.temperature=0", "model.router.temperature = 0: must be a number above 0"),
        ("model.router.modality_experts=x", "model.router.modality_experts = \"x\": must be whole numbers"),
        ("model.router.dense_shape=fast", "model.router.dense_shape = \"fast\": unknown variant"),
        ("model.router.low_rank_dim=-1", "model.router.low_rank_dim = -1: must be a whole number of at least 0"),
        ("model.router.forced_hot_share=2", "model.router.forced_hot_share = 2: must be a number from 0 to 1"),
        ("model.router.expert_bias=2", "model.router.expert_bias = 2: must be true or false"),
        ("model.router.tree='3,x'", "model.router.tree = \"3,x\": must be whole numbers"),
        ("train.z_coef=linear", "train.z_coef = \"linear\": must be a number or a ramp"),
        ("train.z_coef=-1", "train.z_coef = -1: must be a number of at least 0"),
        ("train.device_coef=0.1", "train.device_coef = 0.1: needs model.router.num_groups"),
        ("train.load_coef=0.1", "train.load_coef = 0.1: must be 0 without noise on the logits"),
        ("train.communication_coef=step 0 to 1 over 0.5", "needs model.router.num_groups"),
    ] {
        let output = work.train("run", 1, &["--set", setting]);
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{setting}: {shown}");
        assert!(shown.contains(expected) && shown.trim().lines().count() == 1, "{setting}: {shown}");
    }
}
