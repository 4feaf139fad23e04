//! Which part of each tensor a rank of a tensor-parallel group has (Megatron-LM, Shoeybi et al., 1909.08053, section 3).
//!
//! Matrices that make heads, hidden numbers or logits are cut by rows, those that take heads or hidden numbers up by columns: a block
//! then needs one sum over the group forward and one backward. Heads stay with the keys and values that they look at; where there
//! are more ranks than heads of keys and values, several ranks have the same of these. Numbers that do not divide are shared out
//! with one more for the first ranks.
//!
//! Layers with experts are not cut. There the ranks of a group, which have the same tokens, take a run of them each and are further
//! ranks with experts (MoE parallel folding, Liu et al., 2504.14960; dropped duplicates of tokens, DeepSpeed-TED, 2303.06318): whole
//! experts make larger products than slices of all, and no token is computed twice. Routers and shared experts pass that run alone.

use std::ops::Range;

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::config::{ModelConfig, QkNorm};
use crate::weights::{Shard, WeightSpec, WeightTable};

/// What a rank of a tensor-parallel group has of the tensors of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSplit {
    rank: usize,
    size: usize,
    /// Query heads.
    heads: Range<usize>,
    kv_heads: Range<usize>,
    /// The ranks that have the same heads of keys and values.
    kv_ranks: Range<usize>,
    /// Of the hidden numbers of a dense feed-forward.
    hidden: Range<usize>,
    /// All of them.
    dense_width: usize,
    /// Where each rank's part of the vocabulary begins, and the end of the last.
    vocabulary: Vec<usize>,
    /// Where a norm goes over all heads: how wide queries and keys are in all.
    normed_widths: Option<[usize; 2]>,
}

/// What a rank has of a tensor, and of its gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShare {
    /// None: the whole tensor.
    pub cut: Option<Cut>,
    /// The ranks of the group that have the same.
    pub ranks: Range<usize>,
    /// Whether their gradients add up to that of what they have; otherwise each finds it whole.
    pub is_summed: bool,
}

/// Some of a tensor in one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The dimension.
    pub dim: usize,
    /// The places in it, in the order in which they lie one after another in the part.
    pub pieces: Vec<Range<usize>>,
}

/// The share of `index` of `num` in `len` things: the first have one more where they do not divide.
pub(crate) fn even_share(len: usize, num: usize, index: usize) -> Range<usize> {
    let start = |index: usize| len / num * index + index.min(len % num);
    start(index)..start(index + 1)
}

fn times(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start * size..range.end * size
}

impl TensorSplit {
    /// The part of rank `rank` of `size` in the weights of `table`, of a model of `config`. Fails where there are more ranks than things to
    /// share out.
    pub fn new(config: &ModelConfig, table: &WeightTable, (rank, size): (usize, usize)) -> Result<Self, ConfigError> {
        Self::check(config, table, size)?;
        let (kv_heads, heads, kv_ranks) = heads_of(config, (rank, size));
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

    /// Fails where a model of `config` has less of something than `size` ranks: the error names it. A vocabulary that is not set yet
    /// is not looked at.
    pub fn check(config: &ModelConfig, table: &WeightTable, size: usize) -> Result<(), ConfigError> {
        match limits(config, table).into_iter().find(|(_, len)| *len < size) {
            Some((name, len)) => Err(ConfigError::new(name, len, format!("must be at least parallel.tp, {size}"))),
            None => Ok(()),
        }
    }

    /// The most ranks that a model of `config` can be cut across.
    #[must_use]
    pub fn most(config: &ModelConfig, table: &WeightTable) -> usize {
        limits(config, table).into_iter().map(|(_, len)| len).fold(usize::MAX, usize::min)
    }

    /// Query heads here, and heads of keys and values.
    pub(crate) fn num_heads(&self) -> (usize, usize) {
        (self.heads.len(), self.kv_heads.len())
    }

    /// Where each rank's part of the vocabulary begins, and the end of the last.
    pub(crate) fn vocabulary(&self) -> &[usize] {
        &self.vocabulary
    }

    /// Where a norm goes over all heads: how wide queries and keys are in all.
    pub(crate) fn normed_widths(&self) -> Option<[usize; 2]> {
        self.normed_widths
    }

    /// Whether no rank before this one has the same heads of keys and values.
    pub(crate) fn is_first_with_keys(&self) -> bool {
        self.kv_ranks.start == self.rank
    }

    /// This rank's number in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// The tokens, of `num_sequences` sequences of `seq_len`, that a rank of the group takes through layers with experts: whole
    /// sequences where losses look at these.
    #[must_use]
    pub fn run_of(&self, rank: usize, (num_sequences, seq_len): (usize, usize), are_whole: bool) -> Range<usize> {
        if are_whole {
            return times(&even_share(num_sequences, self.size, rank), seq_len);
        }
        even_share(num_sequences * seq_len, self.size, rank)
    }

    /// The share that this rank has of the tensor of `spec`. Of routed experts a placement says more.
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

    /// The ranks of the group that have the same heads of keys and values as this one.
    #[must_use]
    pub fn kv_ranks(&self) -> Range<usize> {
        self.kv_ranks.clone()
    }

    /// The shape of [`part`](Self::part) of the tensor of `spec`.
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

    /// This rank's hidden numbers in a dimension of `len`: where gate and up are stacked, in each of the two.
    fn hidden_pieces(&self, len: usize) -> Vec<Range<usize>> {
        let Range { start, end } = self.hidden;
        let stacked = (0..len / self.dense_width.max(1)).map(|i| i * self.dense_width);
        stacked.map(|first| first + start..first + end).collect()
    }

    /// This rank's part of the tensor of `spec`, in memory of its own where it is cut. Of routed experts it is all of them.
    #[must_use]
    pub fn part(&self, ctx: &Context, spec: &WeightSpec, whole: &Tensor) -> Tensor {
        self.share(spec).cut.map_or_else(|| whole.clone(), |cut| cut.part(ctx, whole))
    }
}

/// The sizes that are shared out, each at least one for every rank; those that nothing is cut by are without end.
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

/// Heads of keys and values, the query heads that look at them, and the ranks that have the same of the former.
fn heads_of(config: &ModelConfig, (rank, size): (usize, usize)) -> (Range<usize>, Range<usize>, Range<usize>) {
    let per_kv = config.num_heads / config.num_kv_heads;
    if size <= config.num_kv_heads {
        let kv_heads = even_share(config.num_kv_heads, size, rank);
        return (kv_heads.clone(), times(&kv_heads, per_kv), rank..rank + 1);
    }
    let ranks_of = |kv_head| even_share(size, config.num_kv_heads, kv_head);
    let kv_head = (0..config.num_kv_heads).find(|&kv_head| ranks_of(kv_head).contains(&rank)).unwrap_or(0);
    let ranks = ranks_of(kv_head);
    let own = even_share(per_kv, ranks.len(), rank - ranks.start);
    let heads = kv_head * per_kv + own.start..kv_head * per_kv + own.end;
    (kv_head..kv_head + 1, heads, ranks)
}

impl Cut {
    /// What is cut out of `whole`.
    #[must_use]
    pub fn part(&self, ctx: &Context, whole: &Tensor) -> Tensor {
        let mut part = ctx.empty(&self.shape(whole.shape()), whole.dtype());
        let size = whole.dtype().size();
        let to = part.bytes_mut();
        self.each(whole.shape(), size, |from, at| whole.read_bytes(from.start, &mut to[at..at + from.len()]));
        part
    }

    /// Puts the values of a part, f32, into `whole`.
    pub fn put(&self, part: &[f32], whole: &mut Tensor) {
        let shape = whole.shape().to_vec();
        let to = whole.f32s_mut();
        self.each(&shape, 1, |into, at| to[into.clone()].copy_from_slice(&part[at..at + into.len()]));
    }

    /// The shape of the part of a tensor of `shape`.
    pub(crate) fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        shape[self.dim] = self.pieces.iter().map(Range::len).sum();
        shape
    }

    /// How many elements the part of a tensor of `shape` has.
    #[must_use]
    pub fn len(&self, shape: &[usize]) -> usize {
        self.shape(shape).iter().product()
    }

    /// Whether nothing is cut out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.iter().all(Range::is_empty)
    }

    /// Calls `copy` with each run of the whole, of elements of `size`, and where it begins in the part.
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
