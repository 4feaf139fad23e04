//! Attention backward: a task owns a range of keys and passes over all query rows that see them.
//!
//! Shapes: `S` queries, `H` query heads, `G` key and value heads, `h` elements a head. Rows of one key head are its
//! `H / G` query heads of each query, by query and then by head.

mod row_block;
mod scores;
mod task;

use moeworks_tensor::{DType, Tensor};

use self::task::Task;
use super::blocks::KEYS;
use super::operands::{OperandFormat, Values};
use super::sequences::{OwnedTask, Sequence, TaskList};
use crate::Context;
use crate::parallel::{Lent, PIECE, piece_range};

/// The least number of tasks of a pass whose keys can be cut, so that few sequences and heads still occupy many
/// threads.
const MIN_TASKS: usize = 16;

/// The inputs of the backward pass: the gradient `d_o` of the output, the forward pass's inputs and results, and the
/// format that rows are packed in.
pub(super) struct Inputs<'a> {
    pub(super) d_o: Values<'a>,
    pub(super) q: Values<'a>,
    pub(super) k: Values<'a>,
    pub(super) v: Values<'a>,
    pub(super) o: Values<'a>,
    pub(super) lse: &'a [f32],
    pub(super) format: OperandFormat,
}

/// The gradients of queries, keys and values, f32.
pub(super) struct Grads {
    pub(super) dq: Tensor,
    pub(super) dk: Tensor,
    pub(super) dv: Tensor,
}

/// The parts that the keys of a sequence are cut into.
///
/// Each part has its own share of `dq`. The share of the first part is `dq` itself; the others are added to it at the
/// end, in the order of the keys.
#[derive(Clone, Copy)]
struct Cut {
    part_len: usize,
    num_parts: usize,
    /// The offset of the shares of the later parts, one behind the other, in the buffer of all shares.
    first_share: usize,
}

impl Cut {
    /// Cuts the keys of a sequence by sizes alone, so that the sums' order does not depend on the number of threads.
    /// `num_pairs` is the number of pairs of a sequence and a key head in the pass.
    fn new(sequence: &Sequence<'_>, num_pairs: usize, first_share: usize) -> Self {
        if sequence.num_queries == 0 || sequence.heads.head_dim == 0 {
            return Self { part_len: 0, num_parts: 0, first_share };
        }
        let num_blocks = sequence.num_keys.div_ceil(KEYS);
        let part_len = num_blocks.div_ceil(MIN_TASKS.div_ceil(num_pairs).min(num_blocks)) * KEYS;
        Self { part_len, num_parts: sequence.num_keys.div_ceil(part_len), first_share }
    }

    /// Returns the cuts of all sequences and the number of elements of all shares together.
    fn all(sequences: &[Sequence<'_>], num_pairs: usize) -> (Vec<Self>, usize) {
        let mut num_elements = 0;
        let cut = |sequence: &Sequence<'_>| {
            let cut = Self::new(sequence, num_pairs, num_elements);
            num_elements += cut.num_parts.saturating_sub(1) * sequence.query_elements().len();
            cut
        };
        (sequences.iter().map(cut).collect(), num_elements)
    }
}

/// Computes the three gradients.
///
/// Rows of `dk` and `dv` that belong to no sequence, or to a sequence without queries, are left as they are. Keys are
/// cut as suits `num_pairs` pairs of a sequence and a key head, whatever other sequences there are.
pub(super) fn run(ctx: &Context, inputs: &Inputs<'_>, sequences: &[Sequence<'_>], num_pairs: usize, grads: &mut Grads) {
    let (cuts, num_shared) = Cut::all(sequences, num_pairs);
    let mut shares = ctx.zeros(&[num_shared], DType::F32);
    let outputs = Outputs {
        dq: Lent::new(grads.dq.f32s_mut()),
        shares: Lent::new(shares.f32s_mut()),
        dk: Lent::new(grads.dk.f32s_mut()),
        dv: Lent::new(grads.dv.f32s_mut()),
    };
    let num_tasks = |(sequence, cut): (&Sequence<'_>, &Cut)| sequence.heads.num_kv_heads * cut.num_parts;
    let tasks = TaskList::new(sequences.iter().zip(&cuts).map(num_tasks));
    ctx.threads().run(tasks.len(), |task| {
        let OwnedTask { owner, index } = tasks.find(task);
        let (sequence, cut) = (&sequences[owner], cuts[owner]);
        let (kv_head, part) = (index / cut.num_parts, index % cut.num_parts);
        let keys = piece_range(part, cut.part_len, sequence.num_keys);
        Task { sequence, kv_head, cut, part, keys }.run(ctx, inputs, &outputs);
    });
    add_shares(ctx, sequences, &cuts, shares.f32s(), grads.dq.f32s_mut());
}

/// Adds the shares of later parts to `dq`, in the order of the parts.
fn add_shares(ctx: &Context, sequences: &[Sequence<'_>], cuts: &[Cut], shares: &[f32], dq: &mut [f32]) {
    let num_pieces = |(sequence, cut): (&Sequence<'_>, &Cut)| match cut.num_parts {
        0 | 1 => 0,
        _ => sequence.query_elements().len().div_ceil(PIECE),
    };
    let tasks = TaskList::new(sequences.iter().zip(cuts).map(num_pieces));
    let dq = Lent::new(dq);
    ctx.threads().run(tasks.len(), |task| {
        let OwnedTask { owner, index } = tasks.find(task);
        let (elements, Cut { num_parts, first_share, .. }) = (sequences[owner].query_elements(), cuts[owner]);
        let piece = piece_range(index, PIECE, elements.len());
        // SAFETY: the pieces of a sequence do not overlap, and its queries are its own.
        let dq = unsafe { dq.range(elements.start + piece.start..elements.start + piece.end) };
        let shares = &shares[first_share..][..(num_parts - 1) * elements.len()];
        for share in shares.chunks_exact(elements.len()) {
            dq.iter_mut().zip(&share[piece.clone()]).for_each(|(sum, x)| *sum += x);
        }
    });
}

/// The gradients' memory, lent to the tasks.
struct Outputs<'a> {
    dq: Lent<'a, f32>,
    shares: Lent<'a, f32>,
    dk: Lent<'a, f32>,
    dv: Lent<'a, f32>,
}
