//! The TOML form of a cluster, and the checks of its values.

use serde::{Deserialize, Serialize};

use super::{Cluster, ClusterError, Device, Level, MAX_RANKS, Routing};
use crate::machine::{Machine, MachineError};
use crate::{Topology, TopologyError};

/// The most levels of a cluster.
const MAX_LEVELS: usize = 8;
/// The most rails of a device.
const MAX_RAILS: usize = 4096;
/// The most dimensions of a torus.
const MAX_DIMENSIONS: usize = 6;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawCluster {
    #[serde(default = "unnamed")]
    name: String,
    device: RawDevice,
    #[serde(default)]
    level: Vec<RawLevel>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    #[serde(default = "device_name")]
    name: String,
    flops: RawFlops,
    #[serde(default = "one")]
    efficiency: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fp8_efficiency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_efficiency: Option<f64>,
    memory_bytes: f64,
    memory_bytes_per_s: f64,
    #[serde(default = "one")]
    memory_efficiency: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    price_per_hour: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    watts: Option<f64>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawFlops {
    f32: f64,
    bf16: f64,
    fp8: Option<f64>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawLevel {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sizes: Option<Vec<usize>>,
    latency_s: f64,
    #[serde(default)]
    message_s: f64,
    bytes_per_s: f64,
    #[serde(default = "one_rail")]
    rails: usize,
    #[serde(default = "one_rail")]
    shared_by: usize,
    #[serde(default)]
    routing: RawRouting,
    #[serde(default = "one")]
    efficiency: f64,
    #[serde(default = "one")]
    oversubscription: f64,
    #[serde(default)]
    torus: usize,
    carries_outer: Option<bool>,
}

#[derive(Clone, Copy, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum RawRouting {
    #[default]
    Fixed,
    Adaptive,
}

fn unnamed() -> String {
    "cluster".to_owned()
}

fn device_name() -> String {
    "device".to_owned()
}

fn one() -> f64 {
    1.0
}

fn one_rail() -> usize {
    1
}

impl Cluster {
    /// Reads the TOML form; also that of a [`Topology`] or of a [`Machine`], whose fields have other names. The error
    /// is one line.
    pub fn parse(text: &str) -> Result<Self, ClusterError> {
        let table = toml::from_str::<toml::Table>(text).unwrap_or_default();
        if table.contains_key("node_link") {
            return Ok(Self::from(&Topology::parse(text).map_err(from_topology)?));
        }
        if table.contains_key("products") {
            let machine = Machine::parse(text).map_err(from_machine)?;
            return Ok(Self::of_machine(&machine, machine.cores.min(MAX_RANKS)));
        }
        let raw: RawCluster = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            ClusterError::Form(format!("{place}{}", error.message().trim().replace('\n', ", ")))
        })?;
        let cluster = raw.into_cluster()?;
        cluster.check()?;
        Ok(cluster)
    }

    /// Returns the TOML form, which [`Cluster::parse`] reads back.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let Device { name, f32_flops, bf16_flops, fp8_flops, .. } = &self.device;
        let device = RawDevice {
            name: name.clone(),
            flops: RawFlops { f32: *f32_flops, bf16: *bf16_flops, fp8: Some(*fp8_flops) },
            efficiency: self.device.efficiency,
            fp8_efficiency: self.device.fp8_efficiency,
            attention_efficiency: self.device.attention_efficiency,
            memory_bytes: self.device.memory_bytes,
            memory_bytes_per_s: self.device.memory_bytes_per_s,
            memory_efficiency: self.device.memory_efficiency,
            price_per_hour: self.device.price_per_hour,
            watts: self.device.watts,
        };
        let level = |(index, level)| raw_level(level, if index == 0 { &self.node_sizes } else { &[] });
        let level = self.levels.iter().enumerate().map(level).collect();
        // Numbers, texts and tables of them always have a TOML form.
        toml::to_string(&RawCluster { name: self.name.clone(), device, level }).unwrap_or_default()
    }

    /// Fails unless every value is in its range. The error names the field, its value and the range.
    pub fn check(&self) -> Result<(), ClusterError> {
        self.check_device()?;
        if self.levels.is_empty() || self.levels.len() > MAX_LEVELS {
            let expected = format!("must be 1 to {MAX_LEVELS} [[level]] tables, innermost first");
            return Err(wrong("level", self.levels.len(), expected));
        }
        for (index, level) in self.levels.iter().enumerate() {
            level.check(index)?;
            if self.levels[..index].iter().any(|other| other.name == level.name) {
                return Err(wrong(
                    field(index, level, "name"),
                    &level.name,
                    "is the name of a level before; give another",
                ));
            }
        }
        self.check_sizes()?;
        self.check_sharing()
    }

    fn check_device(&self) -> Result<(), ClusterError> {
        let device = &self.device;
        for (field, value) in [
            ("device.flops.f32", device.f32_flops),
            ("device.flops.bf16", device.bf16_flops),
            ("device.flops.fp8", device.fp8_flops),
            ("device.memory_bytes", device.memory_bytes),
            ("device.memory_bytes_per_s", device.memory_bytes_per_s),
        ] {
            check_positive(field, value)?;
        }
        for (field, share) in [
            ("device.efficiency", Some(device.efficiency)),
            ("device.fp8_efficiency", device.fp8_efficiency),
            ("device.attention_efficiency", device.attention_efficiency),
            ("device.memory_efficiency", Some(device.memory_efficiency)),
        ] {
            check_share(field, share.unwrap_or(1.0))?;
        }
        for (field, value) in [("device.price_per_hour", device.price_per_hour), ("device.watts", device.watts)] {
            check_not_negative(field, value.unwrap_or(0.0))?;
        }
        check_name("name", &self.name)?;
        check_name("device.name", &device.name)
    }

    fn check_sizes(&self) -> Result<(), ClusterError> {
        let product = |levels: &[Level]| levels.iter().try_fold(1_usize, |all, level| all.checked_mul(level.size));
        let most = format!("must be at most {MAX_RANKS} ranks in all");
        if product(&self.levels).is_none_or(|all| all > MAX_RANKS) {
            let sizes: Vec<usize> = self.levels.iter().map(|level| level.size).collect();
            return Err(wrong("sizes of the levels", format!("{sizes:?}"), most));
        }
        if self.node_sizes.is_empty() {
            return Ok(());
        }
        let first = field(0, &self.levels[0], "sizes");
        if self.node_sizes.contains(&0) || self.node_sizes.iter().any(|&size| size > self.levels[0].size) {
            return Err(wrong(first, format!("{:?}", self.node_sizes), "must be numbers of at least 1"));
        }
        let nodes = product(&self.levels[1..]).unwrap_or(usize::MAX);
        if self.node_sizes.len() != nodes {
            let expected =
                format!("must be a number for each of the {nodes} units that the sizes of outer levels give");
            return Err(wrong(first, format!("{:?}", self.node_sizes), expected));
        }
        Ok(())
    }

    fn check_sharing(&self) -> Result<(), ClusterError> {
        for (index, level) in self.levels.iter().enumerate() {
            // Devices of one unit of the level below share rails; at the innermost level those of one unit.
            let devices = self.unit_ranks(index.saturating_sub(1));
            if level.shared_by > devices || (self.node_sizes.is_empty() && !devices.is_multiple_of(level.shared_by)) {
                let expected = match index {
                    0 => format!("must divide the {devices} devices of a unit"),
                    _ => format!("must divide the {devices} devices of a unit of the level below"),
                };
                return Err(wrong(field(index, level, "shared_by"), level.shared_by, expected));
            }
        }
        Ok(())
    }
}

impl Level {
    fn check(&self, index: usize) -> Result<(), ClusterError> {
        let at = |name| field(index, self, name);
        check_name(format!("level {}: name", index + 1), &self.name)?;
        for (name, value, most) in
            [("size", self.size, MAX_RANKS), ("rails", self.rails, MAX_RAILS), ("shared_by", self.shared_by, MAX_RANKS)]
        {
            if !(1..=most).contains(&value) {
                return Err(wrong(at(name), value, format!("must be from 1 to {most}")));
            }
        }
        if self.torus > MAX_DIMENSIONS {
            let expected = format!("must be the number of dimensions, at most {MAX_DIMENSIONS}, or 0 for switches");
            return Err(wrong(at("torus"), self.torus, expected));
        }
        check_positive(at("bytes_per_s"), self.bytes_per_s)?;
        check_not_negative(at("latency_s"), self.latency_s)?;
        check_not_negative(at("message_s"), self.message_s)?;
        check_share(at("efficiency"), self.efficiency)?;
        if !(1.0..=1e6).contains(&self.oversubscription) {
            return Err(wrong(at("oversubscription"), self.oversubscription, "must be a number from 1 to 1e6"));
        }
        Ok(())
    }
}

impl RawCluster {
    fn into_cluster(self) -> Result<Cluster, ClusterError> {
        let RawDevice { name, flops, .. } = self.device;
        let device = Device {
            name,
            f32_flops: flops.f32,
            bf16_flops: flops.bf16,
            fp8_flops: flops.fp8.unwrap_or(flops.bf16),
            efficiency: self.device.efficiency,
            fp8_efficiency: self.device.fp8_efficiency,
            attention_efficiency: self.device.attention_efficiency,
            memory_bytes: self.device.memory_bytes,
            memory_bytes_per_s: self.device.memory_bytes_per_s,
            memory_efficiency: self.device.memory_efficiency,
            price_per_hour: self.device.price_per_hour,
            watts: self.device.watts,
        };
        let mut node_sizes = Vec::new();
        let mut levels = Vec::with_capacity(self.level.len());
        for (index, raw) in self.level.into_iter().enumerate() {
            levels.push(raw.into_level(index, &mut node_sizes)?);
        }
        Ok(Cluster { name: self.name, device, levels, node_sizes, machine: None })
    }
}

impl RawLevel {
    /// Returns the level at `index`. Sizes of the innermost level that differ go to `node_sizes`.
    fn into_level(self, index: usize, node_sizes: &mut Vec<usize>) -> Result<Level, ClusterError> {
        let place = |name: &str| format!("level {} ({}): {name}", index + 1, self.name);
        let size = match (self.size, self.sizes) {
            (Some(size), None) => size,
            (None, Some(sizes)) if index == 0 && !sizes.is_empty() => {
                let most = sizes.iter().copied().max().unwrap_or(0);
                if sizes.iter().any(|&size| size != most) {
                    *node_sizes = sizes;
                }
                most
            }
            (None, Some(sizes)) => {
                let expected = "must be left out: only the innermost level has units of different sizes, at least one";
                return Err(wrong(place("sizes"), format!("{sizes:?}"), expected));
            }
            _ => return Err(ClusterError::Form(format!("{}: must be given (size or sizes)", place("size")))),
        };
        Ok(Level {
            size,
            latency_s: self.latency_s,
            message_s: self.message_s,
            bytes_per_s: self.bytes_per_s,
            rails: self.rails,
            shared_by: self.shared_by,
            routing: match self.routing {
                RawRouting::Fixed => Routing::Fixed,
                RawRouting::Adaptive => Routing::Adaptive,
            },
            efficiency: self.efficiency,
            oversubscription: self.oversubscription,
            torus: self.torus,
            carries_outer: self.carries_outer.unwrap_or(index > 0),
            name: self.name,
        })
    }
}

fn raw_level(level: &Level, node_sizes: &[usize]) -> RawLevel {
    RawLevel {
        name: level.name.clone(),
        size: node_sizes.is_empty().then_some(level.size),
        sizes: (!node_sizes.is_empty()).then(|| node_sizes.to_vec()),
        latency_s: level.latency_s,
        message_s: level.message_s,
        bytes_per_s: level.bytes_per_s,
        rails: level.rails,
        shared_by: level.shared_by,
        routing: match level.routing {
            Routing::Fixed => RawRouting::Fixed,
            Routing::Adaptive => RawRouting::Adaptive,
        },
        efficiency: level.efficiency,
        oversubscription: level.oversubscription,
        torus: level.torus,
        carries_outer: Some(level.carries_outer),
    }
}

fn from_topology(error: TopologyError) -> ClusterError {
    match error {
        TopologyError::Form(problem) => ClusterError::Form(problem),
        TopologyError::Value { field, value, expected } => {
            ClusterError::Value { field: field.to_owned(), value, expected: expected.to_owned() }
        }
    }
}

fn from_machine(error: MachineError) -> ClusterError {
    match error {
        MachineError::Form(problem) => ClusterError::Form(problem),
        MachineError::Value { field, value, expected } => {
            ClusterError::Value { field: field.to_owned(), value, expected: expected.to_owned() }
        }
    }
}

fn field(index: usize, level: &Level, name: &str) -> String {
    format!("level {} ({}): {name}", index + 1, level.name)
}

fn wrong(field: impl Into<String>, value: impl std::fmt::Display, expected: impl Into<String>) -> ClusterError {
    ClusterError::Value { field: field.into(), value: value.to_string(), expected: expected.into() }
}

fn check_positive(field: impl Into<String>, value: f64) -> Result<(), ClusterError> {
    if value > 0.0 && value.is_finite() { Ok(()) } else { Err(wrong(field, value, "must be a finite number above 0")) }
}

fn check_not_negative(field: impl Into<String>, value: f64) -> Result<(), ClusterError> {
    let is_right = value >= 0.0 && value.is_finite();
    if is_right { Ok(()) } else { Err(wrong(field, value, "must be a finite number of at least 0")) }
}

fn check_share(field: impl Into<String>, value: f64) -> Result<(), ClusterError> {
    let is_right = value > 0.0 && value <= 1.0;
    if is_right { Ok(()) } else { Err(wrong(field, value, "must be a number above 0 and at most 1")) }
}

fn check_name(field: impl Into<String>, name: &str) -> Result<(), ClusterError> {
    let is_right = !name.trim().is_empty() && !name.contains(char::is_control);
    if is_right { Ok(()) } else { Err(wrong(field, format!("{name:?}"), "must be a name on one line")) }
}
