//! Expert ids passed to layers on one and several ranks, in f32 and bf16.

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_moe::{
    ExpertIds, ExpertRanks, LossGrad, MoeConfig, MoeLayer, MoeWeights, Overflow, RouterConfig, RouterInput, RouterKind,
    WgradTarget,
};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::Write;
use moeworks_plan::{Exchange, Placement, Wire};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config;

const TOKENS: usize = 24;

/// The bits of a rank's step, and the experts of its tokens.
struct Step {
    bits: Vec<Vec<u8>>,
    ids: ExpertIds,
}

/// A layer with all experts, or with those of a rank.
struct Layer {
    ctx: Context,
    layer: MoeLayer,
    weights: MoeWeights,
    x: Tensor,
}

impl Layer {
    fn new(config: &MoeConfig, dtype: DType, rank: usize, ranks: Option<&ExpertRanks>) -> Self {
        let ctx = Context::cpu(1);
        let mut weights = MoeWeights::random(&ctx, config, 5, 0.5);
        for experts in [&mut weights.gate_up, &mut weights.down] {
            *experts = cast(&ctx, experts, dtype);
        }
        if let Some(shared) = &mut weights.shared {
            (shared.gate_up, shared.down) = (cast(&ctx, &shared.gate_up, dtype), cast(&ctx, &shared.down, dtype));
        }
        let (layer, weights) = match ranks.map(|ranks| ranks.layer(0)) {
            None => (MoeLayer::new(config.clone()).unwrap(), weights),
            Some(ranks) => {
                let weights = weights.select_experts(&ctx, ranks.held());
                (MoeLayer::expert_parallel(config.clone(), ranks).unwrap(), weights)
            }
        };
        let random = Random::new(6, Purpose::Test, rank as u64);
        let x: Vec<f32> = (0..TOKENS * config.width).map(|i| random.normal(i as u64)).collect();
        let x = cast(&ctx, &Tensor::from_slice(ctx.pool(), &[TOKENS, config.width], &x), dtype);
        Self { ctx, layer, weights, x }
    }

    /// Runs a training step with `input`.
    fn step(&self, input: &RouterInput<'_>) -> Step {
        let Self { ctx, layer, weights, x } = self;
        let (y, saved) = layer.forward(ctx, weights, x, input);
        let losses = LossGrad { z: 0.1, balance: vec![0.1; layer.config().num_choosable()], ..LossGrad::default() };
        let (dx, task) = layer.backward(ctx, weights, &saved, &y, &losses);
        let mut grads = weights.clone();
        grads.tensors_mut().into_iter().for_each(|grad| *grad = ctx.zeros(grad.shape(), DType::F32));
        task.run(ctx, WgradTarget::new(Write::Replace, &mut grads));
        let tensors = [&y, &dx].into_iter().chain(grads.tensors());
        Step { bits: tensors.map(|tensor| tensor.bytes().to_vec()).collect(), ids: saved.expert_ids().expect("ids") }
    }
}

fn cases() -> Vec<MoeConfig> {
    let plain = MoeConfig { shared_width: 6, normalize_weights: true, ..config(12, 10, 6, 2) };
    let of = |change: &dyn Fn(&mut MoeConfig)| {
        let mut config = plain.clone();
        change(&mut config);
        config
    };
    let kind = |kind| RouterConfig { kind, ..RouterConfig::default() };
    vec![
        plain.clone(),
        of(&|config| config.capacity_factor = 0.8),
        of(&|config| (config.capacity_factor, config.router.overflow) = (0.8, Overflow::Priority)),
        of(&|config| (config.capacity_factor, config.router.overflow) = (0.8, Overflow::Reroute)),
        of(&|config| (config.router.copy_experts, config.router.null_experts) = (2, 1)),
        of(&|config| (config.router, config.top_k) = (kind(RouterKind::Base), 1)),
        of(&|config| config.router = kind(RouterKind::Sinkhorn)),
        of(&|config| (config.router, config.capacity_factor) = (kind(RouterKind::TopP), 1.0)),
    ]
}

#[test]
fn ids_handed_back_give_the_same_bits_on_one_and_two_ranks() {
    for (config, dtype) in cases().iter().flat_map(|config| [(config, DType::F32), (config, DType::BF16)]) {
        let check = |rank: usize, ranks: Option<&ExpertRanks>| {
            let layer = Layer::new(config, dtype, rank, ranks);
            let first = layer.step(&RouterInput::default());
            let second = layer.step(&RouterInput { expert_ids: Some(&first.ids), ..RouterInput::default() });
            assert!(first.ids.ids() == second.ids.ids(), "{config:?}");
            assert!(first.bits == second.bits, "{dtype:?}, {config:?}");
        };
        check(0, None);
        try_run_ranks(&RankOptions::new(2), |comm: &dyn Communicator| {
            let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a part"));
            let placement = Placement::sharded(config.num_experts, 2);
            let ranks = ExpertRanks::new(part()?, part()?, placement, Exchange::plain(Wire::F32))?;
            check(comm.rank(), Some(&ranks));
            ranks.failure().map_or(Ok(()), Err)
        })
        .expect("the ranks talk");
    }
}

#[test]
fn tokens_go_to_the_ranks_of_the_experts_handed_in() {
    let config = config(12, 10, 6, 2);
    // All tokens of both ranks go to the second rank's experts.
    let ids: Vec<u32> = (0..TOKENS as u32).flat_map(|t| [3 + t % 3, 3 + (t + 1) % 3]).collect();
    let alone: Vec<Tensor> = (0..2)
        .map(|rank| {
            let Layer { ctx, layer, weights, x } = Layer::new(&config, DType::F32, rank, None);
            let ids = layer.expert_ids(&ctx, TOKENS, &ids).unwrap();
            layer.forward(&ctx, &weights, &x, &RouterInput { expert_ids: Some(&ids), ..RouterInput::default() }).0
        })
        .collect();
    let of_ranks = try_run_ranks(&RankOptions::new(2), |comm: &dyn Communicator| {
        let part = || comm.split(Some(0), comm.rank()).map(|part| part.expect("a part"));
        let ranks = ExpertRanks::new(part()?, part()?, Placement::sharded(6, 2), Exchange::plain(Wire::F32))?;
        let Layer { ctx, layer, weights, x } = Layer::new(&config, DType::F32, comm.rank(), Some(&ranks));
        let ids = layer.expert_ids(&ctx, TOKENS, &ids).unwrap();
        let (y, _) =
            layer.forward(&ctx, &weights, &x, &RouterInput { expert_ids: Some(&ids), ..RouterInput::default() });
        ranks.failure().map_or(Ok(y.f32s().to_vec()), Err)
    });
    for (rank, (y, alone)) in of_ranks.expect("the ranks talk").iter().zip(&alone).enumerate() {
        crate::ranks::assert_close(&format!("y of rank {rank}"), y, alone.f32s());
    }
}
