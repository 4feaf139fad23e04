//! The options that say what computes, shared by commands.

use clap::Args;
use moeworks_ops::cuda::DeviceChoice;

/// In what way a model computes.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Precision of the products: that of the weights as they are stored, f32 or bf16
    #[arg(long, default_value = "stored")]
    pub(crate) precision: String,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
}

/// What computes.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Threads (0: one for each core)
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// cpu, cuda (an NVIDIA GPU, found at run time), cuda:N, or auto: a GPU if there is one
    #[arg(long, default_value_t)]
    pub(crate) device: DeviceChoice,
    /// GB of a GPU's memory for experts; those that find no room stay in the host's until tokens choose them (0: all are on the GPU)
    #[arg(long, value_name = "GB", default_value_t = 0.0)]
    pub(crate) expert_room: f64,
}
