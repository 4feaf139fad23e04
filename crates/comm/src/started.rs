//! A communication between its start and its end.

use crate::CommError;

/// A started communication of an implementation, below [`Pending`]. Dropped before its end it first makes sure that
/// nobody touches the memory any more.
pub trait RawPending: Send {
    /// Does what can be done without waiting; whether the end is reached.
    ///
    /// # Errors
    /// As [`Pending::finish`].
    fn is_finished(&mut self) -> Result<bool, CommError>;

    /// Waits for the end.
    ///
    /// # Errors
    /// As [`Pending::finish`].
    fn finish(&mut self) -> Result<(), CommError>;
}

/// A started communication that owns its memory: `B` is what [`finish`](Self::finish) gives back.
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

    /// Moves on as far as goes without waiting; whether it is finished.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn is_finished(&mut self) -> Result<bool, CommError> {
        self.raw.is_finished()
    }

    /// Waits for the end and gives the memory back: what was sent and what was received.
    ///
    /// # Errors
    /// [`CommError`]: a rank died, hangs, or called something else.
    pub fn finish(self) -> Result<B, CommError> {
        let Self { mut raw, buffers } = self;
        let result = raw.finish();
        drop(raw);
        result.map(|()| buffers)
    }
}
