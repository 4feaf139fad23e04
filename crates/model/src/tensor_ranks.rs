//! The ranks of a tensor-parallel group: what they sum and put together in a pass. They pass the same tokens.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use moeworks_comm::{Communicator, Reduce};
use moeworks_moe::{ConfigError, ExpertIds, ExpertRanks, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::elementwise;
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::head_loss::VocabularyPart;
use moeworks_ops::linear::Write;
use moeworks_ops::rms_norm::{rms_norm_part, rms_norm_part_backward, row_products};
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::layers::Pass;
use crate::split::TensorSplit;
use crate::weights::WeightTable;

/// One rank's part in a tensor-parallel group. Cloning shares it.
///
/// Where a communication fails, the rest of the pass communicates no more: [`ExpertRanks::failure`] of
/// [`experts`](Self::experts) says what happened.
#[derive(Clone)]
pub struct TensorRanks {
    inner: Arc<Inner>,
}

struct Inner {
    group: Arc<dyn Communicator>,
    split: TensorSplit,
    experts: ExpertRanks,
}

impl TensorRanks {
    /// `group` are the ranks with the same tokens, which hold the matrices of `table`, of a model of `config`, between them; `experts` is this
    /// rank's part in layers with experts, in which each of `group` has tokens of its own. Fails where there are more ranks than
    /// things to share out.
    pub fn new(
        config: &ModelConfig,
        table: &WeightTable,
        group: Arc<dyn Communicator>,
        experts: ExpertRanks,
    ) -> Result<Self, ConfigError> {
        let split = TensorSplit::new(config, table, (group.rank(), group.size()))?;
        Ok(Self { inner: Arc::new(Inner { group, split, experts }) })
    }

    /// What this rank has of each tensor.
    #[must_use]
    pub fn split(&self) -> &TensorSplit {
        &self.inner.split
    }

    /// The ranks that hold the matrices between them.
    #[must_use]
    pub fn group(&self) -> &dyn Communicator {
        &*self.inner.group
    }

    /// This rank's part in layers with experts.
    #[must_use]
    pub fn experts(&self) -> &ExpertRanks {
        &self.inner.experts
    }

    /// Sums `x`, f32, over the group: all ranks get the same bits.
    pub(crate) fn sum(&self, x: &mut Tensor) {
        let experts = self.experts();
        let sum = || self.group().all_reduce(x.f32s_mut(), Reduce::Sum);
        experts.time("tensor parallel: sum", || experts.attempt((), sum));
    }

    /// As [`sum`](Self::sum), and then adds the bias, which all ranks have whole, to each row.
    pub(crate) fn sum_biased(&self, ctx: &Context, x: &mut Tensor, bias: Option<&Tensor>) {
        self.sum(x);
        if let Some(bias) = bias {
            elementwise::add_rows(ctx, x, bias);
        }
    }

    /// Norms rows of which each rank has a part, `width` wide in all (a norm over the heads of all ranks): `y` and 1/rms. Of a part that
    /// is on several ranks the first alone is `counted`.
    pub(crate) fn norm_part(
        &self,
        ctx: &Context,
        (x, weight): (&Tensor, &Tensor),
        (width, is_counted): (usize, bool),
        (eps, out): (f32, DType),
    ) -> (Tensor, Tensor) {
        let mut sums = row_products(ctx, (x, x), weight.len(), None);
        if !is_counted {
            sums.f32s_mut().fill(0.0);
        }
        self.sum(&mut sums);
        let inv_rms = |sum: &mut f32| *sum = 1.0 / (*sum / width as f32 + eps).sqrt();
        sums.f32s_mut().iter_mut().for_each(inv_rms);
        (rms_norm_part(ctx, x, weight, &sums, out), sums)
    }

    /// The gradient of `x` from `dy`, that of what [`norm_part`](Self::norm_part) made of it with the same `inv_rms`; where several ranks
    /// have the part, theirs add up. That of the weight is written as `write` says.
    pub(crate) fn norm_part_backward(
        &self,
        ctx: &Context,
        dy: &Tensor,
        (x, weight, inv_rms): (&Tensor, &Tensor, &Tensor),
        (width, is_counted): (usize, bool),
        (write, d_weight): (Write, &mut Tensor),
    ) -> Tensor {
        let mut means = row_products(ctx, (dy, x), weight.len(), Some(weight));
        self.sum(&mut means);
        let factor = if is_counted { 1.0 / width as f32 } else { 0.0 };
        elementwise::scale_assign(ctx, &mut means, factor);
        rms_norm_part_backward(ctx, dy, (x, weight), (inv_rms, &means), write, d_weight)
    }

    /// The rows `[T, D]` f32 of all ranks, each of which has those of its run of tokens, `run` on this one.
    fn gather(&self, ctx: &Context, rows: &Tensor, counts: &[usize]) -> Tensor {
        let experts = self.experts();
        let mut all = ctx.zeros(&[counts.iter().sum::<usize>(), rows.cols()], DType::F32);
        let counts: Vec<usize> = counts.iter().map(|count| count * rows.cols()).collect();
        let gather = || self.group().all_gather_v(rows.f32s(), all.f32s_mut(), &counts);
        experts.time("tensor parallel: gather", || experts.attempt((), gather));
        all
    }

    /// The embeddings `[T, D]` f32 of `ids` in a table of which the rows of this rank's part of the vocabulary are here.
    pub(crate) fn embed(&self, ctx: &Context, ids: &[u32], table: &Tensor) -> Tensor {
        let (own, places) = self.own_ids(ids);
        let rows = embedding(ctx, &own, table, DType::F32);
        let mut x = ctx.zeros(&[ids.len(), table.cols()], DType::F32);
        let width = table.cols();
        for (row, place) in rows.f32s().chunks_exact(width).zip(places) {
            x.f32s_mut()[place * width..(place + 1) * width].copy_from_slice(row);
        }
        self.sum(&mut x);
        x
    }

    /// Adds rows of `dx` `[T, D]` f32 to the gradients of the rows of the table that are here.
    pub(crate) fn embed_backward(&self, ctx: &Context, ids: &[u32], dx: &Tensor, d_table: &mut Tensor) {
        let (own, places) = self.own_ids(ids);
        let width = dx.cols();
        let mut rows = ctx.empty(&[own.len(), width], DType::F32);
        for (row, place) in rows.f32s_mut().chunks_exact_mut(width).zip(places) {
            row.copy_from_slice(&dx.f32s()[place * width..(place + 1) * width]);
        }
        embedding_backward(ctx, &own, &rows, d_table);
    }

    /// Those of `ids` that are in this rank's part of the vocabulary, counted from its start, and where they are.
    fn own_ids(&self, ids: &[u32]) -> (Vec<u32>, Vec<usize>) {
        let starts = self.split().vocabulary();
        let own = starts[self.split().rank()] as u32..starts[self.split().rank() + 1] as u32;
        ids.iter().zip(0..).filter(|(id, _)| own.contains(id)).map(|(id, place)| (id - own.start, place)).unzip()
    }

    /// The logits `[T, V]` f32 of the whole vocabulary from those `own` `[T, ..]` of this rank's part.
    pub(crate) fn whole_logits(&self, ctx: &Context, own: &Tensor) -> Tensor {
        let (num_tokens, starts) = (own.rows(), self.split().vocabulary());
        let vocab_size = starts[self.split().size()];
        let counts: Vec<usize> = starts.windows(2).map(|part| (part[1] - part[0]) * num_tokens).collect();
        let (experts, mut parts) = (self.experts(), vec![0.0; vocab_size * num_tokens]);
        let gather = || self.group().all_gather_v(own.f32s(), &mut parts, &counts);
        experts.time("tensor parallel: gather", || experts.attempt((), gather));
        let mut whole = ctx.empty(&[num_tokens, vocab_size], DType::F32);
        for part in starts.windows(2) {
            let (rows, width) = (&parts[part[0] * num_tokens..part[1] * num_tokens], part[1] - part[0]);
            for (row, into) in rows.chunks_exact(width).zip(whole.f32s_mut().chunks_exact_mut(vocab_size)) {
                into[part[0]..part[1]].copy_from_slice(row);
            }
        }
        whole
    }

    /// Lets `head` use this rank's part of the vocabulary.
    pub(crate) fn with_vocabulary<R>(&self, head: impl FnOnce(&mut VocabularyPart<'_>) -> R) -> R {
        let experts = self.experts();
        let mut gather = |own: &[f32]| {
            let mut all = vec![0.0; own.len() * self.split().size()];
            let gather = || self.group().all_gather(own, &mut all);
            experts.time("tensor parallel: softmax", || experts.attempt((), gather));
            all
        };
        head(&mut VocabularyPart { starts: self.split().vocabulary(), rank: self.split().rank(), gather: &mut gather })
    }
}

impl fmt::Debug for TensorRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.split().rank(), self.split().size())
    }
}

/// The tokens of a pass that this rank takes through a layer with experts.
pub(crate) struct Run<'a> {
    ranks: &'a TensorRanks,
    /// Tokens of each rank of the group.
    counts: Vec<usize>,
    own: Range<usize>,
}

impl<'a> Run<'a> {
    /// That of `pass`, whole sequences or not; none where the ranks of no group have the same tokens.
    pub(crate) fn of(pass: &Pass<'a>, are_whole: bool) -> Option<Self> {
        let ranks = pass.tensor?;
        let split = ranks.split();
        let run = |rank| split.run_of(rank, (pass.sequences.count, pass.sequences.len), are_whole);
        Some(Self { ranks, counts: (0..split.size()).map(|rank| run(rank).len()).collect(), own: run(split.rank()) })
    }

    /// The rows of `x` `[T, D]` of these tokens.
    pub(crate) fn of_rows(&self, ctx: &Context, x: &Tensor) -> Tensor {
        let row_bytes = x.cols() * x.dtype().size();
        let mut rows = ctx.empty(&[self.own.len(), x.cols()], x.dtype());
        rows.bytes_mut().copy_from_slice(&x.bytes()[self.own.start * row_bytes..self.own.end * row_bytes]);
        rows
    }

    /// The expert ids of these tokens out of those of the whole pass.
    pub(crate) fn of_expert_ids(&self, ctx: &Context, ids: &ExpertIds) -> ExpertIds {
        ids.rows(ctx, self.own.clone())
    }

    /// What a router looks at besides its input, for these tokens. Logits of the layer before are those of these tokens already.
    pub(crate) fn of_input<'b>(&self, input: &RouterInput<'b>) -> RouterInput<'b> {
        let token_ids = if input.token_ids.is_empty() { &[] } else { &input.token_ids[self.own.clone()] };
        RouterInput { token_ids, first_token: input.first_token + self.own.start, ..*input }
    }

    /// `[T, D]` f32 of all tokens from the rows of these.
    pub(crate) fn whole(&self, ctx: &Context, rows: &Tensor) -> Tensor {
        self.ranks.gather(ctx, rows, &self.counts)
    }
}
