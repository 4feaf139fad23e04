//! Dispatch and combine of rows by a plan, blocking or started now and finished later.

use moeworks_plan::{Algorithm, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use super::row_format::{RowFormat, Sums, pick};
use super::{Hop, RowPlan, times};
use crate::hierarchy::{PendingAllToAll, starts};
use crate::wire::decode;
use crate::{CommError, Communicator, Hierarchy};

/// A dispatch in flight.
#[must_use = "a started communication is finished, or the other ranks wait for it"]
pub struct PendingDispatch {
    format: RowFormat,
    dtype: DType,
    pending: PendingAllToAll,
}

/// A combine in flight.
#[must_use = "a started communication is finished, or the other ranks wait for it"]
pub struct PendingCombine {
    format: RowFormat,
    dtype: DType,
    pending: PendingAllToAll,
}

impl PendingDispatch {
    /// Makes progress without waiting. An error is returned at the end.
    pub fn advance(&mut self) {
        let _ = self.pending.advance();
    }
}

impl PendingCombine {
    /// Makes progress without waiting. An error is returned at the end.
    pub fn advance(&mut self) {
        let _ = self.pending.advance();
    }
}

impl RowPlan {
    /// Sends each row of `rows` (`[T, D]`, f32 or bf16) to its ranks in the format `wire`. Returns the rows received,
    /// `[R, D]` in the type of `rows`.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn dispatch(
        &self,
        hierarchy: &Hierarchy,
        rows: &Tensor,
        wire: Wire,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        let started = self.start_dispatch(hierarchy, rows, wire)?;
        self.finish_dispatch(hierarchy, started, pool)
    }

    /// Starts [`dispatch`](Self::dispatch). On the two-hop path only the hop between nodes is in flight; the hop
    /// inside the node follows when it is finished.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn start_dispatch(
        &self,
        hierarchy: &Hierarchy,
        rows: &Tensor,
        wire: Wire,
    ) -> Result<PendingDispatch, CommError> {
        assert_eq!(rows.rows(), self.num_rows, "rows of the plan");
        let format = RowFormat::new(wire, rows.cols());
        let packed = format.pack(rows, &self.leaving.rows);
        let pending = self.leaving.start(hierarchy, self.algorithm, packed, format.bytes)?;
        Ok(PendingDispatch { format, dtype: rows.dtype(), pending })
    }

    /// Finishes a dispatch that [`start_dispatch`](Self::start_dispatch) of this plan started.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn finish_dispatch(
        &self,
        hierarchy: &Hierarchy,
        started: PendingDispatch,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        let PendingDispatch { format, dtype, pending } = started;
        let mut received = pending.finish(hierarchy)?;
        if let Some(inside) = &self.inside {
            let handed_on = pick(&received, &inside.rows, format.bytes);
            let unordered = inside.exchange_inside(&*hierarchy.node_comm, &handed_on, format.bytes)?;
            received = self.in_order(&unordered, format.bytes);
        }
        Ok(format.unpack(&received, dtype, pool))
    }

    /// Sends rows back: row i of `rows` (`[R, D]`) belongs to the row that was received as number i. Returns `[T, D]`
    /// for the plan's [`rows`](Self::rows): each is the sum, taken in f32, of its rows that came back, or zeros if it
    /// went nowhere.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn combine(
        &self,
        hierarchy: &Hierarchy,
        rows: &Tensor,
        wire: Wire,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        let started = self.start_combine(hierarchy, rows, wire)?;
        self.finish_combine(hierarchy, started, pool)
    }

    /// Starts [`combine`](Self::combine). On the two-hop path the hop inside the node is complete on return.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn start_combine(&self, hierarchy: &Hierarchy, rows: &Tensor, wire: Wire) -> Result<PendingCombine, CommError> {
        let format = RowFormat::new(wire, rows.cols());
        let num_received = self.num_received();
        assert_eq!(rows.rows(), num_received, "rows received by the plan");
        let all: Vec<u32> = (0..num_received as u32).collect();
        let mut back = format.pack(rows, &all);
        if let Some(inside) = &self.inside {
            let unordered = self.out_of_order(&back, format.bytes);
            let handed_back = inside.return_inside(&*hierarchy.node_comm, &unordered, format.bytes)?;
            let num_rows = self.leaving.recv_counts.iter().sum();
            let sums = format.sum(&handed_back, &inside.rows, num_rows);
            back = format.encode_all(&sums);
        }
        let pending = self.leaving.start_back(hierarchy, self.algorithm, back, format.bytes)?;
        Ok(PendingCombine { format, dtype: rows.dtype(), pending })
    }

    /// Finishes a combine that [`start_combine`](Self::start_combine) of this plan started.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn finish_combine(
        &self,
        hierarchy: &Hierarchy,
        started: PendingCombine,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        let PendingCombine { format, dtype, pending } = started;
        let parts = pending.finish(hierarchy)?;
        let sums = self.sum_nodes(hierarchy, &format, &parts);
        Ok(format.tensor(&sums, self.rows.len(), dtype, pool))
    }

    /// Sums over the ranks of a node first, then over nodes.
    fn sum_nodes(&self, hierarchy: &Hierarchy, format: &RowFormat, parts: &[u8]) -> Vec<f32> {
        let starts = starts(&self.leaving.send_counts);
        let mut total: Option<Sums> = None;
        for ranks in hierarchy.nodes.ranks() {
            let mut of_node = Sums::new(self.rows.len(), format.width);
            let mut row = vec![0.0; format.width];
            for &rank in ranks {
                for index in starts[rank]..starts[rank] + self.leaving.send_counts[rank] {
                    decode(format.wire, &parts[index * format.bytes..(index + 1) * format.bytes], &mut row);
                    of_node.add(self.leaving.rows[index] as usize - self.rows.start, &row);
                }
            }
            match &mut total {
                None => total = Some(of_node),
                Some(total) => total.add_all(&of_node),
            }
        }
        total.map_or_else(Vec::new, |total| total.values)
    }

    /// Reorders rows from inside the node, which lie in the order of relays, by their sources.
    fn in_order(&self, unordered: &[u8], bytes: usize) -> Vec<u8> {
        let piece = |(&start, &count): (&usize, &usize)| &unordered[start * bytes..(start + count) * bytes];
        self.starts.iter().zip(&self.recv_counts).map(piece).collect::<Vec<_>>().concat()
    }

    fn out_of_order(&self, ordered: &[u8], bytes: usize) -> Vec<u8> {
        let mut unordered = vec![0; ordered.len()];
        let mut from = 0;
        for (&start, &count) in self.starts.iter().zip(&self.recv_counts) {
            let len = count * bytes;
            unordered[start * bytes..start * bytes + len].copy_from_slice(&ordered[from..from + len]);
            from += len;
        }
        unordered
    }
}

impl Hop {
    fn start(
        &self,
        hierarchy: &Hierarchy,
        algorithm: Algorithm,
        packed: Vec<u8>,
        bytes: usize,
    ) -> Result<PendingAllToAll, CommError> {
        let (sends, recvs) = (times(&self.send_counts, bytes), times(&self.recv_counts, bytes));
        hierarchy.start_all_to_all_v(path(algorithm), packed, &sends, &recvs)
    }

    fn start_back(
        &self,
        hierarchy: &Hierarchy,
        algorithm: Algorithm,
        packed: Vec<u8>,
        bytes: usize,
    ) -> Result<PendingAllToAll, CommError> {
        let (sends, recvs) = (times(&self.recv_counts, bytes), times(&self.send_counts, bytes));
        hierarchy.start_all_to_all_v(path(algorithm), packed, &sends, &recvs)
    }

    fn exchange_inside(&self, node: &dyn Communicator, packed: &[u8], bytes: usize) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.send_counts, bytes), times(&self.recv_counts, bytes));
        let mut received = vec![0; recvs.iter().sum()];
        node.all_to_all_v(packed, &sends, &mut received, &recvs)?;
        Ok(received)
    }

    fn return_inside(&self, node: &dyn Communicator, packed: &[u8], bytes: usize) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.recv_counts, bytes), times(&self.send_counts, bytes));
        let mut received = vec![0; recvs.iter().sum()];
        node.all_to_all_v(packed, &sends, &mut received, &recvs)?;
        Ok(received)
    }
}

/// Returns the path of one hop. Of the two-hop path each hop is linear: each node has one relay for this rank, so
/// that nothing has to be collected in the node first.
fn path(algorithm: Algorithm) -> Algorithm {
    if algorithm == Algorithm::TwoHop { Algorithm::Linear } else { algorithm }
}
