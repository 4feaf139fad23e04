//! A timed case: its operations and bytes, and the rate of the machine that limits it.

use moeworks_ops::gemm_plan::GemmPlan;
use moeworks_ops::peak::Peaks;
use moeworks_tensor::DType;

/// The minimal work of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The floating-point operations of one run; a multiply-add counts as two.
    pub flops: f64,
    /// The bytes of operands and results, each read or written once.
    pub bytes: f64,
    /// The bytes of the results.
    pub written: f64,
    /// The type of the operands of its products.
    pub dtype: DType,
}

impl Cost {
    /// Returns the cost of an operation that only moves memory, in bytes read and bytes written.
    #[must_use]
    pub fn from_bytes(read: usize, written: usize) -> Self {
        Self { flops: 0.0, bytes: (read + written) as f64, written: written as f64, dtype: DType::F32 }
    }

    /// Returns the cost of `factor` runs, which may be a fraction.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { flops: factor * self.flops, bytes: factor * self.bytes, written: factor * self.written, ..self }
    }

    /// Returns the shortest possible time by the machine's rates, in seconds, and the limiting rate. Bytes that are
    /// read and written in equal number count at the rate of copying, the rest at the rate of reading.
    #[must_use]
    pub fn limit(&self, peaks: &Peaks) -> (f64, Limit) {
        let copied = 2.0 * self.written.min(self.bytes - self.written);
        let copying = copied / peaks.copy_bytes_per_s.unwrap_or(peaks.read_bytes_per_s);
        let memory = copying + (self.bytes - copied) / peaks.read_bytes_per_s;
        let products = self.flops / peaks.flops(self.dtype);
        if memory > products { (memory, Limit::Memory) } else { (products, Limit::Products) }
    }
}

/// Adds the work of two operations; the type is that of the first.
impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (bytes, written) = (self.bytes + other.bytes, self.written + other.written);
        Self { flops: self.flops + other.flops, bytes, written, ..self }
    }
}

/// The rate that limits a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The peak of the type's products.
    Products,
    /// The rates of reading and copying memory. Data in caches can exceed them.
    Memory,
}

impl Limit {
    /// Returns the name that tables print.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Products => "peak",
            Self::Memory => "memory",
        }
    }
}

/// A timed case.
#[derive(Clone, Debug, PartialEq)]
pub struct CaseResult {
    /// The operation, with its sizes.
    pub name: String,
    /// The minimal work.
    pub cost: Cost,
    /// Seconds of the shortest run, or of the median one for whole layers.
    pub seconds: f64,
    /// The shortest possible time by the measured rates, in seconds.
    pub least_seconds: f64,
    /// The limiting rate.
    pub limit: Limit,
    /// The kernel of its product, or of the first of its products, on the CPU.
    pub plan: Option<GemmPlan>,
}

impl CaseResult {
    /// Creates a case that took `seconds` on a machine with these rates.
    #[must_use]
    pub fn new(name: String, cost: Cost, seconds: f64, peaks: &Peaks) -> Self {
        let (least_seconds, limit) = cost.limit(peaks);
        Self { name, cost, seconds, least_seconds, limit, plan: None }
    }

    /// Returns operations per second.
    #[must_use]
    pub fn flops_per_s(&self) -> f64 {
        self.cost.flops / self.seconds
    }

    /// Returns bytes per second.
    #[must_use]
    pub fn bytes_per_s(&self) -> f64 {
        self.cost.bytes / self.seconds
    }

    /// Returns the achieved share of the limiting rate.
    #[must_use]
    pub fn share_of_limit(&self) -> f64 {
        self.least_seconds / self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAKS: Peaks = Peaks {
        f32_flops: 100.0,
        f32_in_tiles_flops: None,
        bf16_flops: Some(400.0),
        fp8_flops: None,
        read_bytes_per_s: 10.0,
        copy_bytes_per_s: Some(5.0),
    };

    #[test]
    fn the_slower_of_products_and_memory_limits_a_case() {
        // 40 bytes are read and 10 of them have a written one beside them: 20 / 5 + 30 / 10 seconds.
        let cost = Cost { flops: 1000.0, bytes: 50.0, written: 10.0, dtype: DType::F32 };
        assert_eq!(cost.limit(&PEAKS), (10.0, Limit::Products));
        assert_eq!(Cost { dtype: DType::BF16, ..cost }.limit(&PEAKS), (7.0, Limit::Memory));
    }

    #[test]
    fn bytes_without_a_rate_of_copying_count_at_the_rate_of_reading() {
        let peaks = Peaks { copy_bytes_per_s: None, ..PEAKS };
        assert_eq!(Cost::from_bytes(30, 20).limit(&peaks), (5.0, Limit::Memory));
    }
}
