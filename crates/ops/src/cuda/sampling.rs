//! [`sampling`](crate::sampling) on a GPU: the host gets the tokens and not the logits, and the GPU does not wait for
//! the host.

use moeworks_tensor::{DType, Tensor};

use super::On;
use crate::deferred::Deferred;
use crate::sampling::{Drawn, Filters};
use moeworks_gpu::Launch;
use moeworks_gpu::sources::SAMPLING;

/// Threads of a row's block.
const THREADS: usize = 512;
/// The bit of an answer that says that a logit is NaN.
const HAS_NAN: u32 = 1 << 31;

/// Returns the ids `[R]` on the GPU, and the drawn tokens once the host has them.
pub(crate) fn draw_each(
    on: On<'_>,
    logits: &Tensor,
    filters: &Filters,
    drawn: &[f32],
) -> (Tensor, Deferred<Vec<Drawn>>) {
    let Filters { temperature, top_k, top_p, min_p } = *filters;
    let (rows, count) = (drawn.len(), logits.len() / drawn.len().max(1));
    let [mut ids, mut answers] = [(); 2].map(|()| on.empty(&[rows], DType::U32));
    // A single draw is passed as an argument, without a copy.
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
        on.write(&mut ids),
        on.write(&mut answers),
    ];
    let launch = Launch {
        source: &SAMPLING,
        kernel: "draw_tokens",
        grid: [rows, 1, 1],
        threads: THREADS,
        shared: 0,
        args: &args,
    };
    // SAFETY: a block reads its row of logits and writes its results.
    unsafe { on.gpu.launch(&launch) };
    let fetched = on.gpu.fetch(answers);
    let in_host = Deferred::new(move || {
        let drawn = |bytes: &[u8; 4]| {
            let answer = u32::from_ne_bytes(*bytes);
            Drawn { id: answer & !HAS_NAN, has_nan: answer & HAS_NAN != 0 }
        };
        fetched.bytes().as_chunks().0.iter().map(drawn).collect()
    });
    (ids, in_host)
}
