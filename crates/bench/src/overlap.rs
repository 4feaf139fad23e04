//! The share of a layer's communication that is hidden behind its computation, by the number of chunks, and the same
//! for the all-reduce of gradients.
//!
//! Without chunks nothing is hidden: a rank waits for all of its communication. Communication time saved with chunks
//! counts as hidden; waiting for slower ranks is measured separately ([`Pass`]).

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Throttled};
use moeworks_moe::{ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, MachineOptions};
use moeworks_plan::{Exchange, Link, Links, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::gradient_sums::{self, GradientSums};
use crate::pass::Pass;
use crate::ranks::num_cores;

/// The numbers of chunks that are compared.
pub const CHUNKS: [usize; 4] = [1, 2, 4, 8];
/// The number of tokens per rank.
pub const TOKENS: usize = 1024;
/// The number of passes of each kind, of which the median counts.
const PASSES: usize = 5;
/// The seed of weights and inputs.
const SEED: u64 = 1;

/// Creates a group of all ranks; with `link`, messages are delayed as over that link.
fn part(comm: &dyn Communicator, link: Option<Link>) -> Result<Box<dyn Communicator>, CommError> {
    let part = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
    Ok(match link {
        Some(link) => Box::new(Throttled::new(part, Links { node: link, cluster: link })),
        None => part,
    })
}

/// The medians of a run on all ranks.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// The number of ranks.
    pub num_ranks: usize,
    /// A pass of a layer for each of [`CHUNKS`].
    pub passes: Vec<Pass>,
    /// Backward passes of replicated matrices with their all-reduces.
    pub gradient_sums: GradientSums,
}

/// Times passes of a layer and all-reduces of gradients; with `link`, messages are delayed as over that link. All
/// ranks must call it; rank 0 gets the times.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn measure(
    comm: &dyn Communicator,
    link: Option<Link>,
    machine: &MachineOptions,
) -> Result<Option<Overlap>, CommError> {
    let passes = layer_passes(comm, link, machine)?;
    let ctx = Context::cpu((num_cores() / comm.size()).max(1)).on_machine(machine);
    let gradient_sums = gradient_sums::measure(comm, part(comm, link)?, &ctx, TOKENS, PASSES)?;
    Ok(passes.map(|passes| Overlap { num_ranks: comm.size(), passes, gradient_sums }))
}

/// Times passes with each number of chunks. Rank 0 gets the medians.
fn layer_passes(
    comm: &dyn Communicator,
    link: Option<Link>,
    machine: &MachineOptions,
) -> Result<Option<Vec<Pass>>, CommError> {
    let mut layers =
        CHUNKS.into_iter().map(|chunks| Layer::new(comm, link, chunks, machine)).collect::<Result<Vec<_>, _>>()?;
    let mut passes = vec![Vec::new(); layers.len()];
    // The passes take turns, so that other load of the machine affects all alike.
    for _ in 0..PASSES {
        for (passes, layer) in passes.iter_mut().zip(&mut layers) {
            passes.push(layer.pass(comm)?);
        }
    }
    Ok((comm.rank() == 0).then(|| passes.iter().map(|passes| Pass::median(passes)).collect()))
}

/// Returns the configuration of a layer of width 512 with two experts per rank, each of width 1024, and two experts
/// per token.
fn config(num_ranks: usize) -> MoeConfig {
    MoeConfig::plain(512, 1024, 2 * num_ranks, 2)
}

/// An expert-parallel layer over all ranks, and its inputs.
struct Layer {
    ctx: Context,
    layer: MoeLayer,
    ranks: ExpertRanks,
    meter: Arc<Meter>,
    weights: MoeWeights,
    grads: MoeWeights,
    x: Tensor,
}

impl Layer {
    fn new(
        comm: &dyn Communicator,
        link: Option<Link>,
        chunks: usize,
        machine: &MachineOptions,
    ) -> Result<Self, CommError> {
        let meter = Arc::new(Meter::new(true));
        let group = Box::new(Metered::new(part(comm, link)?, Arc::clone(&meter)));
        let exchange = Exchange { chunks, ..Exchange::plain(Wire::F32) };
        let config = config(comm.size());
        let placement = Placement::sharded(config.num_experts, comm.size());
        let ranks = ExpertRanks::new(part(comm, link)?, group, placement, exchange)?;
        let ctx = Context::cpu((num_cores() / comm.size()).max(1)).on_machine(machine);
        let weights = MoeWeights::random(&ctx, &config, SEED, 0.02).select_experts(&ctx, ranks.layer(0).held());
        let mut grads = weights.clone();
        grads.tensors_mut().into_iter().for_each(|tensor| *tensor = ctx.zeros(tensor.shape(), DType::F32));
        let random = Random::new(SEED, Purpose::Test, comm.rank() as u64);
        let x: Vec<f32> = (0..TOKENS * config.width).map(|i| random.normal(i as u64)).collect();
        let x = Tensor::from_slice(ctx.pool(), &[TOKENS, config.width], &x);
        let layer = MoeLayer::expert_parallel(config, ranks.layer(0)).expect("a valid layer");
        Ok(Self { ctx, layer, ranks, meter, weights, grads, x })
    }

    /// Times the forward pass, the backward pass and the weights' gradients.
    fn pass(&mut self, comm: &dyn Communicator) -> Result<Pass, CommError> {
        let Self { ctx, layer, ranks, meter, weights, grads, x } = self;
        Pass::measure(comm, meter, || {
            let (y, saved) = layer.forward(ctx, weights, x, &RouterInput::default());
            let (_, task) = layer.backward(ctx, weights, &saved, &y, &LossGrad::default());
            task.run(ctx, WgradTarget::new(Write::Replace, grads));
            ranks.failure().map_or(Ok(()), Err)
        })
    }
}
