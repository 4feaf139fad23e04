//! The lines of the log: as text, or an object of JSON each.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Says whether lines are JSON. A process has one log.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Says whether lines are JSON from now on.
pub(crate) fn set_json(is_json: bool) {
    IS_JSON.store(is_json, Ordering::Release);
}

/// Writes the lines of the log.
pub(crate) struct Lines(Format<Full, ()>);

impl Default for Lines {
    fn default() -> Self {
        Self(Format::default().without_time())
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if !IS_JSON.load(Ordering::Acquire) {
            return self.0.format_event(context, writer, event);
        }
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let Fields(mut line) = fields;
        line.insert("time".to_owned(), time.as_secs_f64().into());
        line.insert("level".to_owned(), event.metadata().level().as_str().to_lowercase().into());
        line.insert("target".to_owned(), event.metadata().target().into());
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// The fields of an event.
struct Fields(Map<String, Value>);

impl Fields {
    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value);
    }
}
