//! The model of a checkpoint as a single `model.safetensors`, for models without a published format.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use moeworks_model::files::FileError;
use moeworks_model::safetensors::{self, FileDType, Payload, SafetensorsFile, TensorBytes};
use moeworks_model::{LoadError, ParamSet, WeightSpec, WeightTable};
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_tensor::{DType, Tensor};

use super::{KeepPart, ModelToSave, SaveError, Task};
use crate::checkpoint::read;
use crate::error::TrainError;

const FILE: &str = "model.safetensors";

/// Writes the weights of `table` and then the state.
pub(super) fn save<P: ParamSet>(dir: &Path, table: &WeightTable, model: &ModelToSave<'_, P>) -> Result<(), SaveError> {
    let (part, mut tensors): (&P, Vec<TensorBytes<'_>>) = match *model {
        ModelToSave::Whole(params) => {
            let lent = table.specs().iter().zip(params.params()).map(|(spec, tensor)| lent(spec.name.clone(), tensor));
            (params, lent.collect())
        }
        ModelToSave::Streamed { part, next } => (part, table.specs().iter().map(|spec| streamed(spec, next)).collect()),
    };
    tensors.extend(part.states().into_iter().map(|(name, tensor)| lent(name, tensor)));
    let path = dir.join(FILE);
    Ok(safetensors::write(&path, &tensors, &BTreeMap::new()).map_err(FileError::at(&path))?)
}

fn lent(name: String, tensor: &Tensor) -> TensorBytes<'_> {
    TensorBytes { name, dtype: FileDType::F32, shape: tensor.shape().to_vec(), bytes: tensor.bytes().into() }
}

fn streamed<'a>(spec: &WeightSpec, next: &'a dyn Fn() -> io::Result<Tensor>) -> TensorBytes<'a> {
    let make = move || Ok(next()?.bytes().to_vec());
    let bytes = Payload::Made { len: size_of::<f32>() * spec.num_elements(), make: Box::new(make) };
    TensorBytes { name: spec.name.clone(), dtype: FileDType::F32, shape: spec.shape.clone(), bytes }
}

/// Reads the weights of a task and its state.
pub(super) fn load<T: Task + ?Sized>(
    task: &T,
    ctx: &Context,
    dir: &Path,
    keep: &mut KeepPart<'_>,
) -> Result<T::Params, TrainError> {
    let path = dir.join(FILE);
    let file = SafetensorsFile::open(&path).map_err(LoadError::from)?;
    let read = |name: &str, shape: &[usize]| read(ctx, &file, name, shape);
    let mut failure = None;
    let mut params = task.build_params(ctx, &mut |spec| match read(&spec.name, &spec.shape) {
        Ok(whole) => cast(ctx, &keep(spec, &whole), DType::F32),
        Err(error) => {
            failure.get_or_insert(error);
            keep(spec, &ctx.zeros(&spec.shape, DType::F32))
        }
    });
    let names: Vec<String> = params.states().into_iter().map(|(name, _)| name).collect();
    for (name, state) in names.iter().zip(params.states_mut()) {
        *state = cast(ctx, &read(name, state.shape())?, DType::F32);
    }
    failure.map_or(Ok(params), Err)
}
