//! Biases of experts, added before the activation and behind the second product, and their gradients.

use moeworks_tensor::Tensor;

use super::ExpertRows;
use super::epilogues::dot;
use crate::Context;
use crate::cuda::{self, On};
use crate::linear::Write;
use crate::parallel::PIECE;

/// The biases of experts (GPT-OSS), or of a dense network as one expert (GPT-2), f32.
#[derive(Clone, Copy)]
pub struct ExpertBiases<'a> {
    /// `[E, A F]`: added before the activation.
    pub gate_up: &'a Tensor,
    /// `[E, D]`: added to an expert's output before it is multiplied by the row's weight.
    pub down: &'a Tensor,
}

/// Adds the bias of each row's expert, `[E, D]`, to the row of `outputs` `[R, D]`.
pub(super) fn add_biases(ctx: &Context, outputs: &mut Tensor, rows: ExpertRows<'_>, bias: &Tensor) {
    let d = bias.cols();
    if outputs.is_empty() {
        return;
    }
    let rows_per_piece = (PIECE / d).max(1);
    ctx.threads().run_pieces(outputs.f32s_mut(), rows_per_piece * d, |index, outputs| {
        for (row, outputs) in (index * rows_per_piece..).zip(outputs.chunks_exact_mut(d)) {
            let expert = expert_of(rows, row);
            outputs.iter_mut().zip(&bias.f32s()[expert * d..]).for_each(|(o, bias)| *o += bias);
        }
    });
}

/// Returns the expert that a row belongs to.
fn expert_of(rows: ExpertRows<'_>, row: usize) -> usize {
    rows.offsets.partition_point(|&offset| offset as usize <= row) - 1
}

/// Adds `<dy, b2>`, the contribution of the experts' second biases `down` `[E, D]`, to the gradient of the row
/// weights `[R]` (f32). `dy` is `[T, D]`, f32 or bf16.
pub fn add_bias_row_weight_grads(
    ctx: &Context,
    dy: &Tensor,
    down: &Tensor,
    rows: ExpertRows<'_>,
    d_row_weights: &mut Tensor,
) {
    if let Some(on) = On::taking(ctx, &[dy.dtype()]) {
        return cuda::experts::add_bias_row_weight_grads(on, dy, down, rows, d_row_weights);
    }
    let (d, bias, tokens) = (down.cols(), down.f32s(), &*rows.tokens);
    let dy = dy.to_f32_vec();
    for (row, grad) in d_row_weights.f32s_mut().iter_mut().enumerate() {
        let (token, expert) = (tokens[row] as usize, expert_of(rows, row));
        *grad += dot(&dy[token * d..][..d], &bias[expert * d..][..d]);
    }
}

/// Writes the gradients of [`ExpertBiases`] (f32, same shapes) to `gate_up` and `down`. `dy` `[T, D]` is the gradient
/// of the output, and `dh` comes from [`experts_backward`](super::experts_backward). An expert without rows gets
/// zeros with [`Write::Replace`].
pub fn experts_bias_grad(
    ctx: &Context,
    dy: &Tensor,
    dh: &Tensor,
    rows: ExpertRows<'_>,
    write: Write,
    gate_up: &mut Tensor,
    down: &mut Tensor,
) {
    if let Some(on) = On::taking(ctx, &[dy.dtype(), dh.dtype()]) {
        return cuda::experts::bias_grad(on, dy, dh, rows, write, gate_up, down);
    }
    let (af, d) = (gate_up.cols(), down.cols());
    let (dh, dy) = (dh.to_f32_vec(), dy.to_f32_vec());
    let (gate_up, down) = (gate_up.f32s_mut(), down.f32s_mut());
    if write == Write::Replace {
        gate_up.fill(0.0);
        down.fill(0.0);
    }
    for (row, (&token, &weight)) in rows.tokens.iter().zip(&*rows.weights).enumerate() {
        let (token, expert) = (token as usize, expert_of(rows, row));
        let dh = &dh[row * af..(row + 1) * af];
        gate_up[expert * af..].iter_mut().zip(dh).for_each(|(sum, x)| *sum += x);
        let dy = &dy[token * d..(token + 1) * d];
        down[expert * d..].iter_mut().zip(dy).for_each(|(sum, x)| *sum += weight * x);
    }
}
