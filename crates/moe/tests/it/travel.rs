//! Work that runs while tokens travel: shared experts under the dispatch, and the hops of the two-hop path under each
//! other. The bits are those of one after the other.

use std::sync::Arc;
use std::time::Duration;

use moeworks_comm::{CommError, Communicator, Meter, Metered, RankOptions, Span, Throttled, run_ranks};
use moeworks_moe::{EpOptions, ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, Pace, RouterInput, WgradTarget};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{Algorithm, Exchange, Link, Links, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

/// Tokens of a rank.
const TOKENS: usize = 32;

/// A layer with a shared expert, whose tokens all go to all ranks.
fn config(num_ranks: usize) -> MoeConfig {
    MoeConfig { shared_width: 24, ..MoeConfig::plain(64, 16, num_ranks, num_ranks) }
}

/// The results of a step of one rank: output, gradient of the input, and gradients of the weights.
fn step(comm: &dyn Communicator, group: Box<dyn Communicator>, options: EpOptions) -> Result<Vec<Vec<f32>>, CommError> {
    let (ctx, config) = (Context::cpu(1), config(comm.size()));
    let placement = Placement::sharded(config.num_experts, comm.size());
    let ranks = ExpertRanks::new(comm.split(Some(0), comm.rank())?.expect("a part"), group, placement, options)?;
    let weights = MoeWeights::random(&ctx, &config, 5, 0.3).select_experts(&ctx, ranks.layer(0).held());
    let random = Random::new(5, Purpose::Test, comm.rank() as u64);
    let x: Vec<f32> = (0..TOKENS * config.width).map(|i| random.normal(i as u64)).collect();
    let x = Tensor::from_slice(ctx.pool(), &[TOKENS, config.width], &x);
    let layer = MoeLayer::expert_parallel(config, ranks.layer(0)).expect("a layer");
    let (y, saved) = layer.forward(&ctx, &weights, &x, &RouterInput::default());
    let (dx, task) = layer.backward(&ctx, &weights, &saved, &y, &LossGrad::default());
    let mut grads = weights.clone();
    grads.tensors_mut().into_iter().for_each(|grad| *grad = ctx.zeros(grad.shape(), DType::F32));
    task.run(&ctx, WgradTarget::new(Write::Replace, &mut grads));
    let of_weights = grads.tensors_mut().into_iter().map(|grad| grad.f32s().to_vec());
    let results = [y.f32s().to_vec(), dx.f32s().to_vec()].into_iter().chain(of_weights).collect();
    ranks.failure().map_or(Ok(results), Err)
}

#[test]
fn what_runs_while_tokens_travel_changes_no_bit() {
    let results = |chunks: usize, hop_parts: usize, shared_under_dispatch: bool| {
        run_ranks(&RankOptions::new(0).with_nodes(&[0, 1, 1, 0]), |comm| {
            let exchange = Exchange { algorithm: Algorithm::TwoHop, chunks, ..Exchange::plain(Wire::F32) };
            let options = EpOptions { hop_parts, shared_under_dispatch, ..exchange.into() };
            step(comm, comm.split(Some(0), comm.rank())?.expect("a part"), options)
        })
        .into_iter()
        .map(Result::unwrap)
        .collect::<Vec<_>>()
    };
    for chunks in [1, 2] {
        let plain = results(chunks, 1, false);
        for (hop_parts, shared_under_dispatch) in [(1, true), (4, false), (3, true), (0, true)] {
            let other = results(chunks, hop_parts, shared_under_dispatch);
            assert!(other == plain, "{chunks} chunks, {hop_parts} parts, shared early: {shared_under_dispatch}");
        }
    }
}

/// The time of a dispatch or a combine, and that of the shared expert.
const EXCHANGE_S: f64 = 0.050;
const SHARED_S: f64 = 0.030;

/// Returns the spans of a step on two ranks with slow links between them.
fn spans_of_step(shared_under_dispatch: bool) -> Vec<Vec<Span>> {
    let bytes = (TOKENS * config(2).width * size_of::<f32>()) as f64;
    let link = Link { latency_s: 0.0, bytes_per_s: bytes / EXCHANGE_S };
    let results = run_ranks(&RankOptions::new(2), |comm| {
        let meter = Arc::new(Meter::new(true));
        let part = comm.split(Some(0), comm.rank())?.expect("a part");
        let throttled = Throttled::new(part, Links { node: link, cluster: link });
        let group = Box::new(Metered::new(Box::new(throttled), Arc::clone(&meter)));
        let pace = Pace { shared_forward_s: SHARED_S, shared_backward_s: SHARED_S, ..Pace::default() };
        let (meter_of_parts, exchange) = (Some(Arc::clone(&meter)), Exchange::plain(Wire::F32));
        let options = EpOptions { pace: Some(pace), meter: meter_of_parts, shared_under_dispatch, ..exchange.into() };
        step(comm, group, options)?;
        Ok::<_, CommError>(meter.take_spans())
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// Returns how long `span` runs while rows are in flight.
fn in_flight_under(span: &Span, spans: &[Span]) -> Duration {
    let rows = (TOKENS * config(2).width * size_of::<f32>()) as u64;
    let at_once = |other: &Span| {
        (span.start + span.length).min(other.start + other.length).saturating_sub(span.start.max(other.start))
    };
    spans.iter().filter(|other| other.is_in_flight && other.bytes == rows).map(at_once).sum()
}

#[test]
fn a_shared_expert_is_computed_under_the_dispatch_forward_and_backward() {
    let hidden = |spans: &[Span], name: &str| {
        let span = spans.iter().find(|span| span.name == name && !span.is_in_flight).expect("a shared expert");
        in_flight_under(span, spans).as_secs_f64() / span.length.as_secs_f64()
    };
    let names = ["shared experts", "shared experts, backward"];
    let is_hidden = |spans: &Vec<Span>| names.iter().all(|name| hidden(spans, name) > 0.95);
    // On a busy machine a rank may be late.
    assert!((0..10).any(|_| spans_of_step(true).iter().all(is_hidden)), "no shared expert under a dispatch");
    for spans in spans_of_step(false) {
        assert!(names.iter().all(|name| hidden(&spans, name) < 0.05), "afterwards no rows are in flight");
    }
}
