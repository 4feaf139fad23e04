//! Which node each rank of a group stands on, and who of a node speaks with whom elsewhere.

/// The nodes that the ranks of a group stand on.
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
    /// Of ranks on these nodes, which are numbered without gaps from 0.
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

    /// How many there are.
    #[must_use]
    pub fn num(&self) -> usize {
        self.ranks.len()
    }

    /// Ranks in all.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// The node of `rank`.
    #[must_use]
    pub fn of(&self, rank: usize) -> usize {
        self.of_rank[rank]
    }

    /// The ranks of each node, ascending.
    #[must_use]
    pub fn ranks(&self) -> &[Vec<usize>] {
        &self.ranks
    }

    /// The place of `rank` among those of its node.
    #[must_use]
    pub fn place(&self, rank: usize) -> usize {
        self.places[rank]
    }

    /// The rank of `node` that speaks with `rank`, which stands on another; `rank` itself on its own.
    #[must_use]
    pub fn relay(&self, node: usize, rank: usize) -> usize {
        let ranks = &self.ranks[node];
        ranks[self.places[rank] % ranks.len()]
    }

    /// The ranks, of all nodes, that `rank` speaks with for those of its own node: itself among them, no other of its
    /// node.
    pub fn served_by(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        let node = self.of(rank);
        (0..self.num_ranks()).filter(move |&other| self.relay(node, other) == rank)
    }
}
