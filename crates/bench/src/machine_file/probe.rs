//! A fixed piece of work, whose time tells how fast a shared machine is at the moment.

use std::time::Instant;

use moeworks_ops::Context;
use moeworks_ops::linear::linear;
use moeworks_tensor::{DType, Tensor};

/// The rows and the width of the products of a probe, and the number of them for each thread. They are many and
/// small, so that threads of unlike speed share them as they share the work of a step.
const ROWS: usize = 128;
const WIDTH: usize = 256;
const PRODUCTS: usize = 4;

/// A probe: some products for each thread.
pub(super) struct Probe {
    ctx: Context,
    /// The two operands of each product.
    operands: Vec<[Tensor; 2]>,
}

impl Probe {
    /// Makes a probe for the threads of `ctx`. It shares them, because others would spin beside those that it is to
    /// tell the speed of.
    pub(super) fn new(ctx: &Context) -> Self {
        let ctx = ctx.clone();
        let operand = |rows| Tensor::zeros(ctx.pool(), &[rows, WIDTH], DType::F32);
        let operands = (0..PRODUCTS * ctx.threads().count()).map(|_| [operand(ROWS), operand(WIDTH)]).collect();
        let probe = Self { ctx, operands };
        probe.seconds();
        probe
    }

    /// Runs the work once and returns its seconds.
    pub(super) fn seconds(&self) -> f64 {
        let start = Instant::now();
        self.ctx.threads().run(self.operands.len(), |index| {
            let [x, w] = &self.operands[index];
            drop(linear(&self.ctx, x, w, DType::F32));
        });
        start.elapsed().as_secs_f64().max(1e-9)
    }
}
