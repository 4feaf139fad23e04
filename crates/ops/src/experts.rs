//! The experts of an MoE layer: rows gathered, two grouped products with the activation between, weighted combine.
//!
//! Backward needs only the pre-activation `h` and the row map (expert outputs are not saved). With `u = W2^T dy` for
//! the row's token: `d weight = <u, a>`, `da = weight u`, `dh = act'(h) da`, `dx += W1^T dh`; the weights' gradients
//! are `dW2 += weight dy a^T` and `dW1 += dh x^T`, a task of their own.
//!
//! The activation is computed where the first product's sums leave the kernel, its derivative and `<u, a>` where
//! those of `u` do. Expert outputs of all rows wait in one buffer `[R, D]` and are then added up token by token, in
//! the order of the token's choices, so that no two threads ever write the same element.

mod biases;
mod epilogues;
mod rows;
mod transposed;
mod transposed_grad;
mod weight_grad;

use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use crate::activation::activate;
use crate::cuda::{self, On};
use crate::deferred::List;
use crate::e4m3;
use crate::elementwise::{add_assign, rounded_once};
use crate::gemm::source::Source;
use crate::gemm::store::Store;
use crate::gemm::{self, Compute, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{Lent, PIECE};
use crate::simd::{Float, kernel, store_all, with_float};
use crate::{Activation, Context, quantized};
use biases::add_biases;
use epilogues::{Activate, PullBack};
use weight_grad::{GradOf, weighed_activations, weight_grad};

pub use biases::{ExpertBiases, add_bias_row_weight_grads, experts_bias_grad};
pub use rows::{AllRows, ExpertRows, NO_ROW};
pub use transposed_grad::experts_backward_as_stored;
pub use weight_grad::{ExpertGrads, WeightGradInputs, experts_weight_grad, experts_weight_grad_of_used};

/// The stacked weights of the experts, f32 or bf16 alike. Their type decides in which precision products are taken.
/// For inference they may be [`quantized`]. A stack [of pieces](Tensor::pieces), a matrix or two halves of one each,
/// is read where these lie by the forward pass. [Transposed](Tensor::transposed) stacks, with the columns of gate and
/// up one after the other or interleaved, are read where they lie by both passes.
#[derive(Clone, Copy)]
pub struct ExpertWeights<'a> {
    /// `[E, A F, D]` with `A = activation.num_inputs()`; with a gated activation the gate's F rows come first.
    pub gate_up: &'a Tensor,
    /// `[E, D, F]`.
    pub down: &'a Tensor,
    /// The activation between the two products.
    pub activation: Activation,
}

impl ExpertWeights<'_> {
    fn multiply_in_fp8(self, ctx: &Context) -> bool {
        let is_bf16 = |weights: &Tensor| weights.dtype() == DType::BF16;
        ctx.has_fp8_experts() && is_bf16(self.gate_up) && is_bf16(self.down)
    }
}

/// Weights as products in eight-bit floats take them: gate and up are matrices of their own.
struct RoundedWeights {
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
}

impl RoundedWeights {
    fn of(ctx: &Context, weights: ExpertWeights<'_>) -> Self {
        let ExpertWeights { gate_up, down, activation } = weights;
        let (d, f) = (gate_up.cols(), down.cols());
        let (gate_up, down) = (e4m3::round_matrices(ctx, gate_up, f), e4m3::round_matrices(ctx, down, d));
        Self { gate_up, down, activation }
    }

    fn weights(&self) -> ExpertWeights<'_> {
        ExpertWeights { gate_up: &self.gate_up, down: &self.down, activation: self.activation }
    }
}

/// The values of a forward pass that its backward pass needs.
pub struct ExpertsSaved {
    /// `[R, A F]`: before the activation, in the weights' type.
    pub h: Tensor,
}

/// The result of [`experts_backward`].
pub struct ExpertsBackward {
    /// `[T, D]` f32: gradient of the input.
    pub dx: Tensor,
    /// `[R]` f32: gradient of the row weights.
    pub d_row_weights: Tensor,
    /// `[R, A F]`: gradient of `h`, for [`experts_weight_grad`], in the weights' type.
    pub dh: Tensor,
    /// `[R, F]`: each row's weight times its activations, in the weights' type, where a GPU had them at hand; on the
    /// host they come of `h` again.
    pub weighed: Option<Tensor>,
}

/// The options of [`experts_forward_with`]; by default there are no biases and no base, and a backward pass follows.
#[derive(Clone, Copy, Default)]
pub struct ForwardOptions<'a> {
    /// The biases of both products: `sum of weight * (W2 act(W1 x + b1) + b2)`.
    pub biases: Option<ExpertBiases<'a>>,
    /// `[T, D]` f32, to which the outputs are added.
    pub base: Option<&'a Tensor>,
    /// Saves nothing and does not write `h`; the result has the same bits.
    pub is_forward_only: bool,
}

/// `y [T, D] = sum over a token's rows of weight * W2 act(W1 x)`, in f32; with bf16 matrices each row is rounded to
/// bf16 before it is added. A token without rows gets exact zeros; an expert without rows costs nothing. `x` is
/// `[T, D]`, f32 or bf16.
#[must_use]
pub fn experts_forward(
    ctx: &Context,
    x: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
) -> (Tensor, ExpertsSaved) {
    let (y, saved) = experts_forward_with(ctx, x, weights, rows, ForwardOptions::default());
    (y, saved.expect("what a backward pass needs is kept"))
}

/// Computes [`experts_forward`] with options. Returns what a backward pass needs, unless none follows.
#[must_use]
pub fn experts_forward_with(
    ctx: &Context,
    x: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    options: ForwardOptions<'_>,
) -> (Tensor, Option<ExpertsSaved>) {
    let ForwardOptions { biases, base, is_forward_only } = options;
    let s = Sizes::of(x, weights, rows);
    if let Some(biases) = biases {
        let num_experts = rows.offsets.len() - 1;
        let lens = (biases.gate_up.len(), biases.down.len());
        assert_eq!(lens, (num_experts * s.af, num_experts * s.d), "biases of experts");
    }
    if let Some(base) = base {
        assert_eq!((base.shape(), base.dtype()), (x.shape(), DType::F32), "what experts' outputs are added to");
    }
    let is_fp8 = weights.multiply_in_fp8(ctx);
    if let Some(on) = On::of(ctx).filter(|_| cuda::experts::takes(weights)) {
        let inputs = cuda::experts::ForwardInputs { x, weights, biases, rows, base };
        return cuda::experts::forward(on, inputs, is_fp8, is_forward_only);
    }
    let rounded = is_fp8.then(|| (e4m3::round_rows(ctx, x), RoundedWeights::of(ctx, weights)));
    let (x, weights) = rounded.as_ref().map_or((x, weights), |(x, rounded)| (x, rounded.weights()));
    let experts = used_experts(rows);
    let (a, h) = activations(ctx, x, weights, biases, (rows, &experts), is_forward_only);
    let a = if is_fp8 { e4m3::round_rows(ctx, &a) } else { a };
    let mut outputs = ctx.empty(&[s.r, s.d], if biases.is_none() { type_of_rows(weights) } else { DType::F32 });
    let offsets: Vec<_> = experts.iter().map(|(_, range)| range.start * s.d).collect();
    with_float!(outputs.dtype(), T => {
        let to = Lent::new(outputs.slice_mut::<T>());
        let store = Store { to, offsets: &offsets, stride: s.d, write: Write::Replace };
        forward_product(ctx, (&a, None), (weights.down, s.d, false), &experts, &store);
    });
    if let Some(biases) = biases {
        add_biases(ctx, &mut outputs, rows, biases.down);
    }
    let mut y = combine(ctx, &outputs, rows, Some(rows.weights), &[s.t, s.d]);
    if let Some(base) = base {
        add_assign(ctx, &mut y, base);
    }
    (y, h.map(|h| ExpertsSaved { h }))
}

/// The type of experts' outputs until they are added up: that of the activations before them, as in PyTorch. They are
/// the largest tensors of a pass of many choices, which in bf16 cost half the time.
pub(crate) fn type_of_rows(weights: ExpertWeights<'_>) -> DType {
    let types = [weights.gate_up, weights.down].map(|weights| weights.dtype().of_activations());
    if types == [DType::BF16; 2] { DType::BF16 } else { DType::F32 }
}

/// The activations `[R, F]` of the first product, and what they are taken of, `h [R, A F]`, unless the pass is
/// forward only.
fn activations(
    ctx: &Context,
    x: &Tensor,
    weights: ExpertWeights<'_>,
    biases: Option<ExpertBiases<'_>>,
    (rows, experts): (ExpertRows<'_>, &[Expert]),
    is_forward_only: bool,
) -> (Tensor, Option<Tensor>) {
    let (s, activation) = (Sizes::of(x, weights, rows), weights.activation);
    let (bias, is_paired) = (biases.map(|biases| biases.gate_up.f32s()), activation.num_inputs() == 2);
    let dtype = weights.gate_up.dtype().of_activations();
    let stored = weights.gate_up.as_transposed().filter(|_| is_paired);
    let mut a = ctx.empty(&[s.r, s.f], dtype);
    // The columns of gate and up do not leave such a product together: the activation is a pass over its sums.
    let mut h = (!is_forward_only || stored.is_some()).then(|| ctx.empty(&[s.r, s.af], dtype));
    with_float!(dtype, T => match (stored, &mut h) {
        (Some((base, is_interleaved)), Some(h)) => {
            let between = transposed::Between { activation, bias, experts, is_interleaved };
            transposed::activate_pairs::<T>(ctx, x, Some(&rows.tokens), base, &between, h, &mut a);
        }
        (_, h) => {
            let h = h.as_mut().map(|h| Lent::new(h.slice_mut::<T>()));
            let epilogue = Activate { activation, f: s.f, experts, bias, h, a: Lent::new(a.slice_mut::<T>()) };
            forward_product(ctx, (x, Some(&rows.tokens)), (weights.gate_up, s.f, is_paired), experts, &epilogue);
        }
    });
    (a, h.filter(|_| !is_forward_only))
}

/// Sends the matrices of experts to a GPU ahead of the rows that will probably come to them, where experts otherwise
/// stay in the host's memory ([`Gpu::with_expert_cache`](moeworks_gpu::Gpu::with_expert_cache)). `ids` are the
/// experts, in any order and perhaps repeated.
pub fn send_experts_ahead(ctx: &Context, weights: ExpertWeights<'_>, num_experts: usize, ids: &[u32]) {
    if let Some(on) = On::of(ctx).filter(|_| cuda::experts::takes(weights)) {
        cuda::experts::prefetch(on, weights, num_experts, ids);
    }
}

/// `A W^T` for each expert's rows of A (those of its tokens, or as they stand) and its rows of the stacked weights,
/// as many as there are columns, or twice that.
fn forward_product(
    ctx: &Context,
    (a, tokens): (&Tensor, Option<&[u32]>),
    (weights, columns, is_paired): (&Tensor, usize, bool),
    experts: &[Expert],
    epilogue: &dyn Finish,
) {
    let num_weights = columns * if is_paired { 2 } else { 1 };
    if let Some((base, false)) = weights.as_transposed().filter(|_| !is_paired) {
        return transposed::product(ctx, a, tokens, base, experts, epilogue);
    }
    if weights.dtype().is_quantized() {
        let group = |(e, range): &Expert| quantized::Group {
            indices: tokens.map(|tokens| &tokens[range.clone()]),
            first: range.start,
            rows: range.len(),
            weights: quantized::matrix(weights, *e, columns, is_paired),
            columns,
        };
        let groups: Vec<_> = experts.iter().map(group).collect();
        quantized::run(ctx, &quantized::Product { a, weights, groups: &groups, is_paired }, epilogue);
        return;
    }
    let groups = groups(experts, |e, range| Group {
        a: tokens.map_or_else(|| Source::rows(a, range.start), |tokens| Source::gathered(a, &tokens[range.clone()])),
        b: Source::matrix(weights, e, num_weights),
        rows: range.len(),
        columns,
        depth: a.cols(),
    });
    let compute = Compute::from_dtype(weights.dtype());
    gemm::run(ctx, &Product { form: Form::Nt, compute, groups: &groups, is_paired }, epilogue);
}

/// `[T K]` (f32): the gradient of each choice's weight from that of each row's, `[R]` (f32); a dropped choice has
/// none.
#[must_use]
pub fn choice_weight_grads(ctx: &Context, rows: ExpertRows<'_>, d_row_weights: &Tensor) -> Tensor {
    if let Some(on) = On::of(ctx) {
        return cuda::experts::choice_weight_grads(on, rows, d_row_weights);
    }
    let mut grads = ctx.empty(&[rows.token_rows.len()], DType::F32);
    let (token_rows, of_rows) = (&*rows.token_rows, d_row_weights.f32s());
    ctx.threads().run_pieces(grads.f32s_mut(), PIECE, |piece, grads| {
        for (grad, &row) in grads.iter_mut().zip(&token_rows[piece * PIECE..]) {
            *grad = if row == NO_ROW { 0.0 } else { of_rows[row as usize] };
        }
    });
    grads
}

/// The gradients that the layers below wait for. `dy` is `[T, D]`, f32 or bf16.
#[must_use]
pub fn experts_backward(
    ctx: &Context,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
) -> ExpertsBackward {
    backward(ctx, dy, weights, rows, saved, None)
}

/// The place of the gradients of experts' matrices that a backward pass computes as well.
pub struct WeightGradTarget<'a> {
    /// The gradients replace what is there, or are added to it.
    pub write: Write,
    /// Writes the gradients of experts with rows alone, as [`experts_weight_grad_of_used`] does; otherwise those of
    /// all experts, as [`experts_weight_grad`].
    pub of_used: bool,
    /// The gradients.
    pub grads: ExpertGrads<'a>,
}

/// Computes [`experts_backward`] and then the gradients of the weights for `target`. Where experts have few rows the
/// host reads weights while it writes gradients, which takes less time than one after the other.
pub fn experts_backward_with_weight_grad(
    ctx: &Context,
    x: &Tensor,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
    target: WeightGradTarget<'_>,
) -> ExpertsBackward {
    let WeightGradTarget { write, of_used, grads } = target;
    let keeps_unused = of_used || write == Write::Add;
    // The last is asked of the host's lists alone: those of a GPU would be waited for.
    let is_apart = On::of(ctx).is_some()
        || weights.multiply_in_fp8(ctx)
        || weights.gate_up.dtype().is_quantized()
        || weights.gate_up.as_transposed().is_some()
        || rows.tokens.len() > MAX_ROWS_BESIDE * used_experts(rows).len();
    if is_apart {
        let back = experts_backward(ctx, dy, weights, rows, saved);
        let inputs = WeightGradInputs { x, dy, saved, dh: &back.dh, weighed: back.weighed.as_ref() };
        weight_grad(ctx, inputs, weights.activation, rows, keeps_unused, write, grads);
        return back;
    }
    let beside = Beside { x, experts: if keeps_unused { used_experts(rows) } else { all_experts(rows) }, write, grads };
    backward(ctx, dy, weights, rows, saved, Some(beside))
}

/// Rows an expert up to which memory and not products take the time.
const MAX_ROWS_BESIDE: usize = 16;

/// Gradients of weights that are computed beside those of inputs.
struct Beside<'a> {
    x: &'a Tensor,
    /// Whose gradients are written.
    experts: Vec<Expert>,
    write: Write,
    grads: ExpertGrads<'a>,
}

fn backward(
    ctx: &Context,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
    mut beside: Option<Beside<'_>>,
) -> ExpertsBackward {
    assert_eq!(weights.gate_up.dtype(), weights.down.dtype(), "backward of experts whose matrices differ in type");
    let s = Sizes::of(dy, weights, rows);
    let is_fp8 = weights.multiply_in_fp8(ctx);
    if let Some(on) = On::of(ctx).filter(|_| !weights.gate_up.dtype().is_quantized() && cuda::experts::takes(weights)) {
        return cuda::experts::backward(on, dy, weights, is_fp8, rows, saved);
    }
    let rounded = is_fp8.then(|| (e4m3::round_rows(ctx, dy), RoundedWeights::of(ctx, weights)));
    let (dy, weights) = rounded.as_ref().map_or((dy, weights), |(dy, rounded)| (dy, rounded.weights()));
    let dtype = weights.gate_up.dtype();
    let dy = &*rounded_once(ctx, dy, dtype);
    let experts = used_experts(rows);
    let num_panels = gemm::num_panels(ctx, Compute::from_dtype(dtype), s.f);
    let mut dh = ctx.empty(&[s.r, s.af], dtype);
    let mut parts = ctx.empty(&[s.r, num_panels], DType::F32);
    let down = transposed_grad::InputGradOperand::new(weights.down, s.d);
    let first = groups(&experts, |e, range| Group {
        a: Source::gathered(dy, &rows.tokens[range.clone()]),
        b: down.matrix(e),
        rows: range.len(),
        columns: s.f,
        depth: s.d,
    });
    with_float!(dtype, T => {
        let epilogue = PullBack {
            activation: weights.activation,
            f: s.f,
            experts: &experts,
            row_weights: &rows.weights,
            h: saved.h.slice::<T>(),
            dh: Lent::new(dh.slice_mut::<T>()),
            parts: Lent::new(parts.f32s_mut()),
            num_panels,
        };
        let compute = Compute::from_dtype(dtype);
        let product = Product { form: down.form, compute, groups: &first, is_paired: false };
        match &mut beside {
            Some(Beside { experts, write, grads, .. }) => {
                let a = weighed_activations(ctx, saved, dtype, weights.activation, rows, s.f);
                let of = GradOf { ctx, rows, experts, write: *write, beside: Some((&product, &epilogue)) };
                of.down(dy, &a, grads.down);
            }
            None => gemm::run(ctx, &product, &epilogue),
        }
    });
    let mut d_row_weights = ctx.empty(&[s.r], DType::F32);
    for (r, sum) in d_row_weights.f32s_mut().iter_mut().enumerate() {
        *sum = parts.f32s()[r * num_panels..][..num_panels].iter().sum();
    }
    let rounded_dh = is_fp8.then(|| e4m3::round_rows(ctx, &dh));
    let stored_dh = transposed_grad::in_stored_order(ctx, &dh, weights.gate_up);
    let gate_up = transposed_grad::InputGradOperand::new(weights.gate_up, s.af);
    let second = groups(&experts, |e, range| Group {
        a: Source::rows(rounded_dh.as_ref().unwrap_or(&stored_dh), range.start),
        b: gate_up.matrix(e),
        rows: range.len(),
        columns: s.d,
        depth: s.af,
    });
    let (form, compute) = (gate_up.form, Compute::from_dtype(dtype));
    let second = Product { form, compute, groups: &second, is_paired: false };
    let outputs = row_outputs(ctx, dtype, &experts, &second, &[s.r, s.d], |product, store| match &mut beside {
        Some(Beside { x, experts, write, grads }) => {
            let of = GradOf { ctx, rows, experts, write: *write, beside: Some((product, store)) };
            of.gate_up(&dh, x, s.af, grads.gate_up);
        }
        None => gemm::run(ctx, product, store),
    });
    drop(stored_dh);
    ExpertsBackward { dx: combine(ctx, &outputs, rows, None, &[s.t, s.d]), d_row_weights, dh, weighed: None }
}

struct Sizes {
    t: usize,
    d: usize,
    f: usize,
    af: usize,
    r: usize,
}

impl Sizes {
    fn of(x: &Tensor, weights: ExpertWeights<'_>, rows: ExpertRows<'_>) -> Self {
        let f = weights.down.cols();
        let s = Self { t: x.rows(), d: x.cols(), f, af: f * weights.activation.num_inputs(), r: rows.tokens.len() };
        let num_experts = rows.offsets.len() - 1;
        assert_eq!(weights.gate_up.len(), num_experts * s.af * s.d, "gate_up {:?}", weights.gate_up.shape());
        assert_eq!(weights.down.len(), num_experts * s.d * s.f, "down {:?}", weights.down.shape());
        assert_eq!(rows.token_rows.len(), s.t * rows.num_choices, "token_rows");
        s
    }
}

/// An expert and its rows.
type Expert = (usize, Range<usize>);

fn all_experts(rows: ExpertRows<'_>) -> Vec<Expert> {
    let ranges = rows.offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
    ranges.enumerate().collect()
}

fn used_experts(rows: ExpertRows<'_>) -> Vec<Expert> {
    all_experts(rows).into_iter().filter(|(_, range)| !range.is_empty()).collect()
}

fn groups<'a>(experts: &[Expert], group: impl Fn(usize, Range<usize>) -> Group<'a>) -> Vec<Group<'a>> {
    experts.iter().map(|(e, range)| group(*e, range.clone())).collect()
}

/// The plain product of each expert's rows, `[R, D]`, for `run` to compute.
fn row_outputs(
    ctx: &Context,
    dtype: DType,
    experts: &[Expert],
    product: &Product<'_>,
    shape: &[usize; 2],
    run: impl FnOnce(&Product<'_>, &dyn Finish),
) -> Tensor {
    let mut outputs = ctx.empty(shape, dtype.of_activations());
    let offsets: Vec<_> = experts.iter().map(|(_, range)| range.start * shape[1]).collect();
    with_float!(outputs.dtype(), T => {
        let to = Lent::new(outputs.slice_mut::<T>());
        run(product, &Store { to, offsets: &offsets, stride: shape[1], write: Write::Replace });
    });
    outputs
}

/// Adds up the rows `[R, D]` (f32 or bf16) of each token in the order of its choices, each times its weight if there
/// are weights `[R]`: `shape`, which is `[T, D]`. Of `rows` the offsets are not looked at.
#[must_use]
pub fn combine(
    ctx: &Context,
    outputs: &Tensor,
    rows: ExpertRows<'_>,
    weights: Option<List<'_, f32>>,
    shape: &[usize; 2],
) -> Tensor {
    let (d, k) = (shape[1], rows.num_choices);
    if let Some(on) = On::of(ctx) {
        return cuda::experts::combine(on, outputs, rows, weights, shape);
    }
    let mut y = ctx.empty(shape, DType::F32);
    if y.is_empty() {
        return y;
    }
    let (isa, token_rows) = (ctx.isa(), &*rows.token_rows);
    let weights = weights.as_deref();
    let tokens_per_piece = (PIECE / (d * k.max(1))).max(1);
    with_float!(outputs.dtype(), T => {
        let outputs = outputs.slice::<T>();
        ctx.threads().run_pieces(y.f32s_mut(), tokens_per_piece * d, |index, y| {
            for (t, y) in (index * tokens_per_piece..).zip(y.chunks_exact_mut(d)) {
                combine_token::<T>(isa, outputs, &token_rows[t * k..][..k], weights, y);
            }
        });
    });
    y
}

kernel! {
    fn combine_token<S: Level, T: Float>(outputs: &[T], token_rows: &[u32], weights: Option<&[f32]>, y: &mut [f32]) {
        let d = y.len();
        y.fill(0.0);
        for &row in token_rows {
            if row != NO_ROW {
                let row = row as usize;
                let weight = weights.map_or(1.0, |weights| weights[row]);
                for (y, o) in y.iter_mut().zip(&outputs[row * d..][..d]) {
                    *y = S::mul_add(weight, o.load(), *y);
                }
            }
        }
    }
}

kernel! {
    bf16
    /// The activations of a row times its weight.
    fn activate_row<S: Level, T: Float>(times: (Activation, f32), h: &[T], a: &mut [T]) {
        const BLOCK: usize = 256;
        let (mut gate, mut up) = ([0.0; BLOCK], [0.0; BLOCK]);
        let ((activation, weight), f) = (times, a.len());
        for (index, a) in a.chunks_mut(BLOCK).enumerate() {
            let start = index * BLOCK;
            gate.iter_mut().zip(&h[start..][..a.len()]).for_each(|(to, x)| *to = x.load());
            if activation.num_inputs() == 2 {
                up.iter_mut().zip(&h[f + start..][..a.len()]).for_each(|(to, x)| *to = x.load());
            }
            activate::<S>(activation, &mut gate, &up);
            gate.iter_mut().for_each(|a| *a *= weight);
            store_all::<S, T>(&gate[..a.len()], a);
        }
    }
}

#[cfg(test)]
#[path = "experts_fp8_tests.rs"]
mod fp8_tests;
#[cfg(test)]
#[path = "experts_tests.rs"]
mod tests;
