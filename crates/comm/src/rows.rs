//! Dispatch and combine of rows between ranks: rows go to several ranks and come back summed.
//!
//! A row (a token) goes once to each rank of a list. The linear and hierarchical paths send a copy for each rank. The
//! two-hop path sends one copy to each node, to the rank there that has the sender's place; that rank hands it on
//! inside the node, and on the way back sums what comes from there (DeepEP, github.com/deepseek-ai/DeepEP). The
//! result does not depend on the path. Received rows are ordered by source rank and then by row. Sums are taken over
//! the ranks of a node first, in their order, then over nodes in theirs. Without compression all paths give the same
//! bits.
//!
//! Rows may be cut into chunks with a plan each, so that one chunk is in flight while another is computed. On the
//! two-hop path a chunk is cut into parts, too: the hop of one part inside the node runs while the hop of the next
//! part between nodes is in flight, on the way there and on the way back.
//!
//! Letters: T rows of this rank, D their width, R rows received.

mod row_format;
mod transfer;
mod two_hops;

use std::ops::Range;

use moeworks_plan::Algorithm;

pub use transfer::{PendingCombine, PendingDispatch};

use crate::{CommError, Communicator, Hierarchy};

/// The routes of rows, agreed on by all ranks. It serves any number of dispatches and combines, of any width.
pub struct RowPlan {
    algorithm: Algorithm,
    /// The number of rows of this rank, and the range of them that this plan covers.
    num_rows: usize,
    rows: Range<usize>,
    /// The number of rows from each rank, in the order in which they are received.
    recv_counts: Vec<usize>,
    /// Consecutive runs of the rows; one but on the two-hop path.
    parts: Vec<Part>,
}

/// The routes of a run of rows, whose hops are made together.
struct Part {
    rows: Range<usize>,
    /// The number of rows from each rank.
    recv_counts: Vec<usize>,
    /// The hop that leaves this rank: copies for ranks, or for the relays of nodes.
    leaving: Hop,
    /// The second hop, inside the node; only on the two-hop path.
    inside: Option<Hop>,
    /// The start of each source's rows among those that come from inside the node; only on the two-hop path.
    starts: Vec<usize>,
}

/// The division of rows into chunks.
#[derive(Clone, Copy, Debug)]
pub struct Cuts<'a> {
    /// The end of each chunk: it begins where the one before it ends, and the last ends with the rows. All ranks pass
    /// the same number of chunks, at least one.
    pub ends: &'a [usize],
    /// The parts of a chunk on the two-hop path, the same number on all ranks; 0 counts as 1.
    pub num_parts: usize,
}

/// One hop: rows copied from a list, with the numbers that go to and come from each rank.
struct Hop {
    /// The source row of each row that is sent, in the order of targets.
    rows: Vec<u32>,
    send_counts: Vec<usize>,
    recv_counts: Vec<usize>,
}

/// The rows for each target, for each chunk.
type Lists = Vec<Vec<Vec<u32>>>;

impl RowPlan {
    /// Makes the plan for `targets.len()` rows. Each row goes to the ranks of its list, which is ascending without
    /// repeats and may be empty. All ranks of the hierarchy must call it, with the same `algorithm`.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or disagrees.
    pub fn new(hierarchy: &Hierarchy, algorithm: Algorithm, targets: &[&[usize]]) -> Result<Self, CommError> {
        let cuts = Cuts { ends: &[targets.len()], num_parts: 1 };
        let mut plans = Self::in_chunks(hierarchy, algorithm, targets, cuts)?;
        Ok(plans.swap_remove(0))
    }

    /// Makes a plan for each chunk of the rows, agreed on in the messages of one plan.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn in_chunks(
        hierarchy: &Hierarchy,
        algorithm: Algorithm,
        targets: &[&[usize]],
        cuts: Cuts<'_>,
    ) -> Result<Vec<Self>, CommError> {
        let (comm, Cuts { ends, num_parts }) = (hierarchy.comm(), cuts);
        let is_valid =
            |list: &&[usize]| list.windows(2).all(|pair| pair[0] < pair[1]) && list.last() < Some(&comm.size());
        if let Some(row) = targets.iter().position(|list| !list.is_empty() && !is_valid(list)) {
            let (ranks, size) = (targets[row], comm.size());
            return Err(
                comm.abort(&format!("row {row} goes to ranks {ranks:?}: they must be ascending and below {size}"))
            );
        }
        if ends.last() != Some(&targets.len()) || ends.windows(2).any(|pair| pair[0] > pair[1]) {
            let num_rows = targets.len();
            return Err(comm.abort(&format!("chunks end at rows {ends:?}: the ends must ascend to {num_rows}")));
        }
        let has_two_hops = algorithm == Algorithm::TwoHop && hierarchy.nodes.num() > 1;
        let num_parts = if has_two_hops { num_parts.max(1) } else { 1 };
        let part_ends = part_ends(ends, num_parts);
        let parts = if has_two_hops {
            two_hops::parts(hierarchy, targets, &part_ends)?
        } else {
            one_hop(comm, targets, &part_ends)?
        };
        let (mut parts, num_rows) = (parts.into_iter(), targets.len());
        let plan = |rows: Range<usize>| {
            let parts: Vec<Part> = parts.by_ref().take(num_parts).collect();
            let count = |from: usize| parts.iter().map(|part| part.recv_counts[from]).sum();
            let recv_counts = (0..comm.size()).map(count).collect();
            Self { algorithm, num_rows, rows, recv_counts, parts }
        };
        Ok(ranges(ends).map(plan).collect())
    }

    /// Returns the number of rows received from each rank. [`dispatch`](Self::dispatch) returns rows in this order,
    /// and those of one rank in the order in which it has them.
    #[must_use]
    pub fn recv_counts(&self) -> &[usize] {
        &self.recv_counts
    }

    /// Returns R, the number of rows received.
    #[must_use]
    pub fn num_received(&self) -> usize {
        self.recv_counts.iter().sum()
    }

    /// Returns the range of this rank's rows that the plan covers.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Returns the number of rows that leave this rank, counting copies. On the two-hop path a row that is handed on
    /// is counted at the relay too.
    #[must_use]
    pub fn num_sent(&self) -> usize {
        let inside = |part: &Part| part.inside.as_ref().map_or(0, |hop| hop.rows.len());
        self.parts.iter().map(|part| part.leaving.rows.len() + inside(part)).sum()
    }
}

/// Makes the routes of parts whose rows go straight to their ranks.
fn one_hop(comm: &dyn Communicator, targets: &[&[usize]], ends: &[usize]) -> Result<Vec<Part>, CommError> {
    let straight = |row: usize, lists: &mut [Vec<u32>]| targets[row].iter().for_each(|&to| lists[to].push(row as u32));
    let hops = Hop::agree(comm, lists(ends, comm.size(), straight))?;
    let part = |(leaving, rows): (Hop, Range<usize>)| {
        let recv_counts = leaving.recv_counts.clone();
        Part { rows, recv_counts, leaving, inside: None, starts: Vec::new() }
    };
    Ok(hops.into_iter().zip(ranges(ends)).map(part).collect())
}

/// Cuts each chunk into `num_parts` parts of nearly as many rows. Returns the ends of all.
fn part_ends(ends: &[usize], num_parts: usize) -> Vec<usize> {
    let of_chunk = |rows: Range<usize>| (1..=num_parts).map(move |part| rows.start + rows.len() * part / num_parts);
    ranges(ends).flat_map(of_chunk).collect()
}

/// Returns the range of rows of each chunk.
fn ranges(ends: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(ends).map(|(start, &end)| start..end)
}

/// Makes the lists of `size` targets for each chunk; `add` adds a row to them.
fn lists(ends: &[usize], size: usize, add: impl Fn(usize, &mut [Vec<u32>])) -> Lists {
    let of_chunk = |range: Range<usize>| {
        let mut lists = vec![Vec::new(); size];
        range.for_each(|row| add(row, &mut lists));
        lists
    };
    ranges(ends).map(of_chunk).collect()
}

impl Hop {
    /// Exchanges the numbers of rows of each chunk and makes the hop of each.
    fn agree(comm: &dyn Communicator, lists: Lists) -> Result<Vec<Self>, CommError> {
        let (num_chunks, size) = (lists.len(), comm.size());
        let told: Vec<u64> = (0..size).flat_map(|to| lists.iter().map(move |lists| lists[to].len() as u64)).collect();
        let mut heard = vec![0_u64; told.len()];
        comm.all_to_all(&told, &mut heard)?;
        let of_chunk = |(chunk, lists): (usize, Vec<Vec<u32>>)| Self {
            rows: lists.concat(),
            send_counts: lists.iter().map(Vec::len).collect(),
            recv_counts: (0..size).map(|from| heard[from * num_chunks + chunk] as usize).collect(),
        };
        Ok(lists.into_iter().enumerate().map(of_chunk).collect())
    }
}

/// Multiplies each count by `factor`.
fn times(counts: &[usize], factor: usize) -> Vec<usize> {
    counts.iter().map(|count| count * factor).collect()
}
