//! Grouped products with quantized weights.

use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::dequantize::{Blocks, to_bf16};
use super::kernel;
use super::kernel::{Kernel, MAX_FEW, Panel};
use super::rows::{Quad, QuantizedRows};
use super::weights::Weights;
use crate::elementwise::cast;
use crate::gemm::kernel::{Kernels, MAX_ROWS, Tile};
use crate::gemm::plan::{Chooser, Dequantize, GemmKernel, GemmPlan, GemmProblem, RowLayout};
use crate::gemm::row_pieces::{OfPieces, RowPiece, row_pieces};
use crate::gemm::scratch::{ScratchPool, ScratchSlot};
use crate::gemm::source::Source;
use crate::gemm::{self, Compute, Finish, Form, Panels, Place, Span, tile_slice};
use crate::parallel::piece_range;
use crate::{Context, Isa};

/// Bytes of weights that a task streams, at least.
const TASK_BYTES: usize = 96 << 10;

/// Bytes of weights that are converted to bf16 at a time.
const DEQUANTIZED_BYTES: usize = 16 << 20;

/// One product of a list: `C [rows, columns] = A B^T`.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    /// The rows of A, if they are gathered; otherwise the rows from `first` on.
    pub(crate) indices: Option<&'a [u32]>,
    pub(crate) first: usize,
    pub(crate) rows: usize,
    /// Its rows of B, and with paired columns those of the second half. See [`matrix`](super::matrix).
    pub(crate) weights: [Weights<'a>; 2],
    /// Columns of C; with paired columns half of them.
    pub(crate) columns: usize,
}

/// A list of products that share the tensors of activations and of weights.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// `[.., K]`, f32 or bf16.
    pub(crate) a: &'a Tensor,
    /// `[.., K]`, quantized: the tensor that holds all groups' weights.
    pub(crate) weights: &'a Tensor,
    pub(crate) groups: &'a [Group<'a>],
    /// True if columns come in pairs, as in [`gemm::Product`].
    pub(crate) is_paired: bool,
}

impl Product<'_> {
    fn num_tiles(&self) -> usize {
        if self.is_paired { 2 } else { 1 }
    }

    /// Chooses kernels for all groups.
    fn plans(&self, ctx: &Context) -> Vec<GemmPlan> {
        let chooser = Chooser::new(ctx.isa(), Compute::Bf16, ctx.is_batch_invariant());
        let most_rows = self.groups.iter().map(|group| group.rows).max().unwrap_or(0);
        let depth = self.weights.cols();
        let b = RowLayout::whole(self.weights.dtype(), depth);
        let plan = |group: &Group<'_>| {
            chooser.choose(&GemmProblem {
                form: Form::Nt,
                compute: Compute::Bf16,
                rows: group.rows,
                columns: group.columns,
                depth,
                is_paired: self.is_paired,
                num_groups: self.groups.len(),
                most_rows,
                b,
                is_gradient: false,
            })
        };
        self.groups.iter().map(plan).collect()
    }
}

/// Computes all products of the list.
pub(crate) fn run(ctx: &Context, product: &Product<'_>, epilogue: &dyn Finish) {
    assert_eq!(product.a.cols(), product.weights.cols(), "a product with quantized weights");
    let plans = product.plans(ctx);
    if let Some(most) = plans.iter().find_map(|plan| plan.row_pieces) {
        return run_in_pieces(ctx, product, most, epilogue);
    }
    let best = Kernel::available(ctx.isa(), product.weights.dtype()).pop().expect("a kernel for every instruction set");
    run_few(ctx, product, best, epilogue);
    let of = |dequantize: Dequantize| -> Vec<usize> {
        (0..plans.len()).filter(|&index| plans[index].dequantize == Some(dequantize)).collect()
    };
    let (some, many) = (of(Dequantize::InProduct), of(Dequantize::Before));
    if some.is_empty() && many.is_empty() {
        return;
    }
    // Rounded once here instead of by each task that packs them.
    let rounded = (product.a.dtype() != DType::BF16).then(|| cast(ctx, product.a, DType::BF16));
    let product = &Product { a: rounded.as_ref().unwrap_or(product.a), ..*product };
    run_some(ctx, product, &some, epilogue);
    run_many(ctx, product, &many, epilogue);
}

/// Computes all products in pieces of at most `most` rows, so that one kernel takes them all.
fn run_in_pieces(ctx: &Context, product: &Product<'_>, most: usize, epilogue: &dyn Finish) {
    let pieces = row_pieces(product.groups.iter().map(|group| group.rows), most);
    let groups: Vec<Group<'_>> = pieces
        .iter()
        .map(|piece| {
            let group = product.groups[piece.group];
            let indices = group.indices.map(|indices| &indices[piece.first..][..piece.rows]);
            Group { indices, first: group.first + piece.first, rows: piece.rows, ..group }
        })
        .collect();
    run(ctx, &Product { groups: &groups, ..*product }, &OfPieces { inner: epilogue, pieces: &pieces });
}

/// Some panels of a group.
struct Task {
    group: usize,
    panels: Range<usize>,
}

/// Computes the groups of few rows with integer products.
pub(super) fn run_few(ctx: &Context, product: &Product<'_>, best: Kernel, epilogue: &dyn Finish) {
    let lanes = Kernels::select(ctx.isa(), Compute::F32).lanes;
    let Some(layout) = product.groups.first().map(|group| group.weights[0].layout) else { return };
    assert!(product.groups.iter().all(|group| group.weights[0].layout == layout), "weights of one layout");
    let mut tasks = Vec::new();
    for ((index, group), plan) in product.groups.iter().enumerate().zip(product.plans(ctx)) {
        if plan.kernel != GemmKernel::QuantizedDot || group.rows == 0 || group.columns == 0 {
            continue;
        }
        let panels = Panels::new(group.columns, lanes);
        let panel_bytes = group.weights[0].numbers.row_bytes() * panels.panel(0).1 * product.num_tiles();
        let share = TASK_BYTES.div_ceil(panel_bytes.max(1)).clamp(1, panels.count);
        let num_tasks = panels.count.div_ceil(share);
        let even = panels.count.div_ceil(num_tasks);
        tasks.extend((0..num_tasks).map(|task| Task { group: index, panels: piece_range(task, even, panels.count) }));
    }
    if tasks.is_empty() {
        return;
    }
    let rows = QuantizedRows::quantize(ctx, product.a, best.activation_format(layout));
    let num_threads = ctx.threads().count().min(tasks.len());
    let units = product.num_tiles() * MAX_FEW.div_ceil(MAX_ROWS) * (size_of::<Tile>() / 4);
    let mut scratch = ctx.empty(&[num_threads, units], DType::U32);
    let scratch = ScratchPool::new(&mut scratch, num_threads);
    ctx.threads().run(tasks.len(), |index| {
        let work = Work { product, tasks: (&tasks[index], tasks.get(index + num_threads)), rows: &rows, best, lanes };
        scratch.with(|scratch, held| work.run(ctx.isa(), tile_slice(scratch), held, epilogue));
    });
}

/// A task with its product and kernel.
#[derive(Clone, Copy)]
struct Work<'a> {
    product: &'a Product<'a>,
    /// This task, and the one that this thread will probably take next.
    tasks: (&'a Task, Option<&'a Task>),
    rows: &'a QuantizedRows,
    best: Kernel,
    lanes: usize,
}

impl<'a> Work<'a> {
    /// Computes the task and hands its tiles to the epilogue.
    fn run(&self, isa: Isa, tiles: &mut [Tile], held: &mut ScratchSlot, epilogue: &dyn Finish) {
        let Work { product, tasks: (task, _), rows, best, lanes } = *self;
        let group = &product.groups[task.group];
        let panels = Panels::new(group.columns, lanes);
        let depth = product.weights.cols();
        let mut a: [&[Quad]; MAX_FEW] = [&[]; MAX_FEW];
        for (r, a) in a.iter_mut().enumerate().take(group.rows) {
            *a = rows.row(group.indices.map_or(group.first + r, |indices| indices[r] as usize));
        }
        let tiles = &mut tiles[..product.num_tiles() * group.rows.div_ceil(MAX_ROWS)];
        for panel in task.panels.clone() {
            let (column, columns, _) = panels.panel(panel);
            let places = Place::tiles_of_panel(task.group, group.rows, Span::new(column, columns), panel);
            places.clone().for_each(|at| epilogue.prefetch(at));
            for pair in 0..product.num_tiles() {
                let weights = group.weights[pair].starting_at(column);
                let next = self.after(panel, pair);
                let tile_step = product.num_tiles();
                let a = &a[..group.rows];
                kernel::run(best, Panel { weights, columns, depth, a, tile_step, next }, &mut tiles[pair..]);
            }
            for (at, tiles) in places.zip(tiles.chunks_exact_mut(product.num_tiles())) {
                let (first, second) = tiles.split_at_mut(1);
                epilogue.finish(isa, at, &mut first[0], second.first_mut(), held.scratch());
            }
        }
    }

    /// Returns the weights that are read after a panel.
    fn after(&self, panel: usize, pair: usize) -> Weights<'a> {
        let Self { product, tasks: (task, next), lanes, .. } = *self;
        let rows = |group: usize, panel: usize, pair: usize| {
            let group = &product.groups[group];
            group.weights[pair].starting_at(Panels::new(group.columns, lanes).panel(panel).0)
        };
        if pair + 1 < product.num_tiles() {
            return rows(task.group, panel, pair + 1);
        }
        if panel + 1 < task.panels.end {
            return rows(task.group, panel + 1, 0);
        }
        next.map_or_else(|| rows(task.group, panel, 0), |next| rows(next.group, next.panels.start, 0))
    }
}

/// Computes groups of somewhat more rows, whose product converts blocks to bf16 by itself.
fn run_some(ctx: &Context, product: &Product<'_>, indices: &[usize], epilogue: &dyn Finish) {
    let depth = product.weights.cols();
    let group = |&index: &usize| {
        let group = &product.groups[index];
        let blocks = Blocks::new(ctx.isa(), group.weights, group.columns, depth);
        float_group(product.a, group, Source::blocks(blocks, depth))
    };
    let groups: Vec<_> = indices.iter().map(group).collect();
    let list = gemm::Product { form: Form::Nt, compute: Compute::Bf16, groups: &groups, is_paired: product.is_paired };
    gemm::run(ctx, &list, &OfPieces { inner: epilogue, pieces: &whole_groups(product, indices) });
}

/// Lists some groups of a product, each as one piece of all its rows.
fn whole_groups(product: &Product<'_>, indices: &[usize]) -> Vec<RowPiece> {
    indices.iter().map(|&group| RowPiece { group, first: 0, rows: product.groups[group].rows }).collect()
}

/// Returns a group of the float product with `b` as its weights.
fn float_group<'a>(a: &'a Tensor, group: &Group<'a>, b: Source<'a>) -> gemm::Group<'a> {
    let rows = group.indices.map_or_else(|| Source::rows(a, group.first), |indices| Source::gathered(a, indices));
    gemm::Group { a: rows, b, rows: group.rows, columns: group.columns, depth: a.cols() }
}

/// Computes the groups of many rows: their weights are converted to bf16, at most [`DEQUANTIZED_BYTES`] at a time.
fn run_many(ctx: &Context, product: &Product<'_>, many: &[usize], epilogue: &dyn Finish) {
    let depth = product.weights.cols();
    let num_weights = |index: usize| product.groups[index].columns * product.num_tiles();
    let mut start = 0;
    while start < many.len() {
        let mut end = start + 1;
        let mut num_rows = num_weights(many[start]);
        while end < many.len() && (num_rows + num_weights(many[end])) * depth * 2 <= DEQUANTIZED_BYTES {
            num_rows += num_weights(many[end]);
            end += 1;
        }
        run_chunk(ctx, product, &many[start..end], num_rows, epilogue);
        start = end;
    }
}

fn run_chunk(ctx: &Context, product: &Product<'_>, indices: &[usize], num_rows: usize, epilogue: &dyn Finish) {
    let depth = product.weights.cols();
    let mut weights = ctx.empty(&[num_rows, depth], DType::BF16);
    let mut firsts = Vec::with_capacity(indices.len());
    let mut at = 0;
    for &index in indices {
        let group = &product.groups[index];
        firsts.push(at);
        for half in &group.weights[..product.num_tiles()] {
            let to = &mut weights.bf16s_mut()[at * depth..(at + group.columns) * depth];
            to_bf16(ctx, *half, group.columns, depth, to);
            at += group.columns;
        }
    }
    let group = |(&index, &first): (&usize, &usize)| {
        float_group(product.a, &product.groups[index], Source::rows(&weights, first))
    };
    let groups: Vec<_> = indices.iter().zip(&firsts).map(group).collect();
    let list = gemm::Product { form: Form::Nt, compute: Compute::Bf16, groups: &groups, is_paired: product.is_paired };
    gemm::run(ctx, &list, &OfPieces { inner: epilogue, pieces: &whole_groups(product, indices) });
}
