//! A communicator that is as slow as given links, to try decisions for clusters on one machine.
//!
//! A rank has one line out and one line in, or two of each: one for ranks of its node and one for other nodes. A
//! message occupies a line for its latency and its bytes, one message after the other, as on a network card;
//! meanwhile the rank can compute.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use moeworks_plan::{LinkClass, Links};

use crate::communicator::forward_to_inner;
use crate::operation::{Call, Memory, Operation};
use crate::started::RawPending;
use crate::{CommError, Communicator};

/// The outgoing and incoming line of a rank.
#[derive(Debug, Default)]
pub struct Lines {
    state: Mutex<[Line; 2]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    busy_until: Option<Instant>,
    seconds: f64,
}

impl Lines {
    /// Returns the seconds that outgoing and incoming messages have occupied so far.
    #[must_use]
    pub fn seconds(&self) -> [f64; 2] {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).map(|line| line.seconds)
    }

    /// Occupies each line for its seconds, from when it is free. Returns the time when both are free again.
    fn occupy(&self, seconds: [f64; 2]) -> Instant {
        let now = Instant::now();
        let mut lines = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut end = now;
        for (line, seconds) in lines.iter_mut().zip(seconds).filter(|(_, seconds)| *seconds > 0.0) {
            let over = line.busy_until.map_or(now, |busy| busy.max(now)) + Duration::from_secs_f64(seconds);
            *line = Line { busy_until: Some(over), seconds: line.seconds + seconds };
            end = end.max(over);
        }
        end
    }
}

/// The links of throttled communicators, which may change while these are in use.
#[derive(Clone, Debug)]
pub struct SharedLinks(Arc<Mutex<Links>>);

impl SharedLinks {
    /// Returns the links as they are now.
    #[must_use]
    pub fn get(&self) -> Links {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the links for the messages that begin from now on.
    pub fn set(&self, links: Links) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = links;
    }
}

/// A communicator whose operations take at least as long as on the given links.
pub struct Throttled {
    inner: Box<dyn Communicator>,
    links: SharedLinks,
    lines: Arc<Lines>,
    /// The lines to ranks of the same node, if they are others than `lines`.
    node_lines: Option<Arc<Lines>>,
}

impl Throttled {
    /// Slows `inner` down to `links`. Groups split from it share the rank's lines.
    #[must_use]
    pub fn new(inner: Box<dyn Communicator>, links: Links) -> Self {
        Self { inner, links: SharedLinks(Arc::new(Mutex::new(links))), lines: Arc::default(), node_lines: None }
    }

    /// Returns the links, to change them for this communicator and those that are split from it.
    #[must_use]
    pub fn links(&self) -> SharedLinks {
        self.links.clone()
    }

    /// Returns the lines to ranks of the same node, if they are others than those to other nodes.
    #[must_use]
    pub fn node_lines(&self) -> Option<Arc<Lines>> {
        self.node_lines.clone()
    }

    /// Gives messages to ranks of the same node lines of their own, as where NVLink lies beside a network card.
    #[must_use]
    pub fn with_node_lines(self) -> Self {
        Self { node_lines: Some(Arc::default()), ..self }
    }

    /// Returns the rank's lines, to read how long they were occupied: those to other nodes, where there are two.
    #[must_use]
    pub fn lines(&self) -> Arc<Lines> {
        Arc::clone(&self.lines)
    }

    /// Occupies the lines for an operation that starts now, and returns its end.
    fn end_of(&self, operation: &Operation<'_>, memory: &Memory) -> Instant {
        let own = Place::new(&*self.inner);
        let seconds = |link: LinkClass| {
            [
                self.seconds(link, |rank| operation.bytes_to(rank, own, memory)),
                self.seconds(link, |rank| operation.bytes_from(rank, own, memory)),
            ]
        };
        let (near, far) = (seconds(LinkClass::Node), seconds(LinkClass::Cluster));
        match &self.node_lines {
            Some(node_lines) => node_lines.occupy(near).max(self.lines.occupy(far)),
            None => self.lines.occupy([near[0] + far[0], near[1] + far[1]]),
        }
    }

    /// Returns the seconds of the messages over one class of links to, or from, all other ranks.
    fn seconds(&self, class: LinkClass, bytes: impl Fn(usize) -> Option<usize>) -> f64 {
        let (nodes, own, link) = (self.inner.nodes(), self.inner.rank(), self.links.get().of(class));
        // An empty message is not sent.
        let message = |rank| bytes(rank).filter(|&bytes| bytes > 0).map_or(0.0, |bytes| link.seconds(1, bytes as f64));
        let is_of_class = |&rank: &usize| rank != own && (nodes[rank] == nodes[own]) == (class == LinkClass::Node);
        (0..nodes.len()).filter(is_of_class).map(message).sum()
    }
}

/// Sleeps until shortly before `end`, then yields until it has come.
fn wait_until(end: Instant) {
    const AWAKE: Duration = Duration::from_micros(200);
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if left > AWAKE { thread::sleep(left - AWAKE) } else { thread::yield_now() }
    }
}

impl Communicator for Throttled {
    forward_to_inner!();

    unsafe fn start(&self, operation: &Operation<'_>, memory: Memory) -> Result<Box<dyn RawPending>, CommError> {
        let end = self.end_of(operation, &memory);
        // SAFETY: the caller's promise.
        let raw = unsafe { self.inner.start(operation, memory) }?;
        Ok(Box::new(Delayed { raw, end }))
    }

    unsafe fn run(&self, operation: &Operation<'_>, memory: Memory) -> Result<(), CommError> {
        let end = self.end_of(operation, &memory);
        // SAFETY: the caller's promise.
        unsafe { self.inner.run(operation, memory) }?;
        wait_until(end);
        Ok(())
    }

    fn split(&self, color: Option<u32>, key: usize) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let part = self.inner.split(color, key)?;
        let throttled =
            |inner| Self { inner, links: self.links(), lines: self.lines(), node_lines: self.node_lines.clone() };
        Ok(part.map(|inner| Box::new(throttled(inner)) as Box<dyn Communicator>))
    }
}

struct Delayed {
    raw: Box<dyn RawPending>,
    end: Instant,
}

impl RawPending for Delayed {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        Ok(self.raw.is_finished()? && Instant::now() >= self.end)
    }

    fn finish(&mut self) -> Result<(), CommError> {
        self.raw.finish()?;
        wait_until(self.end);
        Ok(())
    }
}

/// This rank's place in its group.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Place {
    pub(crate) fn new(comm: &dyn Communicator) -> Self {
        Self { rank: comm.rank(), size: comm.size() }
    }
}

impl Operation<'_> {
    /// Returns the bytes of the message from rank `own` to `rank`; `None` if there is no message. A
    /// reduction counts the pieces that a rank has to give and to pass on.
    pub(crate) fn bytes_to(&self, rank: usize, own: Place, memory: &Memory) -> Option<usize> {
        match self.call {
            Call::AllToAllV | Call::ReduceScatter { .. } => self.send_counts.get(rank).copied(),
            Call::AllGatherV => Some(memory.send_bytes),
            Call::AllReduce { bytes, .. } => Some(2 * bytes / own.size),
            Call::Broadcast { root, bytes } => (root == own.rank).then_some(bytes),
            Call::Send { to, bytes, .. } => (to == rank).then_some(bytes),
            Call::Barrier | Call::Split | Call::Receive { .. } => None,
        }
    }

    /// Returns the bytes of the message from `rank` to rank `own`; `None` if there is no message.
    fn bytes_from(&self, rank: usize, own: Place, memory: &Memory) -> Option<usize> {
        match self.call {
            Call::AllToAllV | Call::AllGatherV => self.recv_counts.get(rank).copied(),
            Call::ReduceScatter { .. } => Some(memory.recv_bytes),
            Call::AllReduce { bytes, .. } => Some(2 * bytes / own.size),
            Call::Broadcast { root, bytes } => (root == rank && root != own.rank).then_some(bytes),
            Call::Receive { from, bytes, .. } => (from == rank).then_some(bytes),
            Call::Barrier | Call::Split | Call::Send { .. } => None,
        }
    }
}
