//! Domains of ranks that fetch each other's experts for a pass (HybridEP, 2510.19470, section 3).
//!
//! Inside a domain each rank gathers the experts of all. Between domains a token goes to the rank at its own rank's
//! offset in the other domain, which has all experts of its domain. For a pass this is a placement with replicas in a
//! domain, so that dispatch and combine need no other rule. The gradients of experts are summed inside a domain, on
//! the rank that holds them.
//!
//! Gathered experts may be compressed: each is sent as its difference from the mean expert of the domain, of which
//! only the largest numbers travel. The pass then computes experts of others by approximate weights; own ones are
//! exact.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::Write;
use moeworks_plan::Placement;
use moeworks_tensor::{DType, Tensor};

use super::{LayerPlacement, LayerRanks};
use crate::{MoeWeights, WgradTarget, is_left_out};

/// The domains of a group of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DomainOptions {
    /// S: consecutive ranks of a domain. It divides the number of ranks of the group.
    pub size: usize,
    /// The share of the numbers of an expert's difference from the mean expert that travel; 1: the experts
    /// themselves.
    pub keep: f64,
}

/// The domain of this rank.
pub(super) struct Domain {
    pub(super) comm: Box<dyn Communicator>,
    pub(super) options: DomainOptions,
}

impl Domain {
    /// Splits `group` into domains. All its ranks make this call. Panics if the domains do not divide it.
    pub(super) fn new(group: &dyn Communicator, options: DomainOptions) -> Result<Self, CommError> {
        assert!(group.size().is_multiple_of(options.size), "domains of a group");
        let comm = group.split(Some((group.rank() / options.size) as u32), group.rank())?;
        Ok(Self { comm: comm.expect("a rank with a color is in a group"), options })
    }
}

/// The experts of a domain for a pass.
pub(crate) struct DomainPass {
    /// The layer by the placement of the pass.
    ranks: LayerRanks,
    weights: MoeWeights,
    /// The layer by the placement in force.
    own: LayerRanks,
    /// The experts that each rank of the domain gives, ascending.
    given: Vec<Vec<usize>>,
}

/// Returns the placement in which each expert is on all ranks of the domains that hold it.
fn of_domains(placement: &Placement, size: usize) -> Placement {
    let mut wide = placement.clone();
    for expert in 0..placement.num_experts() {
        for &rank in placement.ranks_of(expert) {
            let first = rank / size * size;
            wide.replicate(expert, &(first..first + size).collect::<Vec<_>>());
        }
    }
    wide
}

/// Lists for each rank of the domain with first rank `first` the experts that it gives: those that it is the first to
/// hold.
fn given(placement: &Placement, first: usize, size: usize) -> Vec<Vec<usize>> {
    let giver = |expert: usize| placement.ranks_of(expert).iter().find(|&&rank| rank / size == first / size).copied();
    let of_rank = |rank: usize| (0..placement.num_experts()).filter(|&expert| giver(expert) == Some(rank)).collect();
    (first..first + size).map(of_rank).collect()
}

impl LayerRanks {
    /// Gathers the experts of this rank's domain for a pass; none without domains. All ranks of the group make this
    /// call.
    pub(super) fn domain_pass(&self, ctx: &Context, weights: &MoeWeights) -> Option<DomainPass> {
        let domain = self.inner.domain.as_ref()?;
        let size = domain.options.size;
        let (placement, rank) = (of_domains(self.placement(), size), self.group().rank());
        let given = given(self.placement(), rank / size * size, size);
        let held: Arc<[usize]> = placement.experts_of(rank).into();
        let gather = Gather { ctx, domain, own: self.held(), given: &given, held: &held };
        let gathered = |tensor: &Tensor| {
            let nothing = || ctx.zeros(&[&[held.len()], &tensor.shape()[1..]].concat(), tensor.dtype());
            self.attempt(None, || gather.tensor(tensor).map(Some)).unwrap_or_else(nothing)
        };
        let weights = self.time("domain: gather", || MoeWeights {
            gate_up: gathered(&weights.gate_up),
            down: gathered(&weights.down),
            biases: weights.biases.as_ref().map(|(gate_up, down)| (gathered(gate_up), gathered(down))),
            ..weights.clone()
        });
        let placed = LayerPlacement { placement: Arc::new(placement), held };
        let ranks = Self { ranks: self.ranks.clone(), layer: self.layer, placed };
        Some(DomainPass { ranks, weights, own: self.clone(), given })
    }
}

/// The gathering of a layer's tensors.
struct Gather<'a> {
    ctx: &'a Context,
    domain: &'a Domain,
    /// The experts of this rank, ascending.
    own: &'a [usize],
    /// The experts that each rank of the domain gives.
    given: &'a [Vec<usize>],
    /// The experts of the domain, ascending.
    held: &'a [usize],
}

impl Gather<'_> {
    /// Gathers `tensor [own, ..]` into `[held, ..]`.
    fn tensor(&self, tensor: &Tensor) -> Result<Tensor, CommError> {
        let is_small = tensor.shape().len() < 3;
        if self.domain.options.keep >= 1.0 || is_small { self.rows(tensor) } else { self.compressed(tensor) }
    }

    fn rows(&self, tensor: &Tensor) -> Result<Tensor, CommError> {
        let size = tensor.shape()[1..].iter().product::<usize>() * tensor.dtype().size();
        let mut sent = vec![0_u8; self.given[self.domain.comm.rank()].len() * size];
        for (to, &expert) in sent.chunks_exact_mut(size.max(1)).zip(&self.given[self.domain.comm.rank()]) {
            tensor.read_bytes(self.row(expert) * size, to);
        }
        let counts: Vec<usize> = self.given.iter().map(|given| given.len() * size).collect();
        let mut received = vec![0_u8; counts.iter().sum()];
        self.domain.comm.all_gather_v(&sent, &mut received, &counts)?;
        let mut whole = self.ctx.empty(&[&[self.held.len()], &tensor.shape()[1..]].concat(), tensor.dtype());
        let experts = self.given.iter().flatten();
        for (row, expert) in received.chunks_exact(size.max(1)).zip(experts) {
            if let Ok(place) = self.held.binary_search(expert) {
                whole.bytes_mut()[place * size..(place + 1) * size].copy_from_slice(row);
            }
        }
        Ok(whole)
    }

    /// Returns the row of an expert among those of this rank.
    fn row(&self, expert: usize) -> usize {
        self.own.binary_search(&expert).expect("an expert that the rank holds")
    }

    /// Gathers the mean expert and the largest differences from it.
    fn compressed(&self, tensor: &Tensor) -> Result<Tensor, CommError> {
        let exact = cast(self.ctx, tensor, DType::F32);
        let size = tensor.shape()[1..].iter().product::<usize>();
        let own = &self.given[self.domain.comm.rank()];
        let row = |expert: usize| &exact.f32s()[self.row(expert) * size..(self.row(expert) + 1) * size];
        let mut mean = vec![0.0_f32; size];
        own.iter().for_each(|&expert| mean.iter_mut().zip(row(expert)).for_each(|(sum, x)| *sum += x));
        self.domain.comm.all_reduce(&mut mean, Reduce::Sum)?;
        let share = 1.0 / self.held.len().max(1) as f32;
        mean.iter_mut().for_each(|sum| *sum *= share);
        let num_kept = ((size as f64 * self.domain.options.keep).ceil() as usize).clamp(1, size);
        let sent: Vec<u32> = own.iter().flat_map(|&expert| largest(row(expert), &mean, num_kept)).collect();
        let counts: Vec<usize> = self.given.iter().map(|given| given.len() * 2 * num_kept).collect();
        let mut received = vec![0_u32; counts.iter().sum()];
        self.domain.comm.all_gather_v(&sent, &mut received, &counts)?;
        let mut whole = self.ctx.empty(&[&[self.held.len()], &tensor.shape()[1..]].concat(), DType::F32);
        for (words, expert) in received.chunks_exact(2 * num_kept).zip(self.given.iter().flatten()) {
            let Ok(place) = self.held.binary_search(expert) else { continue };
            let to = &mut whole.f32s_mut()[place * size..(place + 1) * size];
            if own.contains(expert) {
                to.copy_from_slice(row(*expert));
                continue;
            }
            to.copy_from_slice(&mean);
            for pair in words.chunks_exact(2) {
                to[pair[0] as usize] += f32::from_bits(pair[1]);
            }
        }
        Ok(cast(self.ctx, &whole, tensor.dtype()))
    }
}

/// Returns the index and the bits of the `num_kept` largest differences of `row` from `mean`.
fn largest(row: &[f32], mean: &[f32], num_kept: usize) -> Vec<u32> {
    let difference = |&index: &usize| row[index] - mean[index];
    let mut order: Vec<usize> = (0..row.len()).collect();
    if num_kept < order.len() {
        order.select_nth_unstable_by(num_kept, |a, b| difference(b).abs().total_cmp(&difference(a).abs()));
    }
    order[..num_kept].iter().flat_map(|index| [*index as u32, difference(index).to_bits()]).collect()
}

impl DomainPass {
    /// Returns the layer by the placement of the pass.
    pub(super) fn ranks(&self) -> &LayerRanks {
        &self.ranks
    }

    /// Returns the weights of the layer, with the experts of the domain.
    pub(super) fn weights(&self) -> &MoeWeights {
        &self.weights
    }

    /// Computes the gradients of the matrices of the domain's experts by `work` and brings them home.
    pub(super) fn weight_grads(&self, ctx: &Context, target: WgradTarget<'_>, work: impl FnOnce(WgradTarget<'_>)) {
        let WgradTarget { write, grads, .. } = target;
        let mut of_domain = self.empty_grads(ctx, grads);
        work(WgradTarget::new(Write::Replace, &mut of_domain));
        self.bring_home(&of_domain.gate_up, write, &mut grads.gate_up);
        self.bring_home(&of_domain.down, write, &mut grads.down);
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
        self.bring_home(&gate_up, write, to_gate_up);
        self.bring_home(&down, write, to_down);
    }

    /// Sums a gradient `[held, ..]` of the domain's experts over its ranks, each on the rank that gave it, and writes
    /// it to `to [own, ..]`.
    fn bring_home(&self, grads: &Tensor, write: Write, to: &mut Tensor) {
        if is_left_out(to) {
            return;
        }
        let Some(domain) = &self.own.inner.domain else { return };
        let size = grads.shape()[1..].iter().product::<usize>();
        let place = |expert: &usize| self.ranks.held().binary_search(expert).expect("an expert of the domain");
        let mut sent = Vec::with_capacity(grads.len());
        for expert in self.given.iter().flatten() {
            sent.extend_from_slice(&grads.f32s()[place(expert) * size..(place(expert) + 1) * size]);
        }
        let counts: Vec<usize> = self.given.iter().map(|given| given.len() * size).collect();
        let given = &self.given[domain.comm.rank()];
        let mut sums = vec![0.0; given.len() * size];
        let sum = || domain.comm.reduce_scatter(&sent, &counts, &mut sums, Reduce::Sum);
        self.own.time("domain: gradients", || self.own.attempt((), sum));
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
