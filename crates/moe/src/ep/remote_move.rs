//! Moving experts of a model in use between two passes: the root tells all ranks the placements of a layer before and
//! after, and they send each other the rows of the experts that they lack.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator};
use moeworks_ops::{Activation, Context};
use moeworks_plan::{Nodes, Placement};
use moeworks_tensor::Tensor;

use super::mover::{Ends, start_move};
use super::remote::{HeldLayer, ROOT, RemoteExperts};
use super::remote_message::{Header, TAG_HEADER, TAG_ROWS};
use crate::MoeWeights;

/// The experts of one layer that a rank holds, and may give away.
pub struct OwnedLayer {
    /// The number of the layer.
    pub number: usize,
    /// The weights of the experts of this rank, in ascending order; the router is not used.
    pub weights: MoeWeights,
    /// The activation of the experts.
    pub activation: Activation,
}

impl From<HeldLayer<'_>> for OwnedLayer {
    /// Shares the memory of the weights.
    fn from(layer: HeldLayer<'_>) -> Self {
        Self { number: layer.number, weights: layer.weights.clone(), activation: layer.activation }
    }
}

/// Returns whether the experts of a layer can move: not if their matrices are read in place from a file that keeps
/// them transposed, or their scales elsewhere.
#[must_use]
pub fn can_move(weights: &MoeWeights) -> bool {
    let is_plain = |tensor: &&Tensor| tensor.lines().is_none() && tensor.as_transposed().is_none();
    expert_tensors(weights).iter().all(is_plain)
}

fn expert_tensors(weights: &MoeWeights) -> Vec<&Tensor> {
    let biases = weights.biases.iter().flat_map(|(gate_up, down)| [gate_up, down]);
    [&weights.gate_up, &weights.down].into_iter().chain(biases).collect()
}

/// Returns the bytes of one expert of a layer.
#[must_use]
pub fn bytes_of_expert(weights: &MoeWeights) -> usize {
    expert_tensors(weights).into_iter().map(super::mover::expert_bytes).sum()
}

impl RemoteExperts {
    /// Moves the experts of the layer with this number to the ranks of placement `to`, which the next pass uses.
    /// `weights` are those of the root's model as it was opened; the root keeps what it has now beside them. Returns
    /// the bytes that the root received. Panics if the placement is for other experts or ranks.
    ///
    /// # Errors
    /// [`CommError`] if a rank died or hangs, now or in an earlier pass.
    pub fn move_experts(
        &self,
        ctx: &Context,
        number: usize,
        to: &Placement,
        weights: &MoeWeights,
    ) -> Result<usize, CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let now = self.now(number as u32);
        let ends = Ends { from: &now.placement, to };
        assert_eq!((ends.from.num_experts(), self.num_ranks()), (to.num_experts(), to.num_ranks()), "a placement");
        let weights = now.weights.as_deref().unwrap_or(weights);
        let moved = self.tell(number as u32, ends).and_then(|()| moved(ctx, self.comm(), ends, weights));
        let (weights, num_bytes) = moved.inspect_err(|error| self.fail(error))?;
        self.put_in_force(number as u32, to, Arc::new(weights));
        Ok(num_bytes)
    }

    /// Tells the other ranks of a move.
    fn tell(&self, layer: u32, ends: Ends<'_>) -> Result<(), CommError> {
        let texts = [ends.from.to_string(), ends.to.to_string()];
        let header = Header::of_move(layer, [texts[0].len() as u32, texts[1].len() as u32]);
        for rank in (0..self.num_ranks()).filter(|&rank| rank != ROOT) {
            self.comm().send(&header.to_words(), rank, TAG_HEADER)?;
            self.comm().send(texts.concat().as_bytes(), rank, TAG_ROWS)?;
        }
        Ok(())
    }
}

/// Takes part in a move of which the root has told by `header`.
pub(super) fn take_part(
    ctx: &Context,
    comm: &dyn Communicator,
    header: &Header,
    layers: &mut [OwnedLayer],
) -> Result<(), CommError> {
    let lens = header.lens_of_move();
    let mut bytes = vec![0_u8; lens[0] + lens[1]];
    comm.receive(&mut bytes, ROOT, TAG_ROWS)?;
    let placement = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse::<Placement>().ok();
    let ends = placement(&bytes[..lens[0]]).zip(placement(&bytes[lens[0]..]));
    let layer = layers.iter_mut().find(|layer| layer.number == header.layer as usize);
    let (Some((from, to)), Some(layer)) = (ends, layer) else {
        return Err(comm.abort("the root moves experts that are not on this rank"));
    };
    layer.weights = moved(ctx, comm, Ends { from: &from, to: &to }, &layer.weights)?.0;
    Ok(())
}

/// Sends and receives the rows of experts that move. Returns the weights by the new placement, and the bytes that
/// this rank received.
fn moved(
    ctx: &Context,
    comm: &dyn Communicator,
    ends: Ends<'_>,
    weights: &MoeWeights,
) -> Result<(MoeWeights, usize), CommError> {
    let tensors = expert_tensors(weights);
    let rows = start_move(comm, &Nodes::new(comm.nodes()), ends, &tensors)?.finish()?;
    let built = |index: usize, tensor: &Tensor| rows.built(ctx, index, tensor);
    let weights = MoeWeights {
        gate_up: built(0, &weights.gate_up),
        down: built(1, &weights.down),
        biases: weights.biases.as_ref().map(|(gate_up, down)| (built(2, gate_up), built(3, down))),
        ..weights.clone()
    };
    Ok((weights, rows.num_bytes()))
}
