//! The most usual call of experts, from PyTorch's tensors themselves: one token takes about as long as asking Python
//! for the sizes and addresses of five tensors.

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use moeworks_tensor::DType;

use crate::calls::unlocked;
use crate::choices::ChoiceMemory;
use crate::dlpack;
use crate::exchange::{Element, Exchange, View};
use crate::experts::{ForwardInputs, Layout, Plan, WeightMemory, activation_of, compute};

/// `experts_direct(exchange, x, gate_up, down, ids, weights, activation, alpha, limit, threads) -> capsule | None`:
/// stacked experts without biases and gradients. `None` if a tensor is not on the CPU and in order, a type is not the
/// kernels' or a shape does not fit: slower code computes such a call, or says what is wrong with it.
pub(crate) fn direct(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let exchange = args.get_item(0)?;
    let exchange = Exchange::new(&exchange)?;
    let view = |index: usize| -> PyResult<Option<View>> {
        let tensor = args.get_item(index)?;
        // SAFETY: the Python code that calls this has checked that it is a tensor, and `args` keeps it alive.
        Ok(unsafe { exchange.view(&tensor) })
    };
    let (Some(x), Some(gate_up), Some(down), Some(ids), Some(weights)) =
        (view(1)?, view(2)?, view(3)?, view(4)?, view(5)?)
    else {
        return Ok(py.None());
    };
    let name = args.get_item(6)?.cast_into::<PyString>()?;
    let activation = activation_of(name.to_str()?, args.get_item(7)?.extract()?, args.get_item(8)?.extract()?)?;
    let num_threads = args.get_item(9)?.extract()?;
    let tensors = Tensors { x, gate_up, down, ids, weights };
    let Some((plan, inputs)) = tensors.inputs(activation, num_threads) else { return Ok(py.None()) };
    // SAFETY: the views say where the memory is, and `args` keeps the tensors alive.
    let (y, _) = unlocked(py, || unsafe { compute(&plan, &inputs) })??;
    dlpack::capsule(py, y)
}

/// The tensors of a call.
struct Tensors {
    x: View,
    gate_up: View,
    down: View,
    ids: View,
    weights: View,
}

impl Tensors {
    /// Returns the call, if types and shapes fit.
    fn inputs(&self, activation: moeworks_ops::Activation, num_threads: usize) -> Option<(Plan, ForwardInputs)> {
        let Self { x, gate_up, down, ids, weights } = self;
        let dtype = match x.element {
            Element::F32 => DType::F32,
            Element::Bf16 => DType::BF16,
            Element::I64 => return None,
        };
        let are_types_right = gate_up.element == x.element
            && down.element == x.element
            && weights.element == Element::F32
            && ids.element == Element::I64;
        let ([num_tokens, width], [num_experts, columns, depth]) = (x.shape()?, gate_up.shape()?);
        let ([stacked, height, expert_width], [of_tokens, num_choices]) = (down.shape()?, ids.shape()?);
        let do_shapes_fit = width == depth
            && width == height
            && num_experts == stacked
            && expert_width.checked_mul(activation.num_inputs()) == Some(columns)
            && of_tokens == num_tokens
            && weights.shape() == Some([num_tokens, num_choices])
            && ![width, expert_width, num_experts, num_choices].contains(&0);
        if !are_types_right || !do_shapes_fit {
            return None;
        }
        let plan = Plan { num_experts, width, expert_width, dtype, activation, layout: Layout::Stacked };
        let choices = ChoiceMemory { ids: ids.address, weights: weights.address, num_tokens, num_choices };
        let stacks = WeightMemory { gate_up: gate_up.address, down: down.address, biases: [0, 0] };
        Some((plan, ForwardInputs { x: x.address, choices, weights: stacks, is_saved: false, num_threads }))
    }
}
