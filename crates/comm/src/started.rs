//! A communication between its start and its end.

use crate::CommError;

/// A started communication of an implementation, which [`Pending`] wraps. Dropping it before its end first makes sure
/// that nobody uses its memory any more.
pub trait RawPending: Send {
    /// Makes progress without waiting. Returns whether the communication has ended.
    ///
    /// # Errors
    /// Fails as [`Pending::finish`] does.
    fn is_finished(&mut self) -> Result<bool, CommError>;

    /// Waits for the end.
    ///
    /// # Errors
    /// Fails as [`Pending::finish`] does.
    fn finish(&mut self) -> Result<(), CommError>;

    /// Waits for the end as one who may wait for hours: with pauses, so that a core is left to others.
    ///
    /// # Errors
    /// Fails as [`Pending::finish`] does.
    fn finish_idle(&mut self) -> Result<(), CommError> {
        self.finish()
    }
}

/// A started communication that owns its memory. [`finish`](Self::finish) returns the buffers `B`.
#[must_use = "a started communication is finished, or the other ranks wait for it"]
pub struct Pending<B> {
    // Dropped before the buffers: fields are dropped in this order.
    raw: Box<dyn RawPending>,
    buffers: B,
}

impl<B> Pending<B> {
    /// # Safety
    /// `raw` uses no memory but that of `buffers`, which does not move when they are moved.
    pub(crate) unsafe fn new(raw: Box<dyn RawPending>, buffers: B) -> Self {
        Self { raw, buffers }
    }

    /// Makes progress without waiting. Returns whether the communication has ended.
    ///
    /// # Errors
    /// Fails as [`finish`](Self::finish) does.
    pub fn is_finished(&mut self) -> Result<bool, CommError> {
        self.raw.is_finished()
    }

    /// Waits for the end and returns the buffers, sent and received.
    ///
    /// # Errors
    /// Returns a [`CommError`] if a rank died, hangs or made a different call.
    pub fn finish(self) -> Result<B, CommError> {
        self.end_by(|raw| raw.finish())
    }

    /// Waits for the end as [`finish`](Self::finish) does, but with pauses of up to a millisecond once it has waited
    /// for a while, so that a rank without work leaves its core to others.
    ///
    /// # Errors
    /// Fails as [`finish`](Self::finish) does.
    pub fn finish_idle(self) -> Result<B, CommError> {
        self.end_by(|raw| raw.finish_idle())
    }

    fn end_by(self, wait: impl FnOnce(&mut dyn RawPending) -> Result<(), CommError>) -> Result<B, CommError> {
        let Self { mut raw, buffers } = self;
        let result = wait(&mut *raw);
        drop(raw);
        result.map(|()| buffers)
    }
}
