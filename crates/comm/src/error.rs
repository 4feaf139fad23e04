//! The errors of communication.

use std::time::Duration;

use crate::operation::Call;

/// The reason why a communication failed. After the first error all communicators of the run return it, so that
/// nobody waits for a rank that will not come. Ranks are numbered as in the whole run, also in a group made by
/// [`split`](crate::Communicator::split).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A rank panicked, returned an error or gave up.
    #[error("rank {rank} died: {reason}")]
    Died {
        /// The rank.
        rank: usize,
        /// The rank's error or panic message.
        reason: String,
    },
    /// A rank ended while others still need it.
    #[error("rank {rank} ended while others wait for it in {call}")]
    Left {
        /// The rank.
        rank: usize,
        /// The call that the other ranks are in.
        call: Call,
    },
    /// Ranks did not join a call within the time that [`set_timeout`](crate::Communicator::set_timeout) allows.
    #[error("{} hung: nothing from {} for {:.1} s while rank {waiting} waits in {call}", name(ranks),
        if ranks.len() == 1 { "it" } else { "them" }, waited.as_secs_f64())]
    Hung {
        /// The ranks that did not join.
        ranks: Vec<usize>,
        /// The rank that reports them.
        waiting: usize,
        /// The call that it waits in.
        call: Call,
        /// The time that it has waited.
        waited: Duration,
    },
    /// Ranks made different calls, or the same call with sizes that do not agree.
    #[error("{} with the others: {text}", if ranks.len() == 1 { format!("rank {} disagrees", ranks[0]) }
        else { format!("{} disagree", name(ranks)) })]
    Disagreement {
        /// The ranks in the minority, or all concerned where there is none.
        ranks: Vec<usize>,
        /// The call of each rank.
        text: String,
    },
    /// A rank's call contradicts itself: the rank is out of range, or sizes do not match the memory.
    #[error("rank {rank}, {call}: {text}")]
    BadCall {
        /// The rank.
        rank: usize,
        /// The call.
        call: Call,
        /// The problem, with the numbers concerned.
        text: String,
    },
    /// A rank runs with something other than rank 0, such as another configuration or program.
    #[error("rank {rank} has another {what} than rank 0: start all ranks with the same one")]
    Refused {
        /// The first such rank.
        rank: usize,
        /// The thing that differs.
        what: String,
    },
    /// The MPI library reports an error.
    #[error("rank {rank}, {call}: MPI library error: {text}")]
    Library {
        /// The rank.
        rank: usize,
        /// The call.
        call: Call,
        /// The library's message.
        text: String,
    },
    /// The ranks cannot be started.
    #[error("cannot start the ranks: {0}")]
    Start(String),
}

/// Formats a list of ranks: "rank 3" or "ranks 1, 3".
pub(crate) fn name(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// A rank's call, in words.
pub(crate) struct RankCall {
    /// The rank's number in the whole run.
    pub(crate) rank: usize,
    pub(crate) text: String,
}

/// Makes the error for ranks that made different calls. It names the ranks in the minority, or all where no call has
/// more ranks than another.
pub(crate) fn disagreement(calls: &[RankCall]) -> CommError {
    let votes = |text: &str| calls.iter().filter(|call| call.text == text).count();
    let most = calls.iter().map(|call| votes(&call.text)).max().unwrap_or(0);
    let mut ranks: Vec<usize> = calls.iter().filter(|call| votes(&call.text) < most).map(|call| call.rank).collect();
    if ranks.is_empty() {
        ranks = calls.iter().map(|call| call.rank).collect();
    }
    let texts: Vec<String> = calls.iter().map(|RankCall { rank, text }| format!("rank {rank} calls {text}")).collect();
    CommError::Disagreement { ranks, text: texts.join("; ") }
}

/// Makes the error for two ranks that expect different sizes of a piece.
pub(crate) fn piece_disagreement(from: usize, sent: u64, to: usize, expected: u64) -> CommError {
    let text = format!("in all-to-all-v rank {from} sends {sent} bytes to rank {to}, which expects {expected}");
    CommError::Disagreement { ranks: vec![from, to], text }
}
