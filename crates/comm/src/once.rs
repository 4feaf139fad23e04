//! Collectives in which nothing crosses to a node more than once: what a rank gives to all goes to one rank of each other node and
//! is handed on there, and sums are taken over the ranks of a node before they leave it.

use bytemuck::Pod;

use crate::hierarchy::{Hierarchy, starts};
use crate::{CommError, Reduce};

/// The tag of pieces between nodes. They need no other: between two ranks they keep their order.
const PIECES: u32 = 32_001;

impl Hierarchy {
    /// `Communicator::all_gather_v` with each piece sent once to each other node: the same result, in other messages.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn all_gather_v<T: Pod>(&self, send: &[T], recv: &mut [T], counts: &[usize]) -> Result<(), CommError> {
        let own = self.comm().rank();
        let is_fitting = counts.get(own) == Some(&send.len()) && counts.iter().sum::<usize>() == recv.len();
        if self.grid.num() == 1 || counts.len() != self.comm().size() || !is_fitting {
            // Says what is wrong, if anything is.
            return self.comm().all_gather_v(send, recv, counts);
        }
        let bytes: &[u8] = bytemuck::cast_slice(send);
        let mut leaving = Vec::new();
        for node in self.other_nodes().filter(|_| !bytes.is_empty()) {
            leaving.push(self.comm().start_send(bytes.to_vec(), self.grid.relay(node, own), PIECES)?);
        }
        let arrive = |&rank: &usize| match counts[rank] * size_of::<T>() {
            0 => Ok(None),
            _ if rank == own => Ok(None),
            len => self.comm().start_receive(vec![0_u8; len], rank, PIECES).map(Some),
        };
        let served: Vec<usize> = self.grid.served_by(own).collect();
        let arriving: Vec<_> = served.iter().map(arrive).collect::<Result<_, _>>()?;
        let mut collected = Vec::new();
        for (&rank, arriving) in served.iter().zip(arriving) {
            match arriving {
                Some(pending) => collected.extend(pending.finish()?),
                None if rank == own => collected.extend_from_slice(bytes),
                None => {}
            }
        }
        let (order, lens) = self.order_in_node(counts, size_of::<T>());
        let mut unordered = vec![0_u8; size_of_val(recv)];
        self.node.all_gather_v(&collected, &mut unordered, &lens)?;
        let (recv, starts) = (bytemuck::cast_slice_mut::<T, u8>(recv), starts(counts));
        let mut rest = &unordered[..];
        for rank in order {
            let (piece, others) = rest.split_at(counts[rank] * size_of::<T>());
            recv[starts[rank] * size_of::<T>()..][..piece.len()].copy_from_slice(piece);
            rest = others;
        }
        leaving.into_iter().try_for_each(|pending| pending.finish().map(drop))
    }

    /// `Communicator::reduce_scatter` of sums of f32, taken over the ranks of a node first, in their order, then over nodes in
    /// theirs: a sum is sent once between two nodes.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn sum_scatter(&self, send: &[f32], counts: &[usize], recv: &mut [f32]) -> Result<(), CommError> {
        let own = self.comm().rank();
        let is_fitting = counts.get(own) == Some(&recv.len()) && counts.iter().sum::<usize>() == send.len();
        if self.grid.num() == 1 || counts.len() != self.comm().size() || !is_fitting {
            return self.comm().reduce_scatter(send, counts, recv, Reduce::Sum);
        }
        let (order, lens) = self.order_in_node(counts, 1);
        let starts = starts(counts);
        let ordered: Vec<f32> = order.iter().flat_map(|&rank| &send[starts[rank]..][..counts[rank]]).copied().collect();
        let mut sums = vec![0.0; lens[self.node.rank()]];
        self.node.reduce_scatter(&ordered, &lens, &mut sums, Reduce::Sum)?;
        let (mut leaving, mut of_node, mut rest) = (Vec::new(), &[][..], &sums[..]);
        for rank in self.grid.served_by(own) {
            let (piece, others) = rest.split_at(counts[rank]);
            match rank {
                _ if rank == own => of_node = piece,
                _ if piece.is_empty() => {}
                _ => leaving.push(self.comm().start_send(piece.to_vec(), rank, PIECES)?),
            }
            rest = others;
        }
        let mut arriving = Vec::new();
        for node in self.other_nodes().filter(|_| !recv.is_empty()) {
            let from = self.grid.relay(node, own);
            arriving.push((node, self.comm().start_receive(vec![0.0_f32; recv.len()], from, PIECES)?));
        }
        let here = self.grid.of(own);
        let mut parts: Vec<(usize, Vec<f32>)> = vec![(here, of_node.to_vec())];
        for (node, pending) in arriving {
            parts.push((node, pending.finish()?));
        }
        parts.sort_by_key(|&(node, _)| node);
        recv.copy_from_slice(&parts[0].1);
        for (_, part) in &parts[1..] {
            recv.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        leaving.into_iter().try_for_each(|pending| pending.finish().map(drop))
    }

    fn other_nodes(&self) -> impl Iterator<Item = usize> + '_ {
        let here = self.grid.of(self.comm().rank());
        (0..self.grid.num()).filter(move |&node| node != here)
    }

    /// The ranks of the group in the order in which the node's ranks collect pieces for them, and how many units, of `size` for each
    /// of `counts`, each of these collects.
    fn order_in_node(&self, counts: &[usize], size: usize) -> (Vec<usize>, Vec<usize>) {
        let near = &self.grid.ranks()[self.grid.of(self.comm().rank())];
        let served: Vec<Vec<usize>> = near.iter().map(|&rank| self.grid.served_by(rank).collect()).collect();
        let units = |ranks: &Vec<usize>| ranks.iter().map(|&rank| counts[rank] * size).sum();
        let lens = served.iter().map(units).collect();
        (served.concat(), lens)
    }
}
