//! [`sampling`](crate::sampling) on a GPU: the host gets the token and not the logits.

use moeworks_tensor::{DType, Tensor};

use super::On;
use crate::cuda::Launch;
use crate::cuda::sources::SAMPLING;
use crate::sampling::{Drawn, Filters};

/// Threads of the one block.
const THREADS: usize = 512;

pub(crate) fn draw(on: On<'_>, logits: &Tensor, filters: &Filters, drawn: f32) -> Drawn {
    let Filters { temperature, top_k, top_p, min_p } = *filters;
    let mut result = on.empty(&[2], DType::U32);
    let args = [
        on.read(logits),
        logits.len().into(),
        temperature.into(),
        top_k.min(logits.len()).into(),
        top_p.into(),
        min_p.into(),
        drawn.into(),
        on.write(&mut result),
    ];
    let launch =
        Launch { source: &SAMPLING, kernel: "draw_token", grid: [1, 1, 1], threads: THREADS, shared: 0, args: &args };
    // SAFETY: the block reads the logits and writes the result.
    unsafe { on.gpu.launch(&launch) };
    let result = result.u32s();
    Drawn { id: result[0], has_nan: result[1] != 0 }
}
