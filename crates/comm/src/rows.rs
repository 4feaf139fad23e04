//! Rows that go to several ranks, and come back summed: what dispatch and combine are between ranks.
//!
//! A row (a token) goes once to each rank of a list. Linear and hierarchical paths send a copy for each rank; the two-hop
//! path sends one to each node, to the rank there with the place of the sender, which hands it on inside the node and on the
//! way back sums what comes from there (DeepEP, github.com/deepseek-ai/DeepEP). The result does not depend on the path: received rows lie in
//! the order of source rank and then of row, and sums are taken over the ranks of a node first, in their order, then over
//! nodes in theirs, on every path. Uncompressed they are the same bits.
//!
//! Letters: T rows of this rank, D their width, R rows received.

use moeworks_plan::{Algorithm, Wire};
use moeworks_tensor::{DType, MemoryPool, Tensor, bf16};

use crate::hierarchy::starts;
use crate::wire::{decode, encode};
use crate::{CommError, Hierarchy};

/// Which rows go where, agreed on by all ranks: good for any number of dispatches and combines, of any width.
pub struct RowPlan {
    algorithm: Algorithm,
    num_rows: usize,
    /// Rows from each rank, in the order in which they are received.
    recv_counts: Vec<usize>,
    /// What leaves this rank: copies for ranks, or for the relays of nodes.
    leaving: Leg,
    /// The second hop, inside the node.
    inside: Option<Leg>,
    /// By the second hop: where each source's rows begin among those that come from inside the node.
    starts: Vec<usize>,
}

/// One hop: rows that are copied from a list, and how many go to and come from each rank.
struct Leg {
    /// The row behind each that is sent, in the order of targets.
    rows: Vec<u32>,
    send_counts: Vec<usize>,
    recv_counts: Vec<usize>,
}

impl RowPlan {
    /// The plan for `targets.len()` rows, each going to the ranks of its list (ascending, none twice; none at all is
    /// possible). A call that all ranks of the hierarchy make, with the same `algorithm`.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn new(hierarchy: &Hierarchy<'_>, algorithm: Algorithm, targets: &[&[usize]]) -> Result<Self, CommError> {
        let comm = hierarchy.comm;
        let is_valid =
            |list: &&[usize]| list.windows(2).all(|pair| pair[0] < pair[1]) && list.last() < Some(&comm.size());
        if let Some(row) = targets.iter().position(|list| !list.is_empty() && !is_valid(list)) {
            return Err(comm.abort(&format!("row {row} goes to ranks {:?} of {}", targets[row], comm.size())));
        }
        if algorithm == Algorithm::TwoHop && hierarchy.nodes.len() > 1 {
            return Self::two_hops(hierarchy, targets);
        }
        let mut lists = vec![Vec::new(); comm.size()];
        for (row, list) in targets.iter().enumerate() {
            list.iter().for_each(|&rank| lists[rank].push(row as u32));
        }
        let leaving = Leg::agree(comm, &lists)?;
        let recv_counts = leaving.recv_counts.clone();
        Ok(Self { algorithm, num_rows: targets.len(), recv_counts, leaving, inside: None, starts: Vec::new() })
    }

    fn two_hops(hierarchy: &Hierarchy<'_>, targets: &[&[usize]]) -> Result<Self, CommError> {
        let (comm, node) = (hierarchy.comm, &*hierarchy.node);
        let nodes = comm.nodes();
        let mut lists = vec![Vec::new(); comm.size()];
        for (row, list) in targets.iter().enumerate() {
            for (index, &rank) in list.iter().enumerate() {
                let relay = hierarchy.relay(nodes[rank], comm.rank());
                if list[..index].iter().all(|&earlier| nodes[earlier] != nodes[rank]) {
                    lists[relay].push(row as u32);
                }
            }
        }
        let leaving = Leg::agree(comm, &lists)?;
        let passed = Self::passed_on(hierarchy, &leaving, targets)?;
        let inside = Leg::agree(node, &passed)?;
        // How many of each source's rows each rank of the node gets: told by the relay.
        let sources = hierarchy.targets_of(node.rank());
        let mut first = 0;
        let ends = sources.iter().map(|&source| {
            first += leaving.recv_counts[source];
            first as u32
        });
        let ends: Vec<u32> = ends.collect();
        let per_source = |list: &Vec<u32>| {
            let within = |end: u32| list.partition_point(|&row| row < end);
            let upto: Vec<usize> = ends.iter().map(|&end| within(end)).collect();
            (0..upto.len()).map(|i| (upto[i] - if i > 0 { upto[i - 1] } else { 0 }) as u64).collect::<Vec<u64>>()
        };
        let told: Vec<u64> = passed.iter().flat_map(per_source).collect();
        let lens: Vec<usize> = (0..node.size()).map(|place| hierarchy.targets_of(place).len()).collect();
        let mut counts = vec![0_u64; comm.size()];
        node.all_to_all_v(&told, &vec![sources.len(); node.size()], &mut counts, &lens)?;
        let (recv_counts, starts) = Self::by_source(hierarchy, &counts);
        let num_rows = targets.len();
        Ok(Self { algorithm: Algorithm::TwoHop, num_rows, recv_counts, leaving, inside: Some(inside), starts })
    }

    /// For each rank of the node which of the rows that arrive here it wants.
    fn passed_on(hierarchy: &Hierarchy<'_>, leaving: &Leg, targets: &[&[usize]]) -> Result<Vec<Vec<u32>>, CommError> {
        let comm = hierarchy.comm;
        // Bits for the ranks of the largest node, in words.
        let num_words = hierarchy.nodes.iter().map(Vec::len).max().unwrap_or(0).div_ceil(32);
        let mut masks = vec![0_u32; leaving.rows.len() * num_words];
        let mut sent = 0;
        for (relay, &count) in leaving.send_counts.iter().enumerate() {
            for index in sent..sent + count {
                for &rank in targets[leaving.rows[index] as usize] {
                    if comm.nodes()[rank] == comm.nodes()[relay] {
                        let place = hierarchy.places[rank];
                        masks[index * num_words + place / 32] |= 1 << (place % 32);
                    }
                }
            }
            sent += count;
        }
        let in_words = |counts: &[usize]| counts.iter().map(|count| count * num_words).collect::<Vec<_>>();
        let num_arriving: usize = leaving.recv_counts.iter().sum();
        let mut arrived = vec![0_u32; num_arriving * num_words];
        comm.all_to_all_v(&masks, &in_words(&leaving.send_counts), &mut arrived, &in_words(&leaving.recv_counts))?;
        let wants = |row: usize, place: usize| arrived[row * num_words + place / 32] >> (place % 32) & 1 == 1;
        let for_place = |place| (0..num_arriving).filter(|&row| wants(row, place)).map(|row| row as u32).collect();
        Ok((0..hierarchy.node.size()).map(for_place).collect())
    }

    /// From the counts that the relays of the node told, in their order: rows from each source, and where they begin.
    fn by_source(hierarchy: &Hierarchy<'_>, counts: &[u64]) -> (Vec<usize>, Vec<usize>) {
        let size = hierarchy.comm.size();
        let (mut recv_counts, mut starts) = (vec![0; size], vec![0; size]);
        let sources = (0..hierarchy.node.size()).flat_map(|place| hierarchy.targets_of(place));
        let mut start = 0;
        for (source, &count) in sources.zip(counts) {
            (recv_counts[source], starts[source]) = (count as usize, start);
            start += count as usize;
        }
        (recv_counts, starts)
    }

    /// How many rows are received from each rank: the rows of [`dispatch`](Self::dispatch) lie in this order, those of one
    /// rank in the order in which it has them.
    #[must_use]
    pub fn recv_counts(&self) -> &[usize] {
        &self.recv_counts
    }

    /// How many rows leave this rank, copies counted; on the two-hop path those that are handed on are counted where they
    /// leave the relay.
    #[must_use]
    pub fn num_sent(&self) -> usize {
        self.leaving.rows.len() + self.inside.as_ref().map_or(0, |leg| leg.rows.len())
    }

    /// Sends each row of `rows` (`[T, D]`, f32 or bf16) to its ranks in the form of `wire`. Gives what is received, `[R, D]` in
    /// the same type.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn dispatch(
        &self,
        hierarchy: &Hierarchy<'_>,
        rows: &Tensor,
        wire: Wire,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        assert_eq!(rows.rows(), self.num_rows, "rows of the plan");
        let form = Form { wire, width: rows.cols(), bytes: wire.row_bytes(rows.cols()) };
        let packed = form.pack(rows, &self.leaving.rows);
        let mut received = self.leaving.carry(hierarchy, self.algorithm, &packed, form.bytes)?;
        if let Some(inside) = &self.inside {
            let handed_on = pick(&received, &inside.rows, form.bytes);
            let unordered = inside.carry_inside(hierarchy, &handed_on, form.bytes)?;
            received = self.in_order(&unordered, form.bytes);
        }
        Ok(form.unpack(&received, rows.dtype(), pool))
    }

    /// The way back: row i of `rows` (`[R, D]`) belongs to the row that was received as number i. Gives `[T, D]`: for each row
    /// the sum, in f32, of what came back for it; zeros where it went nowhere.
    ///
    /// # Errors
    /// [`CommError`], as all calls.
    pub fn combine(
        &self,
        hierarchy: &Hierarchy<'_>,
        rows: &Tensor,
        wire: Wire,
        pool: &MemoryPool,
    ) -> Result<Tensor, CommError> {
        let form = Form { wire, width: rows.cols(), bytes: wire.row_bytes(rows.cols()) };
        let num_received: usize = self.recv_counts.iter().sum();
        assert_eq!(rows.rows(), num_received, "rows received by the plan");
        let all: Vec<u32> = (0..num_received as u32).collect();
        let mut back = form.pack(rows, &all);
        if let Some(inside) = &self.inside {
            let unordered = self.out_of_order(&back, form.bytes);
            let handed_back = inside.carry_back(&*hierarchy.node, &unordered, form.bytes)?;
            let num_rows = self.leaving.recv_counts.iter().sum();
            let sums = form.sum(&handed_back, &inside.rows, num_rows);
            back = form.encode_all(&sums);
        }
        let parts = self.leaving.return_by(hierarchy, self.algorithm, &back, form.bytes)?;
        let sums = self.sum_nodes(hierarchy, &form, &parts);
        Ok(form.tensor(&sums, self.num_rows, rows.dtype(), pool))
    }

    /// Sums over the ranks of a node first, then over nodes.
    fn sum_nodes(&self, hierarchy: &Hierarchy<'_>, form: &Form, parts: &[u8]) -> Vec<f32> {
        let starts = starts(&self.leaving.send_counts);
        let mut total: Option<Sums> = None;
        for ranks in &hierarchy.nodes {
            let mut of_node = Sums::new(self.num_rows, form.width);
            let mut row = vec![0.0; form.width];
            for &rank in ranks {
                for index in starts[rank]..starts[rank] + self.leaving.send_counts[rank] {
                    decode(form.wire, &parts[index * form.bytes..(index + 1) * form.bytes], &mut row);
                    of_node.add(self.leaving.rows[index] as usize, &row);
                }
            }
            match &mut total {
                None => total = Some(of_node),
                Some(total) => total.add_all(&of_node),
            }
        }
        total.map_or_else(Vec::new, |total| total.values)
    }

    /// Rows from inside the node lie in the order of relays; here they get that of sources.
    fn in_order(&self, unordered: &[u8], bytes: usize) -> Vec<u8> {
        let piece = |(&start, &count): (&usize, &usize)| &unordered[start * bytes..(start + count) * bytes];
        self.starts.iter().zip(&self.recv_counts).map(piece).collect::<Vec<_>>().concat()
    }

    fn out_of_order(&self, ordered: &[u8], bytes: usize) -> Vec<u8> {
        let mut unordered = vec![0; ordered.len()];
        let mut from = 0;
        for (&start, &count) in self.starts.iter().zip(&self.recv_counts) {
            let len = count * bytes;
            unordered[start * bytes..start * bytes + len].copy_from_slice(&ordered[from..from + len]);
            from += len;
        }
        unordered
    }
}

impl Leg {
    /// Tells each rank how many rows it gets.
    fn agree(comm: &dyn crate::Communicator, lists: &[Vec<u32>]) -> Result<Self, CommError> {
        let send_counts: Vec<usize> = lists.iter().map(Vec::len).collect();
        let told: Vec<u64> = send_counts.iter().map(|&count| count as u64).collect();
        let mut heard = vec![0_u64; told.len()];
        comm.all_to_all(&told, &mut heard)?;
        let recv_counts = heard.into_iter().map(|count| count as usize).collect();
        Ok(Self { rows: lists.concat(), send_counts, recv_counts })
    }

    fn carry(
        &self,
        hierarchy: &Hierarchy<'_>,
        algorithm: Algorithm,
        packed: &[u8],
        bytes: usize,
    ) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.send_counts, bytes), times(&self.recv_counts, bytes));
        exchange(hierarchy, algorithm, (packed, &sends), &recvs)
    }

    fn return_by(
        &self,
        hierarchy: &Hierarchy<'_>,
        algorithm: Algorithm,
        packed: &[u8],
        bytes: usize,
    ) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.recv_counts, bytes), times(&self.send_counts, bytes));
        exchange(hierarchy, algorithm, (packed, &sends), &recvs)
    }

    fn carry_inside(&self, hierarchy: &Hierarchy<'_>, packed: &[u8], bytes: usize) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.send_counts, bytes), times(&self.recv_counts, bytes));
        let mut received = vec![0; recvs.iter().sum()];
        hierarchy.node.all_to_all_v(packed, &sends, &mut received, &recvs)?;
        Ok(received)
    }

    fn carry_back(&self, node: &dyn crate::Communicator, packed: &[u8], bytes: usize) -> Result<Vec<u8>, CommError> {
        let (sends, recvs) = (times(&self.recv_counts, bytes), times(&self.send_counts, bytes));
        let mut received = vec![0; recvs.iter().sum()];
        node.all_to_all_v(packed, &sends, &mut received, &recvs)?;
        Ok(received)
    }
}

fn exchange(
    hierarchy: &Hierarchy<'_>,
    algorithm: Algorithm,
    sent: (&[u8], &[usize]),
    recvs: &[usize],
) -> Result<Vec<u8>, CommError> {
    // Each node has one relay for this rank: there is nothing to collect in the node first.
    let path = if algorithm == Algorithm::TwoHop { Algorithm::Linear } else { algorithm };
    let mut received = vec![0; recvs.iter().sum()];
    hierarchy.all_to_all_v(path, sent, (&mut received, recvs))?;
    Ok(received)
}

fn times(counts: &[usize], bytes: usize) -> Vec<usize> {
    counts.iter().map(|count| count * bytes).collect()
}

/// The rows with these numbers.
fn pick(rows: &[u8], numbers: &[u32], bytes: usize) -> Vec<u8> {
    let mut picked = Vec::with_capacity(numbers.len() * bytes);
    for &number in numbers {
        picked.extend_from_slice(&rows[number as usize * bytes..(number as usize + 1) * bytes]);
    }
    picked
}

/// How rows of a width look on the wire.
struct Form {
    wire: Wire,
    width: usize,
    /// Of a row.
    bytes: usize,
}

impl Form {
    /// The rows with these numbers, in the wire's form.
    fn pack(&self, rows: &Tensor, numbers: &[u32]) -> Vec<u8> {
        let is_same = matches!((self.wire, rows.dtype()), (Wire::F32, DType::F32) | (Wire::Bf16, DType::BF16));
        if is_same {
            return pick(rows.bytes(), numbers, self.bytes);
        }
        let mut packed = vec![0; numbers.len() * self.bytes];
        let mut row = vec![0.0; self.width];
        for (&number, out) in numbers.iter().zip(packed.chunks_exact_mut(self.bytes.max(1))) {
            let range = number as usize * self.width..(number as usize + 1) * self.width;
            match rows.dtype() {
                DType::F32 => encode(self.wire, &rows.f32s()[range], out),
                _ => {
                    row.iter_mut().zip(&rows.bf16s()[range]).for_each(|(wide, x)| *wide = x.to_f32());
                    encode(self.wire, &row, out);
                }
            }
        }
        packed
    }

    fn unpack(&self, bytes: &[u8], dtype: DType, pool: &MemoryPool) -> Tensor {
        let num_rows = bytes.len().checked_div(self.bytes).unwrap_or(0);
        let mut rows = Tensor::empty(pool, &[num_rows, self.width], dtype);
        if matches!((self.wire, dtype), (Wire::F32, DType::F32) | (Wire::Bf16, DType::BF16)) {
            rows.bytes_mut().copy_from_slice(bytes);
            return rows;
        }
        let mut values = vec![0.0; num_rows * self.width];
        for (row, bytes) in values.chunks_exact_mut(self.width.max(1)).zip(bytes.chunks_exact(self.bytes.max(1))) {
            decode(self.wire, bytes, row);
        }
        self.tensor(&values, num_rows, dtype, pool)
    }

    fn encode_all(&self, values: &[f32]) -> Vec<u8> {
        let num_rows = values.len().checked_div(self.width).unwrap_or(0);
        let mut packed = vec![0; num_rows * self.bytes];
        for (row, out) in values.chunks_exact(self.width.max(1)).zip(packed.chunks_exact_mut(self.bytes.max(1))) {
            encode(self.wire, row, out);
        }
        packed
    }

    /// `num_rows` sums: row i of `parts` belongs to the sum with number `numbers[i]`.
    fn sum(&self, parts: &[u8], numbers: &[u32], num_rows: usize) -> Vec<f32> {
        let mut sums = Sums::new(num_rows, self.width);
        let mut row = vec![0.0; self.width];
        for (&number, part) in numbers.iter().zip(parts.chunks_exact(self.bytes.max(1))) {
            decode(self.wire, part, &mut row);
            sums.add(number as usize, &row);
        }
        sums.values
    }

    fn tensor(&self, values: &[f32], num_rows: usize, dtype: DType, pool: &MemoryPool) -> Tensor {
        let mut rows = Tensor::empty(pool, &[num_rows, self.width], dtype);
        match dtype {
            DType::F32 => rows.f32s_mut().copy_from_slice(values),
            _ => rows.bf16s_mut().iter_mut().zip(values).for_each(|(x, &value)| *x = bf16::from_f32(value)),
        }
        rows
    }
}

/// Sums of rows. The first part of a sum is taken as it is, so that it does not matter in how many steps zeros were added.
struct Sums {
    values: Vec<f32>,
    has_part: Vec<bool>,
    width: usize,
}

impl Sums {
    fn new(num_rows: usize, width: usize) -> Self {
        Self { values: vec![0.0; num_rows * width], has_part: vec![false; num_rows], width }
    }

    fn add(&mut self, number: usize, part: &[f32]) {
        let sum = &mut self.values[number * self.width..(number + 1) * self.width];
        if self.has_part[number] {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        } else {
            sum.copy_from_slice(part);
        }
        self.has_part[number] = true;
    }

    fn add_all(&mut self, other: &Self) {
        for number in (0..other.has_part.len()).filter(|&number| other.has_part[number]) {
            self.add(number, &other.values[number * self.width..(number + 1) * self.width]);
        }
    }
}
