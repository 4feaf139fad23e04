//! The routes of the two-hop path: between nodes to the relays, then inside the node to the ranks.
//!
//! The relays learn which ranks of their node want each row, and the ranks how many rows come from each source. One
//! message of each kind has what concerns all parts.

use super::{Hop, Lists, Part, lists, ranges, times};
use crate::hierarchy::starts;
use crate::{CommError, Hierarchy};

/// Makes the routes of the parts that end at `ends`.
pub(super) fn parts(hierarchy: &Hierarchy, targets: &[&[usize]], ends: &[usize]) -> Result<Vec<Part>, CommError> {
    let comm = hierarchy.comm();
    let nodes = comm.nodes();
    let to_relays = |row: usize, lists: &mut [Vec<u32>]| {
        let list = targets[row];
        for (index, &rank) in list.iter().enumerate() {
            if list[..index].iter().all(|&earlier| nodes[earlier] != nodes[rank]) {
                lists[hierarchy.nodes.relay(nodes[rank], comm.rank())].push(row as u32);
            }
        }
    };
    let leaving = Hop::agree(comm, lists(ends, comm.size(), to_relays))?;
    let passed = passed_on(hierarchy, &leaving, targets)?;
    let counts = counts_by_source(hierarchy, &leaving, &passed)?;
    let inside = Hop::agree(&*hierarchy.node_comm, passed)?;
    let mut parts = Vec::with_capacity(ends.len());
    for (((leaving, inside), counts), rows) in leaving.into_iter().zip(inside).zip(&counts).zip(ranges(ends)) {
        let BySource { recv_counts, starts } = BySource::new(hierarchy, counts);
        parts.push(Part { rows, recv_counts, leaving, inside: Some(inside), starts });
    }
    Ok(parts)
}

/// Returns for each part and each rank of the node the rows arriving here that go to it.
fn passed_on(hierarchy: &Hierarchy, leaving: &[Hop], targets: &[&[usize]]) -> Result<Lists, CommError> {
    let comm = hierarchy.comm();
    // A bit for each rank of the largest node, in words.
    let num_words = hierarchy.nodes.ranks().iter().map(Vec::len).max().unwrap_or(0).div_ceil(32);
    let total = |counts: fn(&Hop) -> &[usize], rank: usize| leaving.iter().map(|hop| counts(hop)[rank]).sum::<usize>();
    let sent: Vec<usize> = (0..comm.size()).map(|relay| total(|hop| &hop.send_counts, relay)).collect();
    let received: Vec<usize> = (0..comm.size()).map(|from| total(|hop| &hop.recv_counts, from)).collect();
    let mut masks = Vec::with_capacity(sent.iter().sum::<usize>() * num_words);
    for relay in 0..comm.size() {
        for hop in leaving {
            let start: usize = hop.send_counts[..relay].iter().sum();
            for &row in &hop.rows[start..start + hop.send_counts[relay]] {
                let first = masks.len();
                masks.resize(first + num_words, 0_u32);
                for &rank in targets[row as usize].iter().filter(|&&rank| comm.nodes()[rank] == comm.nodes()[relay]) {
                    let place = hierarchy.nodes.place(rank);
                    masks[first + place / 32] |= 1 << (place % 32);
                }
            }
        }
    }
    let mut arrived = vec![0_u32; received.iter().sum::<usize>() * num_words];
    comm.all_to_all_v(&masks, &times(&sent, num_words), &mut arrived, &times(&received, num_words))?;
    Ok(lists_for_places(hierarchy, leaving, arrived.chunks_exact(num_words.max(1))))
}

/// Sorts the rows of each part by the ranks of the node that want them. `masks` has the wishes of one source after
/// another, and in them of one part after another.
fn lists_for_places<'m>(hierarchy: &Hierarchy, leaving: &[Hop], mut masks: impl Iterator<Item = &'m [u32]>) -> Lists {
    let num_places = hierarchy.node_comm.size();
    let firsts: Vec<Vec<usize>> = leaving.iter().map(|hop| starts(&hop.recv_counts)).collect();
    let mut passed = vec![vec![Vec::new(); num_places]; leaving.len()];
    for source in 0..hierarchy.comm().size() {
        for ((hop, firsts), passed) in leaving.iter().zip(&firsts).zip(&mut passed) {
            let rows = firsts[source]..firsts[source] + hop.recv_counts[source];
            for (row, mask) in rows.zip(&mut masks) {
                for (place, list) in passed.iter_mut().enumerate() {
                    if mask[place / 32] >> (place % 32) & 1 == 1 {
                        list.push(row as u32);
                    }
                }
            }
        }
    }
    passed
}

/// Returns for each part the number of rows that come here from each source, as the relays of the node report them:
/// one relay's sources after another's.
fn counts_by_source(hierarchy: &Hierarchy, leaving: &[Hop], passed: &Lists) -> Result<Vec<Vec<u64>>, CommError> {
    let (node, num_parts) = (&*hierarchy.node_comm, leaving.len());
    let sources = hierarchy.targets_of(node.rank());
    let mut told = Vec::with_capacity(node.size() * num_parts * sources.len());
    for place in 0..node.size() {
        for (hop, passed) in leaving.iter().zip(passed) {
            let arriving: Vec<usize> = sources.iter().map(|&source| hop.recv_counts[source]).collect();
            let below = |row: usize| passed[place].partition_point(|&other| (other as usize) < row);
            let ranges = starts(&arriving).into_iter().zip(&arriving);
            told.extend(ranges.map(|(first, &len)| (below(first + len) - below(first)) as u64));
        }
    }
    let lens: Vec<usize> = (0..node.size()).map(|place| hierarchy.targets_of(place).len()).collect();
    let mut heard = vec![0_u64; hierarchy.comm().size() * num_parts];
    let send_counts = vec![num_parts * sources.len(); node.size()];
    node.all_to_all_v(&told, &send_counts, &mut heard, &times(&lens, num_parts))?;
    let mut counts = vec![Vec::with_capacity(hierarchy.comm().size()); num_parts];
    let mut heard = heard.into_iter();
    for &len in &lens {
        counts.iter_mut().for_each(|counts| counts.extend(heard.by_ref().take(len)));
    }
    Ok(counts)
}

/// The rows that a part brings from each rank, and their start among those from inside the node.
struct BySource {
    recv_counts: Vec<usize>,
    starts: Vec<usize>,
}

impl BySource {
    /// Orders the counts that the relays reported.
    fn new(hierarchy: &Hierarchy, counts: &[u64]) -> Self {
        let size = hierarchy.comm().size();
        let (mut recv_counts, mut starts) = (vec![0; size], vec![0; size]);
        let sources = (0..hierarchy.node_comm.size()).flat_map(|place| hierarchy.targets_of(place));
        let mut start = 0;
        for (source, &count) in sources.zip(counts) {
            (recv_counts[source], starts[source]) = (count as usize, start);
            start += count as usize;
        }
        Self { recv_counts, starts }
    }
}
