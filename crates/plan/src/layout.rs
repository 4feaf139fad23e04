//! The layout: how ranks are divided into groups.
//!
//! The ranks of a tensor-parallel group hold slices of each matrix and have the same tokens; each group has tokens of
//! its own. An expert-parallel group consists of whole tensor-parallel groups: its ranks hold the experts between
//! them, and each sends a share of its group's tokens to the others. Data-parallel groups hold copies of the same
//! experts. All other weights are replicated on all ranks.
//!
//! With a pipeline all of this is one stage group: the ranks that hold the same stages. Stage groups follow each
//! other, so that pp is the outermost size: ranks `pp * n .. (pp + 1) * n` of stage groups of n ranks. What goes
//! between stage groups is a residual stream for each microbatch, the least of all traffic, so it is the first that
//! may cross between nodes.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::Topology;

/// The order of ranks: the groups whose ranks are neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RankOrder {
    /// The ranks of an expert-parallel group are neighbours, so that tokens stay in a node where they can.
    #[default]
    EpInner,
    /// The ranks of a data-parallel group are neighbours, so that gradients of experts stay in a node and tokens
    /// travel.
    DpInner,
}

impl<'de> Deserialize<'de> for RankOrder {
    /// Reads a name, or a boolean as in configurations of old: true for `dp_inner`.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            IsDpInner(bool),
            Name(String),
        }
        match Written::deserialize(deserializer) {
            Ok(Written::IsDpInner(false)) => Ok(Self::EpInner),
            Ok(Written::IsDpInner(true)) => Ok(Self::DpInner),
            Ok(Written::Name(name)) if name == "ep_inner" => Ok(Self::EpInner),
            Ok(Written::Name(name)) if name == "dp_inner" => Ok(Self::DpInner),
            _ => Err(D::Error::custom("must be ep_inner or dp_inner")),
        }
    }
}

/// The sizes of the groups. The number of ranks is their product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The number of copies of each expert.
    pub dp: usize,
    /// The number of tensor-parallel groups whose ranks hold the experts between them.
    pub ep: usize,
    /// The number of ranks that hold each matrix between them; always neighbours.
    pub tp: usize,
    /// The number of stage groups of a pipeline: groups of dp x ep x tp neighbouring ranks, each with stages of its
    /// own.
    pub pp: usize,
    /// The order of ranks of a stage group.
    pub order: RankOrder,
}

/// The error of an invalid layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A size is zero.
    #[error("{0} = 0: must be at least 1")]
    Zero(&'static str),
    /// The product of the sizes is not the number of ranks.
    #[error("dp {dp} x ep {ep} x tp {tp}{} = {} ranks, but there are {num_ranks}", times_pp(*pp),
        dp.saturating_mul(*ep).saturating_mul(*tp).saturating_mul(*pp))]
    Ranks {
        /// Data-parallel size.
        dp: usize,
        /// Expert-parallel size.
        ep: usize,
        /// Tensor-parallel size.
        tp: usize,
        /// The number of stage groups of the pipeline.
        pp: usize,
        /// The number of ranks.
        num_ranks: usize,
    },
}

/// The factor of a pipeline in a product of sizes, where there is one.
fn times_pp(pp: usize) -> String {
    if pp == 1 { String::new() } else { format!(" x pp {pp}") }
}

impl Layout {
    /// Makes a layout whose expert-parallel groups are neighbours, without pipeline.
    #[must_use]
    pub fn new(dp: usize, ep: usize, tp: usize) -> Self {
        Self { dp, ep, tp, pp: 1, order: RankOrder::EpInner }
    }

    /// Returns the same in each of `pp` stage groups of a pipeline.
    #[must_use]
    pub fn with_pipeline(self, pp: usize) -> Self {
        Self { pp, ..self }
    }

    /// Returns the layout of one stage group by itself.
    #[must_use]
    pub fn of_stage_group(self) -> Self {
        self.with_pipeline(1)
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.stage_group_size() * self.pp
    }

    /// Returns the number of ranks of a stage group, which hold the same stages of a pipeline: all ranks without one.
    #[must_use]
    pub fn stage_group_size(&self) -> usize {
        self.dp * self.ep * self.tp
    }

    /// Returns the stage group that `rank` is in.
    #[must_use]
    pub fn stage_group(&self, rank: usize) -> usize {
        rank / self.stage_group_size()
    }

    /// Fails unless the sizes give `num_ranks` ranks.
    pub fn check(&self, num_ranks: usize) -> Result<(), LayoutError> {
        let Self { dp, ep, tp, pp, .. } = *self;
        for (name, size) in [("dp", dp), ("ep", ep), ("tp", tp), ("pp", pp)] {
            if size == 0 {
                return Err(LayoutError::Zero(name));
            }
        }
        match [ep, tp, pp].into_iter().try_fold(dp, usize::checked_mul) {
            Some(ranks) if ranks == num_ranks => Ok(()),
            _ => Err(LayoutError::Ranks { dp, ep, tp, pp, num_ranks }),
        }
    }

    /// Returns the place of `rank` in its data-parallel, expert-parallel and tensor-parallel group.
    #[must_use]
    pub fn place(&self, rank: usize) -> (usize, usize, usize) {
        let rank = rank % self.stage_group_size();
        let (outer, tp) = (rank / self.tp, rank % self.tp);
        match self.order {
            RankOrder::EpInner => (outer / self.ep, outer % self.ep, tp),
            RankOrder::DpInner => (outer % self.dp, outer / self.dp, tp),
        }
    }

    /// The rank at a place of the stage group of `neighbour`.
    fn rank(&self, neighbour: usize, dp: usize, ep: usize, tp: usize) -> usize {
        let outer = match self.order {
            RankOrder::EpInner => dp * self.ep + ep,
            RankOrder::DpInner => ep * self.dp + dp,
        };
        self.stage_group(neighbour) * self.stage_group_size() + outer * self.tp + tp
    }

    /// Returns the number of ranks that hold the experts between them.
    #[must_use]
    pub fn num_expert_ranks(&self) -> usize {
        self.ep * self.tp
    }

    /// Returns the ranks that hold the experts between them, `rank` among them, in the order of their places.
    #[must_use]
    pub fn ep_group(&self, rank: usize) -> Vec<usize> {
        let (dp, ..) = self.place(rank);
        (0..self.ep).flat_map(|ep| (0..self.tp).map(move |tp| self.rank(rank, dp, ep, tp))).collect()
    }

    /// Returns the ranks that hold the same experts as `rank`.
    #[must_use]
    pub fn dp_group(&self, rank: usize) -> Vec<usize> {
        let (_, ep, tp) = self.place(rank);
        (0..self.dp).map(|dp| self.rank(rank, dp, ep, tp)).collect()
    }

    /// Returns the ranks that hold slices of the same matrices as `rank`.
    #[must_use]
    pub fn tp_group(&self, rank: usize) -> Vec<usize> {
        let (dp, ep, _) = self.place(rank);
        (0..self.tp).map(|tp| self.rank(rank, dp, ep, tp)).collect()
    }

    /// Returns the ranks that hold the same slices of the weights outside the experts, each with its own tokens.
    #[must_use]
    pub fn dense_group(&self, rank: usize) -> Vec<usize> {
        let (_, _, tp) = self.place(rank);
        let first = self.stage_group(rank) * self.stage_group_size();
        (first..first + self.stage_group_size()).filter(|&other| self.place(other).2 == tp).collect()
    }

    /// Returns the ranks of the pipeline that `rank` is in: those at its place in each stage group, first to last.
    #[must_use]
    pub fn pp_group(&self, rank: usize) -> Vec<usize> {
        (0..self.pp).map(|stage_group| stage_group * self.stage_group_size() + rank % self.stage_group_size()).collect()
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dp {} ep {} tp {}", self.dp, self.ep, self.tp)?;
        if self.pp > 1 {
            write!(f, " pp {}", self.pp)?;
        }
        if self.order == RankOrder::DpInner { f.write_str(" dp_inner") } else { Ok(()) }
    }
}

/// A group of ranks as the cost of a collective sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// n: the number of ranks.
    pub ranks: usize,
    /// m: the largest number of them on one node.
    pub per_node: usize,
}

impl Group {
    /// Returns the shape of the group of `ranks` on `topology`.
    #[must_use]
    pub fn of(topology: &Topology, ranks: &[usize]) -> Self {
        let mut in_node = vec![0; topology.node_sizes.len()];
        for &rank in ranks {
            if let Some(count) = in_node.get_mut(topology.node_of(rank)) {
                *count += 1;
            }
        }
        Self { ranks: ranks.len(), per_node: in_node.into_iter().max().unwrap_or(0).max(1) }
    }

    /// Returns the number of nodes of the group, if all were as full as the fullest.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.ranks.div_ceil(self.per_node).max(1)
    }
}
