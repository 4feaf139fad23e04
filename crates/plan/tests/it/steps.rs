//! Steps of described models on described clusters: closed forms, conservation, direction.

use moeworks_plan::cost::collectives;
use moeworks_plan::network::{ExpertShares, Loads, Places, Rows};
use moeworks_plan::schedule::Simulation;
use moeworks_plan::{
    Algorithm, Cluster, Exchange, Group, Layout, Level, Link, Model, Nodes, Placement, RankSpec, Routing, Schedule,
    ScheduleKind, ScheduleRequest, StepError, StepRequest, Topology, Wire, split_layers,
};
use proptest::prelude::*;

/// A cluster of levels of these sizes, each slower by ten than the one below.
fn cluster(sizes: &[usize]) -> Cluster {
    let level = |(index, &size): (usize, &usize)| {
        let level = Level::new(format!("level {index}"), size, 1e-5, 1e10 / 10_f64.powi(index as i32));
        Level { carries_outer: index > 0, ..level }
    };
    let mut cluster = Cluster::named("h100").unwrap();
    cluster.levels = sizes.iter().enumerate().map(level).collect();
    // Computation is operations alone: passes over memory take no time.
    cluster.device.memory_bytes_per_s = 1e30;
    cluster.device.attention_efficiency = None;
    cluster
}

const TINY: &str = "width = 64\nvocabulary = 256\nsequence = 128\n[[layers]]\nnum = 12\n\
                    attention = { heads = 8, head_dim = 8 }\nexperts = { num = 16, top_k = 2, width = 128 }\n";

fn tiny() -> Model {
    Model::parse(TINY).unwrap()
}

/// Simulates a step by a kind of schedule and gives the report to `of`.
fn with_step<T>(
    request: &StepRequest<'_>,
    kind: ScheduleKind,
    microbatches: usize,
    of: impl FnOnce(&moeworks_plan::StepReport<'_>, &Schedule) -> T,
) -> T {
    let pp = request.layout.pp;
    let costs = request.costs(pp * kind.virtual_stages(None).unwrap()).unwrap_or_else(|error| panic!("{error}"));
    let schedule = kind.generate(&ScheduleRequest::new(pp, microbatches, costs.times())).unwrap();
    let schedule = costs.written_out(&schedule).unwrap_or_else(|error| panic!("{error}"));
    let checked = schedule.check().unwrap_or_else(|error| panic!("{error}\n{schedule}"));
    of(&costs.simulate(&checked).unwrap(), &schedule)
}

fn shares(num_experts: usize, ranks: usize) -> ExpertShares {
    let nodes = Nodes::new(&vec![0; ranks]);
    ExpertShares::new(&Placement::sharded(num_experts, ranks), &vec![1.0; num_experts], &nodes)
}

/// A topology whose ranks have 80 GB/s of memory.
fn topology(node_sizes: Vec<usize>) -> Topology {
    Topology {
        node_sizes,
        rank: RankSpec { flops: 1e12, memory_bytes: 1e10, memory_bytes_per_s: 8e10 },
        node_link: Link { latency_s: 2e-6, bytes_per_s: 1e10 },
        cluster_link: Link { latency_s: 5e-6, bytes_per_s: 1e9 },
        numa_cores: Vec::new(),
    }
}

#[test]
fn an_all_to_all_of_one_node_takes_what_its_closed_form_says() {
    for ranks in [2, 4, 8] {
        let topology = topology(vec![ranks]);
        let cluster = Cluster::from(&topology);
        let places = Places::new(&cluster, ranks);
        let rows = collectives::Rows { tokens: 1000, top_k: 2, num_experts: 16, row_bytes: 128 };
        let group = Group::of(&topology, &(0..ranks).collect::<Vec<_>>());
        let closed = collectives::all_to_all(&topology, group, Algorithm::Linear, &rows).seconds;
        let rows = Rows { bytes: rows.bytes(), top_k: 2, num_experts: 16 };
        let exchange = Exchange::plain(Wire::Bf16);
        let parts = places.all_to_all(&Layout::new(1, ranks, 1), 0, &exchange, &rows, &shares(16, ranks));
        let seconds: f64 = parts.iter().map(Loads::seconds).sum();
        assert!((seconds / closed - 1.0).abs() < 1e-12, "{ranks} ranks: {seconds} for {closed}");
    }
}

#[test]
fn hops_within_and_between_nodes_take_what_their_closed_forms_say() {
    let topology = topology(vec![4; 4]);
    let cluster = Cluster::from(&topology);
    let places = Places::new(&cluster, 16);
    let rows = collectives::Rows { tokens: 1000, top_k: 2, num_experts: 16, row_bytes: 128 };
    let group = Group::of(&topology, &(0..16).collect::<Vec<_>>());
    for algorithm in [Algorithm::Hierarchical, Algorithm::TwoHop] {
        let closed = collectives::all_to_all(&topology, group, algorithm, &rows).seconds;
        let exchange = Exchange { algorithm, ..Exchange::plain(Wire::Bf16) };
        let ours = Rows { bytes: rows.bytes(), top_k: 2, num_experts: 16 };
        let parts = places.all_to_all(&Layout::new(1, 16, 1), 0, &exchange, &ours, &shares(16, 16));
        let seconds: f64 = parts.iter().map(Loads::seconds).sum();
        assert!((seconds / closed - 1.0).abs() < 1e-12, "{algorithm:?}: {seconds} for {closed}");
    }
}

#[test]
fn an_all_reduce_takes_what_its_closed_form_says() {
    for node_sizes in [vec![8], vec![4, 4], vec![2; 8]] {
        let topology = topology(node_sizes);
        let cluster = Cluster::from(&topology);
        let num_ranks = topology.num_ranks();
        let places = Places::new(&cluster, num_ranks);
        let ranks: Vec<usize> = (0..num_ranks).collect();
        let closed = collectives::all_reduce(&topology, Group::of(&topology, &ranks), 1e6).seconds;
        let seconds: f64 = places.all_reduce(&[ranks], 1e6).iter().map(Loads::seconds).sum();
        assert!((seconds / closed - 1.0).abs() < 1e-12, "{seconds} for {closed}");
    }
}

#[test]
fn the_all_to_all_of_a_torus_grows_with_the_root_of_its_ranks() {
    let seconds = |num_ranks: usize| {
        let cluster = Cluster::named("tpu-v3").unwrap().resized(num_ranks);
        let places = Places::new(&cluster, num_ranks);
        let rows = Rows { bytes: 1e9, top_k: 2, num_experts: 2048 };
        let layout = Layout::new(1, num_ranks, 1);
        let parts = places.all_to_all(&layout, 0, &Exchange::plain(Wire::Bf16), &rows, &shares(2048, num_ranks));
        parts.iter().map(Loads::seconds).sum::<f64>()
    };
    // GShard measured 9 times from 16 to 2,048 partitions; the root is 11.3.
    let growth = seconds(2048) / seconds(32);
    assert!((growth / 8.0 - 1.0).abs() < 0.1, "{growth}");
}

#[test]
fn one_rank_one_layer_and_one_microbatch_compute_and_nothing_else() {
    let model = tiny();
    let cluster = cluster(&[1, 1, 1]);
    let request = StepRequest::new(&model, &cluster, Layout::new(1, 1, 1), 128);
    with_step(&request, ScheduleKind::OneFOneB, 1, |report, _| {
        let flops = 128.0 * model.training_flops();
        let computed = report.simulation.timeline.makespan * cluster.device.flops(moeworks_plan::Precision::Bf16);
        // Backward computes the scores of attention twice over, and none for weights: the same as three forwards.
        assert!((computed / flops - 1.0).abs() < 1e-12);
        assert_eq!((report.hidden, report.simulation.timeline.bubble(), report.tokens), (None, 0.0, 128));
        assert!(report.simulation.levels.iter().all(|level| level.sent == 0.0));
    });
}

fn spans_do_not_overlap(simulation: &Simulation<'_>, schedule: &Schedule) -> bool {
    let of_rank = |rank: usize| {
        let spans = schedule.ranks[rank].iter().zip(&simulation.timeline.spans[rank]);
        let computed: Vec<_> =
            spans.filter(|(entry, _)| entry.first().kind.is_compute()).map(|(_, span)| span).collect();
        computed.windows(2).all(|pair| pair[0].end <= pair[1].start + 1e-12)
    };
    (0..schedule.num_ranks()).all(of_rank)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// Bytes that are sent are received, no link carries more than its bandwidth, no rank computes two things at
    /// once, and a step takes no less than any rank's work and no less than on faster links.
    #[test]
    fn steps_keep_what_is_conserved(
        kind in 0..12_usize,
        sizes in (1..4_usize, 1..4_usize, 1..4_usize),
        [half, dp, ep_log, tp_log] in [1..3_usize, 1..3, 0..3, 0..2],
        rails in 1..4_usize,
        is_shared in any::<bool>(),
        is_adaptive in any::<bool>(),
        oversubscription in 1.0..4.0,
        algorithm in 0..3_usize,
        hot in 1.0..9.0,
    ) {
        let model = tiny();
        let kind = ScheduleKind::ALL[kind];
        let layout = Layout::new(dp, 1 << ep_log, 1 << tp_log).with_pipeline(2 * half);
        let mut cluster = cluster(&[sizes.0, sizes.1, sizes.2]).resized(layout.num_ranks());
        let shared_by = if is_shared { sizes.0 } else { 1 };
        let routing = if is_adaptive { Routing::Adaptive } else { Routing::Fixed };
        let slow = Level { rails, shared_by, routing, oversubscription, ..cluster.levels[1].clone() };
        cluster.levels[1] = slow;
        prop_assert!(cluster.check().is_ok());
        let algorithm = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop][algorithm];
        let mut loads = vec![1.0; 16];
        loads[3] = hot;
        let request = StepRequest {
            exchange: Exchange { algorithm, ..Exchange::plain(Wire::Bf16) },
            expert_loads: Some(&loads),
            ..StepRequest::new(&model, &cluster, layout, 64)
        };
        let step = with_step(&request, kind, 4 * half, |report, schedule| {
            let simulation = &report.simulation;
            for level in &simulation.levels {
                prop_assert!((level.sent - level.received).abs() <= 1e-9 * level.sent, "{:?}", simulation.levels);
            }
            for link in &simulation.links {
                prop_assert!(link.most <= 1.0 + 1e-9 && link.busy_s <= report.step_s * (1.0 + 1e-9), "{link:?}");
            }
            prop_assert!(spans_do_not_overlap(simulation, schedule));
            let busiest = simulation.timeline.busy.iter().copied().fold(0.0, f64::max);
            prop_assert!(simulation.timeline.makespan >= busiest && report.step_s >= simulation.timeline.makespan);
            prop_assert!(simulation.timeline.exposed <= simulation.timeline.communication * (1.0 + 1e-9));
            prop_assert!(report.peak_memory.iter().zip(&report.state_bytes).all(|(peak, state)| peak > state));
            Ok(report.step_s)
        })?;
        let mut fast_cluster = cluster.clone();
        for level in &mut fast_cluster.levels {
            level.bytes_per_s = 1e18;
            level.latency_s = 0.0;
        }
        let fast = StepRequest { cluster: &fast_cluster, ..request.clone() };
        let least = with_step(&fast, kind, 4 * half, |report, _| report.step_s);
        // Copies in device memory remain.
        prop_assert!(least <= step * (1.0 + 1e-6), "{} on fast links, {} here", least, step);
    }
}

#[test]
fn layers_are_shared_out_so_that_the_head_does_not_hold_the_others_up() {
    let (model, cluster) = (Model::named("deepseek-v3").unwrap(), Cluster::named("h800").unwrap());
    let request = StepRequest::new(&model, &cluster, Layout::new(1, 64, 1).with_pipeline(16), 4096);
    let costs = request.costs(16).unwrap();
    let totals: Vec<f64> = costs.times().stages.iter().map(moeworks_plan::StageTimes::total).collect();
    let mean = totals.iter().sum::<f64>() / 16.0;
    let most = totals.iter().copied().fold(0.0, f64::max);
    assert!(most < 1.35 * mean, "{most} of {mean}: {totals:?}");
    assert_eq!(split_layers(&[1.0; 7], 3).iter().sum::<usize>(), 7);
    assert_eq!(split_layers(&[1.0, 1.0, 1.0, 9.0], 2), [3, 1]);
}

#[test]
fn replicas_of_a_pipeline_take_no_more_events() {
    let (model, cluster) = (Model::named("deepseek-v3").unwrap(), Cluster::named("h800").unwrap());
    let events = |dp: usize| {
        let layout = Layout::new(dp, 8, 1).with_pipeline(4);
        let request = StepRequest::new(&model, &cluster, layout, 4096);
        with_step(&request, ScheduleKind::OneFOneB, 8, |report, _| report.simulation.num_events)
    };
    assert_eq!(events(2), events(16));
}

#[test]
fn ten_thousand_ranks_are_simulated_by_their_stage_groups() {
    let model = Model::named("deepseek-v3").unwrap();
    let cluster = Cluster::named("h800").unwrap().resized(10_240);
    let request = StepRequest::new(&model, &cluster, Layout::new(10, 64, 1).with_pipeline(16), 4096);
    with_step(&request, ScheduleKind::OneFOneB, 100, |report, _| {
        assert_eq!((report.num_ranks, report.tokens), (10_240, 10_240 / 16 * 100 * 4096));
        assert!(report.simulation.links.len() < 200, "{} links", report.simulation.links.len());
        assert!(report.simulation.num_events > 50_000);
        assert!((0.05..0.5).contains(&report.mfu), "{}", report.mfu);
    });
}

#[test]
#[ignore = "prints events a second; run by hand in an optimised build"]
fn events_a_second() {
    let model = Model::named("deepseek-v3").unwrap();
    let cluster = Cluster::named("h800").unwrap().resized(10_240);
    let request = StepRequest::new(&model, &cluster, Layout::new(10, 64, 1).with_pipeline(16), 4096);
    let costs = request.costs(16).unwrap();
    let schedule = ScheduleKind::OneFOneB.generate(&ScheduleRequest::new(16, 1000, costs.times())).unwrap();
    let schedule = costs.written_out(&schedule).unwrap();
    let checked = schedule.check().unwrap();
    let start = std::time::Instant::now();
    let transfers = costs.transfers(&schedule);
    let with_links = start.elapsed();
    let simulation = checked.simulate(costs.times(), &transfers).unwrap();
    let seconds = (start.elapsed() - with_links).as_secs_f64();
    let events = simulation.num_events as f64;
    println!("links in {with_links:?}; {events} events in {seconds:.3} s, {:.0} a second", events / seconds);
}

#[test]
fn skewed_experts_slow_the_step_and_replicas_of_the_hot_one_help() {
    let model = tiny();
    let cluster = cluster(&[4, 2]);
    let mut loads = vec![1.0; 16];
    let even = StepRequest::new(&model, &cluster, Layout::new(1, 8, 1), 4096);
    let seconds = |request: &StepRequest<'_>| with_step(request, ScheduleKind::OneFOneB, 2, |report, _| report.step_s);
    loads[0] = 15.0;
    let skewed = StepRequest { expert_loads: Some(&loads), ..even.clone() };
    let mut placement = Placement::sharded(16, 8);
    placement.replicate(0, &(0..8).collect::<Vec<_>>());
    let replicated = StepRequest { placement: Some(&placement), ..skewed.clone() };
    let [even, skewed, replicated] = [&even, &skewed, &replicated].map(seconds);
    assert!(even < skewed && replicated < skewed, "{even} {replicated} {skewed}");
}

/// The speed-up of domains of `domain` data centres over plain expert parallelism, on `centres` of them.
fn gain(centres: usize, domain: usize, gbit_per_s: f64) -> f64 {
    let model = Model::parse(
        "width = 1024\nvocabulary = 50000\nsequence = 1024\n[[layers]]\nnum = 12\n\
         attention = { heads = 16, head_dim = 64 }\nexperts = { num = 8000, top_k = 2, width = 128 }\n",
    );
    let mut model = model.unwrap();
    for group in &mut model.groups {
        group.experts.as_mut().unwrap().num = 8 * centres;
    }
    let mut cluster = Cluster::named("1000-datacentres").unwrap().resized(8 * centres);
    cluster.levels[1].bytes_per_s = gbit_per_s * 1e9 / 8.0;
    let plain = StepRequest::new(&model, &cluster, Layout::new(1, 8 * centres, 1), 8192);
    let domains = StepRequest { domain, expert_compression: 50.0, ..plain.clone() };
    let seconds = |request: &StepRequest<'_>| {
        with_step(request, ScheduleKind::OneFOneB, 1, |report, _| report.simulation.timeline.makespan)
    };
    seconds(&plain) / seconds(&domains)
}

#[test]
fn domains_of_data_centres_gain_more_on_slower_lines() {
    let gains = [10.0, 5.0, 2.0].map(|gbit| gain(40, 20, gbit));
    assert!(gains[0] > 1.2 && gains[0] < gains[1] && gains[1] < gains[2], "{gains:?}");
}

#[test]
fn the_gain_falls_with_data_centres_at_fixed_domains_and_not_at_fixed_shares() {
    let at_fixed_domains = [8, 40, 200].map(|centres| gain(centres, 4, 10.0));
    assert!(at_fixed_domains[0] > at_fixed_domains[1] && at_fixed_domains[1] > at_fixed_domains[2]);
    assert!(at_fixed_domains[2] > 1.0, "{at_fixed_domains:?}");
    let at_fixed_shares = [8, 16, 40].map(|centres| gain(centres, centres / 2, 10.0));
    assert!(at_fixed_shares[2] >= at_fixed_shares[0], "{at_fixed_shares:?}");
}

#[test]
fn a_step_that_does_not_fit_is_refused_in_one_line() {
    let (model, cluster) = (tiny(), cluster(&[4, 2]));
    let of = |layout: Layout, change: &dyn Fn(&mut StepRequest<'_>), stages: usize| {
        let mut request = StepRequest::new(&model, &cluster, layout, 64);
        change(&mut request);
        let error: StepError = request.costs(stages).unwrap_err();
        error.to_string()
    };
    let keep: &dyn Fn(&mut StepRequest<'_>) = &|_| {};
    let whole = Layout::new(1, 1, 1);
    for (message, part) in [
        (of(Layout::new(3, 3, 1), keep, 1), "ranks = dp 3 x ep 3 x tp 1 x pp 1 = 9: cluster h100 has 8"),
        (of(Layout::new(0, 1, 1), keep, 1), "dp = 0: must be from 1"),
        (of(Layout::new(1 << 30, 1 << 30, 1 << 30), keep, 1), "cluster h100 has 8"),
        (of(whole.with_pipeline(4), keep, 13), "stages = 13: model has 12 layers"),
        (of(whole, &|request| request.tokens = 0, 1), "tokens = 0"),
        (of(whole, &|request| request.zero = 4, 1), "zero = 4: must be from 0 to 3"),
        (of(whole, &|request| request.exchange.chunks = 65, 1), "chunks = 65: must be from 1 to 64"),
        (of(whole, &|request| request.expert_loads = Some(&[1.0]), 1), "expert loads = 1: must be 16"),
        (of(Layout::new(1, 8, 1), &|request| request.domain = 3, 1), "domain = 3: must divide the 2 units"),
    ] {
        assert!(message.contains(part) && !message.contains('\n'), "{message}");
    }
    let cluster = cluster.resized(64);
    let request = StepRequest::new(&model, &cluster, Layout::new(1, 32, 1), 64);
    assert!(request.costs(1).unwrap_err().to_string().contains("must be at most the 16 experts of model"));
}

#[test]
fn chunks_hide_all_to_alls_under_experts_and_send_the_same_bytes_with_more_latencies() {
    let model = tiny();
    let slow = cluster(&[4, 2]);
    let mut prompt = slow.clone();
    prompt.levels.iter_mut().for_each(|level| level.latency_s = 0.0);
    let step = |cluster: &Cluster, chunks: usize| {
        let request = StepRequest::new(&model, cluster, Layout::new(1, 8, 1), 4096);
        let request = StepRequest { exchange: Exchange { chunks, ..request.exchange }, ..request };
        with_step(&request, ScheduleKind::OneFOneB, 2, |report, _| {
            (report.step_s, report.simulation.levels[1].sent, report.hidden.unwrap())
        })
    };
    let (one, four) = (step(&prompt, 1), step(&prompt, 4));
    assert!(four.0 < one.0 && (four.1 / one.1 - 1.0).abs() < 1e-12, "{one:?} {four:?}");
    assert!(four.2 > one.2, "{one:?} {four:?}");
    // 12 layers with four all-to-alls in each of two microbatches; three more latencies of 10 us in each.
    let added = (step(&slow, 4).0 - step(&slow, 1).0) - (four.0 - one.0);
    assert!((added / (3.0 * 1e-5 * 12.0 * 4.0 * 2.0) - 1.0).abs() < 0.1, "{added}");
}

#[test]
fn chunks_are_refused_where_pairs_hide_all_to_alls() {
    let model = tiny();
    let cluster = cluster(&[4, 4]);
    let layout = Layout::new(1, 8, 1).with_pipeline(2);
    let request = StepRequest::new(&model, &cluster, layout, 128);
    let request = StepRequest { exchange: Exchange { chunks: 2, ..request.exchange }, ..request };
    let costs = request.costs(2).unwrap();
    let schedule = ScheduleKind::OneFOneBOverlap.generate(&ScheduleRequest::new(2, 4, costs.times())).unwrap();
    let error = costs.written_out(&schedule).unwrap_err().to_string();
    assert_eq!(error, "chunks = 2: must be 1: the pairs of this schedule hide all-to-alls already");
}

#[test]
fn ranks_that_share_a_sequence_wait_for_keys_and_values_that_attention_does_not_hide() {
    let model = tiny();
    let slow = cluster(&[2, 2]);
    let mut fast = slow.clone();
    fast.levels.iter_mut().for_each(|level| (level.bytes_per_s, level.latency_s) = (1e18, 0.0));
    let step = |cluster: &Cluster, context: usize| {
        let request = StepRequest { context, ..StepRequest::new(&model, cluster, Layout::new(4, 1, 1), 128) };
        with_step(&request, ScheduleKind::OneFOneB, 2, |report, _| report.step_s)
    };
    assert!(step(&slow, 4) > step(&slow, 2) && step(&slow, 2) > step(&slow, 1));
    assert_eq!(step(&fast, 4), step(&fast, 1));
    let request = StepRequest { context: 3, ..StepRequest::new(&model, &slow, Layout::new(4, 1, 1), 128) };
    assert_eq!(request.costs(1).unwrap_err().to_string(), "cp = 3: must divide the 4 ranks of dp x ep");
}
