//! The ranks of one communicator, and the rendezvous in progress among them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use super::rendezvous::Rendezvous;
use super::world::World;
use crate::in_flight::locked;

/// The identity of a rendezvous within a group.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    /// A collective, by its number.
    All(u64),
    /// A message between two ranks, by its tag and number.
    Pair { from: usize, to: usize, tag: u32, number: u64 },
}

/// Values that several ranks fetch, with the number of ranks that have.
type Shared<K, V> = HashMap<K, (Arc<V>, usize)>;

/// The ranks of one communicator.
pub(crate) struct Group {
    pub(crate) world: Arc<World>,
    /// Each rank's number in the whole run.
    pub(crate) members: Vec<usize>,
    /// Each rank's node.
    pub(crate) nodes: Vec<usize>,
    rendezvous: Mutex<Shared<Key, Rendezvous>>,
    /// Groups made by a split that not all of their members have fetched, by the split's number and colour.
    parts: Mutex<Shared<(u64, u32), Group>>,
}

impl Group {
    pub(crate) fn new(world: Arc<World>, members: Vec<usize>, nodes: &[usize]) -> Self {
        let nodes = numbered_by_appearance(nodes);
        Self { world, members, nodes, rendezvous: Mutex::default(), parts: Mutex::default() }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn world_rank(&self, rank: usize) -> usize {
        self.members[rank]
    }

    /// Returns the rendezvous of this key. The first rank to ask creates it, and it is dropped from the list when
    /// `num_seats` have asked.
    pub(crate) fn rendezvous(&self, key: Key, num_seats: usize) -> Arc<Rendezvous> {
        let make = || Arc::new(Rendezvous::new(num_seats));
        fetch(&mut locked(&self.rendezvous), key, num_seats, make)
    }

    /// Returns a group of a split. The first of its members to ask creates it.
    pub(crate) fn part(&self, number: u64, color: u32, ranks: &[usize]) -> Arc<Self> {
        let make = || {
            let members = ranks.iter().map(|&rank| self.members[rank]).collect();
            let nodes: Vec<usize> = ranks.iter().map(|&rank| self.nodes[rank]).collect();
            Arc::new(Self::new(Arc::clone(&self.world), members, &nodes))
        };
        fetch(&mut locked(&self.parts), (number, color), ranks.len(), make)
    }
}

fn fetch<K: Eq + std::hash::Hash, V>(
    map: &mut Shared<K, V>,
    key: K,
    num_users: usize,
    make: impl FnOnce() -> Arc<V>,
) -> Arc<V> {
    match map.entry(key) {
        Entry::Vacant(place) if num_users > 1 => Arc::clone(&place.insert((make(), 1)).0),
        Entry::Vacant(_) => make(),
        Entry::Occupied(mut place) => {
            place.get_mut().1 += 1;
            if place.get().1 < num_users { Arc::clone(&place.get().0) } else { place.remove().0 }
        }
    }
}

/// Renumbers nodes from 0 in the order in which they appear.
pub(crate) fn numbered_by_appearance(nodes: &[usize]) -> Vec<usize> {
    let mut seen: Vec<usize> = Vec::new();
    let number = |node: &usize| {
        seen.iter().position(|other| other == node).unwrap_or_else(|| {
            seen.push(*node);
            seen.len() - 1
        })
    };
    nodes.iter().map(number).collect()
}
