//! The placement of experts: the ranks that hold each expert.
//!
//! With each expert on one rank it is plain expert parallelism, with every expert on every rank data parallelism of
//! experts. Replicas of popular experts are between the two. One type covers all of these.

use std::fmt;
use std::str::FromStr;

use crate::Nodes;
use crate::placements::Sizes;

/// The ranks that hold each expert, numbered within a group of ranks. Each expert is on at least one.
///
/// The text form has a line with the sizes and a line for each expert; `*` means all ranks:
///
/// ```
/// use moeworks_plan::Placement;
///
/// let mut placement = Placement::sharded(3, 2);
/// placement.replicate(2, &[0, 1]);
/// assert_eq!(placement.to_string(), "placement experts=3 ranks=2\n0: 0\n1: 0\n2: *\n");
/// assert_eq!(placement.to_string().parse(), Ok(placement));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    num_ranks: usize,
    /// The ranks of each expert, ascending.
    ranks: Vec<Vec<usize>>,
}

/// The error of a text that is not a placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct PlacementError {
    /// The line, from 1.
    pub line: usize,
    /// The problem, with what is expected.
    pub problem: String,
}

impl Placement {
    /// Places each expert on one rank and neighbouring experts together. The first `num_experts % num_ranks` ranks
    /// have one more.
    #[must_use]
    pub fn sharded(num_experts: usize, num_ranks: usize) -> Self {
        assert!(num_ranks > 0, "a placement needs a rank");
        let (each, more) = (num_experts / num_ranks, num_experts % num_ranks);
        let sizes = (0..num_ranks).map(|rank| each + usize::from(rank < more));
        let ranks = sizes.enumerate().flat_map(|(rank, size)| vec![vec![rank]; size]).collect();
        Self { num_ranks, ranks }
    }

    /// Places every expert on every rank.
    #[must_use]
    pub fn everywhere(num_experts: usize, num_ranks: usize) -> Self {
        assert!(num_ranks > 0, "a placement needs a rank");
        Self { num_ranks, ranks: vec![(0..num_ranks).collect(); num_experts] }
    }

    /// The placement of expert e on `ranks[e]`, ascending and at least one.
    pub(crate) fn from_ranks(num_ranks: usize, ranks: Vec<Vec<usize>>) -> Self {
        Self { num_ranks, ranks }
    }

    /// Adds `ranks` to those of `expert`.
    pub fn replicate(&mut self, expert: usize, ranks: &[usize]) {
        assert!(ranks.iter().all(|&rank| rank < self.num_ranks), "ranks of a placement");
        let held = &mut self.ranks[expert];
        held.extend(ranks);
        held.sort_unstable();
        held.dedup();
    }

    /// Returns E, the number of experts.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of ranks of the group.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// Returns the ranks that hold `expert`, ascending; at least one.
    #[must_use]
    pub fn ranks_of(&self, expert: usize) -> &[usize] {
        &self.ranks[expert]
    }

    /// Returns the experts that `rank` holds, ascending.
    #[must_use]
    pub fn experts_of(&self, rank: usize) -> Vec<usize> {
        (0..self.num_experts()).filter(|&expert| self.holds(rank, expert)).collect()
    }

    /// Returns whether `rank` holds `expert`.
    #[must_use]
    pub fn holds(&self, rank: usize, expert: usize) -> bool {
        self.ranks[expert].binary_search(&rank).is_ok()
    }

    /// Returns the rank that computes `expert` for the tokens of rank `source`: `source` itself if it holds the
    /// expert, otherwise a holder of its node if there is one, otherwise any holder. Several holders share the
    /// other sources in turn.
    #[must_use]
    pub fn serving_rank(&self, nodes: &Nodes, source: usize, expert: usize) -> usize {
        let held = &self.ranks[expert];
        match held[..] {
            [only] => return only,
            _ if held.binary_search(&source).is_ok() => return source,
            _ => {}
        }
        // The number of the source among those that do not hold the expert: of all ranks, or of its node.
        let below = &held[..held.partition_point(|&rank| rank < source)];
        let is_near = |rank: &&usize| nodes.of(**rank) == nodes.of(source);
        match held.iter().filter(is_near).count() {
            0 => held[(source - below.len()) % held.len()],
            num_near => {
                let number = nodes.place(source) - below.iter().filter(is_near).count();
                *held.iter().filter(is_near).nth(number % num_near).unwrap_or(&held[0])
            }
        }
    }

    /// Returns the largest number of experts on one rank.
    #[must_use]
    pub fn max_experts(&self) -> usize {
        let mut counts = vec![0; self.num_ranks];
        self.ranks.iter().flatten().for_each(|&rank| counts[rank] += 1);
        counts.into_iter().max().unwrap_or(0)
    }

    /// Returns whether any expert is on more than one rank.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        self.ranks.iter().any(|ranks| ranks.len() > 1)
    }

    /// Returns the rank that keeps what is kept once of `expert`, such as the state of its optimizer: one of those
    /// that hold it, by the expert's number, so that ranks keep about equally much.
    #[must_use]
    pub fn owner(&self, expert: usize) -> usize {
        let held = &self.ranks[expert];
        held[expert % held.len()]
    }

    /// Returns the placement of each expert on its [owner](Self::owner) alone.
    #[must_use]
    pub fn owners(&self) -> Self {
        Self::from_ranks(self.num_ranks, (0..self.num_experts()).map(|expert| vec![self.owner(expert)]).collect())
    }
}

impl Placement {
    /// Writes the line of each expert.
    pub(crate) fn write_experts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (expert, ranks) in self.ranks.iter().enumerate() {
            if ranks.len() == self.num_ranks && self.num_ranks > 1 {
                writeln!(f, "{expert}: *")?;
            } else {
                let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                writeln!(f, "{expert}: {}", ranks.join(" "))?;
            }
        }
        Ok(())
    }

    /// Reads the lines of all experts, numbered from `first_line`, up to the end of `lines`.
    pub(crate) fn parse_experts(lines: &[&str], first_line: usize, sizes: Sizes) -> Result<Self, PlacementError> {
        let Sizes { num_experts, num_ranks } = sizes;
        let mut ranks = Vec::new();
        for (text, line) in lines.iter().zip(first_line..) {
            let as_error = |problem| PlacementError { line, problem };
            if ranks.len() == num_experts {
                return Err(as_error(format!("{text:?}: there are only {num_experts} experts")));
            }
            ranks.push(parse_expert(text, ranks.len(), num_ranks).map_err(as_error)?);
        }
        if ranks.len() < num_experts {
            let problem = format!("ends after {} of {num_experts} experts", ranks.len());
            return Err(PlacementError { line: first_line - 1 + ranks.len(), problem });
        }
        Ok(Self { num_ranks, ranks })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", Sizes { num_experts: self.num_experts(), num_ranks: self.num_ranks })?;
        self.write_experts(f)
    }
}

impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let lines: Vec<&str> = text.lines().collect();
        let sizes = Sizes::parse(lines.first().copied().unwrap_or_default())?;
        Self::parse_experts(&lines[1..], 2, sizes)
    }
}

fn parse_expert(text: &str, expert: usize, num_ranks: usize) -> Result<Vec<usize>, String> {
    let wrong = || format!("{text:?}: must be \"{expert}: \" and ascending ranks below {num_ranks}, or *");
    let ranks = text.strip_prefix(&format!("{expert}:")).ok_or_else(wrong)?.trim();
    if ranks == "*" {
        return Ok((0..num_ranks).collect());
    }
    let ranks: Vec<usize> = ranks.split(' ').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
    let is_ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
    if ranks.last().is_some_and(|&last| last < num_ranks) && is_ascending { Ok(ranks) } else { Err(wrong()) }
}
