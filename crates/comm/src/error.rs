//! Why a communication failed.

use std::time::Duration;

use crate::operation::Call;

/// Why a communication failed. After the first error all communicators of the run give it: nobody waits for a rank that
/// will not come. Ranks are numbered as in the whole run, also in a part made by [`split`](crate::Communicator::split).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A rank panicked, returned an error or gave up.
    #[error("rank {rank} died: {reason}")]
    Died {
        /// The rank.
        rank: usize,
        /// Its last words.
        reason: String,
    },
    /// A rank ended while others still need it.
    #[error("rank {rank} ended while others wait for it in {call}")]
    Left {
        /// The rank.
        rank: usize,
        /// What the others do.
        call: Call,
    },
    /// Ranks did not come to a communication within the time that [`set_timeout`](crate::Communicator::set_timeout) allows.
    #[error("{} hung: nothing from {} for {:.1} s while rank {waiting} waits in {call}", name(ranks),
        if ranks.len() == 1 { "it" } else { "them" }, waited.as_secs_f64())]
    Hung {
        /// The ranks that did not come.
        ranks: Vec<usize>,
        /// The rank that noticed.
        waiting: usize,
        /// What it does.
        call: Call,
        /// How long it waited.
        waited: Duration,
    },
    /// Ranks call different things, or the same with sizes that do not agree.
    #[error("{} with the others: {text}", if ranks.len() == 1 { format!("rank {} disagrees", ranks[0]) }
        else { format!("{} disagree", name(ranks)) })]
    Disagreement {
        /// The ranks in the minority, or all concerned where there is none.
        ranks: Vec<usize>,
        /// Who called what.
        text: String,
    },
    /// This rank's call contradicts itself: an unknown rank, or sizes that are not those of the memory.
    #[error("rank {rank}, {call}: {text}")]
    BadCall {
        /// The rank.
        rank: usize,
        /// What it called.
        call: Call,
        /// What is wrong, and what would be right.
        text: String,
    },
    /// A rank runs something else than rank 0: another configuration, another program.
    #[error("rank {rank} has another {what} than rank 0: start all ranks with the same one")]
    Refused {
        /// The first such rank.
        rank: usize,
        /// What differs.
        what: String,
    },
    /// The ranks cannot be started.
    #[error("cannot start the ranks: {0}")]
    Start(String),
}

/// "rank 3" or "ranks 1, 3".
pub(crate) fn name(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}
