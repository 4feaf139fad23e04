//! Errors that prevent a run from starting or continuing.

use std::io;
use std::path::PathBuf;

use moeworks_comm::CommError;
use moeworks_gpu::GpuError;
use moeworks_infer::data::{DataError, SpanTokensError};
use moeworks_infer::routing_record::RecordError;
use moeworks_infer::store::StoreError;
use moeworks_model::{BatchError, LoadError, TokenizerError};
use moeworks_plan::Layout;

use crate::config::ConfigError;
use crate::data::DatasetError;
use crate::metrics::MetricsError;
use crate::report::ReportError;

/// An error that prevents a run from starting or continuing.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The tokenizer lacks the tokens of span corruption.
    #[error(transparent)]
    SpanTokens(#[from] SpanTokensError),
    /// The data cannot be trained on.
    #[error(transparent)]
    Dataset(DatasetError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Records cannot be written or read.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The routing cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The report cannot be written.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// A model or a state file cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The requested device is not available.
    #[error("train.device: {0}")]
    Device(#[from] GpuError),
    /// A rank failed, hangs or disagrees.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The settings ask for another number of ranks than there are.
    #[error(
        "parallel.dp = {} times parallel.ep = {} times parallel.tp = {}{} is {} ranks, but there are {num_ranks}",
        layout.dp, layout.ep, layout.tp,
        if layout.pp > 1 { format!(" times parallel.pp = {}", layout.pp) } else { String::new() },
        layout.num_ranks()
    )]
    Ranks {
        /// The requested layout.
        layout: Layout,
        /// The actual number of ranks.
        num_ranks: usize,
    },
    /// Ranks that should hold equal weights have different bits.
    #[error(
        "rank {rank} has other bits than rank {of} of {tensor}, which both hold: sums gave ranks different results, and the run ends \
         before a checkpoint is made of that; go on with --resume and --set parallel.ordered_sums=true"
    )]
    Drifted {
        /// A rank.
        rank: usize,
        /// The rank whose bits it should have.
        of: usize,
        /// The tensor.
        tensor: String,
    },
    /// A batch does not fit the model.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A run is resumed with another model, or with a changed setting that must stay.
    #[error("{}: {setting} is {stored} in this run, but {given} was asked for: a resumed run keeps it", run.display())]
    Resume {
        /// The run.
        run: PathBuf,
        /// The setting.
        setting: String,
        /// The run's value.
        stored: String,
        /// The requested value.
        given: String,
    },
    /// A run or a state file is invalid.
    #[error("{}: {problem}", path.display())]
    State {
        /// The file or folder.
        path: PathBuf,
        /// The problem, and what would be valid.
        problem: String,
    },
    /// A study has no variant of this name.
    #[error("unknown variant {name}: must be one of {known}")]
    Variant {
        /// The name that was given.
        name: String,
        /// The existing names.
        known: String,
    },
    /// A placement cannot be found by the load of experts.
    #[error("rebalancing: {0}")]
    Balance(#[from] moeworks_plan::BalanceError),
    /// A task does not support this kind of parallelism.
    #[error("this task does not support {what}")]
    Parallelism {
        /// The unsupported request.
        what: &'static str,
    },
    /// A task failed.
    #[error("{0}")]
    Task(Box<dyn std::error::Error + Send + Sync>),
    /// A file of the run cannot be written or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The model and its training state do not fit in this machine's memory.
    #[error(
        "training needs about {} MB of memory for weights, gradients and optimizer, and this machine has {} MB: \
         a smaller model.width, model.num_layers or model.num_experts would fit",
        needed_bytes / 1_000_000,
        machine_bytes / 1_000_000
    )]
    Memory {
        /// Bytes of weights, gradients and moments.
        needed_bytes: u64,
        /// Bytes that the machine has.
        machine_bytes: u64,
    },
    /// The model and the training state kept on the GPU do not fit in its memory.
    #[error(
        "training needs about {} MB of the GPU's memory for weights, gradients and what the optimizer keeps there, and it has {} MB: \
         train.offload_optimizer = true or a smaller model.width, model.num_layers or model.num_experts may fit",
        needed_bytes / 1_000_000,
        gpu_bytes / 1_000_000
    )]
    GpuMemory {
        /// Bytes kept on the GPU.
        needed_bytes: u64,
        /// Bytes of the GPU's memory.
        gpu_bytes: u64,
    },
    /// Too many consecutive steps had a non-finite loss or gradient.
    #[error(
        "step {step}: {in_a_row} steps in a row had a loss or gradient that is not finite (train.max_bad_steps); \
         a lower train.lr, a longer train.warmup_steps or f32 precision may help"
    )]
    Diverged {
        /// The last of these steps.
        step: u64,
        /// The number of these steps.
        in_a_row: u64,
    },
}

impl TrainError {
    /// Wraps an I/O error of reading or writing `path`.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

impl From<DatasetError> for TrainError {
    fn from(error: DatasetError) -> Self {
        match error {
            DatasetError::Data(error) => Self::Data(error),
            error => Self::Dataset(error),
        }
    }
}
