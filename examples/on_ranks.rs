//! Experts laid out on ranks: four ranks with tokens of their own give what one rank gives with all tokens.
//!
//! The ranks are threads here; under `mpirun` a rank is a process and the code is the same.
//!
//! `cargo run --release --example on_ranks`

use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};
use moeworks_moe::{ExpertRanks, MoeConfig, MoeLayer, MoeWeights, RouterInput};
use moeworks_ops::Context;
use moeworks_plan::{Exchange, Placement, Wire};
use moeworks_tensor::Tensor;

const RANKS: usize = 4;
const TOKENS: usize = 10;
const WIDTH: usize = 16;

fn config() -> MoeConfig {
    MoeConfig::plain(WIDTH, 32, 8, 2)
}

/// The tokens of rank `rank`.
fn tokens(rank: usize) -> Vec<f32> {
    (0..TOKENS * WIDTH).map(|i| ((rank * TOKENS * WIDTH + i) as f32 * 0.37).sin()).collect()
}

/// A rank's own part and its communicators: it has tokens, and two of the eight experts.
fn output_of_rank(comm: &dyn Communicator) -> Result<Vec<f32>, CommError> {
    // Expert 0 is popular: it is on rank 3, too. A file can say the same: docs/distributed.md.
    let mut placement = Placement::sharded(config().num_experts, RANKS);
    placement.replicate(0, &[3]);
    let all = || comm.split(Some(0), comm.rank()).map(|group| group.expect("this rank is in the group"));
    // The ranks with tokens, the ranks with experts, and the way of tokens between them.
    let ranks = ExpertRanks::new(all()?, all()?, placement, Exchange::plain(Wire::F32))?;

    let ctx = Context::cpu(1);
    let layer = MoeLayer::expert_parallel(config(), ranks.layer(0)).expect("a valid configuration");
    let whole = MoeWeights::random(&ctx, &config(), 1, 0.3);
    let weights = whole.select_experts(&ctx, ranks.layer(0).held());
    let x = Tensor::from_slice(ctx.pool(), &[TOKENS, WIDTH], &tokens(comm.rank()));
    let (y, _saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    // A communication that fails does not end the pass: look here after it.
    ranks.failure().map_or(Ok(y.f32s().to_vec()), Err)
}

/// The output of all tokens on ranks, and on one.
pub(crate) fn outputs() -> Result<[Vec<f32>; 2], CommError> {
    let on_ranks = try_run_ranks(&RankOptions::new(RANKS), output_of_rank)?.concat();
    let ctx = Context::cpu_all_cores();
    let layer = MoeLayer::new(config()).expect("a valid configuration");
    let weights = MoeWeights::random(&ctx, &config(), 1, 0.3);
    let all: Vec<f32> = (0..RANKS).flat_map(tokens).collect();
    let x = Tensor::from_slice(ctx.pool(), &[RANKS * TOKENS, WIDTH], &all);
    let (y, _saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    Ok([on_ranks, y.f32s().to_vec()])
}

#[allow(dead_code)] // the test calls `outputs`
fn main() -> Result<(), CommError> {
    let [on_ranks, on_one] = outputs()?;
    let largest = on_ranks.iter().zip(&on_one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{} numbers of {RANKS} ranks and of one differ by at most {largest:.1e}", on_one.len());
    Ok(())
}
