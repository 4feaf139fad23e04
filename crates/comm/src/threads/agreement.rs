//! Whether the ranks of a meeting call the same thing with sizes that fit each other, and who does not.

use std::thread;
use std::time::{Duration, Instant};

use super::group::Group;
use super::meeting::{Meeting, Post};
use crate::CommError;
use crate::operation::Call;

/// How long to wait for those who are still on their way before deciding who is in the minority.
const PATIENCE: Duration = Duration::from_secs(1);

/// Compares this seat's post with all that are down already. Of any two ranks at least one sees the other.
pub(crate) fn check_all(group: &Group, meeting: &Meeting, seat: usize) -> Result<(), CommError> {
    (0..meeting.num_seats()).try_for_each(|other| check(group, meeting, seat, other))
}

/// Compares the posts of two seats, as far as they are down: whoever reads another rank's memory has done this first.
pub(crate) fn check(group: &Group, meeting: &Meeting, seat: usize, other: usize) -> Result<(), CommError> {
    let (Some(mine), Some(theirs)) = (meeting.post(seat), meeting.post(other)) else { return Ok(()) };
    if !is_same_call(mine, theirs) {
        return Err(group.world.fail(find_minority(group, meeting)));
    }
    match size_conflict(group, (seat, mine), (other, theirs)) {
        None => Ok(()),
        Some(text) => {
            let ranks = vec![group.world_rank(seat), group.world_rank(other)];
            Err(group.world.fail(CommError::Disagreement { ranks, text }))
        }
    }
}

fn is_same_call(a: &Post, b: &Post) -> bool {
    match (a.call, b.call) {
        // The key of a meeting of two has both ranks and the tag.
        (Call::Send { .. }, Call::Receive { .. }) | (Call::Receive { .. }, Call::Send { .. }) => true,
        (Call::AllGatherV, Call::AllGatherV) => a.recv_counts == b.recv_counts,
        (Call::ReduceScatter { .. }, _) => a.call == b.call && a.send_counts == b.send_counts,
        _ => a.call == b.call,
    }
}

/// For calls in which two ranks agree on a size that concerns only them.
fn size_conflict(group: &Group, a: (usize, &Post), b: (usize, &Post)) -> Option<String> {
    match (a.1.call, b.1.call) {
        (Call::AllToAllV, Call::AllToAllV) => piece_conflict(group, a, b).or_else(|| piece_conflict(group, b, a)),
        (Call::Send { to, bytes, .. }, Call::Receive { from, bytes: expected, .. })
        | (Call::Receive { from, bytes: expected, .. }, Call::Send { to, bytes, .. }) => {
            (bytes != expected).then(|| {
                let (from, to) = (group.world_rank(from), group.world_rank(to));
                format!("rank {from} sends {bytes} bytes to rank {to}, which expects {expected}")
            })
        }
        _ => None,
    }
}

fn piece_conflict(group: &Group, (from, sender): (usize, &Post), (to, receiver): (usize, &Post)) -> Option<String> {
    let (sent, expected) = (sender.send_counts[to], receiver.recv_counts[from]);
    (sent != expected).then(|| {
        let (from, to) = (group.world_rank(from), group.world_rank(to));
        format!("in all-to-all-v rank {from} sends {sent} bytes to rank {to}, which expects {expected}")
    })
}

fn find_minority(group: &Group, meeting: &Meeting) -> CommError {
    let start = Instant::now();
    while !meeting.are_all_posted() && start.elapsed() < PATIENCE && group.world.failure().is_none() {
        thread::yield_now();
    }
    let posts: Vec<(usize, &Post)> =
        (0..meeting.num_seats()).filter_map(|seat| Some((seat, meeting.post(seat)?))).collect();
    let votes = |of: &Post| posts.iter().filter(|(_, post)| is_same_call(of, post)).count();
    let most = posts.iter().map(|(_, post)| votes(post)).max().unwrap_or(0);
    let mut ranks: Vec<usize> =
        posts.iter().filter(|(_, post)| votes(post) < most).map(|&(seat, _)| group.world_rank(seat)).collect();
    if ranks.is_empty() {
        ranks = posts.iter().map(|&(seat, _)| group.world_rank(seat)).collect();
    }
    let texts: Vec<String> = posts.iter().map(|(seat, post)| describe(group.world_rank(*seat), post)).collect();
    CommError::Disagreement { ranks, text: texts.join("; ") }
}

fn describe(rank: usize, post: &Post) -> String {
    match post.call {
        Call::AllGatherV => format!("rank {rank} calls {} with counts {:?} bytes", post.call, post.recv_counts),
        Call::ReduceScatter { .. } => {
            format!("rank {rank} calls {} with counts {:?} bytes", post.call, post.send_counts)
        }
        call => format!("rank {rank} calls {call}"),
    }
}
