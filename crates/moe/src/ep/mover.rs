//! Moving experts between ranks: tensors `[held, ..]` of one placement become those of another.
//!
//! Only the rows of experts that arrive on a rank travel, in one all-to-all for all tensors of a move (weights, and
//! in training their moments). A move is started and finished, so that the rank computes while experts travel. The
//! caller puts the placement in force when all tensors of the layer have moved.

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_ops::Context;
use moeworks_plan::{ExpertTransfer, Nodes, Placement, expert_transfers};
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
pub(super) fn expert_bytes(tensor: &Tensor) -> usize {
    tensor.shape()[1..].iter().product::<usize>() / tensor.dtype().block_len() * tensor.dtype().size()
}

/// Returns the place of `expert` among `held`. Panics if it is not there.
fn place(held: &[usize], expert: usize) -> usize {
    held.binary_search(&expert).expect("an expert that the rank holds")
}

/// A move of experts that is on its way.
#[must_use = "a started move is finished, or the other ranks wait for it"]
pub struct PendingExperts {
    pending: Pending<(Vec<u8>, Vec<u8>)>,
    arriving: ExpertRows,
}

/// The rows of experts that arrived on this rank, and the experts that it holds before and after.
pub struct ExpertRows {
    bytes: Vec<u8>,
    /// The bytes of an expert in each tensor.
    sizes: Vec<usize>,
    /// The experts that arrive, in the order of their rows.
    experts: Vec<usize>,
    old: Vec<usize>,
    new: Vec<usize>,
}

impl ExpertRanks {
    /// Starts to send the rows of experts from the ranks that hold them by placement `from` to those that hold them
    /// by `to`. `tensors [held, ..]` are those of this rank by `from`, and keep their values. All ranks of the group
    /// make this call with the same placements and kinds of tensors.
    ///
    /// # Errors
    /// [`CommError`] if a rank died, hangs, or made another call.
    pub fn start_move(
        &self,
        from: &Placement,
        to: &Placement,
        tensors: &[&Tensor],
    ) -> Result<PendingExperts, CommError> {
        start_move(self.group(), self.nodes(), Ends { from, to }, tensors)
    }

    /// Sends the rows of experts as [`start_move`](Self::start_move) does, and waits: `tensors` become those of `to`.
    /// Returns the bytes that this rank received. The placements in force stay.
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
        let read: Vec<&Tensor> = tensors.iter().map(|tensor| &**tensor).collect();
        let rows = self.start_move(from, to, &read)?.finish()?;
        for (index, tensor) in tensors.iter_mut().enumerate() {
            **tensor = rows.built(ctx, index, tensor);
        }
        Ok(rows.num_bytes())
    }
}

/// The placements of a layer before and after a move.
#[derive(Clone, Copy)]
pub(super) struct Ends<'a> {
    pub(super) from: &'a Placement,
    pub(super) to: &'a Placement,
}

/// Starts a move of the experts in `tensors [held, ..]` among the ranks of `comm`, which all make this call.
pub(super) fn start_move(
    comm: &dyn Communicator,
    nodes: &Nodes,
    ends: Ends<'_>,
    tensors: &[&Tensor],
) -> Result<PendingExperts, CommError> {
    let Ends { from, to } = ends;
    let (rank, size) = (comm.rank(), comm.size());
    let pieces = Pieces::new(&expert_transfers(from, to, nodes), rank);
    let (old, new) = (from.experts_of(rank), to.experts_of(rank));
    let sizes: Vec<usize> = tensors.iter().map(|tensor| expert_bytes(tensor)).collect();
    let bytes: usize = sizes.iter().sum();
    let counts = |transfers: &[ExpertTransfer], other: fn(&ExpertTransfer) -> usize| -> Vec<usize> {
        (0..size).map(|rank| transfers.iter().filter(|t| other(t) == rank).count() * bytes).collect()
    };
    let sent = packed(tensors, &old, &pieces.sent);
    let received = vec![0_u8; pieces.received.len() * bytes];
    let send_counts = counts(&pieces.sent, |transfer| transfer.to);
    let recv_counts = counts(&pieces.received, |transfer| transfer.from);
    let pending = comm.start_all_to_all_v(sent, &send_counts, received, &recv_counts)?;
    let experts = pieces.received.iter().map(|transfer| transfer.expert).collect();
    Ok(PendingExperts { pending, arriving: ExpertRows { bytes: Vec::new(), sizes, experts, old, new } })
}

impl PendingExperts {
    /// Waits until all rows have arrived.
    ///
    /// # Errors
    /// [`CommError`] if a rank died, hangs, or made another call.
    pub fn finish(self) -> Result<ExpertRows, CommError> {
        let (_, bytes) = self.pending.finish()?;
        Ok(ExpertRows { bytes, ..self.arriving })
    }
}

impl ExpertRows {
    /// Returns the bytes that this rank received.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Lists the rows of tensors `[held, ..]` that belong to another expert after the move than before; none if their
    /// number changes.
    #[must_use]
    pub fn changed_rows(&self) -> Option<Vec<usize>> {
        let is_same_number = self.old.len() == self.new.len();
        is_same_number.then(|| (0..self.new.len()).filter(|&row| self.old[row] != self.new[row]).collect())
    }

    /// Turns `tensor [held, ..]`, number `index` of the move, into that of the placement to which experts moved.
    /// Writes only the rows that change if the number of experts stays. Panics if the memory is shared.
    pub fn place(&self, ctx: &Context, index: usize, tensor: &mut Tensor) {
        let size = self.sizes[index];
        let Some(changed) = self.changed_rows() else {
            *tensor = self.built(ctx, index, tensor);
            return;
        };
        let mut rows = vec![0; changed.len() * size];
        for (to, &row) in rows.chunks_exact_mut(size.max(1)).zip(&changed) {
            self.read(index, tensor, self.new[row], to);
        }
        let bytes = if changed.is_empty() { &mut [] } else { tensor.bytes_mut() };
        for (from, &row) in rows.chunks_exact(size.max(1)).zip(&changed) {
            bytes[row * size..(row + 1) * size].copy_from_slice(from);
        }
    }

    /// Builds the tensor of the placement to which experts moved from `tensor`, number `index` of the move.
    #[must_use]
    pub fn built(&self, ctx: &Context, index: usize, tensor: &Tensor) -> Tensor {
        let mut shape = tensor.shape().to_vec();
        shape[0] = self.new.len();
        let mut built = ctx.empty(&shape, tensor.dtype());
        for (to, &expert) in built.bytes_mut().chunks_exact_mut(self.sizes[index].max(1)).zip(&self.new) {
            self.read(index, tensor, expert, to);
        }
        built
    }

    /// Reads an expert's row, which has arrived or is in the `tensor` of before.
    fn read(&self, index: usize, tensor: &Tensor, expert: usize, row: &mut [u8]) {
        let size = self.sizes[index];
        match self.experts.iter().position(|&other| other == expert) {
            Some(piece) => {
                let start = piece * self.sizes.iter().sum::<usize>() + self.sizes[..index].iter().sum::<usize>();
                row.copy_from_slice(&self.bytes[start..start + size]);
            }
            None => tensor.read_bytes(place(&self.old, expert) * size, row),
        }
    }
}

/// Packs the rows of the experts that leave this rank, which holds `held`: expert by expert, for each the rows of all
/// tensors.
fn packed(tensors: &[&Tensor], held: &[usize], sent: &[ExpertTransfer]) -> Vec<u8> {
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
