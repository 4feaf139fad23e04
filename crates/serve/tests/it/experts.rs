//! The experts of tokens: counted, and told with the answer.

use std::collections::HashMap;

use moeworks_infer::open::Model;
use moeworks_model::{PagedKvCache, SequencePart, WantedLogits};
use moeworks_moe::MoeSaved;
use moeworks_serve::{Engine, Limits, Request, RoutedExperts, SequenceId};

use crate::engine::{limits, model, request};

/// The experts of a text's tokens by one pass over it alone.
fn by_one_pass(model: &Model, ids: &[u32]) -> Vec<Vec<Vec<i32>>> {
    let Model { ctx, decoder, weights, .. } = model;
    let mut cache = PagedKvCache::new(decoder.config(), 1, ids.len());
    let part = SequencePart { ids, start: 0, blocks: &[0], adapter: None, logits: WantedLogits::None, expert_ids: &[] };
    let mut tokens = vec![Vec::new(); ids.len()];
    let mut hook = |_: usize, saved: &MoeSaved| {
        let routing = saved.routing();
        for (token, ids) in tokens.iter_mut().zip(routing.expert_ids().chunks(routing.top_k())) {
            token.push(ids.iter().map(|&id| id as i32).collect());
        }
    };
    decoder.forward_ragged(ctx, weights, &mut cache, &[part], Some(&mut hook)).unwrap();
    tokens
}

struct Told {
    tokens: Vec<u32>,
    experts: RoutedExperts,
    /// Tokens whose experts came with each output.
    counts: Vec<usize>,
}

/// Makes turns until all is done.
fn run(engine: &mut Engine<'_>) -> HashMap<SequenceId, Told> {
    let mut answers = HashMap::new();
    while engine.has_requests() {
        for output in engine.turn().unwrap() {
            let none = || Told { tokens: Vec::new(), experts: RoutedExperts::default(), counts: Vec::new() };
            let told = answers.entry(output.sequence).or_insert_with(none);
            let experts = output.experts.unwrap();
            told.tokens.push(output.token);
            told.counts.push(experts.num_tokens());
            told.experts.extend(&experts);
        }
    }
    answers
}

fn rows(experts: &RoutedExperts) -> Vec<Vec<Vec<i32>>> {
    let layer = |ids: &[i32]| ids.chunks(experts.top_k).map(<[i32]>::to_vec).collect();
    experts.ids.chunks(experts.num_layers * experts.top_k).map(layer).collect()
}

#[test]
fn a_token_among_others_has_the_experts_that_it_has_alone() {
    for name in ["olmoe", "deepseek_v2", "gpt_oss"] {
        let model = model(name);
        // Few blocks: some are preempted, and most beginnings are found in the prefix cache.
        for (num_blocks, block_len) in [(64, 4), (40, 1)] {
            let mut engine = Engine::new(&model, Limits { num_blocks, block_len, ..limits() }).unwrap();
            let add = |index| Request { experts_from: Some(0), ..request(index) };
            let ids: Vec<SequenceId> = (0..30).map(|index| engine.add(add(index)).unwrap()).collect();
            let answers = run(&mut engine);
            for (index, id) in ids.iter().enumerate() {
                let (prompt, told) = (request(index).prompt, &answers[id]);
                let passed = [&prompt[..], &told.tokens[..told.tokens.len() - 1]].concat();
                assert_eq!(rows(&told.experts), by_one_pass(&model, &passed), "{name}: request {index}");
                let expected: Vec<usize> =
                    (0..told.tokens.len()).map(|i| if i == 0 { prompt.len() } else { 1 }).collect();
                assert_eq!(told.counts, expected);
            }
        }
    }
}

#[test]
fn experts_come_from_the_position_that_is_asked_for() {
    let model = model("olmoe");
    let told = |from| {
        let mut engine = Engine::new(&model, limits()).unwrap();
        let id = engine.add(Request { experts_from: Some(from), ..request(9) }).unwrap();
        run(&mut engine).remove(&id).unwrap()
    };
    let (whole, prompt_len) = (rows(&told(0).experts), request(9).prompt.len());
    let of_answer = told(prompt_len);
    assert_eq!(rows(&of_answer.experts), whole[prompt_len..]);
    assert_eq!(of_answer.counts[..2], [0, 1]);
    assert_eq!(rows(&told(3).experts), whole[3..]);
}

#[test]
fn the_load_counts_each_token_that_was_passed_in_each_layer() {
    let model = model("olmoe");
    let config = model.decoder.config();
    let mut engine = Engine::new(&model, limits()).unwrap();
    let load = engine.expert_load().unwrap();
    let id = engine.add(Request { experts_from: Some(0), ..request(8) }).unwrap();
    let told = run(&mut engine).remove(&id).unwrap();
    let layers = load.layers();
    assert_eq!(layers.len(), config.num_layers);
    for (place, layer) in layers.iter().enumerate() {
        let mut expected = vec![0; config.num_experts];
        for token in rows(&told.experts) {
            token[place].iter().for_each(|&id| expected[id as usize] += 1);
        }
        assert_eq!((layer.layer, &layer.tokens_per_expert), (place, &expected));
        assert_eq!(layer.num_tokens as usize, told.experts.num_tokens());
    }
}
