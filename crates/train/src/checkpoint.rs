//! The parts of a checkpoint that are not the model: the optimizer's moments and the progress of the run.

use std::collections::BTreeMap;
use std::path::Path;

use moeworks_infer::store::{Checkpoint, Metadata};
use moeworks_model::files::FileError;
use moeworks_model::safetensors::{self, FileDType, SafetensorsFile, TensorBytes};
use moeworks_model::{LoadError, WeightSpec, WeightTable};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::optimizer::Optimizer;
use crate::task::KeepPart;

/// The file of the optimizer's moments in a checkpoint.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
/// The key of [`Progress`] in a checkpoint's metadata.
const PROGRESS_KEY: &str = "progress";

/// The progress of a run: the state besides weights and moments on which its next step depends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Tokens trained on; for other tasks their number of targets.
    pub tokens: u64,
    /// Updates made; skipped steps make none.
    pub updates: u64,
    /// Consecutive skipped steps up to now.
    pub bad_in_a_row: u64,
    /// The newest validation loss.
    pub val_loss: Option<f64>,
    /// A hash of the training data, by which a resumed run detects changed data.
    pub data_hash: String,
}

/// Reads the progress from a checkpoint.
pub(crate) fn progress(checkpoint: &Checkpoint) -> Result<Progress, TrainError> {
    let damaged = |problem: String| TrainError::State { path: checkpoint.path.clone(), problem };
    let value = checkpoint.metadata.extra.get(PROGRESS_KEY).cloned();
    let value = value.ok_or_else(|| {
        damaged("has no training progress: it is not a checkpoint that training can resume from".into())
    })?;
    serde_json::from_value(value).map_err(|error| damaged(error.to_string()))
}

/// Creates the metadata of a checkpoint: the step, and the whole progress.
pub(crate) fn metadata(progress: &Progress) -> Metadata {
    let mut metadata = Metadata { step: progress.step, val_loss: progress.val_loss, ..Metadata::default() };
    // Serialising a struct of numbers to JSON cannot fail.
    if let Ok(value) = serde_json::to_value(progress) {
        metadata.extra.insert(PROGRESS_KEY.to_owned(), value);
    }
    metadata
}

/// Writes the optimizer's moments to `dir`.
pub(crate) fn save_moments(dir: &Path, moments: &[TensorBytes<'_>]) -> Result<(), FileError> {
    let path = dir.join(OPTIMIZER_FILE);
    safetensors::write(&path, moments, &BTreeMap::new()).map_err(FileError::at(&path))
}

/// Returns the moments of an optimizer with the prefixes of their tensors' names in a checkpoint.
pub(crate) fn moments(optimizer: &Optimizer) -> [(&'static str, &Vec<Tensor>); 2] {
    [("first.", &optimizer.first), ("second.", &optimizer.second)]
}

/// Borrows the moments of trainable weights in the form that a checkpoint stores; the optimizer must have all of
/// them.
pub(crate) fn lent_moments(optimizer: &Optimizer) -> Vec<TensorBytes<'_>> {
    let mut list = Vec::new();
    for (prefix, tensors) in moments(optimizer) {
        let trainable = optimizer.table().specs().iter().zip(tensors).filter(|(spec, _)| spec.is_trainable);
        list.extend(trainable.map(|(spec, tensor)| TensorBytes {
            name: format!("{prefix}{}", spec.name),
            dtype: FileDType::F32,
            shape: tensor.shape().to_vec(),
            bytes: tensor.bytes().into(),
        }));
    }
    list
}

/// Loads the moments, first and second, of the weights of `table` from a checkpoint and reduces each by `keep`.
/// Frozen weights have no moments.
pub(crate) fn load_moments(
    ctx: &Context,
    table: &WeightTable,
    checkpoint: &Checkpoint,
    keep: &mut KeepPart<'_>,
) -> Result<[Vec<Tensor>; 2], TrainError> {
    let file = SafetensorsFile::open(&checkpoint.path.join(OPTIMIZER_FILE)).map_err(LoadError::from)?;
    let mut kept = |moment: &str, spec: &WeightSpec| {
        if !spec.is_trainable {
            return Ok(ctx.empty(&[0], DType::F32));
        }
        let whole = read(ctx, &file, &format!("{moment}.{}", spec.name), &spec.shape)?;
        Ok(cast(ctx, &keep(spec, &whole), DType::F32))
    };
    let mut all = |moment: &str| table.specs().iter().map(|spec| kept(moment, spec)).collect::<Result<_, TrainError>>();
    Ok([all("first")?, all("second")?])
}

/// Reads a tensor that must be f32 and of the given shape.
pub(crate) fn read(ctx: &Context, file: &SafetensorsFile, name: &str, shape: &[usize]) -> Result<Tensor, TrainError> {
    let tensor = file.tensor(ctx, name).map_err(LoadError::from)?;
    if tensor.shape() != shape || tensor.dtype() != DType::F32 {
        let problem = format!("{name} is {tensor:?}, but f32 of shape {shape:?} is needed");
        return Err(TrainError::State { path: file.path().to_owned(), problem });
    }
    Ok(tensor)
}
