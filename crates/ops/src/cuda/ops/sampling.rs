//! [`sampling`](crate::sampling) on a GPU: the host gets the tokens and not the logits.

use moeworks_tensor::{DType, Tensor};

use super::On;
use crate::cuda::Launch;
use crate::cuda::sources::SAMPLING;
use crate::sampling::{Drawn, Filters};

/// Threads of the block that has a row.
const THREADS: usize = 512;

pub(crate) fn draw_each(on: On<'_>, logits: &Tensor, filters: &Filters, drawn: &[f32]) -> Vec<Drawn> {
    let Filters { temperature, top_k, top_p, min_p } = *filters;
    let (rows, count) = (drawn.len(), logits.len() / drawn.len().max(1));
    let mut result = on.empty(&[rows, 2], DType::U32);
    // One comes as an argument: nothing is copied.
    let draws = (rows > 1).then(|| on.floats(drawn));
    let args = [
        on.read(logits),
        count.into(),
        temperature.into(),
        top_k.min(count).into(),
        top_p.into(),
        min_p.into(),
        drawn.first().copied().unwrap_or(0.0).into(),
        on.read_or_none(draws.as_ref()),
        on.write(&mut result),
    ];
    let launch = Launch {
        source: &SAMPLING,
        kernel: "draw_tokens",
        grid: [rows, 1, 1],
        threads: THREADS,
        shared: 0,
        args: &args,
    };
    // SAFETY: a block reads its row of logits and writes its result.
    unsafe { on.gpu.launch(&launch) };
    result.u32s().as_chunks::<2>().0.iter().map(|&[id, has_nan]| Drawn { id, has_nan: has_nan != 0 }).collect()
}
