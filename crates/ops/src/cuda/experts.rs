//! [`experts`](crate::experts) on a GPU: the phases of the host in the same order. Each product and its epilogue are
//! one launch, and the rows of a token are summed by the block that has the token.

use moeworks_tensor::{DType, Tensor};

use super::activations;
use super::e4m3::{self, Packed};
use super::grouped::{COMBINE_ARGS, Epilogue, FEW_ROWS, Groups, RowsProduct};
use super::scattered::Scattered;
use super::tile_list::TileLists;
use super::wgrad::WgradProduct;
use super::{Listed, On, THREADS, WARPS, small_m_gemm, takes_weights};
use crate::Activation;
use crate::deferred::List;
use crate::e4m3::BLOCK;
use crate::experts::{
    ExpertBiases, ExpertGrads, ExpertRows, ExpertWeights, ExpertsBackward, ExpertsSaved, WeightGradInputs, type_of_rows,
};
use crate::gemm::Form;
use crate::linear::Write;
use moeworks_gpu::sources::GROUPED;
use moeworks_gpu::{
    Arg, COUNTERS, CapturedLaunch, ExpertStacks, Launch, Pending, PendingCombine, PendingProduct, ProductKernel,
};

/// Returns whether there are kernels for the forward pass with these weights.
pub(crate) fn takes(weights: ExpertWeights<'_>) -> bool {
    activations::has_kernels(weights.activation)
        && [weights.gate_up, weights.down].iter().all(|w| takes_weights(w.dtype()))
}

/// The map of rows to experts, on the GPU.
pub(super) struct Rows<'a> {
    pub(super) offsets: Listed<'a>,
    pub(super) tokens: Listed<'a>,
    weights: Listed<'a>,
    pub(super) num_tokens: usize,
    tiles: TileLists,
}

impl<'a> Rows<'a> {
    pub(super) fn new(on: On<'_>, rows: ExpertRows<'a>) -> Self {
        let num_tokens = rows.token_rows.len() / rows.num_choices.max(1);
        Self {
            offsets: on.list(rows.offsets),
            tokens: on.list(rows.tokens),
            weights: on.list(rows.weights),
            num_tokens,
            tiles: TileLists::from_sort(rows.few_tiles, num_tokens),
        }
    }

    /// Returns the groups of rows. A token has an expert at most once, which bounds their lengths.
    pub(super) fn groups(&self) -> Groups<'_> {
        let (offsets, rows) = (self.offsets.tensor(), self.len());
        match offsets.len() {
            2 => Groups::One { rows },
            _ => Groups::Many { offsets, rows, most: rows.min(self.num_tokens), listed: &self.tiles },
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.tensor().len()
    }
}

/// Consecutive experts whose products are taken at once: all of them, or as many as the expert cache holds.
#[derive(Default)]
struct Part {
    /// The first row of each expert and the end of the last one's, clamped so that only this part's experts have
    /// rows.
    offsets: Vec<u32>,
    /// The experts of the part that have rows; none without a cache, where there is one part.
    experts: Option<Vec<usize>>,
    /// Another part comes before it.
    is_later: bool,
}

/// A part whose matrices are on the GPU.
#[derive(Default)]
struct LoadedPart {
    offsets: Option<Tensor>,
    addresses: Option<[Tensor; 2]>,
    /// The experts whose matrices have addresses.
    experts: Vec<u32>,
    tiles: TileLists,
}

impl Part {
    /// Cuts the experts into parts that the expert cache can hold.
    fn all(on: On<'_>, weights: ExpertWeights<'_>, rows: ExpertRows<'_>, is_fp8: bool) -> Vec<Self> {
        let num_experts = rows.offsets.len() - 1;
        let Some(cache) = on.gpu.expert_cache().filter(|_| !is_fp8 && num_experts > 1) else {
            return vec![Self::default()];
        };
        let offsets: &[u32] = &rows.offsets;
        let used: Vec<usize> = (0..num_experts).filter(|&e| offsets[e] < offsets[e + 1]).collect();
        let part = |experts: &[usize]| {
            let (first, last) = (offsets[experts[0]], offsets[experts[experts.len() - 1] + 1]);
            let offsets = offsets.iter().map(|&offset| offset.clamp(first, last)).collect();
            Self { offsets, experts: Some(experts.to_vec()), is_later: experts[0] != used[0] }
        };
        used.chunks(cache.capacity(weights.stacks(num_experts))).map(part).collect()
    }

    /// Loads the matrices into the cache.
    fn load(self, on: On<'_>, weights: ExpertWeights<'_>) -> LoadedPart {
        let Some((cache, experts)) = on.gpu.expert_cache().zip(self.experts) else { return LoadedPart::default() };
        let stacks = weights.stacks(self.offsets.len() - 1);
        if self.is_later {
            // The part before is evicted, but its memory is retained while captured launches use it.
            on.gpu.flush();
        }
        let addresses = cache.load(on.gpu, on.ctx.pool(), stacks, &experts).map(|addresses| on.u32s(&addresses));
        let experts = experts.iter().map(|&expert| expert as u32).collect();
        let offsets = Some(on.u32s(&self.offsets));
        LoadedPart { offsets, addresses: Some(addresses), experts, ..LoadedPart::default() }
    }
}

impl LoadedPart {
    /// Returns the addresses of the matrices of a stack; none if all of the stack is on the GPU.
    fn scattered(&self, stack: usize) -> Option<Scattered<'_>> {
        self.addresses.as_ref().map(|addresses| Scattered { addresses: &addresses[stack], groups: &self.experts })
    }

    /// Returns the groups of rows of this part. Their bound is that of all parts, so that the choice of the kernel
    /// does not depend on the number of parts.
    fn groups<'a>(&'a self, map: &'a Rows<'_>) -> Groups<'a> {
        match &self.offsets {
            None => map.groups(),
            Some(offsets) => Groups::Many { offsets, rows: map.len(), most: map.groups().most(), listed: &self.tiles },
        }
    }
}

impl<'a> ExpertWeights<'a> {
    fn stacks(self, num_experts: usize) -> ExpertStacks<'a> {
        ExpertStacks { gate_up: self.gate_up, down: self.down, num_experts }
    }
}

/// Prefetches the experts named by `ids` into the expert cache, if there is one.
pub(crate) fn prefetch(on: On<'_>, weights: ExpertWeights<'_>, num_experts: usize, ids: &[u32]) {
    let Some(cache) = on.gpu.expert_cache() else { return };
    let mut experts: Vec<usize> = ids.iter().map(|&id| id as usize).filter(|&e| e < num_experts).collect();
    experts.sort_unstable();
    experts.dedup();
    // Launches queued until now need not wait for the copies.
    on.gpu.flush();
    cache.prefetch(on.gpu, on.ctx.pool(), weights.stacks(num_experts), &experts);
}

/// The form in which products take their operands.
#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    /// The tensors as they are.
    Given,
    /// Rounded to FP8, stored as bf16.
    Rounded,
    /// FP8 bytes with scales.
    Fp8,
}

impl Numbers {
    /// Chooses the form for experts of width `f` and activations of width `d`.
    fn choose(on: On<'_>, is_fp8: bool, d: usize, f: usize, map: &Rows<'_>) -> Self {
        // FP8 products need copies of 16 bytes, whole blocks in both directions where gate and up are side by side,
        // and more than a few rows.
        let has_kernel = d.is_multiple_of(16) && f.is_multiple_of(BLOCK) && map.groups().most() > FEW_ROWS;
        match is_fp8 {
            false => Self::Given,
            true if has_kernel && on.gpu.hopper_processors().is_some() => Self::Fp8,
            true => Self::Rounded,
        }
    }

    /// Returns rows of activations in this form.
    fn rows(self, on: On<'_>, x: &Tensor) -> Operand {
        match self {
            Self::Given => x.clone().into(),
            Self::Rounded => e4m3::round_rows(on, x).into(),
            Self::Fp8 => e4m3::pack_rows(on, x).into(),
        }
    }

    /// Returns the experts' matrices of `rows` rows in this form, for experts that have rows.
    fn matrices(self, on: On<'_>, weights: &Tensor, rows: usize, map: &Rows<'_>) -> Operand {
        let offsets = map.offsets.tensor();
        match self {
            Self::Given => weights.clone().into(),
            Self::Rounded => e4m3::round_matrices(on, weights, rows, Some(offsets)).into(),
            Self::Fp8 => e4m3::pack_matrices(on, weights, rows, offsets).into(),
        }
    }

    /// Returns the experts' matrices for products with their rows as the depth, and the form of those products. FP8
    /// takes transposed matrices.
    fn matrices_of_backward(self, on: On<'_>, weights: &Tensor, rows: usize, map: &Rows<'_>) -> (Form, Operand) {
        match self {
            Self::Fp8 => (Form::Nt, e4m3::pack_transposed_matrices(on, weights, rows, map.offsets.tensor()).into()),
            _ => (Form::Nn, self.matrices(on, weights, rows, map)),
        }
    }
}

/// An operand of a product, and its scales in FP8.
struct Operand {
    data: Tensor,
    scales: Option<Tensor>,
}

impl From<Tensor> for Operand {
    fn from(data: Tensor) -> Self {
        Self { data, scales: None }
    }
}

impl From<Packed> for Operand {
    fn from(Packed { bytes, scales }: Packed) -> Self {
        Self { data: bytes, scales: Some(scales) }
    }
}

/// Returns the scales of both operands, if they have any.
fn scales<'a>(a: &'a Operand, b: &'a Operand) -> Option<[&'a Tensor; 2]> {
    Some([a.scales.as_ref()?, b.scales.as_ref()?])
}

/// The inputs of the forward pass: activations, weights, the map of rows, and a summand of the result.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) weights: ExpertWeights<'a>,
    pub(crate) biases: Option<ExpertBiases<'a>>,
    pub(crate) rows: ExpertRows<'a>,
    pub(crate) base: Option<&'a Tensor>,
}

/// Computes [`experts_forward_with`](crate::experts::experts_forward_with).
pub(crate) fn forward(
    on: On<'_>,
    inputs: ForwardInputs<'_>,
    is_fp8: bool,
    is_forward_only: bool,
) -> (Tensor, Option<ExpertsSaved>) {
    let ForwardInputs { x, weights, biases, rows, base } = inputs;
    let map = Rows::new(on, rows);
    let (r, d, f, dtype) = (map.len(), x.cols(), weights.down.cols(), weights.gate_up.dtype().of_activations());
    let num_inputs = weights.activation.num_inputs();
    // The second product's kernels round to bf16 in any case.
    let type_of_a = if weights.down.dtype().is_quantized() { DType::BF16 } else { dtype };
    let (mut h, mut a) =
        ((!is_forward_only).then(|| on.empty(&[r, num_inputs * f], dtype)), on.empty(&[r, f], type_of_a));
    let mut outputs = None;
    let numbers = Numbers::choose(on, is_fp8, d, f, &map);
    let of_x = numbers.rows(on, x);
    let parts = Part::all(on, weights, rows, is_fp8);
    let is_one_token = parts.len() == 1 && map.num_tokens == 1 && biases.is_none();
    for part in parts {
        let part = part.load(on, weights);
        let gate_up = numbers.matrices(on, weights.gate_up, f, &map);
        let up = RowsProduct {
            form: Form::Nt,
            a: &of_x.data,
            gather: Some(map.tokens.tensor()),
            b: &gate_up.data,
            scattered: part.scattered(0),
            group_rows: num_inputs * f,
            columns: f,
            depth: d,
            pair: (num_inputs == 2).then_some(f),
            compute: dtype,
            groups: part.groups(&map),
            a_in_levels: false,
            scales: scales(&of_x, &gate_up),
        };
        // The first product's kernel writes activations in the order that the second product takes, if it can.
        let in_levels = up.is_small_m(on) && up.reads_blocks(weights.down.dtype(), f);
        let epilogue = activation(on, weights, biases, h.as_mut(), &mut a, in_levels, dtype);
        // SAFETY: `h`, if it is there, and `a` have a row for each row, the bias one for each expert.
        unsafe { up.run(on, &epilogue) };
        drop(epilogue);
        let (a, down) = (numbers.rows(on, &a), numbers.matrices(on, weights.down, d, &map));
        let down = RowsProduct {
            a: &a.data,
            gather: None,
            b: &down.data,
            scattered: part.scattered(1),
            group_rows: d,
            columns: d,
            depth: f,
            pair: None,
            compute: weights.down.dtype().of_activations(),
            a_in_levels: in_levels,
            scales: scales(&a, &down),
            ..up
        };
        if is_one_token && down.can_be_combined(on) {
            return (down.combined(on, map.weights.tensor(), base), h.map(|h| ExpertsSaved { h }));
        }
        down.store_to(on, outputs.get_or_insert_with(|| on.empty(&[r, d], type_of_rows(weights))));
    }
    let mut outputs = outputs.unwrap_or_else(|| on.empty(&[r, d], type_of_rows(weights)));
    if let Some(biases) = biases {
        add_biases(on, &mut outputs, biases.down, &map);
    }
    (combine_onto(on, &outputs, rows, Some(rows.weights), &[x.rows(), d], base), h.map(|h| ExpertsSaved { h }))
}

/// Returns the epilogue of the first product: writes `h`, if it is kept, and `a`, the activation of numbers of type
/// `dtype`.
fn activation<'a>(
    on: On<'_>,
    weights: ExpertWeights<'a>,
    biases: Option<ExpertBiases<'a>>,
    h: Option<&'a mut Tensor>,
    a: &'a mut Tensor,
    in_levels: bool,
    dtype: DType,
) -> Epilogue<'a> {
    let kernels = match weights.activation.num_inputs() {
        2 => ["up_paired", "plain_up_paired", "vec_up_paired"],
        _ => ["up_single", "plain_up_single", "vec_up_single"],
    };
    let types = [small_m_gemm::kind_of(dtype, false), small_m_gemm::kind_of(a.dtype(), in_levels)];
    let bias = on.read_or_none(biases.map(|biases| biases.gate_up));
    let to_h = h.map_or(Arg::none(), |h| on.write(h));
    let mut args = vec![to_h, on.write(a), bias, types[0], types[1], weights.down.cols().into()];
    args.extend(activations::args(weights.activation));
    Epilogue { kernels, args, stored: None }
}

/// Adds the bias of each row's expert, `[E, D]`, to the row of `outputs`.
fn add_biases(on: On<'_>, outputs: &mut Tensor, bias: &Tensor, map: &Rows<'_>) {
    let offsets = map.offsets.tensor();
    let is_bf16 = Arg::from(outputs.dtype() == DType::BF16);
    let (groups, width) = ((offsets.len() - 1).into(), bias.cols().into());
    let args = [on.write(outputs), is_bf16, on.read(bias), on.read(offsets), groups, width];
    // SAFETY: a block adds its row's bias, of an expert that the offsets name.
    unsafe { on.launch(&GROUPED, "add_row_biases", map.len(), &args) };
}

/// Adds `<dy, b2>` to the gradients of the row weights.
pub(crate) fn add_bias_row_weight_grads(
    on: On<'_>,
    dy: &Tensor,
    down: &Tensor,
    rows: ExpertRows<'_>,
    d_row_weights: &mut Tensor,
) {
    let map = Rows::new(on, rows);
    let offsets = map.offsets.tensor();
    let args = [
        on.read(dy),
        (dy.dtype() == DType::BF16).into(),
        on.read(down),
        on.read(offsets),
        on.read(map.tokens.tensor()),
        on.write(d_row_weights),
        map.len().into(),
        (offsets.len() - 1).into(),
        down.cols().into(),
    ];
    // SAFETY: a warp reads its token's row and its expert's bias, and writes its row's gradient.
    unsafe { on.launch(&GROUPED, "add_bias_dots", map.len().div_ceil(WARPS), &args) };
}

/// Computes the gradients of both biases.
pub(crate) fn bias_grad(
    on: On<'_>,
    dy: &Tensor,
    dh: &Tensor,
    rows: ExpertRows<'_>,
    write: Write,
    gate_up: &mut Tensor,
    down: &mut Tensor,
) {
    let map = Rows::new(on, rows);
    let offsets = map.offsets.tensor();
    let sum = |x: &Tensor, of_tokens: bool, sums: &mut Tensor| {
        let width = sums.cols();
        let args = [
            on.read(x),
            (x.dtype() == DType::BF16).into(),
            on.read_or_none(of_tokens.then(|| map.tokens.tensor())),
            on.read_or_none(of_tokens.then(|| map.weights.tensor())),
            on.read(offsets),
            on.write(sums),
            width.into(),
            (write == Write::Add).into(),
        ];
        let grid = [width.div_ceil(32), offsets.len() - 1, 1];
        let (source, kernel) = (&GROUPED, "sum_group_rows");
        // SAFETY: a block reads its group's rows, or those of their tokens, and writes its columns of the group's
        // sums.
        unsafe { on.gpu.launch(&Launch { source, kernel, grid, threads: THREADS, shared: 0, args: &args }) };
    };
    sum(dh, false, gate_up);
    sum(dy, true, down);
}

/// The most tokens whose rows are summed by the last blocks that make them. With more a separate kernel is faster.
/// (H100: second products of eight OLMoE tokens with their sums ran at 2.2 TB/s, of 64 tokens without sums at 2.7
/// TB/s, where the sums take 3 us.)
const MAX_COMBINED_BY_LAST: usize = 4;

/// Columns that a block sums.
const COMBINED_COLUMNS: usize = 8 * THREADS;

/// Computes [`combine`](crate::experts::combine). `outputs` may be bf16, too.
pub(crate) fn combine(
    on: On<'_>,
    outputs: &Tensor,
    rows: ExpertRows<'_>,
    weights: Option<List<'_, f32>>,
    shape: &[usize; 2],
) -> Tensor {
    combine_onto(on, outputs, rows, weights, shape, None)
}

/// Takes back the pending product that makes the few rows to be combined, if there is one. The caller's kernel does
/// its work.
fn product_of(on: On<'_>, outputs: &Tensor, num_tokens: usize) -> Option<CapturedLaunch> {
    if num_tokens > MAX_COMBINED_BY_LAST {
        return None;
    }
    let outputs = on.read(outputs);
    let is_wanted = |product: &PendingProduct<'_>| {
        let can_combine = product.kernel == ProductKernel::SmallM && product.grid[0] <= COUNTERS;
        can_combine && product.to == outputs && product.base == Arg::none()
    };
    let taken = on.gpu.fuse_with_last(|pending| match pending {
        Pending::Product(product) => is_wanted(&product).then_some(()),
        _ => None,
    });
    taken.map(|((), launch)| launch)
}

/// Combines the rows and adds `base`, f32 of the same shape, if there is one.
fn combine_onto(
    on: On<'_>,
    outputs: &Tensor,
    rows: ExpertRows<'_>,
    weights: Option<List<'_, f32>>,
    shape: &[usize; 2],
    base: Option<&Tensor>,
) -> Tensor {
    let (mut y, token_rows) = (on.empty(shape, DType::F32), on.list(rows.token_rows));
    let weights = weights.map(|weights| on.list(weights));
    let weights = weights.as_ref().map(Listed::tensor);
    if let Some(product) = product_of(on, outputs, shape[0]) {
        let counters = on.gpu.counters(on.ctx.pool());
        let mut args = product.args.clone();
        args.truncate(args.len() - COMBINE_ARGS);
        args.extend([on.read(token_rows.tensor()), on.read_or_none(weights), on.read_or_none(base), on.write(&mut y)]);
        args.extend([shape[0].into(), rows.num_choices.into(), on.read(&counters)]);
        // SAFETY: as of the product, after which the last block of some columns reads what all wrote there, and
        // writes them of `y`.
        unsafe { on.gpu.launch(&Launch { args: &args, ..product.launch() }) };
        drop(args);
        return y;
    }
    let combine = PendingCombine { y: on.write(&mut y), tokens: shape[0] };
    let args = [
        on.read(outputs),
        (outputs.dtype() == DType::BF16).into(),
        on.read(token_rows.tensor()),
        on.read_or_none(weights),
        on.read_or_none(base),
        combine.y,
        rows.num_choices.into(),
        shape[1].into(),
    ];
    let (source, kernel) = (&GROUPED, "combine_rows");
    let grid = [shape[0], shape[1].div_ceil(COMBINED_COLUMNS), 1];
    let launch = Launch { source, kernel, grid, threads: THREADS, shared: 0, args: &args };
    // SAFETY: blocks write their token's row from rows of `outputs` that the map names.
    unsafe { on.gpu.launch_pending(&launch, Pending::Combine(combine)) };
    y
}

pub(crate) fn choice_weight_grads(on: On<'_>, rows: ExpertRows<'_>, d_row_weights: &Tensor) -> Tensor {
    let (token_rows, choices) = (on.list(rows.token_rows), rows.token_rows.len());
    let mut grads = on.empty(&[choices], DType::F32);
    let args = [on.read(token_rows.tensor()), on.read(d_row_weights), on.write(&mut grads), choices.into()];
    // SAFETY: a thread reads the gradients of rows that the map names and writes its choices'.
    unsafe { on.launch(&GROUPED, "grads_of_choices", choices.div_ceil(4 * THREADS), &args) };
    grads
}

/// Computes [`experts_backward`](crate::experts::experts_backward).
pub(crate) fn backward(
    on: On<'_>,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    is_fp8: bool,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
) -> ExpertsBackward {
    let map = Rows::new(on, rows);
    let (r, d, f, dtype) = (map.len(), dy.cols(), weights.down.cols(), weights.gate_up.dtype());
    let af = f * weights.activation.num_inputs();
    let numbers = Numbers::choose(on, is_fp8, d, f, &map);
    let (of_dy, (form, down)) = (numbers.rows(on, dy), numbers.matrices_of_backward(on, weights.down, d, &map));
    let first = RowsProduct {
        form,
        a: &of_dy.data,
        gather: Some(map.tokens.tensor()),
        b: &down.data,
        scattered: None,
        group_rows: if form == Form::Nt { f } else { d },
        columns: f,
        depth: d,
        pair: None,
        compute: dtype,
        groups: map.groups(),
        a_in_levels: false,
        scales: scales(&of_dy, &down),
    };
    let num_parts = first.column_tiles(on);
    let (mut dh, mut weighed) = (on.empty(&[r, af], dtype), on.empty(&[r, f], dtype));
    let mut parts = on.empty(&[r, num_parts], DType::F32);
    let mut args = vec![
        on.read(&saved.h),
        on.write(&mut dh),
        on.write(&mut weighed),
        on.read(map.weights.tensor()),
        (dtype == DType::BF16).into(),
        f.into(),
    ];
    args.extend(activations::args(weights.activation));
    args.push(on.write(&mut parts));
    // SAFETY: `h`, `dh`, `weighed` and `parts` have a row for each row, `parts` a column for each tile of columns.
    unsafe { first.run(on, &Epilogue { kernels: ["pull_back_rows", "plain_pull_back_rows", ""], args, stored: None }) };
    let mut d_row_weights = on.empty(&[r], DType::F32);
    let args = [on.read(&parts), on.write(&mut d_row_weights), r.into(), num_parts.into()];
    // SAFETY: a thread adds up its row's parts.
    unsafe { on.launch(&GROUPED, "add_row_parts", r.div_ceil(THREADS), &args) };
    let (of_dh, (_, gate_up)) = (numbers.rows(on, &dh), numbers.matrices_of_backward(on, weights.gate_up, f, &map));
    let second = RowsProduct {
        a: &of_dh.data,
        gather: None,
        b: &gate_up.data,
        group_rows: if form == Form::Nt { d } else { af },
        columns: d,
        depth: af,
        scales: scales(&of_dh, &gate_up),
        ..first
    };
    let outputs = second.store(on, r, weights.gate_up.dtype().of_activations());
    let dx = combine(on, &outputs, rows, None, &[dy.rows(), d]);
    ExpertsBackward { dx, d_row_weights, dh, weighed: Some(weighed) }
}

/// The rows of experts whose weights get gradients.
#[derive(Clone, Copy)]
pub(crate) struct WgradRows<'a> {
    pub(crate) rows: ExpertRows<'a>,
    /// Leaves the gradients of experts without rows as they are.
    pub(crate) keeps_unused: bool,
}

/// Computes the gradients of the weights from the `weighed` activations of [`backward`]. With `keeps_unused` the
/// gradients of experts without rows are left as they are.
pub(crate) fn weight_grad(
    on: On<'_>,
    inputs: WeightGradInputs<'_>,
    weighed: &Tensor,
    activation: Activation,
    WgradRows { rows, keeps_unused }: WgradRows<'_>,
    write: Write,
    grads: ExpertGrads<'_>,
) {
    let WeightGradInputs { x, dy, dh, .. } = inputs;
    let map = Rows::new(on, rows);
    let (d, f) = (x.cols(), grads.down.cols());
    let (offsets, tokens, compute) = (map.offsets.tensor(), Some(map.tokens.tensor()), dh.dtype());
    let down =
        WgradProduct { a: (dy, tokens), b: (weighed, None), rows: d, columns: f, offsets, compute, keeps_unused };
    down.run(on, write, grads.down);
    let rows = f * activation.num_inputs();
    let up = WgradProduct { a: (dh, None), b: (x, tokens), rows, columns: d, offsets, compute, keeps_unused };
    up.run(on, write, grads.gate_up);
}
