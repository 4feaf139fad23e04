//! [`top_k`](crate::top_k), [`score_top_k`](mod@crate::score_top_k) and [`counting_sort`](crate::counting_sort) on a
//! GPU.
//!
//! Each row of scores has a warp. The sort counts choices by (expert, rank, block of 1,024 tokens), scans each
//! expert's counts in a block, and assigns rows in warps that compare their lanes' experts. The order is that of the
//! CPU, without atomics that could change it.

use moeworks_tensor::{DType, Tensor};

use super::tile_list::{listed_height, num_tiles};
use super::{On, THREADS, WARPS, double, fused_norm};
use crate::counting_sort::SortedChoices;
use crate::deferred::Deferred;
use crate::experts::NO_ROW;
use crate::score_top_k::{ScoreRule, Scored, ScoredGrads};
use crate::top_k::{ChoiceSums, ScoreGrads, ScoreSums, TopK};
use moeworks_gpu::sources::{ROUTE_FEW, ROUTER, SCORES};
use moeworks_gpu::{Arg, CapturedLaunch, Launch, Pending, PendingProduct, ProductKernel};

/// Rows that one block sums, as on the CPU.
const ROWS_EACH: usize = 128;
/// Choices that one block sums.
const SUMMED_CHOICES: usize = 512;
/// Tokens whose choices of one rank a block of the sort has.
const SORT_TOKENS: usize = 1024;
/// The most choices that one block sorts.
const MAX_FEW_CHOICES: usize = 512;
/// The most rows for which a router's logits, choice and sort are one kernel.
const MAX_DECIDED: usize = 64;
/// Columns of a block of `route_few`.
const ROUTE_COLUMNS: usize = 4;
/// The most rows that a router's kernel norms itself. Each block norms them all, so for more rows a separate kernel
/// is faster. (H100, eight OLMoE tokens: 25 us fused, 11 and 3 us apart.)
const MAX_NORMED_ROWS: usize = 2;
/// The most bytes of normed rows in shared memory.
const MAX_NORMED_BYTES: usize = 64 << 10;
/// The most experts whose counts fit a block's shared memory in the sort.
const MAX_SORTED_EXPERTS: usize = 1024;

pub(crate) fn softmax_top_k(on: On<'_>, mut logits: Tensor, k: usize, normalize: bool, are_sums_wanted: bool) -> TopK {
    let (rows, width) = (logits.rows(), logits.cols());
    let (mut ids, mut weights) = (on.empty(&[rows, k], DType::U32), on.empty(&[rows, k], DType::F32));
    let [mut lse, mut entropy, mut squares] = [(); 3].map(|()| on.empty(&[rows], DType::F32));
    let mut args = vec![
        on.write(&mut logits),
        on.write(&mut ids),
        on.write(&mut weights),
        on.write(&mut lse),
        on.write(&mut entropy),
        on.write(&mut squares),
        rows.into(),
        width.into(),
        k.into(),
        normalize.into(),
    ];
    // A decoding step, whose choices will be dispatched.
    let is_few = !are_sums_wanted && (1..=MAX_DECIDED).contains(&rows) && rows * k <= MAX_FEW_CHOICES && sorts(width);
    let product = if is_few { product_of(on, args[0]) } else { None };
    let mut sorted = (is_few && (rows <= WARPS || product.is_some())).then(|| FewChoices::new(on, rows, k, width));
    if let Some(sorted) = &mut sorted {
        args.extend(sorted.args(on));
        decide_for_few(on, product, rows, &args);
    } else {
        // SAFETY: a warp reads and writes its row of each.
        unsafe { on.launch(&ROUTER, "softmax_top_k", rows.div_ceil(WARPS), &args) };
    }
    drop(args);
    let rows = RowScores { probs: &logits, lse: &lse, entropy: &entropy, squares: Some(&squares) };
    let sums = sum_scores(on, rows, are_sums_wanted);
    TopK { probs: logits, ids, weights, lse, sums, sorted: sorted.map(FewChoices::sorted) }
}

/// A pending product that makes logits, and its launch, which was taken back.
struct LogitsProduct {
    product: PendingProduct<'static>,
    launch: CapturedLaunch,
}

/// Takes back the pending product that makes these logits, if there is one. The caller's kernel does its work.
fn product_of(on: On<'_>, logits: Arg<'_>) -> Option<LogitsProduct> {
    let is_wanted = |product: &PendingProduct<'_>| {
        let is_few = product.kernel == ProductKernel::Vec && product.grid[1] <= MAX_DECIDED / WARPS;
        is_few && product.to == logits && product.gather == Arg::none() && !product.b_is_bf16
    };
    let taken = on.gpu.fuse_with_last(|pending| match pending {
        Pending::Product(product) => Some(product).filter(is_wanted),
        _ => None,
    });
    taken.map(|(product, launch)| LogitsProduct { product, launch })
}

/// Launches a router's decision for few rows, fused with the product that makes its logits, and with a pending norm
/// of that product's input, if there is one.
fn decide_for_few(on: On<'_>, product: Option<LogitsProduct>, rows: usize, decision: &[Arg<'_>]) {
    let Some(LogitsProduct { product, launch }) = product else {
        // SAFETY: a warp of the one block reads and writes its row of each; of choices as `sort_few_choices`.
        return unsafe { on.launch(&ROUTER, "decide_for_few", 1, decision) };
    };
    let shared = rows * product.depth * 4;
    let norm = if rows <= MAX_NORMED_ROWS && shared <= MAX_NORMED_BYTES {
        fused_norm::take(on, product.a, rows)
    } else {
        None
    };
    let shared = if norm.is_some() { shared } else { 0 };
    let grid = [product.columns.div_ceil(ROUTE_COLUMNS), product.grid[1], 1];
    let counters = on.gpu.counters(on.ctx.pool());
    let mut args = norm.unwrap_or_else(fused_norm::nothing).to_vec();
    args.extend(launch.args);
    args.extend_from_slice(decision);
    args.push(on.read(&counters));
    let launch = Launch { source: &ROUTE_FEW, kernel: "route_few", grid, threads: THREADS, shared, args: &args };
    // SAFETY: what the three kernels may do; the last blocks have what they decide alone, and kernels that use the
    // counters follow one another.
    unsafe { on.gpu.launch(&launch) };
}

/// The tensors whose rows are summed: `[T, E]`, and `[T]` each.
struct RowScores<'a> {
    probs: &'a Tensor,
    lse: &'a Tensor,
    entropy: &'a Tensor,
    /// The squares of logits.
    squares: Option<&'a Tensor>,
}

/// Sums scores over the rows, at once or, unless `are_wanted`, when the sums are first read.
fn sum_scores(on: On<'_>, rows: RowScores<'_>, are_wanted: bool) -> Deferred<ScoreSums> {
    if are_wanted {
        return start_sums(on, &rows);
    }
    let (ctx, [probs, lse, entropy]) = (on.ctx.clone(), [rows.probs, rows.lse, rows.entropy].map(Tensor::clone));
    let squares = rows.squares.cloned();
    Deferred::new(move || {
        let on = On::of(&ctx).expect("a context that has had a GPU");
        let rows = RowScores { probs: &probs, lse: &lse, entropy: &entropy, squares: squares.as_ref() };
        (*start_sums(on, &rows)).clone()
    })
}

/// Starts the sums over the rows on the GPU.
fn start_sums(on: On<'_>, of: &RowScores<'_>) -> Deferred<ScoreSums> {
    let (rows, width) = (of.probs.rows(), of.probs.cols());
    let blocks = rows.div_ceil(ROWS_EACH);
    let mut partial = on.empty(&[blocks, width + 3], DType::F32);
    let args = [
        on.read(of.probs),
        on.read(of.lse),
        on.read(of.entropy),
        on.read_or_none(of.squares),
        on.write(&mut partial),
        rows.into(),
        width.into(),
        ROWS_EACH.into(),
    ];
    // SAFETY: a block writes its row of sums.
    unsafe { on.launch(&ROUTER, "sum_scores", blocks, &args) };
    let has_squares = of.squares.is_some();
    Deferred::new(move || {
        let sum = |at: usize| partial.f32s().chunks(width + 3).map(|sums| f64::from(sums[at])).sum::<f64>();
        ScoreSums {
            probs: (0..width).map(sum).collect(),
            entropy: sum(width),
            lse_squared: sum(width + 1),
            logits_squared: has_squares.then(|| sum(width + 2)),
        }
    })
}

pub(crate) fn score_top_k(on: On<'_>, mut logits: Tensor, rule: &ScoreRule<'_>) -> Scored {
    let (rows, width, k) = (logits.rows(), logits.cols(), rule.top_k);
    let [mut probs, mut gates] =
        [true, rule.is_sigmoid].map(|is_there| on.empty(&[if is_there { rows } else { 0 }, width], DType::F32));
    // The scores that the choice ranks by, where these are not the logits, and the groups' scores.
    let (is_limited, is_ranked) = (rule.is_limited(), rule.is_limited() || rule.bias.is_some());
    let mut ranking = on.empty(&[if is_ranked { rows } else { 0 }, width], DType::F32);
    let mut groups = on.empty(&[if is_limited { rows } else { 0 }, rule.num_groups], DType::F32);
    let (mut ids, mut weights) = (on.empty(&[rows, k], DType::U32), on.empty(&[rows, k], DType::F32));
    let (mut lse, mut entropy) = (on.empty(&[rows], DType::F32), on.empty(&[rows], DType::F32));
    let mut args = vec![on.write(&mut logits), on.write(&mut probs)];
    args.push(if rule.is_sigmoid { on.write(&mut gates) } else { Arg::none() });
    args.push(if is_ranked { on.write(&mut ranking) } else { Arg::none() });
    args.push(if is_limited { on.write(&mut groups) } else { Arg::none() });
    args.extend([on.write(&mut ids), on.write(&mut weights), on.write(&mut lse), on.write(&mut entropy)]);
    args.push(on.read_or_none(rule.bias));
    args.extend([rows, width, k].map(Arg::from));
    args.push(rule.temperature.into());
    args.extend([rule.num_groups, rule.top_groups, usize::from(rule.by_top_two)].map(Arg::from));
    args.extend(weighing(rule));
    // SAFETY: a warp reads and writes its row of each.
    unsafe { on.launch(&SCORES, "score_top_k", rows.div_ceil(WARPS), &args) };
    let of = RowScores { probs: &probs, lse: &lse, entropy: &entropy, squares: None };
    let sums = sum_scores(on, of, rule.are_sums_wanted);
    Scored { probs, gates: rule.is_sigmoid.then_some(gates), logits, lse, ids, weights, sums }
}

/// Returns the arguments that say how weights follow from scores.
fn weighing(rule: &ScoreRule<'_>) -> [Arg<'static>; 3] {
    [rule.is_normalized.into(), rule.scale.into(), rule.first_null.into()]
}

pub(crate) fn score_top_k_backward(
    on: On<'_>,
    scored: &Scored,
    rule: &ScoreRule<'_>,
    grads: ScoredGrads<'_>,
) -> Tensor {
    let (rows, width, k) = (scored.probs.rows(), scored.probs.cols(), scored.ids.cols());
    let mut dlogits = on.empty(&[rows, width], DType::F32);
    let (weights, probs) = (on.list(grads.weights), (!grads.probs.is_empty()).then(|| on.floats(grads.probs)));
    let (len, before) = grads.part;
    let mut args = vec![
        on.read(&scored.probs),
        on.read_or_none(scored.gates.as_ref()),
        on.read(&scored.logits),
        on.read(&scored.ids),
        on.read(&scored.weights),
        on.read(&scored.lse),
        on.read(weights.tensor()),
        on.read_or_none(probs.as_ref()),
        on.write(&mut dlogits),
        rows.into(),
        width.into(),
        k.into(),
        rule.temperature.into(),
        len.into(),
        before.into(),
        grads.lse_squared.into(),
    ];
    args.extend(weighing(rule));
    // SAFETY: a warp reads its row of each and its part's, and writes its row of the gradient.
    unsafe { on.launch(&SCORES, "score_top_k_backward", rows.div_ceil(WARPS), &args) };
    dlogits
}

pub(crate) fn choice_sums(on: On<'_>, ids: &Tensor, weights: &Tensor, num_experts: usize) -> Deferred<ChoiceSums> {
    let num_parts = ids.len().div_ceil(SUMMED_CHOICES);
    // The count, nothing, and an f64.
    let mut parts = on.empty(&[num_parts, num_experts, 4], DType::U32);
    let mut sums = on.empty(&[num_experts, 4], DType::U32);
    let (choices, k) = (ids.len().into(), ids.cols().into());
    let args = [on.read(ids), on.read(weights), on.write(&mut parts), choices, k, num_experts.into()];
    // SAFETY: a block reads its choices and writes their sums for each expert.
    unsafe { on.launch(&ROUTER, "sum_choices", num_parts, &args) };
    let args = [on.read(&parts), on.write(&mut sums), num_parts.into(), num_experts.into()];
    // SAFETY: a block writes the sums of its expert's parts.
    unsafe { on.launch(&ROUTER, "add_choices", num_experts, &args) };
    Deferred::new(move || {
        let sums = sums.u32s().as_chunks::<4>().0;
        let weight = |&[_, _, low, high]: &[u32; 4]| double([low, high]);
        ChoiceSums { firsts: sums.iter().map(|sums| sums[0]).collect(), weights: sums.iter().map(weight).collect() }
    })
}

pub(crate) fn softmax_top_k_backward(on: On<'_>, scores: &TopK, normalize: bool, grads: ScoreGrads<'_>) -> Tensor {
    let (rows, width, k) = (scores.probs.rows(), scores.probs.cols(), scores.ids.cols());
    let mut dlogits = on.empty(&[rows, width], DType::F32);
    let weights = on.list(grads.weights);
    let probs = (!grads.probs.is_empty()).then(|| on.floats(grads.probs));
    let args = [
        on.read(&scores.probs),
        on.read(&scores.ids),
        on.read(&scores.weights),
        on.read(&scores.lse),
        on.read(weights.tensor()),
        on.read_or_none(probs.as_ref()),
        on.write(&mut dlogits),
        grads.lse_squared.into(),
        rows.into(),
        width.into(),
        k.into(),
        normalize.into(),
    ];
    // SAFETY: a warp reads its row of each and writes its row of the gradient.
    unsafe { on.launch(&ROUTER, "softmax_top_k_backward", rows.div_ceil(WARPS), &args) };
    dlogits
}

/// Returns whether the sort can run on the GPU.
pub(crate) fn sorts(num_experts: usize) -> bool {
    num_experts <= MAX_SORTED_EXPERTS
}

/// Sorts choices by expert. `limit` is the capacity of each expert; without it every id is an expert's, and the T K
/// rows are known beforehand.
pub(crate) fn sort_choices(
    on: On<'_>,
    ids: &Tensor,
    weights: &Tensor,
    num_experts: usize,
    limit: Option<u32>,
) -> SortedChoices {
    let (num_tokens, k) = (ids.rows(), ids.cols());
    if limit.is_none() && (1..=MAX_FEW_CHOICES).contains(&ids.len()) {
        return sort_few_choices(on, ids, weights, num_experts);
    }
    let last = if limit.is_none() { num_experts as u32 - 1 } else { NO_ROW };
    let Counted { cells, counts, offsets } = count_choices(on, ids, num_experts, last, limit.is_none());
    let empty = |shape: &[usize], dtype| on.empty(shape, dtype);
    let mut sorted = match (limit, offsets) {
        (None, Some(offsets)) => {
            let [tokens, weights] = [DType::U32, DType::F32].map(|dtype| empty(&[num_tokens * k], dtype));
            let token_rows = empty(&[num_tokens, k], DType::U32);
            SortedChoices { counts, offsets, tokens, weights, token_rows, few_tiles: None }
        }
        // The number of rows decides sizes: it is the one thing that the host waits for.
        (limit, _) => SortedChoices::with_room(on.ctx, counts, limit.unwrap_or(NO_ROW), num_tokens, k, empty),
    };
    debug_assert_eq!(NO_ROW, u32::MAX, "what the kernel writes for a choice without a row");
    let args = [
        on.read(ids),
        on.read(weights),
        on.read(&cells),
        on.read(&sorted.offsets),
        on.write(&mut sorted.tokens),
        on.write(&mut sorted.weights),
        on.write(&mut sorted.token_rows),
        num_tokens.into(),
        k.into(),
        num_experts.into(),
        last.into(),
        limit.unwrap_or(NO_ROW).into(),
    ];
    let (grid, shared) = ([num_tokens.div_ceil(SORT_TOKENS), k, 1], WARPS * num_experts * 4);
    let launch = Launch { source: &ROUTER, kernel: "place_choices", grid, threads: THREADS, shared, args: &args };
    // SAFETY: a block reads its choices and writes the rows that were counted for them.
    unsafe { on.gpu.launch(&launch) };
    sorted
}

/// The counts of the sort: `cells [E, K, blocks]`, the choices before those of an expert, rank and block of tokens;
/// `counts [E]`; and, where they are wanted, `offsets [E + 1]`, the prefix sums of the counts.
struct Counted {
    cells: Tensor,
    counts: Tensor,
    offsets: Option<Tensor>,
}

/// Counts choices. An id above `last` counts as `last`.
fn count_choices(on: On<'_>, ids: &Tensor, num_experts: usize, last: u32, are_offsets_wanted: bool) -> Counted {
    let (num_tokens, k) = (ids.rows(), ids.cols());
    let num_blocks = num_tokens.div_ceil(SORT_TOKENS);
    let (mut cells, mut counts) =
        (on.empty(&[num_experts, k, num_blocks], DType::U32), on.empty(&[num_experts], DType::U32));
    let args = [on.read(ids), on.write(&mut cells), num_tokens.into(), k.into(), num_experts.into(), last.into()];
    let (grid, shared) = ([num_blocks, k, 1], num_experts * 4);
    let launch = Launch { source: &ROUTER, kernel: "count_choices", grid, threads: THREADS, shared, args: &args };
    // SAFETY: a block reads its choices and writes its own cells.
    unsafe { on.gpu.launch(&launch) };
    let counters = on.gpu.counters(on.ctx.pool());
    let mut offsets = are_offsets_wanted.then(|| on.empty(&[num_experts + 1], DType::U32));
    let to = offsets.as_mut().map_or(Arg::none(), |offsets| on.write(offsets));
    let args = [on.write(&mut cells), on.write(&mut counts), (k * num_blocks).into(), to, on.read(&counters)];
    // SAFETY: a block scans its expert's cells, and the last one has the offsets alone.
    unsafe { on.launch(&ROUTER, "scan_cells", num_experts, &args) };
    Counted { cells, counts, offsets }
}

/// Sorts few choices, all of which have rows, in one kernel, because a decoding step waits for it.
fn sort_few_choices(on: On<'_>, ids: &Tensor, weights: &Tensor, num_experts: usize) -> SortedChoices {
    let mut sorted = FewChoices::new(on, ids.rows(), ids.cols(), num_experts);
    let mut args = vec![on.read(ids), on.read(weights), ids.cols().into()];
    args.extend(sorted.args(on));
    // SAFETY: the one block reads all choices, of which there are no more than it has room for, and gives each a row
    // of its own.
    unsafe { on.launch(&ROUTER, "sort_few_choices", 1, &args) };
    drop(args);
    sorted.sorted()
}

/// The memory of a kernel's results for few choices, and of the tiles of their rows.
struct FewChoices {
    sorted: SortedChoices,
    tiles: Tensor,
}

impl FewChoices {
    fn new(on: On<'_>, num_tokens: usize, k: usize, num_experts: usize) -> Self {
        let numbers = |shape: &[usize]| on.empty(shape, DType::U32);
        let sorted = SortedChoices {
            counts: numbers(&[num_experts]),
            offsets: numbers(&[num_experts + 1]),
            tokens: numbers(&[num_tokens * k]),
            weights: on.empty(&[num_tokens * k], DType::F32),
            token_rows: numbers(&[num_tokens, k]),
            few_tiles: None,
        };
        let tiles = numbers(&[num_tiles(listed_height(num_tokens), num_tokens * k, num_experts), 3]);
        Self { sorted, tiles }
    }

    fn args<'a>(&'a mut self, on: On<'_>) -> [Arg<'a>; 10] {
        let Self { sorted, tiles } = self;
        let (num_tokens, num_experts, num_tiles) = (sorted.token_rows.rows(), sorted.counts.len(), tiles.rows());
        [
            on.write(&mut sorted.counts),
            on.write(&mut sorted.offsets),
            on.write(&mut sorted.tokens),
            on.write(&mut sorted.weights),
            on.write(&mut sorted.token_rows),
            on.write(tiles),
            num_tokens.into(),
            num_experts.into(),
            listed_height(num_tokens).into(),
            num_tiles.into(),
        ]
    }

    fn sorted(self) -> SortedChoices {
        SortedChoices { few_tiles: Some(self.tiles), ..self.sorted }
    }
}

/// Returns `num_tiles` triples (group, first row, rows): the tiles of at most `height` rows of the groups that begin
/// at `offsets`, and behind them tiles without rows. There must be no more tiles than that.
pub(super) fn list_tiles(on: On<'_>, offsets: &Tensor, height: usize, num_tiles: usize) -> Tensor {
    let mut tiles = on.empty(&[num_tiles, 3], DType::U32);
    let args = [on.read(offsets), on.write(&mut tiles), (offsets.len() - 1).into(), height.into(), num_tiles.into()];
    // SAFETY: the one block writes all tiles, of which there are as many as the caller says.
    unsafe { on.launch(&ROUTER, "list_tiles", 1, &args) };
    tiles
}
