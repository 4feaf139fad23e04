//! The choice of a layout by measured steps: the planner's best few layouts each make some real steps, and the
//! fastest is kept. When the steps of the run leave what was measured, layouts are tried again.
//!
//! Everything here is a decision on plain values; [`Probe`] makes the steps, in a folder of its own.

mod links;
mod monitor;
mod probe;

use moeworks_model::model_cost::{Kept, shape};
use moeworks_plan::{Estimate, Layout, Tokens, Topology, Workload, propose};
use serde_json::{Value, json};

use crate::config::{PlacementChoice, RunConfig};
use crate::error::TrainError;
use crate::metrics::NamedFigure;

pub use links::measured_topology;
pub use monitor::Monitor;
pub use probe::Probe;

/// The file of the decisions in a run folder: one JSON object per line.
pub const LAYOUTS_JSONL: &str = "layouts.jsonl";
/// Layouts that are tried at most.
const MOST: usize = 4;
/// A layout must be faster by this share than the present one to replace it.
const CLEARLY: f64 = 0.03;

/// A layout to try.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The settings of the run in this layout.
    pub config: RunConfig,
    /// The planner's costs; none for layouts that it does not cost.
    pub estimate: Option<Estimate>,
}

impl Candidate {
    /// Creates the candidate of the run of `config` in `layout`, without costs.
    #[must_use]
    pub fn in_layout(config: &RunConfig, layout: Layout) -> Self {
        Self { config: in_layout(config, layout), estimate: None }
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.config.parallel.layout()
    }
}

/// The measured steps of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The layout.
    pub layout: Layout,
    /// The median milliseconds of a step, on its slowest rank.
    pub step_ms: f64,
    /// The figures of the steps, as means, and of the estimate.
    pub figures: Vec<NamedFigure>,
}

impl Measured {
    /// Creates the record of steps whose figures another rank has.
    #[must_use]
    pub fn elsewhere(layout: Layout) -> Self {
        Self { layout, step_ms: f64::NAN, figures: Vec::new() }
    }
}

/// Returns the layouts to try on the ranks of `topology`: that of `config`, if it has as many ranks, then the
/// planner's best that the model, the settings and the memory allow, and a pipeline where there are microbatches
/// enough for one. The vocabulary of `config` must be set.
///
/// # Errors
/// If no layout is valid.
pub fn candidates(config: &RunConfig, topology: &Topology) -> Result<Vec<Candidate>, TrainError> {
    let (train, num_ranks) = (&config.train, topology.num_ranks());
    let kept = Kept { precision: train.precision, checkpoint_layers: train.checkpoint_layers };
    let shape = shape(&config.model, &config.weight_table()?, train.seq_len, kept);
    let workload = Workload {
        tokens: Tokens::Sequences { num: train.batch_size, len: train.seq_len },
        precision: train.precision,
        zero: config.parallel.zero,
        expert_gradient_bytes: train.expert_gradients.bytes(),
    };
    let estimates: Vec<Estimate> = propose(&shape, &workload, topology);
    let known = |layout: Layout| estimates.iter().find(|estimate| estimate.layout == layout).copied();
    let present = config.parallel.layout();
    let piped = Layout::new(1, 1, 1).with_pipeline(num_ranks);
    let is_worth_piping = num_ranks > 1 && train.grad_accumulation >= 2 * num_ranks;
    let fitting = estimates.iter().filter(|estimate| estimate.fits).map(|estimate| estimate.layout);
    let layouts = (present.num_ranks() == num_ranks).then_some(present).into_iter();
    let layouts = layouts.chain(is_worth_piping.then_some(piped)).chain(fitting);
    let mut found: Vec<Candidate> = Vec::new();
    for layout in layouts {
        let config = in_layout(config, layout);
        let is_new = found.iter().all(|candidate| candidate.layout() != layout);
        if is_new && found.len() < MOST && config.validate().is_ok() && placement_fits(&config, present) {
            found.push(Candidate { config, estimate: known(layout) });
        }
    }
    if found.is_empty() {
        return Err(TrainError::Ranks { layout: present, num_ranks });
    }
    Ok(found)
}

/// Returns the settings with another layout.
fn in_layout(config: &RunConfig, layout: Layout) -> RunConfig {
    let mut config = config.clone();
    let parallel = &mut config.parallel;
    if layout.pp == 1 && parallel.pp > 1 {
        parallel.stages = String::new();
        parallel.stage_ep = String::new();
    }
    (parallel.dp, parallel.ep, parallel.tp) = (layout.dp, layout.ep, layout.tp);
    (parallel.pp, parallel.rank_order) = (layout.pp, layout.order);
    config
}

/// Returns whether a placement in a file is for as many ranks of a group as the settings have.
fn placement_fits(config: &RunConfig, present: Layout) -> bool {
    let is_file = matches!(config.parallel.placement, PlacementChoice::File(_));
    !is_file || config.parallel.layout().num_expert_ranks() == present.num_expert_ranks()
}

/// Returns the index of the layout to keep: the fastest; the first one, which is the present, unless another is
/// clearly faster. None if nothing was measured.
#[must_use]
pub fn fastest(measured: &[Measured], has_present: bool) -> Option<usize> {
    let times = measured.iter().map(|measured| measured.step_ms).enumerate().filter(|(_, ms)| ms.is_finite());
    let (best, best_ms) = times.min_by(|a, b| a.1.total_cmp(&b.1))?;
    let present = measured.first().filter(|_| has_present).map(|measured| measured.step_ms);
    match present {
        Some(ms) if ms <= best_ms * (1.0 + CLEARLY) => Some(0),
        _ => Some(best),
    }
}

/// Returns a line of [`LAYOUTS_JSONL`]: the step, the reason, the layout that is kept, and every figure of each.
#[must_use]
pub fn decision_line(step: u64, reason: &str, measured: &[Measured], kept: usize) -> String {
    let number = |value: f64| if value.is_finite() { json!(value) } else { Value::Null };
    let tried = |measured: &Measured| {
        let figures: serde_json::Map<String, Value> =
            measured.figures.iter().map(|figure| (figure.name.clone(), number(figure.value))).collect();
        json!({ "layout": measured.layout.to_string(), "figures": figures })
    };
    let layout = measured.get(kept).map(|measured| measured.layout.to_string());
    let tried: Vec<Value> = measured.iter().map(tried).collect();
    json!({ "step": step, "reason": reason, "kept": layout, "tried": tried }).to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use moeworks_plan::RankSpec;

    fn measured(times: &[f64]) -> Vec<Measured> {
        let of = |&step_ms: &f64| Measured { layout: Layout::new(1, 1, 1), step_ms, figures: Vec::new() };
        times.iter().map(of).collect()
    }

    #[test]
    fn the_present_layout_stays_unless_another_is_clearly_faster() {
        assert_eq!(fastest(&measured(&[100.0, 98.0]), true), Some(0));
        assert_eq!(fastest(&measured(&[100.0, 90.0, 95.0]), true), Some(1));
        assert_eq!(fastest(&measured(&[100.0, 98.0]), false), Some(1));
        assert_eq!(fastest(&measured(&[f64::NAN, 98.0]), true), Some(1));
        assert_eq!(fastest(&[], true), None);
    }

    #[test]
    fn candidates_have_all_ranks_are_valid_and_begin_with_the_present_layout() {
        let mut config = RunConfig::default();
        config.model.vocab_size = 257;
        (config.parallel.dp, config.train.grad_accumulation) = (4, 8);
        let spec = RankSpec { flops: 1e11, memory_bytes: 64e9, memory_bytes_per_s: 1e10 };
        let found = candidates(&config, &Topology::one_machine(4, spec)).unwrap();
        let layouts: Vec<String> = found.iter().map(|candidate| candidate.layout().to_string()).collect();
        assert_eq!(layouts[..2], ["dp 4 ep 1 tp 1", "dp 1 ep 1 tp 1 pp 4"]);
        assert_eq!(layouts.len(), MOST, "{layouts:?}");
        assert!(
            found.iter().all(|candidate| candidate.config.validate().is_ok() && candidate.layout().num_ranks() == 4)
        );
    }

    #[test]
    fn a_decision_is_one_line_of_json() {
        let line = decision_line(7, "start", &measured(&[1.0]), 0);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((value["step"].as_u64(), value["kept"].as_str()), (Some(7), Some("dp 1 ep 1 tp 1")));
        assert_eq!(line.matches('\n').count(), 1);
    }
}
