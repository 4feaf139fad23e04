//! The load of experts over the last steps of a record of routing.

use std::collections::VecDeque;
use std::path::Path;

use moeworks_infer::routing_record::{Block, Damage, NONE, RecordError, RecordReader, TokenBlock};
use moeworks_plan::Coactivation;

use super::loads::{ExpertLoads, LoadWindow};

/// The most numbers of the tables of pairs of experts.
const MAX_PAIRS: usize = 1 << 26;
/// The counts of all steps, layers and experts at most; of more steps the last ones are kept.
const MAX_COUNTS: usize = 1 << 26;

/// The loads of the last steps of a record.
#[derive(Clone, Debug, Default)]
pub struct RecordedLoads {
    /// The sums over the steps. Only experts that compute are counted.
    pub window: LoadWindow,
    /// True if a step is a training step; false if it is a block of tokens, such as a pass of a server.
    pub has_steps: bool,
    /// `[steps][layers][E]`: the loads of each step.
    pub steps: Vec<Vec<Vec<u64>>>,
    /// `[layers]`: experts that tokens of the whole record chose together; empty without choices of single tokens.
    pub pairs: Vec<Coactivation>,
    /// The placement of the run, if experts were placed on ranks.
    pub placement: Option<String>,
    /// The parts of the record that could not be read.
    pub damage: Damage,
}

/// Reads the record at `path` and sums the loads of its last `num_steps` steps. Where no loads are recorded, each
/// block of tokens is a step.
///
/// # Errors
/// If the file cannot be read or is no record.
pub fn read_recorded_loads(path: &Path, num_steps: usize) -> Result<RecordedLoads, RecordError> {
    let mut reader = RecordReader::open(path)?;
    let header = reader.header().clone();
    let (num_layers, num_experts) = (header.layers.len(), header.num_computing);
    let most = (MAX_COUNTS / (num_layers * num_experts)).clamp(1, num_steps.max(1));
    let has_pairs = num_experts.saturating_mul(num_experts).saturating_mul(num_layers) <= MAX_PAIRS;
    let mut pairs = vec![Coactivation::new(num_experts); if has_pairs { num_layers } else { 0 }];
    let (mut loads, mut passes, mut num_tokens) = (VecDeque::new(), VecDeque::new(), 0);
    let keep = |steps: &mut VecDeque<Step>, step: Step| {
        steps.push_back(step);
        if steps.len() > most {
            steps.pop_front();
        }
    };
    while let Some(block) = reader.next_block()? {
        let mut layers = vec![vec![0_u64; num_experts]; num_layers];
        match block {
            Block::Loads(block) => {
                for (sums, loads) in layers[block.first_layer..].iter_mut().zip(&block.layers) {
                    sums.iter_mut().zip(&loads.chosen).for_each(|(sum, &count)| *sum = u64::from(count));
                }
                keep(&mut loads, Step { number: block.step, layers });
            }
            Block::Tokens(block) => {
                num_tokens += block.num_tokens() as u64;
                count_choices(&block, &mut layers, &mut pairs);
                let number = passes.back().map_or(1, |step: &Step| step.number + 1);
                keep(&mut passes, Step { number, layers });
            }
        }
    }
    let has_steps = !loads.is_empty();
    let steps = if has_steps { loads } else { passes };
    let window = sum(&steps, &header.layers, num_experts);
    let pairs = if num_tokens > 0 { pairs } else { Vec::new() };
    let damage = reader.damage().clone();
    let steps = steps.into_iter().map(|step| step.layers).collect();
    Ok(RecordedLoads { window, has_steps, steps, pairs, placement: header.placement, damage })
}

/// The loads of a step.
struct Step {
    number: u64,
    layers: Vec<Vec<u64>>,
}

/// Counts the choices of a block, and the pairs of each token where there are tables for them.
fn count_choices(block: &TokenBlock, layers: &mut [Vec<u64>], pairs: &mut [Coactivation]) {
    for (at, choices) in (block.first_layer..).zip(&block.layers) {
        for &expert in choices.expert_ids.iter().filter(|&&expert| expert != NONE) {
            if let Some(count) = layers[at].get_mut(expert as usize) {
                *count += 1;
            }
        }
        if let Some(pairs) = pairs.get_mut(at) {
            choices.expert_ids.chunks_exact(block.top_k).for_each(|experts| pairs.add(experts));
        }
    }
}

fn sum(steps: &VecDeque<Step>, layers: &[usize], num_experts: usize) -> LoadWindow {
    let Some(last) = steps.back() else { return LoadWindow::default() };
    let mut sums: Vec<ExpertLoads> =
        layers.iter().map(|&layer| ExpertLoads { layer, tokens_per_expert: vec![0; num_experts] }).collect();
    for step in steps {
        for (sum, counts) in sums.iter_mut().zip(&step.layers) {
            let pairs = sum.tokens_per_expert.iter_mut().zip(counts);
            pairs.for_each(|(sum, &count)| *sum = sum.saturating_add(count));
        }
    }
    LoadWindow { last_step: last.number, num_steps: steps.len(), layers: sums }
}

#[cfg(test)]
mod tests {
    use moeworks_infer::routing_record::{
        LayerChoices, LayerLoads, LoadBlock, RecordHeader, RecordSource, RecordWriter, Run,
    };

    use super::*;

    #[test]
    fn the_last_steps_are_summed_and_only_experts_that_compute_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let header = RecordHeader {
            source: RecordSource::Train,
            model: "tiny".to_owned(),
            layers: vec![1],
            num_encoder_layers: 0,
            num_experts: 3,
            num_computing: 2,
            top_k: 2,
            placement: None,
            ranks_per_node: None,
        };
        let mut writer = RecordWriter::create(&path, header).unwrap();
        let empty = read_recorded_loads(&path, 5).unwrap();
        assert_eq!((empty.window, empty.steps.len(), empty.pairs.len()), (LoadWindow::default(), 0, 0));
        let layers = vec![LayerChoices { expert_ids: vec![0, 1, 2, 0], weights: None, dropped: None }];
        let runs = vec![Run { id: 1, position: 0, len: 2 }];
        writer.write(&Block::Tokens(TokenBlock { runs, top_k: 2, layers, ..TokenBlock::default() })).unwrap();
        let tokens = read_recorded_loads(&path, 5).unwrap();
        assert_eq!((tokens.has_steps, tokens.steps.clone()), (false, vec![vec![vec![2, 1]]]));
        assert_eq!(tokens.pairs[0].pair(0, 1), 1);
        for step in 1..=3 {
            let layers = vec![LayerLoads { chosen: vec![step, 10, 5], kept: vec![0; 3], importance: None }];
            let step = u64::from(step);
            let block = LoadBlock { time_ms: 0, step, num_tokens: 9, first_layer: 0, layers };
            writer.write(&Block::Loads(block)).unwrap();
        }
        let found = read_recorded_loads(&path, 2).unwrap();
        assert_eq!((found.window.last_step, found.window.num_steps, found.has_steps), (3, 2, true));
        assert_eq!(found.window.layers, [ExpertLoads { layer: 1, tokens_per_expert: vec![5, 20] }]);
    }
}
