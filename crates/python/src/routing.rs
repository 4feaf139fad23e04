//! The experts of each token, recorded in a file and read from it.

use std::path::{Path, PathBuf};

use moeworks_infer::open::Model;
use moeworks_infer::routing_record::{
    Block, LayerChoices, NONE, RecordHeader, RecordOptions, RecordReader, RecordSource, RecordWriter, RoutingRecorder,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use serde_json::json;

use crate::calls::{object, unlocked};
use crate::errors;

/// Begins a record with weights at `path`, if there is one.
pub(crate) fn recorder(model: &Model, source: RecordSource, path: Option<&Path>) -> PyResult<Option<RoutingRecorder>> {
    let Some(path) = path else { return Ok(None) };
    let header = RecordHeader::new(source, "model", model.decoder.config()).map_err(errors::value)?;
    let writer = RecordWriter::create(path, header).map_err(errors::value)?;
    let options = RecordOptions { token_ids: false, weights: true };
    Ok(Some(RoutingRecorder::new(writer, options)))
}

/// The choices of all tokens in a layer, as rows of one length.
#[derive(Clone, Default)]
struct Layer {
    top_k: usize,
    /// `[T, K]`: -1 where a token has fewer.
    expert_ids: Vec<i32>,
    /// `[T, K]`
    weights: Vec<f32>,
    /// `[T, K]`: 1 for dropped choices.
    dropped: Vec<u8>,
}

impl Layer {
    /// Makes rows as long as `top_k`.
    fn widen(&mut self, top_k: usize) {
        if top_k <= self.top_k {
            return;
        }
        let old = std::mem::replace(self, Self { top_k, ..Self::default() });
        if old.top_k > 0 {
            self.append(old.top_k, &old.expert_ids, &old.weights, &old.dropped);
        }
    }

    /// Appends rows of `top_k` choices.
    fn append(&mut self, top_k: usize, expert_ids: &[i32], weights: &[f32], dropped: &[u8]) {
        let missing = self.top_k - top_k;
        let rows = expert_ids.chunks_exact(top_k).zip(weights.chunks_exact(top_k)).zip(dropped.chunks_exact(top_k));
        for ((ids, weights), dropped) in rows {
            self.expert_ids.extend(ids.iter().copied().chain(std::iter::repeat_n(-1, missing)));
            self.weights.extend(weights.iter().copied().chain(std::iter::repeat_n(0.0, missing)));
            self.dropped.extend(dropped.iter().copied().chain(std::iter::repeat_n(0, missing)));
        }
    }

    /// Appends the choices of a block.
    fn add(&mut self, top_k: usize, choices: &LayerChoices) {
        self.widen(top_k);
        let len = choices.expert_ids.len();
        let ids: Vec<i32> = choices.expert_ids.iter().map(|&id| if id == NONE { -1 } else { id as i32 }).collect();
        let weights = choices.weights.clone().unwrap_or_else(|| vec![0.0; len]);
        let dropped = match &choices.dropped {
            Some(dropped) => dropped.iter().map(|&is_dropped| u8::from(is_dropped)).collect(),
            None => vec![0; len],
        };
        self.append(top_k, &ids, &weights, &dropped);
    }
}

/// Reads all choices of tokens in a record.
fn read(path: &Path) -> PyResult<(RecordHeader, Vec<Layer>)> {
    let mut reader = RecordReader::open(path).map_err(errors::value)?;
    let header = reader.header().clone();
    let mut layers = vec![Layer::default(); header.layers.len()];
    while let Some(block) = reader.next_block().map_err(errors::value)? {
        let Block::Tokens(block) = block else { continue };
        for (layer, choices) in layers[block.first_layer..].iter_mut().zip(&block.layers) {
            layer.add(block.top_k, choices);
        }
    }
    Ok((header, layers))
}

/// `read_routing(path) -> (header as JSON, [(K, ids, weights, dropped)])`: the choices `[T, K]` of each MoE layer, as
/// bytes of i32, f32 and u8.
pub(crate) fn read_routing(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (path,): (PathBuf,) = args.extract()?;
    let (header, layers) = unlocked(py, || read(&path))??;
    let bytes = |bytes: &[u8]| PyBytes::new(py, bytes).unbind();
    let rows = layers.iter().map(|layer| {
        let Layer { top_k, expert_ids, weights, dropped } = layer;
        (*top_k, bytes(bytemuck::cast_slice(expert_ids)), bytes(bytemuck::cast_slice(weights)), bytes(dropped))
    });
    let about = json!({ "layers": header.layers, "num_experts": header.num_experts, "top_k": header.top_k });
    object(py, (about.to_string(), rows.collect::<Vec<_>>()))
}
