//! A configuration is equal in all of its layouts, and a fault that is put in is found.

use moeworks_model::ModelConfig;

use super::*;

fn config() -> RunConfig {
    let mut config = RunConfig {
        model: ModelConfig {
            vocab_size: 40,
            width: 16,
            num_layers: 4,
            num_heads: 2,
            num_kv_heads: 2,
            head_dim: 8,
            moe_every: 2,
            num_experts: 4,
            top_k: 2,
            expert_width: 12,
            shared_width: 8,
            dense_width: 20,
            max_seq_len: 16,
            init_std: 0.2,
            ..ModelConfig::default()
        },
        ..RunConfig::default()
    };
    config.train.seq_len = 6;
    config.train.batch_size = 5;
    config.train.grad_accumulation = 3;
    config
}

fn check(config: &RunConfig) -> LayoutCheck {
    LayoutCheck::new(config, 1e-4).expect("a right configuration")
}

#[test]
fn a_model_is_equal_in_every_layout_of_four_ranks() {
    let mut check = check(&config());
    let (layouts, skipped) = layouts(&config(), 4);
    assert!(layouts.len() > 40, "{} layouts, {skipped:?}", layouts.len());
    for layout in layouts {
        let outcome = check.check(&layout).unwrap_or_else(|error| panic!("{layout}: {error}"));
        assert_eq!(outcome.difference, None, "{layout}");
        assert!(outcome.largest < 1e-5, "{layout}: {outcome:?}");
    }
}

#[test]
fn a_fault_is_found_in_the_tensor_that_has_it() {
    let tensor = "model.layers.1.self_attn.q_proj.weight".to_owned();
    for sizes in ["dp 2", "pp 2, 1f1b", "ep 2, zero 2"] {
        let mut check = check(&config()).with_fault(Fault { tensor: tensor.clone() }).expect("a tensor of the model");
        let (layouts, _) = layouts(&config(), 2);
        let layout = layouts.iter().find(|layout| layout.to_string() == sizes).expect("a layout of two ranks");
        let difference = check.check(layout).expect("a step").difference.expect("a fault that is found");
        assert_eq!(difference.of, tensor, "{sizes}");
        assert!(difference.share > 0.1, "{difference}");
    }
}

#[test]
fn a_fault_in_a_copy_of_a_replicated_gradient_is_found_on_its_rank() {
    for sizes in ["tp 2", "tp 2, pp 2, dualpipe"] {
        for tensor in ["model.layers.1.input_layernorm.weight", "model.layers.3.post_attention_layernorm.weight"] {
            let fault = Fault { tensor: tensor.to_owned() };
            let mut check = check(&config()).with_fault(fault).expect("a tensor of the model");
            let (layouts, _) = layouts(&config(), 4);
            let layout = layouts.iter().find(|layout| layout.to_string() == sizes).expect("a layout of four ranks");
            let difference = check.check(layout).expect("a step").difference.expect("a fault that is found");
            // The copies of weights of DualPipe share the fault, of which that on the lower rank is the first.
            assert_eq!((&*difference.of, difference.rank), (tensor, Some(1)), "{sizes}");
            assert!(difference.share > 0.1 && difference.to_string().contains("in the copy of rank 1"), "{difference}");
        }
    }
}

#[test]
fn a_fault_in_an_unknown_tensor_is_refused() {
    let refused = check(&config()).with_fault(Fault { tensor: "model.layers.9.weight".to_owned() });
    let said = refused.err().expect("no such tensor").to_string();
    assert!(said.contains("model.layers.9.weight") && said.contains("must be the name of a tensor"), "{said}");
}

#[test]
fn layouts_that_a_model_does_not_take_are_left_out_with_the_reason() {
    let mut config = config();
    config.model.num_experts = 5;
    config.train.batch_size = 1;
    let (layouts, skipped) = layouts(&config, 3);
    let skipped: Vec<String> =
        skipped.iter().map(|skipped| format!("{}: {}", skipped.layout, skipped.reason)).collect();
    assert!(!layouts.is_empty());
    assert!(skipped.iter().all(|line| !line.contains('\n')), "{skipped:?}");
    assert!(skipped.iter().any(|line| line.starts_with("tp 3") && line.contains("parallel.tp")), "{skipped:?}");
}
