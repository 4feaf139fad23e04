//! Collectives that cross to each other node once. A rank's piece for all goes to one rank of each other node and is
//! handed on there; sums are taken over the ranks of a node before they leave it.

use bytemuck::Pod;

use crate::hierarchy::{Hierarchy, starts};
use crate::{CommError, Reduce};

/// The tag of pieces between nodes. One suffices, because messages between two ranks keep their order.
const PIECES: u32 = 32_001;

impl Hierarchy {
    /// Does `Communicator::all_gather_v`, with the same result, but sends each piece to each other node only once.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn all_gather_v<T: Pod>(&self, send: &[T], recv: &mut [T], counts: &[usize]) -> Result<(), CommError> {
        let own = self.comm().rank();
        let is_fitting = counts.get(own) == Some(&send.len()) && counts.iter().sum::<usize>() == recv.len();
        if self.nodes.num() == 1 || counts.len() != self.comm().size() || !is_fitting {
            // The plain call reports what is wrong with the sizes, if anything.
            return self.comm().all_gather_v(send, recv, counts);
        }
        let counts: Vec<usize> = counts.iter().map(|count| count * size_of::<T>()).collect();
        let collected = self.collect(bytemuck::cast_slice(send), &counts)?;
        let (order, lens) = self.order_in_node(&counts);
        let mut unordered = vec![0_u8; size_of_val(recv)];
        self.node_comm.all_gather_v(&collected, &mut unordered, &lens)?;
        let (recv, starts) = (bytemuck::cast_slice_mut::<T, u8>(recv), starts(&counts));
        let mut rest = &unordered[..];
        for rank in order {
            let (piece, others) = rest.split_at(counts[rank]);
            recv[starts[rank]..][..piece.len()].copy_from_slice(piece);
            rest = others;
        }
        Ok(())
    }

    /// Sends `piece` to one rank of each other node, and returns the pieces that this rank collects, its own
    /// included. `counts` has the bytes of each rank's piece.
    fn collect(&self, piece: &[u8], counts: &[usize]) -> Result<Vec<u8>, CommError> {
        let (comm, own) = (self.comm(), self.comm().rank());
        let mut leaving = Vec::new();
        for node in self.other_nodes().filter(|_| !piece.is_empty()) {
            leaving.push(comm.start_send(piece.to_vec(), self.nodes.relay(node, own), PIECES)?);
        }
        let mut arriving = Vec::new();
        for rank in self.nodes.served_by(own).filter(|&rank| counts[rank] > 0) {
            let start = || comm.start_receive(vec![0_u8; counts[rank]], rank, PIECES);
            arriving.push((rank != own).then(start).transpose()?);
        }
        let mut collected = Vec::new();
        for pending in arriving {
            match pending {
                Some(pending) => collected.extend(pending.finish()?),
                None => collected.extend_from_slice(piece),
            }
        }
        leaving.into_iter().try_for_each(|pending| pending.finish().map(drop))?;
        Ok(collected)
    }

    /// Does `Communicator::reduce_scatter` for sums of f32, but sends one sum between two nodes. Sums are taken over
    /// the ranks of a node in their order first, then over the nodes in theirs.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn sum_scatter(&self, send: &[f32], counts: &[usize], recv: &mut [f32]) -> Result<(), CommError> {
        let own = self.comm().rank();
        let is_fitting = counts.get(own) == Some(&recv.len()) && counts.iter().sum::<usize>() == send.len();
        if self.nodes.num() == 1 || counts.len() != self.comm().size() || !is_fitting {
            return self.comm().reduce_scatter(send, counts, recv, Reduce::Sum);
        }
        let sums = self.sums_of_node(send, counts)?;
        let (mut parts, mut leaving, mut rest) = (vec![Vec::new(); self.nodes.num()], Vec::new(), &sums[..]);
        for rank in self.nodes.served_by(own) {
            let (piece, others) = rest.split_at(counts[rank]);
            if rank == own {
                parts[self.nodes.of(own)] = piece.to_vec();
            } else if !piece.is_empty() {
                leaving.push(self.comm().start_send(piece.to_vec(), rank, PIECES)?);
            }
            rest = others;
        }
        let mut arriving = Vec::new();
        for node in self.other_nodes().filter(|_| !recv.is_empty()) {
            let from = self.nodes.relay(node, own);
            arriving.push((node, self.comm().start_receive(vec![0.0_f32; recv.len()], from, PIECES)?));
        }
        for (node, pending) in arriving {
            parts[node] = pending.finish()?;
        }
        recv.copy_from_slice(&parts[0]);
        parts[1..].iter().for_each(|part| recv.iter_mut().zip(part).for_each(|(sum, x)| *sum += x));
        leaving.into_iter().try_for_each(|pending| pending.finish().map(drop))
    }

    /// Returns this node's sums of the shares of all ranks that this rank serves, one after another.
    fn sums_of_node(&self, send: &[f32], counts: &[usize]) -> Result<Vec<f32>, CommError> {
        let ((order, lens), starts) = (self.order_in_node(counts), starts(counts));
        let ordered: Vec<f32> = order.iter().flat_map(|&rank| &send[starts[rank]..][..counts[rank]]).copied().collect();
        let mut sums = vec![0.0; lens[self.node_comm.rank()]];
        self.node_comm.reduce_scatter(&ordered, &lens, &mut sums, Reduce::Sum)?;
        Ok(sums)
    }

    fn other_nodes(&self) -> impl Iterator<Item = usize> + '_ {
        let here = self.nodes.of(self.comm().rank());
        (0..self.nodes.num()).filter(move |&node| node != here)
    }

    /// Returns the ranks of the group in the order in which this node's ranks collect pieces for them, and the
    /// elements that each rank of the node collects.
    fn order_in_node(&self, counts: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let near = &self.nodes.ranks()[self.nodes.of(self.comm().rank())];
        let served: Vec<Vec<usize>> = near.iter().map(|&rank| self.nodes.served_by(rank).collect()).collect();
        let lens = served.iter().map(|ranks| ranks.iter().map(|&rank| counts[rank]).sum()).collect();
        (served.concat(), lens)
    }
}
