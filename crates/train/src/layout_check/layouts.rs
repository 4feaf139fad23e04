//! The layouts that a check tries.

use std::fmt;

use moeworks_plan::ScheduleKind;

use crate::config::RunConfig;

/// Microbatches of a step where the configuration has fewer and a pipeline needs them.
const MICROBATCHES: usize = 4;

/// A layout that is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedLayout {
    dp: usize,
    ep: usize,
    tp: usize,
    pp: usize,
    zero: u8,
    /// The schedule of a pipeline, or its file.
    schedule: String,
    /// Layers of each stage, if set by hand.
    stages: String,
    /// The ranks that each stage group spreads its experts over, if these differ.
    stage_ep: String,
    /// The microbatches of a step; none for those of the configuration.
    num_microbatches: Option<usize>,
}

/// A layout that a model or its settings do not take, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedLayout {
    /// The layout.
    pub layout: CheckedLayout,
    /// The reason, as one line.
    pub reason: String,
}

impl CheckedLayout {
    /// The layout of one rank.
    pub(super) fn one_rank() -> Self {
        Self::new([1, 1, 1, 1])
    }

    fn new([dp, ep, tp, pp]: [usize; 4]) -> Self {
        let (schedule, stages, stage_ep) = ("1f1b".to_owned(), String::new(), String::new());
        Self { dp, ep, tp, pp, zero: 0, schedule, stages, stage_ep, num_microbatches: None }
    }

    /// The layout of a configuration.
    fn of_config(config: &RunConfig) -> Self {
        let parallel = &config.parallel;
        Self {
            zero: parallel.zero,
            schedule: parallel.schedule.clone(),
            stages: parallel.stages.clone(),
            stage_ep: parallel.stage_ep.clone(),
            ..Self::new([parallel.dp, parallel.ep, parallel.tp, parallel.pp])
        }
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        [self.dp, self.ep, self.tp, self.pp].iter().fold(1, |ranks, &size| ranks.saturating_mul(size))
    }

    /// Returns `config` in this layout.
    pub(super) fn apply(&self, config: &RunConfig) -> RunConfig {
        let mut config = config.clone();
        let parallel = &mut config.parallel;
        (parallel.dp, parallel.ep, parallel.tp, parallel.pp) = (self.dp, self.ep, self.tp, self.pp);
        parallel.zero = self.zero;
        parallel.schedule.clone_from(&self.schedule);
        parallel.stages.clone_from(&self.stages);
        parallel.stage_ep.clone_from(&self.stage_ep);
        if let Some(num) = self.num_microbatches {
            config.train.grad_accumulation = num;
        }
        config
    }
}

impl fmt::Display for CheckedLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = [("dp", self.dp), ("ep", self.ep), ("tp", self.tp), ("pp", self.pp)];
        let mut words: Vec<String> =
            sizes.iter().filter(|(_, size)| *size > 1).map(|(name, size)| format!("{name} {size}")).collect();
        if words.is_empty() {
            words.push("one rank".to_owned());
        }
        if self.zero > 0 {
            words.push(format!("zero {}", self.zero));
        }
        if self.pp > 1 {
            words.push(self.schedule.clone());
        }
        if !self.stage_ep.is_empty() {
            words.push(format!("stage_ep {}", self.stage_ep));
        }
        write!(f, "{}", words.join(", "))
    }
}

/// Returns the layouts of at most `max_ranks` ranks in which `config` can be trained, that of its own first if it has
/// several ranks, and those in which it cannot.
#[must_use]
pub fn layouts(config: &RunConfig, max_ranks: usize) -> (Vec<CheckedLayout>, Vec<SkippedLayout>) {
    let own = CheckedLayout::of_config(config);
    let mut candidates = vec![own.clone()];
    candidates.extend(of_ranks(max_ranks));
    candidates.extend(of_pipelines(config, max_ranks));
    let (mut taken, mut skipped): (Vec<CheckedLayout>, Vec<SkippedLayout>) = (Vec::new(), Vec::new());
    for layout in candidates {
        if layout.num_ranks() == 1 || layout.num_ranks() > max_ranks || taken.contains(&layout) {
            continue;
        }
        match layout.apply(config).validate() {
            Ok(()) => taken.push(layout),
            Err(error) => skipped.push(SkippedLayout { layout, reason: error.to_string() }),
        }
    }
    (taken, skipped)
}

/// Layouts without a pipeline: each axis alone, two of them, and the stages of ZeRO.
fn of_ranks(max_ranks: usize) -> Vec<CheckedLayout> {
    let mut layouts = Vec::new();
    for n in 2..=max_ranks.min(4) {
        layouts.extend([[n, 1, 1, 1], [1, n, 1, 1], [1, 1, n, 1]].map(CheckedLayout::new));
    }
    layouts.extend([[2, 2, 1, 1], [2, 1, 2, 1], [1, 2, 2, 1], [2, 2, 2, 1]].map(CheckedLayout::new));
    for zero in 1..=3 {
        for sizes in [[2, 1, 1, 1], [1, 2, 1, 1], [3, 1, 1, 1], [2, 2, 1, 1]] {
            layouts.push(CheckedLayout { zero, ..CheckedLayout::new(sizes) });
        }
    }
    layouts.retain(|layout| layout.num_ranks() <= max_ranks);
    layouts
}

/// Layouts with a pipeline: every schedule over two stage groups, alone and with experts over ranks, and some over
/// more.
fn of_pipelines(config: &RunConfig, max_ranks: usize) -> Vec<CheckedLayout> {
    let mut layouts = Vec::new();
    let mut push = |sizes: [usize; 4], kind: ScheduleKind, zero: u8| {
        let least = MICROBATCHES.max(2 * sizes[3]);
        let num = config.train.grad_accumulation.max(least).next_multiple_of(2 * sizes[3]);
        let schedule = kind.name().to_owned();
        layouts.push(CheckedLayout { zero, schedule, num_microbatches: Some(num), ..CheckedLayout::new(sizes) });
    };
    for kind in ScheduleKind::ALL {
        push([1, 1, 1, 2], kind, 0);
    }
    for pp in [3, 4] {
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::DualPipe] {
            push([1, 1, 1, pp], kind, 0);
        }
    }
    for kind in ScheduleKind::ALL {
        push([1, 2, 1, 2], kind, 0);
    }
    for zero in 1..=3 {
        push([2, 1, 1, 2], ScheduleKind::OneFOneB, zero);
    }
    push([1, 1, 2, 2], ScheduleKind::DualPipe, 0);
    layouts.retain(|layout| layout.num_ranks() <= max_ranks);
    layouts
}
