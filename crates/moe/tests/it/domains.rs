//! Domains of ranks that gather each other's experts: results are those of plain expert parallelism, and over slow
//! links an exchange takes the time that the model of HybridEP foretells.

use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, Throttled, try_run_ranks};
use moeworks_moe::{
    DomainBase, DomainOptions, EpOptions, ExpertRanks, LevelDomain, LossGrad, MoeConfig, MoeLayer, MoeWeights,
    RouterInput, WgradTarget,
};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{
    Algorithm, DomainLevel, DomainWork, Exchange, Link, Links, Placement, Wire, choose_domains, domain_seconds,
};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config;

const NUM_RANKS: usize = 4;

/// A layer, the tokens of a rank, and the domains.
#[derive(Clone)]
struct Case {
    config: MoeConfig,
    num_tokens: usize,
    placement: Placement,
    domain: Option<DomainOptions>,
    has_biases: bool,
}

/// The results of a step on a rank: output, gradient of the input, and the gradients of experts.
struct Step {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// By expert.
    grads: Vec<(usize, Vec<f32>)>,
}

fn inputs(ctx: &Context, case: &Case, rank: usize) -> Tensor {
    let random = Random::new(2, Purpose::Test, rank as u64);
    let values: Vec<f32> = (0..case.num_tokens * case.config.width).map(|i| random.normal(i as u64)).collect();
    Tensor::from_slice(ctx.pool(), &[case.num_tokens, case.config.width], &values)
}

fn weights(ctx: &Context, case: &Case) -> MoeWeights {
    let mut weights = MoeWeights::random(ctx, &case.config, 1, 0.3);
    let bias = |len: usize, stream: u64| {
        let mut bias = ctx.zeros(&[case.config.num_experts, len], DType::F32);
        moeworks_ops::elementwise::fill_normal(ctx, &Random::new(9, Purpose::Init, stream), 0.5, &mut bias);
        bias
    };
    let af = weights.gate_up.shape()[1];
    weights.biases = case.has_biases.then(|| (bias(af, 1), bias(case.config.width, 2)));
    weights
}

fn ranks(comm: &dyn Communicator, case: &Case) -> Result<ExpertRanks, CommError> {
    let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a part"));
    let exchange = Exchange { algorithm: Algorithm::Linear, ..Exchange::plain(Wire::F32) };
    let options = EpOptions { domain: case.domain.clone(), ..exchange.into() };
    ExpertRanks::new(part()?, part()?, case.placement.clone(), options)
}

/// Runs a step of a layer on a rank, with the gradients of two passes added up.
fn step(comm: &dyn Communicator, case: &Case) -> Result<Step, CommError> {
    let ctx = Context::cpu(1);
    let ranks = ranks(comm, case)?;
    let layer = MoeLayer::expert_parallel(case.config.clone(), ranks.layer(0)).expect("a layer");
    let weights = weights(&ctx, case).select_experts(&ctx, ranks.layer(0).held());
    let x = inputs(&ctx, case, comm.rank());
    let mut grads = weights.clone();
    grads.tensors_mut().into_iter().for_each(|grad| *grad = ctx.zeros(grad.shape(), DType::F32));
    let mut results = None;
    for write in [Write::Replace, Write::Add] {
        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
        let (dx, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
        task.run(&ctx, WgradTarget::new(write, &mut grads));
        results = Some((y.f32s().to_vec(), dx.f32s().to_vec()));
    }
    ranks.failure().map_or(Ok(()), Err)?;
    let mut of_experts = Vec::new();
    for (place, &expert) in ranks.layer(0).held().iter().enumerate() {
        let biases = grads.biases.iter().flat_map(|(gate_up, down)| [gate_up, down]);
        let row = |tensor: &Tensor| {
            let size = tensor.len() / tensor.shape()[0];
            tensor.f32s()[place * size..(place + 1) * size].to_vec()
        };
        of_experts.push((expert, [&grads.gate_up, &grads.down].into_iter().chain(biases).flat_map(row).collect()));
    }
    let (y, dx) = results.expect("two passes");
    Ok(Step { y, dx, grads: of_experts })
}

fn on_ranks(case: &Case) -> Vec<Step> {
    try_run_ranks(&RankOptions::new(NUM_RANKS), |comm| step(comm, case)).expect("ranks talk")
}

/// Sums the gradients of each expert over the ranks that hold it.
fn summed(steps: &[Step], num_experts: usize) -> Vec<Vec<f32>> {
    let mut sums: Vec<Vec<f32>> = vec![Vec::new(); num_experts];
    for (expert, grads) in steps.iter().flat_map(|step| &step.grads) {
        let sum = &mut sums[*expert];
        sum.resize(grads.len(), 0.0);
        sum.iter_mut().zip(grads).for_each(|(sum, x)| *sum += x);
    }
    sums
}

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let error = found.iter().zip(expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(error <= tolerance * largest, "{what}: off by {error} of {largest}");
}

fn domains(size: usize) -> Option<DomainOptions> {
    Some(DomainOptions::consecutive(NUM_RANKS, size))
}

/// Returns one domain of all ranks, whose experts are compressed.
fn compressed(keep: f64, base: DomainBase) -> Option<DomainOptions> {
    Some(DomainOptions { keep, base, ..DomainOptions::consecutive(NUM_RANKS, NUM_RANKS) })
}

#[test]
fn domains_of_any_size_give_the_results_of_plain_expert_parallelism() {
    let mut replicated = Placement::sharded(6, NUM_RANKS);
    replicated.replicate(0, &[1, 3]);
    let uneven = "placement experts=6 ranks=4\n0: 3\n1: 3\n2: 0\n3: 3\n4: 2\n5: 0\n".parse().expect("a placement");
    for placement in [Placement::sharded(6, NUM_RANKS), replicated, uneven] {
        for has_biases in [false, true] {
            let case = |domain| Case {
                config: config(16, 24, 6, 2),
                num_tokens: 13,
                placement: placement.clone(),
                domain,
                has_biases,
            };
            let plain = on_ranks(&case(None));
            for size in [2, 4] {
                let what = format!("domains of {size}, biases {has_biases}, {placement}");
                let found = on_ranks(&case(domains(size)));
                for (found, plain) in found.iter().zip(&plain) {
                    assert_close(&found.y, &plain.y, 1e-5, &format!("output: {what}"));
                    assert_close(&found.dx, &plain.dx, 1e-5, &format!("gradient of the input: {what}"));
                }
                for (found, plain) in summed(&found, 6).iter().zip(&summed(&plain, 6)) {
                    assert_close(found, plain, 1e-5, &format!("gradient of an expert: {what}"));
                }
            }
        }
    }
}

#[test]
fn compressed_experts_come_closer_to_the_exact_output_the_more_travels() {
    let case = |domain| Case {
        config: config(16, 24, 8, 2),
        num_tokens: 40,
        placement: Placement::sharded(8, NUM_RANKS),
        domain,
        has_biases: false,
    };
    let exact: Vec<f32> = on_ranks(&case(None)).into_iter().flat_map(|step| step.y).collect();
    let error = |keep: f64| {
        let found = on_ranks(&case(compressed(keep, DomainBase::Mean))).into_iter().flat_map(|step| step.y);
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
        (squares(&mut found.zip(&exact).map(|(a, b)| a - b)) / squares(&mut exact.iter().copied())).sqrt()
    };
    let errors = [0.02, 0.2, 0.6, 0.999].map(error);
    assert!(errors.windows(2).all(|pair| pair[0] > pair[1]) && errors[3] < 1e-2, "{errors:?}");
}

/// Runs forward passes in one domain of all ranks. The weights of a pass are those of the one before, but for changes
/// of a tenth until pass `last_change`. Returns each pass's output of all ranks.
fn changing_outputs(domain: Option<DomainOptions>, num_passes: u64, last_change: u64) -> Vec<Vec<f32>> {
    let case = Case {
        config: config(16, 24, 8, 2),
        num_tokens: 40,
        placement: Placement::sharded(8, NUM_RANKS),
        domain,
        has_biases: true,
    };
    let of_rank = |comm: &dyn Communicator| {
        let ctx = Context::cpu(1);
        let ranks = ranks(comm, &case)?;
        let layer = MoeLayer::expert_parallel(case.config.clone(), ranks.layer(0)).expect("a layer");
        let mut whole = weights(&ctx, &case);
        let x = inputs(&ctx, &case, comm.rank());
        let mut outputs = Vec::new();
        for pass in 0..num_passes {
            if pass <= last_change {
                let random = Random::new(7, Purpose::Test, pass);
                for tensor in [&mut whole.gate_up, &mut whole.down] {
                    let numbers = tensor.f32s_mut().iter_mut().enumerate();
                    numbers.for_each(|(i, x)| *x += 0.03 * random.normal(i as u64));
                }
            }
            let weights = whole.select_experts(&ctx, ranks.layer(0).held());
            layer.start_gathering(&ctx, &weights, true);
            outputs.push(layer.forward(&ctx, &weights, &x, &RouterInput::default()).0.f32s().to_vec());
        }
        ranks.failure().map_or(Ok(outputs), Err)
    };
    let of_ranks = try_run_ranks(&RankOptions::new(NUM_RANKS), of_rank).expect("ranks talk");
    (0..num_passes as usize).map(|pass| of_ranks.iter().flat_map(|passes| passes[pass].clone()).collect()).collect()
}

#[test]
fn changes_that_are_left_out_of_a_message_come_with_later_ones() {
    let exact = changing_outputs(None, 30, 5);
    let found = changing_outputs(compressed(0.1, DomainBase::Last), 30, 5);
    let error = |pass: usize| {
        let squares = |of: &dyn Fn(usize) -> f32| (0..exact[pass].len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
        (squares(&|i| found[pass][i] - exact[pass][i]) / squares(&|i| exact[pass][i])).sqrt()
    };
    assert!(error(0) < 1e-6, "experts come whole at first: {}", error(0));
    assert!(error(5) > 0.01, "changes are on their way: {}", error(5));
    assert!(error(29) < 0.1 * error(5), "they have come: {} after {}", error(29), error(5));
}

#[test]
fn gradients_that_are_left_out_of_a_message_are_added_to_later_ones() {
    let case = |domain| Case {
        config: config(16, 24, 4, 1),
        num_tokens: 40,
        placement: Placement::sharded(4, NUM_RANKS),
        domain,
        has_biases: false,
    };
    let mut options = DomainOptions::consecutive(NUM_RANKS, NUM_RANKS);
    options.keep_gradients = 0.25;
    let sum = |domain: Option<DomainOptions>, num_passes: usize| {
        let case = case(domain);
        let of_rank = |comm: &dyn Communicator| {
            let ctx = Context::cpu(1);
            let ranks = ranks(comm, &case)?;
            let layer = MoeLayer::expert_parallel(case.config.clone(), ranks.layer(0)).expect("a layer");
            let weights = weights(&ctx, &case).select_experts(&ctx, ranks.layer(0).held());
            let x = inputs(&ctx, &case, comm.rank());
            let mut grads = weights.clone();
            grads.tensors_mut().into_iter().for_each(|grad| *grad = ctx.zeros(grad.shape(), DType::F32));
            for pass in 0..num_passes {
                let write = if pass == 0 { Write::Replace } else { Write::Add };
                let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
                let (_, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
                task.run(&ctx, WgradTarget::new(write, &mut grads));
            }
            ranks.failure().map_or(Ok(grads.gate_up.f32s().to_vec()), Err)
        };
        let of_ranks = try_run_ranks(&RankOptions::new(NUM_RANKS), of_rank).expect("ranks talk");
        of_ranks.into_iter().flatten().map(|x| x / num_passes as f32).collect::<Vec<f32>>()
    };
    let exact = sum(None, 1);
    let error = |num_passes: usize| {
        let found = sum(Some(options.clone()), num_passes);
        let squares = |of: &dyn Fn(usize) -> f32| (0..exact.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
        (squares(&|i| found[i] - exact[i]) / squares(&|i| exact[i])).sqrt()
    };
    let errors = [1, 50].map(error);
    assert!(errors[0] > 0.05 && errors[1] < 0.2 * errors[0], "{errors:?}");
}

const NODES: [usize; 8] = [0, 0, 0, 0, 1, 1, 1, 1];

/// Returns domains of `outer` of the two nodes and `inner` of the four ranks of each.
fn two_levels(outer: usize, inner: usize) -> Option<DomainOptions> {
    let levels = vec![LevelDomain { size: 2, domain: outer }, LevelDomain { size: 4, domain: inner }];
    Some(DomainOptions::of_levels(levels))
}

#[test]
fn domains_of_nodes_and_of_their_ranks_give_the_results_of_plain_expert_parallelism() {
    let mut replicated = Placement::sharded(9, 8);
    replicated.replicate(0, &[1, 6]);
    for placement in [Placement::sharded(9, 8), replicated] {
        let case = |domain| Case {
            config: config(16, 8, 9, 2),
            num_tokens: 11,
            placement: placement.clone(),
            domain,
            has_biases: true,
        };
        let run = |case: &Case| {
            let options = RankOptions::new(8).with_nodes(&NODES);
            try_run_ranks(&options, |comm| step(comm, case)).expect("ranks talk")
        };
        let plain = run(&case(None));
        let three = [(2, 2), (2, 1), (2, 2)].map(|(size, domain)| LevelDomain { size, domain }).to_vec();
        let levels = [(2, 1), (1, 4), (2, 2), (2, 4)].map(|(outer, inner)| two_levels(outer, inner));
        for domain in levels.into_iter().chain([Some(DomainOptions::of_levels(three))]) {
            let what = format!("{domain:?}, {placement}");
            let found = run(&case(domain));
            for (found, plain) in found.iter().zip(&plain) {
                assert_close(&found.y, &plain.y, 1e-5, &format!("output: {what}"));
                assert_close(&found.dx, &plain.dx, 1e-5, &format!("gradient of the input: {what}"));
            }
            for (found, plain) in summed(&found, 9).iter().zip(&summed(&plain, 9)) {
                assert_close(found, plain, 1e-5, &format!("gradient of an expert: {what}"));
            }
        }
    }
}

/// Returns links without latency.
fn links(node_bytes_per_s: f64, cluster_bytes_per_s: f64) -> Links {
    let link = |bytes_per_s| Link { latency_s: 0.0, bytes_per_s };
    Links { node: link(node_bytes_per_s), cluster: link(cluster_bytes_per_s) }
}

/// Measures the seconds for which the busiest line of a rank is occupied in a step of the ranks of `options`.
fn line_seconds(case: &Case, options: &RankOptions, links: Links) -> f64 {
    let busiest = try_run_ranks(options, |comm| {
        let throttled = Throttled::new(comm.split(Some(0), comm.rank())?.expect("all ranks"), links);
        let lines = throttled.lines();
        let ctx = Context::cpu(1);
        let ranks = ranks(&throttled, case)?;
        let layer = MoeLayer::expert_parallel(case.config.clone(), ranks.layer(0)).expect("a layer");
        let weights = weights(&ctx, case).select_experts(&ctx, ranks.layer(0).held());
        let x = inputs(&ctx, case, comm.rank());
        let before = lines.seconds();
        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
        let (_, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
        let mut grads = weights.clone();
        grads.tensors_mut().into_iter().for_each(|grad| *grad = ctx.zeros(grad.shape(), DType::F32));
        task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
        ranks.failure().map_or(Ok(()), Err)?;
        let after = lines.seconds();
        let mut busiest = [(after[0] - before[0]).max(after[1] - before[1])];
        comm.all_reduce(&mut busiest, Reduce::Max)?;
        Ok::<_, CommError>(busiest[0])
    });
    busiest.expect("ranks talk")[0]
}

#[test]
fn over_slow_links_the_domains_that_are_chosen_take_the_least_time_by_about_the_factor_foretold() {
    for gbit in [1.0, 5.0, 10.0] {
        let bytes_per_s = gbit * 1e9 / 8.0;
        for (num_tokens, expert_width) in [(2048, 16), (512, 32), (96, 96)] {
            let config = MoeConfig::plain(32, expert_width, NUM_RANKS, 1);
            let expert_bytes = (4 * 3 * 32 * expert_width) as f64;
            let placement = Placement::sharded(NUM_RANKS, NUM_RANKS);
            let case = |size| Case {
                config: config.clone(),
                num_tokens,
                placement: placement.clone(),
                domain: domains(size),
                has_biases: false,
            };
            let level = DomainLevel { size: NUM_RANKS, bytes_per_s };
            let work = DomainWork { data_bytes: (4 * 32 * num_tokens) as f64, expert_bytes, hidden_s: 0.0 };
            let chosen = choose_domains(&[level], &work)[0];
            let (ranks, links) = (RankOptions::new(NUM_RANKS), links(bytes_per_s, bytes_per_s));
            let [tokens, mixed, weights] = [1, 2, 4].map(|size| line_seconds(&case(size), &ranks, links));
            let taken = [(1, tokens), (2, mixed), (4, weights)];
            let least = taken.iter().find(|(size, _)| *size == chosen).expect("a size").1;
            for (size, seconds) in taken {
                // Forward and backward: experts go there and their gradients back, tokens four times.
                let foretold = domain_seconds(&[level], &[size], &work) / domain_seconds(&[level], &[chosen], &work);
                let factor = seconds / least;
                println!(
                    "{gbit} Gbit/s, {num_tokens} tokens, experts of {expert_bytes} bytes, domains of {size}: {:.3} ms, \
                     {factor:.2} times the domains of {chosen}, by the model {foretold:.2}",
                    seconds * 1e3
                );
                assert!(
                    factor > 0.9 && (factor / foretold - 1.0).abs() < 0.35,
                    "domains of {size}: {factor}, {foretold}"
                );
            }
        }
    }
}

#[test]
fn with_nodes_the_domains_of_both_levels_take_about_the_time_foretold() {
    let (node, cluster) = (1.25e9, 1.25e8);
    let ranks = RankOptions::new(8).with_nodes(&NODES);
    for (num_tokens, expert_width) in [(1024, 8), (256, 24), (96, 48)] {
        let expert_bytes = (4 * 3 * 32 * expert_width) as f64;
        let levels = [(2, cluster), (4, node)].map(|(size, bytes_per_s)| DomainLevel { size, bytes_per_s });
        let work = DomainWork { data_bytes: (4 * 32 * num_tokens) as f64, expert_bytes, hidden_s: 0.0 };
        let chosen = choose_domains(&levels, &work);
        let measured = |sizes: &[usize]| {
            let case = Case {
                config: MoeConfig::plain(32, expert_width, 8, 1),
                num_tokens,
                placement: Placement::sharded(8, 8),
                domain: two_levels(sizes[0], sizes[1]),
                has_biases: false,
            };
            line_seconds(&case, &ranks, links(node, cluster))
        };
        let least = measured(&chosen);
        for sizes in [[1, 1], [1, 4], [2, 1], [2, 2], [2, 4]] {
            let foretold = domain_seconds(&levels, &sizes, &work) / domain_seconds(&levels, &chosen, &work);
            let seconds = measured(&sizes);
            let factor = seconds / least;
            println!(
                "{num_tokens} tokens, experts of {expert_bytes} bytes, domains of {sizes:?}: {:.3} ms, {factor:.2} times \
                 the domains of {chosen:?}, by the model {foretold:.2}",
                seconds * 1e3
            );
            assert!(
                factor > 0.9 && (factor / foretold - 1.0).abs() < 0.35,
                "domains of {sizes:?}: {factor}, {foretold}"
            );
        }
    }
}
