//! The levels of a group of ranks, and the domains of each level.

/// A level of a group of ranks, such as its nodes or the ranks of a node, and its domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelDomain {
    /// Parts at this level.
    pub size: usize,
    /// S: consecutive parts of a domain. It divides the size.
    pub domain: usize,
}

/// The domains of all levels, the outermost first. Ranks are together in a domain where each level has them in the
/// same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DomainShape {
    levels: Vec<LevelDomain>,
}

impl DomainShape {
    pub(super) fn new(levels: Vec<LevelDomain>) -> Self {
        Self { levels }
    }

    pub(super) fn levels(&self) -> &[LevelDomain] {
        &self.levels
    }

    /// Returns the ranks of a part at this level.
    fn stride(&self, level: usize) -> usize {
        self.levels[level + 1..].iter().map(|level| level.size).product()
    }

    /// Returns the place of `rank` in its domain of this level.
    pub(super) fn offset(&self, rank: usize, level: usize) -> usize {
        let LevelDomain { size, domain } = self.levels[level];
        rank / self.stride(level) % size % domain
    }

    /// Returns the rank with another place in the domain of `rank` at this level.
    pub(super) fn at(&self, rank: usize, level: usize, offset: usize) -> usize {
        rank + offset * self.stride(level) - self.offset(rank, level) * self.stride(level)
    }

    /// Returns the rank in the domain of `home` that has the places of `source` in its own.
    pub(super) fn counterpart(&self, home: usize, source: usize) -> usize {
        (0..self.levels.len()).fold(home, |rank, level| self.at(rank, level, self.offset(source, level)))
    }

    /// Returns whether both ranks are in the same domain.
    pub(super) fn are_together(&self, a: usize, b: usize) -> bool {
        self.counterpart(a, b) == b
    }

    /// Lists the ranks of a domain in the order in which they are gathered: the place at the outermost level counts
    /// fastest.
    pub(super) fn members(&self, rank: usize) -> Vec<usize> {
        (0..self.levels.len()).fold(vec![rank], |members, level| {
            let at = |offset| members.iter().map(move |&rank| self.at(rank, level, offset));
            (0..self.levels[level].domain).flat_map(at).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(levels: &[(usize, usize)]) -> DomainShape {
        DomainShape::new(levels.iter().map(|&(size, domain)| LevelDomain { size, domain }).collect())
    }

    #[test]
    fn domains_of_one_level_are_neighbours() {
        let shape = shape(&[(6, 2)]);
        assert_eq!(shape.members(3), [2, 3]);
        assert!(shape.are_together(4, 5) && !shape.are_together(3, 4));
        assert_eq!([shape.counterpart(5, 0), shape.counterpart(4, 1)], [4, 5]);
    }

    #[test]
    fn domains_of_two_levels_hold_pairs_of_pairs() {
        let shape = shape(&[(2, 2), (4, 2)]);
        assert_eq!(shape.members(5), [0, 4, 1, 5], "nodes first, then the ranks of a node");
        assert_eq!(shape.counterpart(2, 5), 7, "in the node and at the place of its own");
        assert!((0..8).all(|rank| shape.members(rank).contains(&rank)));
        assert!((0..8).all(|rank| shape.members(rank).iter().all(|&other| shape.are_together(rank, other))));
    }
}
