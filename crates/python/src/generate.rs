//! Generation as a stream: a thread draws tokens, and Python takes them one by one.

use std::ffi::CStr;
use std::ops::ControlFlow;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use moeworks_infer::InferError;
use moeworks_infer::generation::{
    AnswerText, CachedSequence, GenerateRequest, Sampler, SamplingOptions, StopReason, TokenLimit, TokenLimits,
    generate, max_new_tokens,
};
use moeworks_infer::routing_record::{RecordSource, RoutingRecorder};
use moeworks_model::BatchError;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::calls::{message_of, object};
use crate::model::{Opened, check_ids, opened};
use crate::{errors, routing};

/// The name of capsules with a stream.
const NAME: &CStr = c"moeworks.Stream";

/// The time between two looks for Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(50);

/// A part of an answer.
enum Part {
    /// A token with the text that it completes.
    Token { text: String, id: u32 },
    /// The end, with text that was held back.
    End { text: String, reason: &'static str },
    /// The reason of a failure.
    Failed(String),
}

/// The receiving end of an answer. Its end ends the thread at the next token.
struct Stream {
    parts: Mutex<Receiver<Part>>,
}

/// temperature, top_k, top_p, min_p, seed.
type Sampling = (f32, usize, f32, f32, u64);
/// The arguments of [`start`], as Python passes them.
type Arguments<'py> = (Bound<'py, PyAny>, Vec<u32>, Option<usize>, Sampling, Vec<String>, Option<PathBuf>);

/// An answer to compute.
struct Job {
    prompt: Vec<u32>,
    max_new_tokens: usize,
    sampler: Sampler,
    stops: Vec<String>,
    recorder: Option<RoutingRecorder>,
}

/// `start(model, prompt ids, max_tokens | None, sampling, stops, record file | None) -> stream`.
pub(crate) fn start(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (model, prompt, asked, sampling, stops, record): Arguments<'_> = args.extract()?;
    let opened = opened(&model)?;
    if prompt.is_empty() {
        return Err(errors::value(InferError::EmptyPrompt));
    }
    check_ids(&opened, &prompt)?;
    let (temperature, top_k, top_p, min_p, seed) = sampling;
    let options = SamplingOptions { temperature, top_k, top_p, min_p, seed, ..SamplingOptions::default() };
    let sampler = Sampler::new(options).map_err(errors::value)?;
    let limits = TokenLimits { asked: asked.map(TokenLimit::Tokens), of_model: None };
    let max_new_tokens = max_new_tokens(opened.model(), prompt.len(), limits).map_err(errors::value)?;
    let recorder = routing::recorder(opened.model(), RecordSource::Generate, record.as_deref())?;
    let job = Job { prompt, max_new_tokens, sampler, stops, recorder };
    let (sender, parts) = sync_channel(1);
    let work = move || {
        let result = panic::catch_unwind(AssertUnwindSafe(|| answer(&opened, job, &sender)));
        let last = match result {
            Ok(Ok(last)) => last,
            Ok(Err(error)) => Part::Failed(errors::line(&error)),
            Err(payload) => Part::Failed(message_of(&*payload)),
        };
        // Without a reader nobody wants to know.
        let _ = sender.send(last);
    };
    let named = thread::Builder::new().name("moeworks-generate".to_owned());
    named.spawn(work).map_err(|error| PyValueError::new_err(format!("cannot start a thread: {error}")))?;
    object(py, PyCapsule::new_with_value(py, Stream { parts: Mutex::new(parts) }, NAME)?)
}

/// Computes an answer and sends its parts; returns the last.
fn answer(opened: &Arc<Opened>, job: Job, sender: &SyncSender<Part>) -> Result<Part, InferError> {
    let Job { prompt, max_new_tokens, mut sampler, stops, recorder } = job;
    let (ctx, model) = (opened.context(), opened.model());
    let mut writer = AnswerText::new(model, &prompt, &stops);
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    if max_new_tokens == 0 {
        return Ok(Part::End { text: String::new(), reason: "length" });
    }
    let config = model.decoder.config();
    let mut sequence = match recorder {
        Some(recorder) => CachedSequence::recorded(config, recorder),
        None => CachedSequence::new(config),
    };
    let mut failure = None;
    let generated = generate(opened.parts(&ctx), &mut sequence, &request, &mut sampler, |id| {
        if request.stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        let text = writer.push(id).unwrap_or_else(|error| {
            failure = Some(error);
            String::new()
        });
        let is_gone = sender.send(Part::Token { text, id }).is_err();
        if is_gone || failure.is_some() || writer.is_stopped() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    let generated =
        generated.map_err(|error| if error == BatchError::NotANumber { model.not_a_number() } else { error.into() })?;
    if let Some(error) = failure {
        return Err(error);
    }
    sequence.end_recording()?;
    let text = writer.finish()?;
    let is_stopped = writer.is_stopped() || generated.reason == StopReason::StopId;
    Ok(Part::End { text, reason: if is_stopped { "stop" } else { "length" } })
}

/// `next(stream) -> (text, id | None, finish_reason | None) | None`. Waits for the next part; Ctrl-C ends the wait.
pub(crate) fn next(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (stream,): (Bound<'_, PyAny>,) = args.extract()?;
    let wrong = || PyTypeError::new_err("expected a stream");
    let pointer = stream.cast::<PyCapsule>().map_err(|_| wrong())?.pointer_checked(Some(NAME)).map_err(|_| wrong())?;
    // SAFETY: capsules of this name are made by `start` alone, with this type; `stream` keeps it alive.
    let stream = unsafe { pointer.cast::<Stream>().as_ref() };
    loop {
        let part = py.detach(|| stream.parts.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(PATIENCE));
        return match part {
            Ok(Part::Token { text, id }) => object(py, (text, id, py.None())),
            Ok(Part::End { text, reason }) => object(py, (text, py.None(), reason)),
            Ok(Part::Failed(message)) => Err(PyValueError::new_err(message)),
            Err(RecvTimeoutError::Disconnected) => Ok(py.None()),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals()?;
                continue;
            }
        };
    }
}
