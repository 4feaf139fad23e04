//! `moeworks bench overlap`: how much of a layer's communication runs under its computation, by the number of chunks.
//!
//! A rank stands in communication while it can do nothing else; in one piece it does so for all of it. What it stands less in
//! chunks is hidden; that ranks wait for each other is another thing ([`Pass`]). The same of the sum of gradients: behind backward, and
//! as soon as each is there.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Shaped};
use moeworks_moe::{ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{Exchange, Link, Links, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use serde_json::json;

use super::comm::{num_cores, on_ranks};
use super::gradients;
use super::pass::Pass;
use crate::args::OverlapArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::tables;

/// Numbers of chunks that are compared.
const CHUNKS: [usize; 4] = [1, 2, 4, 8];
/// Tokens of a rank.
const TOKENS: usize = 1024;
/// Passes of each; the median counts.
const PASSES: usize = 5;
/// The numbers are drawn from this.
const SEED: u64 = 1;

/// Communication below this share of a pass is too little to say how much of it is hidden.
const LITTLE: f64 = 0.02;

pub(super) fn run(args: &OverlapArgs) -> Result<ExitCode, Failure> {
    let link = args.link.as_deref().map(parse_link).transpose()?;
    let measured = on_ranks(args.ranks, |comm| {
        let passes = measure(comm, link)?;
        let ctx = Context::cpu((num_cores() / comm.size()).max(1));
        let sums = gradients::measure(comm, part(comm, link)?, &ctx, (TOKENS, PASSES))?;
        Ok(passes.map(|passes| (passes, sums, comm.size())))
    })?;
    if let Some((passes, sums, num_ranks)) = measured {
        print((&passes, sums), num_ranks, args.json);
    }
    Ok(ExitCode::SUCCESS)
}

/// `LATENCY_US,MB_PER_S`.
fn parse_link(text: &str) -> Result<Link, Failure> {
    let wrong = || Failure::input(format!("--link {text}: must be LATENCY_US,MB_PER_S, such as 1000,125"));
    let (latency, rate) = text.split_once(',').ok_or_else(wrong)?;
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0).ok_or_else(wrong);
    let (latency_us, rate) = (number(latency)?, number(rate)?);
    if rate == 0.0 || latency_us > 1e7 {
        return Err(wrong());
    }
    Ok(Link { latency_s: latency_us * 1e-6, bytes_per_s: rate * 1e6 })
}

/// All ranks as a group of their own, by `link` where one is given.
fn part(comm: &dyn Communicator, link: Option<Link>) -> Result<Box<dyn Communicator>, CommError> {
    let part = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
    Ok(match link {
        Some(link) => Box::new(Shaped::new(part, Links { node: link, cluster: link })),
        None => part,
    })
}

/// The passes of each number of chunks, on rank 0.
fn measure(comm: &dyn Communicator, link: Option<Link>) -> Result<Option<Vec<Pass>>, CommError> {
    let mut layers = CHUNKS.into_iter().map(|chunks| Layer::new(comm, link, chunks)).collect::<Result<Vec<_>, _>>()?;
    let mut passes = vec![Vec::new(); layers.len()];
    // Taking turns, so that what else the machine does meets all.
    for _ in 0..PASSES {
        for (passes, layer) in passes.iter_mut().zip(&mut layers) {
            passes.push(layer.pass(comm)?);
        }
    }
    Ok((comm.rank() == 0).then(|| passes.iter().map(|passes| Pass::median(passes)).collect()))
}

/// Two experts a rank, each of width 1024, two of them for each token of width 512.
fn config(num_ranks: usize) -> MoeConfig {
    MoeConfig::plain(512, 1024, 2 * num_ranks, 2)
}

/// A layer over all ranks, with what goes through it.
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
    fn new(comm: &dyn Communicator, link: Option<Link>, chunks: usize) -> Result<Self, CommError> {
        let meter = Arc::new(Meter::new(true));
        let group = Box::new(Metered::new(part(comm, link)?, Arc::clone(&meter)));
        let exchange = Exchange { chunks, ..Exchange::plain(Wire::F32) };
        let config = config(comm.size());
        let placement = Placement::sharded(config.num_experts, comm.size());
        let ranks = ExpertRanks::new(part(comm, link)?, group, placement, exchange)?;
        let ctx = Context::cpu((num_cores() / comm.size()).max(1));
        let weights = MoeWeights::random(&ctx, &config, SEED, 0.02).of_experts(&ctx, ranks.held());
        let mut grads = weights.clone();
        grads.tensors_mut().into_iter().for_each(|tensor| *tensor = ctx.zeros(tensor.shape(), DType::F32));
        let random = Random::new(SEED, Purpose::Test, comm.rank() as u64);
        let x: Vec<f32> = (0..TOKENS * config.width).map(|i| random.normal(i as u64)).collect();
        let x = Tensor::from_slice(ctx.pool(), &[TOKENS, config.width], &x);
        let layer = MoeLayer::over_ranks(config, ranks.clone()).expect("a valid layer");
        Ok(Self { ctx, layer, ranks, meter, weights, grads, x })
    }

    /// Forward, backward and the weights' gradients.
    fn pass(&mut self, comm: &dyn Communicator) -> Result<Pass, CommError> {
        let Self { ctx, layer, ranks, meter, weights, grads, x } = self;
        Pass::of(comm, meter, || {
            let (y, saved) = layer.forward(ctx, weights, x, &RouterInput::default());
            let (_, task) = layer.backward(ctx, weights, &saved, &y, &LossGrad::default());
            task.run(ctx, Write::Replace, grads);
            ranks.failure().map_or(Ok(()), Err)
        })
    }
}

fn print((passes, [behind, under]): (&[Pass], [Pass; 2]), num_ranks: usize, is_json: bool) {
    let of_sums = under.hidden(&behind);
    if is_json {
        let row = |(chunks, pass): (usize, &Pass)| {
            let mut row = pass.json();
            (row["chunks"], row["hidden"]) = (json!(chunks), json!(pass.hidden(&passes[0])));
            row
        };
        let gradients = json!({ "behind": behind.json(), "under": under.json(), "hidden": of_sums });
        let rows: Vec<_> = CHUNKS.into_iter().zip(passes).map(row).collect();
        println!("{:#}", json!({ "ranks": num_ranks, "rows": rows, "gradients": gradients }));
        return;
    }
    println!("{num_ranks} ranks, {TOKENS} tokens each: forward, backward and the weights' gradients of a layer");
    let cells = |(chunks, pass): (usize, &Pass)| {
        let hidden = format!("{:.0}%", 100.0 * pass.hidden(&passes[0]));
        let [seconds, communication, waiting] = [pass.seconds, pass.communication_s, pass.waiting_s].map(milliseconds);
        vec![chunks.to_string(), seconds, communication, hidden, waiting]
    };
    let header = ["chunks", "ms", "ms in communication", "of it hidden", "ms waiting for a slower rank"];
    tables::print(&header, &CHUNKS.into_iter().zip(passes).map(cells).collect::<Vec<_>>());
    said_of_little(&passes[0]).iter().for_each(|said| println!("{said}"));
    println!(
        "\nsums of the gradients of dense matrices: behind backward {} ms, {} of them in communication; under it {} and {}: \
         {:.0}% hidden",
        milliseconds(behind.seconds),
        milliseconds(behind.communication_s),
        milliseconds(under.seconds),
        milliseconds(under.communication_s),
        100.0 * of_sums,
    );
    said_of_little(&behind).iter().for_each(|said| println!("{said}"));
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", 1e3 * seconds)
}

/// What is said of a pass that hides nothing where it communicates so little that shares of it mean nothing.
fn said_of_little(whole: &Pass) -> Option<String> {
    let share = whole.communication_s / whole.seconds;
    (share < LITTLE).then(|| {
        format!(
            "(There is next to nothing to hide: communication takes {:.1}% of the time here. --link tries the pace of a network.)",
            100.0 * share
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_there_is_next_to_nothing_to_hide_is_said_in_words() {
        let of = |communication_s: f64| said_of_little(&Pass { seconds: 2.0, communication_s, waiting_s: 0.5 });
        assert!(of(0.0).is_some_and(|said| said.contains("communication takes 0.0% of the time")));
        assert!(of(0.03).is_some_and(|said| said.contains("communication takes 1.5% of the time")));
        assert_eq!(of(0.05), None);
    }
}
