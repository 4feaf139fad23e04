//! Ranks that disagree, in settings or in bits of weights, are named.

use super::*;

#[test]
fn ranks_with_other_settings_are_refused() {
    let results = moeworks_comm::run_ranks(&RankOptions::new(3), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, Layout::new(3, 1, 1), Placement::sharded(1, 1), Exchange::plain(Wire::F32))?;
        ranks.check_same("configuration", if ranks.world.rank() == 1 { "lr = 1" } else { "lr = 2" })
    });
    for result in results {
        let message = result.expect_err("refused").to_string();
        assert!(message.contains("rank 1") && message.contains("configuration"), "{message}");
    }
}

#[test]
fn ranks_whose_copies_of_weights_drift_apart_are_named() {
    let drifted = moeworks_comm::run_ranks(&RankOptions::new(4), |comm: &dyn Communicator| {
        let placement = Placement::sharded(model().num_experts, 2);
        let ranks = Arc::new(Ranks::new(comm, Layout::new(2, 2, 1), placement, Exchange::plain(Wire::F32))?);
        let ctx = Context::cpu(1);
        let mut weights = decoder_on_ranks(&ranks, model(), WeightTable::new(&model()))?.init(
            &ctx,
            1,
            Some(&mut |spec, whole| ranks.part(&ctx, spec, &whole)),
        );
        ranks.check_copies(&weights)?;
        let (_, last_expert) =
            weights.tensors_mut().into_iter().rfind(|(name, _)| name.contains(".mlp.experts.")).expect("experts");
        let bits = last_expert.f32s()[0].to_bits() ^ u32::from(comm.rank() == 3);
        last_expert.f32s_mut()[0] = f32::from_bits(bits);
        ranks.check_copies(&weights)
    });
    // Ranks 1 and 3 hold the same experts.
    for (rank, result) in drifted.into_iter().enumerate().filter(|(rank, _)| rank % 2 == 1) {
        let message = result.expect_err("refused").to_string();
        assert!(message.contains("rank 3 has other bits than rank 1 of model.layers.1."), "rank {rank}: {message}");
    }
}
