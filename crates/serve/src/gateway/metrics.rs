//! Metrics of a gateway in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use super::replicas::Replicas;

/// The figures of a gateway.
#[derive(Debug)]
pub(super) struct Metrics {
    prefix: String,
    replicas: Vec<ReplicaFigures>,
    /// Requests with a prompt that went to the replica that is likeliest to have it, and to another.
    pub(super) kept: AtomicU64,
    pub(super) moved: AtomicU64,
    /// Requests that nobody could answer.
    pub(super) unanswered: AtomicU64,
    /// Requests that were sent away because too many were under way.
    pub(super) refused: AtomicU64,
}

/// The figures of a replica.
#[derive(Debug, Default)]
pub(super) struct ReplicaFigures {
    pub(super) answered: AtomicU64,
    /// Requests that it failed before an answer began.
    pub(super) failed: AtomicU64,
    /// Answers that broke off.
    pub(super) broken: AtomicU64,
}

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    pub(super) fn new(prefix: &str, num_replicas: usize) -> Self {
        Self {
            prefix: prefix.to_owned(),
            replicas: (0..num_replicas).map(|_| ReplicaFigures::default()).collect(),
            kept: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// The figures of the replica of this number.
    pub(super) fn of(&self, index: usize) -> &ReplicaFigures {
        &self.replicas[index]
    }

    /// Writes all figures.
    pub(super) fn text(&self, replicas: &Replicas, num_requests: usize) -> String {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut page = Page { prefix: &self.prefix, text: String::new() };
        page.head("gauge", "gateway_requests", "Requests under way.");
        page.sample("gateway_requests", "", num_requests as u64);
        page.head("counter", "gateway_unanswered_total", "Requests that no replica could answer.");
        page.sample("gateway_unanswered_total", "", read(&self.unanswered));
        page.head("counter", "gateway_refused_total", "Requests sent away because too many were under way.");
        page.sample("gateway_refused_total", "", read(&self.refused));
        page.head(
            "counter",
            "gateway_prefix_total",
            "Requests by whether the replica of their prompt's beginning took them.",
        );
        page.sample("gateway_prefix_total", "{replica=\"preferred\"}", read(&self.kept));
        page.sample("gateway_prefix_total", "{replica=\"other\"}", read(&self.moved));
        type Figure<'a> = (&'a str, &'a str, &'a str, &'a dyn Fn(usize) -> u64);
        let figures: [Figure<'_>; 5] = [
            ("gauge", "gateway_replica_up", "Whether the replica is ready.", &|i| u64::from(replicas.all()[i].is_up())),
            ("gauge", "gateway_replica_requests", "Requests that the replica has under way.", &|i| {
                replicas.all()[i].num_requests() as u64
            }),
            ("counter", "gateway_replica_answers_total", "Answers that the replica began.", &|i| {
                read(&self.of(i).answered)
            }),
            (
                "counter",
                "gateway_replica_failures_total",
                "Requests that the replica failed before it answered.",
                &|i| read(&self.of(i).failed),
            ),
            ("counter", "gateway_replica_broken_total", "Answers of the replica that broke off.", &|i| {
                read(&self.of(i).broken)
            }),
        ];
        for (kind, name, help, value) in figures {
            page.head(kind, name, help);
            for (index, replica) in replicas.all().iter().enumerate() {
                page.sample(name, &format!("{{replica=\"{}\"}}", replica.endpoint), value(index));
            }
        }
        page.text
    }
}

struct Page<'a> {
    prefix: &'a str,
    text: String,
}

impl Page<'_> {
    fn head(&mut self, kind: &str, name: &str, help: &str) {
        let prefix = self.prefix;
        // Writing into a text does not fail.
        let _ = writeln!(self.text, "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        let _ = writeln!(self.text, "{}{name}{labels} {value}", self.prefix);
    }
}
