//! Domains of ranks that fetch each other's experts for a pass (HybridEP, 2510.19470, section 3).
//!
//! Inside a domain each rank gathers the experts of all. Between domains a token goes to the rank at its own rank's
//! offset in the other domain, which has all experts of its domain. For a pass this is a placement with replicas in a
//! domain, so that dispatch and combine need no other rule. The gradients of experts are summed inside a domain, on
//! the rank that holds them. With several levels, such as nodes and the ranks of a node, each level has domains of
//! its own, and experts that were gathered at one level are handed on at the next.
//!
//! Experts are under way from when a pass begins until its rows have come to them, so that what is computed before
//! hides them ([`MoeLayer::start_gathering`](crate::MoeLayer::start_gathering)).
//!
//! Gathered experts may be compressed ([`DomainBase`]). A training pass then computes experts of others by
//! approximate weights; own ones are exact, and passes that only evaluate gather experts whole.

mod codec;
mod experts;
mod messages;
mod shape;
mod traffic;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use moeworks_comm::{CommError, Communicator};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_plan::{Nodes, Placement};
use moeworks_tensor::{DType, Tensor};

use super::{ExpertRanks, LayerPlacement, LayerRanks, locked};
use crate::{MoeWeights, WgradTarget, is_left_out};
use codec::{Codec, Values};
pub(super) use experts::ArrivingExperts;
use experts::{Remembered, Sender};
use messages::{LevelComm, Summed};
use shape::DomainShape;
pub use shape::LevelDomain;
pub use traffic::SeenTraffic;
pub(super) use traffic::{Bytes, Traffic};

/// The base of which compressed experts are the differences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainBase {
    /// The experts as the other ranks of the domain have them from the passes before. Each message brings the largest
    /// differences, and what is left out of one is in the next. Each rank keeps an f32 copy of the domain's experts,
    /// which come whole at first.
    #[default]
    Last,
    /// The mean expert of the domain, which is summed for each pass: nothing is kept.
    Mean,
}

/// The domains of a group of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainOptions {
    /// The levels of the group, the outermost first. Their sizes multiply to its number of ranks.
    pub levels: Vec<LevelDomain>,
    /// The share of the numbers of an expert's difference from the base that travel; 1: the experts themselves.
    pub keep: f64,
    /// The base of differences.
    pub base: DomainBase,
    /// The share of the numbers of a gradient that travel to the rank that holds the expert; the others are added to
    /// the next gradient. 1: whole gradients.
    pub keep_gradients: f64,
}

impl DomainOptions {
    /// Makes domains of `size` consecutive ranks among `num_ranks`, whose experts travel whole.
    #[must_use]
    pub fn consecutive(num_ranks: usize, size: usize) -> Self {
        Self::of_levels(vec![LevelDomain { size: num_ranks, domain: size }])
    }

    /// Makes domains on several levels, whose experts travel whole.
    #[must_use]
    pub fn of_levels(levels: Vec<LevelDomain>) -> Self {
        Self { levels, keep: 1.0, base: DomainBase::default(), keep_gradients: 1.0 }
    }

    /// Returns the number of ranks of a domain.
    #[must_use]
    pub fn num_members(&self) -> usize {
        self.levels.iter().map(|level| level.domain).product()
    }

    /// Returns the bytes of an expert's messages as a share of its bytes in f32, but for the first.
    #[must_use]
    pub fn share_of_bytes(&self) -> f64 {
        const NUM: usize = 1 << 16;
        if self.keep >= 1.0 {
            return 1.0;
        }
        Codec::new(NUM, self.keep, self.base.values()).bytes() as f64 / (size_of::<f32>() * NUM) as f64
    }
}

impl DomainBase {
    /// Returns the form of differences.
    fn values(self) -> Values {
        match self {
            Self::Last => Values::Levels,
            Self::Mean => Values::Half,
        }
    }
}

/// The domain of this rank.
pub(super) struct Domain {
    pub(super) options: DomainOptions,
    shape: DomainShape,
    /// The ranks of each level.
    levels: Vec<LevelComm>,
    /// The ranks of the domain, in the order in which they are gathered.
    members: Vec<usize>,
    /// This rank's place among them.
    place: usize,
    memory: Mutex<DomainMemory>,
}

/// The state that compression keeps between passes.
#[derive(Default)]
struct DomainMemory {
    /// By layer, the experts as the other ranks have them.
    experts: HashMap<usize, Remembered>,
    /// By layer, tensor and level, the parts of gradients that did not travel yet.
    rests: HashMap<[usize; 3], Vec<f32>>,
}

impl Domain {
    /// Splits `group` into domains. All its ranks make this call. Panics if the domains do not divide it.
    pub(super) fn new(group: &dyn Communicator, options: DomainOptions) -> Result<Self, CommError> {
        let num_ranks: usize = options.levels.iter().map(|level| level.size).product();
        let is_divided = |level: &LevelDomain| level.domain > 0 && level.size.is_multiple_of(level.domain);
        assert!(num_ranks == group.size() && options.levels.iter().all(is_divided), "domains of a group");
        let (shape, rank) = (DomainShape::new(options.levels.clone()), group.rank());
        let level = |level: usize| {
            let comm = group.split(Some(shape.at(rank, level, 0) as u32), rank)?;
            Ok(LevelComm::new(comm.expect("a rank with a color is in a group")))
        };
        let levels = (0..shape.levels().len()).map(level).collect::<Result<_, CommError>>()?;
        let members = shape.members(rank);
        let place = members.iter().position(|&member| member == rank).unwrap_or(0);
        Ok(Self { options, shape, levels, members, place, memory: Mutex::default() })
    }

    fn memory(&self) -> MutexGuard<'_, DomainMemory> {
        locked(&self.memory)
    }

    /// Returns the placement in which each expert is on all ranks of the domains that hold it.
    fn widen(&self, placement: &Placement) -> Placement {
        let mut wide = placement.clone();
        for expert in 0..placement.num_experts() {
            for &rank in placement.ranks_of(expert) {
                wide.replicate(expert, &self.shape.members(rank));
            }
        }
        wide
    }

    /// Lists for each member the experts that it gives: those that it is the first of the domain to hold.
    fn given(&self, placement: &Placement) -> Vec<Vec<usize>> {
        let is_here = |rank: &&usize| self.members.contains(rank);
        let giver = |expert: usize| placement.ranks_of(expert).iter().find(is_here).copied();
        let of_rank =
            |rank: usize| (0..placement.num_experts()).filter(|&expert| giver(expert) == Some(rank)).collect();
        self.members.iter().map(|&rank| of_rank(rank)).collect()
    }
}

/// The rule by which tokens find the experts of other domains.
#[derive(Clone)]
pub(super) struct DomainRoute {
    shape: DomainShape,
    /// The placement without domains.
    placement: Arc<Placement>,
}

impl DomainRoute {
    /// Returns the rank that computes `expert` for the tokens of rank `source`: itself if its domain has the expert,
    /// otherwise the rank at its place in a domain that does.
    pub(super) fn serving_rank(&self, nodes: &Nodes, source: usize, expert: usize) -> usize {
        let is_near = |&rank: &usize| self.shape.are_together(rank, source);
        if self.placement.ranks_of(expert).iter().any(is_near) {
            return source;
        }
        self.shape.counterpart(self.placement.serving_rank(nodes, source, expert), source)
    }
}

/// A layer's experts that a pass waits for.
pub(crate) struct Arriving {
    /// The time at which the pass could have used the link for them.
    start: Instant,
    /// None without domains.
    experts: Option<ArrivingExperts>,
}

impl Arriving {
    /// Notes that what is computed before ranks talk about tokens is done.
    pub(super) fn note_hidden(&self, ranks: &ExpertRanks) {
        ranks.inner.traffic.note_hidden(self.start.elapsed());
    }

    /// Returns the layer by the placement of the pass; `own` by the one in force.
    pub(super) fn ranks(&self, own: &LayerRanks) -> LayerRanks {
        let placed = self.experts.as_ref().map_or(&own.placed, |experts| &experts.placed);
        LayerRanks { placed: placed.clone(), ..own.clone() }
    }

    /// Waits for the experts, if there are any to wait for.
    pub(super) fn finish(self, ctx: &Context, own: &LayerRanks, weights: &MoeWeights) -> Option<DomainPass> {
        Some(self.experts?.finish(ctx, own, weights))
    }
}

impl ExpertRanks {
    /// Returns the domains in force; none where each rank computes its experts alone.
    #[must_use]
    pub fn domain(&self) -> Option<DomainOptions> {
        locked(&self.inner.domain).as_ref().map(|domain| domain.options.clone())
    }

    /// Puts other domains in force, for the passes that begin from now on. All ranks of the group do so between the
    /// same passes. Panics if they do not divide the group.
    ///
    /// # Errors
    /// [`CommError`] if a rank died, hangs, or made another call.
    pub fn set_domain(&self, options: Option<DomainOptions>) -> Result<(), CommError> {
        let options = options.filter(|options| options.num_members() > 1);
        let domain = options.map(|options| Domain::new(self.group(), options).map(Arc::new)).transpose()?;
        *locked(&self.inner.domain) = domain;
        Ok(())
    }

    /// Forgets the experts that were gathered and the parts of gradients that did not travel: the next pass begins as
    /// one after a checkpoint does. All ranks of the group do so between the same passes.
    pub fn forget_gathered(&self) {
        if let Some(domain) = &*locked(&self.inner.domain) {
            *domain.memory() = DomainMemory::default();
        }
    }

    /// Returns what this rank's exchanges have seen since the last call.
    #[must_use]
    pub fn take_seen_traffic(&self) -> SeenTraffic {
        self.inner.traffic.take()
    }
}

impl LayerRanks {
    /// Starts to gather the experts of this rank's domain for the next pass through the layer. They may be compressed
    /// if that is a training pass. All ranks of the group make the same passes.
    pub(crate) fn start_gathering(&self, ctx: &Context, weights: &MoeWeights, is_training: bool) {
        let arriving = self.begin(ctx, weights, is_training);
        locked(&self.inner.arriving).entry(self.layer).or_default().push_back(arriving);
    }

    /// Returns the experts that the pass waits for: those that were asked for, or else from now on.
    pub(crate) fn arriving(&self, ctx: &Context, weights: &MoeWeights, is_training: bool) -> Arriving {
        let asked = locked(&self.inner.arriving).get_mut(&self.layer).and_then(|asked| asked.pop_front());
        asked.unwrap_or_else(|| self.begin(ctx, weights, is_training))
    }

    fn begin(&self, ctx: &Context, weights: &MoeWeights, is_training: bool) -> Arriving {
        let start = Instant::now();
        let domain = locked(&self.inner.domain).clone();
        let experts = domain.map(|domain| {
            let wide = domain.widen(self.placement());
            let held: Arc<[usize]> = wide.experts_of(self.group().rank()).into();
            let route = DomainRoute { shape: domain.shape.clone(), placement: Arc::clone(&self.placed.placement) };
            let placed = LayerPlacement { placement: Arc::new(wide), held, route: Some(route) };
            let given = domain.given(self.placement());
            let sender = Sender { ctx, domain: &domain, given: &given, own: self.held(), layer: self.layer };
            let start = || self.attempt(None, || sender.start(weights, is_training).map(Some));
            let under_way = self.time("domain: send", start);
            ArrivingExperts { domain, placed, given, under_way }
        });
        Arriving { start, experts }
    }

    /// Returns the rank that computes `expert` for the tokens of rank `source`.
    pub(super) fn serving_rank(&self, source: usize, expert: usize) -> usize {
        let nodes = self.hierarchy().nodes();
        match &self.placed.route {
            Some(route) => route.serving_rank(nodes, source, expert),
            None => self.placement().serving_rank(nodes, source, expert),
        }
    }
}

/// The experts of a domain for a pass.
pub(crate) struct DomainPass {
    domain: Arc<Domain>,
    /// The layer by the placement of the pass.
    ranks: LayerRanks,
    weights: MoeWeights,
    /// The layer by the placement in force.
    own: LayerRanks,
    /// The experts that each member of the domain gives, ascending.
    given: Vec<Vec<usize>>,
}

/// The tensors of experts whose gradients are summed, as keys of what is left out.
const GATE_UP: usize = 0;
const DOWN: usize = 1;
const BIASES: [usize; 2] = [2, 3];

impl DomainPass {
    /// Returns the weights of the layer, with the experts of the domain.
    pub(super) fn weights(&self) -> &MoeWeights {
        &self.weights
    }

    /// Computes the gradients of the matrices of the domain's experts by `work` and brings them home.
    pub(super) fn weight_grads(&self, ctx: &Context, target: WgradTarget<'_>, work: impl FnOnce(WgradTarget<'_>)) {
        let WgradTarget { write, grads, .. } = target;
        let mut of_domain = self.empty_grads(ctx, grads);
        work(WgradTarget::new(Write::Replace, &mut of_domain));
        self.bring_home(GATE_UP, &of_domain.gate_up, write, &mut grads.gate_up);
        self.bring_home(DOWN, &of_domain.down, write, &mut grads.down);
    }

    /// Creates zeros for the gradients of the domain's experts.
    fn empty_grads(&self, ctx: &Context, like: &MoeWeights) -> MoeWeights {
        let zeros = |tensor: &Tensor, grad: &Tensor| {
            let shape = if is_left_out(grad) { vec![0] } else { tensor.shape().to_vec() };
            ctx.zeros(&shape, DType::F32)
        };
        let (gate_up, down) = (zeros(&self.weights.gate_up, &like.gate_up), zeros(&self.weights.down, &like.down));
        MoeWeights { gate_up, down, ..self.weights.clone() }
    }

    /// Computes the gradients of the biases of the domain's experts by `work` and brings them home to `to`, those
    /// before the activation and those after the down projection.
    pub(super) fn bias_grads(
        &self,
        ctx: &Context,
        write: Write,
        to: [&mut Tensor; 2],
        work: impl FnOnce(Write, &mut Tensor, &mut Tensor),
    ) {
        let Some((gate_up, down)) = &self.weights.biases else { return };
        let zeros = |tensor: &Tensor| ctx.zeros(tensor.shape(), DType::F32);
        let (mut gate_up, mut down) = (zeros(gate_up), zeros(down));
        work(Write::Replace, &mut gate_up, &mut down);
        let [to_gate_up, to_down] = to;
        self.bring_home(BIASES[0], &gate_up, write, to_gate_up);
        self.bring_home(BIASES[1], &down, write, to_down);
    }

    /// Sums a gradient `[held, ..]` of the domain's experts over its ranks, each on the rank that gave it, and writes
    /// it to `to [own, ..]`. `tensor` is the key of what is left out where only the largest numbers travel.
    fn bring_home(&self, tensor: usize, grads: &Tensor, write: Write, to: &mut Tensor) {
        if is_left_out(to) {
            return;
        }
        let size = grads.shape()[1..].iter().product::<usize>();
        let place = |expert: &usize| self.ranks.held().binary_search(expert).expect("an expert of the domain");
        let mut numbers = Vec::with_capacity(grads.len());
        for expert in self.given.iter().flatten() {
            numbers.extend_from_slice(&grads.f32s()[place(expert) * size..(place(expert) + 1) * size]);
        }
        let counts: Vec<usize> = self.given.iter().map(|given| given.len() * size).collect();
        let given = &self.given[self.domain.place];
        let is_small = grads.shape().len() < 3;
        let keep = if is_small { 1.0 } else { self.domain.options.keep_gradients };
        let summed = Summed { numbers, counts: &counts, keep, key: [self.own.layer, tensor] };
        let sum = || self.domain.sum_parts(summed, &self.own.inner.traffic);
        let sums = self.own.time("domain: gradients", || self.own.attempt(vec![0.0; given.len() * size], sum));
        if write == Write::Replace {
            to.f32s_mut().fill(0.0);
        }
        for (sum, expert) in sums.chunks(size.max(1)).zip(given) {
            if let Ok(place) = self.own.held().binary_search(expert) {
                let to = &mut to.f32s_mut()[place * size..(place + 1) * size];
                to.iter_mut().zip(sum).for_each(|(to, x)| *to += x);
            }
        }
    }
}
