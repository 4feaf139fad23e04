use moeworks_model::{Decoder, ModelConfig};
use moeworks_moe::Routing;
use moeworks_ops::Context;

use super::*;

fn choice(expert: u32) -> Choice {
    Choice { expert, weight: 0.5, is_dropped: false }
}

fn tiny(capacity_factor: f32) -> (Context, Decoder) {
    let config = ModelConfig {
        vocab_size: 257,
        width: 16,
        num_layers: 3,
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 8,
        num_experts: 4,
        expert_width: 8,
        dense_width: 16,
        moe_every: 2,
        capacity_factor,
        max_seq_len: 32,
        init_std: 0.2,
        ..ModelConfig::default()
    };
    (Context::cpu(2), Decoder::new(config).unwrap())
}

#[test]
fn every_window_of_a_text_goes_through_every_moe_layer() {
    let (ctx, decoder) = tiny(0.0);
    let weights = decoder.init(&ctx, 1, None);
    let tokenizer = Tokenizer::bytes();
    let ids: Vec<u32> =
        "Größer als ein Fenster: a text of more than thirty-two tokens.".bytes().map(u32::from).collect();
    let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
    let text = RoutedText::new(model, &tokenizer, ids.clone(), 32, Mode::Infer).unwrap();
    assert_eq!(text.layers.iter().map(|layer| layer.layer).collect::<Vec<_>>(), [1]);
    let choices = &text.layers[0].choices;
    assert_eq!(choices.len(), ids.len());
    assert!(choices.iter().all(|choices| choices.len() == 2 && choices.iter().all(|choice| !choice.is_dropped)));
    // The second window by itself.
    let second = RoutedText::new(model, &tokenizer, ids[32..].to_vec(), 32, Mode::Infer).unwrap();
    assert_eq!(second.layers[0].choices, choices[32..]);
    assert_eq!(text.layers[0].tokens_per_expert(4).iter().sum::<u64>(), 2 * ids.len() as u64);
}

#[test]
fn what_the_capacity_of_training_drops_is_marked() {
    let (ctx, decoder) = tiny(0.5);
    let weights = decoder.init(&ctx, 1, None);
    let ids: Vec<u32> = (0..64).map(|i| i * 37 % 251).collect();
    let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
    let text = |mode| RoutedText::new(model, &Tokenizer::bytes(), ids.clone(), 32, mode).unwrap().layers;
    let (training, inference) = (text(Mode::TrainForward), text(Mode::Infer));
    assert_eq!(inference[0].drop_rate(), 0.0);
    // Each expert takes at most ceil(0.5 · 2 · 32 / 4) = 8 choices of a window.
    for window in training[0].choices.chunks(32) {
        let mut kept = [0; 4];
        window.iter().flatten().filter(|c| !c.is_dropped).for_each(|c| kept[c.expert as usize] += 1);
        assert!(kept.iter().all(|&kept| kept <= 8), "{kept:?}");
    }
    assert!(training[0].drop_rate() >= 0.5, "{}", training[0].drop_rate());
    let (kept, all) = (training[0].tokens_per_expert(4), inference[0].tokens_per_expert(4));
    assert_eq!(kept, all, "a dropped choice is a choice");
}

#[test]
fn tokens_that_stand_out_are_those_beyond_an_experts_share() {
    // Expert 0 gets all of token 7 and half of the frequent token 5, expert 1 the rest.
    let token_ids = [5, 5, 5, 5, 7, 7];
    let choices = [0, 0, 1, 1, 0, 0].map(|expert| vec![choice(expert)]).to_vec();
    let layer = RoutedLayer { layer: 3, choices };
    let count = |id, count, occurrences| TokenCount { id, count, occurrences };
    let top = layer.top_tokens(&token_ids, 3, 5);
    assert_eq!(top, [vec![count(7, 2, 2)], vec![count(5, 2, 4)], vec![]]);
    assert_eq!(layer.tokens_per_expert(3), [4, 2, 0]);
}

#[test]
fn a_model_without_moe_layers_has_nothing_to_show() {
    let (ctx, decoder) = tiny(0.0);
    let decoder = Decoder::new(ModelConfig { num_experts: 0, ..decoder.config().clone() }).unwrap();
    let weights = decoder.init(&ctx, 1, None);
    let model = ModelRef { ctx: &ctx, decoder: &decoder, weights: &weights };
    let text = RoutedText::new(model, &Tokenizer::bytes(), vec![1, 2, 3], 32, Mode::TrainForward).unwrap();
    assert!(text.layers.is_empty());
}

#[test]
fn the_choices_of_a_hand_made_routing_are_dropped_where_its_dispatch_says() {
    let ctx = Context::cpu(1);
    let routing = Routing::new(&ctx, 2, 1, &[0, 0, 1, 0], &[1.0; 4]).unwrap();
    let dispatch = Dispatch::new(&ctx, &routing, 0.5);
    assert_eq!((0..4).map(|i| is_dropped(&dispatch, i)).collect::<Vec<_>>(), [false, true, false, true]);
}
