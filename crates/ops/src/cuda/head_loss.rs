//! The loss of rows of logits on a GPU: see [`head_loss`](crate::head_loss). Each row has a block.

use moeworks_tensor::{DType, Tensor};

use super::On;
use crate::head_loss::LogitGrads;
use moeworks_gpu::Arg;
use moeworks_gpu::sources::HEAD_LOSS;

/// The terms of a row's loss.
pub(crate) struct Row {
    /// The sum of exponentials relative to the largest logit.
    pub(crate) sum: f32,
    /// The target's logit less the largest one.
    pub(crate) distance: f32,
    /// The target is the first of the largest.
    pub(crate) is_correct: bool,
}

/// Computes the terms of each row's loss, for [`rows`]. With `grads` the logits are replaced by their gradient, of
/// its type. The terms of rows without a target are unspecified.
pub(crate) fn softmax_rows(on: On<'_>, logits: &mut Tensor, targets: &[u32], grads: Option<LogitGrads>) -> Tensor {
    let (columns, list, grad_scale) = (logits.cols(), on.u32s(targets), grads.map(|grads| grads.scale));
    let mut results = on.empty(&[targets.len(), 3], DType::F32);
    let mut rounded = grads.filter(|grads| grads.dtype == DType::BF16).map(|_| on.empty(logits.shape(), DType::BF16));
    let args = [
        on.write(logits),
        rounded.as_mut().map_or(Arg::none(), |rounded| on.write(rounded)),
        on.read(&list),
        on.write(&mut results),
        columns.into(),
        grad_scale.is_some().into(),
        grad_scale.unwrap_or(0.0).into(),
    ];
    // SAFETY: a block reads and writes its row; targets are columns, or none.
    unsafe { on.launch(&HEAD_LOSS, "cross_entropy", targets.len(), &args) };
    if let Some(rounded) = rounded {
        *logits = rounded;
    }
    results
}

/// Returns the terms that [`softmax_rows`] computed.
pub(crate) fn rows(results: &Tensor) -> impl Iterator<Item = Row> {
    let rows = results.f32s().as_chunks::<3>().0;
    rows.iter().map(|&[sum, distance, is_correct]| Row { sum, distance, is_correct: is_correct == 1.0 })
}
