//! The cluster: ranks, their nodes, and the links between them.

use serde::{Deserialize, Serialize};

/// A cluster: its nodes, the speed and memory of a rank, and the two classes of links.
///
/// The TOML form names every field:
///
/// ```
/// let topology = moeworks_plan::Topology::parse(
///     "num_nodes = 2\n\
///      ranks_per_node = 4\n\
///      rank = { flops = 1e12, memory_bytes = 16e9, memory_bytes_per_s = 50e9 }\n\
///      node_link = { latency_s = 2e-6, bytes_per_s = 10e9 }\n\
///      cluster_link = { latency_s = 1e-3, bytes_per_s = 125e6 }\n",
/// )?;
/// assert_eq!(topology.num_ranks(), 8);
/// assert_eq!(moeworks_plan::Topology::parse(&topology.to_toml())?, topology);
/// # Ok::<(), moeworks_plan::TopologyError>(())
/// ```
///
/// `node_sizes = [4, 4, 2]` replaces the first two lines if nodes differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct Topology {
    /// The number of ranks of each node; ranks are numbered node by node.
    pub node_sizes: Vec<usize>,
    /// The speed and memory of each rank.
    pub rank: RankSpec,
    /// The link between two ranks of a node.
    pub node_link: Link,
    /// The link between ranks of two nodes: the share of one rank while all ranks of its node send.
    pub cluster_link: Link,
    /// The number of cores on each NUMA node of a machine; empty if unknown.
    pub numa_cores: Vec<usize>,
}

/// The speed and memory of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankSpec {
    /// Floating-point operations per second that the matrix products of this model reach, below the peak.
    pub flops: f64,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Memory bandwidth for reading or writing.
    pub memory_bytes_per_s: f64,
}

/// A link in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds until the first byte arrives.
    pub latency_s: f64,
    /// Bytes per second after that.
    pub bytes_per_s: f64,
}

impl Link {
    /// Returns the seconds of `messages` messages, one after another, with `bytes` in all.
    #[must_use]
    pub fn seconds(&self, messages: usize, bytes: f64) -> f64 {
        messages as f64 * self.latency_s + bytes / self.bytes_per_s
    }
}

/// The two links of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// The link between ranks of a node.
    pub node: Link,
    /// The link between ranks of different nodes.
    pub cluster: Link,
}

impl Links {
    /// Returns the link of a class; for a rank's messages to itself that of the node.
    #[must_use]
    pub fn of(&self, class: LinkClass) -> Link {
        if class == LinkClass::Cluster { self.cluster } else { self.node }
    }
}

/// The class of link that a message between two ranks uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkClass {
    /// None: both are the same rank, and nothing moves.
    Own,
    /// The link within a node.
    Node,
    /// The link between nodes.
    Cluster,
}

/// The error of an invalid topology.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The text is not TOML, or a field is missing or unknown.
    #[error("{0}")]
    Form(String),
    /// A value out of range.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The expected range.
        expected: &'static str,
    },
}

/// The form of the file.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(skip_serializing_if = "Option::is_none")]
    num_nodes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks_per_node: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_sizes: Option<Vec<usize>>,
    rank: RankSpec,
    node_link: Link,
    cluster_link: Link,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    numa_cores: Vec<usize>,
}

/// The most ranks of a topology.
const MAX_RANKS: usize = 1 << 20;

impl TryFrom<Raw> for Topology {
    type Error = TopologyError;

    fn try_from(raw: Raw) -> Result<Self, TopologyError> {
        let node_sizes = match (raw.num_nodes, raw.ranks_per_node, raw.node_sizes) {
            (Some(nodes), Some(ranks), None) if nodes.saturating_mul(ranks) <= MAX_RANKS => vec![ranks; nodes],
            (Some(nodes), Some(_), None) => {
                return Err(wrong("num_nodes", nodes, "times ranks_per_node must be at most 1048576"));
            }
            (None, None, Some(sizes)) => sizes,
            _ => {
                let problem = "either num_nodes and ranks_per_node or node_sizes must be given";
                return Err(TopologyError::Form(problem.to_owned()));
            }
        };
        let Raw { rank, node_link, cluster_link, numa_cores, .. } = raw;
        let topology = Self { node_sizes, rank, node_link, cluster_link, numa_cores };
        topology.validate()?;
        Ok(topology)
    }
}

impl From<Topology> for Raw {
    fn from(topology: Topology) -> Self {
        let Topology { node_sizes, rank, node_link, cluster_link, numa_cores } = topology;
        let first = node_sizes[0];
        let is_even = node_sizes.iter().all(|&size| size == first);
        Self {
            num_nodes: is_even.then_some(node_sizes.len()),
            ranks_per_node: is_even.then_some(first),
            node_sizes: (!is_even).then_some(node_sizes),
            rank,
            node_link,
            cluster_link,
            numa_cores,
        }
    }
}

fn wrong(field: &'static str, value: impl std::fmt::Debug, expected: &'static str) -> TopologyError {
    TopologyError::Value { field, value: format!("{value:?}"), expected }
}

impl Topology {
    /// Reads the TOML form. The error is one line.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            TopologyError::Form(format!("{place}{}", error.message().trim().replace('\n', ", ")))
        })
    }

    /// Returns the TOML form, which [`Topology::parse`] reads back.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Numbers and tables of numbers always have a TOML form.
        toml::to_string(self).unwrap_or_default()
    }

    fn validate(&self) -> Result<(), TopologyError> {
        if self.node_sizes.is_empty() || self.node_sizes.contains(&0) {
            return Err(wrong("node_sizes", &self.node_sizes, "must be numbers of at least 1, one for each node"));
        }
        if self.node_sizes.iter().fold(0, |sum: usize, &size| sum.saturating_add(size)) > MAX_RANKS {
            return Err(wrong("node_sizes", self.node_sizes.len(), "must add up to at most 1048576 ranks"));
        }
        for (field, value) in [
            ("rank.flops", self.rank.flops),
            ("rank.memory_bytes", self.rank.memory_bytes),
            ("rank.memory_bytes_per_s", self.rank.memory_bytes_per_s),
            ("node_link.bytes_per_s", self.node_link.bytes_per_s),
            ("cluster_link.bytes_per_s", self.cluster_link.bytes_per_s),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(wrong(field, value, "must be a finite number above 0"));
            }
        }
        for (field, value) in
            [("node_link.latency_s", self.node_link.latency_s), ("cluster_link.latency_s", self.cluster_link.latency_s)]
        {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(wrong(field, value, "must be a finite number of at least 0"));
            }
        }
        Ok(())
    }

    /// Makes a topology of one machine whose `num_ranks` ranks are threads that share its memory, compute and memory
    /// bandwidth.
    #[must_use]
    pub fn one_machine(num_ranks: usize, whole: RankSpec) -> Self {
        let share = num_ranks.max(1) as f64;
        let rank = RankSpec {
            flops: whole.flops / share,
            memory_bytes: whole.memory_bytes / share,
            memory_bytes_per_s: whole.memory_bytes_per_s / share,
        };
        // A copy reads and writes.
        let link = Link { latency_s: 5e-6, bytes_per_s: rank.memory_bytes_per_s / 2.0 };
        let node_sizes = vec![num_ranks.max(1)];
        Self { node_sizes, rank, node_link: link, cluster_link: link, numa_cores: Vec::new() }
    }

    /// Returns an example cluster for tables on paper: nodes of eight ranks with 80 GB each, 40% of 312 TFLOP/s, 300
    /// GB/s between ranks of a node and 25 GB/s from each rank to other nodes (eight A100 with NVLink and one 200
    /// Gbit/s card each).
    #[must_use]
    pub fn example_cluster(num_nodes: usize) -> Self {
        Self {
            node_sizes: vec![8; num_nodes.max(1)],
            rank: RankSpec { flops: 0.4 * 312e12, memory_bytes: 80e9, memory_bytes_per_s: 2e12 },
            node_link: Link { latency_s: 3e-6, bytes_per_s: 300e9 },
            cluster_link: Link { latency_s: 10e-6, bytes_per_s: 25e9 },
            numa_cores: Vec::new(),
        }
    }

    /// Returns the cluster resized to `num_ranks` ranks, in nodes of the first node's size; the last may be smaller.
    #[must_use]
    pub fn resized(&self, num_ranks: usize) -> Self {
        let size = self.node_sizes[0];
        let node_sizes = (0..num_ranks.max(1)).step_by(size).map(|first| size.min(num_ranks.max(1) - first)).collect();
        Self { node_sizes, ..self.clone() }
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.node_sizes.iter().sum()
    }

    /// Returns the links of a rank.
    #[must_use]
    pub fn links(&self) -> Links {
        Links { node: self.node_link, cluster: self.cluster_link }
    }

    /// Returns the node of `rank`.
    #[must_use]
    pub fn node_of(&self, rank: usize) -> usize {
        let mut end = 0;
        self.node_sizes.iter().take_while(|&&size| (end + size <= rank).then(|| end += size).is_some()).count()
    }

    /// Returns the class of link that a message from rank `a` to rank `b` uses.
    #[must_use]
    pub fn link_class(&self, a: usize, b: usize) -> LinkClass {
        match () {
            () if a == b => LinkClass::Own,
            () if self.node_of(a) == self.node_of(b) => LinkClass::Node,
            () => LinkClass::Cluster,
        }
    }
}
