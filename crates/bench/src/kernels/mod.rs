//! Timing of single operations of `ops`, each compared with its limit: the peak of products on registers alone, or
//! the rates of reading and copying memory, whichever takes longer.

mod products;
mod vector;

use moeworks_ops::Context;
use moeworks_ops::gemm_plan::{GemmPlan, GemmProblem};
use moeworks_ops::peak::{Memory, Peaks};
use moeworks_tensor::DType;

use crate::case::{CaseResult, Cost};
use crate::choices::{ChoiceCounts, Choices};
use crate::timing::best_seconds_of_many;

/// Times GEMMs of linear layers and experts with weights of type `dtype`, attention, norms, the optimizer and other
/// kernels, and passes each result to `report` as it is measured. Only cases whose name contains `filter` run. All
/// take about twenty seconds.
pub fn time_kernels(ctx: &Context, peaks: &Peaks, dtype: DType, filter: &str, mut report: impl FnMut(&CaseResult)) {
    let memory = ctx.gpu().is_none().then(Memory::default);
    let mut timing = Timing { ctx, peaks: *peaks, memory, filter, report: &mut report };
    products::bench(&mut timing, dtype);
    vector::bench(&mut timing, dtype);
}

/// The context and settings of a run of cases.
struct Timing<'a> {
    ctx: &'a Context,
    peaks: Peaks,
    /// Memory that is read and copied around each case on a CPU, because its rate changes within seconds on a shared
    /// machine.
    memory: Option<Memory>,
    filter: &'a str,
    report: &'a mut dyn FnMut(&CaseResult),
}

impl Timing<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(self.filter)
    }

    /// Returns whether any of these cases will run, so that their operands are needed.
    fn wants_any(&self, names: &[impl AsRef<str>]) -> bool {
        names.iter().any(|name| self.wants(name.as_ref()))
    }

    fn case(&mut self, name: String, cost: Cost, run: impl FnMut()) {
        self.case_of(name, None, cost, run);
    }

    /// Times a case whose product, or the first of whose products, is `problem`.
    fn case_of(&mut self, name: String, problem: Option<GemmProblem>, cost: Cost, run: impl FnMut()) {
        if self.wants(&name) {
            let before = self.rates();
            let seconds = best_seconds_of_many(self.ctx, run);
            if let Some((before, after)) = before.zip(self.rates()) {
                self.peaks.read_bytes_per_s = before.0.max(after.0);
                self.peaks.copy_bytes_per_s = Some(before.1.max(after.1));
            }
            let ctx = self.ctx;
            let choose = |problem| GemmPlan::choose(&problem, ctx.isa(), ctx.is_batch_invariant());
            let plan = problem.filter(|_| ctx.gpu().is_none()).map(choose);
            (self.report)(&CaseResult { plan, ..CaseResult::new(name, cost, seconds, &self.peaks) });
        }
    }

    /// Returns the best of several measured rates of reading and copying.
    fn rates(&mut self) -> Option<(f64, f64)> {
        const TRIES: usize = 3;
        let (memory, ctx) = (self.memory.as_mut()?, self.ctx);
        let rates = (0..TRIES).map(|_| (memory.read(ctx), memory.copy(ctx)));
        Some(rates.fold((0.0, 0.0), |best: (f64, f64), now| (best.0.max(now.0), best.1.max(now.1))))
    }
}
