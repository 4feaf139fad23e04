//! Dispatch and combine of rows between ranks: rows go to several ranks and come back summed.
//!
//! A row (a token) goes once to each rank of a list. The linear and hierarchical paths send a copy for each rank. The
//! two-hop path sends one copy to each node, to the rank there that has the sender's place; that rank hands it on
//! inside the node, and on the way back sums what comes from there (DeepEP, github.com/deepseek-ai/DeepEP). The
//! result does not depend on the path. Received rows are ordered by source rank and then by row. Sums are taken over
//! the ranks of a node first, in their order, then over nodes in theirs. Without compression all paths give the same
//! bits.
//!
//! Rows may be cut into chunks with a plan each, so that one chunk is in flight while another is computed.
//!
//! Letters: T rows of this rank, D their width, R rows received.

mod row_format;
mod transfer;

use std::ops::Range;

use moeworks_plan::Algorithm;

pub use transfer::{PendingCombine, PendingDispatch};

use crate::hierarchy::starts;
use crate::{CommError, Communicator, Hierarchy};

/// The routes of rows, agreed on by all ranks. It serves any number of dispatches and combines, of any width.
pub struct RowPlan {
    algorithm: Algorithm,
    /// The number of rows of this rank, and the range of them that this plan covers.
    num_rows: usize,
    rows: Range<usize>,
    /// The number of rows from each rank, in the order in which they are received.
    recv_counts: Vec<usize>,
    /// The hop that leaves this rank: copies for ranks, or for the relays of nodes.
    leaving: Hop,
    /// The second hop, inside the node; only on the two-hop path.
    inside: Option<Hop>,
    /// The start of each source's rows among those that come from inside the node; only on the two-hop path.
    starts: Vec<usize>,
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
        let mut plans = Self::in_chunks(hierarchy, algorithm, targets, &[targets.len()])?;
        Ok(plans.swap_remove(0))
    }

    /// Makes a plan for each chunk of the rows, agreed on in the messages of one plan. Chunk c begins where the one
    /// before it ends and ends before row `ends[c]`; the last ends with the rows. All ranks pass the same number of
    /// chunks, at least one.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn in_chunks(
        hierarchy: &Hierarchy,
        algorithm: Algorithm,
        targets: &[&[usize]],
        ends: &[usize],
    ) -> Result<Vec<Self>, CommError> {
        let comm = hierarchy.comm();
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
        if algorithm == Algorithm::TwoHop && hierarchy.nodes.num() > 1 {
            return Self::two_hops(hierarchy, targets, ends);
        }
        let straight =
            |row: usize, lists: &mut [Vec<u32>]| targets[row].iter().for_each(|&to| lists[to].push(row as u32));
        let hops = Hop::agree(comm, lists(ends, comm.size(), straight))?;
        let plan = |(leaving, rows): (Hop, Range<usize>)| {
            let recv_counts = leaving.recv_counts.clone();
            let num_rows = targets.len();
            Self { algorithm, num_rows, rows, recv_counts, leaving, inside: None, starts: Vec::new() }
        };
        Ok(hops.into_iter().zip(ranges(ends)).map(plan).collect())
    }

    fn two_hops(hierarchy: &Hierarchy, targets: &[&[usize]], ends: &[usize]) -> Result<Vec<Self>, CommError> {
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
        let passed =
            leaving.iter().map(|hop| Self::passed_on(hierarchy, hop, targets)).collect::<Result<Lists, _>>()?;
        let counts = Self::counts_by_source(hierarchy, &leaving, &passed)?;
        let inside = Hop::agree(&*hierarchy.node_comm, passed)?;
        let mut plans = Vec::with_capacity(ends.len());
        for (((leaving, inside), counts), rows) in leaving.into_iter().zip(inside).zip(&counts).zip(ranges(ends)) {
            let (recv_counts, starts) = Self::by_source(hierarchy, counts);
            let (algorithm, num_rows) = (Algorithm::TwoHop, targets.len());
            plans.push(Self { algorithm, num_rows, rows, recv_counts, leaving, inside: Some(inside), starts });
        }
        Ok(plans)
    }

    /// Returns for each chunk the number of rows that come here from each source, as the relays of the node report
    /// them: one relay's sources after another's.
    fn counts_by_source(
        hierarchy: &Hierarchy,
        leaving: &[Hop],
        passed: &[Vec<Vec<u32>>],
    ) -> Result<Vec<Vec<u64>>, CommError> {
        let node = &*hierarchy.node_comm;
        let sources = hierarchy.targets_of(node.rank());
        let of_chunk = |(hop, passed): (&Hop, &Vec<Vec<u32>>)| {
            let arriving: Vec<usize> = sources.iter().map(|&source| hop.recv_counts[source]).collect();
            let firsts = starts(&arriving);
            let of_place = |list: &Vec<u32>| -> Vec<u64> {
                let below = |row: usize| list.partition_point(|&other| (other as usize) < row);
                firsts.iter().zip(&arriving).map(|(&first, &len)| (below(first + len) - below(first)) as u64).collect()
            };
            passed.iter().flat_map(of_place).collect::<Vec<u64>>()
        };
        let lens: Vec<usize> = (0..node.size()).map(|place| hierarchy.targets_of(place).len()).collect();
        let told = leaving.iter().zip(passed).map(of_chunk);
        told.map(|told| {
            let mut counts = vec![0_u64; hierarchy.comm().size()];
            node.all_to_all_v(&told, &vec![sources.len(); node.size()], &mut counts, &lens)?;
            Ok(counts)
        })
        .collect()
    }

    /// Returns, for each rank of the node, the rows arriving here that go to it.
    fn passed_on(hierarchy: &Hierarchy, leaving: &Hop, targets: &[&[usize]]) -> Result<Vec<Vec<u32>>, CommError> {
        let comm = hierarchy.comm();
        // A bit for each rank of the largest node, in words.
        let num_words = hierarchy.nodes.ranks().iter().map(Vec::len).max().unwrap_or(0).div_ceil(32);
        let mut masks = vec![0_u32; leaving.rows.len() * num_words];
        let mut sent = 0;
        for (relay, &count) in leaving.send_counts.iter().enumerate() {
            for index in sent..sent + count {
                for &rank in targets[leaving.rows[index] as usize] {
                    if comm.nodes()[rank] == comm.nodes()[relay] {
                        let place = hierarchy.nodes.place(rank);
                        masks[index * num_words + place / 32] |= 1 << (place % 32);
                    }
                }
            }
            sent += count;
        }
        let num_arriving: usize = leaving.recv_counts.iter().sum();
        let mut arrived = vec![0_u32; num_arriving * num_words];
        let (sends, recvs) = (times(&leaving.send_counts, num_words), times(&leaving.recv_counts, num_words));
        comm.all_to_all_v(&masks, &sends, &mut arrived, &recvs)?;
        let wants = |row: usize, place: usize| arrived[row * num_words + place / 32] >> (place % 32) & 1 == 1;
        let for_place = |place| (0..num_arriving).filter(|&row| wants(row, place)).map(|row| row as u32).collect();
        Ok((0..hierarchy.node_comm.size()).map(for_place).collect())
    }

    /// Orders the counts that the relays reported by source rank: the rows from each source, and their start.
    fn by_source(hierarchy: &Hierarchy, counts: &[u64]) -> (Vec<usize>, Vec<usize>) {
        let size = hierarchy.comm().size();
        let (mut recv_counts, mut starts) = (vec![0; size], vec![0; size]);
        let sources = (0..hierarchy.node_comm.size()).flat_map(|place| hierarchy.targets_of(place));
        let mut start = 0;
        for (source, &count) in sources.zip(counts) {
            (recv_counts[source], starts[source]) = (count as usize, start);
            start += count as usize;
        }
        (recv_counts, starts)
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
        self.leaving.rows.len() + self.inside.as_ref().map_or(0, |hop| hop.rows.len())
    }
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

fn times(counts: &[usize], factor: usize) -> Vec<usize> {
    counts.iter().map(|count| count * factor).collect()
}
