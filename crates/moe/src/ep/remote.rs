//! Experts of a model in use that are spread over ranks.
//!
//! The root has the tokens, the routers and all other layers; each rank, the root included, holds some of the
//! experts. In each MoE layer the root sends the other ranks the tokens of their experts and gets back one row for
//! each choice. It adds these rows up as a single rank does, token by token in the order of the choices. All rows of
//! an expert are computed together, wherever the expert is. So the result has the bits of one rank, provided that the
//! kernels of the experts' products are the same: always on a batch-invariant context, and otherwise for matrices of
//! at least 1 MiB or stacks below that, because the kernel may depend on the size of all experts of a product.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_ops::Activation;
use moeworks_ops::Context;
use moeworks_ops::experts::{ExpertRows, ForwardOptions, combine, experts_forward_with};
use moeworks_plan::{Nodes, Placement, Placements};
use moeworks_tensor::{DType, Tensor};

use super::ExpertsInput;
use super::remote_message::{Header, Message, RowsOut, TAG_HEADER, TAG_OUTPUTS, TAG_ROWS};
use super::remote_move::{OwnedLayer, take_part};
use crate::{Dispatch, MoeWeights};

/// The rank that has the tokens.
pub(super) const ROOT: usize = 0;

/// The time that ranks wait for each other: requests may come after any time. A process that stands still is found
/// earlier, by the watchdog of the launcher's ranks.
const PATIENCE: Duration = Duration::from_secs(u32::MAX as u64);

/// The root's handle to the experts of all layers of a model in use. Clones share it.
///
/// A failed communication does not end a pass: its rows are zeros and the rest of the pass communicates no more. The
/// caller checks [`failure`](Self::failure) after each pass.
#[derive(Clone)]
pub struct RemoteExperts {
    inner: Arc<Inner>,
}

struct Inner {
    comm: Box<dyn Communicator>,
    placements: Placements,
    /// The layers whose experts have moved.
    moved: Mutex<HashMap<u32, LayerNow>>,
    failure: Mutex<Option<CommError>>,
}

/// The placement of a layer that is in force, and the root's weights by it.
#[derive(Clone)]
pub(super) struct LayerNow {
    pub(super) placement: Arc<Placement>,
    /// None if they are those of the root's model.
    pub(super) weights: Option<Arc<MoeWeights>>,
}

/// The root's handle to the experts of one layer. Clones share it.
#[derive(Clone)]
pub struct RemoteLayer {
    experts: RemoteExperts,
    number: u32,
    /// The placement when the handle was made.
    placement: Arc<Placement>,
}

/// The experts of one layer that a rank holds.
#[derive(Clone, Copy)]
pub struct HeldLayer<'a> {
    /// The number of the layer.
    pub number: usize,
    /// The weights of the experts of this rank, in ascending order; the router is not used.
    pub weights: &'a MoeWeights,
    /// The activation of the experts.
    pub activation: Activation,
}

/// The rows of one expert in a dispatch.
#[derive(Clone)]
struct ExpertRun {
    expert: usize,
    rows: Range<usize>,
}

/// The rows that a rank computes.
#[derive(Clone, Default)]
struct Share {
    /// Ascending.
    runs: Vec<ExpertRun>,
}

impl Share {
    fn num_rows(&self) -> usize {
        self.runs.iter().map(|run| run.rows.len()).sum()
    }
}

impl RemoteExperts {
    /// Creates the handle of the root, which is rank 0 of `comm`. Panics on another rank, or if the placements are
    /// for another number of ranks.
    #[must_use]
    pub fn new(comm: Box<dyn Communicator>, placements: Placements) -> Self {
        assert_eq!((comm.rank(), comm.size()), (ROOT, placements.num_ranks()), "root and ranks of a placement");
        comm.set_timeout(PATIENCE);
        Self { inner: Arc::new(Inner { comm, placements, moved: Mutex::default(), failure: Mutex::default() }) }
    }

    /// Returns the handle to the layer with this number. Panics if the layer has no placement.
    #[must_use]
    pub fn layer(&self, number: usize) -> RemoteLayer {
        RemoteLayer { experts: self.clone(), number: number as u32, placement: self.now(number as u32).placement }
    }

    /// Returns the placement of a layer that is in force. Panics if the layer has none.
    #[must_use]
    pub fn placement(&self, number: usize) -> Arc<Placement> {
        self.now(number as u32).placement
    }

    /// Returns the nodes of the ranks.
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        Nodes::new(self.inner.comm.nodes())
    }

    pub(super) fn comm(&self) -> &dyn Communicator {
        &*self.inner.comm
    }

    /// Returns the state of a layer for a pass that begins.
    pub(super) fn now(&self, number: u32) -> LayerNow {
        let moved = self.inner.moved.lock().unwrap_or_else(PoisonError::into_inner);
        moved.get(&number).cloned().unwrap_or_else(|| {
            let placement = self.inner.placements.layer(number as usize);
            let placement = placement.unwrap_or_else(|| panic!("a placement of layer {number}")).clone();
            LayerNow { placement: Arc::new(placement), weights: None }
        })
    }

    /// Puts the placement of a layer in force, with the root's weights by it.
    pub(super) fn put_in_force(&self, number: u32, placement: &Placement, weights: Arc<MoeWeights>) {
        let now = LayerNow { placement: Arc::new(placement.clone()), weights: Some(weights) };
        self.inner.moved.lock().unwrap_or_else(PoisonError::into_inner).insert(number, now);
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.inner.comm.size()
    }

    /// Returns the first communication error, if any.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells the other ranks that no more work comes, so that their [`serve_experts`] returns.
    ///
    /// # Errors
    /// [`CommError`] if a rank died or hangs, now or in an earlier pass.
    pub fn end(&self) -> Result<(), CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        (1..self.num_ranks()).try_for_each(|rank| self.inner.comm.send(&Header::END.to_words(), rank, TAG_HEADER))
    }

    /// Runs `call`. Returns `None` if it fails or if a communication failed before.
    fn attempt<R>(&self, call: impl FnOnce() -> Result<R, CommError>) -> Option<R> {
        if self.failure().is_some() {
            return None;
        }
        call().inspect_err(|error| self.fail(error)).ok()
    }

    pub(super) fn fail(&self, error: &CommError) {
        *self.inner.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
    }
}

impl RemoteLayer {
    /// Counts the experts of the root's model, which it held when the handle was made.
    #[must_use]
    pub fn num_held(&self) -> usize {
        self.placement.experts_of(ROOT).len()
    }

    /// Returns the layer's placement when the handle was made.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Sends tokens `x [T, D]` through their experts on all ranks. Returns `y [T, D]`, f32.
    pub(crate) fn forward(&self, ctx: &Context, input: ExpertsInput<'_>) -> Tensor {
        let ExpertsInput { x, dispatch, .. } = input;
        let shape = [x.rows(), x.cols()];
        match self.experts.attempt(|| self.outputs(ctx, input)) {
            Some(outputs) => combine(ctx, &outputs, dispatch.rows(), Some(dispatch.rows().weights), &shape),
            None => ctx.zeros(&shape, DType::F32),
        }
    }

    /// Returns `[R, D]` f32: the output of each row's expert.
    fn outputs(&self, ctx: &Context, input: ExpertsInput<'_>) -> Result<Tensor, CommError> {
        let now = self.experts.now(self.number);
        let input = ExpertsInput { weights: now.weights.as_deref().unwrap_or(input.weights), ..input };
        let ExpertsInput { weights, activation, x, dispatch, .. } = input;
        let (comm, placement) = (&*self.experts.inner.comm, &*now.placement);
        let shares = shares(placement, dispatch);
        let others = || shares.iter().enumerate().filter(|(rank, share)| *rank != ROOT && share.num_rows() > 0);
        let sent: Vec<_> = others()
            .map(|(rank, share)| self.send(rank, HeldShare { held: &placement.experts_of(rank), share }, &input))
            .collect::<Result<_, _>>()?;
        sent.into_iter().flatten().try_for_each(|sent| sent.finish().map(drop))?;
        let receive = |(rank, share): (usize, &Share)| {
            comm.start_receive(vec![0.0_f32; share.num_rows() * x.cols()], rank, TAG_OUTPUTS)
        };
        let coming: Vec<Pending<Vec<f32>>> = others().map(receive).collect::<Result<_, _>>()?;
        let mut outputs = ctx.empty(&[dispatch.num_rows(), x.cols()], DType::F32);
        if shares[ROOT].num_rows() > 0 {
            let message = Message::new(&rows_out(&placement.experts_of(ROOT), &shares[ROOT], dispatch), x);
            let own = computed(ctx, weights, activation, &message);
            place(&mut outputs, &shares[ROOT], own.f32s());
        }
        for ((_, share), coming) in others().zip(coming) {
            place(&mut outputs, share, &coming.finish()?);
        }
        Ok(outputs)
    }

    /// Starts to send a rank, which holds these experts, the rows that it computes.
    fn send(
        &self,
        rank: usize,
        share: HeldShare<'_>,
        input: &ExpertsInput<'_>,
    ) -> Result<[Pending<Vec<u8>>; 2], CommError> {
        let message = Message::new(&rows_out(share.held, share.share, input.dispatch), input.x);
        let comm = &*self.experts.inner.comm;
        let header = bytemuck::cast_slice(&message.header(self.number).to_words()).to_vec();
        Ok([comm.start_send(header, rank, TAG_HEADER)?, comm.start_send(message.into_bytes(), rank, TAG_ROWS)?])
    }
}

/// The rows that a rank computes, and the experts that it holds, ascending.
struct HeldShare<'a> {
    held: &'a [usize],
    share: &'a Share,
}

/// Describes the rows of a rank by the places of its experts among those that it holds.
fn rows_out<'a>(held: &[usize], share: &Share, dispatch: &'a Dispatch) -> RowsOut<'a> {
    let mut counts = vec![0; held.len()];
    for run in &share.runs {
        if let Ok(place) = held.binary_search(&run.expert) {
            counts[place] = run.rows.len() as u32;
        }
    }
    let ranges = share.runs.iter().map(|run| run.rows.clone()).collect();
    RowsOut { counts, ranges, tokens: dispatch.row_tokens() }
}

/// Divides the experts with rows among the ranks that hold them. An expert on several ranks goes to the one with the
/// fewest rows; experts with the most rows come first.
fn shares(placement: &Placement, dispatch: &Dispatch) -> Vec<Share> {
    let offsets = dispatch.offsets().windows(2).enumerate();
    let run = |(expert, pair): (usize, &[u32])| ExpertRun { expert, rows: pair[0] as usize..pair[1] as usize };
    let mut runs: Vec<ExpertRun> = offsets.map(run).filter(|run| !run.rows.is_empty()).collect();
    if placement.has_replicas() {
        runs.sort_by_key(|run| (std::cmp::Reverse(run.rows.len()), run.expert));
    }
    let mut shares = vec![Share::default(); placement.num_ranks()];
    for run in runs {
        let holders = placement.ranks_of(run.expert).iter().copied();
        let rank = holders.min_by_key(|&rank| shares[rank].num_rows()).unwrap_or(ROOT);
        shares[rank].runs.push(run);
    }
    shares.iter_mut().for_each(|share| share.runs.sort_by_key(|run| run.expert));
    shares
}

/// Writes the outputs of a rank's rows to their places among all rows.
fn place(outputs: &mut Tensor, share: &Share, rows: &[f32]) {
    let width = outputs.cols();
    let mut rest = rows;
    for run in &share.runs {
        let (here, others) = rest.split_at(run.rows.len() * width);
        outputs.f32s_mut()[run.rows.start * width..run.rows.end * width].copy_from_slice(here);
        rest = others;
    }
}

/// Computes `[R, D]` f32: the outputs of a rank's experts for the rows of a message.
fn computed(ctx: &Context, weights: &MoeWeights, activation: Activation, message: &Message) -> Tensor {
    let x = message.rows(ctx);
    let numbers: Vec<u32> = (0..x.rows() as u32).collect();
    let (offsets, ones) = (message.offsets(), vec![1.0_f32; x.rows()]);
    // Each row is a token of its own with weight 1, so that the rows are not added up.
    let rows = ExpertRows::new(&offsets, &numbers, &ones, &numbers, 1);
    let (experts, biases) = (weights.experts(activation), weights.expert_biases());
    experts_forward_with(ctx, &x, experts, rows, ForwardOptions { biases, base: None, is_forward_only: true }).0
}

/// Computes the experts of this rank for the root's tokens, until the root [ends](RemoteExperts::end) it. `layers`
/// are the layers of the model that have experts.
///
/// # Errors
/// [`CommError`] if a rank died, hangs, or the root asks for a layer that is not here.
pub fn serve_experts(ctx: &Context, comm: &dyn Communicator, layers: &[HeldLayer<'_>]) -> Result<(), CommError> {
    serve_owned_experts(ctx, comm, layers.iter().map(|&layer| layer.into()).collect())
}

/// Computes the experts of this rank as [`serve_experts`] does. Memory of experts that move away is freed, unless
/// others share it.
///
/// # Errors
/// The errors of [`serve_experts`].
pub fn serve_owned_experts(
    ctx: &Context,
    comm: &dyn Communicator,
    mut layers: Vec<OwnedLayer>,
) -> Result<(), CommError> {
    comm.set_timeout(PATIENCE);
    loop {
        let words = comm.start_receive(vec![0_u32; Header::LEN], ROOT, TAG_HEADER)?.finish_idle()?;
        let header = Header::from_words(&words);
        if header == Header::END {
            return Ok(());
        }
        if header.is_move() {
            take_part(ctx, comm, &header, &mut layers)?;
            continue;
        }
        let layer = layers.iter().find(|layer| layer.number == header.layer as usize);
        let layer = layer.filter(|layer| header.fits(&layer.weights));
        let Some(layer) = layer else { return Err(comm.abort("the root asks for experts that are not on this rank")) };
        let bytes = vec![0_u8; header.num_bytes(&layer.weights)];
        let bytes = comm.start_receive(bytes, ROOT, TAG_ROWS)?.finish()?;
        let Some(message) = Message::from_bytes(&header, &layer.weights, bytes) else {
            return Err(comm.abort("the root sends rows of other sizes than it says"));
        };
        let outputs = computed(ctx, &layer.weights, layer.activation, &message);
        comm.send(outputs.f32s(), ROOT, TAG_OUTPUTS)?;
    }
}

impl fmt::Debug for RemoteExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "experts on {} ranks", self.num_ranks())
    }
}

impl fmt::Debug for RemoteLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}: {:?}", self.number, self.experts)
    }
}

impl PartialEq for RemoteLayer {
    /// Returns whether both are handles to the same layer of the same ranks.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.experts.inner, &other.experts.inner) && self.number == other.number
    }
}
