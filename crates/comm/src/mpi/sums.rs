//! The choice between sums by the library and sums taken here in the order of ranks.
//!
//! The library's sums are as accurate: the MPI standard requires identical results of an all-reduce on all ranks, and
//! advises that a call returns the same result whenever it is made with the same numbers (MPI 4.1, sections 6.9.6 and
//! 6.9.1). But their bits differ from those of threads, and they are not always faster;
//! `bench/history/communication.md` has the measurements.

use super::group::ONE_STEP_BYTES;
use crate::number::{NumberKind, Reduce};
use crate::operation::Call;

/// The sums that a process leaves to its library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LibrarySums {
    /// True if all-reduces are left to it in blocking calls.
    whole: bool,
    /// The bytes up to which reduce-scatters are left to it in blocking calls.
    shares_up_to: usize,
    /// True if both are left to it in calls that were started.
    started: bool,
    /// True if that holds only for two ranks, whose sums have the same bits in either order.
    only_of_two: bool,
}

impl LibrarySums {
    const NONE: Self = Self { whole: false, shares_up_to: 0, started: false, only_of_two: false };

    /// Returns the fastest choice for a library. `is_crowded` means that a machine has more ranks than cores. With
    /// `keeps_order` only sums with the bits of threads are left to it.
    pub(crate) fn new(is_open_mpi: bool, is_crowded: bool, keeps_order: bool) -> Self {
        let quickest = if is_open_mpi {
            // In Open MPI long reduce-scatters take up to six times as long as here, and started sums up to three
            // times.
            Self { whole: true, shares_up_to: ONE_STEP_BYTES, ..Self::NONE }
        } else if is_crowded {
            // MPICH's sums wait without yielding the core: that takes milliseconds if the awaited ranks have none.
            Self::NONE
        } else {
            Self { whole: true, shares_up_to: usize::MAX, started: true, ..Self::NONE }
        };
        Self { only_of_two: keeps_order, ..quickest }
    }

    /// Returns whether the library takes `call`, of `bytes` bytes of each of `num_ranks` ranks.
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
        let ordered = LibrarySums::new(false, false, true);
        assert_eq!((takes(ordered, 2), takes(ordered, 3)), ([true; 2], [false; 2]));
        assert_eq!(takes(LibrarySums::new(false, false, false), 3), [true; 2]);
    }

    #[test]
    fn a_library_takes_what_it_takes_quickly() {
        assert_eq!(takes(LibrarySums::new(true, true, false), 4), [true, false]);
        assert_eq!(takes(LibrarySums::new(false, true, false), 4), [false; 2]);
        let share = Call::ReduceScatter { number: NumberKind::F32, reduce: Reduce::Sum };
        let open_mpi = LibrarySums::new(true, false, false);
        assert_eq!([64, 1 << 20].map(|bytes| open_mpi.takes(&share, bytes, 2, false)), [true, false]);
        let greatest = Call::AllReduce { number: NumberKind::F32, reduce: Reduce::Max, bytes: 4 };
        assert!(!open_mpi.takes(&greatest, 4, 2, false), "what becomes of NaN is not said");
    }
}
