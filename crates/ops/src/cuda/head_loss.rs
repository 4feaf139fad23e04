//! The loss of rows of logits on a GPU: see [`head_loss`](crate::head_loss). A block has a row.

use moeworks_tensor::{DType, Tensor};

use super::On;
use moeworks_gpu::Arg;
use moeworks_gpu::sources::HEAD_LOSS;

/// What a row's loss is computed from, with the target's place among the others.
pub(crate) struct Row {
    /// The sum of exponentials relative to the largest logit.
    pub(crate) sum: f32,
    /// The target's logit less the largest one.
    pub(crate) distance: f32,
    /// Whether the target is the first of the largest.
    pub(crate) is_correct: bool,
}

/// What each row gives, for [`rows`]; with a scale, the logits are replaced by their gradient, of a type. Of a row
/// without a target nothing is said.
pub(crate) fn softmax_rows(on: On<'_>, logits: &mut Tensor, targets: &[u32], grads: Option<(f32, DType)>) -> Tensor {
    let (columns, list, grad_scale) = (logits.cols(), on.u32s(targets), grads.map(|(scale, _)| scale));
    let mut results = on.empty(&[targets.len(), 3], DType::F32);
    let mut rounded = grads.filter(|(_, dtype)| *dtype == DType::BF16).map(|_| on.empty(logits.shape(), DType::BF16));
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

/// What [`softmax_rows`] said of each row.
pub(crate) fn rows(results: &Tensor) -> impl Iterator<Item = Row> {
    let rows = results.f32s().as_chunks::<3>().0;
    rows.iter().map(|&[sum, distance, is_correct]| Row { sum, distance, is_correct: is_correct == 1.0 })
}
