//! What a checkpoint holds: the model as a Hugging Face folder, the optimizer's moments, and how far the run is.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use moeworks_infer::data::is_stdin;
use moeworks_infer::store::{CONFIG_FILE, Checkpoint, Metadata};
use moeworks_model::files::{FileError, write_whole};
use moeworks_model::hf::{self, ComingWeights, SaveOptions};
use moeworks_model::safetensors::{self, FileDType, SafetensorsFile, TensorBytes};
use moeworks_model::{Decoder, DecoderWeights, LoadError, Tokenizer, WeightSpec, WeightTable};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::config::{self, ConfigError, ConfigLayers, PlacementChoice, RunConfig, TokenizerChoice};
use crate::error::TrainError;
use crate::optimizer::Optimizer;

/// The optimizer's moments, in a checkpoint.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// The key of [`Progress`] in a checkpoint's metadata.
const PROGRESS_KEY: &str = "progress";

/// How far a run is: everything that its next step depends on besides weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Updates made: steps without the skipped ones.
    pub updates: u64,
    /// Skipped steps in a row up to now.
    pub bad_in_a_row: u64,
    /// The newest validation loss.
    pub val_loss: Option<f64>,
    /// A hash of the documents trained on, by which a resumed run sees that they have changed.
    pub data_hash: String,
}

/// What a run began with besides its configuration, in its folder.
pub(crate) const ORIGIN_FILE: &str = "origin.json";

/// The content of [`ORIGIN_FILE`].
#[derive(Serialize, Deserialize)]
struct Origin {
    /// The model folder whose weights the run began with.
    from: String,
}

/// Notes in a run's folder which model it begins with, so that it can be begun again.
pub(crate) fn write_origin(run_dir: &Path, from: Option<&Path>) -> Result<(), TrainError> {
    let Some(from) = from else { return Ok(()) };
    let path = run_dir.join(ORIGIN_FILE);
    let from = std::path::absolute(from).map_err(TrainError::io(from))?.display().to_string();
    let text = serde_json::to_string(&Origin { from }).map_err(|error| TrainError::io(&path)(error.into()))?;
    write_whole(&path, text.as_bytes()).map_err(TrainError::io(&path))
}

/// The model folder that the run in `run_dir` began with, if it did.
pub(crate) fn read_origin(run_dir: &Path) -> Result<Option<PathBuf>, TrainError> {
    let path = run_dir.join(ORIGIN_FILE);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(TrainError::io(&path))?,
    };
    let origin: Origin = serde_json::from_slice(&bytes).map_err(|error| TrainError::State {
        path,
        problem: format!("does not say what the run began with: {error}"),
    })?;
    Ok(Some(origin.from.into()))
}

/// Why a part of a checkpoint cannot be written.
pub(crate) type WriteError = Box<dyn std::error::Error + Send + Sync>;

/// Writes the model of a checkpoint into `dir`.
pub(crate) fn save_model(
    dir: &Path,
    decoder: &Decoder,
    weights: &DecoderWeights,
    tokenizer: &Tokenizer,
) -> Result<(), WriteError> {
    let options = SaveOptions { tokenizer: Some(tokenizer), ..SaveOptions::default() };
    Ok(hf::save_model(dir, decoder.config(), weights, &options).map(drop)?)
}

/// Writes the model of a checkpoint into `dir` while its tensors come: `next` gives one after another, and `part` is what this rank
/// has of them.
pub(crate) fn save_coming(
    dir: &Path,
    decoder: &Decoder,
    (part, next): (&DecoderWeights, &dyn Fn() -> io::Result<Tensor>),
    tokenizer: &Tokenizer,
) -> Result<(), WriteError> {
    let weights = ComingWeights { shapes: decoder.tensor_shapes(), states: part.states(), next };
    Ok(hf::save_coming(dir, decoder.config(), &weights, Some(tokenizer)).map(drop)?)
}

/// Writes the optimizer's moments into `dir`.
pub(crate) fn save_moments(dir: &Path, moments: &[TensorBytes<'_>]) -> Result<(), FileError> {
    let path = dir.join(OPTIMIZER_FILE);
    safetensors::write(&path, moments, &BTreeMap::new()).map_err(FileError::at(&path))
}

/// The moments of an optimizer, with what their tensors' names begin with in a checkpoint.
pub(crate) fn moments(optimizer: &Optimizer) -> [(&'static str, &Vec<Tensor>); 2] {
    [("first.", &optimizer.first), ("second.", &optimizer.second)]
}

/// The moments of an optimizer that has all of them, as a checkpoint has them: those of trainable weights.
pub(crate) fn lent_moments<'a>(optimizer: &'a Optimizer) -> Vec<TensorBytes<'a>> {
    let mut list = Vec::new();
    for (prefix, tensors) in moments(optimizer) {
        let lent = |(spec, tensor): (&WeightSpec, &'a Tensor)| TensorBytes {
            name: format!("{prefix}{}", spec.name),
            dtype: FileDType::F32,
            shape: tensor.shape().to_vec(),
            bytes: tensor.bytes().into(),
        };
        let trainable = optimizer.table().specs().iter().zip(tensors).filter(|(spec, _)| spec.is_trainable);
        list.extend(trainable.map(lent));
    }
    list
}

/// The metadata of a checkpoint: the step, and the whole progress beside it.
pub(crate) fn metadata(progress: &Progress) -> Metadata {
    let mut metadata = Metadata { step: progress.step, val_loss: progress.val_loss, ..Metadata::default() };
    // A struct of numbers is always JSON.
    if let Ok(value) = serde_json::to_value(progress) {
        metadata.extra.insert(PROGRESS_KEY.to_owned(), value);
    }
    metadata
}

/// Gives the part that is kept of a tensor of a whole model, from its entry in the table and it.
pub(crate) type Keep<'a> = dyn FnMut(&WeightSpec, &Tensor) -> Tensor + 'a;

/// A checkpoint to train on from: tensors lie in its files, and only what is asked for is read.
pub(crate) struct Stored {
    /// Lent from the files.
    pub(crate) weights: DecoderWeights,
    pub(crate) progress: Progress,
    optimizer: SafetensorsFile,
}

/// Opens a checkpoint of a model of `decoder`'s shape.
pub(crate) fn load(ctx: &Context, decoder: &Decoder, checkpoint: &Checkpoint) -> Result<Stored, TrainError> {
    let damaged = |problem: String| TrainError::State { path: checkpoint.path.clone(), problem };
    let value = checkpoint.metadata.extra.get(PROGRESS_KEY).cloned();
    let value =
        value.ok_or_else(|| damaged("holds no training progress: it is no checkpoint to train on from".into()))?;
    let progress: Progress = serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
    let (config, weights) = hf::load_model(ctx, &checkpoint.path)?;
    if config != *decoder.config() {
        return Err(damaged("the model's shape is not that of the run's config.toml".into()));
    }
    let optimizer = SafetensorsFile::open(&checkpoint.path.join(OPTIMIZER_FILE)).map_err(LoadError::from)?;
    Ok(Stored { weights, progress, optimizer })
}

impl Stored {
    /// The moments, `first` or `second`, of the weights of `table`: what `keep` keeps of them. Frozen weights have none.
    pub(crate) fn moment(
        &self,
        ctx: &Context,
        table: &WeightTable,
        moment: &str,
        mut keep: Box<Keep<'_>>,
    ) -> Result<Vec<Tensor>, TrainError> {
        let kept = |spec: &WeightSpec| {
            if !spec.is_trainable {
                return Ok(ctx.empty(&[0], DType::F32));
            }
            let whole = self.tensor(ctx, &format!("{moment}.{}", spec.name), &spec.shape)?;
            Ok(cast(ctx, &keep(spec, &whole), DType::F32))
        };
        table.specs().iter().map(kept).collect()
    }

    fn tensor(&self, ctx: &Context, name: &str, shape: &[usize]) -> Result<Tensor, TrainError> {
        let tensor = self.optimizer.tensor(ctx, name).map_err(LoadError::from)?;
        if tensor.shape() != shape || tensor.dtype() != DType::F32 {
            let problem = format!("{name} is {tensor:?}, but f32 of shape {shape:?} is needed");
            return Err(TrainError::State { path: self.optimizer.path().to_owned(), problem });
        }
        Ok(tensor)
    }
}

/// Makes the paths of the data absolute, so that the run can be resumed from any folder.
pub(crate) fn make_absolute(config: &mut RunConfig) -> Result<(), TrainError> {
    let absolute = |path: &Path| std::path::absolute(path).map_err(TrainError::io(path));
    for path in config.data.paths.iter_mut().filter(|path| !is_stdin(path)) {
        *path = absolute(Path::new(path))?.display().to_string();
    }
    if !config.data.hash_embeddings.as_os_str().is_empty() {
        config.data.hash_embeddings = absolute(&config.data.hash_embeddings)?;
    }
    if let TokenizerChoice::File(path) = &mut config.data.tokenizer {
        *path = absolute(path.as_ref())?.display().to_string();
    }
    if let PlacementChoice::File(path) = &mut config.parallel.placement {
        *path = absolute(path.as_ref())?.display().to_string();
    }
    Ok(())
}

/// Writes the run's effective configuration, replacing an older one at once.
pub(crate) fn write_config(run_dir: &Path, config: &RunConfig) -> Result<(), TrainError> {
    let path = run_dir.join(CONFIG_FILE);
    fs::create_dir_all(run_dir).map_err(TrainError::io(run_dir))?;
    write_whole(&path, config::print_config(config).as_bytes()).map_err(TrainError::io(&path))
}

/// Reads the configuration that a run was started with.
pub(crate) fn read_config(run_dir: &Path) -> Result<RunConfig, TrainError> {
    let path = run_dir.join(CONFIG_FILE);
    if !path.is_file() {
        let problem = format!("is not a run: it has no {CONFIG_FILE}");
        return Err(TrainError::State { path: run_dir.to_owned(), problem });
    }
    let mut config = ConfigLayers { file: Some(path.clone()), ..ConfigLayers::default() }.resolve()?;
    let text = fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    let table: toml::Table = text.parse().unwrap_or_default();
    if table.get("data").and_then(|data| data.get("validation_seed")).is_none() {
        // A run from before that setting held out what its own seed said: going on with other tokens would train on them.
        config.data.validation_seed = config.train.seed;
    }
    Ok(config)
}

/// The configuration that the run in `run_dir` goes on with: its own, changed by `change`, which may change settings but not
/// those that would make the model or its data others.
pub fn resumed_config(
    run_dir: &Path,
    change: impl FnOnce(RunConfig) -> Result<RunConfig, ConfigError>,
) -> Result<RunConfig, TrainError> {
    let stored = read_config(run_dir)?;
    let mut config = change(stored.clone())?;
    make_absolute(&mut config)?;
    check_resumable(run_dir, &stored, &config)?;
    Ok(config)
}

/// Every setting below `name` with its value.
fn flatten(name: &str, value: serde_json::Value, settings: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(section) => {
            section.into_iter().for_each(|(key, value)| flatten(&format!("{name}.{key}"), value, settings));
        }
        value => settings.push((name.to_owned(), value.to_string())),
    }
}

/// Refuses settings that would make the resumed steps those of another run (the model, the tokens and the seed), and those that are used
/// only when a run begins.
pub(crate) fn check_resumable(run_dir: &Path, stored: &RunConfig, given: &RunConfig) -> Result<(), TrainError> {
    let fixed = |config: &RunConfig| -> Result<Vec<(String, String)>, serde_json::Error> {
        let mut settings = Vec::new();
        flatten("model", serde_json::to_value(&config.model)?, &mut settings);
        settings.push(("data.tokenizer".to_owned(), String::from(config.data.tokenizer.clone())));
        settings.push(("data.validation_seed".to_owned(), config.data.validation_seed.to_string()));
        settings.push(("data.bpe_vocab_size".to_owned(), config.data.bpe_vocab_size.to_string()));
        settings.push(("data.hash_embeddings".to_owned(), config.data.hash_embeddings.display().to_string()));
        settings.push(("run.out".to_owned(), config.run.out.display().to_string()));
        settings.push(("run.name".to_owned(), config.run.name.clone()));
        settings.push(("train.seed".to_owned(), config.train.seed.to_string()));
        settings.push(("train.seq_len".to_owned(), config.train.seq_len.to_string()));
        settings.push(("train.freeze".to_owned(), format!("{:?}", config.train.freeze)));
        Ok(settings)
    };
    let as_state =
        |error: serde_json::Error| TrainError::State { path: run_dir.join(CONFIG_FILE), problem: error.to_string() };
    for ((setting, stored), (_, given)) in
        fixed(stored).map_err(as_state)?.into_iter().zip(fixed(given).map_err(as_state)?)
    {
        if stored != given {
            return Err(TrainError::Resume { run: run_dir.to_owned(), setting, stored, given });
        }
    }
    Ok(())
}
