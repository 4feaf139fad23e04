//! A meter of a rank's communications and named pieces of work, as totals and as spans of time.
//!
//! [`Metered`] is a communicator that counts the traffic through it. A communication is *in flight* from its start to
//! its end; the rank is *blocked* in it while it waits and can do nothing else. Time in flight without blocking is
//! hidden under work.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::forward_to_inner;
use crate::number::Reduce;
use crate::operation::{Call, Memory, Operation};
use crate::started::RawPending;
use crate::throttle::Place;
use crate::{CommError, Communicator};

/// The most spans that are kept, at some hundred bytes each.
const MAX_SPANS: usize = 1 << 18;

/// A stretch of a rank's time.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The name of the communication or work.
    pub name: &'static str,
    /// Time from the meter's start to the span's start.
    pub start: Duration,
    /// Its length.
    pub length: Duration,
    /// Bytes sent, for a communication.
    pub bytes: u64,
    /// True if this is a communication in flight, during which the rank may have done other work.
    pub is_in_flight: bool,
}

/// Totals since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Seconds that the rank was blocked in communications, waiting for other ranks included.
    pub blocked_s: f64,
    /// Bytes sent to ranks of the same node.
    pub node_bytes: u64,
    /// Bytes sent to ranks of other nodes.
    pub cluster_bytes: u64,
}

/// A rank's meter. It is cheap to share, and keeps only totals unless spans are asked for.
#[derive(Debug)]
pub struct Meter {
    begin: Instant,
    keeps_spans: bool,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    totals: Totals,
    spans: Vec<Span>,
    /// Spans that were dropped because the list was full.
    num_left_out: u64,
}

/// A named stretch of time, before it becomes a [`Span`].
struct Interval {
    name: &'static str,
    start: Instant,
    end: Instant,
}

impl Meter {
    /// Makes a meter that starts now. With `keeps_spans` it also records up to 262,144 spans.
    #[must_use]
    pub fn new(keeps_spans: bool) -> Self {
        Self { begin: Instant::now(), keeps_spans, log: Mutex::default() }
    }

    /// Returns the totals since the last call and resets them.
    pub fn take_totals(&self) -> Totals {
        std::mem::take(&mut self.log().totals)
    }

    /// Returns the spans since the last call, in the order of their ends.
    pub fn take_spans(&self) -> Vec<Span> {
        std::mem::take(&mut self.log().spans)
    }

    /// Returns the number of spans that were dropped because the list was full.
    pub fn num_left_out(&self) -> u64 {
        self.log().num_left_out
    }

    /// Runs `work` and records it under `name`.
    pub fn time<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.record(name, start);
        result
    }

    /// Records the time from `start` until now under `name`.
    pub fn record(&self, name: &'static str, start: Instant) {
        self.add(Interval { name, start, end: Instant::now() }, 0, false);
    }

    fn add(&self, interval: Interval, bytes: u64, is_in_flight: bool) {
        if !self.keeps_spans {
            return;
        }
        let mut log = self.log();
        if log.spans.len() < MAX_SPANS {
            let Interval { name, start, end } = interval;
            let (start, length) = (start.saturating_duration_since(self.begin), end.duration_since(start));
            log.spans.push(Span { name, start, length, bytes, is_in_flight });
        } else {
            log.num_left_out += 1;
        }
    }

    fn sent(&self, [node_bytes, cluster_bytes]: [u64; 2]) {
        let totals = &mut self.log().totals;
        totals.node_bytes += node_bytes;
        totals.cluster_bytes += cluster_bytes;
    }

    /// Counts the time from `start` until now as blocked.
    fn record_blocked(&self, start: Instant) {
        self.log().totals.blocked_s += start.elapsed().as_secs_f64();
    }

    fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A communicator that counts the traffic through it and through the groups split from it.
pub struct Metered {
    inner: Box<dyn Communicator>,
    meter: Arc<Meter>,
}

impl Metered {
    /// Counts the traffic through `inner` in `meter`.
    #[must_use]
    pub fn new(inner: Box<dyn Communicator>, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }

    /// Returns the bytes that this rank sends in an operation: within the node, and to other nodes.
    fn bytes_of(&self, operation: &Operation<'_>, memory: &Memory) -> [u64; 2] {
        let (own, nodes) = (Place::new(&*self.inner), self.inner.nodes());
        let mut sent = [0; 2];
        for rank in (0..own.size).filter(|&rank| rank != own.rank) {
            let bytes = operation.bytes_to(rank, own, memory).unwrap_or(0);
            sent[usize::from(nodes[rank] != nodes[own.rank])] += bytes as u64;
        }
        sent
    }
}

fn name(call: Call) -> &'static str {
    match call {
        Call::Barrier => "barrier",
        Call::Split => "split",
        Call::Broadcast { .. } => "broadcast",
        Call::AllGatherV => "all-gather",
        Call::AllToAllV => "all-to-all",
        Call::ReduceScatter { .. } => "reduce-scatter",
        Call::AllReduce { reduce: Reduce::Sum, .. } => "all-reduce",
        Call::AllReduce { .. } => "agree",
        Call::Send { .. } => "send",
        Call::Receive { .. } => "receive",
    }
}

impl Communicator for Metered {
    forward_to_inner!();

    unsafe fn start(&self, operation: &Operation<'_>, memory: Memory) -> Result<Box<dyn RawPending>, CommError> {
        let sent = self.bytes_of(operation, &memory);
        let start = Instant::now();
        // SAFETY: the caller's promise.
        let raw = unsafe { self.inner.start(operation, memory) }?;
        self.meter.record_blocked(start);
        self.meter.sent(sent);
        let (meter, bytes) = (Arc::clone(&self.meter), sent[0] + sent[1]);
        Ok(Box::new(MeteredPending { raw, meter, name: name(operation.call), start, bytes, end: None }))
    }

    unsafe fn run(&self, operation: &Operation<'_>, memory: Memory) -> Result<(), CommError> {
        let sent = self.bytes_of(operation, &memory);
        let start = Instant::now();
        // SAFETY: the caller's promise.
        let result = unsafe { self.inner.run(operation, memory) };
        self.meter.record_blocked(start);
        self.meter.sent(sent);
        let interval = Interval { name: name(operation.call), start, end: Instant::now() };
        self.meter.add(interval, sent[0] + sent[1], false);
        result
    }

    fn split(&self, color: Option<u32>, key: usize) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let part = self.inner.split(color, key)?;
        Ok(part.map(|inner| Box::new(Self { inner, meter: Arc::clone(&self.meter) }) as Box<dyn Communicator>))
    }
}

struct MeteredPending {
    raw: Box<dyn RawPending>,
    meter: Arc<Meter>,
    name: &'static str,
    start: Instant,
    bytes: u64,
    /// The time at which it was first seen to have ended.
    end: Option<Instant>,
}

impl MeteredPending {
    fn note_end(&mut self) {
        if self.end.is_none() {
            let end = Instant::now();
            self.end = Some(end);
            self.meter.add(Interval { name: self.name, start: self.start, end }, self.bytes, true);
        }
    }
}

impl RawPending for MeteredPending {
    fn is_finished(&mut self) -> Result<bool, CommError> {
        let start = Instant::now();
        let is_finished = self.raw.is_finished()?;
        self.meter.record_blocked(start);
        if is_finished {
            self.note_end();
        }
        Ok(is_finished)
    }

    fn finish(&mut self) -> Result<(), CommError> {
        let start = Instant::now();
        self.raw.finish()?;
        self.meter.record_blocked(start);
        self.meter.add(Interval { name: self.name, start, end: Instant::now() }, self.bytes, false);
        self.note_end();
        Ok(())
    }
}
