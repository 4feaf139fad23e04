//! Hierarchical all-to-all: within the node first, then between nodes, in messages larger by the number of ranks of a
//! node (Tutel, arXiv 2206.03382, section 4.3, "two-dimensional hierarchical").
//!
//! Rank i of node a first hands its data for rank j of any node to rank j of its own node (modulo the ranks of node
//! a, if nodes differ in size). That rank sends what it collected on its node to rank j of the other node in one
//! message. A rank thus talks to the ranks of its node and to one rank of each other node instead of to all ranks.

use bytemuck::Pod;
use moeworks_plan::{Algorithm, Nodes};

use crate::started::Pending;
use crate::{CommError, Communicator};

/// The tag of messages between nodes. One suffices, because messages between two ranks keep their order.
const BETWEEN_NODES: u32 = 32_000;

/// A group of ranks with the nodes that they run on.
pub struct Hierarchy {
    comm: Box<dyn Communicator>,
    /// The communicator of this node's ranks, in the order of the group.
    pub(crate) node_comm: Box<dyn Communicator>,
    /// The node of each rank.
    pub(crate) nodes: Nodes,
}

/// A message in flight from the relay of the node with this number.
type FromNode = (usize, Pending<Vec<u8>>);

/// The messages in flight between nodes.
pub(crate) struct BetweenNodes {
    arriving: Vec<FromNode>,
    leaving: Vec<Pending<Vec<u8>>>,
}

impl BetweenNodes {
    /// Waits for the messages and copies their pieces to their places in `recv`.
    fn finish(self, hierarchy: &Hierarchy, recv: &mut [u8], recvs: &Pieces) -> Result<(), CommError> {
        for (node, pending) in self.arriving {
            let message = pending.finish()?;
            let mut start = 0;
            for &source in &hierarchy.nodes.ranks()[node] {
                let len = recvs.counts[source];
                recv[recvs.range(source)].copy_from_slice(&message[start..start + len]);
                start += len;
            }
        }
        self.leaving.into_iter().try_for_each(|pending| pending.finish().map(drop))
    }
}

/// A started all-to-all of bytes.
pub(crate) enum PendingAllToAll {
    Direct(Pending<(Vec<u8>, Vec<u8>)>),
    ByNodes { started: BetweenNodes, recv: Vec<u8>, recvs: Pieces },
}

impl PendingAllToAll {
    /// Waits for the end and returns the received bytes.
    pub(crate) fn finish(self, hierarchy: &Hierarchy) -> Result<Vec<u8>, CommError> {
        match self {
            Self::Direct(pending) => Ok(pending.finish()?.1),
            Self::ByNodes { started, mut recv, recvs } => {
                started.finish(hierarchy, &mut recv, &recvs)?;
                Ok(recv)
            }
        }
    }

    /// Makes progress without waiting.
    pub(crate) fn advance(&mut self) -> Result<(), CommError> {
        match self {
            Self::Direct(pending) => pending.is_finished().map(drop),
            Self::ByNodes { started, .. } => {
                started.arriving.iter_mut().try_for_each(|(_, pending)| pending.is_finished().map(drop))
            }
        }
    }
}

/// The sizes and starts of consecutive pieces.
pub(crate) struct Pieces {
    counts: Vec<usize>,
    starts: Vec<usize>,
}

/// Returns the start of each of several consecutive pieces.
pub(crate) fn starts(counts: &[usize]) -> Vec<usize> {
    let mut end = 0;
    let ends = counts.iter().map(|&count| {
        end += count;
        end - count
    });
    ends.collect()
}

impl Pieces {
    fn new(counts: Vec<usize>) -> Self {
        let starts = starts(&counts);
        Self { counts, starts }
    }

    fn from_elements<T>(counts: &[usize]) -> Self {
        Self::new(counts.iter().map(|count| count * size_of::<T>()).collect())
    }

    fn range(&self, index: usize) -> std::ops::Range<usize> {
        self.starts[index]..self.starts[index] + self.counts[index]
    }

    fn total(&self) -> usize {
        self.counts.iter().sum()
    }
}

impl Hierarchy {
    /// Makes a hierarchy of the ranks of `comm`, in a group of its own. All ranks must call it.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn new(comm: &dyn Communicator) -> Result<Self, CommError> {
        match comm.split(Some(0), comm.rank())? {
            Some(all) => Self::from_comm(all),
            None => Err(comm.abort("the split returned no group for a rank with a color")),
        }
    }

    /// Makes a hierarchy of the ranks of `comm`. All ranks must call it.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn from_comm(comm: Box<dyn Communicator>) -> Result<Self, CommError> {
        let nodes = Nodes::new(comm.nodes());
        let Some(node_comm) = comm.split(u32::try_from(nodes.of(comm.rank())).ok(), comm.rank())? else {
            return Err(comm.abort("more nodes than can be numbered"));
        };
        Ok(Self { comm, node_comm, nodes })
    }

    /// Returns the communicator of the whole group.
    #[must_use]
    pub fn comm(&self) -> &dyn Communicator {
        &*self.comm
    }

    /// Returns the nodes that the ranks run on.
    #[must_use]
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Does `Communicator::all_to_all_v` by the given path, with the same result. `TwoHop` equals `Hierarchical`
    /// here: a plain all-to-all has no row that could be sent to a node once for several ranks.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn all_to_all_v<T: Pod>(
        &self,
        algorithm: Algorithm,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        if algorithm == Algorithm::Linear || self.nodes.num() == 1 {
            return self.comm.all_to_all_v(send, send_counts, recv, recv_counts);
        }
        let (sends, recvs) = (Pieces::from_elements::<T>(send_counts), Pieces::from_elements::<T>(recv_counts));
        let sizes = (send_counts.len(), recv_counts.len(), sends.total(), recvs.total());
        if sizes != (self.comm.size(), self.comm.size(), size_of_val(send), size_of_val(recv)) {
            // The plain call reports what is wrong with the sizes.
            return self.comm.all_to_all_v(send, send_counts, recv, recv_counts);
        }
        let recv = bytemuck::cast_slice_mut(recv);
        self.start_by_nodes(bytemuck::cast_slice(send), &sends, recv, &recvs)?.finish(self, recv, &recvs)
    }

    /// Starts `all_to_all_v` of bytes; counts are in bytes. The exchange within the node is complete on return, the
    /// messages between nodes stay in flight.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub(crate) fn start_all_to_all_v(
        &self,
        algorithm: Algorithm,
        send: Vec<u8>,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<PendingAllToAll, CommError> {
        let mut recv = vec![0; recv_counts.iter().sum()];
        if algorithm == Algorithm::Linear || self.nodes.num() == 1 {
            return Ok(PendingAllToAll::Direct(self.comm.start_all_to_all_v(send, send_counts, recv, recv_counts)?));
        }
        let (sends, recvs) = (Pieces::new(send_counts.to_vec()), Pieces::new(recv_counts.to_vec()));
        let started = self.start_by_nodes(&send, &sends, &mut recv, &recvs)?;
        Ok(PendingAllToAll::ByNodes { started, recv, recvs })
    }

    fn start_by_nodes(
        &self,
        send: &[u8],
        sends: &Pieces,
        recv: &mut [u8],
        recvs: &Pieces,
    ) -> Result<BetweenNodes, CommError> {
        let own = self.node_comm.rank();
        let targets: Vec<Vec<usize>> = (0..self.node_comm.size()).map(|place| self.targets_of(place)).collect();
        let (collected, pieces) = self.inside(send, sends, &targets)?;
        let arriving = self.start_arriving(recvs)?;
        let mut leaving = Vec::new();
        for (index, &target) in targets[own].iter().enumerate() {
            let from_all = (0..self.node_comm.size()).map(|from| from * targets[own].len() + index);
            if self.is_here(target) {
                // The target on this node is this rank itself: each rank of the node gave what is for this one.
                for (from, piece) in from_all.enumerate() {
                    let source = self.nodes.ranks()[self.own_node()][from];
                    recv[recvs.range(source)].copy_from_slice(&collected[pieces.range(piece)]);
                }
                continue;
            }
            let message = from_all.map(|piece| &collected[pieces.range(piece)]).collect::<Vec<_>>().concat();
            if !message.is_empty() {
                leaving.push(self.comm.start_send(message, target, BETWEEN_NODES)?);
            }
        }
        Ok(BetweenNodes { arriving, leaving })
    }

    /// Does the first step, within the node. Returns the bytes that this rank passes on, in pieces: for each rank of
    /// the node one for each of this rank's targets.
    fn inside(&self, send: &[u8], sends: &Pieces, targets: &[Vec<usize>]) -> Result<(Vec<u8>, Pieces), CommError> {
        let (own, size) = (self.node_comm.rank(), self.node_comm.size());
        let lens: Vec<usize> = targets.iter().map(Vec::len).collect();
        let announced: Vec<u64> = targets.iter().flatten().map(|&target| sends.counts[target] as u64).collect();
        let mut counts = vec![0_u64; size * lens[own]];
        self.node_comm.all_to_all_v(&announced, &lens, &mut counts, &vec![lens[own]; size])?;
        let pieces = Pieces::new(counts.into_iter().map(|count| count as usize).collect());
        // All pieces for one rank lie together. This is the one copy that orders the rows.
        let packed = targets.iter().flatten().map(|&target| &send[sends.range(target)]).collect::<Vec<_>>().concat();
        let sum = |list: &[usize]| list.iter().map(|&target| sends.counts[target]).sum();
        let send_counts: Vec<usize> = targets.iter().map(|list| sum(list)).collect();
        let from = |place: usize| pieces.counts[place * lens[own]..(place + 1) * lens[own]].iter().sum();
        let recv_counts: Vec<usize> = (0..size).map(from).collect();
        let mut collected = vec![0; pieces.total()];
        self.node_comm.all_to_all_v(&packed, &send_counts, &mut collected, &recv_counts)?;
        Ok((collected, pieces))
    }

    /// Starts to receive what other nodes send here, each through one of its ranks.
    fn start_arriving(&self, recvs: &Pieces) -> Result<Vec<FromNode>, CommError> {
        let mut arriving = Vec::new();
        for node in (0..self.nodes.num()).filter(|&node| node != self.own_node()) {
            let bytes: usize = self.nodes.ranks()[node].iter().map(|&source| recvs.counts[source]).sum();
            if bytes > 0 {
                let from = self.nodes.relay(node, self.comm.rank());
                arriving.push((node, self.comm.start_receive(vec![0; bytes], from, BETWEEN_NODES)?));
            }
        }
        Ok(arriving)
    }

    pub(crate) fn own_node(&self) -> usize {
        self.nodes.of(self.comm.rank())
    }

    fn is_here(&self, rank: usize) -> bool {
        self.nodes.of(rank) == self.own_node()
    }

    /// Returns the ranks that the rank at this place of the node passes pieces on to, itself included.
    pub(crate) fn targets_of(&self, place: usize) -> Vec<usize> {
        self.nodes.served_by(self.nodes.ranks()[self.own_node()][place]).collect()
    }
}
