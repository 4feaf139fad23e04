//! Costs of training in all dimensions, and the search among layouts.

use moeworks_plan::cost::training::{PassTimes, bubble_seconds};
use moeworks_plan::{
    Cluster, Fabric, Mesh, Model, ModelParts, Pins, Practice, Precision, Recompute, ScheduleKind, ScheduleRequest,
    Skew, Times, TrainingJob, mesh_cost, search, verdict,
};

fn named(name: &str) -> ModelParts {
    ModelParts::from(&Model::named(name).expect("a bundled model"))
}

fn job(name: &str) -> TrainingJob {
    TrainingJob::new(named(name), 4096, 1024, Precision::Bf16)
}

fn fabric(name: &str, num_ranks: usize) -> Fabric {
    Fabric::new(&Cluster::named(name).expect("a bundled cluster"), num_ranks, Precision::Bf16)
}

/// Megatron-Core's report: 260.64 GFLOP a token of DeepSeek-V3 with one prediction layer, 250.45 without; 148.33 of
/// Qwen3-235B.
#[test]
fn operations_of_a_token_are_those_of_the_report() {
    let parts = named("deepseek-v3");
    let near = |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 1e-3, "{value} against {expected}");
    near(parts.training_flops(4096), 260.64e9);
    near(ModelParts { num_mtp_layers: 0, ..parts.clone() }.training_flops(4096), 250.45e9);
    near(parts.params(), 671.03e9);
    near(named("qwen3-235b").training_flops(4096), 148.33e9);
    near(named("qwen3-235b").training_flops(131_072), 735.0e9);
}

/// Parts say of every bundled model what its description says.
#[test]
fn parts_have_the_parameters_and_operations_of_the_model() {
    for (name, _) in Model::NAMES {
        let (model, parts) = (Model::named(name).expect("a model"), named(name));
        let share = parts.params() / model.params() as f64;
        assert!((share - 1.0).abs() < 2e-3, "{name}: {} parameters of {}", parts.params(), model.params());
        let share = parts.training_flops(model.sequence) / model.training_flops();
        assert!((share - 1.0).abs() < 3e-3, "{name}: operations {share}");
    }
}

/// Closed forms against schedules carried out.
#[test]
fn closed_forms_of_bubbles_are_what_schedules_take() {
    let (f, b, w) = (3.0, 4.0, 2.0);
    let kinds = [
        (ScheduleKind::Gpipe, 1),
        (ScheduleKind::OneFOneB, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::Interleaved, 4),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::DualPipe, 1),
    ];
    for (schedule, virtual_stages) in kinds {
        for (p, m) in [(2, 8), (4, 8), (8, 16), (4, 16)] {
            let v = virtual_stages as f64;
            // DualPipe's form holds where a pair takes as long as its parts, and those are alike.
            let [f, b, w] = if schedule == ScheduleKind::DualPipe { [1.0; 3] } else { [f, b, w] };
            let times = Times::uniform(f / v, b / v, w / v);
            let request = ScheduleRequest {
                virtual_stages: (virtual_stages > 1).then_some(virtual_stages),
                ..ScheduleRequest::new(p, m, &times)
            };
            let made = schedule.generate(&request).expect("sizes");
            let makespan = made.check().expect("a schedule").timeline(&times).expect("times").makespan;
            let mesh = Mesh { pp: p, schedule, virtual_stages, ..Mesh::new(1, 1, 1) };
            let passes = PassTimes { forward: f, input_grad: b, weight_grad: w, hidden_by_pairs: 0.0 };
            let closed = bubble_seconds(&mesh, m, &passes);
            let carried_out = makespan - m as f64 * (f + b + w);
            assert!((carried_out - closed).abs() < 1e-9, "{schedule} p {p} m {m}: {carried_out} against {closed}");
        }
    }
}

#[test]
fn memory_is_the_sum_of_its_parts_and_at_least_the_weights() {
    let (job, fabric) = (job("mixtral-8x22b"), fabric("h100", 128));
    for cost in search(&job, &fabric, &Pins::default()).found {
        let memory = cost.memory;
        let parts = [memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.received];
        assert!(parts.iter().all(|&part| part >= 0.0));
        assert!((memory.total() - parts.iter().sum::<f64>()).abs() <= 1.0, "{memory:?}");
        let copies = if cost.mesh.zero >= 3 { cost.mesh.dp as f64 } else { 1.0 };
        let share = job.parts.params() / (cost.mesh.num_ranks() as f64) / copies;
        assert!(memory.weights >= 2.0 * share, "{}: {memory:?}", cost.mesh);
    }
}

#[test]
fn more_bandwidth_and_more_compute_are_never_slower() {
    let (job, fabric) = (job("deepseek-v3"), fabric("h100", 256));
    let before = search(&job, &fabric, &Pins { pp: Some(8), ..Pins::default() });
    type Change = fn(&mut Fabric);
    let changes: [Change; 4] = [
        |fabric| fabric.levels[0].bytes_per_s *= 3.0,
        |fabric| fabric.levels[1].bytes_per_s *= 3.0,
        |fabric| fabric.rates.flops *= 3.0,
        |fabric| fabric.rates.memory_bytes_per_s *= 3.0,
    ];
    for change in changes {
        let mut better = fabric.clone();
        change(&mut better);
        for cost in before.found.iter().step_by(7) {
            let after = mesh_cost(&job, &better, &cost.mesh);
            assert!(after.time.total() <= cost.time.total() * (1.0 + 1e-12), "{}", cost.mesh);
        }
    }
}

#[test]
fn more_skew_is_never_faster_and_never_smaller() {
    let fabric = fabric("h100", 64);
    let mesh = Mesh { ep: 32, ..Mesh::new(1, 64, 32) };
    let cost = |skew: Skew| mesh_cost(&TrainingJob { skew, ..job("deepseek-v3") }, &fabric, &mesh);
    for make in [Skew::Variation as fn(f64) -> Skew, Skew::Zipf] {
        let costs: Vec<_> = (0..20).map(|i| cost(make(0.15 * f64::from(i)))).collect();
        for pair in costs.windows(2) {
            assert!(pair[1].time.total() >= pair[0].time.total(), "{:?}", pair[1].hot);
            assert!(pair[1].memory.total() >= pair[0].memory.total(), "{:?}", pair[1].hot);
        }
        assert!(costs[19].time.total() > 1.2 * costs[0].time.total());
        assert_eq!(costs[0].time, cost(Skew::Even).time, "no skew is an even load");
    }
}

#[test]
fn recorded_loads_make_the_hottest_rank() {
    let even = Skew::Recorded(vec![vec![1.0; 8]; 3]);
    assert_eq!(even.hot_rank(8, 4).time, 1.0);
    let layers = vec![vec![4.0, 0.0, 0.0, 0.0], vec![0.0, 0.0, 0.0, 4.0]];
    let hot = Skew::Recorded(layers).hot_rank(4, 2);
    assert_eq!((hot.time, hot.memory), (2.0, 1.0), "each layer waits for one rank, but memory evens out");
}

/// Parallel folding, table 3, in the layouts that it prints: folding > MCore > TP+EP+DP > FSDP.
#[test]
fn folded_layouts_are_faster_than_unfolded_ones_and_both_than_those_without_a_pipeline() {
    let fabric = fabric("h100", 128);
    let job = TrainingJob { global_batch: 256, practice: Practice::MEGATRON, ..job("mixtral-8x22b") };
    let piped = Mesh { pp: 8, schedule: ScheduleKind::Interleaved, virtual_stages: 7, ..Mesh::new(2, 8, 4) };
    let folding = Mesh { ep: 8, ..piped };
    let unfolded = Mesh { is_folded: false, etp: 2, ..piped };
    let flat = Mesh { is_folded: false, etp: 4, ..Mesh::new(4, 32, 8) };
    let fsdp = Mesh { zero: 3, ..Mesh::new(1, 128, 1) };
    let mfu = |mesh: &Mesh| mesh_cost(&job, &fabric, mesh).mfu;
    let all = [mfu(&folding), mfu(&unfolded), mfu(&flat), mfu(&fsdp)];
    assert!(all.windows(2).all(|pair| pair[0] > pair[1]), "{all:?}");
}

#[test]
fn expert_parallelism_stays_inside_the_node_where_no_pairs_hide_it() {
    let (job, fabric) = (job("mixtral-8x22b"), fabric("h100", 128));
    let pins = Pins { schedule: Some(ScheduleKind::OneFOneB), ..Pins::default() };
    let best = search(&job, &fabric, &pins).found[0];
    assert!(best.fits && best.mesh.ep * best.mesh.etp <= 8, "{}", best.mesh);
}

#[test]
fn utilisation_does_not_rise_with_the_number_of_ranks() {
    let mut before = f64::INFINITY;
    for num_ranks in [128, 256, 512, 1024] {
        let best = search(&job("mixtral-8x22b"), &fabric("h100", num_ranks), &Pins::default()).found[0];
        assert!(best.mfu <= before * (1.0 + 1e-9), "{num_ranks} ranks: {} after {before}", best.mfu);
        before = best.mfu;
    }
}

#[test]
fn any_number_of_ranks_is_searched_and_each_layout_uses_them_all() {
    for num_ranks in [1, 7, 12, 97, 100, 1000, 10_240] {
        let fabric = fabric("h100", num_ranks);
        let job = TrainingJob { global_batch: 16_384, ..job("mixtral-8x22b") };
        let found = search(&job, &fabric, &Pins::default());
        assert!(!found.found.is_empty(), "{num_ranks}");
        for cost in &found.found {
            assert!(cost.mesh.is_valid() && cost.mesh.num_ranks() == num_ranks, "{}", cost.mesh);
            assert!(cost.time.total().is_finite() && cost.time.total() > 0.0, "{}", cost.mesh);
        }
    }
    let few = TrainingJob { global_batch: 8, ..job("mixtral-8x22b") };
    let none = search(&few, &fabric("h100", 97), &Pins::default());
    assert!(none.found.is_empty() && none.lacks_sequences);
}

/// A reason is true if it holds when it is carried out.
#[test]
fn the_resource_that_binds_is_the_one_whose_double_saves_most() {
    let (job, fabric) = (job("mixtral-8x22b"), fabric("h100", 64));
    let found = search(&job, &fabric, &Pins::default());
    let verdict = verdict(&job, &fabric, &Pins::default(), &found).expect("a layout fits");
    assert_eq!(verdict.gains[0].resource, verdict.binds);
    assert!(verdict.gains.windows(2).all(|pair| pair[0].saved >= pair[1].saved));
    let mut slow = fabric.clone();
    slow.levels[1].bytes_per_s /= 200.0;
    let found = search(&job, &slow, &Pins { tp: Some(1), pp: Some(1), ..Pins::default() });
    let of_slow = moeworks_plan::verdict(&job, &slow, &Pins::default(), &found).expect("a layout fits");
    let saved = |what: &str| of_slow.gains.iter().find(|gain| gain.resource.contains(what)).expect("a level").saved;
    assert!(saved("cluster") > 0.4 && saved("compute") < 0.1, "{:?}", of_slow.sentences);
    for other in &verdict.alternatives {
        assert!(!other.cost.fits || other.cost.time.total() >= found_best(&job, &fabric), "{other:?}");
    }
}

fn found_best(job: &TrainingJob, fabric: &Fabric) -> f64 {
    search(job, fabric, &Pins::default()).found[0].time.total()
}

#[test]
fn pins_are_kept_and_only_trainable_layouts_are_ones_the_trainer_has() {
    let (job, fabric) = (job("mixtral-8x22b"), fabric("h100", 64));
    let pins = Pins { pp: Some(4), recompute: Some(Recompute::Full), ..Pins::default() };
    let found = search(&job, &fabric, &pins).found;
    assert!(!found.is_empty());
    assert!(found.iter().all(|cost| cost.mesh.pp == 4 && cost.mesh.recompute == Recompute::Full));
    let pins = Pins { only_trainable: true, ..Pins::default() };
    for cost in search(&job, &fabric, &pins).found {
        let layout = cost.mesh.trainable(8).expect("the trainer has it");
        assert_eq!(layout.check(64), Ok(()), "{}", cost.mesh);
        assert!(cost.mesh.options(8, 56, cost.microbatches).is_some_and(|text| text.contains("--dp")));
    }
}

/// A plan without what the trainer lacks needs the memory that the trainer's own model of memory says.
#[test]
fn memory_of_a_trainable_layout_is_that_of_the_trainers_model() {
    use moeworks_plan::{Layout, Tokens, Workload, rank_memory};
    let model = Model::named("mixtral-8x22b").expect("a model");
    let shape = model.shape(Precision::Bf16);
    let job = TrainingJob { global_batch: 64, ..job("mixtral-8x22b") };
    let fabric = fabric("h100", 64);
    for (tp, ep) in [(1, 1), (1, 8), (2, 8), (4, 8)] {
        let mesh = Mesh { ep, ..Mesh::new(tp, 64 / tp, ep) };
        let Some(layout) = mesh.trainable(8) else { continue };
        assert_eq!(layout, Layout::new(64 / ep, ep / tp, tp));
        let tokens = Tokens::Sequences { num: 64 / tp, len: 4096 };
        let workload = Workload { tokens, precision: Precision::Bf16, zero: 1, expert_gradient_bytes: 4 };
        let (ours, theirs) = (mesh_cost(&job, &fabric, &mesh).memory, rank_memory(&shape, &workload, &layout));
        for (ours, theirs) in [
            (ours.weights, theirs.weights),
            (ours.gradients, theirs.gradients),
            (ours.optimizer, theirs.optimizer),
            (ours.activations, theirs.activations),
            (ours.received, theirs.received),
        ] {
            assert!((ours - theirs).abs() <= 0.01 * theirs.max(1.0), "tp {tp} ep {ep}: {ours} against {theirs}");
        }
    }
}

#[test]
fn schedules_are_only_proposed_for_sizes_that_they_take() {
    let times = Times::uniform(1.0, 1.0, 1.0);
    let job = TrainingJob { global_batch: 96, ..job("mixtral-8x22b") };
    for schedule in ScheduleKind::ALL {
        let pins = Pins { schedule: Some(schedule), ..Pins::default() };
        let found = search(&job, &fabric("h100", 48), &pins).found;
        assert!(Pins::can_plan(schedule) || found.iter().all(|cost| cost.mesh.pp == 1), "{schedule}");
        for cost in found.iter().filter(|cost| cost.mesh.pp > 1 && cost.fits) {
            let stages = cost.mesh.virtual_stages;
            let request = ScheduleRequest {
                virtual_stages: (stages > 1).then_some(stages),
                ..ScheduleRequest::new(cost.mesh.pp, cost.microbatches, &times)
            };
            assert!(schedule.generate(&request).is_ok(), "{}", cost.mesh);
        }
    }
    let none = Pins { pp: Some(3), schedule: Some(ScheduleKind::DualPipe), ..Pins::default() };
    assert!(search(&job, &fabric("h100", 48), &none).found.is_empty(), "DualPipe takes an even number of ranks");
}
