//! How much of the sum of gradients over ranks is hidden under backward, of matrices that every rank has.

use std::sync::Arc;

use moeworks_comm::{CommError, Communicator, Meter, Metered, Reduce};
use moeworks_ops::Context;
use moeworks_ops::linear::{Write, linear_backward_input, linear_backward_weight};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::pass::Pass;

/// Matrices one behind the other, each of `WIDTH` by `WIDTH`.
const LAYERS: usize = 8;
const WIDTH: usize = 512;

/// Sums that begin behind backward, and those that begin as soon as a matrix has its gradient: the medians of `passes` passes with
/// `tokens` tokens, which take turns. `group` are the ranks of `comm` by the links that are measured.
pub(super) fn measure(
    comm: &dyn Communicator,
    group: Box<dyn Communicator>,
    ctx: &Context,
    (tokens, passes): (usize, usize),
) -> Result<[Pass; 2], CommError> {
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
        for (passes, is_under) in both.iter_mut().zip([false, true]) {
            passes.push(Pass::of(comm, &meter, || backward(&group, ctx, (&x, &w), is_under))?);
        }
    }
    Ok(both.map(|passes| Pass::median(&passes)))
}

fn backward(
    group: &dyn Communicator,
    ctx: &Context,
    (x, w): (&Tensor, &Tensor),
    is_under: bool,
) -> Result<(), CommError> {
    let mut dy = x.clone();
    let (mut whole, mut under_way) = (Vec::new(), Vec::new());
    for _ in 0..LAYERS {
        let mut dw = ctx.empty(&[WIDTH, WIDTH], DType::F32);
        linear_backward_weight(ctx, &dy, x, DType::F32, Write::Replace, &mut dw);
        if is_under {
            under_way.push(group.start_all_reduce(dw, Reduce::Sum)?);
        } else {
            whole.push(dw);
        }
        dy = linear_backward_input(ctx, &dy, w, DType::F32);
    }
    for mut dw in whole {
        group.all_reduce(dw.f32s_mut(), Reduce::Sum)?;
    }
    under_way.into_iter().try_for_each(|sum| sum.finish().map(drop))
}
