//! Transfers over links that are joined where they are alike.

use std::collections::HashMap;

use super::loads::{LinkId, Loads};
use super::places::Places;

/// A transfer of [`Traffic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(u32);

/// A part of a transfer that passes its links at once; the parts follow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// Seconds before the first byte.
    pub fixed_s: f64,
    /// Seconds of the bytes with all links to themselves.
    pub alone_s: f64,
    /// The links, each with the share of its bandwidth that the bytes take then.
    pub(crate) uses: Vec<(u32, f64)>,
}

/// Bytes at a level.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelBytes {
    /// Bytes that ranks sent.
    pub sent: f64,
    /// Bytes that ranks received.
    pub received: f64,
}

/// The transfers that can be under way on a cluster, and the links that they share.
///
/// Links on which all transfers put the same are one: all 10,000 cards of a cluster may be one link here. A link that
/// is never fuller than another is left out.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// The parts of each transfer.
    pub(crate) transfers: Vec<Vec<Phase>>,
    /// The bytes of each transfer at each level.
    pub(crate) bytes: Vec<Vec<LevelBytes>>,
    /// The level of each link.
    pub(crate) levels: Vec<u8>,
    /// The names of the levels.
    pub(crate) level_names: Vec<String>,
    /// The phases that each link of the cluster carries, with their seconds, until links are joined.
    parts: HashMap<LinkId, Vec<(PhaseId, f64)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct PhaseId {
    transfer: u32,
    phase: u32,
}

impl Traffic {
    /// Makes traffic without transfers, on the cluster of `places`.
    #[must_use]
    pub fn new(places: &Places<'_>) -> Self {
        let level_names = places.cluster.levels.iter().map(|level| level.name.clone()).collect();
        Self { level_names, ..Self::default() }
    }

    /// Adds a transfer of parts that follow each other.
    pub fn add(&mut self, parts: &[Loads<'_>]) -> TransferId {
        let transfer = self.transfers.len() as u32;
        let mut bytes = vec![LevelBytes::default(); self.level_names.len()];
        let mut phases = Vec::with_capacity(parts.len());
        for (loads, phase) in parts.iter().zip(0..) {
            let mut alone_s = 0.0_f64;
            for (&link, load) in &loads.bytes {
                let seconds = load / loads.bandwidth(link);
                alone_s = alone_s.max(seconds);
                self.parts.entry(link).or_default().push((PhaseId { transfer, phase }, seconds));
            }
            for (sum, [sent, received]) in bytes.iter_mut().zip(&loads.levels) {
                sum.sent += sent;
                sum.received += received;
            }
            phases.push(Phase { fixed_s: loads.fixed_s, alone_s, uses: Vec::new() });
        }
        self.transfers.push(phases);
        self.bytes.push(bytes);
        TransferId(transfer)
    }

    /// Joins the links that are alike. Transfers are added before.
    #[must_use]
    pub fn joined(mut self) -> Self {
        let mut alike: HashMap<Vec<(PhaseId, u64)>, LinkId> = HashMap::new();
        let parts = std::mem::take(&mut self.parts);
        for (link, carried) in &parts {
            // Sums of the same bytes in another order differ in their last digits.
            let key = carried.iter().map(|&(phase, seconds)| (phase, seconds.to_bits() >> 16)).collect();
            let kept = alike.entry(key).or_insert(*link);
            *kept = (*kept).min(*link);
        }
        let mut links: Vec<LinkId> = alike.into_values().collect();
        links.sort_unstable();
        for link in without_slack(links, &parts) {
            let index = self.levels.len() as u32;
            self.levels.push(link.level);
            for &(id, seconds) in &parts[&link] {
                let phase = &mut self.transfers[id.transfer as usize][id.phase as usize];
                phase.uses.push((index, seconds / phase.alone_s));
            }
        }
        self
    }

    /// Returns the seconds of a transfer with all links to itself.
    #[must_use]
    pub fn seconds(&self, id: TransferId) -> f64 {
        self.phases(id).iter().map(|phase| phase.fixed_s + phase.alone_s).sum()
    }

    /// Returns the parts of a transfer.
    #[must_use]
    pub fn phases(&self, id: TransferId) -> &[Phase] {
        &self.transfers[id.0 as usize]
    }

    /// Returns the bytes of a transfer at each level.
    #[must_use]
    pub fn bytes(&self, id: TransferId) -> &[LevelBytes] {
        &self.bytes[id.0 as usize]
    }

    /// Returns the number of links that are left.
    #[must_use]
    pub fn num_links(&self) -> usize {
        self.levels.len()
    }
}

/// Leaves out links that carry the same phases as another, and none of them for longer.
fn without_slack(links: Vec<LinkId>, parts: &HashMap<LinkId, Vec<(PhaseId, f64)>>) -> Vec<LinkId> {
    let mut by_phases: HashMap<Vec<PhaseId>, Vec<LinkId>> = HashMap::new();
    for link in links {
        by_phases.entry(parts[&link].iter().map(|&(phase, _)| phase).collect()).or_default().push(link);
    }
    let covers = |a: LinkId, b: LinkId| parts[&a].iter().zip(&parts[&b]).all(|(a, b)| a.1 >= b.1);
    let mut kept: Vec<LinkId> = Vec::new();
    for mut alike in by_phases.into_values() {
        let total = |link: &LinkId| parts[link].iter().map(|(_, seconds)| seconds).sum::<f64>();
        alike.sort_by(|a, b| total(b).total_cmp(&total(a)).then(a.cmp(b)));
        let mut fullest: Vec<LinkId> = Vec::new();
        for link in alike {
            if fullest.len() > 64 || !fullest.iter().any(|&other| covers(other, link)) {
                fullest.push(link);
            }
        }
        kept.extend(fullest);
    }
    kept.sort_unstable();
    kept
}
