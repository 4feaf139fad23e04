//! Shadowed experts: experts whose weights move to the tokens. For one pass every rank fetches their weights and
//! computes its own tokens; their gradients are summed on the owners (adaptive parallelism, Tutel 2206.03382, section
//! 3.1; shadowing of popular experts, FasterMoE, PPoPP 2022, section 4.2). Fetching no expert is expert parallelism,
//! fetching all of them data parallelism. The choice is made for each layer and step from the routing's counts.

use moeworks_comm::CommError;
use moeworks_ops::counting_sort::{SortedChoices, sort_choices};
use moeworks_ops::experts::{
    ExpertBiases, ExpertGrads, ExpertWeights, ExpertsSaved, ForwardOptions, NO_ROW, WeightGradInputs,
    add_bias_row_weight_grads, choice_weight_grads, experts_backward, experts_bias_grad, experts_forward_with,
    experts_weight_grad,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_plan::{Exchange, LayerLoad, Links, MoveCosts, Moving, Wire, experts_to_fetch};
use moeworks_tensor::{DType, Tensor};

use super::{ExpertsInput, LayerRanks};
use crate::{Dispatch, MoeWeights, NO_EXPERT, is_left_out};

/// S experts fetched for a pass, and this rank's tokens for them.
pub(crate) struct Shadows {
    ranks: LayerRanks,
    /// The S experts, ordered by owner.
    experts: Vec<usize>,
    /// `[S, ..]`
    gate_up: Tensor,
    down: Tensor,
    biases: Option<(Tensor, Tensor)>,
    activation: Activation,
    rows: SortedChoices,
}

/// Fetched experts and the saved state of their forward pass.
pub(crate) struct ShadowsSaved {
    shadows: Shadows,
    saved: ExpertsSaved,
}

/// The result of backward through the fetched experts for this rank's tokens.
pub(crate) struct ShadowsBackward {
    /// `[T, D]`
    pub(crate) dx: Tensor,
    /// `[T K]`
    pub(crate) dweights: Tensor,
    pub(crate) task: ShadowTask,
}

/// The state that the weights' gradients need from backward.
pub(crate) struct ShadowTask {
    dh: Tensor,
    weighed: Option<Tensor>,
}

/// Chooses the experts to fetch for a pass, in the order of their owners. All ranks of the group make this call and
/// get the same result.
pub(crate) fn choose(ranks: &LayerRanks, input: &ExpertsInput<'_>) -> Vec<usize> {
    let ExpertsInput { x, dispatch, .. } = *input;
    let placement = ranks.placement();
    let is_everywhere = |expert: &usize| placement.ranks_of(*expert).len() == placement.num_ranks();
    let mut chosen: Vec<usize> = match ranks.moving() {
        Moving::Tokens => Vec::new(),
        Moving::Weights => (0..placement.num_experts()).filter(|expert| !is_everywhere(expert)).collect(),
        Moving::Cheapest { links, flops } => {
            let own: Vec<u32> = dispatch.rows_per_expert().chain([x.rows() as u32]).collect();
            let mut all = vec![0; own.len() * placement.num_ranks()];
            ranks.attempt((), || ranks.group().all_gather(&own, &mut all));
            let of_ranks = all.chunks(own.len()).filter_map(<[u32]>::split_last);
            let (tokens, rows): (Vec<u32>, Vec<Vec<u32>>) = of_ranks.map(|(&num, rows)| (num, rows.to_vec())).unzip();
            let load = LayerLoad { nodes: ranks.hierarchy().nodes(), placement, tokens: &tokens, rows: &rows };
            experts_to_fetch(&load, &costs(ranks, input, links, flops))
        }
    };
    chosen.sort_by_key(|&expert| (placement.ranks_of(expert)[0], expert));
    chosen
}

/// Returns the costs that the choice weighs, over `links` between ranks of `flops` floating-point operations a
/// second.
fn costs(ranks: &LayerRanks, input: &ExpertsInput<'_>, links: Links, flops: f64) -> MoveCosts {
    let ExpertsInput { weights, x, .. } = *input;
    let &Exchange { algorithm, wire, .. } = ranks.exchange();
    let bytes = |wire: Wire| wire.row_bytes(x.cols()) as f64;
    let params = weights.expert_params() as f64;
    MoveCosts {
        algorithm,
        links,
        // Of the four transfers of a pass only forward's dispatch has `wire`'s format; the others have that of sums.
        row_bytes: (bytes(wire) + 3.0 * bytes(wire.of_sums())) / 4.0,
        expert_bytes: [params * weights.gate_up.dtype().size() as f64, 4.0 * params],
        // One GEMM forward and two backward, of two operations for each parameter.
        row_compute_s: 6.0 * params / flops,
    }
}

impl Shadows {
    /// Fetches the weights of `experts` and sorts this rank's choices of them.
    pub(crate) fn fetch(ctx: &Context, ranks: &LayerRanks, input: &ExpertsInput<'_>, experts: Vec<usize>) -> Self {
        let ExpertsInput { weights, activation, dispatch, num_choices, .. } = *input;
        let gather = |tensor: &Tensor| {
            let mut shape = tensor.shape().to_vec();
            shape[0] = experts.len();
            let mut whole = ctx.zeros(&shape, tensor.dtype());
            ranks.attempt((), || gather(ranks, &experts, tensor, &mut whole));
            whole
        };
        let (gate_up, down) = (gather(&weights.gate_up), gather(&weights.down));
        let biases = weights.biases.as_ref().map(|(gate_up, down)| (gather(gate_up), gather(down)));
        let rows = own_rows(ctx, &experts, dispatch, num_choices);
        Self { ranks: ranks.clone(), experts, gate_up, down, biases, activation, rows }
    }

    /// Returns whether `expert` is among the fetched ones.
    pub(crate) fn has(&self, expert: usize) -> bool {
        self.experts.contains(&expert)
    }

    /// Computes the fetched experts' part of the output, `[T, D]`, for `x [T, D]`. A forward-only pass saves nothing.
    pub(crate) fn forward(self, ctx: &Context, x: &Tensor, is_forward_only: bool) -> (Tensor, Option<ShadowsSaved>) {
        let biases = self.biases.as_ref().map(|(gate_up, down)| ExpertBiases { gate_up, down });
        let options = ForwardOptions { biases, base: None, is_forward_only };
        let forward = || experts_forward_with(ctx, x, self.weights(), self.rows.rows(), options);
        let (y, saved) = self.ranks.time("fetched experts", forward);
        (y, saved.map(|saved| ShadowsSaved { shadows: self, saved }))
    }

    /// Sums `[S, ..]` over the ranks. Each owner adds the sums of its experts to `held [held, ..]`.
    fn bring_home(&self, grads: &Tensor, held: &mut Tensor) {
        let size = grads.len() / self.experts.len().max(1);
        let counts: Vec<usize> = owned(&self.ranks, &self.experts).iter().map(|owned| owned.len() * size).collect();
        let own = &owned(&self.ranks, &self.experts)[self.ranks.group().rank()];
        let mut sums = vec![0.0; own.len() * size];
        self.ranks.attempt((), || self.ranks.hierarchy().sum_scatter(grads.f32s(), &counts, &mut sums));
        for (sum, expert) in sums.chunks(size.max(1)).zip(own) {
            if let Ok(place) = self.ranks.held().binary_search(expert) {
                let to = &mut held.f32s_mut()[place * size..(place + 1) * size];
                to.iter_mut().zip(sum).for_each(|(to, x)| *to += x);
            }
        }
    }

    fn weights(&self) -> ExpertWeights<'_> {
        ExpertWeights { gate_up: &self.gate_up, down: &self.down, activation: self.activation }
    }
}

impl ShadowsSaved {
    /// Computes the gradients from `dy [T, D]`, the gradient of the output.
    pub(crate) fn backward(&self, ctx: &Context, dy: &Tensor) -> ShadowsBackward {
        let Self { shadows, saved } = self;
        let rows = shadows.rows.rows();
        let backward = || experts_backward(ctx, dy, shadows.weights(), rows, saved);
        let mut back = shadows.ranks.time("fetched experts, backward", backward);
        if let Some((_, down)) = &shadows.biases {
            add_bias_row_weight_grads(ctx, dy, down, rows, &mut back.d_row_weights);
        }
        let dweights = choice_weight_grads(ctx, rows, &back.d_row_weights);
        ShadowsBackward { dx: back.dx, dweights, task: ShadowTask { dh: back.dh, weighed: back.weighed } }
    }

    /// Computes the fetched experts' weight gradients from this rank's tokens `x` and output gradients `dy`, sums
    /// them over the ranks and adds them on the owners.
    pub(crate) fn weight_grads(
        &self,
        ctx: &Context,
        x: &Tensor,
        dy: &Tensor,
        task: &ShadowTask,
        grads: &mut MoeWeights,
    ) {
        let Self { shadows, saved } = self;
        let inputs = WeightGradInputs { x, dy, saved, dh: &task.dh, weighed: task.weighed.as_ref() };
        let rows = shadows.rows.rows();
        let like = |tensor: &Tensor| ctx.zeros(tensor.shape(), DType::F32);
        if !is_left_out(&grads.gate_up) {
            let (mut gate_up, mut down) = (like(&shadows.gate_up), like(&shadows.down));
            let into = ExpertGrads { gate_up: &mut gate_up, down: &mut down };
            experts_weight_grad(ctx, inputs, shadows.activation, rows, Write::Replace, into);
            shadows.bring_home(&gate_up, &mut grads.gate_up);
            shadows.bring_home(&down, &mut grads.down);
        }
        let biases = grads.biases.as_mut().filter(|(gate_up, _)| !is_left_out(gate_up));
        if let (Some((gate_up, down)), Some(to)) = (&shadows.biases, biases) {
            let mut found = (like(gate_up), like(down));
            experts_bias_grad(ctx, dy, &task.dh, rows, Write::Replace, &mut found.0, &mut found.1);
            shadows.bring_home(&found.0, &mut to.0);
            shadows.bring_home(&found.1, &mut to.1);
        }
    }
}

/// Returns for each rank the experts that it sends to the others. An expert's owner is the first rank that holds it.
fn owned(ranks: &LayerRanks, experts: &[usize]) -> Vec<Vec<usize>> {
    let placement = ranks.placement();
    let of_rank = |rank| experts.iter().copied().filter(|&e| placement.ranks_of(e)[0] == rank).collect();
    (0..placement.num_ranks()).map(of_rank).collect()
}

/// Gathers the rows of `experts` from every rank's `held [held, ..]` into `whole`.
fn gather(ranks: &LayerRanks, experts: &[usize], held: &Tensor, whole: &mut Tensor) -> Result<(), CommError> {
    let bytes = whole.num_bytes() / experts.len().max(1);
    let owned = owned(ranks, experts);
    let counts: Vec<usize> = owned.iter().map(|experts| experts.len() * bytes).collect();
    let mut own = Vec::with_capacity(counts[ranks.group().rank()]);
    for expert in &owned[ranks.group().rank()] {
        if let Ok(place) = ranks.held().binary_search(expert) {
            own.extend_from_slice(&held.bytes()[place * bytes..(place + 1) * bytes]);
        }
    }
    ranks.hierarchy().all_gather_v(&own, whole.bytes_mut(), &counts)
}

/// Sorts this rank's choices of `experts` by expert.
fn own_rows(ctx: &Context, experts: &[usize], dispatch: &Dispatch, num_choices: usize) -> SortedChoices {
    let mut of_rows = vec![NO_EXPERT; dispatch.num_rows()];
    for (place, &expert) in experts.iter().enumerate() {
        let rows = dispatch.offsets()[expert] as usize..dispatch.offsets()[expert + 1] as usize;
        of_rows[rows].fill(place as u32);
    }
    let shape = [dispatch.token_rows().len() / num_choices.max(1), num_choices];
    let (mut ids, mut weights) = (ctx.empty(&shape, DType::U32), ctx.zeros(&shape, DType::F32));
    let slots = ids.u32s_mut().iter_mut().zip(weights.f32s_mut());
    for ((id, weight), &row) in slots.zip(dispatch.token_rows()) {
        let row = (row != NO_ROW).then_some(row as usize);
        (*id, *weight) = row.map_or((NO_EXPERT, 0.0), |row| (of_rows[row], dispatch.row_weights()[row]));
    }
    sort_choices(ctx, &ids, &weights, experts.len(), None)
}
