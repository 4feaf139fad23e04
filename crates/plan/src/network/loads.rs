//! The bytes of a transfer on each link.

use std::collections::HashMap;

use super::places::Places;
use crate::Routing;

/// A link of the cluster in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LinkId {
    pub(super) level: u8,
    pub(super) side: Side,
    /// The first rank of those that share it; of switches, the unit.
    pub(super) first: u32,
    pub(super) rail: u16,
}

/// The end of a message at which a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Side {
    /// It carries what its devices send.
    Out,
    /// It carries what its devices receive.
    In,
    /// It is between them: the switches of a unit, or its torus.
    Between,
}

/// The bytes that one transfer puts on each link, and the seconds before the first of them.
#[derive(Clone, Debug)]
pub struct Loads<'a> {
    places: &'a Places<'a>,
    pub(super) bytes: HashMap<LinkId, f64>,
    /// Bytes sent and received at each level.
    pub(super) levels: Vec<[f64; 2]>,
    /// Seconds before the first byte.
    pub(super) fixed_s: f64,
}

impl<'a> Loads<'a> {
    /// Makes a transfer of nothing.
    #[must_use]
    pub fn new(places: &'a Places<'a>) -> Self {
        let levels = vec![[0.0; 2]; places.cluster.levels.len()];
        Self { places, bytes: HashMap::new(), levels, fixed_s: 0.0 }
    }

    /// Adds a message. One from a rank to itself uses no link.
    pub fn send(&mut self, from: usize, to: usize, bytes: f64) {
        if let Some(level) = self.places.level_between(from, to) {
            self.add_out(from, level, bytes);
            self.add_in(to, level, bytes);
        }
    }

    /// Raises the seconds before the first byte to at least `seconds`.
    pub fn wait(&mut self, seconds: f64) {
        self.fixed_s = self.fixed_s.max(seconds);
    }

    /// Returns the transfer with this share of its bytes and of its first seconds still to come; the others have
    /// passed before, and count as sent.
    pub(crate) fn scaled(mut self, share: f64) -> Self {
        self.bytes.values_mut().for_each(|bytes| *bytes *= share);
        self.bytes.retain(|_, bytes| *bytes > 0.0);
        self.fixed_s *= share;
        self
    }

    /// Returns one of `chunks` equal chunks of the transfer. Each has the first seconds of the whole.
    pub(crate) fn chunk_of(mut self, chunks: usize) -> Self {
        let share = 1.0 / chunks.max(1) as f64;
        self.bytes.values_mut().for_each(|bytes| *bytes *= share);
        self.levels.iter_mut().flatten().for_each(|bytes| *bytes *= share);
        self
    }

    /// Adds bytes that `rank` sends to others of its unit at `level`, but not below.
    pub(super) fn add_out(&mut self, rank: usize, level: usize, bytes: f64) {
        self.levels[level][0] += bytes;
        self.add(rank, level, bytes, Side::Out);
    }

    /// Adds bytes that `rank` receives.
    pub(super) fn add_in(&mut self, rank: usize, level: usize, bytes: f64) {
        self.levels[level][1] += bytes;
        self.add(rank, level, bytes, Side::In);
    }

    fn add(&mut self, rank: usize, level: usize, bytes: f64, side: Side) {
        if bytes <= 0.0 {
            return;
        }
        let places = self.places;
        for (index, of) in places.cluster.levels.iter().enumerate().take(level + 1) {
            if index < level && !of.carries_outer {
                continue;
            }
            let (first, rail) = places.port(index, rank);
            let rail = if of.routing == Routing::Fixed { rail as u16 } else { 0 };
            let link = LinkId { level: index as u8, side, first: first as u32, rail };
            *self.bytes.entry(link).or_default() += bytes;
            // Bytes within a unit pass its switches once: they count as they are sent.
            let passes = index < level || side == Side::Out;
            if of.contention() > 1.0 && passes {
                let first = places.unit(index, rank) as u32;
                let link = LinkId { level: index as u8, side: Side::Between, first, rail: 0 };
                *self.bytes.entry(link).or_default() += bytes;
            }
        }
    }

    /// Returns the bytes a second of a link.
    pub(super) fn bandwidth(&self, link: LinkId) -> f64 {
        let cluster = self.places.cluster;
        let level = usize::from(link.level);
        let of = &cluster.levels[level];
        match (link.side, of.routing) {
            (Side::Between, _) => {
                let devices = match (level, &cluster.node_sizes[..]) {
                    (0, sizes @ [_, ..]) => sizes[link.first as usize],
                    _ => cluster.unit_ranks(level),
                };
                let ports = (devices as f64 / of.shared_by as f64).max(1.0);
                ports * of.port_bytes_per_s() / of.contention()
            }
            (_, Routing::Fixed) => of.rail_bytes_per_s(),
            (_, Routing::Adaptive) => of.port_bytes_per_s(),
        }
    }

    /// Returns the seconds that the transfer takes with all links to itself.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        let slowest = self.bytes.iter().map(|(&link, bytes)| bytes / self.bandwidth(link)).fold(0.0, f64::max);
        self.fixed_s + slowest
    }

    /// Returns the bytes sent, and those received, at a level.
    #[must_use]
    pub fn bytes_at(&self, level: usize) -> [f64; 2] {
        self.levels[level]
    }
}
