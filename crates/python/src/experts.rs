//! The experts of an MoE layer on PyTorch's tensors, forward and backward.
//!
//! T tokens, D width, F expert width, E experts, K experts a token, A F columns before the activation, R rows
//! (token-expert pairs whose id is an expert's).

use moeworks_ops::elementwise::into_type;
use moeworks_ops::experts::{
    ExpertBiases, ExpertGrads, ExpertWeights, ExpertsSaved, ForwardOptions, WeightGradTarget,
    add_bias_row_weight_grads, choice_weight_grads, experts_backward, experts_backward_as_stored,
    experts_backward_with_weight_grad, experts_bias_grad, experts_forward_with,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::calls::{object, unlocked};
use crate::choices::{ChoiceMemory, Choices};
use crate::{context, dlpack, memory};

/// E, D, F, the weights' type, the activation with its two numbers, and the layout of the weights.
type PlanArguments = (usize, usize, usize, String, String, f32, f32, String);
/// T, K, whether `h` is kept, and the number of threads.
type CallArguments = (usize, usize, bool, usize);
/// The addresses of x, ids, weights, gate_up, down and the two biases; 0 for no bias.
type ForwardMemory = (usize, usize, usize, usize, usize, usize, usize);
/// The addresses of dy, x, ids, weights, gate_up, down, h and the two biases; 0 for no bias.
type BackwardMemory = (usize, usize, usize, usize, usize, usize, usize, usize, usize);

/// The arguments of [`forward`], as Python passes them.
type ForwardArguments = (PlanArguments, CallArguments, ForwardMemory);
/// The arguments of [`backward`]; the last says whether gradients of the stacks and of the biases are wanted.
type BackwardArguments = (PlanArguments, CallArguments, BackwardMemory, (bool, bool));

/// The layout of stacked weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `[E, A F, D]` and `[E, D, F]`.
    Stacked,
    /// `[E, D, A F]` and `[E, F, D]`.
    Transposed,
    /// Transposed, with the columns of gate and up in turn.
    Interleaved,
}

/// The sizes, types and activation of experts.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) num_experts: usize,
    pub(crate) width: usize,
    pub(crate) expert_width: usize,
    pub(crate) dtype: DType,
    pub(crate) activation: Activation,
    pub(crate) layout: Layout,
}

/// The addresses of the weights.
#[derive(Clone, Copy)]
pub(crate) struct WeightMemory {
    pub(crate) gate_up: usize,
    pub(crate) down: usize,
    /// Both biases; 0 for none.
    pub(crate) biases: [usize; 2],
}

/// The weights and biases over PyTorch's memory.
struct Weights {
    gate_up: Tensor,
    down: Tensor,
    biases: Option<[Tensor; 2]>,
    activation: Activation,
}

impl Weights {
    fn weights(&self) -> ExpertWeights<'_> {
        ExpertWeights { gate_up: &self.gate_up, down: &self.down, activation: self.activation }
    }

    fn biases(&self) -> Option<ExpertBiases<'_>> {
        self.biases.as_ref().map(|[gate_up, down]| ExpertBiases { gate_up, down })
    }
}

/// Returns the type by PyTorch's name.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        _ => Err(PyValueError::new_err(format!("dtype {name}: must be float32, bfloat16 or float16"))),
    }
}

/// Returns the activation by its name, with its two numbers.
pub(crate) fn activation_of(name: &str, alpha: f32, limit: f32) -> PyResult<Activation> {
    match name {
        "swiglu" => Ok(Activation::SwiGlu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_tanh" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        "relu_squared" => Ok(Activation::SquaredRelu),
        "geglu_tanh" => Ok(Activation::GegluTanh),
        "clamped_swiglu" => Ok(Activation::ClampedSwiGlu { alpha, limit }),
        "clamped_silu" => Ok(Activation::ClampedSilu { limit }),
        "softcapped_swiglu" => Ok(Activation::SoftcappedSwiGlu { gate_cap: alpha, up_cap: limit }),
        _ => Err(PyValueError::new_err(format!("activation {name:?} has no kernel"))),
    }
}

impl Plan {
    fn new(
        (num_experts, width, expert_width, name, activation, alpha, limit, layout): PlanArguments,
    ) -> PyResult<Self> {
        let layout = match &*layout {
            "stacked" => Layout::Stacked,
            "transposed" => Layout::Transposed,
            "interleaved" => Layout::Interleaved,
            _ => return Err(PyValueError::new_err(format!("layout {layout:?} is unknown"))),
        };
        let activation = activation_of(&activation, alpha, limit)?;
        Ok(Self { num_experts, width, expert_width, dtype: dtype(&name)?, activation, layout })
    }

    /// Returns the columns before the activation.
    fn columns(&self) -> usize {
        self.expert_width * self.activation.num_inputs()
    }

    /// Returns the type of x, dy and results. Weights in f16 multiply inputs in f32.
    fn activations(&self) -> DType {
        if self.dtype == DType::F16 { DType::F32 } else { self.dtype }
    }

    /// Returns the shapes of both stacks in memory.
    fn stack_shapes(&self) -> [[usize; 3]; 2] {
        let (e, d, f, af) = (self.num_experts, self.width, self.expert_width, self.columns());
        match self.layout {
            Layout::Stacked => [[e, af, d], [e, d, f]],
            Layout::Transposed | Layout::Interleaved => [[e, d, af], [e, f, d]],
        }
    }

    /// # Safety
    /// As for [`memory::tensor`].
    unsafe fn weights(&self, ctx: &Context, memory: WeightMemory) -> PyResult<Weights> {
        let (e, d, af, shapes) = (self.num_experts, self.width, self.columns(), self.stack_shapes());
        // SAFETY: the function's condition.
        let stacks = unsafe {
            [
                memory::tensor(memory.gate_up, &shapes[0], self.dtype)?,
                memory::tensor(memory.down, &shapes[1], self.dtype)?,
            ]
        };
        let transposed = |stack: Tensor, is_interleaved| {
            if self.layout == Layout::Stacked {
                return Ok(stack);
            }
            let transposed = Tensor::transposed(ctx.pool(), stack, is_interleaved);
            transposed.ok_or_else(|| PyValueError::new_err("interleaved weights need an even number of columns"))
        };
        let [gate_up, down] = stacks;
        let is_interleaved = self.layout == Layout::Interleaved;
        let (gate_up, down) = (transposed(gate_up, is_interleaved)?, transposed(down, false)?);
        let biases = match memory.biases {
            [0, 0] => None,
            [0, _] | [_, 0] => return Err(PyValueError::new_err("experts take both biases or none")),
            // SAFETY: the function's condition.
            [first, second] => Some(unsafe {
                [memory::tensor(first, &[e, af], DType::F32)?, memory::tensor(second, &[e, d], DType::F32)?]
            }),
        };
        Ok(Weights { gate_up, down, biases, activation: self.activation })
    }
}

/// The memory and options of a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct ForwardInputs {
    /// The address of x, `[T, D]`.
    pub(crate) x: usize,
    pub(crate) choices: ChoiceMemory,
    pub(crate) weights: WeightMemory,
    /// True if `h` is kept.
    pub(crate) is_saved: bool,
    pub(crate) num_threads: usize,
}

/// Computes experts: y `[T, D]`, and h `[T K, A F]` if it is kept.
///
/// # Safety
/// As for [`memory::tensor`], for all addresses.
pub(crate) unsafe fn compute(plan: &Plan, inputs: &ForwardInputs) -> PyResult<(Tensor, Option<Tensor>)> {
    let ForwardInputs { x, choices, weights, is_saved, num_threads } = *inputs;
    let ctx = &context::shared(num_threads);
    // SAFETY: the function's condition.
    let (x, sorted, weights) = unsafe {
        let x = memory::tensor(x, &[choices.num_tokens, plan.width], plan.activations())?;
        (x, Choices::new(ctx, choices, plan.num_experts)?, plan.weights(ctx, weights)?)
    };
    let options = ForwardOptions { biases: weights.biases(), base: None, is_forward_only: !is_saved };
    let (y, saved) = experts_forward_with(ctx, &x, weights.weights(), sorted.rows(), options);
    let num_rows = choices.num_tokens * choices.num_choices;
    let h = saved.map(|saved| padded(ctx, saved.h, num_rows));
    Ok((into_type(ctx, y, plan.activations()), h))
}

/// `experts_forward(plan, call, memory) -> (y, h | None)`, as capsules: y `[T, D]`, h `[T K, A F]`.
pub(crate) fn forward(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (plan, call, memory): ForwardArguments = args.extract()?;
    let (plan, (num_tokens, num_choices, is_saved, num_threads)) = (Plan::new(plan)?, call);
    let (x, ids, weights, gate_up, down, first, second) = memory;
    let choices = ChoiceMemory { ids, weights, num_tokens, num_choices };
    let weights = WeightMemory { gate_up, down, biases: [first, second] };
    let inputs = ForwardInputs { x, choices, weights, is_saved, num_threads };
    // SAFETY: the Python code that calls this has checked the tensors and keeps them alive.
    let (y, h) = unlocked(py, || unsafe { compute(&plan, &inputs) })??;
    object(py, (dlpack::capsule(py, y)?, dlpack::some(py, h)?))
}

/// Returns `x` with `num_rows` rows, of which the new ones are zeros: sizes may not depend on the ids.
pub(crate) fn padded(ctx: &Context, x: Tensor, num_rows: usize) -> Tensor {
    if x.rows() == num_rows {
        return x;
    }
    let mut whole = ctx.zeros(&[num_rows, x.cols()], x.dtype());
    whole.bytes_mut()[..x.num_bytes()].copy_from_slice(x.bytes());
    whole
}

/// The gradients of weights that a caller asks for.
#[derive(Clone, Copy)]
struct Wanted {
    stacks: bool,
    biases: bool,
}

/// The gradients of a backward pass; those that were not asked for are `None`.
struct Gradients {
    dx: Tensor,
    d_weights: Tensor,
    stacks: [Option<Tensor>; 2],
    biases: [Option<Tensor>; 2],
}

/// `experts_backward(plan, call, memory, (needs_stacks, needs_biases)) -> (dx, d_weights, d_gate_up | None, d_down |
/// None, d_gate_up_bias | None, d_down_bias | None)`, as capsules. Gradients of weights are in the weights' type and
/// layout, those of biases (the gate's first) and of the choices' weights in f32.
pub(crate) fn backward(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (plan, call, memory, wanted): BackwardArguments = args.extract()?;
    let plan = Plan::new(plan)?;
    let wanted = Wanted { stacks: wanted.0, biases: wanted.1 };
    // SAFETY: the Python code that calls this has checked the tensors and keeps them alive.
    let grads = unlocked(py, || unsafe { gradients(&plan, call, memory, wanted) })??;
    let Gradients { dx, d_weights, stacks: [gate_up, down], biases: [first, second] } = grads;
    let (dx, d_weights) = (dlpack::capsule(py, dx)?, dlpack::capsule(py, d_weights)?);
    let stacks = (dlpack::some(py, gate_up)?, dlpack::some(py, down)?);
    object(py, (dx, d_weights, stacks.0, stacks.1, dlpack::some(py, first)?, dlpack::some(py, second)?))
}

/// Computes the gradients.
///
/// # Safety
/// As for [`memory::tensor`], for all addresses.
unsafe fn gradients(plan: &Plan, call: CallArguments, memory: BackwardMemory, wanted: Wanted) -> PyResult<Gradients> {
    let (num_tokens, num_choices, _, num_threads) = call;
    let ctx = &context::shared(num_threads);
    let (dy, x, ids, weights, gate_up, down, h, first, second) = memory;
    let shape = [num_tokens, plan.width];
    let choices = ChoiceMemory { ids, weights, num_tokens, num_choices };
    let stacks = WeightMemory { gate_up, down, biases: [first, second] };
    // SAFETY: the function's condition.
    let (dy, x, sorted, weights) = unsafe {
        let (dy, x) = (memory::tensor(dy, &shape, plan.dtype)?, memory::tensor(x, &shape, plan.dtype)?);
        (dy, x, Choices::new(ctx, choices, plan.num_experts)?, plan.weights(ctx, stacks)?)
    };
    let rows = sorted.rows();
    // SAFETY: the function's condition; `h` has a row for each choice, of which the first R are used.
    let h = unsafe { memory::tensor(h, &[rows.tokens.len(), plan.columns()], plan.dtype)? };
    let saved = ExpertsSaved { h };
    let mut stacks = wanted.stacks.then(|| plan.stack_shapes().map(|shape| ctx.empty(&shape, plan.dtype)));
    let mut back = match &mut stacks {
        Some([gate_up, down]) => {
            let grads = ExpertGrads { gate_up, down };
            let target = WeightGradTarget { write: Write::Replace, of_used: false, grads };
            let compute = match plan.layout {
                Layout::Stacked => experts_backward_with_weight_grad,
                Layout::Transposed | Layout::Interleaved => experts_backward_as_stored,
            };
            compute(ctx, &x, &dy, weights.weights(), rows, &saved, target)
        }
        None => experts_backward(ctx, &dy, weights.weights(), rows, &saved),
    };
    if let Some([_, down]) = &weights.biases {
        add_bias_row_weight_grads(ctx, &dy, down, rows, &mut back.d_row_weights);
    }
    let biases = wanted.biases.then(|| {
        let mut grads = [plan.columns(), plan.width].map(|columns| ctx.empty(&[plan.num_experts, columns], DType::F32));
        let [first, second] = &mut grads;
        experts_bias_grad(ctx, &dy, &back.dh, rows, Write::Replace, first, second);
        grads
    });
    let d_weights = choice_weight_grads(ctx, rows, &back.d_row_weights);
    let d_weights = d_weights.reshaped(&[num_tokens, num_choices]);
    let dx = into_type(ctx, back.dx, plan.dtype);
    Ok(Gradients { dx, d_weights, stacks: each(stacks), biases: each(biases) })
}

fn each(pair: Option<[Tensor; 2]>) -> [Option<Tensor>; 2] {
    pair.map_or([None, None], |pair| pair.map(Some))
}
