//! A measured machine as a cluster of ranks that share its cores.

use super::{Machine, Overhead, PassRates};
use crate::{Cluster, Device, Level, Precision};

/// Bytes that the update of a weight reads and writes, where updates were not measured.
const UPDATE_BYTES: f64 = 28.0;

/// The sizes of the rest of a layer of a microbatch, on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerRest {
    /// Bytes of the values that the layer leaves for backward.
    pub kept_bytes: f64,
    /// Choices of an expert: tokens times top k.
    pub choices: f64,
    /// Scores: tokens times experts.
    pub scores: f64,
    /// The weights of the layer that the rank holds.
    pub weights: f64,
}

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

    /// Returns the operations a second of a rank's products with `rows` rows and matrices of `width`, forward.
    #[must_use]
    pub fn product_rate(&self, precision: Precision, size: [f64; 2]) -> f64 {
        self.products(precision, size).forward
    }

    /// Returns the rates of a rank's products with `rows` rows and matrices of `width`.
    #[must_use]
    pub fn products(&self, precision: Precision, size: [f64; 2]) -> PassRates {
        self.machine.products_at(precision, self.threads(), size).times(self.scale())
    }

    /// Returns the rates of a rank's experts, by the rows of each, the width of the model and that of an expert. A
    /// dense feed-forward is an expert that takes every row.
    #[must_use]
    pub fn experts(&self, precision: Precision, size: [f64; 3]) -> PassRates {
        self.machine.experts_at(precision, self.threads(), size).times(self.scale())
    }

    /// Returns the rates of a rank's attention in sequences of `seq_len` with heads of `head_dim`; none if the
    /// machine's was not measured.
    #[must_use]
    pub fn attention(&self, precision: Precision, size: [f64; 2]) -> Option<PassRates> {
        Some(self.machine.attention_at(precision, self.threads(), size)?.times(self.scale()))
    }

    /// Returns the operations a second of a rank's output layer of `width` and `vocabulary` with the loss, forward
    /// and backward; none if the machine's was not measured.
    #[must_use]
    pub fn output_layer(&self, precision: Precision, size: [f64; 2]) -> Option<f64> {
        Some(self.machine.output_layer_at(precision, self.threads(), size)? * self.scale())
    }

    /// Returns the seconds of the update of a rank's `params` parameters.
    #[must_use]
    pub fn update_seconds(&self, precision: Precision, params: f64) -> f64 {
        let rate = self.machine.update_rate(precision, self.threads()).map(|rate| rate * self.scale());
        params / rate.unwrap_or(self.memory_rate() / UPDATE_BYTES)
    }

    /// Returns the threads of a rank.
    fn threads(&self) -> usize {
        (self.cores as usize).max(1)
    }

    /// Returns the rates of this rank over those of as many threads.
    fn scale(&self) -> f64 {
        self.speeds[0] * self.cores / self.threads() as f64
    }

    /// Returns the bytes a second that this rank moves while all others do.
    fn memory_rate(&self) -> f64 {
        self.speeds[1] * self.machine.memory_bytes_per_s / self.machine.cores as f64 * self.cores
    }

    /// Makes products and passes over memory as many times faster.
    pub(crate) fn speed_up(&mut self, products: f64, memory: f64) {
        self.speeds = [self.speeds[0] * products, self.speeds[1] * memory];
    }

    /// Returns the seconds that a forward pass spends on a layer besides products, attention and the output layer. A
    /// backward pass takes twice as much.
    #[must_use]
    pub fn layer_seconds(&self, rest: LayerRest) -> f64 {
        let Overhead { layer_s, passes, weight_s, choice_s, score_s, .. } = self.machine.overhead;
        let of_cores = weight_s * rest.weights + choice_s * rest.choices + score_s * rest.scores;
        // Ranks that share a core wait for each other.
        (passes * rest.kept_bytes / self.memory_rate() + of_cores / self.cores + layer_s / self.cores.min(1.0)) / 3.0
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
