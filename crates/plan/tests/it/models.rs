//! Models on paper: their parameters and operations against published numbers.

use moeworks_plan::{Model, ModelShape, Precision};
use proptest::prelude::*;

fn billions(model: &str) -> f64 {
    Model::named(model).unwrap().params() as f64 / 1e9
}

fn rounded(value: f64, decimals: i32) -> f64 {
    (value * 10_f64.powi(decimals)).round() / 10_f64.powi(decimals)
}

#[test]
fn parameters_are_the_published_ones() {
    assert_eq!(rounded(billions("deepseek-v3"), 2), 671.03);
    assert_eq!(rounded(billions("qwen3-235b"), 2), 235.09);
    assert_eq!(rounded(billions("mixtral-8x22b"), 2), 140.62);
    assert_eq!(rounded(billions("switch-c"), 0), 1571.0);
    assert_eq!(rounded(billions("meta-1.1t"), -2), 1100.0);
    assert_eq!(rounded(billions("swinv2-moe-3b"), 1), 3.3);
}

#[test]
fn experts_have_the_published_parameters() {
    let experts = |name: &str| {
        let shape = Model::named(name).unwrap().shape(Precision::Bf16);
        (shape.params() - shape.dense_params) as f64 / 1e9
    };
    assert_eq!(rounded(experts("switch-c"), 2), 1570.35);
    assert_eq!(rounded(experts("gshard-600b"), 1), 618.5);
    assert_eq!(rounded(experts("meta-1.1t"), 1), 1099.5);
}

#[test]
fn active_parameters_are_the_published_ones() {
    let active = |name: &str| Model::named(name).unwrap().active_params() as f64 / 1e9;
    assert!((active("deepseek-v3") - 37.0).abs() < 1.0);
    assert!((active("qwen3-235b") - 22.0).abs() < 0.6);
    assert!((active("mixtral-8x22b") - 39.0).abs() < 0.3);
}

#[test]
fn training_operations_are_the_published_ones() {
    let giga = |model: &Model| rounded(model.training_flops() / 1e9, 2);
    let with = |name: &str, sequence: usize| Model { sequence, ..Model::named(name).unwrap() };
    assert_eq!(giga(&with("deepseek-v3", 4096)), 260.64);
    assert_eq!(giga(&Model { mtp_layers: 0, ..with("deepseek-v3", 4096) }), 250.45);
    assert_eq!(giga(&with("qwen3-235b", 4096)), 148.33);
    assert_eq!(rounded(giga(&with("qwen3-235b", 131_072)), 1), 735.0);
}

/// SwinV2-B with MoE as in Tutel's tables 11 and 12.
fn swin(experts: usize, top_k: usize) -> Model {
    let mut model = Model::named("swinv2-moe-3b").unwrap();
    for group in &mut model.groups {
        if let Some(of) = &mut group.experts {
            (of.num, of.top_k) = (experts, top_k);
        }
    }
    model
}

#[test]
fn the_vision_model_grows_with_its_experts_as_in_tutels_table() {
    for (experts, millions) in [(8, 300.3), (16, 518.7), (32, 955.3)] {
        let ours = swin(experts, 1).params() as f64 / 1e6;
        assert!((ours / millions - 1.0).abs() < 0.01, "{experts} experts: {ours} for {millions}");
    }
    // Nine layers of width 512 and one of 1,024.
    let expert = |width: u64| 8 * width * width + 5 * width;
    let routers = 9 * 512 + 1024;
    assert_eq!(swin(9, 1).params() - swin(8, 1).params(), 9 * expert(512) + expert(1024) + routers);
}

#[test]
fn the_vision_model_computes_what_tutels_table_says() {
    // Multiplications and additions count as one there.
    let giga = |model: &Model| model.forward_flops() / 2e9 * model.sequence as f64;
    assert!((giga(&swin(8, 1)) / 11.78 - 1.0).abs() < 0.05, "{}", giga(&swin(8, 1)));
    assert!((giga(&swin(8, 2)) - giga(&swin(8, 1)) - 3.02).abs() < 0.01);
}

#[test]
fn the_shape_has_the_models_parameters_and_operations() {
    for (name, _) in Model::NAMES {
        let model = Model { mtp_layers: 0, ..Model::named(name).unwrap() };
        let shape: ModelShape = model.shape(Precision::Bf16);
        // Experts of two sizes count as their average, rounded down.
        let left_out = model.params() - shape.params();
        assert!(left_out < (shape.num_experts * shape.num_moe_layers) as u64, "{name}: {left_out}");
        assert!((shape.training_flops() / model.training_flops() - 1.0).abs() < 1e-12, "{name}");
        assert!(shape.whole_params <= shape.dense_params && shape.dense_flops > 0.0, "{name}");
        let layers = model.layers(Precision::Bf16);
        assert_eq!((shape.num_layers, shape.width > 0), (layers.len(), true));
    }
}

#[test]
fn bad_models_are_refused_in_one_line_with_field_and_range() {
    let text = Model::NAMES.into_iter().find(|(name, _)| *name == "deepseek-v3").unwrap().1;
    for (from, to, part) in [
        ("width = 7168", "width = 0", "width = 0: must be a number from 1 to 268435456"),
        ("vocabulary = 129280", "", "missing field `vocabulary`"),
        ("top_k = 8", "top_k = 257", "layers 2: experts.top_k = 257: must be from 1 to the 256 experts"),
        ("top_k = 8", "top_k = 0", "layers 2: experts.top_k = 0"),
        ("top_k = 8", "topk = 8", "unknown field `topk`"),
        ("num = 3\n", "num = 99999\n", "layers = 100057: must be [[layers]] tables with 1 to 65536 in all"),
        ("num = 58", "num = 0", "layers 2: num = 0"),
        ("kv_rank = 512, ", "", "layers 1: attention: needs heads, head_dim"),
        ("width = 7168", "width = 268435456", "width = 268435456: with these heads and experts"),
        ("num = 58", "num = 58\ntoken_share = nan", "layers 2: token_share = NaN"),
        ("num = 58", "num = 58\nexpert_every = 59", "layers 2: expert_every = 59: must be at most the 58 layers"),
        ("mtp_layers = 1", "mtp_layers = 65", "mtp_layers = 65: must be at most 64"),
    ] {
        assert!(text.contains(from), "{from}");
        let message = Model::parse(&text.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(part) && !message.contains('\n'), "{to:?}: {message}");
    }
    assert!(
        Model::named("gpt-5").unwrap_err().to_string().contains("unknown model \"gpt-5\": expected one of switch-c")
    );
}

proptest! {
    #[test]
    fn any_sizes_are_refused_or_counted_without_a_panic(
        sizes in proptest::array::uniform6(prop_oneof![0_usize..64, any::<u32>().prop_map(|size| size as usize)]),
        text in ".{0,100}",
    ) {
        let [width, vocabulary, heads, head_dim, experts, expert_width] = sizes;
        let model = format!(
            "width = {width}\nvocabulary = {vocabulary}\nsequence = 64\nmtp_layers = 1\n[[layers]]\nnum = 3\n\
             attention = {{ heads = {heads}, head_dim = {head_dim} }}\n\
             experts = {{ num = {experts}, top_k = 1, width = {expert_width} }}\n"
        );
        if let Ok(model) = Model::parse(&model) {
            prop_assert!(model.params() > 0 && model.training_flops() > 0.0);
            prop_assert!(model.shape(Precision::Fp8).activation_bytes > 0.0);
        }
        let _ = Model::parse(&text);
    }
}
