//! The node of each rank of a group, and the ranks that relay messages between nodes.

/// The nodes that the ranks of a group run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// The node of each rank.
    of_rank: Vec<usize>,
    /// The ranks of each node, ascending.
    ranks: Vec<Vec<usize>>,
    /// Each rank's place among those of its node.
    places: Vec<usize>,
}

impl Nodes {
    /// Makes the nodes from each rank's node, numbered without gaps from 0.
    #[must_use]
    pub fn new(of_rank: &[usize]) -> Self {
        let mut ranks = vec![Vec::new(); of_rank.iter().max().map_or(0, |last| last + 1)];
        let mut places = Vec::with_capacity(of_rank.len());
        for (rank, &node) in of_rank.iter().enumerate() {
            places.push(ranks[node].len());
            ranks[node].push(rank);
        }
        Self { of_rank: of_rank.to_vec(), ranks, places }
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn num(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// Returns the node of `rank`.
    #[must_use]
    pub fn of(&self, rank: usize) -> usize {
        self.of_rank[rank]
    }

    /// Returns the ranks of each node, ascending.
    #[must_use]
    pub fn ranks(&self) -> &[Vec<usize>] {
        &self.ranks
    }

    /// Returns the place of `rank` among those of its node.
    #[must_use]
    pub fn place(&self, rank: usize) -> usize {
        self.places[rank]
    }

    /// Returns the rank of `node` that exchanges messages with `rank`, which is on another node; on its own node
    /// `rank` itself.
    #[must_use]
    pub fn relay(&self, node: usize, rank: usize) -> usize {
        let ranks = &self.ranks[node];
        ranks[self.places[rank] % ranks.len()]
    }

    /// Iterates over the ranks of all nodes with which `rank` exchanges messages for its node. It is among them, but
    /// no other rank of its node.
    pub fn served_by(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        let node = self.of(rank);
        (0..self.num_ranks()).filter(move |&other| self.relay(node, other) == rank)
    }
}
