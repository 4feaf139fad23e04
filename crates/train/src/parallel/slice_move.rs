//! Moving slices of experts' tensors (ZeRO): each rank keeps a slice of the flat tensor of the experts that its place
//! owns, and after a move a slice of another. Ranges go straight from the ranks that keep them to those that will, in
//! one all-to-all for all tensors of a layer.

use std::collections::HashMap;
use std::ops::Range;

use moeworks_comm::{CommError, Communicator, Pending};
use moeworks_ops::Context;
use moeworks_plan::{Layout, Placement};
use moeworks_tensor::{DType, Tensor};

use super::zero_shards::counts;

/// The elements of an expert that a rank has in its slice.
struct Run {
    rank: usize,
    expert: usize,
    /// The range of the expert's elements.
    elements: Range<usize>,
    /// The place of the first of them in the slice.
    offset: usize,
}

/// Elements of an expert that go from one slice to another, perhaps on the same rank.
struct Piece {
    from: usize,
    to: usize,
    /// The place in the old slice.
    from_offset: usize,
    /// The place in the new slice.
    to_offset: usize,
    len: usize,
}

/// A tensor whose slices move.
pub(super) struct Sliced<'a> {
    /// This rank's slice.
    pub(super) slice: &'a Tensor,
    /// The elements of an expert.
    pub(super) expert_len: usize,
}

/// The ranks among which slices move, by their index in the communicator, with the place of each in a group.
pub(super) struct SliceRanks<'a> {
    pub(super) comm: &'a dyn Communicator,
    /// The place of each rank of `comm`.
    places: Vec<usize>,
}

impl<'a> SliceRanks<'a> {
    pub(super) fn new(comm: &'a dyn Communicator, layout: &Layout) -> Self {
        let place = |&rank: &usize| {
            let (_, ep, tp) = layout.place(rank);
            ep * layout.tp + tp
        };
        Self { comm, places: comm.world_ranks().iter().map(place).collect() }
    }

    /// Lists what all ranks have in their slices of a tensor whose experts have `size` elements.
    fn runs(&self, placement: &Placement, size: usize) -> Vec<Run> {
        let owners = placement.owners();
        let mut runs = Vec::new();
        for place in 0..placement.num_ranks() {
            let owned = owners.experts_of(place);
            let holders: Vec<usize> = (0..self.places.len()).filter(|&rank| self.places[rank] == place).collect();
            let mut start = 0;
            for (&rank, count) in holders.iter().zip(counts(owned.len() * size, holders.len())) {
                let slice = start..start + count;
                start = slice.end;
                let within = owned.iter().enumerate().filter_map(|(row, &expert)| {
                    let range = slice.start.max(row * size)..slice.end.min((row + 1) * size);
                    let elements = range.start.saturating_sub(row * size)..range.end.saturating_sub(row * size);
                    (range.start < range.end).then(|| Run { rank, expert, elements, offset: range.start - slice.start })
                });
                runs.extend(within);
            }
        }
        runs
    }

    /// Lists the pieces by which slices of `from` become those of `to`, in an order that all ranks share.
    fn pieces(&self, from: &Placement, to: &Placement, size: usize) -> Vec<Piece> {
        let mut old: HashMap<usize, Vec<Run>> = HashMap::new();
        for run in self.runs(from, size) {
            old.entry(run.expert).or_default().push(run);
        }
        let mut pieces = Vec::new();
        for new in self.runs(to, size) {
            for old in &old[&new.expert] {
                let start = new.elements.start.max(old.elements.start);
                let end = new.elements.end.min(old.elements.end);
                if start < end {
                    let from_offset = old.offset + start - old.elements.start;
                    let to_offset = new.offset + start - new.elements.start;
                    pieces.push(Piece { from: old.rank, to: new.rank, from_offset, to_offset, len: end - start });
                }
            }
        }
        pieces
    }

    fn slice_len(&self, placement: &Placement, size: usize) -> usize {
        let own = self.comm.rank();
        self.runs(placement, size).iter().filter(|run| run.rank == own).map(|run| run.elements.len()).sum()
    }

    /// Starts to move the slices of `tensors` from those of placement `from` to those of `to`. They keep their
    /// values. All ranks make this call.
    pub(super) fn start(
        &self,
        ctx: &Context,
        from: &Placement,
        to: &Placement,
        tensors: &[Sliced<'_>],
    ) -> Result<PendingSlices, CommError> {
        let (own, size) = (self.comm.rank(), self.comm.size());
        let (mut sent, mut arriving, mut slices) = (vec![Vec::new(); size], vec![Vec::new(); size], Vec::new());
        for (index, &Sliced { slice: old, expert_len }) in tensors.iter().enumerate() {
            let mut slice = ctx.empty(&[self.slice_len(to, expert_len)], DType::F32);
            for Piece { from, to, from_offset, to_offset, len } in self.pieces(from, to, expert_len) {
                let values = || &old.f32s()[from_offset..from_offset + len];
                match (from == own, to == own) {
                    (true, true) => slice.f32s_mut()[to_offset..to_offset + len].copy_from_slice(values()),
                    (true, false) => sent[to].extend_from_slice(values()),
                    (false, true) => arriving[from].push(Arriving { index, range: to_offset..to_offset + len }),
                    (false, false) => {}
                }
            }
            slices.push(slice);
        }
        let send_counts: Vec<usize> = sent.iter().map(Vec::len).collect();
        let len = |arriving: &Vec<Arriving>| arriving.iter().map(|piece| piece.range.len()).sum();
        let recv_counts: Vec<usize> = arriving.iter().map(len).collect();
        let received = vec![0.0_f32; recv_counts.iter().sum()];
        let pending = self.comm.start_all_to_all_v(sent.concat(), &send_counts, received, &recv_counts)?;
        Ok(PendingSlices { pending, arriving: arriving.concat(), slices })
    }
}

/// A piece that arrives in the new slice of tensor `index`.
#[derive(Clone)]
struct Arriving {
    index: usize,
    range: Range<usize>,
}

/// Slices on their way.
pub(super) struct PendingSlices {
    pending: Pending<(Vec<f32>, Vec<f32>)>,
    /// In the order in which they arrive.
    arriving: Vec<Arriving>,
    slices: Vec<Tensor>,
}

impl PendingSlices {
    /// Waits for the slices. Returns them in the order of the tensors.
    pub(super) fn finish(self) -> Result<Vec<Tensor>, CommError> {
        let Self { pending, arriving, mut slices } = self;
        let (_, received) = pending.finish()?;
        let mut rest = &received[..];
        for Arriving { index, range } in arriving {
            let (values, later) = rest.split_at(range.len());
            slices[index].f32s_mut()[range].copy_from_slice(values);
            rest = later;
        }
        Ok(slices)
    }
}
