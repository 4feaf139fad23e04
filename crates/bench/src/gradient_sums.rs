//! The share of the all-reduce of replicated gradients that is hidden behind the backward pass.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Reduce};
use moeworks_ops::Context;
use moeworks_ops::linear::{Write, linear_backward_input, linear_backward_weight};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::pass::Pass;

/// The number of consecutive matrices, each of `WIDTH` by `WIDTH`.
const LAYERS: usize = 8;
const WIDTH: usize = 512;

/// The medians of both orders of a backward pass and its all-reduces.
#[derive(Clone, Copy, Debug)]
pub struct GradientSums {
    /// All-reduces that start after the whole backward pass.
    pub after: Pass,
    /// All-reduces that start as soon as a matrix has its gradient.
    pub overlapped: Pass,
}

/// Times both orders in turns, `passes` times each, with `tokens` tokens. `group` contains the ranks of `comm` on the
/// measured links.
///
/// # Errors
/// [`CommError`], as all calls.
pub fn measure(
    comm: &dyn Communicator,
    group: Box<dyn Communicator>,
    ctx: &Context,
    tokens: usize,
    passes: usize,
) -> Result<GradientSums, CommError> {
    let meter = Arc::new(Meter::new(true));
    let group = Metered::new(group, Arc::clone(&meter));
    let random = Random::new(1, Purpose::Test, comm.rank() as u64);
    let normal = |rows: usize| {
        let values: Vec<f32> = (0..rows * WIDTH).map(|i| random.normal(i as u64)).collect();
        Tensor::from_slice(ctx.pool(), &[rows, WIDTH], &values)
    };
    let (x, w) = (normal(tokens), normal(WIDTH));
    let mut both = [Vec::new(), Vec::new()];
    for _ in 0..passes {
        for (passes, is_overlapped) in both.iter_mut().zip([false, true]) {
            passes.push(Pass::measure(comm, &meter, || backward(&group, ctx, &x, &w, is_overlapped))?);
        }
    }
    let [after, overlapped] = both.map(|passes| Pass::median(&passes));
    Ok(GradientSums { after, overlapped })
}

fn backward(
    group: &dyn Communicator,
    ctx: &Context,
    x: &Tensor,
    w: &Tensor,
    is_overlapped: bool,
) -> Result<(), CommError> {
    let mut dy = x.clone();
    let (mut whole, mut in_flight) = (Vec::new(), Vec::new());
    for _ in 0..LAYERS {
        let mut dw = ctx.empty(&[WIDTH, WIDTH], DType::F32);
        linear_backward_weight(ctx, &dy, x, DType::F32, Write::Replace, &mut dw);
        if is_overlapped {
            in_flight.push(group.start_all_reduce(dw, Reduce::Sum)?);
        } else {
            whole.push(dw);
        }
        dy = linear_backward_input(ctx, &dy, w, DType::F32);
    }
    for mut dw in whole {
        group.all_reduce(dw.f32s_mut(), Reduce::Sum)?;
    }
    in_flight.into_iter().try_for_each(|sum| sum.finish().map(drop))
}
