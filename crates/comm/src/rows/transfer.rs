//! Dispatch and combine of rows by a plan, blocking or started now and finished later.

use moeworks_plan::{Algorithm, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor};

use super::row_format::{RowFormat, Sums, pick};
use super::{Hop, Part, RowPlan, times};
use crate::hierarchy::{PendingAllToAll, starts};
use crate::started::Pending;
use crate::wire::decode;
use crate::{CommError, Communicator, Hierarchy};

/// A dispatch in flight.
#[must_use = "a started communication is finished, or the other ranks wait for it"]
pub struct PendingDispatch {
    format: RowFormat,
    dtype: DType,
    /// The hop that leaves this rank, of each part.
    parts: Vec<PendingAllToAll>,
}

/// A combine in flight.
#[must_use = "a started communication is finished, or the other ranks wait for it"]
pub struct PendingCombine {
    format: RowFormat,
    dtype: DType,
    /// The hop that comes back to this rank, of each part.
    parts: Vec<PendingAllToAll>,
}

/// A hop inside the node in flight.
type PendingInside = Pending<(Vec<u8>, Vec<u8>)>;

/// The rows of a part that have arrived, or are on their last hop.
enum Arriving {
    There(Vec<u8>),
    Inside(PendingInside),
}

impl Arriving {
    /// Waits for the rows.
    fn finish(self) -> Result<Vec<u8>, CommError> {
        match self {
            Self::There(rows) => Ok(rows),
            Self::Inside(pending) => Ok(pending.finish()?.1),
        }
    }
}

impl PendingDispatch {
    /// Makes progress without waiting. An error is returned at the end.
    pub fn advance(&mut self) {
        let _ = self.parts.iter_mut().try_for_each(PendingAllToAll::advance);
    }
}

impl PendingCombine {
    /// Makes progress without waiting. An error is returned at the end.
    pub fn advance(&mut self) {
        let _ = self.parts.iter_mut().try_for_each(PendingAllToAll::advance);
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

    /// Starts [`dispatch`](Self::dispatch). On the two-hop path only the hops between nodes are in flight. Those
    /// inside the node follow when the dispatch is finished, each as soon as its part has come.
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
        let start = |part: &Part| {
            let packed = format.pack(rows, &part.leaving.rows);
            part.leaving.start(hierarchy, self.algorithm, packed, format.bytes)
        };
        let parts = self.parts.iter().map(start).collect::<Result<_, _>>()?;
        Ok(PendingDispatch { format, dtype: rows.dtype(), parts })
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
        let PendingDispatch { format, dtype, parts } = started;
        let mut arriving = Vec::with_capacity(parts.len());
        for (part, pending) in self.parts.iter().zip(parts) {
            let received = pending.finish(hierarchy)?;
            arriving.push(match &part.inside {
                None => Arriving::There(received),
                Some(inside) => {
                    let handed_on = pick(&received, &inside.rows, format.bytes);
                    Arriving::Inside(inside.start_inside(&*hierarchy.node_comm, handed_on, format.bytes)?)
                }
            });
        }
        let received = arriving.into_iter().map(Arriving::finish).collect::<Result<Vec<_>, _>>()?;
        Ok(format.unpack(&self.in_order(received, format.bytes), dtype, pool))
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

    /// Starts [`combine`](Self::combine). On the two-hop path the hops inside the node are complete on return; the
    /// hop of a part between nodes begins while those of the next parts inside the node are in flight.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn start_combine(&self, hierarchy: &Hierarchy, rows: &Tensor, wire: Wire) -> Result<PendingCombine, CommError> {
        let format = RowFormat::new(wire, rows.cols());
        assert_eq!(rows.rows(), self.num_received(), "rows received by the plan");
        let mut returning = Vec::with_capacity(self.parts.len());
        for (index, part) in self.parts.iter().enumerate() {
            let back = format.pack(rows, &self.places_of(index));
            returning.push(match &part.inside {
                None => Arriving::There(back),
                Some(inside) => {
                    let back = part.out_of_order(&back, format.bytes);
                    Arriving::Inside(inside.start_back_inside(&*hierarchy.node_comm, back, format.bytes)?)
                }
            });
        }
        let start = |(part, back): (&Part, Arriving)| {
            let mut back = back.finish()?;
            if let Some(inside) = &part.inside {
                let sums = format.sum(&back, &inside.rows, part.leaving.recv_counts.iter().sum());
                back = format.encode_all(&sums);
            }
            part.leaving.start_back(hierarchy, self.algorithm, back, format.bytes)
        };
        let parts = self.parts.iter().zip(returning).map(start).collect::<Result<_, _>>()?;
        Ok(PendingCombine { format, dtype: rows.dtype(), parts })
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
        let PendingCombine { format, dtype, parts } = started;
        let mut sums = Vec::with_capacity(self.rows.len() * format.width);
        for (part, pending) in self.parts.iter().zip(parts) {
            sums.extend(part.sum_nodes(hierarchy, &format, &pending.finish(hierarchy)?));
        }
        Ok(format.tensor(&sums, self.rows.len(), dtype, pool))
    }

    /// Orders received rows, of each part in the order of its last hop, by their sources and then by the part.
    fn in_order(&self, mut received: Vec<Vec<u8>>, bytes: usize) -> Vec<u8> {
        if let ([Part { inside: None, .. }], [_]) = (&self.parts[..], &received[..]) {
            return received.swap_remove(0);
        }
        let mut ordered = Vec::with_capacity(self.num_received() * bytes);
        for source in 0..self.recv_counts.len() {
            for (part, received) in self.parts.iter().zip(&received) {
                let start = part.starts[source] * bytes;
                ordered.extend_from_slice(&received[start..start + part.recv_counts[source] * bytes]);
            }
        }
        ordered
    }

    /// Returns the places, among all received rows, of those of the part with this index, by their sources.
    fn places_of(&self, index: usize) -> Vec<u32> {
        let (mut places, mut start) = (Vec::new(), 0);
        for source in 0..self.recv_counts.len() {
            let before: usize = self.parts[..index].iter().map(|part| part.recv_counts[source]).sum();
            let first = start + before;
            places.extend((first..first + self.parts[index].recv_counts[source]).map(|place| place as u32));
            start += self.recv_counts[source];
        }
        places
    }
}

impl Part {
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

    /// Orders rows, which lie by their sources, as the hop inside the node takes them.
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

    fn start_inside(&self, node: &dyn Communicator, packed: Vec<u8>, bytes: usize) -> Result<PendingInside, CommError> {
        let (sends, recvs) = (times(&self.send_counts, bytes), times(&self.recv_counts, bytes));
        node.start_all_to_all_v(packed, &sends, vec![0; recvs.iter().sum()], &recvs)
    }

    fn start_back_inside(
        &self,
        node: &dyn Communicator,
        packed: Vec<u8>,
        bytes: usize,
    ) -> Result<PendingInside, CommError> {
        let (sends, recvs) = (times(&self.recv_counts, bytes), times(&self.send_counts, bytes));
        node.start_all_to_all_v(packed, &sends, vec![0; recvs.iter().sum()], &recvs)
    }
}

/// Returns the path of one hop. Of the two-hop path each hop is linear: each node has one relay for this rank, so
/// that nothing has to be collected in the node first.
fn path(algorithm: Algorithm) -> Algorithm {
    if algorithm == Algorithm::TwoHop { Algorithm::Linear } else { algorithm }
}
