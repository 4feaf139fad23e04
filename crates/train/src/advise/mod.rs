//! Advice on a run: its findings, the figures that show them, and the settings to try.
//!
//! [`RunFigures::read`] reduces a run folder to one plain value. [`advise`] is a pure function of that value, so that
//! the same figures always give the same findings. [`trial`] tries a setting for some steps from the run's last
//! checkpoint, in a folder of its own.

mod figures;
mod finding;
mod loss;
mod machine;
mod read;
mod routers;
mod settings;
mod speed;
mod trace;
pub mod trial;

pub use figures::{
    Choices, Course, Evaluated, LayerFigures, Point, RankFigures, RunFigures, SpanTotal, TraceFigures, Window,
};
pub use finding::{Change, Figure, Finding, Over, Reach, Remedy, Topic};
pub use read::{AdviceError, ReadOptions, ReadRun};
pub use settings::reach;

/// Returns what holds the run back, the finding with the most at stake first; empty for a healthy run.
#[must_use]
pub fn advise(figures: &RunFigures) -> Vec<Finding> {
    let rules = [
        loss::not_finite,
        loss::diverging,
        loss::spikes,
        loss::validation_rises,
        routers::collapsed,
        routers::uniform,
        routers::dropped,
        routers::top_k,
        speed::waiting,
        speed::links,
        speed::products,
        speed::pauses,
        machine::memory,
    ];
    let mut findings: Vec<Finding> = rules.iter().filter_map(|rule| rule(figures)).collect();
    findings.sort_by(|a, b| b.at_stake.total_cmp(&a.at_stake));
    findings
}

#[cfg(test)]
mod tests;
