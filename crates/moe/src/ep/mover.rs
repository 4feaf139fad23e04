//! Moving experts between ranks: tensors `[held, ..]` of one placement become those of another.
//!
//! Only the rows of experts that arrive on a rank travel, in one all-to-all for all tensors of a layer (weights, and
//! in training their masters and moments). The caller puts the placement in force when all tensors of the layer have
//! moved.

use moeworks_comm::CommError;
use moeworks_ops::Context;
use moeworks_plan::{ExpertTransfer, Placement, expert_transfers};
use moeworks_tensor::Tensor;

use super::ExpertRanks;

/// The pieces of an all-to-all on one rank.
struct Pieces {
    /// The transfers that begin here, by their destination.
    sent: Vec<ExpertTransfer>,
    /// The transfers that end here, by their source.
    received: Vec<ExpertTransfer>,
}

impl Pieces {
    fn new(transfers: &[ExpertTransfer], rank: usize) -> Self {
        let mut sent: Vec<_> = transfers.iter().copied().filter(|transfer| transfer.from == rank).collect();
        let mut received: Vec<_> = transfers.iter().copied().filter(|transfer| transfer.to == rank).collect();
        sent.sort_by_key(|transfer| (transfer.to, transfer.expert));
        received.sort_by_key(|transfer| (transfer.from, transfer.expert));
        Self { sent, received }
    }
}

/// Returns the bytes of one expert in `tensor [held, ..]`.
fn expert_bytes(tensor: &Tensor) -> usize {
    tensor.shape()[1..].iter().product::<usize>() * tensor.dtype().size()
}

/// Returns the place of `expert` among `held`. Panics if it is not there.
fn place(held: &[usize], expert: usize) -> usize {
    held.binary_search(&expert).expect("an expert that the rank holds")
}

impl ExpertRanks {
    /// Sends the rows of experts from the ranks that hold them by placement `from` to those that hold them by `to`:
    /// `tensors [held, ..]` of this rank become those of `to`. Returns the bytes that this rank received. All ranks
    /// of the group make this call with the same placements and kinds of tensors. The placements in force stay.
    ///
    /// # Errors
    /// [`CommError`] if a rank died, hangs, or made another call; the tensors are then those of `from`.
    pub fn move_experts(
        &self,
        ctx: &Context,
        from: &Placement,
        to: &Placement,
        mut tensors: Vec<&mut Tensor>,
    ) -> Result<usize, CommError> {
        let (rank, size) = (self.group().rank(), self.group().size());
        let pieces = Pieces::new(&expert_transfers(from, to, self.nodes()), rank);
        let (old, new) = (from.experts_of(rank), to.experts_of(rank));
        let bytes: usize = tensors.iter().map(|tensor| expert_bytes(tensor)).sum();
        let counts = |transfers: &[ExpertTransfer], other: fn(&ExpertTransfer) -> usize| -> Vec<usize> {
            (0..size).map(|rank| transfers.iter().filter(|t| other(t) == rank).count() * bytes).collect()
        };
        let sent = packed(&tensors, &old, &pieces.sent);
        let mut received = vec![0_u8; pieces.received.len() * bytes];
        let send_counts = counts(&pieces.sent, |transfer| transfer.to);
        let recv_counts = counts(&pieces.received, |transfer| transfer.from);
        self.group().all_to_all_v(&sent, &send_counts, &mut received, &recv_counts)?;
        let mut start = 0;
        for tensor in &mut tensors {
            let size = expert_bytes(tensor);
            let arrived = |expert: usize| {
                let piece = pieces.received.iter().position(|transfer| transfer.expert == expert)?;
                Some(&received[piece * bytes + start..piece * bytes + start + size])
            };
            **tensor = placed(ctx, tensor, &old, &new, arrived);
            start += size;
        }
        Ok(received.len())
    }
}

/// Packs the rows of the experts that leave this rank, which holds `held`: expert by expert, for each the rows of all
/// tensors.
fn packed(tensors: &[&mut Tensor], held: &[usize], sent: &[ExpertTransfer]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for transfer in sent {
        let place = place(held, transfer.expert);
        for tensor in tensors {
            let (size, start) = (expert_bytes(tensor), bytes.len());
            bytes.resize(start + size, 0);
            tensor.read_bytes(place * size, &mut bytes[start..]);
        }
    }
    bytes
}

/// Builds the tensor of the experts `new` from that of the experts `old` and the rows that arrived.
fn placed<'a>(
    ctx: &Context,
    tensor: &Tensor,
    old: &[usize],
    new: &[usize],
    arrived: impl Fn(usize) -> Option<&'a [u8]>,
) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    shape[0] = new.len();
    let mut placed = ctx.empty(&shape, tensor.dtype());
    let size = expert_bytes(tensor);
    for (to, &expert) in placed.bytes_mut().chunks_exact_mut(size.max(1)).zip(new) {
        match arrived(expert) {
            Some(rows) => to.copy_from_slice(rows),
            None => tensor.read_bytes(place(old, expert) * size, to),
        }
    }
    placed
}
