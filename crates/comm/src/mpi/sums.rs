//! Which sums the library takes, and which are fetched and taken here in the order of ranks.
//!
//! The library's are as good: the MPI standard requires that all ranks get identical results of an all-reduce, and
//! advises that a call gives the same whenever it is made with the same numbers (MPI 4.1, sections 6.9.6 and 6.9.1).
//! But they are other bits than those of threads, and not always sooner there; what was measured is in
//! `bench/history/communication.md`.

use super::group::ONE_STEP_BYTES;
use crate::number::{NumberKind, Reduce};
use crate::operation::Call;

/// What a process leaves to its library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LibrarySums {
    /// Sums for everybody, in a call that blocks.
    whole: bool,
    /// Sums of which each rank gets a share, in a call that blocks, of up to so many bytes.
    shares_up_to: usize,
    /// Either, in a call that was started.
    started: bool,
    /// Whether that holds for two ranks alone, whose sums are the same bits in either order.
    only_of_two: bool,
}

impl LibrarySums {
    const NONE: Self = Self { whole: false, shares_up_to: 0, started: false, only_of_two: false };

    /// The quickest of a library, among ranks of which more share a machine than it has cores if `is_crowded`; with
    /// `keeps_order` of those that are the same bits as among threads.
    pub(crate) fn of(is_open_mpi: bool, is_crowded: bool, keeps_order: bool) -> Self {
        let quickest = if is_open_mpi {
            // Of long sums shares take it up to six times as long as they take here, and what is started up to three
            // times.
            Self { whole: true, shares_up_to: ONE_STEP_BYTES, ..Self::NONE }
        } else if is_crowded {
            // MPICH's sums wait without giving up the core: milliseconds where those that are waited for have none.
            Self::NONE
        } else {
            Self { whole: true, shares_up_to: usize::MAX, started: true, ..Self::NONE }
        };
        Self { only_of_two: keeps_order, ..quickest }
    }

    /// Whether the library takes `call`, of `bytes` bytes of each of `num_ranks` ranks.
    pub(crate) fn takes(self, call: &Call, bytes: usize, num_ranks: usize, is_started: bool) -> bool {
        let (Call::AllReduce { number, reduce, .. } | Call::ReduceScatter { number, reduce }) = *call else {
            return false;
        };
        let is_shared = matches!(call, Call::ReduceScatter { .. });
        let is_quick = match (is_started, is_shared) {
            (true, _) => self.started,
            (false, true) => bytes <= self.shares_up_to,
            (false, false) => self.whole,
        };
        is_quick && (number, reduce) == (NumberKind::F32, Reduce::Sum) && (num_ranks == 2 || !self.only_of_two)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Call = Call::AllReduce { number: NumberKind::F32, reduce: Reduce::Sum, bytes: 1 << 20 };

    fn takes(sums: LibrarySums, num_ranks: usize) -> [bool; 2] {
        [false, true].map(|is_started| sums.takes(&SUM, 1 << 20, num_ranks, is_started))
    }

    #[test]
    fn sums_in_order_are_left_to_the_library_between_two_ranks_alone() {
        let ordered = LibrarySums::of(false, false, true);
        assert_eq!((takes(ordered, 2), takes(ordered, 3)), ([true; 2], [false; 2]));
        assert_eq!(takes(LibrarySums::of(false, false, false), 3), [true; 2]);
    }

    #[test]
    fn a_library_takes_what_it_takes_quickly() {
        assert_eq!(takes(LibrarySums::of(true, true, false), 4), [true, false]);
        assert_eq!(takes(LibrarySums::of(false, true, false), 4), [false; 2]);
        let share = Call::ReduceScatter { number: NumberKind::F32, reduce: Reduce::Sum };
        let open_mpi = LibrarySums::of(true, false, false);
        assert_eq!([64, 1 << 20].map(|bytes| open_mpi.takes(&share, bytes, 2, false)), [true, false]);
        let greatest = Call::AllReduce { number: NumberKind::F32, reduce: Reduce::Max, bytes: 4 };
        assert!(!open_mpi.takes(&greatest, 4, 2, false), "what becomes of NaN is not said");
    }
}
