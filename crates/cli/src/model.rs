//! Loads the model that a path means: a run, a checkpoint, a model folder or a GGUF file.

use std::path::Path;

use moeworks_gpu::DeviceChoice;
use moeworks_model::chat::ChatTemplate;
use moeworks_model::generation::SamplingDefaults;
use moeworks_model::gguf::{self, GgufFile};
use moeworks_model::{Decoder, DecoderWeights, ModelConfig, Tokenizer, WeightCheck, hf, only_gguf};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Device};
use moeworks_train::measure::machine_bytes;
use moeworks_train::store::{Pick, Resolved, resolve_run};

use crate::args::{CheckWeights, ComputeArgs, MachineArgs};
use crate::failure::Failure;
use crate::progress::bytes;
use crate::ranks::MAX_THREADS;

/// What a path means.
pub(crate) enum Source {
    /// A model folder, perhaps that of a checkpoint of a run.
    Folder(Resolved),
    /// llama.cpp's format.
    Gguf(GgufFile),
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        if gguf::is_gguf(path) {
            return Ok(Self::Gguf(GgufFile::open(path)?));
        }
        if let Some(file) = only_gguf(path) {
            return Ok(Self::Gguf(GgufFile::open(&file)?));
        }
        Ok(Self::Folder(resolve_run(path, Pick::Latest)?))
    }

    /// The folder or file.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Folder(run) => &run.model_dir,
            Self::Gguf(file) => file.path(),
        }
    }

    /// The run, if the folder belongs to one.
    pub(crate) fn run(&self) -> Option<&Resolved> {
        match self {
            Self::Folder(run) => Some(run),
            Self::Gguf(_) => None,
        }
    }

    /// Configuration and weights, as they are stored. Weights that are no numbers are told of.
    pub(crate) fn load(&self, ctx: &Context, check: CheckWeights) -> Result<(ModelConfig, DecoderWeights), Failure> {
        let loaded = match self {
            Self::Folder(run) => hf::load_model(ctx, &run.model_dir)?,
            Self::Gguf(file) => file.load_model(ctx)?,
        };
        let find = |most| match self {
            Self::Folder(run) => Ok(hf::check_weights(ctx, &run.model_dir, most)?),
            Self::Gguf(file) => Ok(file.check_weights(ctx, most)),
        };
        check_weights(self.path(), check, find)?;
        Ok(loaded)
    }

    /// The ids at which the model ends what it says.
    fn stop_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
        match self {
            Self::Folder(run) => Ok(hf::stop_ids(&run.model_dir, tokenizer)?),
            Self::Gguf(file) => Ok(file.stop_ids(tokenizer)?),
        }
    }

    /// The sampling settings that the model's files recommend, and the name of what has them.
    pub(crate) fn sampling_defaults(&self) -> Result<(SamplingDefaults, &'static str), Failure> {
        match self {
            Self::Folder(run) => Ok((hf::sampling_defaults(&run.model_dir)?, "generation_config.json")),
            Self::Gguf(file) => Ok((SamplingDefaults::from_gguf(file)?, "general.sampling of the GGUF file")),
        }
    }

    /// The model's own chat template, if it has one.
    pub(crate) fn chat_template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, Failure> {
        let dir = match self {
            Self::Folder(run) => Some(&*run.model_dir),
            Self::Gguf(_) => None,
        };
        Ok(ChatTemplate::find(dir, tokenizer)?)
    }

    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        match self {
            Self::Folder(run) => Ok(Tokenizer::from_dir(&run.model_dir)?),
            Self::Gguf(file) => Ok(file.tokenizer()?),
        }
    }
}

/// Says on one line of standard error what is wrong with the weights that `find` looks at, which is told the bytes above which
/// experts are left out.
pub(crate) fn check_weights(
    path: &Path,
    which: CheckWeights,
    find: impl FnOnce(u64) -> Result<WeightCheck, Failure>,
) -> Result<(), Failure> {
    let most = match which {
        CheckWeights::None => return Ok(()),
        CheckWeights::All => u64::MAX,
        CheckWeights::Auto => machine_bytes().map_or(u64::MAX, |bytes| bytes / 2),
    };
    let found = find(most)?;
    if let Some(problem) = found.problem() {
        tracing::warn!("{}: {problem}", path.display());
    }
    if found.num_checked < found.num_bytes {
        let (checked, all) = (bytes(found.num_checked), bytes(found.num_bytes));
        eprintln!(
            "{}: {checked} of {all} were looked at for NaN and infinity, not the experts: the model is larger than half of \
             the memory (--check-weights all or none)",
            path.display()
        );
    }
    Ok(())
}

/// A model ready to compute.
pub(crate) struct Model {
    pub(crate) ctx: Context,
    pub(crate) decoder: Decoder,
    /// In the precision that was asked for.
    pub(crate) weights: DecoderWeights,
    pub(crate) tokenizer: Tokenizer,
    /// The ids at which it ends what it says.
    pub(crate) stop_ids: Vec<u32>,
}

impl Model {
    pub(crate) fn load(path: &Path, compute: &ComputeArgs) -> Result<Self, Failure> {
        Self::of(&Source::open(path)?, compute)
    }

    /// Whether it answers a text instead of continuing it.
    pub(crate) fn has_encoder(&self) -> bool {
        self.decoder.config().variant.encoder.is_some()
    }

    /// What is wrong where a result is not a number, with the tensor that is to blame if it is one.
    pub(crate) fn not_a_number(&self) -> Failure {
        let line = "the model's result is not a number";
        match self.weights.first_not_finite(&self.ctx) {
            Some(name) => {
                Failure::input(format!("{line}: tensor {name:?} holds NaN or infinity; the file may be damaged"))
            }
            None => Failure::input(format!("{line}, though all weights are: they are too large for --precision")),
        }
    }

    pub(crate) fn of(source: &Source, compute: &ComputeArgs) -> Result<Self, Failure> {
        let dtype = dtype(&compute.precision)?;
        let ctx = context(&compute.machine)?;
        let (config, weights) = source.load(&ctx, compute.check.check_weights)?;
        let tokenizer = source.tokenizer()?;
        // A GPU's kernels know no f16.
        let is_half = ctx.device() == Device::Cuda && weights.compute_dtype() == DType::F16;
        let weights = match dtype.or(is_half.then_some(DType::F32)) {
            // In the host's memory: a GPU gets what it reads.
            Some(dtype) if !weights.are_all(dtype) => weights.compute_copy(&ctx.on_host(), dtype),
            _ => weights,
        };
        let decoder = Decoder::new(config)?;
        let stop_ids = source.stop_ids(&tokenizer)?;
        Ok(Self { ctx, decoder, weights, tokenizer, stop_ids })
    }
}

/// What computes, as asked for.
pub(crate) fn context(machine: &MachineArgs) -> Result<Context, Failure> {
    let MachineArgs { threads, device, expert_room } = *machine;
    if threads > MAX_THREADS {
        let expected = format!("must be at most {MAX_THREADS}; 0 for one on each core");
        return Err(Failure::input(format!("--threads {threads}: {expected}")));
    }
    if !(0.0..=1e6).contains(&expert_room) {
        return Err(Failure::input(format!("--expert-room {expert_room}: must be a number of GB, at least 0")));
    }
    let ctx = if threads == 0 { Context::cpu_all_cores() } else { Context::cpu(threads) };
    let (ctx, missing) = ctx.on_device(device)?;
    if let Some(missing) = missing {
        notice!("--device auto computes on the processor: {missing}");
    }
    if expert_room > 0.0 {
        let Some(gpu) = ctx.gpu().cloned() else {
            return match device {
                DeviceChoice::Auto => Ok(ctx),
                _ => Err(Failure::input(format!("--expert-room {expert_room}: needs a GPU, --device cuda"))),
            };
        };
        return Ok(ctx.with_gpu(gpu.with_expert_cache((expert_room * 1e9) as usize)));
    }
    Ok(ctx)
}

/// The type of the weights to compute with; none for that of the file.
fn dtype(precision: &str) -> Result<Option<DType>, Failure> {
    match precision {
        "stored" => Ok(None),
        "f32" => Ok(Some(DType::F32)),
        "bf16" => Ok(Some(DType::BF16)),
        _ => Err(Failure::input(format!("--precision {precision}: must be stored, f32 or bf16"))),
    }
}
