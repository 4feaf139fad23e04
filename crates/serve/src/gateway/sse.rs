//! The events of a stream, of which a client gets whole ones alone.

/// Bytes of an event that did not end, at most; more are passed on as they are.
const MAX_HELD: usize = 4 << 20;

/// The end of a stream, as OpenAI's clients know it.
const DONE: &[u8] = b"data: [DONE]";

/// Holds back an event until it is whole, so that one that breaks off is never seen.
#[derive(Debug, Default)]
pub(super) struct WholeEvents {
    held: Vec<u8>,
    is_done: bool,
}

impl WholeEvents {
    /// Takes bytes in and returns those of events that are whole.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        // The end of an event may lie across two pieces.
        let from = self.held.len().saturating_sub(1);
        self.held.extend_from_slice(bytes);
        let end = self.held[from..].windows(2).rposition(|two| two == b"\n\n").map(|place| from + place + 2);
        let end = end.or((self.held.len() > MAX_HELD).then_some(self.held.len())).unwrap_or(0);
        let whole: Vec<u8> = self.held.drain(..end).collect();
        self.is_done |= whole.windows(DONE.len()).any(|window| window == DONE);
        whole
    }

    /// Returns whether the stream said that it is complete.
    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }
}
