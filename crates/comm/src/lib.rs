//! Communication between ranks.
//!
//! A [`Communicator`] is one rank's interface to a group of ranks: all-to-all, all-gather, reduce-scatter,
//! all-reduce, broadcast, point to point, barrier and split. Each is there as a blocking call and as one that is
//! started now and finished later. [`run_ranks`] runs ranks as threads of this process, [`mpi::run_mpi`] as processes
//! of an MPI launcher. Nothing here knows of experts or models.
//!
//! Results do not depend on the order in which ranks arrive: a reduction sums in the order of ranks, so that every
//! rank gets the same bits in every run. Errors are values ([`CommError`]) that name the rank which died, hangs or
//! makes a different call.
//!
//! ```
//! use moeworks_comm::{CommError, RankOptions, Reduce, run_ranks};
//!
//! let sums = run_ranks(&RankOptions::new(4), |comm| {
//!     let mut data = vec![comm.rank() as f32; 3];
//!     comm.all_reduce(&mut data, Reduce::Sum)?;
//!     Ok::<_, CommError>(data)
//! });
//! assert!(sums.into_iter().all(|sum| sum.unwrap() == [6.0; 3]));
//! ```
#![allow(unsafe_code)] // Ranks copy from each other's memory while its owner waits; each place says why it may.

mod buffer;
mod communicator;
mod error;
mod hierarchy;
mod in_flight;
#[cfg(unix)]
mod meter;
#[cfg(unix)]
pub mod mpi;
mod node_collectives;
mod number;
mod operation;
mod pin;
mod rows;
mod short_list;
mod started;
mod threads;
mod throttle;
mod wait_timer;
mod wire;

pub use buffer::Buffer;
pub use communicator::Communicator;
pub use error::CommError;
pub use hierarchy::Hierarchy;
pub use meter::{Meter, Metered, Span, Totals};
pub use number::{Number, NumberKind, Reduce};
pub use operation::{Call, Memory, Operation};
pub use pin::{cores_by_numa_node, share_cores};
pub use rows::{Cuts, PendingCombine, PendingDispatch, RowPlan};
pub use started::{Pending, RawPending};
pub use threads::{RankOptions, describe_panics_by, run_ranks, try_run_ranks};
pub use throttle::{Lines, SharedLinks, Throttled};
