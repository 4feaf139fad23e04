//! Hierarchical routing: a tree of clusters above the experts, of which a token opens only the likeliest.
//!
//! A token scores the clusters of the first level and opens the B likeliest (B is the beam). It scores the clusters
//! in these and opens the B likeliest of them, and so on down to the experts in the clusters opened last. An expert's
//! probability is the product along its path, `p(cluster) p(expert | cluster)`, each factor a softmax over siblings,
//! as in the two-level router of Jordan and Jacobs (1994) and in "Breaking the MoE LLM Trilemma" (2510.02345). With G
//! clusters and E experts a token takes `G + B E/G` products of length D, where a flat router takes E.
//!
//! [`TreeScores`] returns logits `[T, E]` whose softmax are these probabilities, so that the other steps of the
//! router work as usual. The probability of a closed cluster is spread evenly over its experts: losses on the
//! distribution then move tokens between clusters, while only experts in open clusters can be chosen. Backward is
//! that of the products of softmaxes; the choice of open clusters has no gradient.

use moeworks_ops::Context;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::deferred::Deferred;
use moeworks_ops::elementwise::{add_assign, sum_of_squares};
use moeworks_ops::grouped_linear::{
    GroupedRows, grouped_linear, grouped_linear_backward_input, grouped_linear_backward_weight,
};
use moeworks_ops::linear::Write;
use moeworks_ops::router_rows::{RowSums, softmax_rows};
use moeworks_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::ConfigError;
use crate::router::blocks::{self, ROWS};
use crate::router::choice;
use crate::router::config::{RouterConfig, ScoreFunction, numbers};
use crate::router::logits::{LogitGrads, NoisyInput, SavedLogits, SchemeLogits};
use crate::router::replay::Replay;
use crate::router::scheme::{Check, RouterOption, RoutingScheme, SchemeDoc, SettingDoc, Sizes, wrong};
use crate::router::score_router::ScoreRouter;
use crate::router::state::{Init, WeightShape};
use crate::{MoeConfig, MoeWeights, Range};

/// The vectors of the clusters, level by level from the top; the experts' vectors are the router's matrix.
const TREE: &str = "tree.weight";

static DOC: SchemeDoc = SchemeDoc {
    settings: &[
        SettingDoc {
            name: "tree",
            default: "\"\"",
            range: Range::Any,
            values: "numbers of at least 2 whose product divides the number of experts",
            comment: "Clusters of hierarchical, then clusters in each of these, and so on, such as \"8\" or \"4, 4\";\n\
                      empty: one level, with about as many clusters as experts in each.",
        },
        SettingDoc {
            name: "tree_beam",
            default: "0",
            range: Range::whole(0..=1 << 20),
            values: "at least as many as leave a token top_k experts",
            comment: "Clusters that a token opens at each level; 0: top_k.",
        },
    ],
    ..SchemeDoc::new(
        "A tree of clusters stands above the experts: a token scores the clusters, opens the likeliest, and takes the K likeliest of \
         the experts in these, by the product of the probabilities along the path. It costs `G + B E/G` products of length D \
         where others cost E.",
        "Jordan and Jacobs, 1994; \"Breaking the MoE LLM Trilemma\", 2510.02345",
    )
};

/// The settings of hierarchical routing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hierarchical {
    /// The number of clusters of the first level, the number of clusters in each of these, and so on, such as "8" or
    /// "4, 4". The experts are divided evenly among the last ones. Empty: one level, with about as many clusters as
    /// experts in each.
    pub tree: String,
    /// B: clusters that a token opens at each level; 0: K.
    #[serde(rename = "tree_beam")]
    pub beam: usize,
}

impl Hierarchical {
    /// Returns the number of children of the root, of each cluster of the first level, and so on down to the experts.
    fn arities(&self, num_experts: usize) -> Result<Vec<usize>, ConfigError> {
        let mut arities: Vec<usize> = numbers("router.tree", &self.tree)?;
        if arities.is_empty() {
            let root = num_experts.isqrt();
            // Takes the largest divisor up to the square root; a prime number of experts gives a flat tree.
            arities.extend((2..=root).rev().find(|&clusters| num_experts.is_multiple_of(clusters)));
        }
        let clusters = arities.iter().try_fold(1_usize, |all, &n| all.checked_mul(n));
        let clusters = clusters.filter(|&n| n > 0 && num_experts.is_multiple_of(n) && arities.iter().all(|&n| n > 1));
        let Some(clusters) = clusters else {
            let expected = format!(
                "must be numbers of at least 2 whose product divides the number of experts, {num_experts}, such as \"4, 2\""
            );
            return Err(ConfigError::new("router.tree", format!("{:?}", self.tree), expected));
        };
        arities.push(num_experts / clusters);
        Ok(arities)
    }

    /// Returns the tree of a layer.
    fn tree_of(&self, config: &MoeConfig) -> Tree {
        self.shape(Sizes { num_experts: config.num_experts, top_k: config.top_k })
    }

    /// Returns the tree over the experts. The settings must be valid, except for the beam.
    fn shape(&self, Sizes { num_experts, top_k }: Sizes) -> Tree {
        let beam = if self.beam == 0 { top_k } else { self.beam };
        Tree { arities: self.arities(num_experts).unwrap_or_else(|_| vec![num_experts]), beam }
    }
}

impl RoutingScheme for Hierarchical {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn check_ranges(&self) -> Check {
        DOC.check("router.tree_beam", &self.beam)
    }

    fn check_settings(&self, sizes: Sizes) -> Check {
        self.arities(sizes.num_experts).map(|_| ())
    }

    fn check(&self, router: &RouterConfig, sizes: Sizes) -> Check {
        if router.scores != ScoreFunction::Softmax {
            return wrong("router.scores", &"sigmoid", "must be softmax with this router.kind");
        }
        if router.noise_std.range().1 > 0.0 {
            return wrong("router.noise_std", &router.noise_std, "must be 0 with this router.kind");
        }
        if router.sparsemixer_jitter > 0.0 {
            return wrong("router.sparsemixer_jitter", &router.sparsemixer_jitter, "must be 0 with this router.kind");
        }
        let (reach, top_k) = (self.shape(sizes).reach(), sizes.top_k);
        if reach < top_k {
            let expected = format!("must leave a token at least top_k = {top_k} experts, but leaves {reach}");
            return wrong("router.tree_beam", &self.beam, expected);
        }
        Ok(())
    }

    fn allows(&self, option: RouterOption) -> bool {
        matches!(option, RouterOption::RandomChoices | RouterOption::Reroute)
    }

    fn weights(&self, config: &MoeConfig) -> Vec<WeightShape> {
        let num_clusters = self.tree_of(config).num_clusters();
        // A prime number of experts has no clusters.
        let clusters = || WeightShape::new(TREE, &[num_clusters, config.width], Init::Normal);
        (num_clusters > 0).then(clusters).into_iter().collect()
    }

    fn num_products(&self, config: &MoeConfig) -> usize {
        self.tree_of(config).products()
    }

    fn passes_all_weights(&self) -> bool {
        false
    }

    fn replay(&self) -> Replay {
        Replay::Refused("a token has scores of the experts in its own clusters alone")
    }

    fn logits(&self, router: &ScoreRouter<'_>, ctx: &Context, x: NoisyInput<'_>) -> SchemeLogits {
        let (values, saved) = TreeScores::forward(ctx, self.tree_of(router.config), router.weights, &x.noisy(ctx));
        SchemeLogits { values, saved: Box::new(saved), noise: None }
    }
}

/// The shape of a tree: the number of children at each level, and the number of nodes that a token opens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tree {
    /// The number of children of the root, of each cluster of the first level, and so on; their product is E.
    arities: Vec<usize>,
    beam: usize,
}

impl Tree {
    /// Returns the number of nodes of a level; level 0 is the children of the root.
    fn nodes(&self, level: usize) -> usize {
        self.arities[..=level].iter().product()
    }

    /// Returns the number of nodes of a level that a token scores.
    fn scored(&self, level: usize) -> usize {
        self.arities[level] * if level == 0 { 1 } else { self.opened(level - 1) }
    }

    /// Returns the number of nodes of a level that a token opens.
    fn opened(&self, level: usize) -> usize {
        self.beam.min(self.scored(level))
    }

    /// Returns the number of experts under a node of a level.
    fn leaves(&self, level: usize) -> usize {
        self.arities[level + 1..].iter().product()
    }

    /// Returns the number of clusters at all levels, each of which has a vector.
    fn num_clusters(&self) -> usize {
        (0..self.arities.len() - 1).map(|level| self.nodes(level)).sum()
    }

    /// Returns the number of products of length D that a token takes.
    fn products(&self) -> usize {
        (0..self.arities.len()).map(|level| self.scored(level)).sum()
    }

    /// Returns the number of experts that a token can choose from.
    fn reach(&self) -> usize {
        self.scored(self.arities.len() - 1)
    }

    /// Returns whether a level's vectors are in the experts' matrix rather than the clusters', and their first row
    /// there.
    fn place(&self, level: usize) -> (bool, usize) {
        let is_last = level + 1 == self.arities.len();
        (is_last, if is_last { 0 } else { (0..level).map(|above| self.nodes(above)).sum() })
    }
}

/// A level of a tree, by its index from the top.
#[derive(Clone, Copy)]
struct LevelOf<'a> {
    tree: &'a Tree,
    index: usize,
}

/// The scores of all tokens at the nodes that they opened.
struct TreeScores {
    tree: Tree,
    levels: Vec<Level>,
}

/// The scored children of the nodes of one level: R rows, each a token at an opened node.
struct Level {
    sorted: SortedChoices,
    /// `[T, opened]`: the opened nodes of each token, ascending.
    parents: Tensor,
    /// `[R, children]`: the softmax over siblings.
    probs: Tensor,
    /// `[R]`: the log-sum-exps.
    lse: Tensor,
    /// The sum of the squared logits.
    squares: f64,
}

impl TreeScores {
    /// Computes the logits `[T, E]` of `x [T, D]` and the state of backward.
    fn forward(ctx: &Context, tree: Tree, weights: &MoeWeights, x: &Tensor) -> (Tensor, Self) {
        let mut logits = ctx.empty(&[x.rows(), tree.nodes(tree.arities.len() - 1)], DType::F32);
        let mut scores = Self { levels: Vec::new(), tree };
        // Every token opens the root.
        let mut parents = ctx.zeros(&[x.rows(), 1], DType::U32);
        for level in 0..scores.tree.arities.len() {
            let at = LevelOf { tree: &scores.tree, index: level };
            let (opened, raw) = Level::score(ctx, at, weights, x, parents);
            parents = opened.spread(ctx, at, &raw, &mut logits);
            scores.levels.push(opened);
        }
        (logits, scores)
    }
}

impl SavedLogits for TreeScores {
    fn has_closed_parts(&self) -> bool {
        true
    }

    /// Sets the experts in closed clusters to negative infinity in `ranking [T, E]`.
    fn close(&self, ctx: &Context, ranking: &mut Tensor) {
        let (Some(last), e) = (self.levels.last(), ranking.cols()) else { return };
        let (width, size) = (last.parents.cols(), last.probs.cols());
        let inputs = blocks::split_mut(ranking.f32s_mut(), e).zip(blocks::split(last.parents.u32s(), width));
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

    /// Returns the sum of the squared logits, scaled from the scored nodes to E experts.
    fn squared_logits(&self, _: &Context, _: &Tensor) -> Deferred<Vec<f64>> {
        let num_experts = self.tree.nodes(self.tree.arities.len() - 1) as f64;
        let squares = self.levels.iter().map(|level| level.squares).sum::<f64>();
        Deferred::now(vec![squares * num_experts / self.tree.products() as f64])
    }

    /// Sums the squared log-sum-exps below the first level; each softmax counts as a router in the z-loss.
    fn lower_lse_squared(&self) -> f64 {
        let below = self.levels.iter().skip(1).filter(|level| level.is_choice());
        below.flat_map(|level| level.lse.f32s()).map(|&lse| f64::from(lse).powi(2)).sum()
    }

    /// Returns the gradient of `x` and the gradients of each level's logits. `dlogits` already includes the z-loss of
    /// the first level.
    fn backward_alone(&self, ctx: &Context, weights: &MoeWeights, grads: LogitGrads<'_>) -> (Tensor, Vec<Tensor>) {
        let (dlogits, z) = (grads.dlogits, 2.0 * grads.z);
        let mut dx: Option<Tensor> = None;
        let mut grads = Vec::with_capacity(self.levels.len());
        for (index, level) in self.levels.iter().enumerate() {
            let at = LevelOf { tree: &self.tree, index };
            let grad = level.logit_grads(ctx, at, dlogits, z);
            let (matrix, groups) = level.groups(at, weights);
            let part = grouped_linear_backward_input(ctx, &grad, matrix, groups);
            match &mut dx {
                Some(dx) => add_assign(ctx, dx, &part),
                None => dx = Some(part),
            }
            grads.push(grad);
        }
        (dx.expect("a tree has a level"), grads)
    }

    fn weight_grads(&self, ctx: &Context, left: &[Tensor], _: &Tensor, x: &Tensor, write: Write, to: &mut MoeWeights) {
        for (index, (level, grad)) in self.levels.iter().zip(left).enumerate() {
            let (is_last, first) = self.tree.place(index);
            let groups = GroupedRows { rows: level.sorted.rows(), first, width: self.tree.arities[index] };
            let matrix = if is_last { &mut to.router } else { to.extra_mut(TREE) };
            grouped_linear_backward_weight(ctx, grad, x, groups, write, matrix);
        }
    }
}

impl Level {
    /// Scores the children of the nodes `parents [T, opened]`. Returns the level and its logits `[R, children]`.
    fn score(ctx: &Context, at: LevelOf<'_>, weights: &MoeWeights, x: &Tensor, parents: Tensor) -> (Self, Tensor) {
        let num_parents = if at.index == 0 { 1 } else { at.tree.nodes(at.index - 1) };
        let sorted = sort_choices(ctx, &parents, &ctx.zeros(parents.shape(), DType::F32), num_parents, None);
        let (probs, lse) = (ctx.empty(&[0], DType::F32), ctx.empty(&[sorted.tokens.len()], DType::F32));
        let mut level = Self { sorted, parents, probs, lse, squares: 0.0 };
        let (matrix, groups) = level.groups(at, weights);
        let raw = grouped_linear(ctx, x, matrix, groups);
        level.squares = sum_of_squares(ctx, &raw);
        level.probs = ctx.empty(raw.shape(), DType::F32);
        let width = raw.cols();
        let outputs = blocks::split_mut(level.probs.f32s_mut(), width).zip(blocks::split_mut(level.lse.f32s_mut(), 1));
        blocks::for_each(ctx, outputs.zip(blocks::split(raw.f32s(), width)), |_, ((probs, lse), raw)| {
            let mut sums = [RowSums::default(); ROWS];
            let sums = &mut sums[..lse.len()];
            softmax_rows(ctx.isa(), raw, probs, sums);
            lse.iter_mut().zip(sums).for_each(|(lse, sums)| *lse = sums.lse);
        });
        (level, raw)
    }

    fn groups<'a>(
        &'a self,
        LevelOf { tree, index }: LevelOf<'_>,
        weights: &'a MoeWeights,
    ) -> (&'a Tensor, GroupedRows<'a>) {
        let (is_last, first) = tree.place(index);
        let groups = GroupedRows { rows: self.sorted.rows(), first, width: tree.arities[index] };
        (if is_last { &weights.router } else { weights.extra(TREE) }, groups)
    }

    /// Returns whether the nodes have several children; a cluster of one expert leaves no choice.
    fn is_choice(&self) -> bool {
        self.probs.cols() > 1
    }

    /// Writes the logits of all experts below the children of the open nodes, each child's probability spread evenly
    /// over its experts. Returns the nodes that each token opens next, ascending.
    ///
    /// The logits of the first level are unchanged, so that with a cluster for each expert they equal those of a flat
    /// router. Below it a child has its parent's logit plus the logarithm of its share.
    fn spread(&self, ctx: &Context, LevelOf { tree, index }: LevelOf<'_>, raw: &Tensor, logits: &mut Tensor) -> Tensor {
        let (e, children, width) = (logits.cols(), raw.cols(), self.parents.cols());
        let (leaves, opened) = (tree.leaves(index), tree.opened(index));
        let mut next = ctx.empty(&[logits.rows(), opened], DType::U32);
        let inputs = blocks::split_mut(logits.f32s_mut(), e).zip(blocks::split_mut(next.u32s_mut(), opened));
        blocks::for_each(ctx, inputs, |block, (logits, next)| {
            let mut scores = Vec::with_capacity(width * children);
            let rows = logits.chunks_mut(e).zip(next.chunks_mut(opened));
            for (t, (logits, next)) in (block * ROWS..).zip(rows) {
                scores.clear();
                let parents = &self.parents.u32s()[t * width..(t + 1) * width];
                for (i, &parent) in parents.iter().enumerate() {
                    let row = self.sorted.token_rows.u32s()[t * width + i] as usize;
                    let first = parent as usize * children;
                    // Undoes the parent's spreading over its experts.
                    let above = logits[first * leaves] + ((children * leaves) as f32).ln();
                    let lse = self.lse.f32s()[row];
                    for (child, raw) in (first..).zip(&raw.f32s()[row * children..(row + 1) * children]) {
                        let score = if index == 0 { *raw } else { above + (raw - lse) };
                        scores.push(score);
                        logits[child * leaves..(child + 1) * leaves].fill(score - (leaves as f32).ln());
                    }
                }
                open(&scores, next);
                // Converts indices of `scores` to nodes.
                next.iter_mut()
                    .for_each(|at| *at = parents[*at as usize / children] * children as u32 + *at % children as u32);
            }
        });
        next
    }

    /// Returns the gradient of the level's logits, `[R, children]`.
    fn logit_grads(&self, ctx: &Context, LevelOf { tree, index }: LevelOf<'_>, dlogits: &Tensor, z: f32) -> Tensor {
        let (e, children, leaves) = (dlogits.cols(), self.probs.cols(), tree.leaves(index));
        let z = if index > 0 && self.is_choice() { z } else { 0.0 };
        let mut grads = ctx.empty(self.probs.shape(), DType::F32);
        let inputs = blocks::split_mut(grads.f32s_mut(), children).zip(blocks::split(self.probs.f32s(), children));
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

/// Writes the indices of the highest `scores`, ascending, or the first ones if a score is not finite.
fn open(scores: &[f32], next: &mut [u32]) {
    if scores.iter().all(|score| score.is_finite()) {
        choice::top_k(scores, next);
        next.sort_unstable();
    } else {
        next.iter_mut().zip(0..).for_each(|(at, i)| *at = i);
    }
}
