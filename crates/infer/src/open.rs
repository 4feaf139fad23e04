//! Opening the model that a path names: a run, a checkpoint, a model folder or a GGUF file.

use std::path::{Path, PathBuf};

use moeworks_model::gguf::{self, GgufFile};
use moeworks_model::{Decoder, DecoderWeights, ModelConfig, ModelPart, Tokenizer, WeightCheck, hf, only_gguf};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Device};

use crate::InferError;
use crate::chat::ChatTemplate;
use crate::generation::{ModelRef, SamplingDefaults, sampling_defaults};
use crate::store::{Pick, Resolved, resolve_run};
use crate::system::System;

/// The files of a model.
pub enum Source {
    /// A model folder; it may be that of a run's checkpoint.
    Folder(Resolved),
    /// A GGUF file.
    Gguf(GgufFile),
}

/// The weights that are checked for NaN and infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightsToCheck {
    /// All weights.
    All,
    /// All weights; those of experts only if the model is at most half as large as the machine's memory.
    #[default]
    Auto,
    /// No weights.
    None,
}

/// The number format in which weights are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// That of the weights in the files.
    #[default]
    Stored,
    /// Single precision.
    F32,
    /// Bfloat16 products with f32 sums.
    Bf16,
}

impl WeightFormat {
    /// Returns the type of the weights; `None` for that of the files.
    fn dtype(self) -> Option<DType> {
        match self {
            Self::Stored => None,
            Self::F32 => Some(DType::F32),
            Self::Bf16 => Some(DType::BF16),
        }
    }

    /// Returns the weights in this format. GPU kernels have no f16, which becomes f32 there.
    pub(crate) fn of(self, ctx: &Context, weights: DecoderWeights) -> DecoderWeights {
        let is_half = ctx.device() == Device::Cuda && weights.compute_dtype() == DType::F16;
        match self.dtype().or(is_half.then_some(DType::F32)) {
            // The copy is made in host memory; a GPU gets what it reads.
            Some(dtype) if !weights.are_all(dtype) => weights.compute_copy(&ctx.on_host(), dtype),
            _ => weights,
        }
    }
}

/// Options of opening a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// The number format in which weights are multiplied.
    pub format: WeightFormat,
    /// The weights that are checked for NaN and infinity.
    pub check: WeightsToCheck,
}

/// The sampling settings that a model's files recommend.
#[derive(Clone, Debug, PartialEq)]
pub struct FileDefaults {
    /// The settings.
    pub sampling: SamplingDefaults,
    /// The name of the file, for messages.
    pub file: &'static str,
}

/// A configuration with its weights as stored.
pub struct LoadedWeights {
    /// The configuration.
    pub config: ModelConfig,
    /// The weights.
    pub weights: DecoderWeights,
    /// Set if not all weights were checked.
    pub part_checked: Option<PartChecked>,
}

/// The extent of a partial check of the weights of a large model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartChecked {
    /// The model's folder or file.
    pub path: PathBuf,
    /// Bytes that were checked.
    pub num_checked: u64,
    /// Bytes of all weights.
    pub num_bytes: u64,
}

impl Source {
    /// Finds the model that `path` names and reads its metadata, not the weights.
    ///
    /// # Errors
    /// Fails if there is no model, or a file or checkpoint is damaged.
    pub fn open(path: &Path) -> Result<Self, InferError> {
        if gguf::is_gguf(path) {
            return Ok(Self::Gguf(GgufFile::open(path)?));
        }
        if let Some(file) = only_gguf(path) {
            return Ok(Self::Gguf(GgufFile::open(&file)?));
        }
        Ok(Self::Folder(resolve_run(path, Pick::Latest)?))
    }

    /// Returns the folder or file.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(run) => &run.model_dir,
            Self::Gguf(file) => file.path(),
        }
    }

    /// Returns the run, if the folder belongs to one.
    #[must_use]
    pub fn run(&self) -> Option<&Resolved> {
        match self {
            Self::Folder(run) => Some(run),
            Self::Gguf(_) => None,
        }
    }

    /// Reads the configuration.
    pub fn config(&self) -> Result<ModelConfig, InferError> {
        match self {
            Self::Folder(run) => Ok(hf::ModelFolder::open(&run.model_dir)?.config().clone()),
            Self::Gguf(file) => Ok(file.config()?),
        }
    }

    /// Loads the configuration and a part of the weights as stored, unchecked.
    pub fn load_part(&self, ctx: &Context, part: &ModelPart) -> Result<(ModelConfig, DecoderWeights), InferError> {
        match self {
            Self::Folder(run) => Ok(hf::load_part(ctx, &run.model_dir, part)?),
            Self::Gguf(file) => Ok(file.load_part(ctx, part)?),
        }
    }

    /// Loads configuration and weights as stored, and warns of NaN and infinity among the weights.
    pub fn load(&self, ctx: &Context, check: WeightsToCheck) -> Result<LoadedWeights, InferError> {
        let (config, weights) = self.load_part(ctx, &ModelPart::Whole)?;
        let find = |most| match self {
            Self::Folder(run) => Ok(hf::check_weights(ctx, &run.model_dir, most)?),
            Self::Gguf(file) => Ok(file.check_weights(ctx, most)),
        };
        let part_checked = check_weights(self.path(), check, find)?;
        Ok(LoadedWeights { config, weights, part_checked })
    }

    /// Reads the ids at which the model ends a text.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, InferError> {
        match self {
            Self::Folder(run) => Ok(hf::stop_ids(&run.model_dir, tokenizer)?),
            Self::Gguf(file) => Ok(file.stop_ids(tokenizer)?),
        }
    }

    /// Reads the sampling settings that the model's files recommend.
    pub fn sampling_defaults(&self) -> Result<FileDefaults, InferError> {
        Ok(match self {
            Self::Folder(run) => {
                FileDefaults { sampling: sampling_defaults(&run.model_dir)?, file: "generation_config.json" }
            }
            Self::Gguf(file) => {
                FileDefaults { sampling: SamplingDefaults::from_gguf(file)?, file: "general.sampling of the GGUF file" }
            }
        })
    }

    /// Reads the model's own chat template, if it has one.
    pub fn chat_template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, InferError> {
        let dir = match self {
            Self::Folder(run) => Some(&*run.model_dir),
            Self::Gguf(_) => None,
        };
        Ok(ChatTemplate::find(dir, tokenizer)?)
    }

    /// Reads the tokenizer.
    pub fn tokenizer(&self) -> Result<Tokenizer, InferError> {
        match self {
            Self::Folder(run) => Ok(Tokenizer::from_dir(&run.model_dir)?),
            Self::Gguf(file) => Ok(file.tokenizer()?),
        }
    }
}

/// Warns of NaN and infinity among the weights at `path`. `find` does the check; its argument is the size in bytes
/// above which experts are left out. Returns the extent of the check if it was partial.
pub fn check_weights(
    path: &Path,
    which: WeightsToCheck,
    find: impl FnOnce(u64) -> Result<WeightCheck, InferError>,
) -> Result<Option<PartChecked>, InferError> {
    let most = match which {
        WeightsToCheck::None => return Ok(None),
        WeightsToCheck::All => u64::MAX,
        WeightsToCheck::Auto => System::default().usable_memory_bytes().map_or(u64::MAX, |bytes| bytes / 2),
    };
    let found = find(most)?;
    if let Some(problem) = found.problem() {
        tracing::warn!("{}: {problem}", path.display());
    }
    let WeightCheck { num_checked, num_bytes, .. } = found;
    Ok((num_checked < num_bytes).then(|| PartChecked { path: path.to_owned(), num_checked, num_bytes }))
}

/// A model ready to compute.
pub struct Model {
    /// The compute context.
    pub ctx: Context,
    /// The layers.
    pub decoder: Decoder,
    /// The weights, in the format that was asked for.
    pub weights: DecoderWeights,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The ids at which the model ends a text.
    pub stop_ids: Vec<u32>,
    /// Set if not all weights were checked.
    pub part_checked: Option<PartChecked>,
}

impl Model {
    /// Loads the model of `source`, to compute with `ctx`.
    pub fn open(ctx: Context, source: &Source, options: OpenOptions) -> Result<Self, InferError> {
        let loaded = source.load(&ctx, options.check)?;
        let decoder = Decoder::new(loaded.config.clone())?;
        Self::assemble(ctx, source, options, decoder, loaded)
    }

    /// Puts a model together of its decoder and its weights as stored.
    pub(crate) fn assemble(
        ctx: Context,
        source: &Source,
        options: OpenOptions,
        decoder: Decoder,
        loaded: LoadedWeights,
    ) -> Result<Self, InferError> {
        let LoadedWeights { weights, part_checked, .. } = loaded;
        let tokenizer = source.tokenizer()?;
        let weights = options.format.of(&ctx, weights);
        let stop_ids = source.stop_ids(&tokenizer)?;
        Ok(Self { ctx, decoder, weights, tokenizer, stop_ids, part_checked })
    }

    /// Returns the parts that compute.
    #[must_use]
    pub fn as_model_ref(&self) -> ModelRef<'_> {
        ModelRef { ctx: &self.ctx, decoder: &self.decoder, weights: &self.weights }
    }

    /// Returns whether the model has an encoder: it answers a text instead of continuing it.
    #[must_use]
    pub fn has_encoder(&self) -> bool {
        self.decoder.config().variant.encoder.is_some()
    }

    /// Returns the error of a result that is not a number, with the tensor that holds NaN or infinity, if one does.
    #[must_use]
    pub fn not_a_number(&self) -> InferError {
        InferError::NotANumber { tensor: self.weights.first_not_finite(&self.ctx) }
    }
}
