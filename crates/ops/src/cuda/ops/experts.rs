//! [`experts`](crate::experts) on a GPU: the same phases in the same order, each product with its epilogue as one launch, and the
//! rows of a token added up by the one block that has the token.

use moeworks_tensor::{DType, Tensor};

use super::grouped::{DepthsProduct, Epilogue, Groups, RowsProduct};
use super::{Listed, On, THREADS, takes_weights};
use crate::Activation;
use crate::cuda::sources::GROUPED;
use crate::cuda::{Arg, Launch};
use crate::experts::{
    ExpertBiases, ExpertGrads, ExpertRows, ExpertWeights, ExpertsBackward, ExpertsSaved, WeightGradInputs,
};
use crate::gemm::Form;
use crate::late::List;
use crate::linear::Write;

/// Whether forward runs here.
pub(crate) fn takes(weights: ExpertWeights<'_>) -> bool {
    [weights.gate_up, weights.down].iter().all(|w| takes_weights(w.dtype()))
}

/// How kernels call an activation, with its two settings.
fn shape(activation: Activation) -> [Arg<'static>; 3] {
    let (kind, alpha, limit) = match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::Gelu => (1, 0.0, 0.0),
        Activation::GeluTanh => (2, 0.0, 0.0),
        Activation::Relu => (3, 0.0, 0.0),
        Activation::ClampedSwiGlu { alpha, limit } => (4, alpha, limit),
    };
    [Arg::from(kind as u32), alpha.into(), limit.into()]
}

/// The rows on the GPU, and where each expert's are.
struct Rows<'a> {
    offsets: Listed<'a>,
    tokens: Listed<'a>,
    weights: Listed<'a>,
    num_tokens: usize,
}

impl<'a> Rows<'a> {
    fn of(on: On<'_>, rows: ExpertRows<'a>) -> Self {
        Self {
            offsets: on.list(rows.offsets),
            tokens: on.list(rows.tokens),
            weights: on.list(rows.weights),
            num_tokens: rows.token_rows.len() / rows.num_choices.max(1),
        }
    }

    /// A token has an expert at most once.
    fn groups(&self) -> Groups<'_> {
        let (offsets, rows) = (self.offsets.tensor(), self.len());
        match offsets.len() {
            2 => Groups::One { rows },
            _ => Groups::Many { offsets, rows, most: rows.min(self.num_tokens) },
        }
    }

    fn len(&self) -> usize {
        self.tokens.tensor().len()
    }
}

pub(crate) fn forward(
    on: On<'_>,
    x: &Tensor,
    weights: ExpertWeights<'_>,
    biases: Option<ExpertBiases<'_>>,
    rows: ExpertRows<'_>,
) -> (Tensor, ExpertsSaved) {
    let map = Rows::of(on, rows);
    let (r, d, f, dtype) = (map.len(), x.cols(), weights.down.cols(), weights.gate_up.dtype().of_activations());
    let inputs = weights.activation.num_inputs();
    let (mut h, mut a) = (on.empty(&[r, inputs * f], dtype), on.empty(&[r, f], dtype));
    let up = RowsProduct {
        form: Form::Nt,
        a: x,
        gather: Some(map.tokens.tensor()),
        b: weights.gate_up,
        group_rows: inputs * f,
        columns: f,
        depth: d,
        pair: (inputs == 2).then_some(f),
        compute: dtype,
        groups: map.groups(),
    };
    let kernels = match inputs {
        2 => ["up_paired", "plain_up_paired", "few_up_paired"],
        _ => ["up_single", "plain_up_single", "few_up_single"],
    };
    let bias = on.read_or_none(biases.as_ref().map(|biases| biases.gate_up));
    let mut args = vec![on.write(&mut h), on.write(&mut a), bias, (dtype == DType::BF16).into(), f.into()];
    args.extend(shape(weights.activation));
    // SAFETY: `h` and `a` have a row for each row, the bias one for each expert.
    unsafe { up.run(on, &Epilogue { kernels, args }) };
    let down = RowsProduct {
        a: &a,
        gather: None,
        b: weights.down,
        group_rows: d,
        columns: d,
        depth: f,
        pair: None,
        compute: weights.down.dtype().of_activations(),
        ..up
    };
    let mut outputs = down.store(on, r, DType::F32);
    if let Some(biases) = biases {
        let experts = rows.offsets.len() - 1;
        let args =
            [on.write(&mut outputs), on.read(biases.down), on.read(map.offsets.tensor()), experts.into(), d.into()];
        // SAFETY: a block adds its row's bias, of an expert that the offsets name.
        unsafe { on.launch(&GROUPED, "add_row_biases", r, &args) };
    }
    let y = combine(on, &outputs, rows, Some(rows.weights), &[x.rows(), d]);
    (y, ExpertsSaved { h })
}

pub(crate) fn combine(
    on: On<'_>,
    outputs: &Tensor,
    rows: ExpertRows<'_>,
    weights: Option<List<'_, f32>>,
    shape: &[usize; 2],
) -> Tensor {
    let (mut y, token_rows) = (on.empty(shape, DType::F32), on.list(rows.token_rows));
    let weights = weights.map(|weights| on.list(weights));
    let args = [
        on.read(outputs),
        on.read(token_rows.tensor()),
        on.read_or_none(weights.as_ref().map(Listed::tensor)),
        on.write(&mut y),
        rows.num_choices.into(),
        shape[1].into(),
    ];
    // SAFETY: a block writes its token's row from rows of `outputs` that the map names.
    unsafe { on.launch(&GROUPED, "combine_rows", shape[0], &args) };
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

pub(crate) fn backward(
    on: On<'_>,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
) -> ExpertsBackward {
    let map = Rows::of(on, rows);
    let (r, d, f, dtype) = (map.len(), dy.cols(), weights.down.cols(), weights.gate_up.dtype());
    let af = f * weights.activation.num_inputs();
    let first = RowsProduct {
        form: Form::Nn,
        a: dy,
        gather: Some(map.tokens.tensor()),
        b: weights.down,
        group_rows: d,
        columns: f,
        depth: d,
        pair: None,
        compute: dtype,
        groups: map.groups(),
    };
    let num_parts = first.column_tiles(on);
    let (mut dh, mut parts) = (on.empty(&[r, af], dtype), on.empty(&[r, num_parts], DType::F32));
    let mut args = vec![
        on.read(&saved.h),
        on.write(&mut dh),
        on.read(map.weights.tensor()),
        (dtype == DType::BF16).into(),
        f.into(),
    ];
    args.extend(shape(weights.activation));
    args.push(on.write(&mut parts));
    // SAFETY: `h`, `dh` and `parts` have a row for each row, `parts` a column for each tile of columns.
    unsafe { first.run(on, &Epilogue { kernels: ["pull_back_rows", "plain_pull_back_rows", ""], args }) };
    let mut d_row_weights = on.empty(&[r], DType::F32);
    let args = [on.read(&parts), on.write(&mut d_row_weights), r.into(), num_parts.into()];
    // SAFETY: a thread adds up its row's parts.
    unsafe { on.launch(&GROUPED, "add_row_parts", r.div_ceil(THREADS), &args) };
    let second =
        RowsProduct { a: &dh, gather: None, b: weights.gate_up, group_rows: af, columns: d, depth: af, ..first };
    let outputs = second.store(on, r, DType::F32);
    let dx = combine(on, &outputs, rows, None, &[dy.rows(), d]);
    ExpertsBackward { dx, d_row_weights, dh }
}

/// `[R, D]`: each row's weight times its token's row of `dy`, rounded as the products take it.
fn weighed(on: On<'_>, dy: &Tensor, map: &Rows<'_>, dtype: DType) -> Tensor {
    let mut rows = on.empty(&[map.len(), dy.cols()], dtype);
    let is_bf16 = |dtype: DType| Arg::from(dtype == DType::BF16);
    let args = [
        on.read(dy),
        is_bf16(dy.dtype()),
        on.read(map.tokens.tensor()),
        on.read(map.weights.tensor()),
        on.write(&mut rows),
        is_bf16(dtype),
        dy.cols().into(),
    ];
    // SAFETY: a block reads its token's row and writes its own.
    unsafe { on.launch(&GROUPED, "weigh_rows", map.len(), &args) };
    rows
}

/// The gradients of the weights; `keeps_unused` leaves those of experts without rows as they are.
pub(crate) fn weight_grad(
    on: On<'_>,
    inputs: WeightGradInputs<'_>,
    activation: Activation,
    (rows, keeps_unused): (ExpertRows<'_>, bool),
    write: Write,
    grads: ExpertGrads<'_>,
) {
    let WeightGradInputs { x, dy, saved, dh } = inputs;
    let map = Rows::of(on, rows);
    let (r, d, f, dtype) = (map.len(), x.cols(), grads.down.cols(), dh.dtype());
    let mut a = on.empty(&[r, f], dtype);
    let is_bf16 = dtype == DType::BF16;
    let mut args = vec![on.read(&saved.h), on.write(&mut a), is_bf16.into(), r.into(), f.into()];
    args.extend(shape(activation));
    let launch = Launch {
        source: &GROUPED,
        kernel: "activate_rows",
        grid: [(r * f).div_ceil(8 * THREADS), 1, 1],
        threads: THREADS,
        shared: 0,
        args: &args,
    };
    // SAFETY: a thread reads its elements' row of `h` and writes its elements of `a`.
    unsafe { on.gpu.launch(&launch) };
    drop(args);
    let weighed = weighed(on, dy, &map, dtype);
    let tokens = Some(map.tokens.tensor());
    let (offsets, compute) = (map.offsets.tensor(), dtype);
    let down =
        DepthsProduct { a: (&weighed, None), b: (&a, None), rows: d, columns: f, offsets, compute, keeps_unused };
    down.run(on, write, grads.down);
    let rows = f * activation.num_inputs();
    let up = DepthsProduct { a: (dh, None), b: (x, tokens), rows, columns: d, offsets, compute, keeps_unused };
    up.run(on, write, grads.gate_up);
}
