//! Clusters of any number of levels: devices, nodes, racks or rails, data centres, and the links of each level.
//!
//! A cluster is described in a TOML file. [`Cluster::parse`] reads one, [`Cluster::named`] returns a bundled one.
//!
//! # The file
//!
//! ```toml
//! name = "two racks"                    # optional
//!
//! [device]
//! name = "A100 80GB"                    # optional
//! flops = { f32 = 19.5e12, bf16 = 312e12 }  # peak a second; fp8 is that of bf16 where it is left out
//! efficiency = 0.45                     # the share of the peak that products reach (1 if left out)
//! fp8_efficiency = 0.4                  # that of FP8 products (efficiency if left out)
//! attention_efficiency = 0.4            # that of attention, of the peak of bf16 or f32 (efficiency if left out)
//! memory_efficiency = 0.8               # the share of memory_bytes_per_s that passes over memory reach (1)
//! memory_bytes = 80e9
//! memory_bytes_per_s = 2.039e12
//! price_per_hour = 2.0                  # optional: US dollars
//! watts = 400.0                         # optional
//!
//! [[level]]                             # innermost first
//! name = "node"
//! size = 8                              # devices of a node; or sizes = [8, 8, 4], one for each node
//! latency_s = 3e-6                      # until the first byte of a message arrives
//! bytes_per_s = 300e9                   # of one rail, in one direction
//!
//! [[level]]
//! name = "rack"
//! size = 16                             # nodes of a rack
//! latency_s = 5e-6
//! message_s = 1e-6                      # for each message that a device sends, one after another (0)
//! bytes_per_s = 25e9
//! rails = 8                             # rails side by side (1)
//! shared_by = 8                         # neighbouring devices that share these rails (1)
//! routing = "adaptive"                  # a message uses all rails; "fixed": the rail of its sender (fixed)
//! efficiency = 0.9                      # the share of bytes_per_s that messages reach (1)
//! oversubscription = 2.0                # the links of all devices, over what the switches carry at once (1)
//! torus = 0                             # dimensions, if the units form a torus without a switch (0)
//! carries_outer = true                  # messages to farther levels pass these links too (false at the innermost)
//! ```
//!
//! A file that `moeworks bench machine` wrote is a cluster as well: one level, of a rank on each core unless another
//! number of ranks shares them.
//!
//! A message between two devices uses the links of the innermost level that they have in common, at its sender and at
//! its receiver, and those of the levels below that carry messages of outer ones.

mod error;
mod file;
mod named;
mod topology;

pub use error::ClusterError;

use crate::Precision;
use crate::machine::Machine;

/// The most ranks of a cluster.
const MAX_RANKS: usize = 1 << 20;

/// A cluster: its devices, one for each rank, and its levels, innermost first.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The name, for tables.
    pub name: String,
    /// The device of each rank.
    pub device: Device,
    /// The levels, innermost first; at least one.
    pub levels: Vec<Level>,
    /// The number of devices of each unit of the innermost level, if they differ; otherwise empty.
    pub node_sizes: Vec<usize>,
    /// The measured machine whose cores are the devices, if it is one: products then take their measured time.
    pub machine: Option<Machine>,
}

/// The speed, memory and price of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The name, for tables.
    pub name: String,
    /// The peak of f32 products, in floating-point operations a second.
    pub f32_flops: f64,
    /// The peak of bf16 products.
    pub bf16_flops: f64,
    /// The peak of FP8 products.
    pub fp8_flops: f64,
    /// The share of the peak that the products of a model reach, above 0 and at most 1.
    pub efficiency: f64,
    /// The share of the peak that FP8 products reach; that of others if none is given.
    pub fp8_efficiency: Option<f64>,
    /// The share of the peak of products in bf16 or f32 that attention reaches, its backward counted as twice the
    /// operations of the forward; that of products if none is given.
    pub attention_efficiency: Option<f64>,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Memory bandwidth for reading or writing.
    pub memory_bytes_per_s: f64,
    /// The share of the memory bandwidth that the passes of a training step reach, above 0 and at most 1.
    pub memory_efficiency: f64,
    /// The price of an hour in US dollars, if known.
    pub price_per_hour: Option<f64>,
    /// The power in watts, if known.
    pub watts: Option<f64>,
}

impl Device {
    /// Returns the floating-point operations a second that products in `precision` reach.
    #[must_use]
    pub fn flops(&self, precision: Precision) -> f64 {
        let fp8 = self.fp8_efficiency.filter(|_| precision == Precision::Fp8);
        self.peak_flops(precision) * fp8.unwrap_or(self.efficiency)
    }

    /// Returns the floating-point operations a second that attention reaches beside products in `precision`; with FP8
    /// products attention stays in bf16.
    #[must_use]
    pub fn attention_flops(&self, precision: Precision) -> f64 {
        self.peak_flops(precision.beside_fp8()) * self.attention_efficiency.unwrap_or(self.efficiency)
    }

    /// Returns the bytes a second that passes over memory reach.
    #[must_use]
    pub fn memory_rate(&self) -> f64 {
        self.memory_bytes_per_s * self.memory_efficiency
    }

    /// Returns the peak of products in `precision`.
    #[must_use]
    pub fn peak_flops(&self, precision: Precision) -> f64 {
        match precision {
            Precision::F32 => self.f32_flops,
            Precision::Bf16 => self.bf16_flops,
            Precision::Fp8 => self.fp8_flops,
        }
    }
}

/// The choice of a rail for a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// A message uses the rail of its sender: the sender's place among the devices that share the rails.
    #[default]
    Fixed,
    /// A message is spread over all rails.
    Adaptive,
}

/// A level of a cluster: the links that join the units of the level below into larger units.
#[derive(Clone, Debug, PartialEq)]
pub struct Level {
    /// The name of a unit, such as node, rack or site.
    pub name: String,
    /// The number of units of the level below (of devices, at the innermost level) in a unit.
    pub size: usize,
    /// Seconds until the first byte of a message arrives.
    pub latency_s: f64,
    /// Seconds for each message that a device sends, which do not overlap.
    pub message_s: f64,
    /// Bytes a second of one rail in one direction.
    pub bytes_per_s: f64,
    /// The number of rails that lie side by side.
    pub rails: usize,
    /// The number of neighbouring devices that share these rails.
    pub shared_by: usize,
    /// The choice of a rail for a message.
    pub routing: Routing,
    /// The share of `bytes_per_s` that messages reach, above 0 and at most 1.
    pub efficiency: f64,
    /// The bandwidth of all links of a unit over that of the switches between them; at least 1.
    pub oversubscription: f64,
    /// The number of dimensions, if the units of the level below form a torus without switches; otherwise 0.
    pub torus: usize,
    /// True if messages to units of outer levels pass these links too.
    pub carries_outer: bool,
}

impl Level {
    /// Makes a level of links of which each device has one, without contention between devices.
    #[must_use]
    pub fn new(name: impl Into<String>, size: usize, latency_s: f64, bytes_per_s: f64) -> Self {
        Self {
            name: name.into(),
            size,
            latency_s,
            message_s: 0.0,
            bytes_per_s,
            rails: 1,
            shared_by: 1,
            routing: Routing::Fixed,
            efficiency: 1.0,
            oversubscription: 1.0,
            torus: 0,
            carries_outer: false,
        }
    }

    /// Returns the bytes a second that messages reach on one rail.
    #[must_use]
    pub fn rail_bytes_per_s(&self) -> f64 {
        self.bytes_per_s * self.efficiency
    }

    /// Returns the bytes a second on all rails that devices share.
    #[must_use]
    pub fn port_bytes_per_s(&self) -> f64 {
        self.rail_bytes_per_s() * self.rails as f64
    }

    /// Returns the bandwidth of all links of a unit over what passes between its parts at once, if all send to all.
    ///
    /// Across the middle of a torus of side k in d dimensions go `2 k^(d-1)` links each way, and half of all bytes:
    /// `d k / 4` times less than the links together.
    #[must_use]
    pub fn contention(&self) -> f64 {
        let side = (self.size as f64).powf(1.0 / self.torus.max(1) as f64);
        let torus = if self.torus > 0 { (self.torus as f64 * side / 4.0).max(1.0) } else { 1.0 };
        self.oversubscription * torus
    }

    /// Returns the bytes a second of one device while all send to others of the unit.
    #[must_use]
    pub fn share_bytes_per_s(&self) -> f64 {
        self.port_bytes_per_s() / (self.shared_by as f64 * self.contention())
    }
}

impl Cluster {
    /// Returns the number of ranks, one for each device.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        let outer = |levels: &[Level]| levels.iter().map(|level| level.size).product::<usize>();
        if self.node_sizes.is_empty() { outer(&self.levels) } else { self.node_sizes.iter().sum() }
    }

    /// Returns the number of devices of a full unit of `level`.
    #[must_use]
    pub fn unit_ranks(&self, level: usize) -> usize {
        self.levels.iter().take(level + 1).map(|level| level.size).product()
    }

    /// Returns the unit of `level` that `rank` is in.
    #[must_use]
    pub fn unit_of(&self, level: usize, rank: usize) -> usize {
        let mut end = 0;
        let innermost = match self.node_sizes[..] {
            [] => rank / self.levels[0].size,
            ref sizes => sizes.iter().take_while(|&&size| (end + size <= rank).then(|| end += size).is_some()).count(),
        };
        innermost / self.levels[1..=level].iter().map(|level| level.size).product::<usize>()
    }

    /// Returns the innermost level of which ranks `a` and `b` are in one unit; none if they are the same rank.
    #[must_use]
    pub fn level_between(&self, a: usize, b: usize) -> Option<usize> {
        if a == b {
            return None;
        }
        (0..self.levels.len()).find(|&level| self.unit_of(level, a) == self.unit_of(level, b))
    }

    /// Returns the cluster with as many units of the outermost level as `num_ranks` ranks need. It can have more
    /// ranks, of a last unit that is not used whole. Ranks of a measured machine share its cores.
    #[must_use]
    pub fn resized(&self, num_ranks: usize) -> Self {
        if let Some(machine) = &self.machine {
            return Self::of_machine(machine, num_ranks);
        }
        let mut resized = self.clone();
        let last = self.levels.len() - 1;
        if self.node_sizes.is_empty() {
            let each: usize = self.levels[..last].iter().map(|level| level.size).product();
            resized.levels[last].size = num_ranks.max(1).div_ceil(each);
            return resized;
        }
        let size = self.node_sizes[0];
        resized.node_sizes = vec![size; num_ranks.max(1).div_ceil(size)];
        let inner: usize = self.levels[1..].iter().rev().skip(1).map(|level| level.size).product();
        if let [_, .., outermost] = &mut resized.levels[..] {
            outermost.size = resized.node_sizes.len().div_ceil(inner);
        }
        resized
    }
}
