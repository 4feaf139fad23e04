//! The share of a layer's exchange that is done by moving experts where links are slow (HybridEP, 2510.19470, section
//! 3).
//!
//! Workers form domains. Inside a domain each worker fetches the others' experts by all-gather. Between domains
//! tokens move by all-to-all, each to the worker at the same offset in the other domain. Domains of one worker are
//! plain expert parallelism; with one domain of all workers no token moves.

/// The quantities that determine the share of work done by moving tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Migration {
    /// G: the number of workers, at least 2.
    pub workers: usize,
    /// D: bytes of tokens that a worker sends.
    pub data_bytes: f64,
    /// P_E: bytes of a worker's experts.
    pub expert_bytes: f64,
    /// B: bytes per second of a worker's link.
    pub bytes_per_s: f64,
    /// Seconds of computation before the experts, under which weights can move.
    pub hidden_s: f64,
}

/// Returns p*, the share of the exchange by all-to-all that takes the least time, 0 to 1. Where tokens are the
/// smaller load (`2 D < G P_E`), only as many experts move as the computation hides; otherwise no token moves.
#[must_use]
pub fn token_share(of: &Migration) -> f64 {
    let peers = of.workers.saturating_sub(1).max(1) as f64;
    if 2.0 * of.data_bytes >= of.workers as f64 * of.expert_bytes {
        return 0.0;
    }
    (1.0 - of.bytes_per_s * of.hidden_s / (of.expert_bytes * peers)).clamp(0.0, 1.0)
}

impl Migration {
    /// Returns the seconds of the exchange at share `p`, for both cases of the paper. Weights move under the
    /// computation as far as it reaches.
    #[must_use]
    pub fn seconds(&self, p: f64) -> f64 {
        let (g, peers) = (self.workers as f64, self.workers as f64 - 1.0);
        let gather = (1.0 - p) * peers * self.expert_bytes / self.bytes_per_s;
        let exchange = 2.0 * self.data_bytes * peers * p / (g * self.bytes_per_s);
        gather.max(self.hidden_s) + exchange
    }
}

/// Returns the messages of one exchange among `workers` in domains of `domain`: `G (G/S - 1)` of the all-to-all and
/// `G (S - 1)` of the all-gather.
#[must_use]
pub fn domain_transfers(workers: usize, domain: usize) -> (usize, usize) {
    (workers * (workers / domain.max(1)).saturating_sub(1), workers * domain.saturating_sub(1))
}

/// The relation of two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// They fetch each other's experts.
    Gather,
    /// They send each other tokens.
    Exchange,
    /// They do not communicate directly.
    None,
}

/// Returns the relation of workers `a` and `b` at `level` of a hierarchy (0 is the outermost). Level i has `sizes[i]`
/// parts, in domains of `domains[i]`.
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

/// A level of a hierarchy of workers, such as nodes or the devices of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DomainLevel {
    /// Parts at this level.
    pub size: usize,
    /// Bytes per second of a worker's link between the parts.
    pub bytes_per_s: f64,
}

/// The work of an exchange, for [`choose_domains`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DomainWork {
    /// D: bytes of tokens that a worker sends.
    pub data_bytes: f64,
    /// P_E: bytes of a worker's experts.
    pub expert_bytes: f64,
    /// Seconds of computation before the experts, under which weights can move.
    pub hidden_s: f64,
}

/// Returns the seconds of an exchange with domains of `domains[i]` at level i, of which 0 is the outermost. At each
/// level a worker fetches the experts of `S - 1` peers, with all that these fetched at the levels before, and sends
/// the share `1 - S / G` of its tokens, there and back. Weights move under the computation as far as it reaches. With
/// one level this is [`Migration::seconds`] at `p = 1 - S / G` by volume.
#[must_use]
pub fn domain_seconds(levels: &[DomainLevel], domains: &[usize], work: &DomainWork) -> f64 {
    let (mut gather, mut exchange, mut held) = (0.0, 0.0, 1.0);
    for (level, &domain) in levels.iter().zip(domains) {
        let (size, domain) = (level.size as f64, domain as f64);
        gather += (domain - 1.0) * held * work.expert_bytes / level.bytes_per_s;
        exchange += 2.0 * work.data_bytes * (1.0 - domain / size) / level.bytes_per_s;
        held *= domain;
    }
    gather.max(work.hidden_s) + exchange
}

/// Returns the domain size of each level with the least time, of all that divide their levels; of equal ones that
/// with the smallest domains, which moves the fewest experts.
#[must_use]
pub fn choose_domains(levels: &[DomainLevel], work: &DomainWork) -> Vec<usize> {
    let mut best = (f64::INFINITY, vec![1; levels.len()]);
    let mut domains = vec![1; levels.len()];
    loop {
        let seconds = domain_seconds(levels, &domains, work);
        if seconds < best.0 * (1.0 - 1e-9) {
            best = (seconds, domains.clone());
        }
        // The next choice, the innermost level first.
        let Some(at) = (0..levels.len()).rev().find(|&at| domains[at] < levels[at].size) else { return best.1 };
        let next = |from: usize| (from + 1..=levels[at].size).find(|&size| levels[at].size.is_multiple_of(size));
        domains[at] = next(domains[at]).unwrap_or(levels[at].size);
        domains[at + 1..].fill(1);
    }
}
