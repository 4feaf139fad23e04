//! The choice of what moves in a layer over several nodes: tokens, experts, or some of each. It must take the least
//! time, and be faster than the alternatives by the factor that its costs predict, on simulated links. Between hosts
//! that are network namespaces of one machine each kind must run; their times are printed.

use std::fmt;
#[cfg(target_os = "linux")]
use std::time::{Duration, Instant};

use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, Throttled, run_ranks};
use moeworks_moe::{EpOptions, ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{
    Algorithm, Exchange, LayerLoad, Link, Links, MoveCosts, Moving, Nodes, Placement, Wire, pass_seconds,
};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

/// The node of each rank: two ranks on each of two nodes, with two experts each, one of which nearly all tokens want.
const NODES: [usize; 4] = [0, 0, 1, 1];
const EXPERTS: usize = 8;
const HOT: [usize; 4] = [0, 2, 4, 6];
const WIDTH: usize = 128;
const EXPERT_WIDTH: usize = 128;
/// Tokens per rank, and the number of them that want a hot expert.
const TOKENS: usize = 2048;
const HOT_TOKENS: usize = 1920;

/// Returns the expert that each of a rank's tokens wants. Equally many want each of the hot ones, and each of the
/// others.
fn wanted() -> impl Iterator<Item = usize> {
    (0..TOKENS).map(|token| 2 * (token % HOT.len()) + usize::from(token >= HOT_TOKENS))
}

/// A layer that sends a token to the expert at the index of its largest element.
struct Work {
    ctx: Context,
    config: MoeConfig,
    weights: MoeWeights,
    x: Tensor,
}

impl Work {
    fn of_rank(rank: usize) -> Self {
        let ctx = Context::cpu(1);
        let config = MoeConfig::plain(WIDTH, EXPERT_WIDTH, EXPERTS, 1);
        let mut weights = MoeWeights::random(&ctx, &config, 1, 0.1);
        let router = weights.router.f32s_mut();
        router.fill(0.0);
        (0..EXPERTS).for_each(|expert| router[expert * WIDTH + expert] = 1.0);
        let random = Random::new(2, Purpose::Test, rank as u64);
        let mut x = ctx.zeros(&[TOKENS, WIDTH], DType::F32);
        for (i, x) in x.f32s_mut().iter_mut().enumerate() {
            *x = 0.1 * random.normal(i as u64);
        }
        wanted().enumerate().for_each(|(token, expert)| x.f32s_mut()[token * WIDTH + expert] = 8.0);
        Self { ctx, config, weights, x }
    }

    /// Runs a step of the layer.
    fn step(&self, ranks: &ExpertRanks) -> Result<(), CommError> {
        let layer = MoeLayer::expert_parallel(self.config.clone(), ranks.layer(0)).expect("a layer");
        let weights = self.weights.select_experts(&self.ctx, ranks.layer(0).held());
        let (y, saved) = layer.forward(&self.ctx, &weights, &self.x, &RouterInput::default());
        let (_, task) = layer.backward(&self.ctx, &weights, &saved, &y, &LossGrad::default());
        let mut grads = weights.clone();
        grads.tensors_mut().into_iter().for_each(|grad| *grad = self.ctx.zeros(grad.shape(), DType::F32));
        task.run(&self.ctx, WgradTarget::new(Write::Replace, &mut grads));
        assert_eq!(saved.stats().kept_per_expert.iter().sum::<u32>(), TOKENS as u32, "a choice a token");
        ranks.failure().map_or(Ok(()), Err)
    }
}

/// Returns the handle of `comm`'s rank to layers with this rule of moving.
fn part_of(comm: &dyn Communicator, moving: Moving) -> Result<ExpertRanks, CommError> {
    let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a part"));
    let exchange = Exchange { algorithm: Algorithm::TwoHop, ..Exchange::plain(Wire::F32) };
    let options = EpOptions { moving, ..exchange.into() };
    ExpertRanks::new(part()?, part()?, Placement::sharded(EXPERTS, NODES.len()), options)
}

/// Operations a second, so many that computation takes no time.
const FLOPS: f64 = 1e15;

/// Returns the seconds that the costs predict if `fetched` are sent to all ranks.
fn expected(links: Links, fetched: &[usize]) -> f64 {
    let (nodes, placement) = (Nodes::new(&NODES), Placement::sharded(EXPERTS, NODES.len()));
    let mut rows = vec![0; EXPERTS];
    wanted().for_each(|expert| rows[expert] += 1);
    let (tokens, rows) = ([TOKENS as u32; NODES.len()], vec![rows; NODES.len()]);
    let load = LayerLoad { nodes: &nodes, placement: &placement, tokens: &tokens, rows: &rows };
    let expert_bytes = (3 * WIDTH * EXPERT_WIDTH * 4) as f64;
    let row_bytes = (4 * WIDTH) as f64;
    let algorithm = Algorithm::TwoHop;
    let costs = MoveCosts { algorithm, links, row_bytes, expert_bytes: [expert_bytes; 2], row_compute_s: 0.0 };
    pass_seconds(&load, fetched, &costs)
}

/// The time of a step in which something else moves than what is chosen.
struct Compared {
    name: &'static str,
    seconds: f64,
    /// The time over that of a step in which the cheapest moves.
    factor: f64,
    /// The factor by the costs.
    expected: f64,
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, seconds, factor, expected } = self;
        write!(
            f,
            "{name} {seconds:.3} s take {factor:.2} times as long as what is chosen, by its costs {expected:.2} times"
        )
    }
}

/// Compares the time of a step that moves tokens, and of one that moves weights, with that of one that moves the
/// cheapest. `seconds` runs a step.
fn compare(
    links: Links,
    mut seconds: impl FnMut(Moving) -> Result<f64, CommError>,
) -> Result<[Compared; 2], CommError> {
    let chosen = Moving::Cheapest { links, flops: FLOPS };
    let [tokens, weights, chosen] = [seconds(Moving::Tokens)?, seconds(Moving::Weights)?, seconds(chosen)?];
    let all: Vec<usize> = (0..EXPERTS).collect();
    let least = expected(links, &HOT);
    let of = |name, seconds: f64, fetched: &[usize]| Compared {
        name,
        seconds,
        factor: seconds / chosen,
        expected: expected(links, fetched) / least,
    };
    Ok([of("tokens", tokens, &[]), of("weights", weights, &all)])
}

#[test]
fn over_nodes_what_is_chosen_takes_less_time_by_the_factor_that_costs_say() {
    // 1 ms, and the share of two ranks of 16 Mbit/s, as between the hosts below.
    let node = Link { latency_s: 1e-5, bytes_per_s: 1e9 };
    let links = Links { node, cluster: Link { latency_s: 1e-3, bytes_per_s: 1e6 } };
    let results = run_ranks(&RankOptions::new(0).with_nodes(&NODES), |comm| {
        let work = Work::of_rank(comm.rank());
        compare(links, |moving| {
            let throttled = Throttled::new(comm.split(Some(0), comm.rank())?.expect("a part"), links);
            let lines = throttled.lines();
            let ranks = part_of(&throttled, moving)?;
            let before = lines.seconds();
            work.step(&ranks)?;
            let after = lines.seconds();
            let mut busiest = [(after[0] - before[0]).max(after[1] - before[1])];
            comm.all_reduce(&mut busiest, Reduce::Max)?;
            Ok(busiest[0])
        })
    });
    for compared in results.into_iter().next().expect("a rank").expect("ranks talk") {
        println!("{compared}");
        let Compared { factor, expected, .. } = compared;
        assert!(factor > 1.1 && (factor / expected - 1.0).abs() < 0.25, "{compared}");
    }
}

#[cfg(target_os = "linux")]
mod hosts {
    use moeworks_comm::mpi::{MpiOptions, run_mpi};

    use super::*;
    use crate::namespaces::{succeed_on_hosts, topology};

    /// Repetitions of each step. The minimum counts, because other load on the machine only adds time.
    const REPEATS: usize = 3;
    /// The timeout of ranks on such slow links.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn between_hosts_tokens_experts_and_the_cheapest_move() {
        succeed_on_hosts("moving::hosts::plays_a_rank", "moving");
    }

    #[test]
    #[ignore = "a rank: started by a launcher"]
    fn plays_a_rank() {
        let options = MpiOptions::default().with_timeout(PATIENCE);
        let report = |rank: usize, error: &dyn std::fmt::Display| eprintln!("rank {rank}: {error}");
        run_mpi(&options, report, play).expect("only a run of one rank fails here");
    }

    fn play(comm: &dyn Communicator) -> Result<(), CommError> {
        assert_eq!(comm.nodes(), NODES, "who is on which host");
        let work = Work::of_rank(comm.rank());
        let seconds = |moving| {
            let (mut least, ranks) = (f64::INFINITY, part_of(comm, moving)?);
            for _ in 0..REPEATS {
                comm.barrier()?;
                let start = Instant::now();
                work.step(&ranks)?;
                let mut slowest = [start.elapsed().as_secs_f64()];
                comm.all_reduce(&mut slowest, Reduce::Max)?;
                least = least.min(slowest[0]);
            }
            Ok(least)
        };
        // The first step opens the connections.
        work.step(&part_of(comm, Moving::Tokens)?)?;
        let said = compare(topology().links(), seconds)?;
        if comm.rank() == 0 {
            said.iter().for_each(|said| println!("{said}"));
        }
        Ok(())
    }
}
