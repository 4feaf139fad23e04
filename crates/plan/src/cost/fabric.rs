//! Clusters of any number of levels as costs see them, and collectives over groups of ranks on them.
//!
//! A level is a unit that holds the units of the level below: a node of ranks, a rack of nodes, a data centre. Costs
//! are kept for each level, so that a plan can say which link binds.

use std::ops::{Add, AddAssign};

use super::collectives::parts_hit;
use crate::machine::MachineShare;
use crate::{Algorithm, Cluster, Precision, Topology};

/// The most levels whose costs are kept apart; those above are added to the last one.
pub const MAX_LEVELS: usize = 6;

/// The speed and memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Operations per second that large bf16 (or f32) products reach.
    pub flops: f64,
    /// Operations per second that large FP8 products reach; those of `flops` without such units.
    pub fp8_flops: f64,
    /// Operations per second that attention reaches.
    pub attention_flops: f64,
    /// The peak of bf16 products, against which the model FLOPs utilisation is counted.
    pub peak_flops: f64,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Bytes per second of reading or writing memory in one large pass, as a product of few rows reads its weights.
    pub memory_bytes_per_s: f64,
    /// Bytes per second that the passes of a training step reach on average.
    pub pass_bytes_per_s: f64,
}

/// A level of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct FabricLevel {
    /// The name, such as `node`.
    pub name: String,
    /// The number of ranks of one unit.
    pub num_ranks: usize,
    /// Seconds until the first byte of a message arrives.
    pub latency_s: f64,
    /// Seconds for each message of a rank, which do not overlap.
    pub message_s: f64,
    /// Bytes per second of one rank to other units of the level below, while all ranks send.
    pub bytes_per_s: f64,
}

impl FabricLevel {
    /// Returns the seconds of `messages` messages that follow each other, each sent once the one before has arrived.
    fn in_turn(&self, messages: f64, bytes: f64) -> f64 {
        messages * (self.latency_s + self.message_s) + bytes / self.bytes_per_s
    }

    /// Returns the seconds of `messages` messages that are sent at once.
    fn at_once(&self, messages: f64, bytes: f64) -> f64 {
        self.latency_s + messages * self.message_s + bytes / self.bytes_per_s
    }
}

/// A cluster: ranks, and the levels of links between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Fabric {
    /// The number of ranks.
    pub num_ranks: usize,
    /// The speed and memory of each.
    pub rates: Rates,
    /// The levels, innermost first; the last one holds all ranks.
    pub levels: Vec<FabricLevel>,
    /// A rank's share of the measured machine that the ranks are threads of, if they are.
    pub machine: Option<MachineShare>,
}

/// A group of ranks at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    /// The number of ranks.
    pub num: usize,
    /// The distance from one to the next.
    pub stride: usize,
}

/// The cost of communication for each rank, by level.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkCost {
    /// Seconds at each level.
    pub seconds: [f64; MAX_LEVELS],
    /// Bytes sent at each level.
    pub bytes: [f64; MAX_LEVELS],
    /// Seconds of copies in memory.
    pub copies: f64,
}

impl LinkCost {
    /// Returns the seconds of all levels, one after another.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.seconds.iter().sum::<f64>() + self.copies
    }

    /// Returns the cost of `times` of them.
    #[must_use]
    pub fn times(mut self, times: f64) -> Self {
        self.seconds.iter_mut().chain(&mut self.bytes).for_each(|value| *value *= times);
        self.copies *= times;
        self
    }
}

impl Add for LinkCost {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl AddAssign for LinkCost {
    fn add_assign(&mut self, other: Self) {
        for level in 0..MAX_LEVELS {
            self.seconds[level] += other.seconds[level];
            self.bytes[level] += other.bytes[level];
        }
        self.copies += other.copies;
    }
}

/// The rows that a rank sends to the experts of its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRows {
    /// The number of tokens.
    pub tokens: f64,
    /// K, the number of experts of each.
    pub top_k: usize,
    /// E, the number of experts that a token chooses from.
    pub num_experts: usize,
    /// Bytes of a row on the wire.
    pub row_bytes: f64,
    /// The most units that the experts of a token lie in, as in node-limited routing.
    pub max_units: Option<usize>,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl From<&Topology> for Fabric {
    fn from(topology: &Topology) -> Self {
        Self::new(&Cluster::from(topology), topology.num_ranks(), Precision::Bf16)
    }
}

impl Fabric {
    /// Describes `num_ranks` ranks of a cluster, for products in `precision`. Outer levels grow as the ranks need,
    /// and ranks are spread evenly over as few units as hold them, if they divide so: 256 ranks are 4 times 64 in
    /// racks of 72.
    #[must_use]
    pub fn new(cluster: &Cluster, num_ranks: usize, precision: Precision) -> Self {
        let shared = cluster.machine.as_ref().map(|machine| Cluster::of_machine(machine, num_ranks));
        let cluster = shared.as_ref().unwrap_or(cluster);
        let device = &cluster.device;
        let wide = if precision == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
        let rates = Rates {
            flops: device.flops(wide),
            fp8_flops: device.flops(if wide == Precision::F32 { wide } else { Precision::Fp8 }),
            attention_flops: device.attention_flops(wide),
            peak_flops: device.peak_flops(wide),
            memory_bytes: device.memory_bytes,
            memory_bytes_per_s: device.memory_bytes_per_s,
            pass_bytes_per_s: device.memory_rate(),
        };
        // A last node with fewer ranks does not move the borders of the others.
        let sizes = &cluster.node_sizes;
        let node =
            sizes[..sizes.len().saturating_sub(1).max(1.min(sizes.len()))].iter().fold(0, |sum, &size| gcd(sum, size));
        let mut levels = Vec::new();
        for (place, level) in cluster.levels.iter().enumerate() {
            let below = levels.last().map_or(1, |level: &FabricLevel| level.num_ranks);
            if below >= num_ranks {
                break;
            }
            let unit = if node > 0 && place == 0 { node } else { cluster.unit_ranks(place) };
            let even = num_ranks / num_ranks.div_ceil(unit);
            let is_even = node == 0 && even * num_ranks.div_ceil(unit) == num_ranks && even.is_multiple_of(below);
            let unit = if is_even { even } else { unit };
            levels.push(FabricLevel {
                name: level.name.clone(),
                num_ranks: if place + 1 == cluster.levels.len() { unit.max(num_ranks) } else { unit },
                latency_s: level.latency_s,
                message_s: level.message_s,
                bytes_per_s: level.share_bytes_per_s(),
            });
        }
        let machine = cluster.machine.as_ref().map(|machine| MachineShare::new(machine, num_ranks));
        Self { num_ranks, rates, levels, machine }
    }

    /// Returns the number of ranks of the innermost unit.
    #[must_use]
    pub fn node_size(&self) -> usize {
        self.levels.first().map_or(1, |level| level.num_ranks.min(self.num_ranks)).max(1)
    }

    /// Returns the number of members of a group in a unit of `unit` ranks, wherever the group begins. Groups that do
    /// not lie in units evenly count with what is sure to lie together.
    fn inside(&self, group: Members, unit: usize) -> usize {
        let span = group.num * group.stride;
        if unit >= self.num_ranks || unit.is_multiple_of(span) {
            return group.num;
        }
        (gcd(span, unit) / group.stride).clamp(1, group.num)
    }

    /// Calls `at` for each level that the group uses: the level, its members below it, and those within it.
    fn each_level(&self, group: Members, mut at: impl FnMut(usize, f64, f64, &FabricLevel)) {
        let mut below = 1;
        for (place, level) in self.levels.iter().enumerate() {
            let within = self.inside(group, level.num_ranks).max(below);
            if within > below {
                at(place.min(MAX_LEVELS - 1), below as f64, within as f64, level);
            }
            below = within;
        }
    }

    /// Returns the outermost level that a group crosses, if it has more than one rank.
    #[must_use]
    pub fn widest_level(&self, group: Members) -> Option<usize> {
        let mut widest = None;
        self.each_level(group, |level, _, _, _| widest = Some(level));
        widest
    }

    /// Returns the cost of the all-to-all of `rows` in a group. A token on the two-hop path goes once to each unit
    /// that has experts for it, and is handed on there while others arrive: the slowest level counts.
    #[must_use]
    pub fn all_to_all(&self, group: Members, path: Algorithm, rows: &ExpertRows) -> LinkCost {
        let (n, all) = (group.num as f64, rows.tokens * rows.top_k as f64 * rows.row_bytes);
        let mut cost = LinkCost::default();
        let mut hops = 0;
        self.each_level(group, |level, below, within, links| {
            let hop = 1.0 - below / within;
            let (bytes, messages) = match path {
                Algorithm::Linear => (all * (within - below) / n, within - below),
                Algorithm::Hierarchical => (all * hop, within / below - 1.0),
                Algorithm::TwoHop if hops == 0 => (all * hop, within - below),
                Algorithm::TwoHop => {
                    let hit = parts_hit(rows.num_experts, rows.top_k, (n / below).ceil() as usize);
                    let hit = hit.min(rows.max_units.map_or(f64::INFINITY, |most| most as f64));
                    (all * (hit / rows.top_k.max(1) as f64).min(1.0) * hop, within / below - 1.0)
                }
            };
            hops += 1;
            cost.seconds[level] += links.at_once(messages, bytes);
            cost.bytes[level] += bytes;
        });
        if path == Algorithm::TwoHop {
            let slowest = (0..MAX_LEVELS).max_by(|&a, &b| cost.seconds[a].total_cmp(&cost.seconds[b])).unwrap_or(0);
            let others = cost.seconds.iter_mut().enumerate().filter(|(level, _)| *level != slowest);
            others.for_each(|(_, seconds)| *seconds = 0.0);
        }
        if hops > 1 && path == Algorithm::Hierarchical {
            cost.copies = 2.0 * all / self.rates.pass_bytes_per_s;
        }
        cost
    }

    /// Returns the path of `paths` on which the all-to-all takes the least time, and its cost; the first at ties, and
    /// the linear one without any.
    #[must_use]
    pub fn fastest_all_to_all(&self, group: Members, rows: &ExpertRows, paths: &[Algorithm]) -> (Algorithm, LinkCost) {
        let first = paths.first().copied().unwrap_or_default();
        let mut best = (first, self.all_to_all(group, first, rows));
        for &path in paths.iter().skip(1) {
            let cost = self.all_to_all(group, path, rows);
            if cost.total() < best.1.total() {
                best = (path, cost);
            }
        }
        best
    }

    /// Returns the cost of an all-gather that gives each rank `bytes`, or of a reduce-scatter of as many. Each level
    /// sends the share that the levels below leave to a rank.
    #[must_use]
    pub fn all_gather(&self, group: Members, bytes: f64) -> LinkCost {
        let mut cost = LinkCost::default();
        self.each_level(group, |level, below, within, links| {
            let ranks = within / below;
            let sent = (ranks - 1.0) / ranks * bytes / below;
            cost.seconds[level] += links.in_turn(ranks - 1.0, sent);
            cost.bytes[level] += sent;
        });
        cost
    }

    /// Returns the cost of an all-reduce of `bytes`: a reduce-scatter and an all-gather.
    #[must_use]
    pub fn all_reduce(&self, group: Members, bytes: f64) -> LinkCost {
        self.all_gather(group, bytes).times(2.0)
    }

    /// Returns the cost of sending `bytes` to the next rank of a group, over the slowest links between neighbours.
    #[must_use]
    pub fn send(&self, group: Members, bytes: f64) -> LinkCost {
        let mut cost = LinkCost::default();
        self.each_level(group, |level, _, _, links| {
            let seconds = links.in_turn(1.0, bytes);
            if seconds > cost.total() {
                cost = LinkCost::default();
                cost.seconds[level] = seconds;
                cost.bytes[level] = bytes;
            }
        });
        cost
    }
}
