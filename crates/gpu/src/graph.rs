//! Graphs of steps that are repeated, such as a token of decoding: a step's launches are captured and go to the GPU
//! together, from the second time on as a graph.
//!
//! Launching hundreds of short kernels one by one costs the host, and the GPU between two of them, as much time as
//! some of the kernels take. A graph is launched at once; before that, kernels whose arguments or blocks differ from
//! the last time get the new ones (CUDA driver API, "Graph Management").
//!
//! While a step is captured, memory that it frees is retained, because kernels that are still to be launched may use
//! it. Uploads go into memory that no earlier kernel of the step knows, so they need not wait; reading a result
//! launches the kernels before it. A long step becomes several graphs, so that the GPU is busy while the host puts
//! the rest together.
//!
//! The last captured launch can be replaced by one that does its work as well, if it was declared as [`Pending`]: for
//! example a norm by the product of its result. A kernel of few rows takes less time than the next launch.

use moeworks_tensor::DeviceBlock;

use crate::backend::Backend;
use crate::traffic::Meter;
use crate::{Arg, GpuError, Launch, Pending, Source, nvidia};

/// The fewest launches that are worth a graph.
const MIN_LAUNCHES: usize = 8;
/// The most launches of a graph. Kernels do not overlap between two graphs, and the host needs as long to put a
/// hundred launches together as the GPU for some ten of them.
const MAX_LAUNCHES: usize = 96;
/// The most launches of a step's first graph, for which the GPU waits. Each graph after it has twice as many as the
/// one before, so that the GPU is busy for longer than the host needs for the next one. (H100: 12 and then 96 left
/// the GPU idle for a tenth of a token of OLMoE.)
const MAX_FIRST_LAUNCHES: usize = 12;
/// The most graphs that are kept. A step has one for each stretch between results that the host reads, and for so
/// many launches. With an expert cache each layer is a stretch; if fewer graphs were kept than a step has stretches,
/// none would ever be reused.
const MAX_GRAPHS: usize = 512;

/// A launch that owns everything it is made of.
#[derive(Clone, PartialEq)]
pub struct CapturedLaunch {
    source: &'static Source,
    kernel: String,
    grid: [usize; 3],
    threads: usize,
    shared: usize,
    /// The arguments in order.
    pub args: Vec<Arg<'static>>,
}

impl CapturedLaunch {
    /// The caller ensures that the memory behind the arguments outlives the last use of the result.
    fn new(launch: &Launch<'_>) -> Self {
        Self {
            source: launch.source,
            kernel: launch.kernel.to_string(),
            grid: launch.grid,
            threads: launch.threads,
            shared: launch.shared,
            args: launch.args.iter().map(|arg| arg.detached()).collect(),
        }
    }

    /// The launch as it was captured.
    #[must_use]
    pub fn launch(&self) -> Launch<'_> {
        Launch {
            source: self.source,
            kernel: &self.kernel,
            grid: self.grid,
            threads: self.threads,
            shared: self.shared,
            args: &self.args,
        }
    }

    /// Returns whether a graph's node for `self` can become one for `other`.
    fn has_kernel_of(&self, other: &Self) -> bool {
        self.kernel == other.kernel && self.threads == other.threads && self.shared == other.shared
    }
}

/// Launches that were captured before, with their last arguments, and their graph if they were captured twice.
struct Known {
    /// The index among the graphs of its step.
    place: usize,
    launches: Vec<CapturedLaunch>,
    graph: Option<Graph>,
}

/// A graph of a backend.
pub(crate) enum Graph {
    Nvidia(nvidia::Graph),
    /// The launches with their last arguments.
    Emulated(Vec<CapturedLaunch>),
}

/// The step that is being captured, and the graphs of earlier ones.
#[derive(Default)]
pub(crate) struct Capture {
    depth: usize,
    /// The number of lists that were launched since the step began. Layers of a model are alike, but each keeps its
    /// arguments from step to step.
    place: usize,
    launches: Vec<CapturedLaunch>,
    /// The operation of each launch, if it may be fused with the next one.
    pending: Vec<Option<Pending<'static>>>,
    freed: Vec<DeviceBlock>,
    /// Earlier launches, the least recently used first.
    known: Vec<Known>,
}

impl Capture {
    /// Captures launches until [`end`](Self::end) was called equally often. Returns whether this is the first call.
    pub(crate) fn begin(&mut self) -> bool {
        let is_first = self.depth == 0;
        if is_first {
            self.place = 0;
        }
        self.depth += 1;
        is_first
    }

    pub(crate) fn end(&mut self) {
        self.depth -= 1;
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.depth > 0
    }

    /// Returns whether enough launches were captured to go to the GPU at once.
    pub(crate) fn is_full(&self) -> bool {
        self.launches.len() >= (MAX_FIRST_LAUNCHES << self.place.min(MAX_LAUNCHES.ilog2() as usize)).min(MAX_LAUNCHES)
    }

    /// Captures the launch if a step is being captured, with its operation if that may be fused with the next one.
    /// Returns whether it did.
    pub(crate) fn captures(&mut self, launch: &Launch<'_>, pending: Option<Pending<'_>>) -> bool {
        if self.depth > 0 {
            self.launches.push(CapturedLaunch::new(launch));
            self.pending.push(pending.map(Pending::detached));
        }
        self.depth > 0
    }

    /// Removes the last captured launch if `take` returns something for its operation; its work is left to the
    /// caller.
    pub(crate) fn fuse_with_last<R>(
        &mut self,
        take: impl FnOnce(Pending<'static>) -> Option<R>,
    ) -> Option<(R, CapturedLaunch)> {
        let taken = take((*self.pending.last()?)?)?;
        self.pending.pop();
        Some((taken, self.launches.pop()?))
    }

    /// Retains a block until the captured launches that may use it are made. Returns it if there are none.
    pub(crate) fn retain(&mut self, block: DeviceBlock) -> Option<DeviceBlock> {
        if self.launches.is_empty() {
            return Some(block);
        }
        self.freed.push(block);
        None
    }

    /// Makes the captured launches.
    ///
    /// # Safety
    ///
    /// Each launch is one that [`Gpu::launch`](crate::Gpu::launch) may make, and the memory of its arguments was not
    /// freed since.
    pub(crate) unsafe fn flush(&mut self, backend: &Backend, meter: &Meter) -> Result<(), GpuError> {
        let launches = std::mem::take(&mut self.launches);
        self.pending.clear();
        // SAFETY: the caller's promise.
        let result = unsafe { self.run(backend, meter, launches) };
        self.freed.clear();
        result
    }

    /// Drops the captured launches without making them.
    pub(crate) fn discard(&mut self) {
        self.launches.clear();
        self.pending.clear();
        self.freed.clear();
    }

    /// Removes the record of launches that differ from these by arguments and blocks at most.
    fn take_known(&mut self, place: usize, launches: &[CapturedLaunch]) -> Option<Known> {
        let is_same = |known: &Known| {
            (known.place, known.launches.len()) == (place, launches.len())
                && known.launches.iter().zip(launches).all(|(a, b)| a.has_kernel_of(b))
        };
        let index = (launches.len() >= MIN_LAUNCHES).then(|| self.known.iter().position(is_same)).flatten()?;
        Some(self.known.remove(index))
    }

    /// # Safety
    ///
    /// As for [`flush`](Self::flush).
    unsafe fn run(&mut self, backend: &Backend, meter: &Meter, launches: Vec<CapturedLaunch>) -> Result<(), GpuError> {
        let place = self.place;
        self.place += usize::from(!launches.is_empty());
        let graph = match self.take_known(place, &launches) {
            Some(Known { graph: Some(mut graph), launches: last, .. }) => {
                let changed = last.iter().zip(&launches).enumerate().filter(|(_, (last, launch))| last != launch);
                let all = changed.into_iter().try_for_each(|(index, (_, launch))| graph.change(backend, index, launch));
                all.is_ok().then_some(graph)
            }
            // Without a graph the launches are made one by one.
            Some(Known { graph: None, .. }) => backend.graph(&launches).ok(),
            None => None,
        };
        // SAFETY: the caller's promise; the graph has the arguments of these launches.
        unsafe {
            match &graph {
                Some(graph) => {
                    meter.launched_graph();
                    backend.run_graph(graph)?;
                }
                None => launches.iter().try_for_each(|captured| {
                    meter.launched();
                    backend.launch(&captured.launch())
                })?,
            }
        }
        if launches.len() >= MIN_LAUNCHES {
            if self.known.len() == MAX_GRAPHS {
                self.known.remove(0);
            }
            self.known.push(Known { place, launches, graph });
        }
        Ok(())
    }
}

impl Graph {
    /// Gives a kernel of the graph other blocks and arguments.
    fn change(&mut self, backend: &Backend, index: usize, to: &CapturedLaunch) -> Result<(), GpuError> {
        match (self, backend) {
            (Self::Nvidia(graph), Backend::Nvidia(device)) => device.change(graph, index, to),
            (Self::Emulated(launches), _) => {
                launches[index] = to.clone();
                Ok(())
            }
            (Self::Nvidia(_), Backend::Emulated(_)) => unreachable!("a graph is used by the GPU that made it"),
        }
    }
}
