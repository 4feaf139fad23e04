//! Hierarchical routing: a tree of clusters above the experts, of which a token opens only the likeliest.
//!
//! A token scores the clusters of the first level and opens the B likeliest (B is the beam); it scores the clusters in these
//! and opens the B likeliest of them, and so on down to the experts in the clusters that are open last. An expert's
//! probability is the product along its way, `p(cluster) p(expert | cluster)`, each factor a softmax over siblings, as in
//! the two-level router of Jordan and Jacobs (1994) and of "Breaking the MoE LLM Trilemma" (2510.02345). With G clusters
//! and E experts a token takes `G + B E/G` products of length D where a flat router takes E.
//!
//! The routers that score every expert take it from here: [`TreeScores`] gives logits `[T, E]` whose softmax are those
//! probabilities. What a closed cluster has is spread evenly over its experts: the losses on the distribution then move
//! tokens between clusters, and only experts in open clusters can be chosen. Backward is that of the products of softmaxes;
//! which clusters are open has no gradient.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::elementwise::{add_assign, sum_of_squares};
use moeworks_ops::grouped_linear::{
    GroupedRows, grouped_linear, grouped_linear_backward_input, grouped_linear_backward_weight,
};
use moeworks_ops::linear::Write;
use moeworks_ops::router_rows::{RowSums, softmax_rows};
use moeworks_tensor::{DType, Tensor};

use super::blocks::{self, ROWS};
use super::choice;
use super::config::RouterConfig;
use crate::{MoeConfig, MoeWeights};

/// The vectors of the clusters, level by level from the top; those of the experts are the router's matrix.
pub(crate) const TREE: &str = "tree.weight";

/// The shape of a tree: how many children the nodes of each level have, and how many are opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    /// Children of the root, of each cluster of the first level, and so on; their product is E.
    arities: Vec<usize>,
    beam: usize,
}

impl Tree {
    /// The tree of `config`.
    pub(crate) fn of(config: &MoeConfig) -> Self {
        Self::new(&config.router, config.num_experts, config.top_k)
    }

    /// The tree of a router that is valid up to its beam.
    pub(crate) fn new(router: &RouterConfig, num_experts: usize, top_k: usize) -> Self {
        let beam = if router.tree_beam == 0 { top_k } else { router.tree_beam };
        let arities = router.tree_arities(num_experts).unwrap_or_else(|_| vec![num_experts]);
        Self { arities, beam }
    }

    /// Nodes of a level; level 0 is the children of the root.
    fn nodes(&self, level: usize) -> usize {
        self.arities[..=level].iter().product()
    }

    /// Nodes of a level that a token scores.
    fn scored(&self, level: usize) -> usize {
        self.arities[level] * if level == 0 { 1 } else { self.opened(level - 1) }
    }

    /// Nodes of a level that a token opens.
    fn opened(&self, level: usize) -> usize {
        self.beam.min(self.scored(level))
    }

    /// Experts under a node of a level.
    fn leaves(&self, level: usize) -> usize {
        self.arities[level + 1..].iter().product()
    }

    /// Vectors of clusters.
    pub(crate) fn num_clusters(&self) -> usize {
        (0..self.arities.len() - 1).map(|level| self.nodes(level)).sum()
    }

    /// Products of length D that a token takes.
    pub(crate) fn products(&self) -> usize {
        (0..self.arities.len()).map(|level| self.scored(level)).sum()
    }

    /// Experts that a token can choose from.
    pub(crate) fn reach(&self) -> usize {
        self.scored(self.arities.len() - 1)
    }

    /// Where a level's vectors are: in the matrix of the experts or in that of the clusters, from which row on.
    fn place(&self, level: usize) -> (bool, usize) {
        let is_last = level + 1 == self.arities.len();
        (is_last, if is_last { 0 } else { (0..level).map(|above| self.nodes(above)).sum() })
    }
}

/// The scores of all tokens at the nodes that they opened.
pub(crate) struct TreeScores {
    tree: Tree,
    levels: Vec<Level>,
}

/// The children of the nodes of one level that tokens opened: R rows, each a token at a node.
struct Level {
    sorted: SortedChoices,
    /// `[T, opened]`: the nodes of each token, in rising order.
    parents: Tensor,
    /// `[R, children]`: softmax over siblings.
    probs: Tensor,
    /// `[R]`: logarithm of the sum of exponentials.
    lse: Tensor,
    /// The sum of the squared logits.
    squares: f64,
}

/// The gradients of the logits of each level, for the gradients of the weights.
pub(crate) struct TreeGrads(Vec<Tensor>);

impl TreeScores {
    /// The logits `[T, E]` of `x [T, D]`, and what backward needs.
    pub(crate) fn forward(ctx: &Context, config: &MoeConfig, weights: &MoeWeights, x: &Tensor) -> (Tensor, Self) {
        let tree = Tree::of(config);
        let mut logits = ctx.empty(&[x.rows(), config.num_experts], DType::F32);
        let mut scores = Self { levels: Vec::new(), tree };
        // The root is open to all.
        let mut parents = ctx.zeros(&[x.rows(), 1], DType::U32);
        for level in 0..scores.tree.arities.len() {
            let (opened, raw) = Level::score(ctx, (&scores.tree, level), weights, x, parents);
            parents = opened.spread(ctx, (&scores.tree, level), &raw, &mut logits);
            scores.levels.push(opened);
        }
        (logits, scores)
    }

    /// Puts the experts in closed clusters out of reach of the tokens of `ranking [T, E]`.
    pub(crate) fn close(&self, ctx: &Context, ranking: &mut Tensor) {
        let (Some(last), e) = (self.levels.last(), ranking.cols()) else { return };
        let (width, size) = (last.parents.cols(), last.probs.cols());
        let inputs = blocks::of_mut(ranking.f32s_mut(), e).zip(blocks::of(last.parents.u32s(), width));
        blocks::for_each(ctx, inputs, |_, (ranking, parents)| {
            for (ranking, parents) in ranking.chunks_mut(e).zip(parents.chunks(width)) {
                let mut closed = 0;
                for &parent in parents {
                    let open = parent as usize * size;
                    ranking[closed..open].fill(f32::NEG_INFINITY);
                    closed = open + size;
                }
                ranking[closed..].fill(f32::NEG_INFINITY);
            }
        });
    }

    /// The sum of the squared logits, per expert as if each had one.
    pub(crate) fn squared_logits(&self) -> f64 {
        let num_experts = self.tree.nodes(self.tree.arities.len() - 1) as f64;
        self.levels.iter().map(|level| level.squares).sum::<f64>() * num_experts / self.tree.products() as f64
    }

    /// The sum of the squared log-sum-exps below the first level, each softmax being a router of its own to the z-loss.
    pub(crate) fn lower_lse_squared(&self) -> f64 {
        let below = self.levels.iter().skip(1).filter(|level| level.is_choice());
        below.flat_map(|level| level.lse.f32s()).map(|&lse| f64::from(lse).powi(2)).sum()
    }

    /// The gradient of `x` and those of each level's logits, from `dlogits [T, E]`; `z` is the gradient of the squared
    /// log-sum-exp of each softmax below the first level, whose own is in `dlogits`.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        dlogits: &Tensor,
        z: f32,
    ) -> (Tensor, TreeGrads) {
        let mut dx: Option<Tensor> = None;
        let mut grads = Vec::with_capacity(self.levels.len());
        for (index, level) in self.levels.iter().enumerate() {
            let grad = level.logit_grads(ctx, (&self.tree, index), dlogits, z);
            let (matrix, groups) = level.groups((&self.tree, index), weights);
            let part = grouped_linear_backward_input(ctx, &grad, matrix, groups);
            match &mut dx {
                Some(dx) => add_assign(ctx, dx, &part),
                None => dx = Some(part),
            }
            grads.push(grad);
        }
        (dx.expect("a tree has a level"), TreeGrads(grads))
    }

    /// Writes or adds the gradients of the weights; `x` is what forward saw.
    pub(crate) fn run(&self, ctx: &Context, grads: TreeGrads, x: &Tensor, write: Write, to: &mut MoeWeights) {
        for (index, (level, grad)) in self.levels.iter().zip(grads.0).enumerate() {
            let (is_last, first) = self.tree.place(index);
            let groups = GroupedRows { rows: level.sorted.rows(), first, width: self.tree.arities[index] };
            let matrix = if is_last { &mut to.router } else { to.extra_mut(TREE) };
            grouped_linear_backward_weight(ctx, &grad, x, groups, write, matrix);
        }
    }
}

impl Level {
    /// Scores the children of the nodes `parents [T, opened]`; beside it their logits `[R, children]`.
    fn score(
        ctx: &Context,
        (tree, index): (&Tree, usize),
        weights: &MoeWeights,
        x: &Tensor,
        parents: Tensor,
    ) -> (Self, Tensor) {
        let num_parents = if index == 0 { 1 } else { tree.nodes(index - 1) };
        let sorted = sort_choices(ctx, &parents, &ctx.zeros(parents.shape(), DType::F32), num_parents, None);
        let (probs, lse) = (ctx.empty(&[0], DType::F32), ctx.empty(&[sorted.tokens.len()], DType::F32));
        let mut level = Self { sorted, parents, probs, lse, squares: 0.0 };
        let (matrix, groups) = level.groups((tree, index), weights);
        let raw = grouped_linear(ctx, x, matrix, groups);
        level.squares = sum_of_squares(ctx, &raw);
        level.probs = ctx.empty(raw.shape(), DType::F32);
        let width = raw.cols();
        let outputs = blocks::of_mut(level.probs.f32s_mut(), width).zip(blocks::of_mut(level.lse.f32s_mut(), 1));
        blocks::for_each(ctx, outputs.zip(blocks::of(raw.f32s(), width)), |_, ((probs, lse), raw)| {
            let mut sums = [RowSums::default(); ROWS];
            let sums = &mut sums[..lse.len()];
            softmax_rows(ctx.isa(), raw, probs, sums);
            lse.iter_mut().zip(sums).for_each(|(lse, sums)| *lse = sums.lse);
        });
        (level, raw)
    }

    fn groups<'a>(&'a self, (tree, index): (&Tree, usize), weights: &'a MoeWeights) -> (&'a Tensor, GroupedRows<'a>) {
        let (is_last, first) = tree.place(index);
        let groups = GroupedRows { rows: self.sorted.rows(), first, width: tree.arities[index] };
        (if is_last { &weights.router } else { weights.extra(TREE) }, groups)
    }

    /// Whether there is something to choose: a cluster of one expert is that expert.
    fn is_choice(&self) -> bool {
        self.probs.cols() > 1
    }

    /// Writes the logits of all experts below the children of the open nodes, a child's spread evenly over its own, and
    /// gives the nodes that each token opens next, in rising order.
    ///
    /// The logits of the first level stay as they are, so that with a cluster for each expert they are those of a flat router; a child
    /// below has its parent's plus its share of it.
    fn spread(&self, ctx: &Context, (tree, index): (&Tree, usize), raw: &Tensor, logits: &mut Tensor) -> Tensor {
        let (e, children, width) = (logits.cols(), raw.cols(), self.parents.cols());
        let (leaves, opened) = (tree.leaves(index), tree.opened(index));
        let mut next = ctx.empty(&[logits.rows(), opened], DType::U32);
        let inputs = blocks::of_mut(logits.f32s_mut(), e).zip(blocks::of_mut(next.u32s_mut(), opened));
        blocks::for_each(ctx, inputs, |block, (logits, next)| {
            let mut scores = Vec::with_capacity(width * children);
            let rows = logits.chunks_mut(e).zip(next.chunks_mut(opened));
            for (t, (logits, next)) in (block * ROWS..).zip(rows) {
                scores.clear();
                let parents = &self.parents.u32s()[t * width..(t + 1) * width];
                for (i, &parent) in parents.iter().enumerate() {
                    let row = self.sorted.token_rows.u32s()[t * width + i] as usize;
                    let first = parent as usize * children;
                    // What the parent spread over its experts, together.
                    let above = logits[first * leaves] + ((children * leaves) as f32).ln();
                    let lse = self.lse.f32s()[row];
                    for (child, raw) in (first..).zip(&raw.f32s()[row * children..(row + 1) * children]) {
                        let score = if index == 0 { *raw } else { above + (raw - lse) };
                        scores.push(score);
                        logits[child * leaves..(child + 1) * leaves].fill(score - (leaves as f32).ln());
                    }
                }
                open(&scores, next);
                // A place in the list becomes a node.
                next.iter_mut()
                    .for_each(|at| *at = parents[*at as usize / children] * children as u32 + *at % children as u32);
            }
        });
        next
    }

    /// The gradient of the logits `[R, children]`.
    fn logit_grads(&self, ctx: &Context, (tree, index): (&Tree, usize), dlogits: &Tensor, z: f32) -> Tensor {
        let (e, children, leaves) = (dlogits.cols(), self.probs.cols(), tree.leaves(index));
        let z = if index > 0 && self.is_choice() { z } else { 0.0 };
        let mut grads = ctx.empty(self.probs.shape(), DType::F32);
        let inputs = blocks::of_mut(grads.f32s_mut(), children).zip(blocks::of(self.probs.f32s(), children));
        blocks::for_each(ctx, inputs, |block, (grads, probs)| {
            for (row, (grads, probs)) in (block * ROWS..).zip(grads.chunks_mut(children).zip(probs.chunks(children))) {
                let token = self.sorted.tokens.u32s()[row] as usize;
                let parent = self.sorted.offsets.u32s().partition_point(|&offset| offset as usize <= row) - 1;
                let below = &dlogits.f32s()[token * e + parent * children * leaves..][..children * leaves];
                for (grad, below) in grads.iter_mut().zip(below.chunks(leaves)) {
                    *grad = below.iter().sum();
                }
                if index > 0 {
                    let total: f32 = grads.iter().sum();
                    let lse = self.lse.f32s()[row];
                    grads.iter_mut().zip(probs).for_each(|(grad, p)| *grad += p * (z * lse - total));
                }
            }
        });
        grads
    }
}

/// The places of the highest `scores`, in rising order; the first ones where a score is not finite.
fn open(scores: &[f32], next: &mut [u32]) {
    if scores.iter().all(|score| score.is_finite()) {
        choice::top_k(scores, next);
        next.sort_unstable();
    } else {
        next.iter_mut().zip(0..).for_each(|(at, i)| *at = i);
    }
}
