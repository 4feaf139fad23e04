//! The log on standard error, with the messages of all crates.
//!
//! A process has one subscriber for the threads of all calls. The first call installs it. Every call sets its filter,
//! and resets it at the end. If the process already has a subscriber of its own, that one is used unchanged.

use std::sync::OnceLock;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry};

use crate::args::TalkArgs;
use crate::{environment, output, terminal};

/// The filter of the subscriber that this library installed; `None` inside if it found another subscriber.
static FILTER: OnceLock<Option<Handle<EnvFilter, Registry>>> = OnceLock::new();

/// The log of a call, which ends when this is dropped.
pub(crate) struct Log(());

impl Log {
    /// Starts the log of a call, for warnings or for the level that `RUST_LOG`, `--quiet` or `--verbose` asks for.
    pub(crate) fn begin(talk: TalkArgs) -> Self {
        let level = match talk {
            TalkArgs { quiet: true, .. } => Some("error"),
            TalkArgs { verbose: true, .. } => Some("info"),
            _ => None,
        };
        let asked = || environment::log_filter().and_then(|filter| EnvFilter::try_new(filter).ok());
        let of_environment = || asked().unwrap_or_else(|| EnvFilter::new("warn"));
        set(level.map_or_else(of_environment, EnvFilter::new));
        Self(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        set(EnvFilter::new("off"));
    }
}

/// Sets the filter; installs the subscriber at the first call.
fn set(filter: EnvFilter) {
    let mut first = Some(filter);
    let handle = FILTER.get_or_init(|| install(first.take().unwrap_or_default()));
    if let (Some(filter), Some(handle)) = (first, handle) {
        // Reloading cannot fail: the subscriber lives as long as the process.
        let _ = handle.reload(filter);
    }
}

fn install(filter: EnvFilter) -> Option<Handle<EnvFilter, Registry>> {
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| output::LogWriter)
        .with_ansi(terminal::stderr_takes_escapes())
        .without_time();
    let installed = tracing_subscriber::registry().with(filter).with(lines).try_init();
    installed.is_ok().then_some(handle)
}
