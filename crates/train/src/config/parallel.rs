//! The settings of several ranks.

use std::path::PathBuf;

use moeworks_moe::{Range, settings};
use moeworks_plan::{Layout, RankOrder, Wire};
use serde::{Deserialize, Serialize};

/// No run has more ranks.
pub(super) const MAX_RANKS: u64 = 1 << 12;

settings! {
    /// Distribution over ranks. Each trains on its share of the sequences of a microbatch.
    #[serde(deny_unknown_fields, default)]
    pub struct ParallelConfig in "parallel." {
        /// Data parallelism: groups of ranks, each with all experts.
        dp: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Expert parallelism: ranks of a group, over which the experts are spread; each of them is tp ranks.
        ep: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Tensor parallelism: ranks that shard the non-expert weights and pass the same sequences.
        tp: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Order of ranks: ep_inner (neighbouring ranks are in the same group) or dp_inner (in different groups).
        rank_order: RankOrder = RankOrder::EpInner, was "apart";
        /// Which ranks of a group hold which experts: sharded (each on one), everywhere, or the path of a file with a line
        /// for each expert, under "placement experts=E ranks=R", for all layers or under "layer N:" for each.
        placement: PlacementChoice = PlacementChoice::Sharded;
        /// Path of tokens: linear, hierarchical (in the node first), two_hop (once to each node), or auto, by cost.
        all_to_all: PathChoice = PathChoice::Auto;
        /// Format of tokens on their way: f32, bf16, f16 or int8 (dispatch alone; the rest as bf16).
        wire: WireChoice = WireChoice::F32;
        /// Movement between ranks: tokens (to their experts), weights (of all experts to the tokens), or auto: for each layer and step
        /// the weights of the experts that cost less to move than their tokens.
        moving: MovingChoice = MovingChoice::Tokens;
        /// Chunks of a layer's tokens, one in flight while another is computed; 0: as measured, which makes the rounding
        /// of a run depend on the machine.
        chunks: usize = 1, in Range::whole(0..=64);
        /// Measurements of `moeworks bench comm`, for choices by cost; without the file a described cluster is assumed.
        #[serde(serialize_with = "super::as_text")]
        topology: PathBuf = "topology.toml".into();
        /// Whether ranks and their threads are pinned to cores of their own, near their memory.
        pin: bool = true;
        /// Stage of ZeRO, what ranks with the same weights shard: 0 nothing, 1 their optimizer state, 2 gradients, too: less
        /// memory for the same traffic; 3 the weights themselves, each layer put together for forward and again for backward.
        zero: u8 = 0, in Range::whole(0..=3);
        /// Whether sums over ranks are taken in the order of ranks, the bits of ranks that are threads, also where the MPI library takes
        /// them sooner; all ranks have the same bits either way.
        ordered_sums: bool = false;
        /// Seconds after which a rank that others wait for in a step is taken for hung.
        timeout_s: u64 = 25, in Range::AT_LEAST_ONE;
        /// Weights whose cut over the ranks of tp differs from the usual one: "PATTERN=replicated" or "PATTERN=tensor" (cut as usual), later
        /// rules win, such as "model.layers.0.self_attn.*=replicated". The embedding, the output projection and the attention and dense
        /// feed-forward of each layer are cut or replicated as a whole. `moeworks inspect MODEL --sharding --tp N` shows the cuts.
        sharding: Vec<String> = Vec::new();
    }
}

/// The path of tokens to the ranks of their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathChoice {
    /// The path of the least cost for the nodes that the ranks stand on.
    Auto,
    /// From each rank to each other.
    Linear,
    /// Inside the node first, then between nodes.
    Hierarchical,
    /// Once to each node, and on from there.
    TwoHop,
}

/// The choice between moving tokens to experts and experts to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MovingChoice {
    /// Tokens.
    Tokens,
    /// Experts: their weights come to all ranks of a group for a pass, and their gradients go home.
    Weights,
    /// For each layer and step those experts whose weights cost less to move than their tokens.
    Auto,
}

/// The format of tokens on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireChoice {
    /// As they are.
    F32,
    /// bf16; sums are f32.
    Bf16,
    /// IEEE half precision; sums are f32.
    F16,
    /// A byte a number and a scale for each 128 when dispatched; back, and in backward, bf16.
    Int8,
}

impl WireChoice {
    /// The form as a value.
    #[must_use]
    pub fn wire(self) -> Wire {
        match self {
            Self::F32 => Wire::F32,
            Self::Bf16 => Wire::Bf16,
            Self::F16 => Wire::F16,
            Self::Int8 => Wire::Byte { block: 128 },
        }
    }
}

/// The experts of each rank of a group; written as `"sharded"`, `"everywhere"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum PlacementChoice {
    /// Each expert on one rank, neighbouring experts together.
    Sharded,
    /// Every expert on every rank.
    Everywhere,
    /// As a file with a placement's text says.
    File(String),
}

impl From<String> for PlacementChoice {
    fn from(text: String) -> Self {
        match text.as_str() {
            "sharded" => Self::Sharded,
            "everywhere" => Self::Everywhere,
            _ => Self::File(text),
        }
    }
}

impl From<PlacementChoice> for String {
    fn from(choice: PlacementChoice) -> Self {
        match choice {
            PlacementChoice::Sharded => "sharded".into(),
            PlacementChoice::Everywhere => "everywhere".into(),
            PlacementChoice::File(path) => path,
        }
    }
}

impl ParallelConfig {
    /// Ranks in all.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.dp.saturating_mul(self.ep).saturating_mul(self.tp)
    }

    /// The groups as a value.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout { order: self.rank_order, ..Layout::new(self.dp, self.ep, self.tp) }
    }
}
