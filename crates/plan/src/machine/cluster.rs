//! A measured machine as a cluster of ranks that share its cores.

use super::Machine;
use crate::{Cluster, Device, Level, Precision};

/// The part of a measured machine that each of some ranks has, which are threads of one process.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineShare {
    machine: Machine,
    /// Cores of a rank; below one if ranks share a core.
    cores: f64,
    /// The rates of products and of memory over those measured: 1, or more for a faster machine.
    speeds: [f64; 2],
}

impl MachineShare {
    /// Shares a machine out among `num_ranks` ranks.
    #[must_use]
    pub fn new(machine: &Machine, num_ranks: usize) -> Self {
        Self { machine: machine.clone(), cores: machine.cores as f64 / num_ranks.max(1) as f64, speeds: [1.0; 2] }
    }

    /// Returns the operations a second of a rank's products with `rows` rows and matrices of `width`.
    #[must_use]
    pub fn product_rate(&self, precision: Precision, size: [f64; 2]) -> f64 {
        let threads = (self.cores as usize).max(1);
        self.speeds[0] * self.machine.product_rate(precision, threads, size) / threads as f64 * self.cores
    }

    /// Makes products and passes over memory as many times faster.
    pub(crate) fn speed_up(&mut self, products: f64, memory: f64) {
        self.speeds = [self.speeds[0] * products, self.speeds[1] * memory];
    }

    /// Returns the seconds that a forward spends on a layer beside its products: its share of the measured passes
    /// over the `kept_bytes` that the layer leaves for backward, and of the time that does not depend on the size. A
    /// backward takes twice as much.
    #[must_use]
    pub fn layer_seconds(&self, kept_bytes: f64) -> f64 {
        let overhead = self.machine.overhead;
        let rate = self.speeds[1] * self.machine.memory_bytes_per_s / self.machine.cores as f64 * self.cores;
        // Ranks that share a core wait for each other.
        (overhead.passes * kept_bytes / rate + overhead.layer_s / self.cores.min(1.0)) / 3.0
    }

    /// Returns the best rate of a rank's products in a precision, over all measured sizes.
    fn best_rate(&self, precision: Precision) -> f64 {
        let sizes = self.machine.products.iter().map(|product| [product.rows as f64, product.width as f64]);
        sizes.map(|size| self.product_rate(precision, size)).fold(0.0, f64::max)
    }
}

impl Cluster {
    /// Describes a measured machine with `num_ranks` ranks that share its cores, memory and bandwidth. The peak of a
    /// rank is the best rate of its products.
    #[must_use]
    pub fn of_machine(machine: &Machine, num_ranks: usize) -> Self {
        let num_ranks = num_ranks.max(1);
        let share = MachineShare::new(machine, num_ranks);
        let part = 1.0 / num_ranks as f64;
        let device = Device {
            name: cores(share.cores),
            f32_flops: share.best_rate(Precision::F32),
            bf16_flops: share.best_rate(Precision::Bf16),
            fp8_flops: share.best_rate(Precision::Fp8),
            efficiency: 1.0,
            fp8_efficiency: None,
            attention_efficiency: None,
            memory_bytes: machine.memory_bytes * part,
            memory_bytes_per_s: machine.memory_bytes_per_s * part,
            memory_efficiency: 1.0,
            price_per_hour: None,
            watts: None,
        };
        let level = Level {
            message_s: machine.link.latency_s,
            ..Level::new("machine", num_ranks, 0.0, machine.link.bytes_per_s)
        };
        Self {
            name: machine.name.clone(),
            device,
            levels: vec![level],
            node_sizes: Vec::new(),
            machine: Some(machine.clone()),
        }
    }
}

/// Names a number of cores.
fn cores(number: f64) -> String {
    match number {
        1.0 => "a core".to_owned(),
        whole if whole.fract() == 0.0 => format!("{whole} cores"),
        part => format!("{part:.2} cores"),
    }
}
