//! The errors of a schedule that cannot be carried out.

use std::fmt;

use super::super::Action;

/// An action's place in a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// The position in the rank's list, from 0.
    pub position: usize,
    /// The action.
    pub action: Action,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, position {}: {}", self.rank, self.position, self.action)
    }
}

/// A schedule that cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// The lists of ranks and stages do not fit each other.
    #[error("{0}")]
    Shape(String),
    /// An action of a stage or microbatch that does not exist.
    #[error("{place}: {what} {value} is out of range: the schedule has {count}, counted from 0")]
    Range {
        /// The action.
        place: Place,
        /// The stage, the microbatch or the layer.
        what: &'static str,
        /// Its number.
        value: u32,
        /// The number of them that there are.
        count: usize,
    },
    /// An action on a rank that does not hold its stage.
    #[error("{place}: must be on rank {right}, which holds stage {} for microbatch {}", place.action.stage, place.action.microbatch)]
    WrongRank {
        /// The action.
        place: Place,
        /// The rank that holds the stage.
        right: u32,
    },
    /// An action that does not fit its stage: a whole one where all-to-alls are actions, a part where they are not,
    /// or a message that no stage needs.
    #[error("{place}: {problem}")]
    Form {
        /// The action.
        place: Place,
        /// The problem, with what would be right.
        problem: String,
    },
    /// An action that occurs a second time.
    #[error("{place}: is there a second time: it must be there once")]
    Repeated {
        /// The action.
        place: Place,
    },
    /// An action that comes before one that it needs.
    #[error("{place}: needs {needed} of the same rank, which must come before it")]
    Early {
        /// The action.
        place: Place,
        /// The action that it needs.
        needed: Action,
    },
    /// An action that is in no list.
    #[error("rank {rank}: {action} is missing: it must be there once")]
    Missing {
        /// The rank that must have it.
        rank: usize,
        /// The action.
        action: Action,
    },
    /// A receive that takes the message of another microbatch.
    #[error(
        "{place}: the message that arrives here is for {right}, because messages come in the order in which they are sent"
    )]
    MessageOrder {
        /// The receive.
        place: Place,
        /// The receive that would be right.
        right: Action,
    },
    /// Ranks that wait for each other.
    #[error("{place}: waits forever for {needed} of rank {}, which itself stands at position {} ({})",
        holder.rank, holder.position, holder.action)]
    Deadlock {
        /// The action that cannot start.
        place: Place,
        /// The action that it needs.
        needed: Action,
        /// The place of the needed action's rank in its list.
        holder: Place,
    },
}
