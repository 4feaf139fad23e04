//! Timing of operations, and the tables that `cargo bench` and `moeworks bench` print.
//!
//! Each case is held against the limit that binds it: the rate of products on registers alone, or those of reading and copying
//! memory, whichever takes longer.

mod products;
mod vector;

use std::time::Instant;

use moeworks_tensor::DType;

use crate::Context;
use crate::experts::ExpertRows;
use crate::peak::{Memory, Peaks};

/// The shortest of a number of runs, in seconds.
pub fn best_seconds(tries: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..tries).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// The shortest of as many runs as take a quarter of a second, at least three, in seconds; a run is over when the device is done.
pub fn best_seconds_of_many(ctx: &Context, mut run: impl FnMut()) -> f64 {
    let mut run = || {
        run();
        ctx.wait();
    };
    let start = Instant::now();
    let mut best = best_seconds(3, &mut run);
    while start.elapsed().as_secs_f64() < 0.25 {
        best = best.min(best_seconds(1, &mut run));
    }
    best
}

/// What a case has to do at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Floating-point operations of one run; a multiply-add counts as two.
    pub flops: f64,
    /// Bytes of operands and results, each read or written once.
    pub bytes: f64,
    /// Those of them that are written.
    pub written: f64,
    /// What is multiplied.
    pub dtype: DType,
}

impl Cost {
    /// Of an operation that only moves memory: so many bytes that are read, and that are written.
    #[must_use]
    pub fn of_bytes(read: usize, written: usize) -> Self {
        Self { flops: 0.0, bytes: (read + written) as f64, written: written as f64, dtype: DType::F32 }
    }

    /// That of several runs, or of a part of one.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { flops: factor * self.flops, bytes: factor * self.bytes, written: factor * self.written, ..self }
    }

    /// The seconds that the machine's rates leave for it, and the rate that binds. As many bytes are read as written at the rate of
    /// copying; what is left of either, at that of reading.
    #[must_use]
    pub fn limit(&self, peaks: &Peaks) -> (f64, Limit) {
        let copied = 2.0 * self.written.min(self.bytes - self.written);
        let copying = copied / peaks.copy_bytes_per_s.unwrap_or(peaks.read_bytes_per_s);
        let memory = copying + (self.bytes - copied) / peaks.read_bytes_per_s;
        let products = self.flops / peaks.flops(self.dtype);
        if memory > products { (memory, Limit::Memory) } else { (products, Limit::Products) }
    }
}

/// Both, one after the other; the first says what is multiplied.
impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (bytes, written) = (self.bytes + other.bytes, self.written + other.written);
        Self { flops: self.flops + other.flops, bytes, written, ..self }
    }
}

/// What binds a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The peak of the type's products.
    Products,
    /// The rates of reading and copying memory. What lies in caches can be quicker than that.
    Memory,
}

impl Limit {
    /// In a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Products => "peak",
            Self::Memory => "memory",
        }
    }
}

/// The time of one case.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchResult {
    /// What was computed, with its sizes.
    pub name: String,
    /// What it has to do.
    pub cost: Cost,
    /// The shortest run, or the median where that is said.
    pub seconds: f64,
    /// The least seconds by the measured rates.
    pub least_seconds: f64,
    /// Which of them binds.
    pub limit: Limit,
}

impl BenchResult {
    /// A case that took `seconds`, on a machine with these rates.
    #[must_use]
    pub fn new(name: String, cost: Cost, seconds: f64, peaks: &Peaks) -> Self {
        let (least_seconds, limit) = cost.limit(peaks);
        Self { name, cost, seconds, least_seconds, limit }
    }

    /// Operations a second.
    #[must_use]
    pub fn flops_per_s(&self) -> f64 {
        self.cost.flops / self.seconds
    }

    /// Bytes a second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.cost.bytes / self.seconds
    }

    /// The part of what the binding rate allows.
    #[must_use]
    pub fn share_of_limit(&self) -> f64 {
        self.least_seconds / self.seconds
    }
}

/// Times products of linear layers and experts with weights of a type, attention, norms, the optimizer and what else there is, and
/// hands each result to `report` as it comes. Only cases whose name contains `filter` are run. Takes some twenty seconds.
pub fn bench_cases(ctx: &Context, peaks: &Peaks, dtype: DType, filter: &str, mut report: impl FnMut(&BenchResult)) {
    let memory = ctx.gpu().is_none().then(Memory::default);
    let mut timing = Timing { ctx, peaks: *peaks, memory, filter, report: &mut report };
    products::bench(&mut timing, dtype);
    vector::bench(&mut timing, dtype);
}

/// What is done with each case.
struct Timing<'a> {
    ctx: &'a Context,
    peaks: Peaks,
    /// Where its rates are to be measured anew for each case that it may bind.
    memory: Option<Memory>,
    filter: &'a str,
    report: &'a mut dyn FnMut(&BenchResult),
}

impl Timing<'_> {
    fn wants(&self, name: &str) -> bool {
        name.contains(self.filter)
    }

    /// Whether there is any use in making what the cases of these names take.
    fn wants_any(&self, names: &[impl AsRef<str>]) -> bool {
        names.iter().any(|name| self.wants(name.as_ref()))
    }

    fn case(&mut self, name: String, cost: Cost, run: impl FnMut()) {
        if self.wants(&name) {
            let before = self.rates();
            let seconds = best_seconds_of_many(self.ctx, run);
            if let Some((before, after)) = before.zip(self.rates()) {
                self.peaks.read_bytes_per_s = before.0.max(after.0);
                self.peaks.copy_bytes_per_s = Some(before.1.max(after.1));
            }
            (self.report)(&BenchResult::new(name, cost, seconds, &self.peaks));
        }
    }

    /// The best of a few rates of reading and copying: it is another every few seconds where machines are shared.
    fn rates(&mut self) -> Option<(f64, f64)> {
        const TRIES: usize = 3;
        let (memory, ctx) = (self.memory.as_mut()?, self.ctx);
        let rates = (0..TRIES).map(|_| (memory.read(ctx), memory.copy(ctx)));
        Some(rates.fold((0.0, 0.0), |best: (f64, f64), now| (best.0.max(now.0), best.1.max(now.1))))
    }
}

/// Rows of experts for tokens that have K different experts each, with equal weights.
pub struct Choices {
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    token_rows: Vec<u32>,
    num_choices: usize,
}

impl Choices {
    /// `expert_of(token, choice)` for T tokens, E experts and K choices; the choices of a token must differ.
    pub fn new((t, e, k): (usize, usize, usize), expert_of: impl Fn(usize, usize) -> usize) -> Self {
        let (mut offsets, mut tokens, mut token_rows) = (vec![0], Vec::new(), vec![0; t * k]);
        for expert in 0..e {
            for token in 0..t {
                if let Some(choice) = (0..k).find(|&choice| expert_of(token, choice) == expert) {
                    token_rows[token * k + choice] = tokens.len() as u32;
                    tokens.push(token as u32);
                }
            }
            offsets.push(tokens.len() as u32);
        }
        let weights = vec![1.0 / k as f32; tokens.len()];
        Self { offsets, tokens, weights, token_rows, num_choices: k }
    }

    /// Experts that have rows.
    #[must_use]
    pub fn num_used(&self) -> usize {
        self.offsets.windows(2).filter(|pair| pair[0] < pair[1]).count()
    }

    /// As operations on experts take them.
    #[must_use]
    pub fn rows(&self) -> ExpertRows<'_> {
        ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.token_rows, self.num_choices)
    }
}
