//! Training of a language model, with its events.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use moeworks_infer::data::Watch;
use moeworks_infer::store::{Pick, resolve_run};
use moeworks_ops::MachineOptions;
use moeworks_train::config::{ConfigLayers, Override, RunConfig};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart, LanguageModelTrainer};
use moeworks_train::metrics::LayerRecord;
use moeworks_train::report::write_report;
use moeworks_train::{Event, IfTaken, Outcome, Requests, RunFolder, resumed_config};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use serde_json::{Map, Value, json};

use crate::calls::{object, unlocked};
use crate::{context, errors};

/// preset, file, settings as `NAME=VALUE`, folder of a model to start from.
type Settings = (Option<String>, Option<PathBuf>, Vec<String>, Option<PathBuf>);
/// folder of the run, whether to replace it, run to resume, cache folder.
type Places = (Option<PathBuf>, bool, Option<PathBuf>, Option<PathBuf>);

/// A run to start or to resume.
enum Start {
    New { config: RunConfig, folder: RunFolder, from: Option<PathBuf> },
    Resumed { config: RunConfig, run_dir: PathBuf },
}

impl Start {
    fn new((preset, file, settings, from): Settings, (out, is_forced, resume, _): Places) -> PyResult<Self> {
        let overrides = settings.iter().map(|text| Override::parse(text)).collect::<Result<_, _>>();
        let from = from.map(|path| resolve_run(&path, Pick::Latest).map_err(|error| errors::at(&path, error)));
        let from = from.transpose()?.map(|run| run.model_dir);
        let overrides = overrides.map_err(errors::value)?;
        let layers = ConfigLayers { preset, from: from.clone(), file: file.clone(), overrides };
        if let Some(run_dir) = resume {
            let config = resumed_config(&run_dir, |stored| layers.resolve_over(stored));
            return Ok(Self::Resumed { config: config.map_err(|error| errors::at(&run_dir, error))?, run_dir });
        }
        let config = layers.resolve().map_err(|error| match &file {
            Some(path) => errors::at(path, error),
            None => errors::value(error),
        })?;
        let folder = out.ok_or_else(|| PyValueError::new_err("out: give the folder of the run"))?;
        let folder = RunFolder::new(folder, if is_forced { IfTaken::Replace } else { IfTaken::Refuse });
        Ok(Self::New { config, folder, from })
    }

    fn config(&self) -> &RunConfig {
        match self {
            Self::New { config, .. } | Self::Resumed { config, .. } => config,
        }
    }

    fn trainer(self, machine: MachineOptions, watch: &Watch) -> PyResult<LanguageModelTrainer> {
        match self {
            Self::New { config, folder, from } => {
                let start = LanguageModelStart { from, machine, ..LanguageModelStart::new(config, folder, watch) };
                LanguageModel::start(start).map_err(errors::value)
            }
            Self::Resumed { config, run_dir } => {
                LanguageModel::resume(LanguageModelResume { run_dir, config, ranks: None, machine, watch })
                    .map_err(errors::value)
            }
        }
    }
}

/// Returns an event as JSON.
fn as_json(event: &Event<'_>) -> Value {
    match event {
        Event::Step { record, total_steps, val_loss } => {
            let metrics: Map<String, Value> = record
                .scalars()
                .into_iter()
                .filter(|(_, value)| value.is_finite())
                .map(|(name, value)| (name, json!(value)))
                .collect();
            let layer = |layer: &LayerRecord| json!({ "layer": layer.layer, "tokens_per_expert": layer.tokens_per_expert, "dropped": layer.num_dropped });
            let layers: Vec<Value> = record.layers.iter().map(layer).collect();
            json!({
                "event": "step", "step": record.step, "total_steps": total_steps, "tokens": record.tokens,
                "loss": record.loss, "val_loss": val_loss, "metrics": metrics, "layers": layers,
            })
        }
        Event::Sample(sample) => {
            json!({ "event": "sample", "step": sample.step, "prompt": sample.prompt, "text": sample.text })
        }
        Event::Skipped { step, in_a_row, max_in_a_row } => {
            json!({ "event": "skipped", "step": step, "in_a_row": in_a_row, "max_in_a_row": max_in_a_row })
        }
        Event::Saved(path) => json!({ "event": "saved", "path": path }),
    }
}

/// `train(settings, places, on_event | None) -> JSON`. An exception of `on_event`, and Ctrl-C, stop the run after the
/// step, which writes a checkpoint; the exception is passed on then.
pub(crate) fn train(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (settings, places, on_event): (Settings, Places, Option<Py<PyAny>>) = args.extract()?;
    let (machine, cache) = (context::machine(py)?, places.3.clone());
    let mut raised: Option<PyErr> = None;
    let result = unlocked(py, || {
        let start = Start::new(settings, places)?;
        if start.config().parallel.num_ranks() > 1 {
            let message =
                "parallel: ranks are processes or threads of the program; call moeworks.run([\"train\", ...])";
            return Err(PyValueError::new_err(message));
        }
        let requests = Requests::default();
        let watch = Watch::new(Arc::clone(&requests.stop)).with_user_cache(cache);
        let mut trainer = start.trainer(machine, &watch)?;
        let outcome = trainer.run(&requests, &mut |event| {
            let tell = Python::attach(|py| {
                py.check_signals()?;
                match &on_event {
                    Some(on_event) => on_event.call1(py, (as_json(&event).to_string(),)).map(|_| ()),
                    None => Ok(()),
                }
            });
            if let Err(error) = tell {
                requests.stop.store(true, Ordering::SeqCst);
                raised.get_or_insert(error);
            }
        });
        let report = write_report(trainer.run_dir());
        let outcome = outcome.map_err(errors::value)?;
        Ok(json!({
            "path": trainer.run_dir(), "step": trainer.progress().step, "val_loss": trainer.progress().val_loss,
            "is_finished": outcome == Outcome::Finished, "checkpoint": trainer.last_checkpoint(),
            "report": report.ok(),
        }))
    })?;
    match raised {
        Some(error) => Err(error),
        None => object(py, result?.to_string()),
    }
}
