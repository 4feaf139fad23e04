//! The experts of tokens: counted, and told with the answer.

use std::collections::HashMap;

use moeworks_infer::open::Model;
use moeworks_infer::routing_record::{
    Block, RecordHeader, RecordOptions, RecordReader, RecordSource, RecordWriter, RoutingRecorder,
};
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

#[test]
fn a_record_has_the_experts_of_every_token_that_was_passed() {
    let model = model("olmoe");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.records");
    let header = RecordHeader::new(RecordSource::Serve, "olmoe", model.decoder.config()).unwrap();
    let writer = RecordWriter::create(&path, header).unwrap();
    let options = RecordOptions { token_ids: true, weights: true };
    let mut engine = Engine::new(&model, Limits { num_blocks: 64, block_len: 4, ..limits() }).unwrap();
    engine.record_routing(RoutingRecorder::new(writer, options));
    let load = engine.expert_load().unwrap();
    let add = |index| Request { experts_from: Some(0), ..request(index) };
    let ids: Vec<SequenceId> = (0..12).map(|index| engine.add(add(index)).unwrap()).collect();
    let answers = run(&mut engine);
    let mut reader = RecordReader::open(&path).unwrap();
    let mut counts = vec![vec![0; model.decoder.config().num_experts]; load.num_layers()];
    let mut num_tokens = 0;
    while let Some(Block::Tokens(block)) = reader.next_block().unwrap() {
        let (mut t, token_ids) = (0, block.token_ids.as_ref().unwrap());
        for run in &block.runs {
            let index = ids.iter().position(|id| id.0 == run.id).unwrap();
            let passed = [&request(index).prompt[..], &answers[&ids[index]].tokens].concat();
            let expected = by_one_pass(&model, &passed);
            for position in run.position..run.position + run.len {
                assert_eq!(token_ids[t], passed[position as usize]);
                for (layer, choices) in block.layers.iter().enumerate() {
                    let experts = &choices.expert_ids[t * block.top_k..(t + 1) * block.top_k];
                    assert_eq!(
                        experts.iter().map(|&id| id as i32).collect::<Vec<_>>(),
                        expected[position as usize][layer]
                    );
                    experts.iter().for_each(|&expert| counts[layer][expert as usize] += 1);
                    let weights = &choices.weights.as_ref().unwrap()[t * block.top_k..(t + 1) * block.top_k];
                    assert!(weights.iter().all(|weight| *weight > 0.0), "{weights:?}");
                }
                t += 1;
            }
        }
        num_tokens += t as u64;
    }
    assert!(reader.damage().is_none());
    for (layer, counts) in load.layers().iter().zip(&counts) {
        assert_eq!((layer.num_tokens, &layer.tokens_per_expert), (num_tokens, counts));
    }
}
