//! Timing of MoE layers on request: `moeworks bench moe` reads requests and writes answers, each a line of JSON.
//!
//! A comparison can thus take turns with another program while both keep their weights. The layer, its weights and
//! the gradients are kept from one line to the next as long as only tokens and passes differ. Gradients are computed
//! for the experts that have tokens, as in a program with separate gradients of experts; the others stay zero.
//!
//! `"dtype"` is the type of the experts' weights; `"fp8"` means bf16 weights with fp8 products, for the whole layer
//! only. `"router"` has settings of the router as below `model.router` in a configuration, such as `{"kind":
//! "forced", "forced_load": "zipf"}`, for the whole layer only; without it the K highest probabilities of a softmax
//! are chosen. `"gradients"` is the type of the gradients of these weights: f32 by default, or `"bf16"`. `"part":
//! "sort"` times only the counting sort of the tokens' choices, `"part": "dispatch"` the sort and a copy of the rows
//! in its order, which the layer itself does not make (it gathers while it multiplies). `"part": "routing"` times
//! everything but the experts (`routing_parts.rs`). `"part": "products"` times only the grouped products of the
//! layer, two forward and with `"both"` six, of as many rows sorted by random experts.

use moeworks_moe::RouterConfig;
use moeworks_ops::counting_sort::sort_all_choices;
use moeworks_ops::embedding::embedding;
use moeworks_ops::experts::ExpertRows;
use moeworks_ops::grouped_linear::{
    GroupedRows, grouped_linear, grouped_linear_backward_input, grouped_linear_backward_weight,
};
use moeworks_ops::linear::Write as Writing;
use moeworks_ops::{Activation, Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use moeworks_train::machine_bytes;
use serde_json::{Value, json};

use crate::error::BenchError;
use crate::moe_layer::{LayerShape, TimedLayer};
use crate::routing_parts::Routed;
use crate::timing::run_seconds;

/// The number of sorts that a GPU gets at a time.
const SORTS_AT_ONCE: usize = 16;

/// The number of distinct rows of which the operands of products consist.
const REPEATED_ROWS: usize = 61;

/// The part of a layer that is timed.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Layer { is_both: bool },
    Products { is_both: bool },
    Routing { is_both: bool },
    Dispatch,
    Sort,
}

/// The content of a request.
struct Case {
    shape: LayerShape,
    /// True if the experts have bf16 weights and fp8 products.
    is_fp8: bool,
    tokens: usize,
    part: Part,
    router: RouterConfig,
}

impl Case {
    fn parse(line: &str) -> Result<Self, BenchError> {
        let value: Value =
            serde_json::from_str(line).map_err(|error| BenchError::Request(format!("{line}: {error}")))?;
        let number = |key: &str| {
            let number = value[key].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0 && n <= 1 << 24);
            number
                .ok_or_else(|| BenchError::Request(format!("{line}: \"{key}\" must be a whole number from 1 to 2^24")))
        };
        let activation = match value["activation"].as_str() {
            Some("swiglu") => Activation::SwiGlu,
            Some("gelu") => Activation::Gelu,
            _ => return Err(BenchError::Request(format!("{line}: \"activation\" must be \"swiglu\" or \"gelu\""))),
        };
        let (dtype, is_fp8) = match value["dtype"].as_str() {
            Some("f32") => (DType::F32, false),
            Some("bf16") => (DType::BF16, false),
            Some("fp8") => (DType::BF16, true),
            _ => return Err(BenchError::Request(format!("{line}: \"dtype\" must be \"f32\", \"bf16\" or \"fp8\""))),
        };
        let gradients = match value["gradients"].as_str() {
            None | Some("f32") => DType::F32,
            Some("bf16") => DType::BF16,
            Some(_) => return Err(BenchError::Request(format!("{line}: \"gradients\" must be \"f32\" or \"bf16\""))),
        };
        let (d, f, e, k) = (number("d")?, number("f")?, number("e")?, number("k")?);
        let shape = LayerShape { d, f, e, k, activation, dtype, gradients };
        let is_both = value["both"].as_bool().unwrap_or(false);
        let part = match value["part"].as_str() {
            None | Some("layer") => Part::Layer { is_both },
            Some("products") => Part::Products { is_both },
            Some("routing") => Part::Routing { is_both },
            Some("dispatch") => Part::Dispatch,
            Some("sort") => Part::Sort,
            Some(_) => {
                let names = "\"layer\", \"products\", \"routing\", \"dispatch\" or \"sort\"";
                return Err(BenchError::Request(format!("{line}: \"part\" must be {names}")));
            }
        };
        let router = match &value["router"] {
            Value::Null => RouterConfig::default(),
            _ if !matches!(part, Part::Layer { .. }) => {
                return Err(BenchError::Request(format!("{line}: \"router\" goes with the part \"layer\" alone")));
            }
            settings => serde_json::from_value(settings.clone())
                .map_err(|error| BenchError::Request(format!("{line}: \"router\": {error}")))?,
        };
        let tokens = number("tokens")?;
        check_memory(shape, tokens).map_err(|problem| BenchError::Request(format!("{line}: {problem}")))?;
        Ok(Self { shape, is_fp8, tokens, part, router })
    }
}

/// Returns an error if the case does not fit in memory: weights as drawn and as stored, their gradients, and several
/// copies of the rows.
fn check_memory(shape: LayerShape, tokens: usize) -> Result<(), String> {
    let [d, f, e, k, tokens] = [shape.d, shape.f, shape.e, shape.k, tokens].map(|size| size as u128);
    let weights = e * d * f * (shape.activation.num_inputs() as u128 + 1);
    let rows = tokens * (k * (d + 2 * f) + e);
    let needed = 12 * weights + 16 * rows;
    let there = u128::from(machine_bytes().unwrap_or(u64::MAX));
    if needed > there || tokens * k >= 1 << 31 {
        return Err(format!("needs about {} GB of memory, of which there are {}", needed >> 30, there >> 30));
    }
    Ok(())
}

/// Draws choices of experts for each token, with weights of one.
fn random_choices(ctx: &Context, tokens: usize, shape: LayerShape) -> (Tensor, Tensor) {
    let random = Random::new(0, Purpose::Test, 2);
    let (mut ids, mut weights) = (ctx.empty(&[tokens, shape.k], DType::U32), ctx.empty(&[tokens, shape.k], DType::F32));
    ids.u32s_mut().iter_mut().enumerate().for_each(|(i, id)| *id = random.words(i as u64)[0] % shape.e as u32);
    weights.f32s_mut().fill(1.0);
    (ids, weights)
}

/// Times only the grouped products of a layer's experts, in seconds.
fn product_times(ctx: &Context, layer: &mut TimedLayer, tokens: usize, is_both: bool) -> Vec<f64> {
    let LayerShape { d, f, e, k, activation, dtype, .. } = layer.shape;
    let af = f * activation.num_inputs();
    let (ids, weights) = random_choices(ctx, tokens, layer.shape);
    let sorted = sort_all_choices(ctx, &ids, &weights, e);
    let by_token = GroupedRows { rows: sorted.rows(), first: 0, width: af };
    let in_order: Vec<u32> = (0..(tokens * k) as u32).collect();
    let rows =
        ExpertRows { tokens: (&in_order).into(), token_rows: (&in_order).into(), num_choices: 1, ..sorted.rows() };
    let (to_h, to_y) = (GroupedRows { rows, ..by_token }, GroupedRows { rows, first: 0, width: d });
    let (x, _) = layer.tokens(ctx, tokens, 0);
    // The operands are not zero, because a GPU multiplies zeros faster.
    let repeated: Vec<u32> = (0..tokens * k).map(|row| (row % REPEATED_ROWS) as u32).collect();
    let [a, h, y] = [f, af, d].map(|columns| {
        let mut rows = ctx.empty(&[REPEATED_ROWS, columns], DType::F32);
        elementwise::fill_normal(ctx, &Random::new(0, Purpose::Test, 3), 1.0, &mut rows);
        embedding(ctx, &repeated, &rows, dtype)
    });
    run_seconds(ctx, || {
        drop(grouped_linear(ctx, &x, &layer.weights.gate_up, by_token));
        drop(grouped_linear(ctx, &a, &layer.weights.down, to_y));
        if is_both {
            let (_, weights, grads) = layer.parts(ctx);
            drop(grouped_linear_backward_input(ctx, &y, &weights.down, to_y));
            drop(grouped_linear_backward_input(ctx, &h, &weights.gate_up, to_h));
            grouped_linear_backward_weight(ctx, &y, &a, to_y, Writing::Replace, &mut grads.down);
            grouped_linear_backward_weight(ctx, &h, &x, by_token, Writing::Replace, &mut grads.gate_up);
        }
    })
}

/// Times the sort of random choices of experts, and the copy of the tokens' rows in that order, in seconds.
fn dispatch_times(ctx: &Context, case: &Case) -> Vec<f64> {
    let LayerShape { d, e, dtype, .. } = case.shape;
    let (ids, weights) = random_choices(ctx, case.tokens, case.shape);
    let x = if case.part == Part::Dispatch { ctx.zeros(&[case.tokens, d], dtype) } else { ctx.zeros(&[0, d], dtype) };
    // A GPU gets several at a time, so that its work is timed and not the latency of each call.
    let at_once = if ctx.gpu().is_some() { SORTS_AT_ONCE } else { 1 };
    let times = run_seconds(ctx, || {
        for _ in 0..at_once {
            let sorted = sort_all_choices(ctx, &ids, &weights, e);
            if case.part == Part::Dispatch {
                drop(embedding(ctx, &sorted.rows().tokens, &x, dtype));
            }
        }
    });
    times.into_iter().map(|seconds| seconds / at_once as f64).collect()
}

/// Answers requests one after the other. A layer and its weights are kept as long as the shape is the same.
#[derive(Default)]
pub struct MoeRequests {
    layer: Option<TimedLayer>,
}

impl MoeRequests {
    /// Returns the answer to a request, both lines of JSON.
    ///
    /// # Errors
    /// [`BenchError`] if the line does not describe a case that can be timed.
    pub fn answer(&mut self, ctx: &Context, line: &str) -> Result<Value, BenchError> {
        let case = Case::parse(line)?;
        let ctx = &ctx.clone().with_fp8_experts(case.is_fp8);
        let keeps_weights = matches!(case.part, Part::Layer { .. } | Part::Products { .. });
        if keeps_weights
            && self.layer.as_ref().is_none_or(|layer| layer.shape != case.shape || *layer.router() != case.router)
        {
            drop(self.layer.take());
            ctx.pool().trim();
            self.layer = Some(TimedLayer::new(ctx, case.shape, &case.router)?);
            ctx.pool().trim();
        }
        let times = match (case.part, &mut self.layer) {
            (Part::Layer { is_both }, Some(layer)) => layer.times(ctx, case.tokens, is_both),
            (Part::Products { is_both }, Some(layer)) => product_times(ctx, layer, case.tokens, is_both),
            (Part::Routing { is_both }, _) => {
                let routed = Routed::new(ctx, case.shape, case.tokens);
                run_seconds(ctx, || routed.pass(ctx, is_both))
            }
            _ => dispatch_times(ctx, &case),
        };
        Ok(json!({ "seconds": times }))
    }
}
