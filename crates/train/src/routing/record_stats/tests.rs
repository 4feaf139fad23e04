use std::path::Path;

use moeworks_infer::routing_record::{
    Block, LayerChoices, LayerLoads, LoadBlock, NONE, RecordHeader, RecordReader, RecordSource, RecordWriter, Run,
    TokenBlock,
};

use moeworks_plan::{Nodes, Placement};

use super::windows::Window;
use super::*;

const NUM_EXPERTS: usize = 8;

fn header() -> RecordHeader {
    RecordHeader {
        source: RecordSource::Train,
        model: "<tiny>".to_owned(),
        layers: vec![0, 2],
        num_encoder_layers: 0,
        num_experts: NUM_EXPERTS,
        num_computing: NUM_EXPERTS,
        top_k: 2,
        placement: None,
        ranks_per_node: None,
    }
}

fn stats_of(blocks: &[Block], options: StatsOptions) -> RecordStats {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut writer = RecordWriter::create(&path, header()).unwrap();
    blocks.iter().for_each(|block| writer.write(block).unwrap());
    record_stats(|| RecordReader::open(&path), options).unwrap()
}

/// Tokens of which the first layer chooses a pair of neighbours, and the next layer the pair after it.
fn tokens(num_tokens: u32) -> Block {
    let expert = |t: u32, place: u32| (t / 3 % 4 * 2 + place) % 8;
    let ids =
        |shift: u32| -> Vec<u32> { (0..num_tokens).flat_map(|t| [expert(t, shift), expert(t, shift + 1)]).collect() };
    let layer = |shift| LayerChoices { expert_ids: ids(shift), weights: None, dropped: None };
    let runs = vec![Run { id: 1, position: 0, len: num_tokens }];
    Block::Tokens(TokenBlock { runs, top_k: 2, layers: vec![layer(0), layer(2)], ..TokenBlock::default() })
}

fn loads(step: u64, chosen: [u32; NUM_EXPERTS]) -> Block {
    let kept = chosen.iter().map(|&count| count.min(10)).collect();
    let layer = LayerLoads { chosen: chosen.to_vec(), kept, importance: Some(vec![0.5; NUM_EXPERTS]) };
    Block::Loads(LoadBlock {
        time_ms: step * 1000,
        step,
        num_tokens: 40,
        first_layer: 0,
        layers: vec![layer.clone(), layer],
    })
}

#[test]
fn choices_give_loads_pairs_repeats_and_the_next_layer() {
    let stats = stats_of(&[tokens(480), tokens(480)], StatsOptions::default());
    assert_eq!((stats.num_tokens, stats.num_steps, stats.num_windows), (960, 0, 20));
    let layer = &stats.layers[0];
    assert_eq!(layer.chosen, [240; NUM_EXPERTS]);
    assert_eq!(layer.kept.as_ref().unwrap(), &layer.chosen);
    assert_eq!(layer.importance, None);
    // Each token's pair is that of two of three tokens before, and decides the next layer's.
    let next = layer.next_layer.unwrap();
    assert_eq!((next.top_1, next.recall), (1.0, 1.0));
    assert!(next.top_1_base < 0.3, "{next:?}");
    assert_eq!(stats.layers[1].next_layer, None);
    let repeats = layer.repeats.unwrap();
    assert!((repeats.share - 2.0 / 3.0).abs() < 0.01 && (repeats.base - 0.25).abs() < 1e-9, "{repeats:?}");
    let pair = ExpertPair { first: 0, second: 1, share: 0.25, lift: 4.0 };
    assert_eq!((layer.pairs.len(), layer.pairs[0]), (4, pair));
}

#[test]
fn loads_of_steps_give_windows_and_forecasts() {
    let even = [5; NUM_EXPERTS];
    let skewed = [12, 8, 5, 5, 4, 3, 2, 1];
    let blocks: Vec<Block> = (0..24).map(|step| loads(step, if step < 12 { even } else { skewed })).collect();
    let stats = stats_of(&blocks, StatsOptions { window: Some(2), ..StatsOptions::default() });
    assert_eq!((stats.num_tokens, stats.num_steps, stats.num_windows), (0, 24, 12));
    let layer = &stats.layers[1];
    assert_eq!(layer.chosen[0], 12 * 5 + 12 * 12);
    assert_eq!(layer.kept.as_ref().unwrap()[0], 12 * 5 + 12 * 10);
    assert_eq!(layer.importance.as_ref().unwrap()[3], 12.0);
    let stability = layer.stability.unwrap();
    let drift: f64 = skewed.iter().map(|&count| (f64::from(count) / 40.0 - 0.125).abs()).sum();
    assert!((stability.drift - drift).abs() < 1e-9 && (stability.change - drift / 11.0).abs() < 1e-9, "{stability:?}");
    assert!(layer.forecasts.iter().any(|error| error.num_windows == 11));
    assert_eq!(stats.notes.len(), 1);
}

#[test]
fn a_record_without_blocks_has_no_figures_and_still_a_page() {
    let stats = stats_of(&[], StatsOptions::default());
    assert_eq!((stats.num_tokens, stats.num_windows), (0, 0));
    assert_eq!(stats.layers.len(), 2);
    assert_eq!(stats.layers[0].stability, None);
    let page = stats_page(&stats, &[]);
    assert!(page.contains("&lt;tiny") && !page.contains("NaN"), "{page}");
}

#[test]
fn tokens_without_any_expert_are_counted_as_such() {
    let layer = LayerChoices { expert_ids: vec![NONE; 4], weights: None, dropped: None };
    let runs = vec![Run { id: 1, position: 0, len: 2 }];
    let block = TokenBlock { runs, top_k: 2, layers: vec![layer.clone(), layer], ..TokenBlock::default() };
    let stats = stats_of(&[Block::Tokens(block)], StatsOptions::default());
    assert_eq!((stats.num_tokens, stats.layers[0].chosen.iter().sum::<u64>()), (2, 0));
}

#[test]
fn the_page_and_json_say_the_same_as_the_statistics() {
    let blocks: Vec<Block> = (0..5).map(|step| loads(step, [9, 8, 7, 6, 5, 4, 3, 2])).chain([tokens(300)]).collect();
    let stats = stats_of(&blocks, StatsOptions::default());
    let json = stats_json(&stats);
    assert_eq!(json["layers"][0]["chosen"][0], 45);
    assert_eq!(json["layers"][0]["entropy"].as_f64(), Some(stats.layers[0].concentration.entropy));
    assert_eq!(json["damage"], serde_json::Value::Null);
    let page = stats_page(&stats, &["a fact".to_owned()]);
    let entropy = format!("<td>{:.3}</td>", stats.layers[0].concentration.entropy);
    assert!(page.contains(&entropy) && page.contains("a fact"));
    for title in ["Load by rank", "The next window foretold", "The next layer foretold", "over time", "Chosen together"]
    {
        assert!(page.contains(title), "{title}");
    }
    assert!(!page.contains("NaN") && !page.contains(">inf"), "numbers");
    assert!(!page.contains("<script"));
}

#[test]
fn windows_alone_give_the_figures_of_loads() {
    let window = |time_s: f64, loads: [u64; 8]| Window { time_s, loads: loads.to_vec() };
    let windows = vec![window(0.0, [4; 8]), window(1.0, [4; 8])];
    let stats = stats_of_windows(header(), &[windows.clone(), windows], 1);
    assert_eq!((stats.num_windows, stats.layers[1].layer, stats.layers[1].chosen[7]), (2, 2, 8));
    assert_eq!(stats.layers[0].stability.unwrap().change, 0.0);
}

#[test]
fn ranks_and_nodes_have_the_load_of_their_experts() {
    let windows = vec![Window { time_s: 0.0, loads: vec![8, 4, 2, 2, 4, 4, 4, 4] }];
    let mut stats = stats_of_windows(header(), &[windows.clone(), windows], 1);
    let of_ranks = |stats: &RecordStats| stats.layers[1].on_ranks.clone();
    assert_eq!(of_ranks(&stats), None);
    let mut placement = Placement::sharded(NUM_EXPERTS, 4);
    stats.place_on_ranks(&placement.clone().into(), &Nodes::new(&[0, 0, 1, 1]));
    let found = of_ranks(&stats).unwrap();
    assert_eq!((&found.ranks[..], &found.nodes[..]), (&[12.0, 4.0, 8.0, 8.0][..], &[16.0, 16.0][..]));
    assert_eq!((found.rank_imbalance(), found.node_imbalance()), (0.5, 0.0));
    assert_eq!(stats_json(&stats)["layers"][1]["ranks"]["imbalance"], 0.5);
    assert!(stats_page(&stats, &[]).contains("layer 2, rank 0: 12 choices, 1.50 even shares"));
    // A replica takes the tokens of some ranks.
    placement.replicate(0, &[1]);
    stats.place_on_ranks(&placement.into(), &Nodes::new(&[0; 4]));
    assert_eq!(of_ranks(&stats).unwrap().ranks, [8.0, 8.0, 8.0, 8.0]);
}

#[test]
fn a_file_that_is_gone_is_an_error() {
    let path = Path::new("nowhere.records");
    let error = record_stats(|| RecordReader::open(path), StatsOptions::default()).unwrap_err();
    assert!(error.to_string().contains("nowhere.records"));
}
