//! The time of a step that a decision foretold, beside the time that was measured after it.

use serde_json::Value;

/// The fewest steps whose time is compared.
const MIN_STEPS: usize = 5;
/// The share of the shortest and of the longest steps that a mean leaves out.
const TRIMMED: f64 = 0.1;

/// A decision beside its outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Foretold {
    /// The step after which it was made.
    pub step: u64,
    /// The policy that decided.
    pub policy: String,
    /// The imbalance of the load by the placement before and by the new one, as the decision had it.
    pub imbalance: [f64; 2],
    /// Mean seconds of a step before.
    pub before_s: f64,
    /// Seconds of a step that the decision foretold.
    pub foretold_s: f64,
    /// Mean seconds of a step after the experts had moved.
    pub after_s: f64,
}

impl Foretold {
    /// Returns how far the measured time is from the foretold one, as a share of it.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.after_s / self.foretold_s - 1.0
    }
}

/// The steps of a run.
pub(super) struct Steps<'a> {
    /// The seconds of each step, of which the first has number 1.
    pub(super) seconds: &'a [f64],
    /// Steps after which the load changes.
    pub(super) period: u64,
}

impl Steps<'_> {
    /// Returns the mean of steps `first..=last` without the shortest and the longest; none where they are few or the
    /// load changes among them.
    fn mean(&self, first: u64, last: u64) -> Option<f64> {
        let is_even = first >= 1 && first <= last && (first - 1) / self.period == (last - 1) / self.period;
        let mut seconds = self.seconds.get(first as usize - 1..last as usize).filter(|_| is_even)?.to_vec();
        if seconds.len() < MIN_STEPS {
            return None;
        }
        seconds.sort_by(f64::total_cmp);
        let cut = (seconds.len() as f64 * TRIMMED) as usize;
        let kept = &seconds[cut..seconds.len() - cut];
        Some(kept.iter().sum::<f64>() / kept.len() as f64)
    }
}

/// A decision that changes a placement, as the log has it.
struct Logged {
    step: u64,
    policy: String,
    imbalance: [f64; 2],
    saved_s: f64,
}

/// Compares the decisions in the lines of a run's log with the times of its steps. A decision is left out if the load
/// changed in the steps before it, or before its experts had moved for some steps.
pub(super) fn foretold(log: &str, steps: &Steps<'_>) -> Vec<Foretold> {
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let step_of = |line: &Value| line["step"].as_u64().unwrap_or(0);
    let of_event = |event: &str| lines.iter().filter(|line| line["event"] == event).map(step_of).collect::<Vec<_>>();
    let (decided, moved) = (of_event("decision"), of_event("move"));
    let compare = |decision: Logged| {
        let at = decision.step;
        let before = decided.iter().copied().filter(|&step| step < at).max().unwrap_or(0);
        let end = decided.iter().copied().find(|&step| step > at).unwrap_or(steps.seconds.len() as u64);
        let first = moved.iter().copied().filter(|&step| step <= at).max().unwrap_or(0).max(before);
        let done = moved.iter().copied().filter(|&step| step > at && step <= end).max()?;
        let before_s = steps.mean(first + 2, at)?;
        let after_s = steps.mean(done + 2, end)?;
        // The load is the one that was decided by.
        steps.mean(at, at + MIN_STEPS as u64)?;
        let Logged { step, policy, imbalance, saved_s } = decision;
        Some(Foretold { step, policy, imbalance, before_s, foretold_s: before_s - saved_s, after_s })
    };
    lines.iter().filter_map(logged).filter_map(compare).collect()
}

/// Reads a decision that changes layers.
fn logged(line: &Value) -> Option<Logged> {
    let layers = line["layers"].as_array().filter(|layers| line["event"] == "decision" && !layers.is_empty())?;
    let mean =
        |name: &str| layers.iter().map(|layer| layer[name].as_f64().unwrap_or(0.0)).sum::<f64>() / layers.len() as f64;
    Some(Logged {
        step: line["step"].as_u64()?,
        policy: line["policy"].as_str()?.to_owned(),
        imbalance: [mean("imbalance_before"), mean("imbalance_after")],
        saved_s: mean("saved_ms_a_step") * layers.len() as f64 / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_is_compared_with_the_steps_after_its_moves_and_left_out_where_the_load_changes() {
        let line = |step: u64, saved: f64| {
            format!(
                "{{\"step\":{step},\"event\":\"decision\",\"policy\":\"moves\",\"layers\":[{{\"imbalance_before\":1.0,\
                 \"imbalance_after\":0.5,\"saved_ms_a_step\":{saved}}}]}}\n{{\"step\":{},\"event\":\"move\"}}\n",
                step + 1
            )
        };
        let log = [line(10, 4.0), line(20, 1.0), line(30, 1.0)].concat();
        let seconds: Vec<f64> = (1..=40).map(|step| if step <= 11 { 0.010 } else { 0.005 }).collect();
        let found = foretold(&log, &Steps { seconds: &seconds, period: 20 });
        let steps: Vec<u64> = found.iter().map(|decision| decision.step).collect();
        assert_eq!(steps, [10, 30], "the load changes after step 20");
        let first = &found[0];
        assert!((first.before_s - 0.010).abs() < 1e-12 && (first.foretold_s - 0.006).abs() < 1e-12, "{first:?}");
        assert!((first.after_s - 0.005).abs() < 1e-12 && (first.error() + 1.0 / 6.0).abs() < 1e-9, "{first:?}");
    }
}
