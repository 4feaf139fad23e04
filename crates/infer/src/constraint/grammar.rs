//! Grammars as trees of bytes, sequences, alternatives, repetitions and rules.

/// A node of a grammar, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(pub(super) u32);

/// A rule of a grammar, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RuleId(pub(super) u32);

/// A set of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct ByteSet([u64; 4]);

/// A part of a grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// One byte of a set.
    Bytes(ByteSet),
    /// All of these, one behind the other.
    Sequence(Vec<NodeId>),
    /// One of these.
    Alternatives(Vec<NodeId>),
    /// A node several times.
    Repeat {
        node: NodeId,
        least: u32,
        /// None for any number.
        most: Option<u32>,
    },
    /// A rule, which may be one that this node is in.
    Rule(RuleId),
}

/// A grammar as it is built.
#[derive(Clone, Debug, Default)]
pub(super) struct Grammar {
    pub(super) nodes: Vec<Node>,
    /// The node of each rule; none while it is not known.
    pub(super) rules: Vec<Option<NodeId>>,
}

impl ByteSet {
    /// The bytes from `first` to `last`.
    pub(super) fn range(first: u8, last: u8) -> Self {
        let mut set = Self::default();
        (first..=last).for_each(|byte| set.insert(byte));
        set
    }

    pub(super) fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }

    pub(super) fn contains(&self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }
}

impl Grammar {
    fn add(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        NodeId(u32::try_from(self.nodes.len() - 1).unwrap_or(u32::MAX))
    }

    pub(super) fn bytes(&mut self, set: ByteSet) -> NodeId {
        self.add(Node::Bytes(set))
    }

    pub(super) fn range(&mut self, first: u8, last: u8) -> NodeId {
        self.bytes(ByteSet::range(first, last))
    }

    /// A text as it is.
    pub(super) fn literal(&mut self, text: impl AsRef<[u8]>) -> NodeId {
        let nodes = text.as_ref().iter().map(|&byte| self.range(byte, byte)).collect();
        self.sequence(nodes)
    }

    pub(super) fn sequence(&mut self, nodes: Vec<NodeId>) -> NodeId {
        match nodes[..] {
            [one] => one,
            _ => self.add(Node::Sequence(nodes)),
        }
    }

    pub(super) fn alternatives(&mut self, nodes: Vec<NodeId>) -> NodeId {
        match nodes[..] {
            [one] => one,
            _ => self.add(Node::Alternatives(nodes)),
        }
    }

    pub(super) fn repeat(&mut self, node: NodeId, least: u32, most: Option<u32>) -> NodeId {
        self.add(Node::Repeat { node, least, most })
    }

    pub(super) fn optional(&mut self, node: NodeId) -> NodeId {
        self.repeat(node, 0, Some(1))
    }

    pub(super) fn empty(&mut self) -> NodeId {
        self.add(Node::Sequence(Vec::new()))
    }

    /// A node that nothing matches.
    pub(super) fn nothing(&mut self) -> NodeId {
        self.add(Node::Alternatives(Vec::new()))
    }

    /// A new rule, whose node is set later.
    pub(super) fn new_rule(&mut self) -> RuleId {
        self.rules.push(None);
        RuleId(u32::try_from(self.rules.len() - 1).unwrap_or(u32::MAX))
    }

    pub(super) fn set_rule(&mut self, rule: RuleId, node: NodeId) {
        self.rules[rule.0 as usize] = Some(node);
    }

    pub(super) fn rule(&mut self, rule: RuleId) -> NodeId {
        self.add(Node::Rule(rule))
    }

    /// Finds the nodes that match some text of finite length.
    pub(super) fn productive(&self) -> Vec<bool> {
        self.fixpoint(|is, node| match node {
            Node::Bytes(set) => !set.is_empty(),
            Node::Sequence(nodes) => nodes.iter().all(|node| is[node.0 as usize]),
            Node::Alternatives(nodes) => nodes.iter().any(|node| is[node.0 as usize]),
            Node::Repeat { node, least, .. } => *least == 0 || is[node.0 as usize],
            Node::Rule(rule) => self.rules[rule.0 as usize].is_some_and(|node| is[node.0 as usize]),
        })
    }

    /// Finds the nodes that match the empty text.
    pub(super) fn nullable(&self) -> Vec<bool> {
        self.fixpoint(|is, node| match node {
            Node::Bytes(_) => false,
            Node::Sequence(nodes) => nodes.iter().all(|node| is[node.0 as usize]),
            Node::Alternatives(nodes) => nodes.iter().any(|node| is[node.0 as usize]),
            Node::Repeat { node, least, .. } => *least == 0 || is[node.0 as usize],
            Node::Rule(rule) => self.rules[rule.0 as usize].is_some_and(|node| is[node.0 as usize]),
        })
    }

    /// Applies `holds` until nothing changes. Nodes come behind those that they are made of, so that few rounds are
    /// needed.
    fn fixpoint(&self, holds: impl Fn(&[bool], &Node) -> bool) -> Vec<bool> {
        let mut is = vec![false; self.nodes.len()];
        loop {
            let mut has_changed = false;
            for (index, node) in self.nodes.iter().enumerate() {
                if !is[index] && holds(&is, node) {
                    is[index] = true;
                    has_changed = true;
                }
            }
            if !has_changed {
                return is;
            }
        }
    }

    /// Returns whether a rule can begin with itself, so that nothing would ever come of it.
    pub(super) fn is_left_recursive(&self) -> bool {
        let nullable = self.nullable();
        let firsts: Vec<Vec<u32>> = self.rules.iter().map(|node| self.first_rules(*node, &nullable)).collect();
        // 0: not seen, 1: on the way, 2: done.
        let mut marks = vec![0_u8; firsts.len()];
        for rule in 0..firsts.len() {
            let mut path = vec![(rule, 0)];
            while let Some((rule, next)) = path.pop() {
                marks[rule] = 1;
                match firsts[rule].get(next) {
                    None => marks[rule] = 2,
                    Some(&first) => {
                        path.push((rule, next + 1));
                        match marks[first as usize] {
                            1 => return true,
                            0 => path.push((first as usize, 0)),
                            _ => {}
                        }
                    }
                }
            }
        }
        false
    }

    /// The rules that a node may begin with.
    fn first_rules(&self, node: Option<NodeId>, nullable: &[bool]) -> Vec<u32> {
        let (mut found, mut pending) = (Vec::new(), Vec::from_iter(node));
        while let Some(node) = pending.pop() {
            match &self.nodes[node.0 as usize] {
                Node::Bytes(_) => {}
                Node::Sequence(nodes) => {
                    for &node in nodes {
                        pending.push(node);
                        if !nullable[node.0 as usize] {
                            break;
                        }
                    }
                }
                Node::Alternatives(nodes) => pending.extend(nodes),
                Node::Repeat { node, .. } => pending.push(*node),
                Node::Rule(rule) => found.push(rule.0),
            }
        }
        found
    }
}
