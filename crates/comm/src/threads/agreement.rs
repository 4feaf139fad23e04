//! The check that ranks in a rendezvous make the same call with sizes that fit, and the search for the rank that does
//! not.

use std::thread;
use std::time::{Duration, Instant};

use super::group::Group;
use super::rendezvous::{Post, Rendezvous};
use crate::CommError;
use crate::error::{RankCall, disagreement, piece_disagreement};
use crate::operation::Call;

/// The time to wait for ranks that have not come yet before deciding which are in the minority.
const MINORITY_WAIT: Duration = Duration::from_secs(1);

/// Compares this seat's post with all that are there already. Of any two ranks at least one sees the other.
pub(crate) fn check_all(group: &Group, rendezvous: &Rendezvous, seat: usize) -> Result<(), CommError> {
    (0..rendezvous.num_seats()).try_for_each(|other| check(group, rendezvous, seat, other))
}

/// Compares the posts of two seats, if both are there. A rank does this before it reads another rank's memory.
pub(crate) fn check(group: &Group, rendezvous: &Rendezvous, seat: usize, other: usize) -> Result<(), CommError> {
    let (Some(mine), Some(theirs)) = (rendezvous.post(seat), rendezvous.post(other)) else { return Ok(()) };
    if !is_same_call(mine, theirs) {
        return Err(group.world.fail(find_minority(group, rendezvous)));
    }
    match size_conflict(group, Seated { seat, post: mine }, Seated { seat: other, post: theirs }) {
        None => Ok(()),
        Some(error) => Err(group.world.fail(error)),
    }
}

fn is_same_call(a: &Post, b: &Post) -> bool {
    match (a.call, b.call) {
        // The key of a rendezvous of two has both ranks and the tag.
        (Call::Send { .. }, Call::Receive { .. }) | (Call::Receive { .. }, Call::Send { .. }) => true,
        (Call::AllGatherV, Call::AllGatherV) => a.recv_counts == b.recv_counts,
        (Call::ReduceScatter { .. }, _) => a.call == b.call && a.send_counts == b.send_counts,
        _ => a.call == b.call,
    }
}

/// A rank's post with its seat.
#[derive(Clone, Copy)]
struct Seated<'a> {
    seat: usize,
    post: &'a Post,
}

/// Checks the size of a piece or message, on which only its two ranks have to agree.
fn size_conflict(group: &Group, a: Seated<'_>, b: Seated<'_>) -> Option<CommError> {
    match (a.post.call, b.post.call) {
        (Call::AllToAllV, Call::AllToAllV) => piece_conflict(group, a, b).or_else(|| piece_conflict(group, b, a)),
        (Call::Send { to, bytes, .. }, Call::Receive { from, bytes: expected, .. })
        | (Call::Receive { from, bytes: expected, .. }, Call::Send { to, bytes, .. }) => {
            (bytes != expected).then(|| {
                let (from, to) = (group.world_rank(from), group.world_rank(to));
                let text = format!("rank {from} sends {bytes} bytes to rank {to}, which expects {expected}");
                CommError::Disagreement { ranks: vec![from, to], text }
            })
        }
        _ => None,
    }
}

fn piece_conflict(group: &Group, from: Seated<'_>, to: Seated<'_>) -> Option<CommError> {
    let (sent, expected) = (from.post.send_counts[to.seat], to.post.recv_counts[from.seat]);
    let (from, to) = (group.world_rank(from.seat), group.world_rank(to.seat));
    (sent != expected).then(|| piece_disagreement(from, sent as u64, to, expected as u64))
}

fn find_minority(group: &Group, rendezvous: &Rendezvous) -> CommError {
    let start = Instant::now();
    while !rendezvous.are_all_posted() && start.elapsed() < MINORITY_WAIT && group.world.failure().is_none() {
        thread::yield_now();
    }
    let seats = 0..rendezvous.num_seats();
    let call = |seat| Some(RankCall { rank: group.world_rank(seat), text: describe(rendezvous.post(seat)?) });
    disagreement(&seats.filter_map(call).collect::<Vec<_>>())
}

fn describe(post: &Post) -> String {
    match post.call {
        Call::AllGatherV => format!("{} with counts {:?} bytes", post.call, post.recv_counts),
        Call::ReduceScatter { .. } => format!("{} with counts {:?} bytes", post.call, post.send_counts),
        call => call.to_string(),
    }
}
