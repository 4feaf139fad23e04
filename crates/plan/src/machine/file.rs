//! The file of a measured machine.

use serde::{Deserialize, Serialize};

use crate::{Link, Precision, RankSpec, Topology};

/// The rate of a square product of some rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// The type of the weights.
    pub precision: Precision,
    /// The threads that computed it.
    pub threads: usize,
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input, and of the result.
    pub width: usize,
    /// Operations a second; a multiply-add counts as two.
    pub flops: f64,
}

/// The cost of what is not a product, fitted on two reference steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overhead {
    /// Seconds of a layer in a microbatch, forward and backward, whatever its size.
    pub layer_s: f64,
    /// Passes over the values that forward keeps, at the rate of memory.
    pub passes: f64,
}

/// A measured machine.
///
/// ```
/// use moeworks_plan::machine::Machine;
///
/// let text = "name = \"a machine\"\ncores = 2\nmemory_bytes = 8e9\nmemory_bytes_per_s = 1e10\n\
///     [link]\nlatency_s = 1e-6\nbytes_per_s = 4e9\n\
///     [overhead]\nlayer_s = 1e-4\npasses = 3.0\n\
///     [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 64\nwidth = 64\nflops = 1e10\n";
/// let machine = Machine::parse(text)?;
/// assert_eq!(Machine::parse(&machine.to_toml())?, machine);
/// # Ok::<(), moeworks_plan::machine::MachineError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name of the processor.
    pub name: String,
    /// The number of cores.
    pub cores: usize,
    /// Bytes of memory.
    pub memory_bytes: f64,
    /// Bytes a second that all cores together read.
    pub memory_bytes_per_s: f64,
    /// The link between two ranks that are threads.
    pub link: Link,
    /// The cost of what is not a product.
    pub overhead: Overhead,
    /// The rates of products.
    pub products: Vec<ProductRate>,
}

/// The error of a file that describes no machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// The text is not TOML, or a field is missing or unknown.
    #[error("{0}")]
    Form(String),
    /// A value out of range.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The values that would be right.
        expected: &'static str,
    },
}

impl Machine {
    /// Reads the TOML form. The error is one line.
    ///
    /// # Errors
    /// If the text is not TOML, a field is missing or unknown, or a value is out of range.
    pub fn parse(text: &str) -> Result<Self, MachineError> {
        let machine: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            MachineError::Form(format!("{place}{}", error.message().trim().replace('\n', ", ")))
        })?;
        machine.check()?;
        Ok(machine)
    }

    /// Returns the TOML form, which [`Machine::parse`] reads back.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Numbers and tables of numbers always have a TOML form.
        toml::to_string(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), MachineError> {
        let wrong = |field, value: String, expected| Err(MachineError::Value { field, value, expected });
        let positive = [
            ("cores", self.cores as f64),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            ("link.bytes_per_s", self.link.bytes_per_s),
        ];
        let of_products = self.products.iter().flat_map(|product| {
            [
                ("products.flops", product.flops),
                ("products.rows", product.rows as f64),
                ("products.width", product.width as f64),
                ("products.threads", product.threads as f64),
            ]
        });
        for (field, value) in positive.into_iter().chain(of_products) {
            if !(value > 0.0 && value.is_finite()) {
                return wrong(field, value.to_string(), "must be a finite number above 0");
            }
        }
        let Overhead { layer_s, passes } = self.overhead;
        for (field, value) in
            [("link.latency_s", self.link.latency_s), ("overhead.layer_s", layer_s), ("overhead.passes", passes)]
        {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(field, value.to_string(), "must be a finite number of at least 0");
            }
        }
        if self.products.is_empty() {
            return wrong("products", "[]".to_owned(), "must have at least one [[products]]");
        }
        Ok(())
    }

    /// Returns the operations a second of products with `rows` rows and matrices of `width`, by `threads` threads:
    /// interpolated between the measured sizes and numbers of threads. A precision that was not measured has the rate
    /// of another.
    #[must_use]
    pub fn product_rate(&self, precision: Precision, threads: usize, [rows, width]: [f64; 2]) -> f64 {
        let is_like = |product: &&ProductRate| product.precision.has_bf16_copies() == precision.has_bf16_copies();
        let mut alike: Vec<&ProductRate> = self.products.iter().filter(is_like).collect();
        if alike.is_empty() {
            alike = self.products.iter().collect();
        }
        let counts = distinct(&alike, |product| product.threads);
        let by_threads = counts.into_iter().map(|count| {
            let alike: Vec<&ProductRate> = alike.iter().copied().filter(|product| product.threads == count).collect();
            let at_width = |of: usize| {
                let points = alike.iter().filter(|product| product.width == of);
                interpolate(points.map(|product| [product.rows as f64, product.flops]).collect(), rows)
            };
            let widths = distinct(&alike, |product| product.width);
            [count as f64, interpolate(widths.into_iter().map(|of| [of as f64, at_width(of)]).collect(), width)]
        });
        interpolate(by_threads.collect(), threads as f64)
    }

    /// Returns the machine as a topology of `num_ranks` ranks that share its cores, with products of the given size.
    #[must_use]
    pub fn topology(&self, num_ranks: usize, precision: Precision, size: [f64; 2]) -> Topology {
        let num_ranks = num_ranks.max(1);
        let share = 1.0 / num_ranks as f64;
        let threads = (self.cores / num_ranks).max(1);
        let per_core = self.product_rate(precision, threads, size) / threads as f64;
        let rank = RankSpec {
            flops: per_core * self.cores as f64 * share,
            memory_bytes: self.memory_bytes * share,
            memory_bytes_per_s: self.memory_bytes_per_s * share,
        };
        Topology {
            node_sizes: vec![num_ranks],
            rank,
            node_link: self.link,
            cluster_link: self.link,
            numa_cores: Vec::new(),
        }
    }
}

/// Returns the different values of a size, in order.
fn distinct(products: &[&ProductRate], size: impl Fn(&ProductRate) -> usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = products.iter().map(|product| size(product)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Interpolates between `points` of (place, value) on logarithmic scales; beyond the ends the value stays.
fn interpolate(mut points: Vec<[f64; 2]>, place: f64) -> f64 {
    points.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let after = points.iter().position(|point| point[0] >= place);
    match after {
        Some(0) => points[0][1],
        None => points.last().map_or(1.0, |point| point[1]),
        Some(index) => {
            let ([x0, y0], [x1, y1]) = (points[index - 1], points[index]);
            let t = (place.ln() - x0.ln()) / (x1.ln() - x0.ln());
            (y0.ln() + t * (y1.ln() - y0.ln())).exp()
        }
    }
}
