//! The part of each tensor that a rank of a tensor-parallel group holds (Megatron-LM, Shoeybi et al., 1909.08053,
//! section 3).
//!
//! Matrices whose outputs are heads, hidden units or logits are sharded by rows; those whose inputs are heads or
//! hidden units, by columns. A block then needs one all-reduce forward and one backward. Query heads stay with their
//! keys and values; with more ranks than heads of keys and values, several ranks hold the same of these. If a size
//! does not divide evenly, the first ranks get one more.
//!
//! Layers with experts are not sharded. Their group, whose ranks have the same tokens, splits the tokens into runs
//! instead, and its ranks join expert parallelism (MoE parallel folding, Liu et al., 2504.14960; dropping of
//! duplicate tokens, DeepSpeed-TED, 2303.06318). Whole experts make larger products than slices of all experts, and
//! no token is computed twice. Routers and shared experts also pass only the rank's run.

use std::ops::Range;

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::config::{ModelConfig, QkNorm};
use crate::weights::{Shard, WeightSpec, WeightTable};

/// The parts of a model's tensors that a rank of a tensor-parallel group holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSplit {
    rank: usize,
    size: usize,
    /// The query heads of this rank.
    heads: Range<usize>,
    kv_heads: Range<usize>,
    /// The ranks that hold the same heads of keys and values.
    kv_ranks: Range<usize>,
    /// The hidden units of a dense feed-forward that this rank holds.
    hidden: Range<usize>,
    /// The number of hidden units of all ranks.
    dense_width: usize,
    /// The start of each rank's part of the vocabulary, then the end of the last part.
    vocabulary: Vec<usize>,
    /// The widths of queries and keys over all ranks, if their norm is over all heads.
    normed_widths: Option<[usize; 2]>,
}

/// A rank's part of a tensor, and of its gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShare {
    /// The part; none: the whole tensor.
    pub cut: Option<Cut>,
    /// The ranks of the group that hold the same part.
    pub ranks: Range<usize>,
    /// True if the gradients of these ranks have to be summed; otherwise each computes the whole gradient of the
    /// part.
    pub is_summed: bool,
}

/// A part of a tensor along one dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The dim.
    pub dim: usize,
    /// The ranges of that dim, in the order in which the part has them.
    pub pieces: Vec<Range<usize>>,
}

/// Returns the range of part `index` when `len` is split into `num` parts; the first parts have one more if it does
/// not divide.
pub(crate) fn even_share(len: usize, num: usize, index: usize) -> Range<usize> {
    let start = |index: usize| len / num * index + index.min(len % num);
    start(index)..start(index + 1)
}

fn times(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

impl TensorSplit {
    /// Computes the parts of rank `rank` of `size` in the weights of `table`, of a model of `config`. Fails if there
    /// are more ranks than heads, hidden units or ids to shard.
    pub fn new(config: &ModelConfig, table: &WeightTable, rank: usize, size: usize) -> Result<Self, ConfigError> {
        Self::check(config, table, size)?;
        let HeadRanges { kv_heads, heads, kv_ranks } = HeadRanges::new(config, rank, size);
        Ok(Self {
            rank,
            size,
            heads,
            kv_heads,
            kv_ranks,
            hidden: even_share(config.dense_width, size, rank),
            dense_width: config.dense_width,
            vocabulary: (0..=size).map(|rank| even_share(config.vocab_size, size, rank).start).collect(),
            normed_widths: (config.qk_norm == QkNorm::Whole)
                .then(|| [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim)),
        })
    }

    /// Fails if a model of `config` has fewer heads, hidden units or ids than `size` ranks; the error names the
    /// setting. A vocabulary of 0, not known yet, is skipped.
    pub fn check(config: &ModelConfig, table: &WeightTable, size: usize) -> Result<(), ConfigError> {
        match limits(config, table).into_iter().find(|(_, len)| *len < size) {
            Some((name, len)) => Err(ConfigError::new(name, len, format!("must be at least parallel.tp, {size}"))),
            None => Ok(()),
        }
    }

    /// Returns the largest number of ranks that can shard a model of `config`.
    #[must_use]
    pub fn most(config: &ModelConfig, table: &WeightTable) -> usize {
        limits(config, table).into_iter().map(|(_, len)| len).fold(usize::MAX, usize::min)
    }

    /// Returns the number of this rank's query heads, and of its heads of keys and values.
    pub(crate) fn num_heads(&self) -> (usize, usize) {
        (self.heads.len(), self.kv_heads.len())
    }

    /// Returns the start of each rank's part of the vocabulary, then the end of the last part.
    pub(crate) fn vocabulary(&self) -> &[usize] {
        &self.vocabulary
    }

    /// Returns the widths of queries and keys over all ranks, if their norm is over all heads.
    pub(crate) fn normed_widths(&self) -> Option<[usize; 2]> {
        self.normed_widths
    }

    /// Returns true if no lower rank holds the same heads of keys and values.
    pub(crate) fn is_first_with_keys(&self) -> bool {
        self.kv_ranks.start == self.rank
    }

    /// Returns this rank's number in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks of the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the run of tokens that rank `rank` takes through layers with experts, of `num_sequences` sequences of
    /// `seq_len`. With `are_whole` a run has whole sequences, for losses that need them.
    #[must_use]
    pub fn run_of(&self, rank: usize, num_sequences: usize, seq_len: usize, are_whole: bool) -> Range<usize> {
        if are_whole {
            return times(&even_share(num_sequences, self.size, rank), seq_len);
        }
        even_share(num_sequences * seq_len, self.size, rank)
    }

    /// Returns this rank's part of the tensor of `spec`. Routed experts are whole here, because a placement
    /// distributes them.
    #[must_use]
    pub fn share(&self, spec: &WeightSpec) -> TensorShare {
        let whole = |is_summed| TensorShare { cut: None, ranks: 0..self.size, is_summed };
        match spec.shard {
            Shard::Replicated | Shard::Experts => whole(false),
            Shard::ReplicatedPartialGrad => whole(true),
            Shard::Heads { dim, size } => self.own(dim, times(&self.heads, size)),
            Shard::KvHeads { dim, size } => {
                let (own, is_summed) = (self.own(dim, times(&self.kv_heads, size)), self.kv_ranks.len() > 1);
                TensorShare { is_summed, ranks: self.kv_ranks.clone(), ..own }
            }
            Shard::Hidden { dim } => self.own_pieces(dim, self.hidden_pieces(spec.shape[dim])),
            Shard::Vocabulary => self.own(0, self.vocabulary[self.rank]..self.vocabulary[self.rank + 1]),
        }
    }

    /// Returns the ranks of the group that hold the same heads of keys and values as this one.
    #[must_use]
    pub fn kv_ranks(&self) -> Range<usize> {
        self.kv_ranks.clone()
    }

    /// Returns the shape of [`part`](Self::part) of the tensor of `spec`.
    #[must_use]
    pub fn part_shape(&self, spec: &WeightSpec) -> Vec<usize> {
        self.share(spec).cut.map_or_else(|| spec.shape.clone(), |cut| cut.shape(&spec.shape))
    }

    fn own(&self, dim: usize, piece: Range<usize>) -> TensorShare {
        self.own_pieces(dim, Vec::from([piece]))
    }

    fn own_pieces(&self, dim: usize, pieces: Vec<Range<usize>>) -> TensorShare {
        TensorShare { cut: Some(Cut { dim, pieces }), ranks: self.rank..self.rank + 1, is_summed: false }
    }

    /// Returns the ranges of this rank's hidden units in a dim of `len`: one in each of gate and up, if they are
    /// stacked.
    fn hidden_pieces(&self, len: usize) -> Vec<Range<usize>> {
        let Range { start, end } = self.hidden;
        let stacked = (0..len / self.dense_width.max(1)).map(|i| i * self.dense_width);
        stacked.map(|first| first + start..first + end).collect()
    }

    /// Copies this rank's part of the tensor of `spec`; a tensor that is not sharded is shared. Routed experts are
    /// whole.
    #[must_use]
    pub fn part(&self, ctx: &Context, spec: &WeightSpec, whole: &Tensor) -> Tensor {
        self.share(spec).cut.map_or_else(|| whole.clone(), |cut| cut.part(ctx, whole))
    }
}

/// Returns the sizes that are sharded, each of which must be at least the number of ranks; `usize::MAX` if nothing is
/// sharded by one.
fn limits(config: &ModelConfig, table: &WeightTable) -> [(&'static str, usize); 3] {
    let has = |is_cut: fn(Shard) -> bool| table.specs().iter().any(|spec| is_cut(spec.shard));
    let limit = |is_shared_out: bool, len: usize| if is_shared_out { len } else { usize::MAX };
    let by_heads = has(|shard| matches!(shard, Shard::Heads { .. } | Shard::KvHeads { .. }));
    let by_vocabulary = has(|shard| shard == Shard::Vocabulary) && config.vocab_size > 0;
    [
        ("num_heads", limit(by_heads, config.num_heads)),
        ("dense_width", limit(has(|shard| matches!(shard, Shard::Hidden { .. })), config.dense_width)),
        ("vocab_size", limit(by_vocabulary, config.vocab_size)),
    ]
}

/// The heads of a rank.
struct HeadRanges {
    kv_heads: Range<usize>,
    /// The query heads that use them.
    heads: Range<usize>,
    /// The ranks that hold the same keys and values.
    kv_ranks: Range<usize>,
}

impl HeadRanges {
    /// Computes the heads of rank `rank` of `size` in a model of `config`.
    fn new(config: &ModelConfig, rank: usize, size: usize) -> Self {
        let per_kv = config.num_heads / config.num_kv_heads;
        if size <= config.num_kv_heads {
            let kv_heads = even_share(config.num_kv_heads, size, rank);
            return Self { heads: times(&kv_heads, per_kv), kv_heads, kv_ranks: rank..rank + 1 };
        }
        let ranks_of = |kv_head| even_share(size, config.num_kv_heads, kv_head);
        let kv_head = (0..config.num_kv_heads).find(|&kv_head| ranks_of(kv_head).contains(&rank)).unwrap_or(0);
        let kv_ranks = ranks_of(kv_head);
        let own = even_share(per_kv, kv_ranks.len(), rank - kv_ranks.start);
        let heads = kv_head * per_kv + own.start..kv_head * per_kv + own.end;
        Self { kv_heads: kv_head..kv_head + 1, heads, kv_ranks }
    }
}

impl Cut {
    /// Copies the part of `whole`.
    #[must_use]
    pub fn part(&self, ctx: &Context, whole: &Tensor) -> Tensor {
        let mut part = ctx.empty(&self.shape(whole.shape()), whole.dtype());
        let size = whole.dtype().size();
        let to = part.bytes_mut();
        self.each(whole.shape(), size, |from, at| whole.read_bytes(from.start, &mut to[at..at + from.len()]));
        part
    }

    /// Writes the f32 values of a part into `whole`.
    pub fn write_part(&self, part: &[f32], whole: &mut Tensor) {
        let shape = whole.shape().to_vec();
        let to = whole.f32s_mut();
        self.each(&shape, 1, |into, at| to[into.clone()].copy_from_slice(&part[at..at + into.len()]));
    }

    /// Returns the shape of the part of a tensor of `shape`.
    pub(crate) fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape[self.dim] = self.pieces.iter().map(Range::len).sum();
        shape
    }

    /// Returns the number of elements of the part of a tensor of `shape`.
    #[must_use]
    pub fn len(&self, shape: &[usize]) -> usize {
        self.shape(shape).iter().product()
    }

    /// Returns true if the part is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.iter().all(Range::is_empty)
    }

    /// Calls `copy` with each run of the whole tensor, in units of `size` per element, and the run's start in the
    /// part.
    pub(crate) fn each(&self, shape: &[usize], size: usize, mut copy: impl FnMut(Range<usize>, usize)) {
        let inner = shape[self.dim + 1..].iter().product::<usize>() * size;
        let outer: usize = shape[..self.dim].iter().product();
        let mut at = 0;
        for first in (0..outer).map(|index| index * shape[self.dim]) {
            for piece in &self.pieces {
                let run = (first + piece.start) * inner..(first + piece.end) * inner;
                let len = run.len();
                copy(run, at);
                at += len;
            }
        }
    }
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
