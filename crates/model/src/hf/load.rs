//! Reading a model folder.
//!
//! The presence and shape of every tensor are checked against the configuration before its memory is allocated, so
//! that no more is allocated than the files hold.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{Bytes, DType, Tensor, bf16, f16};
use serde_json::{Map, Value};

use super::blocks;
use super::config_json::{self, ConfigFile, Fault};
use super::error::LoadError;
use super::family::Family;
use super::mxfp4;
use super::names::{TensorSlice, forms};
use super::slices::{ReadElement, SliceReader};
use crate::config::ModelConfig;
use crate::file_kind;
use crate::gguf::block_types;
use crate::safetensors::ModelFiles;
use crate::weights::{DecoderWeights, ModelPart, TensorPart, WeightTable, chosen, part_shape, select};

/// The largest `config.json` that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// A model folder whose `config.json` has been read.
pub struct ModelFolder {
    pub(super) dir: PathBuf,
    pub(super) family: &'static Family,
    pub(super) keys: Map<String, Value>,
    config: ModelConfig,
    unknown_keys: Vec<String>,
}

impl ModelFolder {
    /// Reads the `config.json` of `dir`.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let path = &dir.join("config.json");
        let bad = |reason: String| LoadError::Config { path: path.clone(), reason };
        let json = read_json(path)?;
        let ConfigFile { family, config, unknown_keys } = config_json::read(&json).map_err(|fault| match fault {
            Fault::UnknownFamily(model_type) => LoadError::UnknownFamily { path: path.clone(), model_type },
            Fault::Other(reason) => bad(reason),
        })?;
        config.validate().map_err(|source| LoadError::Setting { path: path.clone(), source })?;
        if config.vocab_size == 0 {
            return Err(bad("vocab_size = 0: must be at least 1".to_owned()));
        }
        let Value::Object(keys) = json else { return Err(bad("not a JSON object".to_owned())) };
        Ok(Self { dir: dir.to_owned(), family, keys, config, unknown_keys })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the keys of `config.json` that are in no table: they may change what the model's makers compute.
    #[must_use]
    pub fn unknown_keys(&self) -> &[String] {
        &self.unknown_keys
    }

    /// `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(&self) -> &'static str {
        self.family.model_type
    }
}

/// Loads the configuration and the weights of the model folder `dir`.
///
/// Matrices keep their type: f32, bf16, f16, or blocks ([ours](super::Quantize), MXFP4 or FP8). FP8 matrices whose
/// row length is not a multiple of 128 become bf16. Norm weights, biases and routers become f32.
///
/// Matrices are borrowed from the mapped files wherever no tensors have to be joined, and are then read-only: for
/// training make a [`DecoderWeights::compute_copy`]. Experts stored one by one make a tensor [of
/// pieces](Tensor::pieces). The values and scales of MXFP4 and FP8 matrices [stay where they
/// are](Tensor::with_split_scales), and stacks that are transposed on disk [stay so](Tensor::transposed).
pub fn load_model(ctx: &Context, dir: &Path) -> Result<(ModelConfig, DecoderWeights), LoadError> {
    load_part(ctx, dir, &ModelPart::Whole)
}

/// Loads a part of the model folder `dir`; see [`load_model`]. All tensors are checked, but only those of the part
/// are read.
pub fn load_part(ctx: &Context, dir: &Path, part: &ModelPart) -> Result<(ModelConfig, DecoderWeights), LoadError> {
    let ModelFolder { family, config, unknown_keys, .. } = ModelFolder::open(dir)?;
    warn_of_keys(&dir.join("config.json"), &unknown_keys);
    let files = ModelFiles::open(dir)?;
    let loader = Loader { dir, ctx, family, part, reader: SliceReader { files: &files, used: RefCell::default() } };
    let weights = loader.decoder(&config)?;
    loader.check_all_used(&config)?;
    Ok((config, weights))
}

/// Warnings that were logged.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Forgets which warnings were logged, so that the next load of a model logs them again.
pub fn warn_again() {
    SAID.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Logs a file's unused keys as one warning, once per file.
pub(crate) fn warn_of_keys(path: &Path, unknown_keys: &[String]) {
    if unknown_keys.is_empty() {
        return;
    }
    let line = format!(
        "{}: unknown keys: {} (results are wrong if one of them changes what the model computes)",
        path.display(),
        unknown_keys.join(", ")
    );
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
        tracing::warn!("{line}");
    }
}

/// Reads a JSON file of a model folder, of at most 16 MiB.
pub fn read_json(path: &Path) -> Result<Value, LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), source };
    let bad = |reason: String| LoadError::Config { path: path.to_owned(), reason };
    let metadata = fs::metadata(path).map_err(io)?;
    if !metadata.is_file() || metadata.len() > MAX_CONFIG_BYTES {
        return Err(bad(format!("not a file of at most {MAX_CONFIG_BYTES} bytes")));
    }
    let json = file_kind::json(fs::read(path).map_err(io)?).map_err(bad)?;
    file_kind::server_error(&json).map_or(Ok(json), |what| Err(bad(format!("this is {what}"))))
}

struct Loader<'a> {
    dir: &'a Path,
    ctx: &'a Context,
    family: &'static Family,
    /// The part that is loaded.
    part: &'a ModelPart,
    reader: SliceReader<'a>,
}

/// One of our tensors.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    name: &'a str,
    shape: &'a [usize],
    /// True for an operand of products.
    is_product: bool,
    /// True if the experts have a gate.
    is_gated: bool,
}

impl Loader<'_> {
    fn decoder(&self, config: &ModelConfig) -> Result<DecoderWeights, LoadError> {
        let is_gated = config.moe().activation.num_inputs() == 2;
        self.check_layers(config)?;
        // The structure and the shapes come first, then the tensors: nothing is allocated that the files do not hold.
        let (table, mut state_shapes) = (WeightTable::new(config), Vec::new());
        let empty = || self.ctx.empty(&[0], DType::F32);
        let mut weights = DecoderWeights::build(
            config,
            &table,
            |_| empty(),
            |state| {
                state_shapes.push(state.shape.clone());
                empty()
            },
        );
        for ((_, _, to), spec) in weights.entries_mut().into_iter().zip(table.specs()) {
            let (name, shape, is_product) = (&*spec.name, &*spec.shape, spec.role.is_product());
            let wanted = Wanted { name, shape, is_product, is_gated };
            match self.part.of_tensor(spec, config.num_encoder_layers()) {
                TensorPart::Whole => *to = self.tensor(wanted, None)?,
                TensorPart::Experts(experts) => *to = self.experts(wanted, &experts)?,
                TensorPart::Nothing => self.check(wanted)?,
            }
        }
        let names: Vec<String> = weights.states().into_iter().map(|(name, _)| name).collect();
        for ((name, place), shape) in names.iter().zip(weights.states_mut()).zip(state_shapes) {
            let wanted = Wanted { name, shape: &shape, is_product: false, is_gated };
            if self.part.has_all_else() {
                *place = self.tensor(wanted, None)?;
            } else {
                self.check(wanted)?;
            }
        }
        Ok(weights)
    }

    /// Fails if the files have fewer tensors than the model has layers, before the list of the layers' names is
    /// allocated.
    fn check_layers(&self, config: &ModelConfig) -> Result<(), LoadError> {
        let (layers, tensors) = (config.num_layers, self.reader.files.names().count());
        if layers <= tensors {
            return Ok(());
        }
        let reason = format!("num_hidden_layers = {layers}: the files have {tensors} tensors in all");
        Err(LoadError::Config { path: self.dir.join("config.json"), reason })
    }

    /// Loads the given experts, ascending, of a stack; perhaps none.
    fn experts(&self, wanted: Wanted<'_>, experts: &[usize]) -> Result<Tensor, LoadError> {
        if !experts.is_empty() {
            return self.tensor(wanted, Some(experts));
        }
        // The type is that of the experts that are elsewhere.
        let first = self.tensor(wanted, Some(&[0]))?;
        Ok(self.ctx.empty(&part_shape(wanted.shape, &[]), first.dtype()))
    }

    /// Loads one of our tensors, or some experts of a stack. A tensor that is no operand of products becomes f32.
    fn tensor(&self, wanted: Wanted<'_>, experts: Option<&[usize]>) -> Result<Tensor, LoadError> {
        let Wanted { name, shape, is_product, .. } = wanted;
        if is_product && let Some(tensor) = self.blocks(name, shape)? {
            return Ok(experts.map_or(tensor.clone(), |experts| select(self.ctx, &tensor, experts)));
        }
        let slices = self.slices(wanted);
        let tensor = match experts {
            None => self.read(&slices, shape, is_product)?,
            Some(experts) => self.read_experts(&slices, wanted, experts)?,
        };
        Ok(if is_product { tensor } else { elementwise::cast(self.ctx, &tensor, DType::F32) })
    }

    /// Lists the slices of one of our tensors, in the first form whose first slice is present.
    fn slices(&self, wanted: Wanted<'_>) -> Vec<TensorSlice> {
        let mut forms = forms(self.family, wanted.name, wanted.shape, wanted.is_gated);
        let found = forms.iter().position(|slices| slices.first().is_some_and(|slice| self.reader.has(slice)));
        forms.swap_remove(found.unwrap_or(0))
    }

    /// Reads some experts of a stack. Experts stored one by one are checked all and read where they are wanted.
    fn read_experts(&self, slices: &[TensorSlice], wanted: Wanted<'_>, experts: &[usize]) -> Result<Tensor, LoadError> {
        let Wanted { shape, is_product, .. } = wanted;
        let num_experts = shape[0];
        if let Some((slice, view)) = slices.first().and_then(TensorSlice::as_mxfp4) {
            return mxfp4::read_experts(self.ctx, &self.reader, slice, view, experts);
        }
        if slices.len() == 1 || !slices.len().is_multiple_of(num_experts) {
            return Ok(select(self.ctx, &self.read(slices, shape, is_product)?, experts));
        }
        slices.iter().try_for_each(|slice| self.reader.check(slice).map(drop))?;
        self.read(&chosen(slices, num_experts, experts), &part_shape(shape, experts), is_product)
    }

    /// Checks that the files have one of our tensors, without reading it.
    fn check(&self, wanted: Wanted<'_>) -> Result<(), LoadError> {
        let Wanted { name, shape, is_product, .. } = wanted;
        if is_product && self.blocks(name, shape)?.is_some() {
            return Ok(());
        }
        let slices = self.slices(wanted);
        if let Some((slice, view)) = slices.first().and_then(TensorSlice::as_mxfp4) {
            // It is not read either.
            return mxfp4::read(self.ctx, &self.reader, slice, view).map(drop);
        }
        slices.iter().try_for_each(|slice| self.reader.check(slice).map(drop))
    }

    /// Returns our tensor `name` in blocks, borrowed from the file, if it is stored in blocks.
    fn blocks(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>, LoadError> {
        for (dtype, _) in block_types() {
            if let Some(on_disk) = blocks::shape_on_disk(shape, dtype)
                && let Some(tensor) = self.reader.blocks(&blocks::name_on_disk(name, dtype), &on_disk, shape, dtype)?
            {
                return Ok(Some(tensor));
            }
        }
        Ok(None)
    }

    fn read(&self, slices: &[TensorSlice], shape: &[usize], is_product: bool) -> Result<Tensor, LoadError> {
        if let Some((slice, view)) = slices.first().and_then(TensorSlice::as_mxfp4) {
            return mxfp4::read(self.ctx, &self.reader, slice, view);
        }
        let dtypes = slices.iter().map(|slice| self.reader.check(slice)).collect::<Result<Vec<_>, _>>()?;
        if let [TensorSlice { name, view: None, .. }] = slices
            && let Some(tensor) = self.reader.lent(self.ctx, name)?
        {
            return Ok(tensor.reshaped(shape));
        }
        if is_product && let Some(tensor) = self.transposed(slices)? {
            return Ok(tensor);
        }
        if let Some(tensor) = self.borrowed(slices, shape, is_product)? {
            return Ok(tensor);
        }
        let one_type = dtypes.first().filter(|first| dtypes.iter().all(|dtype| dtype == *first));
        match one_type {
            Some(DType::BF16) => self.joined::<bf16>(slices, shape),
            Some(DType::F16) => self.joined::<f16>(slices, shape),
            _ => self.joined::<f32>(slices, shape),
        }
    }

    /// Allocates a tensor and reads its checked slices into it.
    fn joined<T: ReadElement>(&self, slices: &[TensorSlice], shape: &[usize]) -> Result<Tensor, LoadError> {
        let mut tensor = self.ctx.empty(shape, T::DTYPE);
        let len = tensor.len() / slices.len().max(1);
        for (index, slice) in slices.iter().enumerate() {
            self.reader.read(slice, &mut tensor.slice_mut::<T>()[index * len..(index + 1) * len])?;
        }
        Ok(tensor)
    }

    /// Borrows the checked slices of a tensor from the files; none if one has to be converted. Products read an
    /// expert's gate and up as one matrix, so two that are in different files are copied together, unless they are
    /// quantized.
    fn borrowed(&self, slices: &[TensorSlice], shape: &[usize], is_product: bool) -> Result<Option<Tensor>, LoadError> {
        let lent = self.reader.all_lent(self.ctx, slices, is_product)?;
        let Some(mut tensors) = lent else { return Ok(None) };
        if let [tensor] = &*tensors {
            return Ok(Some(tensor.clone().reshaped(shape)));
        }
        let num_matrices = if let [matrices, _, _] = *shape { matrices } else { 1 };
        if tensors.len() == 2 * num_matrices {
            for halves in tensors.as_chunks_mut::<2>().0 {
                self.copy_together(halves);
            }
        }
        Ok(Tensor::of_pieces(self.ctx.pool(), tensors, shape))
    }

    /// Borrows a stack of matrices that is transposed on disk.
    fn transposed(&self, slices: &[TensorSlice]) -> Result<Option<Tensor>, LoadError> {
        let [TensorSlice { name, view: Some(view), shape, .. }] = slices else { return Ok(None) };
        if shape.len() != 3 || !view.is_transposed() {
            return Ok(None);
        }
        let base = self.reader.lent(self.ctx, name)?;
        Ok(base.and_then(|base| Tensor::transposed(self.ctx.pool(), base, view.is_interleaved)))
    }

    fn copy_together(&self, halves: &mut [Tensor; 2]) {
        let [first, second] = &*halves;
        let shape = [first.rows() + second.rows(), first.cols()];
        let both = || Tensor::of_pieces(self.ctx.pool(), halves.to_vec(), &shape);
        if let Some(both) = both().filter(|_| !first.dtype().is_quantized() && !first.has_span(second)) {
            let (len, dtype, shape) = (first.num_bytes(), first.dtype(), first.shape().to_vec());
            let owner: Bytes = Arc::new(both.copied(self.ctx.pool()));
            let half = |range| Tensor::from_foreign(owner.clone(), range, &shape, dtype);
            if let (Some(first), Some(second)) = (half(0..len), half(len..2 * len)) {
                *halves = [first, second];
            }
        }
    }

    /// Fails if a tensor of the files was not used: to ignore it would change the results.
    fn check_all_used(&self, config: &ModelConfig) -> Result<(), LoadError> {
        let used = self.reader.used.borrow();
        for name in self.reader.files.names() {
            let is_buffer = name.ends_with("rotary_emb.inv_freq")
                || self.family.ignored.iter().any(|ending| name.ends_with(ending));
            let is_mtp = self.family.is_mtp_layer(name, config.num_layers);
            let is_tied = config.tie_embeddings && name == "lm_head.weight";
            // DeepSeek writes empty shared experts where there are none.
            let is_empty = self.reader.files.find(name).is_some_and(|(_, info)| info.shape.contains(&0));
            if !(used.contains(name) || is_buffer || is_mtp || is_tied || is_empty) {
                let (path, tensor) = (self.dir.to_owned(), name.to_owned());
                return Err(LoadError::UnexpectedTensor { path, tensor, model_type: self.family.model_type });
            }
        }
        Ok(())
    }
}
