use super::*;
use crate::config::{ModelConfig, QkNorm, Variant};

fn table() -> WeightTable {
    let variant = Variant { head_bias: true, ..Variant::default() };
    WeightTable::new(&ModelConfig {
        vocab_size: 20,
        moe_every: 2,
        qk_norm: QkNorm::Head,
        variant,
        ..ModelConfig::default()
    })
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

fn sharded(rules: &[&str]) -> Result<WeightTable, String> {
    let mut table = table();
    table.set_sharding(&texts(rules)).map_err(|error| error.to_string())?;
    Ok(table)
}

fn shard(table: &WeightTable, name: &str) -> Shard {
    table.specs().iter().find(|spec| spec.name == name).expect("a weight").shard
}

#[test]
fn attention_of_one_layer_is_replicated_and_its_norms_then_find_whole_gradients() {
    let table = sharded(&["model.layers.1.self_attn.*=replicated"]).unwrap();
    for part in ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight"] {
        assert_eq!(shard(&table, &format!("model.layers.1.self_attn.{part}")), Shard::Replicated, "{part}");
    }
    assert_eq!(shard(&table, "model.layers.0.self_attn.q_norm.weight"), Shard::ReplicatedPartialGrad);
    assert!(shard(&table, "model.layers.0.self_attn.q_proj.weight").is_over_tensor_ranks());
}

#[test]
fn later_rules_win() {
    let table = sharded(&["*.self_attn.*=replicated", "model.layers.2.self_attn.*=tensor"]).unwrap();
    assert!(shard(&table, "model.layers.2.self_attn.q_proj.weight").is_over_tensor_ranks());
    assert_eq!(shard(&table, "model.layers.3.self_attn.q_proj.weight"), Shard::Replicated);
}

#[test]
fn rules_that_cannot_be_carried_out_are_refused() {
    for (rule, expected) in [
        ("*.q_proj.weight=replicated", "\"model.layers.0.self_attn.*=replicated\""),
        ("lm_head.weight=replicated", "\"lm_head.*=replicated\""),
        ("*.experts.*=replicated", "parallel.placement"),
        ("model.norm.weight=tensor", "model.norm.weight: only the embedding"),
        ("*.mlp.gate.weight=tensor", "mlp.gate.weight: only"),
        ("model.layers.0.mlp.*=rows", "must be PATTERN=replicated or PATTERN=tensor"),
        ("*.mlp.down_prj=replicated", "matches no weight; near names: model.layers.*.mlp.down_proj"),
    ] {
        let problem = sharded(&[rule]).expect_err(rule);
        assert!(problem.contains(expected) && problem.contains(rule), "{problem}");
    }
}

#[test]
fn frozen_tensors_are_counted_and_their_gradients_left_out_where_that_is_whole() {
    let mut table = table();
    let all = table.num_trainable();
    table.freeze(&texts(&["model.embed_tokens.*", "*.mlp.experts.*", "model.layers.0.mlp.down_proj"])).unwrap();
    let frozen: usize = table.specs().iter().filter(|spec| !spec.is_trainable).map(WeightSpec::num_elements).sum();
    assert_eq!(table.num_trainable(), all - frozen as u64);
    let skips = |name: &str| table.skips_gradient(table.specs().iter().find(|spec| spec.name == name).unwrap());
    assert!(skips("model.embed_tokens.weight") && skips("model.layers.1.mlp.experts.gate_up_proj"));
    assert!(!skips("model.layers.0.mlp.down_proj"), "its gradient comes with that of gate and up, which is wanted");
    assert!(!skips("lm_head.weight"));
}

#[test]
fn patterns_that_match_nothing_or_leave_nothing_to_train_are_refused() {
    let refused = |pattern: &str| table().freeze(&texts(&[pattern])).expect_err("refused").to_string();
    assert!(refused("*.mlp.expert.*").contains("matches no weight; near names: model.layers.*.mlp.experts."));
    assert!(refused("*").contains("leaves no weight to train"));
}
