//! Layers with and without work that runs while tokens travel, on emulated links: the hops of the two-hop path under
//! each other, and a shared expert under the dispatch.
//!
//! Computations are waits, so that ranks do not lend each other cores. Layers with and without take turns.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, RankOptions, Reduce, Throttled, try_run_ranks};
use moeworks_moe::{EpOptions, ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, Pace, RouterInput};
use moeworks_ops::Context;
use moeworks_plan::{Algorithm, Exchange, Link, Links, Placement, Wire};
use moeworks_tensor::{Purpose, Random, Tensor};
use serde_json::{Value, json};

use crate::ranks::TIMEOUT;
use crate::timing::median;

/// The seconds that a dispatch or a combine takes on each kind of links, if tokens go to all ranks.
const EXCHANGE_S: f64 = 0.1;
/// The wait that stands for each of forward and backward of the shared expert.
const SHARED_S: f64 = 0.075;
/// The tokens of a rank.
const TOKENS: usize = 256;
/// The width of a token.
const WIDTH: usize = 64;
/// The passes of each kind, of which the median counts.
const PASSES: usize = 5;
/// The seed of weights and inputs.
const SEED: u64 = 1;

/// The seconds of forward and backward of a layer, after each other and under each other.
#[derive(Clone, Copy, Debug)]
pub struct Compared {
    /// One after the other.
    pub after_s: f64,
    /// One under the other.
    pub under_s: f64,
}

impl Compared {
    /// Returns how many times as long the pass takes whose parts run one after the other.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.after_s / self.under_s
    }

    /// Returns the figures as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({ "after_s": self.after_s, "under_s": self.under_s, "ratio": self.ratio() })
    }
}

/// The times of layers on emulated links.
#[derive(Clone, Copy, Debug)]
pub struct Travel {
    /// The hop inside the node and the hop between nodes, on four ranks of two nodes.
    pub hops: Compared,
    /// A shared expert and the exchange of tokens, on two ranks.
    pub shared: Compared,
}

/// Measures both on threads of this process.
///
/// # Errors
/// [`CommError`] if a rank fails.
pub fn measure() -> Result<Travel, CommError> {
    let bytes = (TOKENS * WIDTH * size_of::<f32>()) as f64;
    let link = |bytes: f64| Link { latency_s: 0.0, bytes_per_s: bytes / EXCHANGE_S };
    // On the two-hop path a relay hands its own tokens and those of its partner to the other rank of its node.
    let links = Links { node: link(2.0 * bytes), cluster: link(bytes) };
    let two_hops = Exchange { algorithm: Algorithm::TwoHop, ..Exchange::plain(Wire::F32) };
    let hops = [1, 4].map(|hop_parts| EpOptions { hop_parts, ..two_hops.into() });
    let pace = Pace { shared_forward_s: SHARED_S, shared_backward_s: SHARED_S, ..Pace::default() };
    let shared = [false, true].map(|shared_under_dispatch| EpOptions {
        pace: Some(pace),
        shared_under_dispatch,
        ..Exchange::plain(Wire::F32).into()
    });
    Ok(Travel {
        hops: compare(&[0, 0, 1, 1], links, &hops)?,
        shared: compare(&[0, 0], Links { node: link(bytes), ..links }, &shared)?,
    })
}

/// Times passes with each of two options, in turns, on ranks of these nodes.
fn compare(nodes: &[usize], links: Links, options: &[EpOptions; 2]) -> Result<Compared, CommError> {
    let on_ranks = RankOptions::new(nodes.len()).with_nodes(nodes).with_timeout(TIMEOUT);
    let seconds = try_run_ranks(&on_ranks, |comm: &dyn Communicator| {
        let layers = [Layer::new(comm, links, &options[0])?, Layer::new(comm, links, &options[1])?];
        let mut seconds = [Vec::new(), Vec::new()];
        for pass in 0..=PASSES {
            for (layer, seconds) in layers.iter().zip(&mut seconds) {
                let taken = layer.pass(comm)?;
                if pass > 0 {
                    seconds.push(taken);
                }
            }
        }
        Ok::<_, CommError>(seconds.map(median))
    })?;
    let [after_s, under_s] = seconds[0];
    Ok(Compared { after_s, under_s })
}

/// A layer over all ranks, whose tokens all go to all of them.
struct Layer {
    ctx: Context,
    layer: MoeLayer,
    ranks: ExpertRanks,
    weights: MoeWeights,
    x: Tensor,
}

impl Layer {
    fn new(comm: &dyn Communicator, links: Links, options: &EpOptions) -> Result<Self, CommError> {
        let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a rank with a color is in a group"));
        let group = Throttled::new(part()?, links).with_node_lines();
        let config = MoeConfig { shared_width: 8, ..MoeConfig::plain(WIDTH, 8, comm.size(), comm.size()) };
        let placement = Placement::sharded(config.num_experts, comm.size());
        let ranks = ExpertRanks::new(part()?, Box::new(group), placement, options.clone())?;
        let ctx = Context::cpu(1);
        let weights = MoeWeights::random(&ctx, &config, SEED, 0.02).select_experts(&ctx, ranks.layer(0).held());
        let random = Random::new(SEED, Purpose::Test, comm.rank() as u64);
        let x: Vec<f32> = (0..TOKENS * WIDTH).map(|i| random.normal(i as u64)).collect();
        let x = Tensor::from_slice(ctx.pool(), &[TOKENS, WIDTH], &x);
        let layer = MoeLayer::expert_parallel(config, ranks.layer(0)).expect("a valid layer");
        Ok(Self { ctx, layer, ranks, weights, x })
    }

    /// Returns the seconds of forward and backward on the slowest rank.
    fn pass(&self, comm: &dyn Communicator) -> Result<f64, CommError> {
        let Self { ctx, layer, ranks, weights, x } = self;
        comm.barrier()?;
        let start = Instant::now();
        let (y, saved) = layer.forward(ctx, weights, x, &RouterInput::default());
        let _gradients = layer.backward(ctx, weights, &saved, &y, &LossGrad::default());
        let mut slowest = [start.elapsed().as_secs_f64()];
        ranks.failure().map_or(Ok(()), Err)?;
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        Ok(slowest[0])
    }
}
