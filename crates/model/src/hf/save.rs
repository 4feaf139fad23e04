//! Writing a model folder.

use std::borrow::Cow;
use std::collections::{BTreeMap, btree_map::Entry};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use moeworks_tensor::{DType, Tensor, bf16, f16};
use serde_json::{Value, json};

use super::blocks::{self, METHOD, Quantize};
use super::coming::{Arrivals, ComingWeights, PartBytes};
use super::config_json;
use super::error::{DoesNotFit, LoadError, SaveError};
use super::family::Family;
use super::fit::{self, Misfit};
use super::fp8;
use super::further::{COUNT_KEY, FurtherLayers};
use super::load::ModelFolder;
use super::mxfp4;
use super::names::{Piece, View, forms};
use crate::config::{EncoderConfig, ModelConfig};
use crate::files::{FileError, write_whole};
use crate::safetensors::{FileDType, ModelFiles, Payload, TensorBytes, write_shards};
use crate::scan::place;
use crate::tokenizer::Tokenizer;
use crate::weights::{DecoderWeights, WeightRole};

/// What is written besides configuration and weights.
#[derive(Clone, Copy)]
pub struct SaveOptions<'a> {
    /// Written too, and asked for the id that ends a text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Weights of more bytes than this are written as several files with an index.
    pub max_shard_bytes: usize,
    /// The folder that the model came from: its family is kept if it still computes the same, and those of its
    /// configuration's keys that we do not write ourselves.
    pub origin: Option<&'a ModelFolder>,
    /// The type of matrices in the file, F32, BF16 or F16; none: the one they have. Norms, biases and routers stay f32.
    pub dtype: Option<FileDType>,
    /// Which matrices are written in blocks of small integers. Those that are in blocks already stay so in any case; in MXFP4 as
    /// the family has it, if it does, and eight-bit floats as they are.
    pub quantize: Option<Quantize<'a>>,
    /// Write the nearest number that fits where one does not fit the type on disk, instead of refusing.
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

/// What a folder was saved as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Whether `transformers` loads it. If not, no family there computes what this model does.
    pub loads_in_transformers: bool,
    /// Matrices that are in blocks of small integers.
    pub num_in_blocks: usize,
    /// Matrices that were meant to be, but have rows of a length that no whole blocks make.
    pub num_not_in_blocks: usize,
}

/// Keys of another folder that say something about its files, not about the model.
const NOT_KEPT: [&str; 2] = ["quantization_config", "transformers_version"];

/// Writes a model of `config` to the folder `dir`, which is made if need be. Each file is written beside its place, synced
/// and renamed. Tensors are written in the type they have.
pub fn save_model(
    dir: &Path,
    config: &ModelConfig,
    weights: &DecoderWeights,
    options: &SaveOptions<'_>,
) -> Result<Saved, SaveError> {
    let origin = options.origin.filter(|origin| origin.family.can_say(config));
    let family = origin.map_or_else(|| Family::of(config), |origin| origin.family);
    let files = origin.map(|origin| ModelFiles::open(&origin.dir)).transpose().map_err(LoadError::from)?;
    let further = FurtherLayers::of(origin.zip(files.as_ref()), config);
    let (mut tensors, counts) = tensors(family, weights, is_gated(config), options)
        .map_err(|misfit| SaveError::DoesNotFit { path: dir.to_owned(), misfit })?;
    if options.quantize.is_some() && counts.in_blocks == 0 {
        return Err(SaveError::NoBlocks { path: dir.to_owned() });
    }
    tensors.extend(further.tensors(counts.eight_bit_floats > 0)?);
    let stored = options.dtype.unwrap_or_else(|| weights.embedding.dtype().into());
    let num_further = origin.filter(|_| !further.is_empty()).and_then(|origin| origin.keys.get(COUNT_KEY));
    Folder { config, family, origin, stored, num_further, options }.write(dir, &tensors, &counts)
}

/// [`save_model`] of f32 weights that come one after another while they are written. The files are the same; in memory are the tensors of
/// ours that one on disk is made of.
pub fn save_coming(
    dir: &Path,
    config: &ModelConfig,
    weights: &ComingWeights<'_>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Saved, SaveError> {
    let family = Family::of(config);
    let options = SaveOptions { tokenizer, ..SaveOptions::default() };
    let mut list = OnDiskList::default();
    let mut num_parts = Vec::new();
    let arrivals = Arrivals::new(weights);
    for (index, (name, shape)) in weights.shapes.iter().enumerate() {
        let pieces = forms(family, name, shape, is_gated(config)).swap_remove(0);
        num_parts.push(pieces.len());
        let len = arrivals.num_bytes(index) / pieces.len();
        list.add((FileDType::F32, None), pieces, |part, _| {
            (PartBytes::Coming { from: &arrivals, index, range: part * len..(part + 1) * len }, Seen::AsThePiece)
        });
    }
    arrivals.expect(num_parts);
    for (name, tensor) in &weights.states {
        let pieces = forms(family, name, tensor.shape(), is_gated(config)).swap_remove(0);
        list.add_lent(tensor, None, pieces);
    }
    let folder = Folder { config, family, origin: None, stored: FileDType::F32, num_further: None, options: &options };
    folder.write(dir, &list.into_bytes(), &Counts::default())
}

/// Whether gate and up are joined.
fn is_gated(config: &ModelConfig) -> bool {
    config.moe().activation.num_inputs() == 2
}

/// What a folder says besides its tensors.
struct Folder<'a> {
    config: &'a ModelConfig,
    family: &'static Family,
    origin: Option<&'a ModelFolder>,
    /// The type of most matrices.
    stored: FileDType,
    /// How many layers behind the last are kept.
    num_further: Option<&'a Value>,
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
        if let Some(count) = self.num_further {
            json[COUNT_KEY] = count.clone();
        }
        with_kept(json, self.origin, tokenizer.is_some())
    }
}

/// `generation_config.json`: where texts begin and end. An answer to what an encoder read begins with an id of its own.
fn generation_json(config: &ModelConfig, eos_id: Option<u32>) -> Value {
    match &config.variant.encoder {
        None => json!({"bos_token_id": eos_id, "eos_token_id": eos_id, "do_sample": true}),
        Some(EncoderConfig { start_id, .. }) => {
            json!({"decoder_start_token_id": start_id, "pad_token_id": start_id, "eos_token_id": eos_id, "do_sample": true})
        }
    }
}

/// What `config.json` calls a type.
fn dtype_name(dtype: FileDType) -> &'static str {
    match dtype {
        FileDType::BF16 => "bfloat16",
        FileDType::F16 => "float16",
        _ => "float32",
    }
}

/// `quantization_config` of a folder with floats of few bits.
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

/// `quantization_config`: what was asked for, or what the folder that was read says.
fn blocks_json(options: &SaveOptions<'_>) -> Value {
    let stored = || options.origin.and_then(|origin| origin.keys.get("quantization_config").cloned());
    options.quantize.map(|quantize| quantize.json()).or_else(stored).unwrap_or_else(|| json!({"quant_method": METHOD}))
}

/// `json` with the keys of `origin` that it does not have. Without a tokenizer the ids of special tokens are kept too.
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

/// Matrices in blocks of our own form, those that were meant to be but are not, and tensors of matrices in forms of others.
#[derive(Default)]
struct Counts {
    in_blocks: usize,
    not_in_blocks: usize,
    four_bit_floats: usize,
    eight_bit_floats: usize,
}

/// Every tensor as it stands on disk; those that are parts of ours are borrowed. Fails if a number does not fit its type there.
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
        if let (Some(DType::Mxfp4), Some((piece, view))) = (target, forms.iter().flatten().find_map(Piece::as_mxfp4)) {
            four_bit_floats.extend(mxfp4::on_disk(tensor, piece, view));
        } else if target == Some(DType::F8) {
            let pieces = forms.swap_remove(0);
            let count = pieces.len();
            let parts = pieces.iter().enumerate().map(|(index, piece)| (part_rows(tensor, index, count), piece));
            eight_bit_floats.extend(parts.flat_map(|(part, piece)| fp8::on_disk(part, piece)));
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

/// Tensors on disk and where they are in the list.
#[derive(Default)]
struct OnDiskList<'a> {
    /// Whether numbers that do not fit are cut.
    clamp: bool,
    tensors: Vec<OnDisk<'a>>,
    places: BTreeMap<String, usize>,
}

impl<'a> OnDiskList<'a> {
    /// Adds one of ours, in its pieces, to be written as `dtype` if that is given.
    fn add_lent(&mut self, tensor: &'a Tensor, dtype: Option<FileDType>, pieces: Vec<Piece>) {
        let count = pieces.len();
        self.add((tensor.dtype().into(), dtype), pieces, |part, piece| match (tensor.as_turned(), piece.view) {
            (Some((base, is_in_turn)), Some(view))
                if view.is_transposed() && view.is_interleaved == is_in_turn && base.shape() == piece.shape =>
            {
                (PartBytes::Lent(base.bytes()), Seen::AsItLies)
            }
            _ => (PartBytes::Lent(part_bytes(tensor, part, count)), Seen::AsThePiece),
        });
    }

    /// Adds one of ours of the type `from`, in its pieces, to be written as `dtype` if that is given. `bytes` says of each part where
    /// its bytes are.
    fn add(
        &mut self,
        (from, dtype): (FileDType, Option<FileDType>),
        pieces: Vec<Piece>,
        bytes: impl Fn(usize, &Piece) -> (PartBytes<'a>, Seen),
    ) {
        for (i, piece) in pieces.into_iter().enumerate() {
            let (bytes, seen) = bytes(i, &piece);
            let Piece { name, shape, view, .. } = piece;
            let part = (bytes, view.filter(|_| seen == Seen::AsThePiece));
            match self.places.entry(name.clone()) {
                Entry::Occupied(entry) => self.tensors[*entry.get()].parts.push(part),
                Entry::Vacant(entry) => {
                    entry.insert(self.tensors.len());
                    self.tensors.push(OnDisk { name, shape, from, dtype, parts: vec![part] });
                }
            }
        }
    }

    /// Fails if a number does not fit the type that it is to be written in.
    fn check_fits(&self) -> Result<(), DoesNotFit> {
        if self.clamp { Ok(()) } else { self.tensors.iter().try_for_each(OnDisk::check_fits) }
    }

    fn into_bytes(self) -> Vec<TensorBytes<'a>> {
        self.tensors.into_iter().map(|tensor| tensor.into_bytes(self.clamp)).collect()
    }
}

/// How the bytes of a part are to be looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// In the order in which they lie.
    AsItLies,
    /// By the view of the piece.
    AsThePiece,
}

/// The rows of one of `count` equal parts of a tensor.
fn part_rows(tensor: &Tensor, index: usize, count: usize) -> (&Tensor, Range<usize>) {
    if let Some(pieces) = tensor.pieces().filter(|pieces| pieces.len() == count) {
        return (&pieces[index], 0..pieces[index].rows());
    }
    let rows = tensor.rows() / count;
    (tensor, index * rows..(index + 1) * rows)
}

/// The bytes of one of `count` equal parts of a tensor.
fn part_bytes(tensor: &Tensor, index: usize, count: usize) -> &[u8] {
    if let Some(pieces) = tensor.pieces().filter(|pieces| pieces.len() == count) {
        return pieces[index].bytes();
    }
    let len = tensor.num_bytes() / count;
    &tensor.bytes()[index * len..(index + 1) * len]
}

/// A tensor on disk and the parts of ours that it is made of.
struct OnDisk<'a> {
    name: String,
    shape: Vec<usize>,
    /// The type of ours.
    from: FileDType,
    /// The type on disk, if another.
    dtype: Option<FileDType>,
    parts: Vec<(PartBytes<'a>, Option<View>)>,
}

impl<'a> OnDisk<'a> {
    fn check_fits(&self) -> Result<(), DoesNotFit> {
        let Some(to) = self.dtype else { return Ok(()) };
        for (bytes, view) in &self.parts {
            // Those that are yet to come keep their type.
            let PartBytes::Lent(bytes) = bytes else { continue };
            if let Some(Misfit { index, value }) = fit::overflow(bytes, self.from, to) {
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
        let Self { name, shape, from, dtype, parts } = self;
        let to = dtype.unwrap_or(from);
        let bytes = match parts[..] {
            [(PartBytes::Lent(bytes), None)] if to == from => Payload::Lent(bytes),
            _ => {
                let num_elements = shape.iter().product::<usize>();
                let make = move || made(&parts, Change { from, to, clamp }, num_elements);
                Payload::Made { len: num_elements * size(to), make: Box::new(make) }
            }
        };
        TensorBytes { name, dtype: to, shape, bytes }
    }
}

/// Bytes of an element.
fn size(dtype: FileDType) -> usize {
    dtype.bits() as usize / 8
}

/// How the type of numbers changes.
#[derive(Clone, Copy)]
struct Change {
    from: FileDType,
    to: FileDType,
    /// Whether those that do not fit are cut.
    clamp: bool,
}

/// The bytes of a tensor on disk that is made of parts.
fn made(parts: &[(PartBytes<'_>, Option<View>)], change: Change, num_elements: usize) -> io::Result<Vec<u8>> {
    let Change { from, to, .. } = change;
    let parts = parts.iter().map(|(part, view)| Ok((part.arrived()?, *view))).collect::<io::Result<Vec<_>>>()?;
    let parts: Vec<(&[u8], Option<View>)> = parts.iter().map(|(bytes, view)| (bytes.bytes(), *view)).collect();
    let bytes = match parts[..] {
        [(bytes, None)] => Cow::Borrowed(bytes),
        _ => Cow::Owned(woven(&parts, size(from), num_elements * size(from))),
    };
    Ok(if to == from { bytes.into_owned() } else { converted(&bytes, change) })
}

/// Little-endian elements of one type, f32, bf16 or f16, as those of another, rounded to the nearest.
fn converted(bytes: &[u8], Change { from, to, clamp }: Change) -> Vec<u8> {
    let values = fit::values(bytes, from).map(|x| if clamp { fit::clamped(x, to) } else { x });
    match to {
        FileDType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        FileDType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

/// The bytes of a tensor whose parts are seen through strides. `size` is that of an element.
fn woven(parts: &[(&[u8], Option<View>)], size: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (ours, view) in parts {
        if let Some(view) = view {
            view.for_each(|from, to| {
                bytes[to * size..(to + 1) * size].copy_from_slice(&ours[from * size..(from + 1) * size]);
            });
        }
    }
    bytes
}
