//! Grammars as networks of states: each rule is an automaton of bytes that may call other rules.

use super::ConstraintError;
use super::grammar::{ByteSet, Grammar, Node, NodeId, RuleId};

/// States of a network at most.
const MAX_STATES: usize = 100_000;
/// Nodes of a grammar at most.
const MAX_NODES: usize = 400_000;

/// A state of a network, by its number.
pub(super) type StateId = u32;

/// A state of a network.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Takes a byte and goes on.
    Bytes { set: ByteSet, next: StateId },
    /// Goes on in each of these.
    Split(Vec<StateId>),
    /// Goes through a rule that begins at a state, and goes on behind it.
    Call { rule: RuleId, next: StateId },
    /// The end of a rule.
    End,
}

/// The network of a grammar.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub(super) states: Vec<State>,
    /// The first state of each rule.
    pub(super) starts: Vec<StateId>,
    pub(super) root: RuleId,
}

impl Network {
    /// Makes the network of a grammar whose texts are those of `root`.
    pub(super) fn new(grammar: &Grammar, root: RuleId) -> Result<Self, ConstraintError> {
        if grammar.nodes.len() > MAX_NODES {
            return Err(ConstraintError::TooLarge);
        }
        let productive = grammar.productive();
        let is_productive = |node: Option<NodeId>| node.is_some_and(|node| productive[node.0 as usize]);
        if !is_productive(grammar.rules[root.0 as usize]) {
            return Err(ConstraintError::Endless);
        }
        if grammar.is_left_recursive() {
            return Err(ConstraintError::LeftRecursive);
        }
        let states = vec![State::End];
        let network = Self { states, starts: Vec::new(), root };
        let mut compiler = Compiler { grammar, productive: &productive, network };
        for &node in &grammar.rules {
            let start = match node.filter(|node| productive[node.0 as usize]) {
                Some(node) => compiler.compile(node, END)?,
                None => compiler.add(State::Split(Vec::new()))?,
            };
            compiler.network.starts.push(start);
        }
        Ok(compiler.network)
    }
}

/// The end of every rule.
pub(super) const END: StateId = 0;

struct Compiler<'a> {
    grammar: &'a Grammar,
    productive: &'a [bool],
    network: Network,
}

impl Compiler<'_> {
    fn add(&mut self, state: State) -> Result<StateId, ConstraintError> {
        if self.network.states.len() >= MAX_STATES {
            return Err(ConstraintError::TooLarge);
        }
        self.network.states.push(state);
        Ok((self.network.states.len() - 1) as StateId)
    }

    /// Makes the states of a node, behind which `next` comes. The depth of grammars bounds the recursion.
    fn compile(&mut self, node: NodeId, next: StateId) -> Result<StateId, ConstraintError> {
        let grammar = self.grammar;
        match &grammar.nodes[node.0 as usize] {
            &Node::Bytes(set) => self.add(State::Bytes { set, next }),
            Node::Sequence(nodes) => nodes.iter().rev().try_fold(next, |next, &node| self.compile(node, next)),
            Node::Alternatives(nodes) => {
                let possible = nodes.iter().filter(|node| self.productive[node.0 as usize]);
                let possible: Vec<NodeId> = possible.copied().collect();
                let starts = possible.into_iter().map(|node| self.compile(node, next)).collect::<Result<_, _>>()?;
                self.add(State::Split(starts))
            }
            &Node::Repeat { node, least, most } => self.repeat(node, least..=most.unwrap_or(u32::MAX), next),
            &Node::Rule(rule) => self.add(State::Call { rule, next }),
        }
    }

    fn repeat(
        &mut self,
        node: NodeId,
        counts: std::ops::RangeInclusive<u32>,
        next: StateId,
    ) -> Result<StateId, ConstraintError> {
        let (least, most) = (*counts.start(), *counts.end());
        let mut start = next;
        if !self.productive[node.0 as usize] {
            // Only none of it is possible.
            return Ok(next);
        }
        if most == u32::MAX {
            start = self.add(State::Split(Vec::new()))?;
            let again = self.compile(node, start)?;
            self.network.states[start as usize] = State::Split(vec![again, next]);
        } else {
            for _ in least..most {
                let one = self.compile(node, start)?;
                start = self.add(State::Split(vec![one, next]))?;
            }
        }
        for _ in 0..least {
            start = self.compile(node, start)?;
        }
        Ok(start)
    }
}
