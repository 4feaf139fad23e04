//! How much of a layer is to be done by moving experts where links are slow (HybridEP, 2510.19470, section 3).
//!
//! Workers form domains. Inside a domain every worker fetches the others' experts (all-gather); between domains
//! tokens travel, each to the worker at its own offset of the other domain (all-to-all). A domain of one worker is
//! plain expert parallelism, one domain of all of them moves no token.

/// What the share of work that is done by moving tokens depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Migration {
    /// G: workers, at least 2.
    pub workers: usize,
    /// D: bytes of tokens that a worker sends away.
    pub data_bytes: f64,
    /// P_E: bytes of the experts of a worker.
    pub expert_bytes: f64,
    /// B: bytes a second of a worker's link.
    pub bytes_per_s: f64,
    /// Seconds of computation before the experts, under which weights can move.
    pub hidden_s: f64,
}

/// p*, the share of the exchange by all-to-all that takes the least time, 0 to 1: as few experts move as tokens allow
/// where tokens are the smaller load (`2 D < G P_E`), none of the tokens otherwise.
#[must_use]
pub fn token_share(of: &Migration) -> f64 {
    let peers = of.workers.saturating_sub(1).max(1) as f64;
    if 2.0 * of.data_bytes >= of.workers as f64 * of.expert_bytes {
        return 0.0;
    }
    (1.0 - of.bytes_per_s * of.hidden_s / (of.expert_bytes * peers)).clamp(0.0, 1.0)
}

impl Migration {
    /// Seconds of the exchange at the share `p`, equations of both cases: weights move under the computation as far
    /// as it reaches.
    #[must_use]
    pub fn seconds(&self, p: f64) -> f64 {
        let (g, peers) = (self.workers as f64, self.workers as f64 - 1.0);
        let gather = (1.0 - p) * peers * self.expert_bytes / self.bytes_per_s;
        let exchange = 2.0 * self.data_bytes * peers * p / (g * self.bytes_per_s);
        gather.max(self.hidden_s) + exchange
    }
}

/// Messages of one exchange among `workers` in domains of `domain`: those of the all-to-all, `G (G/S - 1)`, and those
/// of the all-gather, `G (S - 1)`.
#[must_use]
pub fn domain_transfers(workers: usize, domain: usize) -> (usize, usize) {
    (workers * (workers / domain.max(1)).saturating_sub(1), workers * domain.saturating_sub(1))
}

/// What two workers have to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// They fetch each other's experts.
    Gather,
    /// They send each other tokens.
    Exchange,
    /// Nothing directly.
    None,
}

/// What workers `a` and `b` have to do with each other at `level` of a hierarchy (outermost 0), whose level i has
/// `sizes[i]` parts, in domains of `domains[i]`.
#[must_use]
pub fn peer(a: usize, b: usize, level: usize, sizes: &[usize], domains: &[usize]) -> Peer {
    let place = |worker: usize, i: usize| worker / sizes[i + 1..].iter().product::<usize>() % sizes[i];
    if (level + 1..sizes.len()).any(|i| place(a, i) != place(b, i)) {
        return Peer::None;
    }
    let size = domains[level];
    let (a, b) = (place(a, level), place(b, level));
    match (a / size == b / size, a % size == b % size) {
        (true, false) => Peer::Gather,
        (false, true) => Peer::Exchange,
        _ => Peer::None,
    }
}
