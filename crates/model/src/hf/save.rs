//! Writing a model folder.

use std::borrow::Cow;
use std::collections::{BTreeMap, btree_map::Entry};
use std::fs;
use std::io;
use std::path::Path;

use moeworks_tensor::{DType, Tensor, bf16, f16};
use serde_json::{Value, json};

use super::blocks::{self, METHOD, Quantize};
use super::config_json;
use super::error::{DoesNotFit, LoadError, SaveError};
use super::family::Family;
use super::fit::{self, Misfit};
use super::fp8::{self, MatrixRows};
use super::load::ModelFolder;
use super::mtp::{COUNT_KEY, MtpLayers};
use super::mxfp4;
use super::names::{TensorSlice, View, forms};
use super::streaming_save::{PartBytes, StreamBuffer, StreamedWeights};
use crate::config::{EncoderConfig, ModelConfig};
use crate::files::{FileError, write_whole};
use crate::safetensors::{FileDType, ModelFiles, Payload, TensorBytes, write_shards};
use crate::scan::place;
use crate::tokenizer::Tokenizer;
use crate::weights::{DecoderWeights, WeightRole};

/// Options of saving, besides configuration and weights.
#[derive(Clone, Copy)]
pub struct SaveOptions<'a> {
    /// The tokenizer to write, which also gives the id that ends a text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// The largest size of a weights file in bytes; a larger model is written as several files with an index.
    pub max_shard_bytes: usize,
    /// The folder that the model came from. Its family is kept if it still computes the same function, and so are the
    /// keys of its configuration that we do not write.
    pub origin: Option<&'a ModelFolder>,
    /// The type of matrices in the file, F32, BF16 or F16; none keeps the type they have. Norms, biases and routers
    /// stay f32.
    pub dtype: Option<FileDType>,
    /// The matrices to write in blocks of small integers. Matrices in blocks stay in blocks in any case: MXFP4 in the
    /// family's own form, if it has one, and FP8 as it is.
    pub quantize: Option<Quantize<'a>>,
    /// Writes the nearest number that fits the type on disk, instead of refusing one that does not.
    pub clamp: bool,
}

impl Default for SaveOptions<'_> {
    fn default() -> Self {
        Self {
            tokenizer: None,
            max_shard_bytes: 5_000_000_000,
            origin: None,
            dtype: None,
            quantize: None,
            clamp: false,
        }
    }
}

/// The form in which a folder was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// True if `transformers` loads the folder. Otherwise no family there computes what this model does.
    pub loads_in_transformers: bool,
    /// The number of matrices in blocks of small integers.
    pub num_in_blocks: usize,
    /// The number of matrices that were to be quantized but whose row length is not a multiple of the block length.
    pub num_not_in_blocks: usize,
}

/// Keys of the original folder that describe its files, not the model.
const NOT_KEPT: [&str; 2] = ["quantization_config", "transformers_version"];

/// Saves a model of `config` in the folder `dir`, which is created if need be. Each file is written under a temporary
/// name, synced and renamed. Tensors are written in the type they have, unless `options` gives another.
pub fn save_model(
    dir: &Path,
    config: &ModelConfig,
    weights: &DecoderWeights,
    options: &SaveOptions<'_>,
) -> Result<Saved, SaveError> {
    let origin = options.origin.filter(|origin| origin.family.can_say(config));
    let family = origin.map_or_else(|| Family::for_config(config), |origin| origin.family);
    let files = origin.map(|origin| ModelFiles::open(&origin.dir)).transpose().map_err(LoadError::from)?;
    let mtp = MtpLayers::new(origin, files.as_ref(), config);
    let (mut tensors, counts) = tensors(family, weights, is_gated(config), options)
        .map_err(|misfit| SaveError::DoesNotFit { path: dir.to_owned(), misfit })?;
    if options.quantize.is_some() && counts.in_blocks == 0 {
        return Err(SaveError::NoBlocks { path: dir.to_owned() });
    }
    tensors.extend(mtp.tensors(counts.eight_bit_floats > 0)?);
    let stored = options.dtype.unwrap_or_else(|| weights.embedding.dtype().into());
    let num_mtp = origin.filter(|_| !mtp.is_empty()).and_then(|origin| origin.keys.get(COUNT_KEY));
    Folder { config, family, origin, stored, num_mtp, options }.write(dir, &tensors, &counts)
}

/// Saves f32 weights that arrive one after another while they are written. The files are those of [`save_model`];
/// only the tensors that the current one on disk is made of are in memory.
pub fn save_streamed(
    dir: &Path,
    config: &ModelConfig,
    weights: &StreamedWeights<'_>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Saved, SaveError> {
    let family = Family::for_config(config);
    let options = SaveOptions { tokenizer, ..SaveOptions::default() };
    let mut list = OnDiskList::default();
    let mut num_parts = Vec::new();
    let buffer = StreamBuffer::new(weights);
    for (index, (name, shape)) in weights.shapes.iter().enumerate() {
        let slices = forms(family, name, shape, is_gated(config)).swap_remove(0);
        num_parts.push(slices.len());
        let len = buffer.num_bytes(index) / slices.len();
        list.add(DTypes { ours: FileDType::F32, on_disk: None }, slices, |part, slice| Part {
            bytes: PartBytes::Streamed { from: &buffer, index, range: part * len..(part + 1) * len },
            view: slice.view,
        });
    }
    buffer.expect(num_parts);
    for (name, tensor) in &weights.states {
        let slices = forms(family, name, tensor.shape(), is_gated(config)).swap_remove(0);
        list.add_lent(tensor, None, slices);
    }
    let folder = Folder { config, family, origin: None, stored: FileDType::F32, num_mtp: None, options: &options };
    folder.write(dir, &list.into_bytes(), &Counts::default())
}

/// Returns true if gate and up are joined.
fn is_gated(config: &ModelConfig) -> bool {
    config.moe().activation.num_inputs() == 2
}

/// The content of a folder besides its tensors.
struct Folder<'a> {
    config: &'a ModelConfig,
    family: &'static Family,
    origin: Option<&'a ModelFolder>,
    /// The type of most matrices.
    stored: FileDType,
    /// The number of multi-token-prediction layers that are kept, as JSON.
    num_mtp: Option<&'a Value>,
    options: &'a SaveOptions<'a>,
}

impl Folder<'_> {
    fn write(&self, dir: &Path, tensors: &[TensorBytes<'_>], counts: &Counts) -> Result<Saved, SaveError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| SaveError::Io { path, source }
        };
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        fs::create_dir_all(dir).map_err(io(dir))?;
        let written = write_shards(dir, tensors, &metadata, self.options.max_shard_bytes);
        written.map_err(|FileError { path, source }| SaveError::Io { path, source })?;
        let eos_id = self.options.tokenizer.and_then(Tokenizer::eos_id);
        let generation = generation_json(self.config, eos_id);
        for (name, json) in [("config.json", self.config_json(tensors, counts)), ("generation_config.json", generation)]
        {
            let path = dir.join(name);
            write_whole(&path, pretty(&json).as_bytes()).map_err(io(&path))?;
        }
        if let Some(tokenizer) = self.options.tokenizer {
            tokenizer.save(dir)?;
        }
        Ok(Saved {
            model_type: self.family.model_type,
            loads_in_transformers: self.family.is_known_to_transformers() && counts.in_blocks == 0,
            num_in_blocks: counts.in_blocks,
            num_not_in_blocks: counts.not_in_blocks,
        })
    }

    fn config_json(&self, tensors: &[TensorBytes<'_>], counts: &Counts) -> Value {
        let tokenizer = self.options.tokenizer;
        let eos_id = tokenizer.and_then(Tokenizer::eos_id);
        let mut json = config_json::write(self.family, self.config, dtype_name(self.stored), eos_id);
        if counts.in_blocks > 0 {
            json["quantization_config"] = blocks_json(self.options);
        } else if let Some(floats) = floats_json(tensors, counts, self.origin) {
            json["quantization_config"] = floats;
        }
        if let Some(count) = self.num_mtp {
            json[COUNT_KEY] = count.clone();
        }
        with_kept(json, self.origin, tokenizer.is_some())
    }
}

/// Returns the `generation_config.json`: the ids that begin and end a text. A decoder that answers an encoder begins
/// with an id of its own.
fn generation_json(config: &ModelConfig, eos_id: Option<u32>) -> Value {
    match &config.variant.encoder {
        None => json!({"bos_token_id": eos_id, "eos_token_id": eos_id, "do_sample": true}),
        Some(EncoderConfig { start_id, .. }) => {
            json!({"decoder_start_token_id": start_id, "pad_token_id": start_id, "eos_token_id": eos_id, "do_sample": true})
        }
    }
}

/// Returns a type's name in `config.json`.
fn dtype_name(dtype: FileDType) -> &'static str {
    match dtype {
        FileDType::BF16 => "bfloat16",
        FileDType::F16 => "float16",
        _ => "float32",
    }
}

/// Returns the `quantization_config` of a folder with MXFP4 or FP8 matrices.
fn floats_json(tensors: &[TensorBytes<'_>], counts: &Counts, origin: Option<&ModelFolder>) -> Option<Value> {
    let before = origin.and_then(|origin| origin.keys.get("quantization_config"));
    if counts.four_bit_floats > 0 {
        return Some(mxfp4::json(before));
    }
    let matrices = tensors.iter().filter(|tensor| tensor.shape.len() == 2 && tensor.dtype != FileDType::F8E4M3);
    let modules = matrices.filter_map(|tensor| tensor.name.strip_suffix(".weight").map(str::to_owned));
    let floats: Vec<String> = modules.filter(|name| !name.contains("embed_tokens")).collect();
    (counts.eight_bit_floats > 0).then(|| fp8::json(before, &floats))
}

/// Returns the `quantization_config` of blocks: the one that was asked for, or that of the original folder.
fn blocks_json(options: &SaveOptions<'_>) -> Value {
    let stored = || options.origin.and_then(|origin| origin.keys.get("quantization_config").cloned());
    options.quantize.map(|quantize| quantize.json()).or_else(stored).unwrap_or_else(|| json!({"quant_method": METHOD}))
}

/// Adds the keys of `origin` that `json` lacks. Without a tokenizer, the ids of special tokens are kept too.
fn with_kept(mut json: Value, origin: Option<&ModelFolder>, has_tokenizer: bool) -> Value {
    if let (Some(map), Some(origin)) = (json.as_object_mut(), origin) {
        for (key, value) in &origin.keys {
            let is_token = key.ends_with("_token_id") && !has_tokenizer;
            if is_token || (!map.contains_key(key) && !NOT_KEPT.contains(&key.as_str())) {
                map.insert(key.clone(), value.clone());
            }
        }
    }
    json
}

fn pretty(json: &Value) -> String {
    format!("{json:#}\n")
}

/// The number of matrices in our own blocks, of those that were to be but cannot, and of tensors in MXFP4 and FP8.
#[derive(Default)]
struct Counts {
    in_blocks: usize,
    not_in_blocks: usize,
    four_bit_floats: usize,
    eight_bit_floats: usize,
}

/// Lists every tensor as it is written on disk, borrowed where it is a slice of one of ours. Fails if a number does
/// not fit its type there.
fn tensors<'a>(
    family: &Family,
    weights: &'a DecoderWeights,
    is_gated: bool,
    options: &SaveOptions<'a>,
) -> Result<(Vec<TensorBytes<'a>>, Counts), DoesNotFit> {
    let (mut list, mut counts) = (OnDiskList { clamp: options.clamp, ..OnDiskList::default() }, Counts::default());
    let (mut in_blocks, mut four_bit_floats, mut eight_bit_floats) = (Vec::new(), Vec::new(), Vec::new());
    let roles = weights.roles().into_iter().map(Some).chain(std::iter::repeat(None));
    for ((name, tensor), role) in weights.tensors().into_iter().chain(weights.states()).zip(roles) {
        let (target, is_odd) = blocks::target(options.quantize, role, tensor);
        counts.not_in_blocks += usize::from(is_odd);
        let mut forms = forms(family, &name, tensor.shape(), is_gated);
        if let (Some(DType::Mxfp4), Some((slice, view))) =
            (target, forms.iter().flatten().find_map(TensorSlice::as_mxfp4))
        {
            four_bit_floats.extend(mxfp4::on_disk(tensor, slice, view));
        } else if target == Some(DType::F8) {
            let slices = forms.swap_remove(0);
            let count = slices.len();
            let parts = slices.iter().enumerate().map(|(index, slice)| (part_rows(tensor, index, count), slice));
            eight_bit_floats.extend(parts.flat_map(|(part, slice)| fp8::on_disk(part, slice)));
        } else if let Some(dtype) = target {
            if let Some(quantize) = options.quantize.filter(|_| tensor.dtype() != dtype) {
                quantize.check_fits(&name, tensor, options.clamp)?;
            }
            in_blocks.push(blocks::on_disk(options.quantize, &name, tensor, dtype));
        } else {
            let dtype = options.dtype.filter(|_| role.is_some_and(WeightRole::is_product));
            list.add_lent(tensor, dtype, forms.swap_remove(0));
        }
    }
    counts.in_blocks = in_blocks.len();
    counts.four_bit_floats = four_bit_floats.len();
    counts.eight_bit_floats = eight_bit_floats.len();
    let others = in_blocks.into_iter().chain(four_bit_floats).chain(eight_bit_floats);
    list.check_fits()?;
    Ok((list.into_bytes().into_iter().chain(others).collect(), counts))
}

/// Tensors on disk, with their index by name.
#[derive(Default)]
struct OnDiskList<'a> {
    /// Clamps numbers that do not fit, instead of failing.
    clamp: bool,
    tensors: Vec<OnDisk<'a>>,
    places: BTreeMap<String, usize>,
}

impl<'a> OnDiskList<'a> {
    /// Adds one of our tensors in its slices, to be written as `dtype` if that is given.
    fn add_lent(&mut self, tensor: &'a Tensor, dtype: Option<FileDType>, slices: Vec<TensorSlice>) {
        let count = slices.len();
        let dtypes = DTypes { ours: tensor.dtype().into(), on_disk: dtype };
        self.add(dtypes, slices, |part, slice| match (tensor.as_transposed(), slice.view) {
            // A stack that is transposed in memory as on disk is written as it is.
            (Some((base, is_interleaved)), Some(view))
                if view.is_transposed() && view.is_interleaved == is_interleaved && base.shape() == slice.shape =>
            {
                Part { bytes: PartBytes::Lent(base.bytes()), view: None }
            }
            _ => Part { bytes: PartBytes::Lent(part_bytes(tensor, part, count)), view: slice.view },
        });
    }

    /// Adds one of our tensors in its slices. `part` returns the content of each, given its index.
    fn add(&mut self, dtypes: DTypes, slices: Vec<TensorSlice>, part: impl Fn(usize, &TensorSlice) -> Part<'a>) {
        for (index, slice) in slices.into_iter().enumerate() {
            let part = part(index, &slice);
            let TensorSlice { name, shape, .. } = slice;
            match self.places.entry(name.clone()) {
                Entry::Occupied(entry) => self.tensors[*entry.get()].parts.push(part),
                Entry::Vacant(entry) => {
                    entry.insert(self.tensors.len());
                    self.tensors.push(OnDisk { name, shape, dtypes, parts: vec![part] });
                }
            }
        }
    }

    /// Fails if a number does not fit the type to write.
    fn check_fits(&self) -> Result<(), DoesNotFit> {
        if self.clamp { Ok(()) } else { self.tensors.iter().try_for_each(OnDisk::check_fits) }
    }

    fn into_bytes(self) -> Vec<TensorBytes<'a>> {
        self.tensors.into_iter().map(|tensor| tensor.into_bytes(self.clamp)).collect()
    }
}

/// The types of a tensor.
#[derive(Clone, Copy)]
struct DTypes {
    /// The type of our tensor.
    ours: FileDType,
    /// The type on disk, if it differs.
    on_disk: Option<FileDType>,
}

/// A part of one of our tensors.
struct Part<'a> {
    bytes: PartBytes<'a>,
    /// The elements on disk that the bytes are; none: all, in order.
    view: Option<View>,
}

/// Returns the rows of one of `count` equal parts of a tensor.
fn part_rows(tensor: &Tensor, index: usize, count: usize) -> MatrixRows<'_> {
    if let Some(slices) = tensor.pieces().filter(|slices| slices.len() == count) {
        return MatrixRows { matrix: &slices[index], rows: 0..slices[index].rows() };
    }
    let rows = tensor.rows() / count;
    MatrixRows { matrix: tensor, rows: index * rows..(index + 1) * rows }
}

/// Returns the bytes of one of `count` equal parts of a tensor.
fn part_bytes(tensor: &Tensor, index: usize, count: usize) -> &[u8] {
    if let Some(slices) = tensor.pieces().filter(|slices| slices.len() == count) {
        return slices[index].bytes();
    }
    let len = tensor.num_bytes() / count;
    &tensor.bytes()[index * len..(index + 1) * len]
}

/// A tensor on disk, and the parts of ours that it is made of.
struct OnDisk<'a> {
    name: String,
    shape: Vec<usize>,
    dtypes: DTypes,
    parts: Vec<Part<'a>>,
}

impl<'a> OnDisk<'a> {
    fn check_fits(&self) -> Result<(), DoesNotFit> {
        let DTypes { ours, on_disk: Some(to) } = self.dtypes else { return Ok(()) };
        for Part { bytes, view } in &self.parts {
            // Weights that have yet to arrive keep their type.
            let PartBytes::Lent(bytes) = bytes else { continue };
            if let Some(Misfit { index, value }) = fit::overflow(bytes, ours, to) {
                let mut there = index;
                if let Some(view) = view {
                    view.for_each(|ours, theirs| there = if ours == index { theirs } else { there });
                }
                let place = place(there, &self.shape);
                return Err(DoesNotFit { tensor: self.name.clone(), value, place, dtype: to.name().to_owned() });
            }
        }
        Ok(())
    }

    fn into_bytes(self, clamp: bool) -> TensorBytes<'a> {
        let Self { name, shape, dtypes: DTypes { ours: from, on_disk }, parts } = self;
        let to = on_disk.unwrap_or(from);
        let bytes = match parts[..] {
            [Part { bytes: PartBytes::Lent(bytes), view: None }] if to == from => Payload::Lent(bytes),
            _ => {
                let num_elements = shape.iter().product::<usize>();
                let make = move || made(&parts, Change { from, to, clamp }, num_elements);
                Payload::Made { len: num_elements * size(to), make: Box::new(make) }
            }
        };
        TensorBytes { name, dtype: to, shape, bytes }
    }
}

/// Returns the bytes of an element.
fn size(dtype: FileDType) -> usize {
    dtype.bits() as usize / 8
}

/// A conversion of numbers.
#[derive(Clone, Copy)]
struct Change {
    from: FileDType,
    to: FileDType,
    /// Clamps numbers that do not fit.
    clamp: bool,
}

/// Returns the bytes of a tensor on disk that is made of parts.
fn made(parts: &[Part<'_>], change: Change, num_elements: usize) -> io::Result<Vec<u8>> {
    let Change { from, to, .. } = change;
    let arrived = parts.iter().map(|part| part.bytes.arrived()).collect::<io::Result<Vec<_>>>()?;
    let bytes = match (parts, &*arrived) {
        ([Part { view: None, .. }], [bytes]) => Cow::Borrowed(bytes.bytes()),
        _ => {
            let mut all = vec![0; num_elements * size(from)];
            for (part, bytes) in parts.iter().zip(&arrived) {
                if let Some(view) = part.view {
                    scatter(bytes.bytes(), view, size(from), &mut all);
                }
            }
            Cow::Owned(all)
        }
    };
    Ok(if to == from { bytes.into_owned() } else { converted(&bytes, change) })
}

/// Converts little-endian elements (f32, bf16 or f16) to another of these types, rounded to nearest.
fn converted(bytes: &[u8], Change { from, to, clamp }: Change) -> Vec<u8> {
    let values = fit::values(bytes, from).map(|x| if clamp { fit::clamped(x, to) } else { x });
    match to {
        FileDType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        FileDType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

/// Copies the elements of a part, of `size` bytes each, to their places on disk.
fn scatter(ours: &[u8], view: View, size: usize, on_disk: &mut [u8]) {
    view.for_each(|from, to| {
        on_disk[to * size..(to + 1) * size].copy_from_slice(&ours[from * size..(from + 1) * size]);
    });
}
