//! The time and traffic of the ranks of a run in each step.

use serde_json::{Map, Value};

/// The record of one rank in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankRecord {
    /// Milliseconds of forward and backward, without time spent in communication.
    pub work_ms: f64,
    /// Milliseconds blocked in communication, in all phases, including waiting for other ranks.
    pub standing_ms: f64,
    /// Milliseconds of summing gradients.
    pub gradients_ms: f64,
    /// Milliseconds of the update.
    pub update_ms: f64,
    /// Bytes sent to ranks of the same node.
    pub node_bytes: u64,
    /// Bytes sent to ranks of other nodes.
    pub cluster_bytes: u64,
    /// The part of `standing_ms` in tensor-parallel sums and gathers.
    pub tensor_ms: f64,
    /// Bytes sent in tensor-parallel communication.
    pub tensor_bytes: u64,
    /// Milliseconds of exchanges of tokens with the ranks of experts, from the start of each to its end.
    pub exchange_ms: f64,
    /// The part of `exchange_ms` in which the rank waited; the rest is hidden under computations.
    pub exchange_waited_ms: f64,
}

/// The records of all ranks in one step, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RanksRecord {
    /// The record of each rank.
    pub ranks: Vec<RankRecord>,
}

/// The names of a rank's figures in JSON, after `ranks/`.
const FIGURES: [&str; NUM_FIGURES] = [
    "work_ms",
    "standing_ms",
    "gradients_ms",
    "update_ms",
    "node_bytes",
    "cluster_bytes",
    "tensor_ms",
    "tensor_bytes",
    "exchange_ms",
    "exchange_waited_ms",
];

/// The number of a rank's figures.
pub(crate) const NUM_FIGURES: usize = 10;

impl RankRecord {
    /// Returns the figures in a fixed order; bytes are exact up to 2^53.
    #[must_use]
    pub fn to_numbers(&self) -> [f64; NUM_FIGURES] {
        let Self { work_ms, standing_ms, gradients_ms, update_ms, tensor_ms, exchange_ms, exchange_waited_ms, .. } =
            *self;
        let [node, cluster, tensor] =
            [self.node_bytes, self.cluster_bytes, self.tensor_bytes].map(|bytes| bytes as f64);
        [
            work_ms,
            standing_ms,
            gradients_ms,
            update_ms,
            node,
            cluster,
            tensor_ms,
            tensor,
            exchange_ms,
            exchange_waited_ms,
        ]
    }

    /// Rebuilds a record from the numbers of [`to_numbers`](Self::to_numbers).
    #[must_use]
    pub fn from_numbers(numbers: [f64; NUM_FIGURES]) -> Self {
        let [work_ms, standing_ms, gradients_ms, update_ms, node, cluster, tensor_ms, tensor, ..] = numbers;
        let [.., exchange_ms, exchange_waited_ms] = numbers;
        let [node_bytes, cluster_bytes, tensor_bytes] = [node, cluster, tensor].map(|bytes| bytes as u64);
        Self {
            work_ms,
            standing_ms,
            gradients_ms,
            update_ms,
            node_bytes,
            cluster_bytes,
            tensor_ms,
            tensor_bytes,
            exchange_ms,
            exchange_waited_ms,
        }
    }
}

impl RanksRecord {
    /// The names of [`scalars`](Self::scalars), after `ranks/`.
    pub(super) const SCALARS: [&str; 8] = [
        "imbalance",
        "waiting_ms",
        "standing_ms_mean",
        "node_mb",
        "cluster_mb",
        "tensor_ms_mean",
        "tensor_mb",
        "exchange_hidden",
    ];

    /// Returns the busiest rank's work over the mean work; 1 when even.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let mean = self.mean(|rank| rank.work_ms);
        if mean > 0.0 { self.most_work() / mean } else { 1.0 }
    }

    /// Returns the mean milliseconds that a rank waits for the one with the most work.
    #[must_use]
    pub fn waiting_ms(&self) -> f64 {
        self.mean(|rank| self.most_work() - rank.work_ms)
    }

    /// Returns the share of the exchanges of tokens that is hidden under computations; NaN without exchanges.
    #[must_use]
    pub fn exchange_hidden(&self) -> f64 {
        1.0 - self.mean(|rank| rank.exchange_waited_ms) / self.mean(|rank| rank.exchange_ms)
    }

    fn most_work(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.work_ms).fold(0.0, f64::max)
    }

    fn mean(&self, figure: impl Fn(&RankRecord) -> f64) -> f64 {
        self.ranks.iter().map(figure).sum::<f64>() / self.ranks.len().max(1) as f64
    }

    /// Returns the figures of all ranks together; bytes are sums, in millions.
    pub(super) fn scalars(&self) -> [f64; 8] {
        let megabytes = |bytes: fn(&RankRecord) -> u64| self.ranks.iter().map(bytes).sum::<u64>() as f64 / 1e6;
        [
            self.imbalance(),
            self.waiting_ms(),
            self.mean(|rank| rank.standing_ms),
            megabytes(|rank| rank.node_bytes),
            megabytes(|rank| rank.cluster_bytes),
            self.mean(|rank| rank.tensor_ms),
            megabytes(|rank| rank.tensor_bytes),
            self.exchange_hidden(),
        ]
    }

    /// Returns one of the figures of all ranks together, by its name after `ranks/`; NaN for an unknown name.
    pub(crate) fn scalar(&self, name: &str) -> f64 {
        let found = Self::SCALARS.iter().zip(self.scalars()).find(|(known, _)| **known == name);
        found.map_or(f64::NAN, |(_, value)| value)
    }

    /// Formats the figures of each rank for a JSON line: `"ranks/work_ms":[1,2]`.
    pub(super) fn json(&self) -> String {
        let list = |(index, name): (usize, &&str)| {
            let numbers = self.ranks.iter().map(|rank| super::lines::number(rank.to_numbers()[index]));
            format!(",\"ranks/{name}\":[{}]", numbers.collect::<Vec<_>>().join(","))
        };
        FIGURES.iter().enumerate().map(list).collect()
    }

    /// Parses the fields of a JSON line; `None` if it has no ranks. A figure missing from an older run is 0.
    pub(super) fn parse(fields: &Map<String, Value>) -> Option<Self> {
        let list = |name: &str| fields.get(&format!("ranks/{name}"))?.as_array();
        let num_ranks = list(FIGURES[0])?.len();
        let lists = FIGURES.map(list);
        let of_rank = |rank: usize| {
            let number = |list: &Value| list.as_f64().unwrap_or(f64::NAN);
            RankRecord::from_numbers(lists.map(|list| list.map_or(0.0, |list| list.get(rank).map_or(f64::NAN, number))))
        };
        Some(Self { ranks: (0..num_ranks).map(of_rank).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(work: &[f64]) -> RanksRecord {
        let rank = |&work_ms: &f64| RankRecord { work_ms, node_bytes: 2_000_000, ..RankRecord::default() };
        RanksRecord { ranks: work.iter().map(rank).collect() }
    }

    #[test]
    fn the_slowest_rank_makes_the_others_wait() {
        let record = record(&[1.0, 2.0, 6.0]);
        assert_eq!((record.imbalance(), record.waiting_ms()), (2.0, 3.0));
        assert_eq!(record.scalars()[3], 6.0, "the megabytes of all");
        assert_eq!(RanksRecord::default().imbalance(), 1.0);
    }

    #[test]
    fn exchanges_that_nobody_waited_for_are_hidden() {
        let rank = |exchange_waited_ms| RankRecord { exchange_ms: 8.0, exchange_waited_ms, ..RankRecord::default() };
        let record = RanksRecord { ranks: vec![rank(1.0), rank(3.0)] };
        assert_eq!(record.exchange_hidden(), 0.75);
        assert!(RanksRecord::default().exchange_hidden().is_nan());
    }

    #[test]
    fn what_is_written_of_each_rank_reads_back() {
        let record = record(&[0.125, 7.0]);
        let line = format!("{{\"step\":1{}}}", record.json());
        let Value::Object(fields) = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!(RanksRecord::parse(&fields), Some(record));
        assert_eq!(RanksRecord::parse(&Map::new()), None);
    }
}
