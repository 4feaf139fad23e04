//! Models: opening one, its tokenizer and its chat template.

use std::ffi::{CStr, OsString};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use moeworks_gpu::DeviceChoice;
use moeworks_infer::chat::{Message, RenderOptions, Sandbox};
use moeworks_infer::compute::ComputeOptions;
use moeworks_infer::generation::ModelRef;
use moeworks_infer::open::{Model, OpenOptions, Source, WeightFormat};
use moeworks_ops::Context;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use serde_json::json;

use crate::calls::{object, unlocked};
use crate::{context, errors};

/// The name of capsules with a model.
const NAME: &CStr = c"moeworks.Model";

/// A model in use.
pub(crate) struct Opened {
    model: ManuallyDrop<Model>,
    source: Source,
    num_threads: usize,
    /// The process that opened it.
    process: u32,
    /// The context of a forked process, which has none of the threads of its parent.
    forked: Mutex<Option<Context>>,
}

impl Opened {
    /// Returns the model, for everything but computing.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the context to compute with in this process.
    pub(crate) fn context(&self) -> Context {
        if process::id() == self.process {
            return self.model.ctx.clone();
        }
        let mut forked = self.forked.lock().unwrap_or_else(PoisonError::into_inner);
        forked.get_or_insert_with(|| Context::cpu(self.num_threads)).clone()
    }

    /// Returns the parts that compute, in `ctx`.
    pub(crate) fn parts<'a>(&'a self, ctx: &'a Context) -> ModelRef<'a> {
        ModelRef { ctx, ..self.model.as_model_ref() }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // In a forked process the end of the context would wait for threads that are not there.
        if process::id() == self.process {
            // SAFETY: the field is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.model) };
        }
    }
}

/// Returns the model of a capsule.
pub(crate) fn opened(object: &Bound<'_, PyAny>) -> PyResult<Arc<Opened>> {
    let not_a_model = |_| PyTypeError::new_err("expected a model of moeworks.load");
    let capsule = object.cast::<PyCapsule>().map_err(|_| PyTypeError::new_err("expected a model of moeworks.load"))?;
    let pointer = capsule.pointer_checked(Some(NAME)).map_err(not_a_model)?;
    // SAFETY: capsules of this name are made by `load` alone, with this type.
    Ok(unsafe { pointer.cast::<Arc<Opened>>().as_ref() }.clone())
}

fn format(dtype: &str) -> PyResult<WeightFormat> {
    match dtype {
        "auto" => Ok(WeightFormat::Stored),
        "float32" => Ok(WeightFormat::F32),
        "bfloat16" => Ok(WeightFormat::Bf16),
        _ => Err(PyValueError::new_err(format!("dtype {dtype:?}: must be auto, float32 or bfloat16"))),
    }
}

/// `load(path, dtype, device, num_threads) -> (model, configuration as JSON)`.
pub(crate) fn load(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (path, dtype, device, num_threads): (PathBuf, String, String, usize) = args.extract()?;
    let options = OpenOptions { format: format(&dtype)?, ..OpenOptions::default() };
    let device: DeviceChoice = device.parse().map_err(errors::value)?;
    let machine = context::machine(py)?;
    let opened = unlocked(py, || {
        let source = Source::open(&path).map_err(|error| errors::at(&path, error))?;
        let compute = ComputeOptions { threads: num_threads, device, machine, ..ComputeOptions::default() };
        let ctx = compute.context().map_err(errors::value)?.ctx;
        let num_threads = ctx.threads().count();
        let model = Model::open(ctx, &source, options).map_err(errors::value)?;
        let model = ManuallyDrop::new(model);
        PyResult::Ok(Opened { model, source, num_threads, process: process::id(), forked: Mutex::default() })
    })??;
    let config = serde_json::to_value(opened.model.decoder.config()).map_err(errors::value)?;
    let tokenizer = &opened.model.tokenizer;
    let about = json!({
        "path": opened.source.path(), "config": config, "vocab_size": tokenizer.vocab_size(),
        "eos_id": tokenizer.eos_id(), "stop_ids": opened.model.stop_ids, "device": opened.model.ctx.describe(),
    });
    object(py, (PyCapsule::new_with_value(py, Arc::new(opened), NAME)?, about.to_string()))
}

/// `encode(model, text, reads_special) -> list[int]`: the ids of a prompt.
pub(crate) fn encode(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let (model, text, reads_special): (Bound<'_, PyAny>, String, bool) = args.extract()?;
    let opened = opened(&model)?;
    let tokenizer = &opened.model.tokenizer;
    let ids = match opened.model.has_encoder() {
        true => tokenizer.encode_source(&text),
        false => tokenizer.encode_prompt(&text, reads_special),
    };
    object(args.py(), ids.map_err(errors::value)?)
}

/// `decode(model, ids, shows_special) -> str`.
pub(crate) fn decode(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let (model, ids, shows_special): (Bound<'_, PyAny>, Vec<u32>, bool) = args.extract()?;
    let opened = opened(&model)?;
    let tokenizer = &opened.model.tokenizer;
    check_ids(&opened, &ids)?;
    let text = if shows_special { tokenizer.decode_with_special(&ids) } else { tokenizer.decode(&ids) };
    object(args.py(), text.map_err(errors::value)?)
}

/// Refuses ids outside of the vocabulary.
pub(crate) fn check_ids(opened: &Opened, ids: &[u32]) -> PyResult<()> {
    let size = opened.model.decoder.config().vocab_size;
    match ids.iter().find(|&&id| id as usize >= size) {
        None => Ok(()),
        Some(id) => Err(PyValueError::new_err(format!("token {id}: the vocabulary has {size} tokens"))),
    }
}

/// `render(model, messages as JSON, variables as JSON, program) -> str`: a conversation in the model's own template,
/// by `program` with the command that renders.
pub(crate) fn render(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (model, messages, variables, program): (Bound<'_, PyAny>, String, String, Vec<OsString>) = args.extract()?;
    let opened = opened(&model)?;
    let messages: Vec<Message> = serde_json::from_str(&messages).map_err(errors::value)?;
    let variables = serde_json::from_str(&variables).map_err(errors::value)?;
    let text = unlocked(py, || {
        let template = opened.source.chat_template(&opened.model.tokenizer).map_err(errors::value)?;
        let template = template.ok_or_else(|| {
            let path = opened.source.path().display();
            PyValueError::new_err(format!("{path}: the model has no chat template; use generate with a prompt"))
        })?;
        let Some((program, arguments)) = program.split_first() else {
            return Err(PyValueError::new_err("no program for the chat template"));
        };
        let options = RenderOptions { variables, ..RenderOptions::default() };
        Sandbox::new(program, arguments).render(&template, &messages, &options).map_err(errors::value)
    })??;
    object(py, text)
}
