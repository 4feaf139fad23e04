//! A text sampled on several ranks equals that of one rank.

use super::*;

/// Returns the logits after a prompt of five ids, and after each of three more, of a model on one rank.
fn text_on_one(model: &ModelConfig, ids: &[u32]) -> Vec<Vec<f32>> {
    let ctx = Context::cpu(1);
    let decoder = Decoder::new(model.clone()).unwrap();
    let (weights, mut cache) = (decoder.init(&ctx, 7, None), KvCache::new(model));
    let mut extend =
        |ids: &[u32]| decoder.forward_cached(&ctx, &weights, &mut cache, ids, None).unwrap().f32s().to_vec();
    parts_of_text(ids).map(&mut extend).collect()
}

fn parts_of_text(ids: &[u32]) -> impl Iterator<Item = &[u32]> {
    [&ids[..5]].into_iter().chain(ids[5..].chunks(1))
}

/// Returns the same logits computed on ranks, as the root gets them.
fn text_on_ranks(case: &Case, ids: &[u32]) -> Vec<Vec<f32>> {
    let texts = try_run_ranks(&RankOptions::new(case.layout.num_ranks()), |comm: &dyn Communicator| {
        let ranks = Ranks::new(comm, case.layout, case.placements.clone(), case.exchange)?.with_zero(case.zero);
        let (ranks, ctx) = (Arc::new(ranks), Context::cpu(1));
        let decoder = decoder_on_ranks(&ranks, case.model.clone(), case.table())?;
        let part = decoder.init(&ctx, 7, Some(&mut |spec, tensor| ranks.part(&ctx, spec, &tensor)));
        let weights = if case.zero == 3 { slices(&ranks, &ctx, &part) } else { part };
        let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
        if !ranks.is_root() {
            return ranks.follow_text(model).map(|()| Vec::new());
        }
        let mut cache = KvCache::new(decoder.config());
        let extend = |ids| Ok(ranks.extend_together(model, &mut cache, ids)?.f32s().to_vec());
        let logits = parts_of_text(ids).map(extend).collect::<Result<_, TrainError>>()?;
        ranks.end_text()?;
        Ok::<_, TrainError>(logits)
    });
    texts.expect("the ranks talk").swap_remove(0)
}

#[test]
fn ranks_write_the_text_of_one_rank() {
    let layouts = [(1, 3, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (3, 1, 1)];
    for (index, layout) in layouts.into_iter().enumerate() {
        for zero in [0, 3] {
            let case = Case { zero, ..sliced(layout, model()) };
            let ids = &ids(&case, 0, 0..2)[..8];
            let (one, many) = (text_on_one(&case.model, ids), text_on_ranks(&case, ids));
            assert_eq!(many.len(), one.len());
            for (one, many) in one.iter().flatten().zip(many.iter().flatten()) {
                assert!((one - many).abs() <= 1e-5 * one.abs().max(1.0), "layout {index}, {zero}: {many}, not {one}");
            }
        }
    }
}
