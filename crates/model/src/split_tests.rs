//! Parts of tensors: together they are the whole, however sizes divide.

use moeworks_tensor::{DType, Purpose, Random};

use super::*;
use crate::config::{LatentAttention, Variant};
use crate::decoder::Decoder;
use crate::weights::WeightTable;

fn model(num_heads: usize, num_kv_heads: usize) -> ModelConfig {
    let variant = Variant { qkv_bias: true, output_bias: true, sinks: true, head_bias: true, ..Variant::default() };
    ModelConfig {
        vocab_size: 23,
        width: 10,
        num_layers: 2,
        num_heads,
        num_kv_heads,
        head_dim: 4,
        moe_every: 2,
        num_experts: 3,
        expert_width: 5,
        dense_width: 11,
        variant,
        ..ModelConfig::default()
    }
}

/// Checks that every element of every tensor is on one rank, or on all ranks that are listed to hold the same.
fn check(config: &ModelConfig, size: usize) {
    let ctx = Context::cpu(1);
    let (decoder, table) = (Decoder::new(config.clone()).unwrap(), WeightTable::new(config));
    let mut whole = decoder.zero_weights(&ctx);
    for (i, (_, tensor)) in whole.tensors_mut().into_iter().enumerate() {
        let random = Random::new(1, Purpose::Test, i as u64);
        tensor.f32s_mut().iter_mut().zip(0..).for_each(|(x, at)| *x = 1.0 + random.below(at, 1000) as f32);
    }
    let splits: Vec<_> = (0..size).map(|rank| TensorSplit::new(config, &table, rank, size).unwrap()).collect();
    let part = |split: &TensorSplit| {
        let mut specs = table.specs().iter();
        whole.map_tensors(|tensor| split.part(&ctx, specs.next().unwrap(), tensor))
    };
    let parts: Vec<_> = splits.iter().map(part).collect();
    for (spec, (name, tensor)) in table.specs().iter().zip(whole.tensors()) {
        let mut joined = ctx.zeros(tensor.shape(), DType::F32);
        let mut num_elements = 0;
        for (rank, split) in splits.iter().enumerate() {
            let (share, part) = (split.share(spec), parts[rank].tensors()[spec.index].1);
            let same = &splits[share.ranks.start];
            assert!(share.ranks.contains(&rank) && same.share(spec) == share, "{name}: {share:?}");
            assert_eq!(split.part_shape(spec), part.shape(), "{name}");
            num_elements += if share.ranks.start == rank { part.len() } else { 0 };
            match &share.cut {
                Some(cut) => {
                    assert_eq!(cut.len(tensor.shape()), part.len(), "{name}");
                    cut.write_part(part.f32s(), &mut joined);
                }
                None => joined = part.clone(),
            }
        }
        assert_eq!(num_elements, tensor.len(), "{name}: each element once");
        assert_eq!(joined.f32s(), tensor.f32s(), "{name}");
    }
}

#[test]
fn parts_are_the_whole_whatever_divides() {
    for (num_heads, num_kv_heads) in [(6, 6), (6, 3), (6, 2), (5, 1), (7, 7)] {
        (1..=5).for_each(|size| check(&model(num_heads, num_kv_heads), size));
    }
}

#[test]
fn parts_of_latent_attention_are_the_whole() {
    let mut config = model(5, 5);
    let sizes = LatentAttention { query_rank: 6, kv_rank: 4, plain_dim: 2, rotary_dim: 2 };
    (config.variant.latent, config.variant.value_dim, config.head_dim) = (Some(sizes), 3, 4);
    (config.variant.qkv_bias, config.qk_norm) = (false, QkNorm::None);
    (1..=3).for_each(|size| check(&config, size));
}

#[test]
fn query_heads_stay_with_their_keys() {
    for ((num_heads, num_kv_heads), size) in [((8, 4), 3), ((8, 2), 3), ((12, 3), 8), ((4, 1), 4)] {
        let config = model(num_heads, num_kv_heads);
        let per_kv = num_heads / num_kv_heads;
        for rank in 0..size {
            let split = TensorSplit::new(&config, &WeightTable::new(&config), rank, size).unwrap();
            assert!(!split.heads.is_empty());
            assert_eq!(split.kv_heads, split.heads.start / per_kv..(split.heads.end - 1) / per_kv + 1);
            assert!(split.heads.len().is_multiple_of(split.kv_heads.len()));
        }
    }
}

#[test]
fn more_ranks_than_heads_are_refused() {
    let config = model(4, 2);
    let message = TensorSplit::new(&config, &WeightTable::new(&config), 0, 5).expect_err("refused").to_string();
    assert!(message.contains("num_heads") && message.contains("parallel.tp, 5"), "{message}");
}
