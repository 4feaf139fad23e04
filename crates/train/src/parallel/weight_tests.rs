//! The parts of weights that ranks hold, and rules that change them.

use super::*;

#[test]
fn weights_that_rules_replicate_give_the_step_of_one_rank() {
    let model = ModelConfig { num_layers: 3, moe_every: 2, dense_width: 21, num_heads: 4, num_kv_heads: 2, ..model() };
    let whole = ModelConfig { qk_norm: QkNorm::Whole, ..model.clone() };
    let head = ModelConfig { qk_norm: QkNorm::Head, ..model.clone() };
    let tied = ModelConfig { tie_embeddings: true, ..model.clone() };
    for (model, rules) in [
        (&model, &["model.embed_tokens.weight=replicated"][..]),
        (&model, &["lm_head.*=replicated"]),
        (&tied, &["model.embed_tokens.weight=replicated"]),
        (&head, &["model.layers.1.self_attn.*=replicated"]),
        (&whole, &["model.layers.0.self_attn.*=replicated"]),
        (&model, &["model.layers.0.mlp.*=replicated"]),
        (&head, &["*.self_attn.*=replicated", "model.layers.2.*=replicated", "model.layers.2.self_attn.*=tensor"]),
    ] {
        for (layout, zero) in [((1, 1, 2), 0), ((2, 1, 2), 3), ((1, 2, 2), 1), ((1, 1, 3), 0)] {
            let sharding = rules.iter().map(|&rule| rule.to_owned()).collect();
            check(&Case { sharding, zero, ..sliced(layout, model.clone()) });
        }
    }
}

#[test]
fn ranks_hold_the_parts_that_the_table_of_weights_says() {
    let variant = Variant { qkv_bias: true, feed_forward_bias: true, ..Variant::default() };
    let model = ModelConfig { num_layers: 3, moe_every: 2, dense_width: 21, num_heads: 4, variant, ..model() };
    let rules = ["lm_head.*=replicated", "model.layers.1.self_attn.*=replicated"];
    let plain = |layout| sliced(layout, model.clone());
    for case in [
        plain((1, 1, 1)),
        plain((2, 3, 1)),
        plain((1, 1, 3)),
        plain((2, 2, 2)),
        Case { sharding: rules.iter().map(|&rule| rule.to_owned()).collect(), ..plain((1, 2, 2)) },
        placement::placed((2, 2, 1), model.clone()),
        placement::placed((1, 3, 1), model.clone()),
        placement::placed((1, 2, 2), model.clone()),
    ] {
        let layout = case.layout;
        let table = case.table();
        let sharding = Sharding::new(&model, &table, case.layout, case.placements.clone()).expect("a layout");
        let num_parts = try_run_ranks(&RankOptions::new(case.layout.num_ranks()), |comm: &dyn Communicator| {
            let ranks = Ranks::new(comm, case.layout, case.placements.clone(), case.exchange)?;
            let (ranks, ctx) = (Arc::new(ranks), Context::cpu(1));
            let decoder = decoder_on_ranks(&ranks, model.clone(), table.clone())?;
            let whole = Decoder::new(model.clone()).expect("a model").init(&ctx, 7, None);
            let held = decoder.init(&ctx, 7, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
            for ((spec, (name, whole)), (_, held)) in table.specs().iter().zip(whole.tensors()).zip(held.tensors()) {
                let expected =
                    sharding.cut(spec, comm.rank()).map_or_else(|| whole.clone(), |cut| cut.part(&ctx, whole));
                assert_eq!(held.shape(), sharding.part_shape(spec, comm.rank()), "{layout} {name}");
                assert!(held.bytes() == expected.bytes(), "{layout} {name} on rank {}", comm.rank());
                let of_part = sharding.parts(spec).into_iter().find(|part| part.ranks.contains(&comm.rank()));
                let mut holders = ranks.holders(spec).world_ranks().to_vec();
                holders.sort_unstable();
                let of_part = of_part.expect("a part").ranks;
                assert!(holders.iter().all(|rank| of_part.contains(rank)), "{layout} {name}: {holders:?} {of_part:?}");
            }
            Ok::<_, TrainError>(held.tensors().len())
        });
        assert!(num_parts.expect("the ranks talk").iter().all(|&num| num == table.specs().len()));
    }
}
