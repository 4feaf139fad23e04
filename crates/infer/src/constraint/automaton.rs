//! The automaton of a grammar: made state by state as texts come to them.
//!
//! A network whose rules call each other is in several states at a time, each with a stack of states to go on in.
//! Such a set is one state of this automaton, which is kept with the states that its bytes lead to: most tokens are
//! looked up and not worked out. What is kept is bounded; beyond that it is forgotten and made again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::ConstraintError;
use super::nfa::{END, Network, State, StateId};
use super::vocabulary::{TokenMask, Vocabulary};

/// Rules that may be called inside of each other. Deeper texts are not possible.
const MAX_DEPTH: u32 = 200;
/// Stacks at most.
const MAX_STACKS: usize = 1 << 17;
/// Bytes of states and masks that are kept.
const MAX_KEPT: usize = 8 << 20;
/// States of the network that are looked at for one mask or one token at most.
const MAX_WORK: usize = 4_000_000;

/// Stands for a state that is not known yet.
const UNKNOWN: u32 = u32::MAX;
/// The state from which no text goes on.
const DEAD: u32 = u32::MAX - 1;
/// The empty stack.
const EMPTY: u32 = u32::MAX;

/// A state of the network with its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Config {
    state: StateId,
    stack: u32,
}

/// The states that the network is in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Configs {
    configs: Arc<[Config]>,
    /// Says whether the text may end here.
    is_accepting: bool,
}

/// A place to go on from when a rule ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Frame {
    next: StateId,
    below: u32,
    depth: u32,
}

/// The automaton of a grammar.
pub(super) struct Automaton {
    network: Network,
    stacks: Vec<Frame>,
    stack_ids: HashMap<Frame, u32>,
    states: Vec<Configs>,
    ids: HashMap<Configs, u32>,
    /// The state behind each state and byte.
    table: Vec<[u32; 256]>,
    masks: HashMap<u32, Arc<TokenMask>>,
    num_kept: usize,
    /// Counts how often everything was forgotten.
    generation: u64,
    work: usize,
}

/// A place of a text in the automaton.
#[derive(Clone, Debug)]
pub(super) struct Place {
    configs: Configs,
    /// The number of the state, as long as the automaton has not forgotten it.
    id: u32,
    generation: u64,
}

impl Place {
    /// Returns whether the text may end here.
    pub(super) fn is_accepting(&self) -> bool {
        self.configs.is_accepting
    }

    /// Returns whether the text can do nothing but end.
    pub(super) fn is_complete(&self) -> bool {
        self.configs.is_accepting && self.configs.configs.is_empty()
    }
}

impl Automaton {
    pub(super) fn new(network: Network) -> Self {
        Self {
            network,
            stacks: Vec::new(),
            stack_ids: HashMap::new(),
            states: Vec::new(),
            ids: HashMap::new(),
            table: Vec::new(),
            masks: HashMap::new(),
            num_kept: 0,
            generation: 0,
            work: 0,
        }
    }

    /// The place before the first byte.
    pub(super) fn start(&mut self) -> Result<Place, ConstraintError> {
        self.work = 0;
        let state = self.network.starts[self.network.root.0 as usize];
        let configs = self.close(vec![Config { state, stack: EMPTY }])?;
        let id = self.id_of(configs.clone());
        Ok(Place { configs, id, generation: self.generation })
    }

    /// Finds the tokens that may come at a place.
    pub(super) fn mask(
        &mut self,
        place: &mut Place,
        vocabulary: &Vocabulary,
    ) -> Result<Arc<TokenMask>, ConstraintError> {
        let id = self.current(place);
        if let Some(mask) = self.masks.get(&id) {
            return Ok(Arc::clone(mask));
        }
        let mask = Arc::new(vocabulary.mask(|state, byte| self.next(state, byte), id)?);
        self.num_kept += mask.num_bytes();
        self.masks.insert(id, Arc::clone(&mask));
        Ok(mask)
    }

    /// Goes on by the bytes of a token; none if they cannot come here.
    pub(super) fn advance(&mut self, place: &mut Place, bytes: &[u8]) -> Result<Option<Place>, ConstraintError> {
        let mut id = self.current(place);
        for &byte in bytes {
            match self.next(id, byte)? {
                Some(next) => id = next,
                None => return Ok(None),
            }
        }
        Ok(Some(Place { configs: self.states[id as usize].clone(), id, generation: self.generation }))
    }

    /// The number of the state at a place. It may forget everything else.
    fn current(&mut self, place: &mut Place) -> u32 {
        self.work = 0;
        if self.num_kept > MAX_KEPT {
            self.states.clear();
            self.ids.clear();
            self.table.clear();
            self.masks.clear();
            self.num_kept = 0;
            self.generation += 1;
        }
        if place.generation != self.generation {
            place.id = self.id_of(place.configs.clone());
            place.generation = self.generation;
        }
        place.id
    }

    /// The state behind a state and a byte.
    fn next(&mut self, id: u32, byte: u8) -> Result<Option<u32>, ConstraintError> {
        let known = self.table[id as usize][usize::from(byte)];
        if known != UNKNOWN {
            return Ok((known != DEAD).then_some(known));
        }
        let configs = Arc::clone(&self.states[id as usize].configs);
        let mut found = Vec::new();
        for config in configs.iter() {
            if let State::Bytes { set, next } = &self.network.states[config.state as usize]
                && set.contains(byte)
            {
                found.push(Config { state: *next, stack: config.stack });
            }
        }
        self.work += configs.len();
        let next = match found.is_empty() {
            true => None,
            false => {
                let configs = self.close(found)?;
                let is_dead = configs.configs.is_empty() && !configs.is_accepting;
                (!is_dead).then(|| self.id_of(configs))
            }
        };
        self.table[id as usize][usize::from(byte)] = next.unwrap_or(DEAD);
        Ok(next)
    }

    fn id_of(&mut self, configs: Configs) -> u32 {
        if let Some(&id) = self.ids.get(&configs) {
            return id;
        }
        let id = self.states.len() as u32;
        self.num_kept += size_of::<[u32; 256]>() + 64 + configs.configs.len() * size_of::<Config>();
        self.states.push(configs.clone());
        self.table.push([UNKNOWN; 256]);
        self.ids.insert(configs, id);
        id
    }

    /// Goes on without a byte as far as possible: to all states that take one.
    fn close(&mut self, mut pending: Vec<Config>) -> Result<Configs, ConstraintError> {
        let (mut seen, mut found, mut is_accepting) = (HashSet::new(), Vec::new(), false);
        while let Some(config) = pending.pop() {
            if !seen.insert(config) {
                continue;
            }
            self.work += 1;
            if self.work > MAX_WORK {
                return Err(ConstraintError::TooComplex);
            }
            match &self.network.states[config.state as usize] {
                State::Bytes { .. } => found.push(config),
                State::Split(states) => {
                    pending.extend(states.iter().map(|&state| Config { state, stack: config.stack }));
                }
                State::End if config.stack == EMPTY => is_accepting = true,
                State::End => {
                    let Frame { next, below, .. } = self.stacks[config.stack as usize];
                    pending.push(Config { state: next, stack: below });
                }
                &State::Call { rule, next } => {
                    let state = self.network.starts[rule.0 as usize];
                    let stack = if next == END { Some(config.stack) } else { self.push(next, config.stack)? };
                    pending.extend(stack.map(|stack| Config { state, stack }));
                }
            }
        }
        found.sort_unstable();
        Ok(Configs { configs: found.into(), is_accepting })
    }

    /// Puts a state on a stack; none where it is too deep.
    fn push(&mut self, next: StateId, below: u32) -> Result<Option<u32>, ConstraintError> {
        let depth = if below == EMPTY { 1 } else { self.stacks[below as usize].depth + 1 };
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        let frame = Frame { next, below, depth };
        if let Some(&id) = self.stack_ids.get(&frame) {
            return Ok(Some(id));
        }
        if self.stacks.len() >= MAX_STACKS {
            return Err(ConstraintError::TooComplex);
        }
        let id = self.stacks.len() as u32;
        self.stacks.push(frame);
        self.stack_ids.insert(frame, id);
        Ok(Some(id))
    }
}
