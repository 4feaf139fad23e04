//! Domains chosen again while a run goes on: when the bandwidth that exchanges see has changed, or the time under
//! which experts can be gathered.
//!
//! All ranks give the tuner the same figures after the same steps, so that they decide alike. A change is made when
//! two windows in a row ask for the same domains and the model promises a gain by them, so that noise changes
//! nothing.

use crate::{DomainLevel, DomainWork, choose_domains, domain_seconds};

/// The factor by which the bandwidth that is seen must change before it is measured again.
const CHANGE: f64 = 1.5;
/// The share of an exchange's time that other domains must save.
const LEAST_GAIN: f64 = 0.1;

/// The figures of a window of steps, of the rank where they are least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DomainWindow {
    /// Bytes a second that exchanges inside nodes had at most; 0 without one.
    pub node_bytes_per_s: f64,
    /// Bytes a second that exchanges between nodes had at most; 0 without one.
    pub cluster_bytes_per_s: f64,
    /// Seconds of computation before the experts, under which weights can move.
    pub hidden_s: f64,
}

/// A decision for other domains.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainChange {
    /// The sizes before, of each level.
    pub from: Vec<usize>,
    /// The sizes from now on.
    pub to: Vec<usize>,
    /// The seconds of an exchange that the model foretells, before and from now on.
    pub seconds: [f64; 2],
}

/// The choice of domains of a run, made again after each window of steps.
#[derive(Clone, Debug)]
pub struct DomainTuner {
    levels: Vec<DomainLevel>,
    work: DomainWork,
    domains: Vec<usize>,
    /// Bytes a second that exchanges saw when the bandwidth was measured, inside nodes and between them; 0: none.
    reference: [f64; 2],
    /// Windows in a row that saw another bandwidth.
    num_others: usize,
    /// The domains that the window before asked for.
    wanted: Option<Vec<usize>>,
}

impl DomainTuner {
    /// Chooses the first domains, for levels with their measured bandwidth.
    #[must_use]
    pub fn new(levels: Vec<DomainLevel>, work: DomainWork) -> Self {
        let domains = choose_domains(&levels, &work);
        Self { levels, work, domains, reference: [0.0; 2], num_others: 0, wanted: None }
    }

    /// Returns the sizes of domains that are in force, of each level.
    #[must_use]
    pub fn domains(&self) -> &[usize] {
        &self.domains
    }

    /// Returns the levels with the bandwidth that was measured last.
    #[must_use]
    pub fn levels(&self) -> &[DomainLevel] {
        &self.levels
    }

    /// Takes in a window of steps. Returns true if the bandwidth of the levels is to be measured again.
    pub fn observe(&mut self, window: &DomainWindow) -> bool {
        self.work.hidden_s = window.hidden_s;
        let seen = [window.node_bytes_per_s, window.cluster_bytes_per_s];
        let mut is_other = false;
        for (reference, seen) in self.reference.iter_mut().zip(seen).filter(|(_, seen)| *seen > 0.0) {
            if *reference == 0.0 {
                *reference = seen;
            }
            is_other |= seen > *reference * CHANGE || seen * CHANGE < *reference;
        }
        self.num_others = if is_other { self.num_others + 1 } else { 0 };
        self.num_others > 1
    }

    /// Sets the measured bytes a second of each level. What exchanges see from now on goes with them.
    pub fn set_bandwidth(&mut self, bytes_per_s: &[f64]) {
        for (level, &bytes_per_s) in self.levels.iter_mut().zip(bytes_per_s) {
            level.bytes_per_s = bytes_per_s;
        }
        self.begin_again();
    }

    fn begin_again(&mut self) {
        (self.reference, self.num_others) = ([0.0; 2], 0);
    }

    /// Decides for other domains, if two windows in a row ask for them.
    pub fn decide(&mut self) -> Option<DomainChange> {
        let best = choose_domains(&self.levels, &self.work);
        let seconds = [&self.domains, &best].map(|domains| domain_seconds(&self.levels, domains, &self.work));
        if seconds[1] > seconds[0] * (1.0 - LEAST_GAIN) {
            self.wanted = None;
            return None;
        }
        if self.wanted.as_ref() != Some(&best) {
            self.wanted = Some(best);
            return None;
        }
        self.wanted = None;
        // Exchanges of other domains see the same links otherwise.
        self.begin_again();
        let from = std::mem::replace(&mut self.domains, best.clone());
        Some(DomainChange { from, to: best, seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Experts of a megabyte among four ranks, tokens of half as much, and a millisecond of computation before them.
    fn tuner(bytes_per_s: f64) -> DomainTuner {
        let work = DomainWork { data_bytes: 5e5, expert_bytes: 1e6, hidden_s: 1e-3 };
        DomainTuner::new(vec![DomainLevel { size: 4, bytes_per_s }], work)
    }

    fn window(bytes_per_s: f64) -> DomainWindow {
        DomainWindow { node_bytes_per_s: bytes_per_s, cluster_bytes_per_s: 0.0, hidden_s: 1e-3 }
    }

    #[test]
    fn slower_links_take_two_windows_to_be_measured_and_two_to_change_domains() {
        let mut tuner = tuner(1e10);
        assert_eq!(tuner.domains(), [4], "all experts are gathered under the computation");
        assert!(!tuner.observe(&window(8e9)) && tuner.decide().is_none());
        assert!(!tuner.observe(&window(8e7)) && tuner.decide().is_none());
        assert!(tuner.observe(&window(8e7)));
        tuner.set_bandwidth(&[1e8]);
        assert!(tuner.decide().is_none());
        assert!(!tuner.observe(&window(8e7)));
        let change = tuner.decide().expect("a change");
        assert_eq!((change.from, change.to), (vec![4], vec![1]));
        assert!(change.seconds[0] > 3.0 * change.seconds[1]);
        assert_eq!(tuner.domains(), [1]);
    }

    #[test]
    fn noise_changes_nothing() {
        let mut tuner = tuner(1e10);
        for step in 0..100 {
            let seen = if step % 2 == 0 { 8e9 } else { 2e9 };
            assert!(!tuner.observe(&window(seen)) && tuner.decide().is_none(), "window {step}");
        }
    }

    #[test]
    fn a_small_gain_is_not_worth_a_change() {
        let mut tuner = tuner(1e10);
        // Where all domains take nearly the same time.
        tuner.set_bandwidth(&[3e9]);
        for _ in 0..5 {
            tuner.observe(&DomainWindow { hidden_s: 9.5e-4, ..window(3e9) });
            assert!(tuner.decide().is_none());
        }
    }
}
