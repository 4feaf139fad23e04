//! The settings of parallelism over ranks.

use std::path::PathBuf;

use moeworks_moe::{Range, settings};
use moeworks_plan::{Layout, RankOrder, Wire};
use serde::{Deserialize, Serialize};

use super::domain::{DomainBaseChoice, DomainChoice};

/// The maximum number of ranks.
pub(super) const MAX_RANKS: u64 = 1 << 12;

settings! {
    /// Distribution over ranks. Each trains on its share of the sequences of a microbatch.
    #[serde(deny_unknown_fields, default)]
    pub struct ParallelConfig in "parallel." {
        /// Data parallelism: number of expert-parallel groups, each with all experts.
        dp: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Expert parallelism: number of places in a group, over which the experts are spread; each place is tp
        /// ranks.
        ep: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Tensor parallelism: number of ranks that shard the non-expert weights and process the same sequences.
        tp: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Pipeline parallelism: stage groups of dp x ep x tp ranks, each of which holds stages of the model,
        /// consecutive layers. The train.grad_accumulation microbatches of a step go through them.
        pp: usize = 1, in Range::whole(1..=MAX_RANKS);
        /// Schedule of a pipeline: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, zb_1p, zb_2p, dualpipe,
        /// dualpipe_v, 1f1b_overlap, interleaved_overlap, or the path of a file with a schedule's text.
        schedule: String = "1f1b".to_owned();
        /// Layers of each stage of a pipeline, first to last, such as "5,6,6,5"; "": shared out by cost. Twice as
        /// many stages as pp, or more, are several a rank, for schedules that take them.
        stages: String = String::new();
        /// Ranks that each stage group of a pipeline spreads its experts over, such as "1,1,4", in place of ep; each
        /// divides dp x ep, and the group holds its experts that many times less often. "": ep in all.
        stage_ep: String = String::new();
        /// Order of ranks: ep_inner (neighbouring ranks are in the same group) or dp_inner (in different groups).
        rank_order: RankOrder = RankOrder::EpInner, was "apart";
        /// Experts of each rank of a group: sharded (each on one rank), everywhere, or the path of a file with a line
        /// for each expert, under "placement experts=E ranks=R" for all layers or under "layer N:" for each.
        placement: PlacementChoice = PlacementChoice::Sharded;
        /// Algorithm of the all-to-all: linear, hierarchical (in the node first), two_hop (once to each node), or
        /// auto, by cost.
        all_to_all: PathChoice = PathChoice::Auto;
        /// Format of tokens on the wire: f32, bf16, f16, int8 (dispatch only; the rest as bf16), or topk:SHARE, the
        /// largest numbers of each row alone in f16, such as topk:0.25; topk8:SHARE sends them as bytes.
        wire: WireChoice = WireChoice::F32;
        /// Format of gradients of tokens on the wire: same, or one of parallel.wire.
        wire_backward: BackwardWire = BackwardWire::default();
        /// Movement between ranks: tokens (to their experts), weights (of all experts to the tokens), or auto: in
        /// each layer and step the weights of those experts that cost less to move than their tokens.
        moving: MovingChoice = MovingChoice::Tokens;
        /// Ranks of a domain, which gather each other's experts for a pass while tokens go between domains
        /// (HybridEP); 1: no domains, 0: chosen by the measured bandwidth, and again when it changes. Two numbers,
        /// such as "2,4": nodes of a domain, and ranks of each node. They must divide the nodes and ranks of ep times
        /// tp.
        domain: DomainChoice = DomainChoice::default(), in Range::whole(0..=MAX_RANKS);
        /// Share of the numbers of an expert's change that travel inside its domain for a training pass; 1: experts
        /// travel whole.
        domain_keep: f64 = 1.0, in Range::POSITIVE_SHARE;
        /// Base of an expert's change: last (the expert as the other ranks have it, of which each keeps an f32 copy)
        /// or mean (the mean expert of the domain).
        domain_base: DomainBaseChoice = DomainBaseChoice::Last;
        /// Share of the numbers of an expert's gradient that travel inside its domain; the others are added to the
        /// next gradient. 1: whole gradients.
        domain_keep_gradients: f64 = 1.0, in Range::POSITIVE_SHARE;
        /// Chunks of a layer's tokens, one in flight while another is computed; 0: tuned by measurement, which makes
        /// the rounding of a run depend on the machine.
        chunks: usize = 1, in Range::whole(0..=64);
        /// Measurements of `moeworks bench comm`, for choices by cost; without the file a typical cluster is assumed.
        #[serde(serialize_with = "super::as_text")]
        topology: PathBuf = "topology.toml".into();
        /// Pins ranks and their threads to their own cores, near their memory.
        pin: bool = true;
        /// Stage of ZeRO, over ranks with the same weights: 0 shards nothing, 1 optimizer state, 2 gradients as well
        /// (less memory for the same traffic), 3 the weights as well; each layer is then gathered for forward and
        /// again for backward.
        zero: u8 = 0, in Range::whole(0..=3);
        /// Sums over ranks in the order of ranks, even if the MPI library has a faster order; the bits then equal
        /// those of ranks that are threads. All ranks have the same bits either way.
        ordered_sums: bool = false;
        /// Seconds after which a rank that others wait for in a step counts as hung.
        timeout_s: u64 = 25, in Range::AT_LEAST_ONE;
        /// Rules that change the tensor-parallel sharding of weights: "PATTERN=replicated" or "PATTERN=tensor" (the
        /// usual sharding); later rules win. Example: "model.layers.0.self_attn.*=replicated". The embedding, the
        /// output projection, and the attention and dense feed-forward of each layer are sharded or replicated as a
        /// whole. `moeworks inspect MODEL --sharding --tp N` shows the result.
        sharding: Vec<String> = Vec::new();
    }
}

/// The algorithm by which tokens reach the ranks of their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathChoice {
    /// The algorithm of the least cost for the nodes of the ranks.
    Auto,
    /// Directly from each rank to each other.
    Linear,
    /// Inside the node first, then between nodes.
    Hierarchical,
    /// Once to each node, and from there to its ranks.
    TwoHop,
}

/// The choice between moving tokens to experts and experts to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MovingChoice {
    /// Moves tokens.
    Tokens,
    /// Moves experts: all ranks of a group fetch their weights for a pass, and gradients return to the owners.
    Weights,
    /// Moves in each layer and step those experts whose weights cost less to move than their tokens.
    Auto,
}

/// The format of tokens on the wire; written as `"f32"`, `"bf16"`, `"f16"`, `"int8"`, `"topk:SHARE"` or
/// `"topk8:SHARE"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WireChoice {
    /// f32, unchanged.
    F32,
    /// bf16, with f32 sums.
    Bf16,
    /// IEEE half precision, with f32 sums.
    F16,
    /// One byte per number and a scale for each 128 in dispatch; bf16 in combine and in backward.
    Int8,
    /// The largest numbers of each row in f16, as thousandths of the row, there and back; the others become zeros.
    TopK(u16),
    /// The largest numbers of each row as one byte each, as thousandths of the row, there and back.
    TopKByte(u16),
}

impl TryFrom<String> for WireChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let per_mille = |prefix: &str| {
            let share = text.strip_prefix(prefix)?.parse::<f64>().ok()?;
            Some((share * 1000.0).round()).filter(|x| (1.0..=1000.0).contains(x)).map(|x| x as u16)
        };
        match &*text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "f16" => Ok(Self::F16),
            "int8" => Ok(Self::Int8),
            _ => {
                let right =
                    "f32, bf16, f16, int8, topk:SHARE or topk8:SHARE with a share from 0.001 to 1, such as topk:0.25";
                let largest = per_mille("topk:").map(Self::TopK).or_else(|| per_mille("topk8:").map(Self::TopKByte));
                largest.ok_or_else(|| format!("\"{text}\": must be {right}"))
            }
        }
    }
}

impl From<WireChoice> for String {
    fn from(choice: WireChoice) -> Self {
        match choice {
            WireChoice::F32 => "f32".into(),
            WireChoice::Bf16 => "bf16".into(),
            WireChoice::F16 => "f16".into(),
            WireChoice::Int8 => "int8".into(),
            WireChoice::TopK(per_mille) => format!("topk:{}", f64::from(per_mille) / 1000.0),
            WireChoice::TopKByte(per_mille) => format!("topk8:{}", f64::from(per_mille) / 1000.0),
        }
    }
}

/// The format of gradients of tokens on the wire; written as `"same"` or as a [`WireChoice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackwardWire(pub Option<WireChoice>);

impl TryFrom<String> for BackwardWire {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "same" {
            return Ok(Self(None));
        }
        let choice = WireChoice::try_from(text).map_err(|problem| problem.replace("must be ", "must be same, "))?;
        Ok(Self(Some(choice)))
    }
}

impl From<BackwardWire> for String {
    fn from(BackwardWire(choice): BackwardWire) -> Self {
        choice.map_or_else(|| "same".into(), Self::from)
    }
}

impl WireChoice {
    /// Returns the format as the planner's value.
    #[must_use]
    pub fn wire(self) -> Wire {
        match self {
            Self::F32 => Wire::F32,
            Self::Bf16 => Wire::Bf16,
            Self::F16 => Wire::F16,
            Self::Int8 => Wire::Byte { block: 128 },
            Self::TopK(per_mille) => Wire::TopK { per_mille },
            Self::TopKByte(per_mille) => Wire::TopKByte { per_mille },
        }
    }
}

/// The experts of each rank of a group; written as `"sharded"`, `"everywhere"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum PlacementChoice {
    /// Each expert on one rank, consecutive experts together.
    Sharded,
    /// Every expert on every rank.
    Everywhere,
    /// The placement in the file at this path.
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
    /// Returns the total number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        [self.ep, self.tp, self.pp].into_iter().fold(self.dp, usize::saturating_mul)
    }

    /// Returns the layout as the stage group of this pp index has it: with its own number of ranks that experts are
    /// spread over, if there is one.
    #[must_use]
    pub fn layout_of_stage_group(&self, pp_rank: usize) -> Layout {
        let layout = self.layout();
        match self.stage_eps().and_then(|eps| eps.get(pp_rank).copied()) {
            Some(ep) if ep > 0 => Layout { dp: layout.dp * layout.ep / ep, ep, ..layout },
            _ => layout,
        }
    }

    /// Returns the numbers of `stage_ep`; none if they are not set or not numbers.
    pub(super) fn stage_eps(&self) -> Option<Vec<usize>> {
        self.stage_ep.split(',').map(|ep| ep.trim().parse().ok()).collect()
    }

    /// Returns the groups as a layout.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout { order: self.rank_order, ..Layout::new(self.dp, self.ep, self.tp) }.with_pipeline(self.pp)
    }
}
