use moeworks_infer::generation::ModelRef;
use moeworks_model::{Decoder, Mode, ModelConfig, Tokenizer};
use moeworks_ops::Context;

use super::*;

fn routed(text: &str, num_experts: usize, top_k: usize) -> RoutedText {
    let config = ModelConfig {
        vocab_size: 257,
        width: 16,
        num_layers: 2,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        num_experts,
        top_k,
        expert_width: 8,
        capacity_factor: 0.75,
        max_seq_len: 64,
        init_std: 0.2,
        ..ModelConfig::default()
    };
    let ctx = Context::cpu(1);
    let decoder = Decoder::new(config).unwrap();
    let weights = decoder.init(&ctx, 3, None);
    let ids = text.bytes().map(u32::from).collect();
    let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
    RoutedText::new(model, &Tokenizer::bytes(), ids, 64, Mode::TrainForward).unwrap()
}

fn page(text: &RoutedText) -> String {
    routing_page(text, "a <run>", &["some & facts".to_owned()])
}

/// Returns the JSON data of the page's script.
fn data_of(html: &str) -> Value {
    let (_, rest) = html.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn the_text_can_be_read_in_the_page_and_nothing_comes_from_elsewhere() {
    let html = page(&routed("Straße & <b>bold</b> 😀\n</script><script>alert(1)</script>\u{202e}end", 8, 2));
    assert_eq!(html.matches("<script").count(), 2, "the data and our own");
    assert_eq!(html.matches("</script").count(), 2);
    for foreign in ["<link", "<iframe", "<img", "http://", "https://", "@import", "url(", "\u{202e}"] {
        let html = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!html.contains(foreign), "{foreign}");
    }
    assert!(html.contains("default-src 'none'") && html.contains("a &lt;run&gt;") && html.contains("some &amp; facts"));
    let (_, rest) = html.split_once("<div id=\"text\"").unwrap();
    let text = rest.split_once("</div>").unwrap().0;
    for shown in [">ß</i>", ">😀</i>", ">&lt;</i>", ">↵\n</i>", ">·</i>"] {
        assert!(text.contains(shown), "{shown} in {text}");
    }
}

#[test]
fn the_data_holds_every_choice() {
    let text = routed("the cat sat on the mat", 5, 2);
    let data = data_of(&page(&text));
    assert_eq!((data["experts"].as_u64(), data["slots"].as_u64()), (Some(5), Some(2)));
    assert_eq!(data["tokens"].as_array().unwrap().len(), 22);
    assert_eq!(data["labels"]["32"], "␣");
    for (layer, shown) in text.layers.iter().zip(data["layers"].as_array().unwrap()) {
        let flat: Vec<i64> = shown["c"].as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
        for (i, choice) in layer.choices.iter().flatten().enumerate() {
            let [expert, weight] = [flat[2 * i], flat[2 * i + 1]];
            assert_eq!((expert, weight < 0), (i64::from(choice.expert), choice.is_dropped));
            let weight = if weight < 0 { -1 - weight } else { weight };
            assert!((weight as f64 / 1000.0 - f64::from(choice.weight)).abs() < 6e-4);
        }
        assert!(flat.iter().skip(1).step_by(2).any(|&weight| weight < 0), "some were dropped");
        assert!(shown["note"].as_str().unwrap().contains("dropped"));
    }
}

#[test]
fn slots_that_a_token_does_not_use_are_empty() {
    let choice = |expert, is_dropped| super::super::Choice { expert, weight: 0.25, is_dropped };
    let layer = RoutedLayer {
        layer: 0,
        choices: vec![vec![choice(3, true)], vec![], vec![choice(1, false), choice(2, false)]],
    };
    assert_eq!(flat_choices(&layer, 2), [3, -251, -1, 0, -1, 0, -1, 0, 1, 250, 2, 250]);
}

#[test]
fn pages_for_one_expert_and_for_many_have_a_colour_and_a_cell_for_each() {
    for (num_experts, top_k) in [(1, 1), (16, 1), (17, 3), (96, 4)] {
        let html = page(&routed("some text\n", num_experts, top_k));
        assert_eq!(html.matches("<td ").count(), 2 * num_experts);
        assert!(html.contains(&format!("--e{}:#", num_experts - 1)));
        assert_eq!(html.contains("Coloured by choice"), top_k > 1);
        assert!(!html.contains("NaN") && !html.contains("inf;"));
    }
}
