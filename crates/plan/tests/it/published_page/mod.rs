//! The page `docs/published-tables.md`: published tables beside what the planner says, cell by cell.
//!
//! The page is made here. If it is stale, the test fails; `MOEWORKS_WRITE_PAGES=1 cargo test -p moeworks-plan
//! published_page` writes it.

mod aims;
mod exact;
mod hybrid_ep;
mod training;
mod tutel;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

/// The share by which a prediction may miss to count as near.
const NEAR: f64 = 0.15;

/// The origin of our figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By arithmetic: it must agree.
    Exact,
    /// A constant of the cluster was chosen so that it agrees.
    Fitted,
    /// By the planner, with constants that were fitted elsewhere.
    Predicted,
    /// By the planner, where the paper does not give enough: only order and direction count.
    Order,
}

/// A published figure and ours.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) what: String,
    pub(crate) published: f64,
    pub(crate) ours: f64,
    pub(crate) kind: Kind,
    /// The error that the digits of an exact figure allow.
    pub(crate) tolerance: f64,
}

impl Cell {
    pub(crate) fn new(what: impl Into<String>, published: f64, ours: f64, kind: Kind) -> Self {
        Self { what: what.into(), published, ours, kind, tolerance: 0.02 }
    }

    /// Allows more of a figure that is printed with few digits.
    pub(crate) fn within(self, tolerance: f64) -> Self {
        Self { tolerance, ..self }
    }

    pub(crate) fn error(&self) -> f64 {
        if self.published == self.ours { 0.0 } else { self.ours / self.published - 1.0 }
    }

    fn row(&self) -> String {
        let kind = match self.kind {
            Kind::Exact => "exact",
            Kind::Fitted => "fitted",
            Kind::Predicted if self.error().abs() <= NEAR => "predicted",
            Kind::Predicted => "predicted, off",
            Kind::Order => "order only",
        };
        let error = format!("{:+.1}%", 100.0 * self.error()).replace("-0.0%", "+0.0%");
        format!("| {} | {} | {} | {error} | {kind} |", self.what, number(self.published), number(self.ours))
    }
}

/// A table of the page.
pub(crate) struct Table {
    pub(crate) title: &'static str,
    /// The subject, the source, and the assumptions.
    pub(crate) intro: String,
    pub(crate) unit: &'static str,
    pub(crate) cells: Vec<Cell>,
    /// The remark behind the table.
    pub(crate) remark: String,
}

/// Formats a number with four significant digits.
fn number(value: f64) -> String {
    let decimals = if value == 0.0 { 0 } else { (3.0 - value.abs().log10().floor()).clamp(0.0, 6.0) as usize };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Returns the value in `low..high` at which the rising or falling function `of` is `target`.
pub(crate) fn solve(low: f64, high: f64, target: f64, of: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (low, high);
    let is_rising = of(high) > of(low);
    for _ in 0..40 {
        let middle = f64::midpoint(low, high);
        if (of(middle) < target) == is_rising { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

const INTRO: &str = "\
# Published tables beside ours

What papers measured on clusters, and what `moeworks plan` computes for the same model, layout and cluster. This page is
written by a test ([crates/plan/tests/it/published_page](../crates/plan/tests/it/published_page/mod.rs)) and fails when it
is stale.

- **exact**: arithmetic on printed figures; a test holds it.
- **fitted**: a constant was chosen so that this cell agrees: at most two of a cluster, on cells of one row; and where a
  table leaves out the work (bytes, or the seconds of everything else), its first row gives that.
- **predicted**: everything else is as in the paper, and nothing was fitted to the cell. \"off\" marks those that miss by
  more than 15%.
- **order only**: the paper leaves out what a prediction needs (batch, implementation, number of layers); only the order
  of the figures and the direction of their changes mean something.

A collection of 93 published runs found that the public record does not tell absolute levels: clusters, kernels and
versions differ by more than layouts do. So a plan's order of layouts can be trusted further than its seconds.
";

fn tables() -> Vec<Table> {
    let mut tables = exact::tables();
    tables.extend(training::tables());
    tables.extend(tutel::tables());
    tables.extend(hybrid_ep::tables());
    tables.extend(aims::tables());
    tables
}

fn page(tables: &[Table]) -> String {
    let cells: Vec<&Cell> = tables.iter().flat_map(|table| &table.cells).collect();
    let predicted: Vec<&&Cell> = cells.iter().filter(|cell| cell.kind == Kind::Predicted).collect();
    let near = predicted.iter().filter(|cell| cell.error().abs() <= NEAR).count();
    let count = |kind| cells.iter().filter(|cell| cell.kind == kind).count();
    let mut text = INTRO.to_owned();
    let _ = write!(
        text,
        "\nOf {} cells {} are exact, {} are fitted, {} are predicted ({near} of them within 15%), and {} are compared in \
         order only.\n",
        cells.len(),
        count(Kind::Exact),
        count(Kind::Fitted),
        predicted.len(),
        count(Kind::Order),
    );
    for table in tables {
        let _ = write!(text, "\n## {}\n\n{}\n\n", table.title, table.intro);
        let _ =
            writeln!(text, "| | published{0} | ours{0} | error | |\n| --- | ---: | ---: | ---: | --- |", table.unit);
        for cell in &table.cells {
            let _ = writeln!(text, "{}", cell.row());
        }
        let _ = write!(text, "\n{}\n", table.remark);
    }
    text
}

fn page_file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/published-tables.md")
}

#[test]
fn the_page_is_what_the_planner_says() {
    let text = page(&tables());
    if env::var_os("MOEWORKS_WRITE_PAGES").is_some() {
        fs::write(page_file(), &text).expect("written");
    }
    let written = fs::read_to_string(page_file()).unwrap_or_default();
    let differs = text.lines().zip(written.lines()).find(|(ours, page)| ours != page);
    assert!(
        text == written,
        "docs/published-tables.md is stale, first at {differs:?}: MOEWORKS_WRITE_PAGES=1 cargo test -p moeworks-plan \
         published_page"
    );
}

#[test]
fn exact_and_fitted_cells_agree() {
    for cell in tables().iter().flat_map(|table| &table.cells) {
        let most = match cell.kind {
            Kind::Exact => cell.tolerance,
            Kind::Fitted => 0.01,
            _ => continue,
        };
        assert!(cell.error().abs() <= most, "{cell:?}");
    }
}

#[test]
fn most_predictions_are_near() {
    let tables = tables();
    let predicted = tables.iter().flat_map(|table| &table.cells).filter(|cell| cell.kind == Kind::Predicted);
    let errors: Vec<f64> = predicted.map(|cell| cell.error().abs()).collect();
    let near = errors.iter().filter(|&&error| error <= NEAR).count();
    assert!(4 * near >= 3 * errors.len(), "{near} of {} predictions are within 15%", errors.len());
}
