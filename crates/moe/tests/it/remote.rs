//! A layer in use whose experts are spread over ranks gives the bits of one rank.

use moeworks_comm::{CommError, Communicator, RankOptions, run_ranks, try_run_ranks};
use moeworks_moe::{
    HeldLayer, MoeConfig, MoeLayer, MoeWeights, RemoteExperts, RouterInput, select_experts, serve_experts,
};
use moeworks_ops::Context;
use moeworks_plan::{Placement, Placements};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config;

/// The number of the layer in its model.
const NUMBER: usize = 3;

/// The input of a router of a model in use.
fn in_use() -> RouterInput<'static> {
    RouterInput { progress: 1.0, is_inference: true, is_forward_only: true, ..RouterInput::default() }
}

fn weights(ctx: &Context, config: &MoeConfig, dtype: DType, has_biases: bool) -> MoeWeights {
    let random = MoeWeights::random(ctx, config, 7, 0.2);
    let mut weights = MoeWeights {
        gate_up: moeworks_ops::elementwise::cast(ctx, &random.gate_up, dtype),
        down: moeworks_ops::elementwise::cast(ctx, &random.down, dtype),
        ..random
    };
    let bias = |len: usize, stream: u64| {
        let mut bias = ctx.zeros(&[config.num_experts, len], DType::F32);
        moeworks_ops::elementwise::fill_normal(ctx, &Random::new(9, Purpose::Init, stream), 0.5, &mut bias);
        bias
    };
    let af = weights.gate_up.shape()[1];
    weights.biases = has_biases.then(|| (bias(af, 1), bias(config.width, 2)));
    weights
}

/// Returns the weights of a rank that holds these experts.
fn part(ctx: &Context, weights: &MoeWeights, experts: &[usize]) -> MoeWeights {
    let select = |tensor: &Tensor| select_experts(ctx, tensor, experts);
    MoeWeights {
        gate_up: select(&weights.gate_up),
        down: select(&weights.down),
        biases: weights.biases.as_ref().map(|(gate_up, down)| (select(gate_up), select(down))),
        ..weights.clone()
    }
}

fn inputs(ctx: &Context, num_tokens: usize, width: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..num_tokens * width).map(|i| (i as f32 * 0.37).sin()).collect();
    moeworks_ops::elementwise::cast(ctx, &Tensor::from_slice(ctx.pool(), &[num_tokens, width], &values), dtype)
}

#[derive(Clone, Copy)]
struct Case<'a> {
    config: &'a MoeConfig,
    dtype: DType,
    has_biases: bool,
}

/// Returns the outputs for passes of these numbers of tokens, on one rank.
fn on_one(case: Case<'_>, lens: &[usize]) -> Vec<Vec<f32>> {
    let Case { config, dtype, has_biases } = case;
    let (ctx, layer) = (Context::cpu(1), MoeLayer::new(config.clone()).unwrap());
    let weights = weights(&ctx, config, dtype, has_biases);
    let pass = |&len: &usize| {
        let x = inputs(&ctx, len, config.width, dtype);
        layer.forward(&ctx, &weights, &x, &in_use()).0.f32s().to_vec()
    };
    lens.iter().map(pass).collect()
}

/// Returns the outputs for the same passes with the experts on ranks.
fn on_ranks(case: Case<'_>, lens: &[usize], placement: &Placement) -> Result<Vec<Vec<f32>>, CommError> {
    let Case { config, dtype, has_biases } = case;
    let rank = |comm: &dyn Communicator| {
        let ctx = Context::cpu(1);
        let whole = weights(&ctx, config, dtype, has_biases);
        let held = part(&ctx, &whole, &placement.experts_of(comm.rank()));
        let own = comm.split(Some(0), comm.rank())?.expect("a group");
        if comm.rank() > 0 {
            let layer = HeldLayer { number: NUMBER, weights: &held, activation: config.activation };
            serve_experts(&ctx, &*own, &[layer])?;
            return Ok::<_, CommError>(Vec::new());
        }
        let remote = RemoteExperts::new(own, Placements::from(placement.clone()));
        let layer = MoeLayer::new(config.clone()).unwrap().with_remote_experts(remote.layer(NUMBER));
        let pass = |&len: &usize| {
            let x = inputs(&ctx, len, config.width, dtype);
            layer.forward(&ctx, &held, &x, &in_use()).0.f32s().to_vec()
        };
        let outputs = lens.iter().map(pass).collect();
        remote.end()?;
        Ok(outputs)
    };
    Ok(try_run_ranks::<_, CommError>(&RankOptions::new(placement.num_ranks()), rank)?.swap_remove(0))
}

#[test]
fn ranks_give_the_bits_of_one_wherever_experts_are() {
    let lens = [1, 5, 17, 40];
    let replicated = {
        let mut placement = Placement::sharded(6, 3);
        placement.replicate(0, &[1, 2]);
        placement.replicate(5, &[0]);
        placement
    };
    let elsewhere = "placement experts=6 ranks=2\n0: 1\n1: 1\n2: 1\n3: 1\n4: 1\n5: 1\n".parse().unwrap();
    let placements = [2, 3, 4, 8].map(|ranks| Placement::sharded(6, ranks));
    let shared = MoeConfig { shared_width: 12, ..config(16, 24, 6, 2) };
    for (config, dtype, has_biases) in [
        (config(16, 24, 6, 2), DType::F32, false),
        (config(16, 24, 6, 3), DType::BF16, false),
        (shared, DType::F32, true),
    ] {
        let case = Case { config: &config, dtype, has_biases };
        let expected = on_one(case, &lens);
        for placement in placements.iter().chain([&replicated, &elsewhere]) {
            let found = on_ranks(case, &lens, placement).unwrap();
            assert_eq!(found, expected, "{dtype:?} {placement}");
        }
    }
}

#[test]
fn experts_that_move_between_passes_give_the_same_bits() {
    let lens = [1, 5, 17, 40, 9];
    let placements: Vec<Placement> = [
        "placement experts=6 ranks=3\n0: 2\n1: 2\n2: 0\n3: 0\n4: 1\n5: 1\n",
        "placement experts=6 ranks=3\n0: *\n1: 2\n2: 0 1\n3: 0\n4: 1\n5: 1\n",
        "placement experts=6 ranks=3\n0: 1\n1: 1\n2: 1\n3: 1\n4: 1\n5: 1\n",
        "placement experts=6 ranks=3\n0: 0\n1: 0\n2: 0\n3: 0\n4: 0\n5: 2\n",
    ]
    .map(|text| text.parse().unwrap())
    .to_vec();
    for (dtype, has_biases) in [(DType::F32, true), (DType::BF16, false)] {
        let config = config(16, 24, 6, 2);
        let case = Case { config: &config, dtype, has_biases };
        let rank = |comm: &dyn Communicator| {
            let ctx = Context::cpu(1);
            let first = Placement::sharded(6, 3);
            let held = part(&ctx, &weights(&ctx, &config, dtype, has_biases), &first.experts_of(comm.rank()));
            let own = comm.split(Some(0), comm.rank())?.expect("a group");
            if comm.rank() > 0 {
                let layer = HeldLayer { number: NUMBER, weights: &held, activation: config.activation };
                serve_experts(&ctx, &*own, &[layer])?;
                return Ok::<_, CommError>(Vec::new());
            }
            let remote = RemoteExperts::new(own, Placements::from(first));
            let layer = MoeLayer::new(config.clone()).unwrap().with_remote_experts(remote.layer(NUMBER));
            let mut outputs = Vec::new();
            for (pass, &len) in lens.iter().enumerate() {
                if let Some(to) = pass.checked_sub(1).map(|move_| &placements[move_]) {
                    remote.move_experts(&ctx, NUMBER, to, &held)?;
                    assert_eq!(*remote.placement(NUMBER), *to);
                }
                let x = inputs(&ctx, len, config.width, dtype);
                outputs.push(layer.forward(&ctx, &held, &x, &in_use()).0.f32s().to_vec());
            }
            remote.end()?;
            Ok(outputs)
        };
        let found = try_run_ranks::<_, CommError>(&RankOptions::new(3), rank).unwrap().swap_remove(0);
        assert_eq!(found, on_one(case, &lens), "{dtype:?}");
    }
}

#[test]
fn a_rank_that_is_lost_is_told_after_the_pass_and_nothing_waits() {
    let config = config(16, 24, 6, 2);
    let results = run_ranks::<_, CommError>(&RankOptions::new(2), |comm: &dyn Communicator| {
        let ctx = Context::cpu(1);
        let own = comm.split(Some(0), comm.rank())?.expect("a group");
        if comm.rank() == 1 {
            // Once the root has begun a pass.
            own.receive(&mut [0_u32; 4], 0, 1)?;
            return Err(comm.abort("its memory is full"));
        }
        let placement = Placement::sharded(6, 2);
        let held = part(&ctx, &weights(&ctx, &config, DType::F32, false), &placement.experts_of(0));
        let remote = RemoteExperts::new(own, Placements::from(placement));
        let layer = MoeLayer::new(config.clone()).unwrap().with_remote_experts(remote.layer(NUMBER));
        let x = inputs(&ctx, 9, config.width, DType::F32);
        for _ in 0..3 {
            assert_eq!(layer.forward(&ctx, &held, &x, &in_use()).0.shape(), [9, 16]);
        }
        assert!(remote.end().is_err());
        Ok(remote.failure())
    });
    let failure = results[0].as_ref().unwrap().clone().expect("a failure");
    assert!(failure.to_string().contains("rank 1 died: its memory is full"), "{failure}");
}
