//! The failure of a server whose engine cannot go on.

use std::sync::Arc;

use tokio::sync::watch;

/// Tells a server that its engine cannot go on, as where a rank of the model was lost. All requests are then ended
/// with an error, probes answer with status 503, and the server ends. Clones are the same.
#[derive(Clone, Debug)]
pub struct FailureSignal(Arc<watch::Sender<Option<String>>>);

impl Default for FailureSignal {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }
}

impl FailureSignal {
    /// Tells the server why it cannot go on. Only the first reason counts.
    pub fn fail(&self, why: impl ToString) {
        self.0.send_if_modified(|known| {
            let is_new = known.is_none();
            known.get_or_insert_with(|| why.to_string());
            is_new
        });
    }

    /// Returns why the server cannot go on, if it cannot.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Waits until the server cannot go on, and returns why.
    pub(crate) async fn failed(&self) -> String {
        let mut receiver = self.0.subscribe();
        let reason = receiver.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        // The sender is in `self`.
        reason.unwrap_or_default()
    }
}
