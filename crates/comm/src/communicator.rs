//! The interface of one rank to a group of ranks.

use std::time::Duration;

use bytemuck::Pod;

use crate::number::{Number, Reduce};
use crate::operation::{Call, Memory, Operation};
use crate::short_list::with_short_list;
use crate::started::{Pending, RawPending};
use crate::{Buffer, CommError};

/// One rank's interface to a group of ranks. Use it as `&dyn Communicator`, which has the typed calls.
///
/// All ranks of a group make the same calls in the same order; a send and its receive concern only the two ranks. One
/// thread at a time calls for a rank. Between the start of a call and its end others may be started and finished, in
/// any order.
pub trait Communicator: Send + Sync {
    /// Returns this rank's number in the group, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Returns, for each rank of the group, its number in the whole run. Errors use these numbers.
    fn world_ranks(&self) -> &[usize];

    /// Returns the node (machine) of each rank of the group. Nodes are numbered from 0 in the order of their first
    /// ranks.
    fn nodes(&self) -> &[usize];

    /// Starts an operation.
    ///
    /// # Safety
    /// Until the result is finished or dropped, the memory stays valid, nobody else writes to the sent part, and
    /// nobody else reads or writes the received part. Both parts are aligned for the numbers of a reduction.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    unsafe fn start(&self, operation: &Operation<'_>, memory: Memory) -> Result<Box<dyn RawPending>, CommError>;

    /// Starts and finishes an operation. An implementation may override it with a faster way.
    ///
    /// # Safety
    /// The promises of [`start`](Self::start) hold until this returns.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    unsafe fn run(&self, operation: &Operation<'_>, memory: Memory) -> Result<(), CommError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(operation, memory) }?.finish()
    }

    /// Makes a group of the ranks that pass the same `color`, ordered by `key` and then by rank. A rank that passes
    /// `None` takes part in the call but joins no group. Messages of one group are never received in another.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    fn split(&self, color: Option<u32>, key: usize) -> Result<Option<Box<dyn Communicator>>, CommError>;

    /// Sets how long a rank waits for others before it reports them as hung. It holds for the whole run.
    fn set_timeout(&self, timeout: Duration);

    /// Ends the whole run with this error, which all ranks get. Returns the error that the run ended with: an earlier
    /// one if there was one.
    fn fail(&self, error: CommError) -> CommError;
}

/// Blocking typed calls. Counts are in elements, and pieces lie one after another in the order of ranks. All return
/// [`CommError`]; after the first error no call succeeds any more.
#[allow(clippy::missing_errors_doc)] // Said once, above.
impl dyn Communicator + '_ {
    /// Waits until all ranks have called it.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.run_on(&Operation::plain(Call::Barrier), &[], &mut [])
    }

    /// Copies the root's `data` to all ranks. The length is the same everywhere.
    pub fn broadcast<T: Pod>(&self, data: &mut [T], root: usize) -> Result<(), CommError> {
        let bytes = size_of_val(data);
        self.run_on(&Operation::plain(Call::Broadcast { root, bytes }), &[], bytemuck::cast_slice_mut(data))
    }

    /// Gathers `send`, of the same length on all ranks, from all ranks to all. `recv` has `size` times as many
    /// elements.
    pub fn all_gather<T: Pod>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        with_short_list(self.size(), |_| size_of_val(send), |counts| self.all_gather_bytes(send, recv, counts))
    }

    /// Gathers `send` from all ranks to all: `recv_counts[r]` elements from rank r, the same counts on all ranks.
    pub fn all_gather_v<T: Pod>(&self, send: &[T], recv: &mut [T], recv_counts: &[usize]) -> Result<(), CommError> {
        in_bytes(recv_counts, size_of::<T>(), |counts| self.all_gather_bytes(send, recv, counts))
    }

    fn all_gather_bytes<T: Pod>(&self, send: &[T], recv: &mut [T], recv_counts: &[usize]) -> Result<(), CommError> {
        let operation = Operation { call: Call::AllGatherV, send_counts: &[], recv_counts };
        self.run_on(&operation, bytemuck::cast_slice(send), bytemuck::cast_slice_mut(recv))
    }

    /// Sends piece r of `send` to rank r. All pieces have the same length on all ranks.
    pub fn all_to_all<T: Pod>(&self, send: &[T], recv: &mut [T]) -> Result<(), CommError> {
        let size = self.size();
        let piece = send.len() / size * size_of::<T>();
        with_short_list(size, |_| piece, |counts| self.all_to_all_bytes(send, counts, recv, counts))
    }

    /// Sends `send_counts[r]` elements to rank r and receives `recv_counts[r]` from it. Both ranks must agree on the
    /// count.
    pub fn all_to_all_v<T: Pod>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        in_bytes(send_counts, size_of::<T>(), |sent| {
            in_bytes(recv_counts, size_of::<T>(), |received| self.all_to_all_bytes(send, sent, recv, received))
        })
    }

    fn all_to_all_bytes<T: Pod>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        let operation = Operation { call: Call::AllToAllV, send_counts, recv_counts };
        self.run_on(&operation, bytemuck::cast_slice(send), bytemuck::cast_slice_mut(recv))
    }

    /// Reduces `send` over all ranks and gives each rank its share of the result: `counts[r]` elements belong to rank
    /// r.
    pub fn reduce_scatter<T: Number>(
        &self,
        send: &[T],
        counts: &[usize],
        recv: &mut [T],
        reduce: Reduce,
    ) -> Result<(), CommError> {
        let call = Call::ReduceScatter { number: T::KIND, reduce };
        in_bytes(counts, size_of::<T>(), |send_counts| {
            let operation = Operation { call, send_counts, recv_counts: &[] };
            self.run_on(&operation, bytemuck::cast_slice(send), bytemuck::cast_slice_mut(recv))
        })
    }

    /// Reduces `data` in place. All ranks get the same bits.
    pub fn all_reduce<T: Number>(&self, data: &mut [T], reduce: Reduce) -> Result<(), CommError> {
        let call = Call::AllReduce { number: T::KIND, reduce, bytes: size_of_val(data) };
        self.run_on(&Operation::plain(call), &[], bytemuck::cast_slice_mut(data))
    }

    /// Sends `data` to rank `to` and returns when it has been received. The receiver selects the message by `tag`.
    pub fn send<T: Pod>(&self, data: &[T], to: usize, tag: u32) -> Result<(), CommError> {
        let call = Call::Send { to, tag, bytes: size_of_val(data) };
        self.run_on(&Operation::plain(call), bytemuck::cast_slice(data), &mut [])
    }

    /// Receives the message that rank `from` sends with `tag`. It must have exactly the length of `data`.
    pub fn receive<T: Pod>(&self, data: &mut [T], from: usize, tag: u32) -> Result<(), CommError> {
        let call = Call::Receive { from, tag, bytes: size_of_val(data) };
        self.run_on(&Operation::plain(call), &[], bytemuck::cast_slice_mut(data))
    }

    /// Fails if a rank's `fingerprint` differs from that of rank 0. `what` names it in the error, such as
    /// "configuration".
    pub fn check_same(&self, what: &str, fingerprint: &[u8; 32]) -> Result<(), CommError> {
        match self.first_other(fingerprint)? {
            Some(rank) => Err(self.fail(CommError::Refused { rank, what: what.to_owned() })),
            None => Ok(()),
        }
    }

    /// Returns the first rank, by its number in the whole run, whose `fingerprint` differs from that of the group's
    /// rank 0.
    pub fn first_other(&self, fingerprint: &[u8; 32]) -> Result<Option<usize>, CommError> {
        let mut all = vec![[0; 32]; self.size()];
        self.all_gather(std::slice::from_ref(fingerprint), &mut all)?;
        Ok(all.iter().position(|other| *other != all[0]).map(|rank| self.world_ranks()[rank]))
    }

    /// Ends the whole run: all ranks get an error that names this one and the reason.
    pub fn abort(&self, reason: &str) -> CommError {
        self.fail(CommError::Died { rank: self.world_ranks()[self.rank()], reason: reason.to_owned() })
    }

    #[inline(always)] // As all up to the library's call: short calls have no time for it.
    fn run_on(&self, operation: &Operation<'_>, send: &[u8], recv: &mut [u8]) -> Result<(), CommError> {
        // SAFETY: both regions are borrowed until `run` returns; the typed calls cast them from slices of their
        // numbers.
        unsafe { self.run(operation, Memory::new(send, recv)) }
    }
}

/// Non-blocking typed calls. The started call owns its memory until `finish` gives it back.
#[allow(clippy::missing_errors_doc)] // As above.
impl dyn Communicator + '_ {
    /// Starts `broadcast`.
    pub fn start_broadcast<B: Buffer>(&self, data: B, root: usize) -> Result<Pending<B>, CommError> {
        let call = Call::Broadcast { root, bytes: data.bytes().len() };
        self.start_in_place(call, data)
    }

    /// Starts `all_gather_v`.
    pub fn start_all_gather_v<S: Buffer, R: Buffer>(
        &self,
        send: S,
        recv: R,
        recv_counts: &[usize],
    ) -> Result<Pending<(S, R)>, CommError> {
        in_bytes(recv_counts, recv.element_size(), |recv_counts| {
            self.start_on(&Operation { call: Call::AllGatherV, send_counts: &[], recv_counts }, send, recv)
        })
    }

    /// Starts `all_to_all_v`.
    pub fn start_all_to_all_v<S: Buffer, R: Buffer>(
        &self,
        send: S,
        send_counts: &[usize],
        recv: R,
        recv_counts: &[usize],
    ) -> Result<Pending<(S, R)>, CommError> {
        in_bytes(send_counts, send.element_size(), |send_counts| {
            in_bytes(recv_counts, recv.element_size(), |recv_counts| {
                self.start_on(&Operation { call: Call::AllToAllV, send_counts, recv_counts }, send, recv)
            })
        })
    }

    /// Starts `reduce_scatter`. Panics if the elements of `send` cannot be reduced.
    pub fn start_reduce_scatter<S: Buffer, R: Buffer>(
        &self,
        send: S,
        counts: &[usize],
        recv: R,
        reduce: Reduce,
    ) -> Result<Pending<(S, R)>, CommError> {
        let number = send.number().expect("numbers are reduced");
        let call = Call::ReduceScatter { number, reduce };
        in_bytes(counts, send.element_size(), |send_counts| {
            self.start_on(&Operation { call, send_counts, recv_counts: &[] }, send, recv)
        })
    }

    /// Starts `all_reduce`. Panics if the elements cannot be reduced.
    pub fn start_all_reduce<B: Buffer>(&self, data: B, reduce: Reduce) -> Result<Pending<B>, CommError> {
        let number = data.number().expect("numbers are reduced");
        let call = Call::AllReduce { number, reduce, bytes: data.bytes().len() };
        self.start_in_place(call, data)
    }

    /// Starts `send`.
    pub fn start_send<B: Buffer>(&self, data: B, to: usize, tag: u32) -> Result<Pending<B>, CommError> {
        let bytes = data.bytes();
        let operation = Operation::plain(Call::Send { to, tag, bytes: bytes.len() });
        // SAFETY: `Pending` keeps the buffer, and a buffer's memory stays where it is.
        unsafe {
            let raw = self.start(&operation, Memory::new(bytes, &mut []))?;
            Ok(Pending::new(raw, data))
        }
    }

    /// Starts `receive`.
    pub fn start_receive<B: Buffer>(&self, data: B, from: usize, tag: u32) -> Result<Pending<B>, CommError> {
        let call = Call::Receive { from, tag, bytes: data.bytes().len() };
        self.start_in_place(call, data)
    }

    fn start_in_place<B: Buffer>(&self, call: Call, mut data: B) -> Result<Pending<B>, CommError> {
        let memory = Memory::new(&[], data.bytes_mut());
        // SAFETY: `Pending` keeps the buffer, and a buffer's memory stays where it is.
        unsafe {
            let raw = self.start(&Operation::plain(call), memory)?;
            Ok(Pending::new(raw, data))
        }
    }

    fn start_on<S: Buffer, R: Buffer>(
        &self,
        operation: &Operation<'_>,
        send: S,
        mut recv: R,
    ) -> Result<Pending<(S, R)>, CommError> {
        let memory = Memory::new(send.bytes(), recv.bytes_mut());
        // SAFETY: `Pending` keeps both buffers, and a buffer's memory stays where it is.
        unsafe {
            let raw = self.start(operation, memory)?;
            Ok(Pending::new(raw, (send, recv)))
        }
    }
}

/// Calls `work` with counts of elements converted to bytes. An overflow saturates, so that the sum fits no memory and
/// is refused.
#[inline(always)] // Else what it makes would be moved.
fn in_bytes<R>(counts: &[usize], element_size: usize, work: impl FnOnce(&[usize]) -> R) -> R {
    with_short_list(counts.len(), |rank| counts[rank].saturating_mul(element_size), work)
}

/// Forwards the functions of a [`Communicator`] that a wrapper leaves unchanged to its field `inner`.
macro_rules! forward_to_inner {
    () => {
        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn size(&self) -> usize {
            self.inner.size()
        }

        fn world_ranks(&self) -> &[usize] {
            self.inner.world_ranks()
        }

        fn nodes(&self) -> &[usize] {
            self.inner.nodes()
        }

        fn set_timeout(&self, timeout: std::time::Duration) {
            self.inner.set_timeout(timeout);
        }

        fn fail(&self, error: $crate::CommError) -> $crate::CommError {
            self.inner.fail(error)
        }
    };
}
pub(crate) use forward_to_inner;
