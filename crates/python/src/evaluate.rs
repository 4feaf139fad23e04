//! Evaluation: how well a model predicts a text.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use moeworks_infer::data::{CachePlace, Sources, TextOptions, TokenStore, Watch};
use moeworks_infer::evaluation::{EvaluationOptions, evaluate_recorded};
use moeworks_infer::routing_record::RecordSource;
use moeworks_train::config::RunConfig;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use serde_json::{Value, json};

use crate::calls::{object, unlocked};
use crate::model::opened;
use crate::{errors, routing};

/// The arguments of [`evaluate`], as Python passes them.
type Arguments<'py> = (Bound<'py, PyAny>, Vec<String>, String, Option<usize>, usize, Option<PathBuf>, Option<PathBuf>);

/// `evaluate(model, paths, text_field, seq_len | None, max_sequences, cache folder | None, record file | None)`,
/// which returns JSON.
pub(crate) fn evaluate(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (model, paths, text_field, seq_len, max_sequences, cache, record): Arguments<'_> = args.extract()?;
    let opened = opened(&model)?;
    let options = EvaluationOptions { seq_len, max_sequences };
    let mut interrupt = None;
    let result = unlocked(py, || {
        let model = opened.model();
        options.seq_len(model).map_err(errors::value)?;
        let watch = Watch::new(Arc::default()).with_user_cache(cache);
        let text = TextOptions { paths, text_field, ..TextOptions::default() };
        let sources = Sources::find(&text, &watch).map_err(errors::value)?;
        let place: CachePlace = RunConfig::default().cache_place(watch.user_cache());
        let tokens = TokenStore::open(&sources, &model.tokenizer, &place).map_err(errors::value)?;
        let mut recorder = routing::recorder(model, RecordSource::Evaluate, record.as_deref())?;
        let result = evaluate_recorded(model, &tokens, options, recorder.as_mut(), |_| {
            interrupt = Python::attach(|py| py.check_signals()).err();
            if interrupt.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let result = result.map_err(errors::value)?;
        let layers = model.decoder.config().moe_layers().into_iter().zip(&result.stats.layers);
        let layers: Vec<Value> = layers
            .map(
                |((_, i), layer)| json!({ "layer": i, "tokens_per_expert": layer.tokens_per_expert, "cv": layer.cv() }),
            )
            .collect();
        PyResult::Ok(json!({
            "tokens": result.stats.num_targets, "bytes": result.num_bytes, "loss": result.loss(),
            "perplexity": result.perplexity(), "bits_per_byte": result.bits_per_byte(),
            "accuracy": result.accuracy(), "layers": layers,
        }))
    })?;
    match interrupt {
        Some(error) => Err(error),
        None => object(py, result?.to_string()),
    }
}
