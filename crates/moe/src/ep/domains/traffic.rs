//! The bandwidth that a rank's exchanges see while steps go on, and the time under which experts can be gathered.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use moeworks_plan::LinkClass;

/// The fewest bytes of a message whose time says something about bandwidth.
const FEWEST_BYTES: usize = 1 << 10;

/// The figures of a rank since they were last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SeenTraffic {
    /// The most bytes a second that an exchange inside the node had; 0 without one. The least busy of many exchanges
    /// is nearest to what the link can do.
    pub node_bytes_per_s: f64,
    /// The most bytes a second that an exchange with other nodes had; 0 without one.
    pub cluster_bytes_per_s: f64,
    /// The mean seconds of a training pass before its experts are needed, in which they can be gathered.
    pub hidden_s: f64,
}

/// A rank's collected figures.
#[derive(Debug, Default)]
pub(in crate::ep) struct Traffic {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    seen: SeenTraffic,
    hidden: Duration,
    num_passes: u32,
}

/// The bytes that go to, or come from, ranks of the node and of other nodes, whichever are more.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::ep) struct Bytes {
    pub(in crate::ep) node: usize,
    pub(in crate::ep) cluster: usize,
}

impl Bytes {
    /// Returns the bytes over one class of links.
    pub(in crate::ep) fn of_class(class: LinkClass, bytes: usize) -> Self {
        match class {
            LinkClass::Cluster => Self { node: 0, cluster: bytes },
            _ => Self { node: bytes, cluster: 0 },
        }
    }

    /// Returns the bytes of as many rows as these are, of `row_bytes` each.
    pub(in crate::ep) fn times(self, row_bytes: usize) -> Self {
        Self { node: self.node * row_bytes, cluster: self.cluster * row_bytes }
    }
}

impl Traffic {
    /// Notes an exchange that took `time`. Where it reached other nodes, its time is that of the links to them.
    pub(in crate::ep) fn note(&self, bytes: Bytes, time: Duration) {
        let per_s = |bytes: usize| bytes as f64 / time.as_secs_f64().max(1e-9);
        let mut state = self.lock();
        if bytes.cluster >= FEWEST_BYTES {
            state.seen.cluster_bytes_per_s = state.seen.cluster_bytes_per_s.max(per_s(bytes.cluster));
        } else if bytes.cluster == 0 && bytes.node >= FEWEST_BYTES {
            state.seen.node_bytes_per_s = state.seen.node_bytes_per_s.max(per_s(bytes.node));
        }
    }

    /// Notes the time of a training pass before its experts are needed.
    pub(in crate::ep) fn note_hidden(&self, time: Duration) {
        let mut state = self.lock();
        state.hidden += time;
        state.num_passes += 1;
    }

    pub(in crate::ep) fn take(&self) -> SeenTraffic {
        let State { seen, hidden, num_passes } = std::mem::take(&mut *self.lock());
        SeenTraffic { hidden_s: hidden.as_secs_f64() / f64::from(num_passes.max(1)), ..seen }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
