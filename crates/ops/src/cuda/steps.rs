//! Steps that come again and again, such as a token of decoding: their launches are collected and go to the GPU together, from the
//! second time on as one graph.
//!
//! Launching hundreds of short kernels one by one costs the host, and the GPU between any two of them, as much time as some of the
//! kernels take. A graph is launched at once; before that, kernels whose arguments or blocks are others than last time get the new
//! ones (CUDA driver API, "Graph Management").
//!
//! While a step is collected, nothing that it frees is given back: kernels that are still to be launched may use it. What is
//! uploaded meanwhile goes into memory that no earlier kernel of the step knows, so it need not wait; whoever reads results makes the
//! kernels before them go first. A long step goes in several graphs, so that the GPU is at work while the host puts the rest together.
//!
//! A launch that was collected last can be taken back by one that does the same beside its own work: a norm by the product of what is
//! normed. A kernel of few rows is over sooner than the next one begins.

use moeworks_tensor::DeviceBlock;

use super::traffic::Meter;
use super::{Arg, Backend, GpuError, Launch, Source};

/// A step of fewer launches is not worth a graph.
const MIN_NODES: usize = 8;
/// Launches of which a graph has no more: between two graphs kernels do not overlap, and putting a hundred launches together takes the
/// host as long as the GPU some ten of them.
const MAX_NODES: usize = 96;
/// The same of a step's first graph: until it goes to the GPU, that waits for the host. Each graph after it has twice as many as the one
/// before, which takes the GPU longer than the host needs to put them together. (An H100: 12 and then 96 left the GPU without work for a
/// tenth of a token of OLMoE.)
const MAX_FIRST_NODES: usize = 12;
/// Graphs that are kept at most: a step has one for each stretch between results that the host reads, and for so many launches. Where
/// experts have a room, each layer is a stretch; with fewer graphs than a step has stretches none would ever be used again.
const MAX_GRAPHS: usize = 512;

/// A launch that owns what it is made of.
#[derive(Clone, PartialEq)]
pub(crate) struct Node {
    source: &'static Source,
    pub(crate) kernel: String,
    pub(crate) grid: [usize; 3],
    threads: usize,
    shared: usize,
    pub(crate) args: Vec<Arg<'static>>,
}

impl Node {
    /// The caller sees to it that what the arguments point to outlives the node's last launch.
    fn of(launch: &Launch<'_>) -> Self {
        Self {
            source: launch.source,
            kernel: launch.kernel.to_string(),
            grid: launch.grid,
            threads: launch.threads,
            shared: launch.shared,
            args: launch.args.iter().map(|arg| arg.detached()).collect(),
        }
    }

    pub(crate) fn launch(&self) -> Launch<'_> {
        Launch {
            source: self.source,
            kernel: &self.kernel,
            grid: self.grid,
            threads: self.threads,
            shared: self.shared,
            args: &self.args,
        }
    }

    /// Whether a graph's node for `self` can become one for `other`.
    fn has_kernel_of(&self, other: &Self) -> bool {
        self.kernel == other.kernel && self.threads == other.threads && self.shared == other.shared
    }
}

/// A list of launches that was seen before, as it was last, and its graph if it was seen twice.
struct Known {
    /// Which of its step's.
    place: usize,
    nodes: Vec<Node>,
    graph: Option<Graph>,
}

/// A graph of a backend.
pub(super) enum Graph {
    Nvidia(super::nvidia::Graph),
    /// The launches as they were last given.
    Emulated(Vec<Node>),
}

/// What is collected, and what is known.
#[derive(Default)]
pub(super) struct Steps {
    depth: usize,
    /// Lists that were launched since the step began: layers of a model are alike, but each keeps its arguments from step to step.
    place: usize,
    nodes: Vec<Node>,
    freed: Vec<DeviceBlock>,
    /// The one that was used longest ago first.
    known: Vec<Known>,
}

impl Steps {
    /// From here on launches are collected, until as many ends as beginnings have come. Whether this is the first beginning.
    pub(super) fn begin(&mut self) -> bool {
        let is_first = self.depth == 0;
        if is_first {
            self.place = 0;
        }
        self.depth += 1;
        is_first
    }

    pub(super) fn end(&mut self) {
        self.depth -= 1;
    }

    /// Whether launches are kept for later.
    pub(super) fn is_collecting(&self) -> bool {
        self.depth > 0
    }

    /// Whether as many launches were collected as go to the GPU at once.
    pub(super) fn is_full(&self) -> bool {
        self.nodes.len() >= (MAX_FIRST_NODES << self.place.min(MAX_NODES.ilog2() as usize)).min(MAX_NODES)
    }

    /// Keeps the launch for later if a step is being collected.
    pub(super) fn collects(&mut self, launch: &Launch<'_>) -> bool {
        if self.depth > 0 {
            self.nodes.push(Node::of(launch));
        }
        self.depth > 0
    }

    /// The last launch that was collected, if it is as `is_wanted` says: it is not made, and what it does is left to who asks for it.
    pub(super) fn take_last(&mut self, is_wanted: impl FnOnce(&Node) -> bool) -> Option<Node> {
        self.nodes.pop_if(|node| is_wanted(node))
    }

    /// Keeps a block until the launches that may use it are made; gives it back if there are none.
    pub(super) fn keeps(&mut self, block: DeviceBlock) -> Option<DeviceBlock> {
        if self.nodes.is_empty() {
            return Some(block);
        }
        self.freed.push(block);
        None
    }

    /// Makes the launches that were collected.
    ///
    /// # Safety
    ///
    /// Each launch is one that [`Gpu::launch`](super::Gpu::launch) may make, and the memory of its arguments was not given back since.
    pub(super) unsafe fn flush(&mut self, backend: &Backend, meter: &Meter) -> Result<(), GpuError> {
        let nodes = std::mem::take(&mut self.nodes);
        // SAFETY: the caller's promise.
        let result = unsafe { self.run((backend, meter), nodes) };
        self.freed.clear();
        result
    }

    /// What was collected is of no use any more.
    pub(super) fn forget(&mut self) {
        self.nodes.clear();
        self.freed.clear();
    }

    /// # Safety
    ///
    /// As of [`flush`](Self::flush).
    unsafe fn run(&mut self, (backend, meter): (&Backend, &Meter), nodes: Vec<Node>) -> Result<(), GpuError> {
        let place = self.place;
        self.place += usize::from(!nodes.is_empty());
        let is_same = |known: &Known| {
            (known.place, known.nodes.len()) == (place, nodes.len())
                && known.nodes.iter().zip(&nodes).all(|(a, b)| a.has_kernel_of(b))
        };
        let known = (nodes.len() >= MIN_NODES).then(|| self.known.iter().position(is_same)).flatten();
        let graph = match known.map(|index| self.known.remove(index)) {
            Some(Known { graph: Some(mut graph), nodes: last, .. }) => {
                let changed = last.iter().zip(&nodes).enumerate().filter(|(_, (last, node))| last != node);
                let all = changed.into_iter().try_for_each(|(index, (_, node))| graph.change(backend, index, node));
                all.is_ok().then_some(graph)
            }
            // Where there can be no graph the launches are made one by one.
            Some(Known { graph: None, .. }) => backend.graph(&nodes).ok(),
            None => None,
        };
        // SAFETY: the caller's promise; the graph has the arguments of these launches.
        unsafe {
            match &graph {
                Some(graph) => {
                    meter.launched_graph();
                    backend.run_graph(graph)?;
                }
                None => nodes.iter().try_for_each(|node| {
                    meter.launched();
                    backend.launch(&node.launch())
                })?,
            }
        }
        if nodes.len() >= MIN_NODES {
            if self.known.len() == MAX_GRAPHS {
                self.known.remove(0);
            }
            self.known.push(Known { place, nodes, graph });
        }
        Ok(())
    }
}

impl Graph {
    /// Gives a kernel of the graph other blocks and arguments.
    fn change(&mut self, backend: &Backend, index: usize, node: &Node) -> Result<(), GpuError> {
        match (self, backend) {
            (Self::Nvidia(graph), Backend::Nvidia(device)) => device.change(graph, index, node),
            (Self::Emulated(nodes), _) => {
                nodes[index] = node.clone();
                Ok(())
            }
            (Self::Nvidia(_), Backend::Emulated(_)) => unreachable!("a graph is used by the GPU that made it"),
        }
    }
}
