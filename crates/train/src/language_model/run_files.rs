//! The files of a run other than its checkpoints, and the settings of a resumed run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use moeworks_infer::data::is_stdin;
use moeworks_infer::store::CONFIG_FILE;
use moeworks_model::files::write_whole;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, ConfigLayers, PlacementChoice, RebalanceMode, RunConfig, TokenizerChoice};
use crate::error::TrainError;
use crate::pipeline::is_schedule_file;

/// The file in a run's folder that names the model it started from.
pub(crate) const ORIGIN_FILE: &str = "origin.json";

/// The content of [`ORIGIN_FILE`].
#[derive(Serialize, Deserialize)]
struct Origin {
    /// The model folder whose weights the run started from.
    from: String,
}

/// Records in a run's folder the model that it starts from, so that it can be restarted.
pub(super) fn write_origin(run_dir: &Path, from: Option<&Path>) -> Result<(), TrainError> {
    let Some(from) = from else { return Ok(()) };
    let path = run_dir.join(ORIGIN_FILE);
    let from = std::path::absolute(from).map_err(TrainError::io(from))?.display().to_string();
    let text = serde_json::to_string(&Origin { from }).map_err(|error| TrainError::io(&path)(error.into()))?;
    write_whole(&path, text.as_bytes()).map_err(TrainError::io(&path))
}

/// Reads the model folder that the run in `run_dir` started from, if any.
pub(super) fn read_origin(run_dir: &Path) -> Result<Option<PathBuf>, TrainError> {
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
    if let RebalanceMode::File(path) = &mut config.rebalance.mode {
        *path = absolute(path.as_ref())?.display().to_string();
    }
    if is_schedule_file(&config.parallel.schedule) {
        config.parallel.schedule = absolute(config.parallel.schedule.as_ref())?.display().to_string();
    }
    Ok(())
}

/// Reads the configuration with which a run was started.
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
        // Older runs held out tokens by train.seed; another split would train on held-out tokens.
        config.data.validation_seed = config.train.seed;
    }
    Ok(config)
}

/// Returns the configuration with which the run in `run_dir` continues: its own, modified by `change`. Settings that
/// would change the model or its data are refused.
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

/// Collects every setting below `name` with its value.
fn flatten(name: &str, value: serde_json::Value, settings: &mut Vec<(String, String)>) {
    match value {
        serde_json::Value::Object(section) => {
            section.into_iter().for_each(|(key, value)| flatten(&format!("{name}.{key}"), value, settings));
        }
        value => settings.push((name.to_owned(), value.to_string())),
    }
}

/// Refuses changed settings that would make the resumed steps those of another run (the model, the tokens and the
/// seed), and settings that only a new run uses.
fn check_resumable(run_dir: &Path, stored: &RunConfig, given: &RunConfig) -> Result<(), TrainError> {
    let fixed = |config: &RunConfig| -> Result<Vec<(String, String)>, serde_json::Error> {
        let mut settings = Vec::new();
        flatten("model", serde_json::to_value(&config.model)?, &mut settings);
        settings.push(("data.tokenizer".to_owned(), String::from(config.data.tokenizer.clone())));
        settings.push(("data.separate_documents".to_owned(), config.data.separate_documents.to_string()));
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
