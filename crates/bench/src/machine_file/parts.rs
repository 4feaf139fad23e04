//! The parts of a training step that are measured by themselves.

use std::hint::black_box;
use std::sync::OnceLock;

use moeworks_ops::adamw::{AdamWStep, AdamWTensors, adamw};
use moeworks_ops::attention::{AttentionInputs, AttentionSaved, AttentionShape, attention, attention_backward};
use moeworks_ops::elementwise::{into_type, sums_of_squares};
use moeworks_ops::experts::{
    ExpertGrads, ExpertWeights, WeightGradTarget, experts_backward_with_weight_grad, experts_forward,
};
use moeworks_ops::head_loss::head_loss_backward;
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::{Activation, Context};
use moeworks_plan::Precision;
use moeworks_plan::machine::{AttentionRate, ExpertRate, Machine, OutputLayerRate, ProductRate, UpdateRate};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::Effort;
use crate::choices::{ChoiceCounts, Choices};

/// Rows and widths of products.
const ROWS: [usize; 4] = [8, 64, 512, 2048];
const WIDTHS: [usize; 4] = [64, 128, 256, 768];
/// Rows of each expert, and widths of the model and of experts.
const EXPERT_ROWS: [usize; 5] = [4, 16, 64, 256, 1024];
const EXPERT_WIDTHS: [usize; 3] = [64, 128, 256];
/// The experts that are measured together, the rows of all of them together at most, and choices of a token.
const MAX_EXPERTS: usize = 32;
const ALL_ROWS: usize = 2048;
const TOP_K: usize = 2;
/// Tokens of a sequence, widths of heads, tokens of all sequences, and heads.
const SEQUENCES: [usize; 4] = [32, 128, 512, 1024];
const HEAD_DIMS: [usize; 3] = [32, 64, 128];
const ATTENDING_TOKENS: usize = 1024;
const HEADS: usize = 2;
/// Widths and vocabularies of output layers, and their tokens.
const OUTPUT_WIDTHS: [usize; 2] = [64, 256];
const VOCABULARIES: [usize; 2] = [256, 4096];
const OUTPUT_TOKENS: usize = 512;
/// Tensors of an update, and the width of each.
const UPDATED_TENSORS: usize = 12;
const UPDATED_WIDTH: usize = 384;
/// The bytes that a part takes its operands from in turn: more than the caches of a core hold, as in a step of which
/// other parts come in between.
const COLD_BYTES: usize = 4 << 20;
/// The largest number of such copies.
const MAX_COPIES: usize = 64;

/// A part of a step with a precision and a number of threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) kind: PartKind,
    pub(super) precision: Precision,
    pub(super) threads: usize,
}

/// The kinds of parts, with their sizes.
#[derive(Clone, Copy, Debug)]
pub(super) enum PartKind {
    Product { rows: usize, width: usize },
    Experts { rows: usize, width: usize, expert_width: usize },
    Attention { seq_len: usize, head_dim: usize },
    OutputLayer { width: usize, vocabulary: usize },
    Update,
}

/// Runs a part forward, or forward and backward.
pub(super) type Work<'a> = Box<dyn FnMut(Pass) + 'a>;

/// The pass of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Training,
}

/// The seconds of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartSeconds {
    pub(super) forward: f64,
    pub(super) training: f64,
}

impl Part {
    /// Returns all parts for a machine with so many cores; for a rough file those of every second size.
    pub(super) fn all(cores: usize, effort: Effort) -> Vec<Self> {
        let sizes = |all: &[usize]| -> Vec<usize> {
            let every = if effort == Effort::Quick { 2 } else { 1 };
            all.iter().copied().step_by(every).collect()
        };
        let (expert_rows, expert_widths) = (sizes(&EXPERT_ROWS), sizes(&EXPERT_WIDTHS));
        let both = |first: &[usize], second: &[usize], kind: fn(usize, usize) -> PartKind| -> Vec<PartKind> {
            first.iter().flat_map(|&a| second.iter().map(move |&b| kind(a, b))).collect()
        };
        let experts = |&expert_width: &usize| -> Vec<PartKind> {
            let kind = |rows: usize, width: usize| PartKind::Experts { rows, width, expert_width };
            expert_rows.iter().flat_map(|&rows| expert_widths.iter().map(move |&width| kind(rows, width))).collect()
        };
        let kinds = [
            both(&sizes(&ROWS), &sizes(&WIDTHS), |rows, width| PartKind::Product { rows, width }),
            expert_widths.iter().flat_map(experts).collect(),
            both(&sizes(&SEQUENCES), &sizes(&HEAD_DIMS), |seq_len, head_dim| PartKind::Attention { seq_len, head_dim }),
            both(&sizes(&OUTPUT_WIDTHS), &VOCABULARIES, |width, vocabulary| PartKind::OutputLayer {
                width,
                vocabulary,
            }),
            vec![PartKind::Update],
        ]
        .concat();
        let mut threads = vec![1, cores];
        threads.dedup();
        let each = |kind: PartKind| {
            let threads = threads.clone();
            [Precision::F32, Precision::Bf16]
                .into_iter()
                .flat_map(move |precision| threads.clone().into_iter().map(move |threads| (precision, threads)))
                .map(move |(precision, threads)| Self { kind, precision, threads })
        };
        kinds.into_iter().flat_map(each).collect()
    }

    /// Prepares the operands. The result runs the part once each time that it is called.
    pub(super) fn prepare<'a>(&self, ctx: &'a Context) -> Work<'a> {
        let dtype = if self.precision == Precision::F32 { DType::F32 } else { DType::BF16 };
        match self.kind {
            PartKind::Product { rows, width } => product(ctx, dtype, rows, width),
            PartKind::Experts { rows, width, expert_width } => experts(ctx, dtype, rows, [width, expert_width]),
            PartKind::Attention { seq_len, head_dim } => attend(ctx, dtype, seq_len, head_dim),
            PartKind::OutputLayer { width, vocabulary } => output_layer(ctx, dtype, width, vocabulary),
            PartKind::Update => update(ctx, dtype),
        }
    }

    /// Adds the rate of a part that takes `seconds` to `machine`.
    pub(super) fn write(&self, seconds: PartSeconds, machine: &mut Machine) {
        let Self { precision, threads, .. } = *self;
        let work = self.work();
        let (flops, training_flops) = (work / seconds.forward, 3.0 * work / seconds.training);
        match self.kind {
            PartKind::Product { rows, width } => {
                let training_flops = Some(training_flops);
                machine.products.push(ProductRate { precision, threads, rows, width, flops, training_flops });
            }
            PartKind::Experts { rows, width, expert_width } => {
                let sizes = ExpertRate { precision, threads, rows, width, expert_width, flops, training_flops };
                machine.experts.push(sizes);
            }
            PartKind::Attention { seq_len, head_dim } => {
                machine.attention.push(AttentionRate { precision, threads, seq_len, head_dim, flops, training_flops });
            }
            PartKind::OutputLayer { width, vocabulary } => {
                machine.output_layers.push(OutputLayerRate { precision, threads, width, vocabulary, training_flops });
            }
            PartKind::Update => {
                machine.updates.push(UpdateRate { precision, threads, params_per_s: work / seconds.training });
            }
        }
    }

    /// Returns the operations of a forward pass, or the parameters of an update.
    fn work(&self) -> f64 {
        let work = match self.kind {
            PartKind::Product { rows, width } => 2 * rows * width * width,
            PartKind::Experts { rows, width, expert_width } => 6 * rows * num_experts(rows) * width * expert_width,
            // Half of the pairs, two products each, of which each is two operations.
            PartKind::Attention { seq_len, head_dim } => 2 * attending_tokens(seq_len) * HEADS * seq_len * head_dim,
            PartKind::OutputLayer { width, vocabulary } => 2 * OUTPUT_TOKENS * width * vocabulary,
            PartKind::Update => UPDATED_TENSORS * UPDATED_WIDTH * UPDATED_WIDTH,
        };
        work as f64
    }
}

fn num_experts(rows: usize) -> usize {
    (ALL_ROWS / rows).clamp(1, MAX_EXPERTS)
}

fn attending_tokens(seq_len: usize) -> usize {
    seq_len * (ATTENDING_TOKENS / seq_len).max(1)
}

/// Random numbers that repeat after some thousands.
fn values(ctx: &Context, shape: &[usize], dtype: DType) -> Tensor {
    static NUMBERS: OnceLock<Vec<f32>> = OnceLock::new();
    let random = Random::new(1, Purpose::Test, 0);
    let numbers = NUMBERS.get_or_init(|| (0..8191).map(|index| 0.5 * random.normal(index)).collect());
    let len: usize = shape.iter().product();
    let mut values = Vec::with_capacity(len);
    while values.len() < len {
        values.extend_from_slice(&numbers[..numbers.len().min(len - values.len())]);
    }
    into_type(ctx, Tensor::from_slice(ctx.pool(), shape, &values), dtype)
}

/// Returns the number of copies of operands of `bytes` bytes.
fn copies(bytes: usize) -> usize {
    (COLD_BYTES / bytes.max(1)).clamp(1, MAX_COPIES)
}

/// Calls `work` with the next of the operands each time.
fn in_turn<'a, T: 'a>(mut operands: Vec<T>, mut work: impl FnMut(&mut T, Pass) + 'a) -> Work<'a> {
    let mut turn = 0;
    Box::new(move |pass| {
        turn = (turn + 1) % operands.len();
        work(&mut operands[turn], pass);
    })
}

fn product(ctx: &Context, dtype: DType, rows: usize, width: usize) -> Work<'_> {
    struct Operands {
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        dw: Tensor,
    }
    let num = copies(4 * (2 * rows * width + 2 * width * width));
    let operands = || Operands {
        x: values(ctx, &[rows, width], dtype),
        w: values(ctx, &[width, width], dtype),
        dy: values(ctx, &[rows, width], dtype),
        dw: values(ctx, &[width, width], DType::F32),
    };
    in_turn((0..num).map(|_| operands()).collect(), move |Operands { x, w, dy, dw }, pass| {
        drop(linear(ctx, x, w, DType::F32));
        if pass == Pass::Training {
            drop(linear_backward_input(ctx, dy, w, DType::F32));
            linear_backward_weight(ctx, dy, x, dtype, Write::Replace, dw);
        }
    })
}

fn experts(ctx: &Context, dtype: DType, rows: usize, [width, expert_width]: [usize; 2]) -> Work<'_> {
    struct Operands {
        x: Tensor,
        dy: Tensor,
        gate_up: Tensor,
        down: Tensor,
        grads: [Tensor; 2],
    }
    let experts = num_experts(rows);
    let top_k = TOP_K.min(experts);
    let tokens = rows * experts / top_k;
    let counts = ChoiceCounts { tokens, experts, top_k };
    let choices = Choices::new(counts, |token, choice| (token + choice * experts / top_k) % experts);
    let shapes = [[experts, 2 * expert_width, width], [experts, width, expert_width]];
    let operands = || Operands {
        x: values(ctx, &[tokens, width], dtype),
        dy: values(ctx, &[tokens, width], DType::F32),
        gate_up: values(ctx, &shapes[0], dtype),
        down: values(ctx, &shapes[1], dtype),
        grads: shapes.map(|shape| values(ctx, &shape, DType::F32)),
    };
    let num = copies(4 * (2 * tokens * width + 6 * experts * width * expert_width));
    in_turn((0..num).map(|_| operands()).collect(), move |operands, pass| {
        let Operands { x, dy, gate_up, down, grads: [d_gate_up, d_down] } = operands;
        let weights = ExpertWeights { gate_up, down, activation: Activation::SwiGlu };
        let (_, saved) = experts_forward(ctx, x, weights, choices.rows());
        if pass == Pass::Training {
            let grads = ExpertGrads { gate_up: d_gate_up, down: d_down };
            let target = WeightGradTarget { write: Write::Replace, of_used: false, grads };
            drop(experts_backward_with_weight_grad(ctx, x, dy, weights, choices.rows(), &saved, target));
        }
    })
}

fn attend(ctx: &Context, dtype: DType, seq_len: usize, head_dim: usize) -> Work<'_> {
    let tokens = attending_tokens(seq_len);
    let shape = AttentionShape {
        batch: tokens / seq_len,
        seq_len,
        kv_len: seq_len,
        kv_capacity: seq_len,
        num_heads: HEADS,
        num_kv_heads: HEADS,
        head_dim,
        value_dim: head_dim,
        window: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
    };
    let operands = || {
        let qkv = [(); 3].map(|()| values(ctx, &[tokens, HEADS * head_dim], dtype));
        (qkv, values(ctx, &[tokens, HEADS * head_dim], DType::F32))
    };
    let num = copies(16 * tokens * HEADS * head_dim);
    in_turn((0..num).map(|_| operands()).collect(), move |([q, k, v], d_o), pass| {
        let (o, lse) = attention(ctx, q, k, v, &shape);
        if pass == Pass::Training {
            let inputs = AttentionInputs { q, k, v, sinks: None };
            drop(attention_backward(ctx, d_o, inputs, AttentionSaved { o: &o, lse: &lse }, &shape));
        }
    })
}

fn output_layer(ctx: &Context, dtype: DType, width: usize, vocabulary: usize) -> Work<'_> {
    let targets: Vec<u32> = (0..OUTPUT_TOKENS).map(|token| (token * 7 % vocabulary) as u32).collect();
    let x = values(ctx, &[OUTPUT_TOKENS, width], dtype);
    let w = values(ctx, &[vocabulary, width], dtype);
    let mut dw = values(ctx, &[vocabulary, width], DType::F32);
    Box::new(move |pass| {
        if pass == Pass::Training {
            let scale = 1.0 / OUTPUT_TOKENS as f32;
            drop(head_loss_backward(ctx, &x, &w, &targets, scale, Write::Replace, &mut dw));
        }
    })
}

fn update(ctx: &Context, dtype: DType) -> Work<'_> {
    struct Weight {
        param: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        copy: Option<Tensor>,
    }
    let shape = [UPDATED_WIDTH, UPDATED_WIDTH];
    let weight = |_| Weight {
        param: values(ctx, &shape, DType::F32),
        grad: values(ctx, &shape, DType::F32),
        m: ctx.zeros(&shape, DType::F32),
        v: ctx.zeros(&shape, DType::F32),
        copy: (dtype != DType::F32).then(|| values(ctx, &shape, dtype)),
    };
    let mut weights: Vec<Weight> = (0..UPDATED_TENSORS).map(weight).collect();
    let step = AdamWStep { lr: 1e-6, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };
    Box::new(move |pass| {
        if pass == Pass::Training {
            let grads: Vec<&Tensor> = weights.iter().map(|weight| &weight.grad).collect();
            black_box(sums_of_squares(ctx, &grads).iter().sum::<f64>());
            for Weight { param, grad, m, v, copy } in &mut weights {
                adamw(ctx, &step, AdamWTensors { param, grad, m, v, compute: copy.as_mut() });
            }
        }
    })
}
