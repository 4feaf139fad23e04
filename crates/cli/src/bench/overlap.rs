//! `moeworks bench overlap`: how much of a layer's communication runs under its computation, by the number of chunks.
//!
//! A rank stands in communication while it can do nothing else; in one piece it does so for all of it. What it stands less in
//! chunks is hidden. The same of the sum of gradients: behind backward, and as soon as each is there.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Reduce, Shaped};
use moeworks_moe::{ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{Exchange, Link, Links, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use serde_json::json;

use super::comm::{num_cores, on_ranks};
use super::gradients::{self, Sums};
use crate::args::BenchArgs;
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

/// A number of chunks, as the slowest rank sees it.
struct Row {
    chunks: usize,
    seconds: f64,
    standing_s: f64,
}

pub(super) fn run(args: &BenchArgs) -> Result<ExitCode, Failure> {
    let link = args.link.as_deref().map(parse_link).transpose()?;
    let measured = on_ranks(args.ranks, |comm| {
        let rows = measure(comm, link)?;
        let ctx = Context::cpu((num_cores() / comm.size()).max(1));
        let sums = gradients::measure(comm, part(comm, link)?, &ctx, (TOKENS, PASSES))?;
        Ok(rows.map(|rows| (rows, sums, comm.size())))
    })?;
    if let Some((rows, sums, num_ranks)) = measured {
        print((&rows, sums), num_ranks, args.json);
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

/// The rows, on rank 0.
fn measure(comm: &dyn Communicator, link: Option<Link>) -> Result<Option<Vec<Row>>, CommError> {
    let mut rows = Vec::new();
    for chunks in CHUNKS {
        let meter = Arc::new(Meter::new(false));
        let group = Box::new(Metered::new(part(comm, link)?, Arc::clone(&meter)));
        let exchange = Exchange { chunks, ..Exchange::plain(Wire::F32) };
        let config = config(comm.size());
        let placement = Placement::sharded(config.num_experts, comm.size());
        let ranks = ExpertRanks::new(part(comm, link)?, group, placement, exchange)?;
        let (seconds, standing_s) = time(comm, config, &ranks, &meter)?;
        ranks.failure().map_or(Ok(()), Err)?;
        rows.push(Row { chunks, seconds, standing_s });
    }
    Ok((comm.rank() == 0).then_some(rows))
}

/// Two experts a rank, each of width 1024, two of them for each token of width 512.
fn config(num_ranks: usize) -> MoeConfig {
    MoeConfig::plain(512, 1024, 2 * num_ranks, 2)
}

/// The median seconds of forward, backward and the weights' gradients, and of standing in communication meanwhile, each on the
/// slowest rank.
fn time(
    comm: &dyn Communicator,
    config: MoeConfig,
    ranks: &ExpertRanks,
    meter: &Meter,
) -> Result<(f64, f64), CommError> {
    let ctx = Context::cpu((num_cores() / comm.size()).max(1));
    let weights = MoeWeights::random(&ctx, &config, SEED, 0.02).of_experts(&ctx, ranks.held());
    let mut grads = weights.clone();
    grads.tensors_mut().into_iter().for_each(|tensor| *tensor = ctx.zeros(tensor.shape(), DType::F32));
    let random = Random::new(SEED, Purpose::Test, comm.rank() as u64);
    let x: Vec<f32> = (0..TOKENS * config.width).map(|i| random.normal(i as u64)).collect();
    let x = Tensor::from_slice(ctx.pool(), &[TOKENS, config.width], &x);
    let layer = MoeLayer::over_ranks(config, ranks.clone()).expect("a valid layer");
    let mut times = Vec::new();
    for _ in 0..PASSES {
        comm.barrier()?;
        meter.take_totals();
        let start = Instant::now();
        let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
        let (_, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
        task.run(&ctx, Write::Replace, &mut grads);
        let mut slowest = [start.elapsed().as_secs_f64(), meter.take_totals().standing_s];
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        times.push((slowest[0], slowest[1]));
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(times[PASSES / 2])
}

/// The share of `whole` seconds that is not stood in.
fn hidden(standing_s: f64, whole: f64) -> f64 {
    if whole > 0.0 { 1.0 - standing_s / whole } else { 0.0 }
}

fn print((rows, [behind, under]): (&[Row], [Sums; 2]), num_ranks: usize, is_json: bool) {
    let of_layer = |row: &Row| hidden(row.standing_s, rows[0].standing_s);
    let of_sums = hidden(under.standing_s, behind.standing_s);
    if is_json {
        let row = |row: &Row| json!({ "chunks": row.chunks, "seconds": row.seconds, "standing_s": row.standing_s, "hidden": of_layer(row) });
        let sums = |sums: Sums| json!({ "seconds": sums.seconds, "standing_s": sums.standing_s });
        let gradients = json!({ "behind": sums(behind), "under": sums(under), "hidden": of_sums });
        let rows: Vec<_> = rows.iter().map(row).collect();
        println!("{:#}", json!({ "ranks": num_ranks, "rows": rows, "gradients": gradients }));
        return;
    }
    println!("{num_ranks} ranks, {TOKENS} tokens each: forward, backward and the weights' gradients of a layer");
    let milliseconds = |seconds: f64| format!("{:.2}", 1e3 * seconds);
    let cells = |row: &Row| {
        let hidden = format!("{:.0}%", 100.0 * of_layer(row));
        vec![row.chunks.to_string(), milliseconds(row.seconds), milliseconds(row.standing_s), hidden]
    };
    let header = ["chunks", "ms", "ms in communication", "of it hidden"];
    tables::print(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    println!(
        "\nsums of the gradients of dense matrices: behind backward {} ms, {} of them in communication; under it {} and {}: \
         {:.0}% hidden",
        milliseconds(behind.seconds),
        milliseconds(behind.standing_s),
        milliseconds(under.seconds),
        milliseconds(under.standing_s),
        100.0 * of_sums,
    );
}
