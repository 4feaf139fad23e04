//! Matrices in blocks of small integers with a scale: a form of model folder that is Moeworks' own.
//!
//! A folder of any family can have some of its matrices in blocks. Such a matrix is a U8 tensor under our own name
//! (experts stacked, gate and up joined: `model.layers.N.mlp.experts.gate_up_proj`) followed by the layout, `.q8_0`
//! or `.q4_0`. A row is its consecutive blocks, so the last dim is `in / 32 * 34` or `in / 32 * 18` bytes instead of
//! `in` elements. The layouts are those of the same names in GGUF ([`Q8Block`](moeworks_tensor::Q8Block),
//! [`Q4Block`](moeworks_tensor::Q4Block)), and products read the mapped file directly. Matrices that come from a GGUF
//! file in another layout keep it, `.q4_k` for instance. All other tensors are stored as the family stores them.
//!
//! `config.json` records this under `quantization_config`: `{"quant_method": "moeworks", "bits": 8, "block_size": 32,
//! "only": "experts"}`, where `only` is null if all matrices are in blocks. Programs that do not know the method
//! refuse the folder. Our reader goes by the names of the tensors alone.

use moeworks_ops::{Context, quantized};
use moeworks_tensor::{BLOCK_LEN, DType, Tensor};
use serde_json::{Value, json};

use super::error::DoesNotFit;
use super::fit;
use crate::gguf::block_types;
use crate::safetensors::{FileDType, Payload, TensorBytes};
use crate::scan::place;
use crate::weights::{WeightGroup, WeightRole};

/// `quant_method` in `config.json`.
pub(crate) const METHOD: &str = "moeworks";

/// The matrices to write in blocks. Embeddings, norms, biases and routers are never quantized, nor are matrices whose
/// row length is not a multiple of the block length.
#[derive(Clone, Copy)]
pub struct Quantize<'a> {
    /// The context that computes the blocks.
    pub ctx: &'a Context,
    /// [`DType::Q8`] or [`DType::Q4`].
    pub dtype: DType,
    /// Only the matrices of experts, shared ones included; otherwise all matrices.
    pub only_experts: bool,
}

impl Quantize<'_> {
    /// Returns true for a tensor that is to be quantized if its row length allows it.
    fn is_meant(&self, role: WeightRole) -> bool {
        let is_expert = matches!(role.group(), WeightGroup::Experts | WeightGroup::SharedExperts);
        role.is_product() && role != WeightRole::Embedding && (!self.only_experts || is_expert)
    }

    /// Fails on the first number that blocks cannot hold: NaN, infinity, or (without `clamp`) a magnitude beyond the
    /// largest scale.
    pub(super) fn check_fits(&self, name: &str, tensor: &Tensor, clamp: bool) -> Result<(), DoesNotFit> {
        let most = if clamp { f32::MAX } else { fit::largest_in_blocks(self.dtype) };
        let mut before = 0;
        for part in tensor.parts() {
            let exact;
            let (bytes, from) = match part.dtype() {
                dtype @ (DType::F32 | DType::BF16 | DType::F16) => (part.bytes(), FileDType::from(dtype)),
                _ => {
                    exact = quantized::dequantize(self.ctx, part, DType::F32);
                    (exact.bytes(), FileDType::F32)
                }
            };
            let is_misfit = |x: f32| x.is_nan() || x.abs() > most;
            if let Some((index, value)) = fit::values(bytes, from).enumerate().find(|(_, x)| is_misfit(*x)) {
                let dtype = if self.dtype == DType::Q8 { "int8" } else { "int4" };
                let place = place(before + index, tensor.shape());
                return Err(DoesNotFit { tensor: name.to_owned(), value, place, dtype: dtype.to_owned() });
            }
            before += part.len();
        }
        Ok(())
    }

    /// Returns the value of `quantization_config`.
    pub(super) fn json(&self) -> Value {
        let bits = if self.dtype == DType::Q8 { 8 } else { 4 };
        let only = self.only_experts.then_some("experts");
        json!({ "quant_method": METHOD, "bits": bits, "block_size": BLOCK_LEN, "only": only })
    }
}

/// Returns the block type to write a tensor in, and true if it was to be quantized but its row length does not allow
/// it.
pub(super) fn target(
    quantize: Option<Quantize<'_>>,
    role: Option<WeightRole>,
    tensor: &Tensor,
) -> (Option<DType>, bool) {
    let is_meant = |quantize: &Quantize<'_>| role.is_some_and(|role| quantize.is_meant(role));
    let meant = quantize.filter(is_meant).map(|quantize| quantize.dtype);
    let fits = tensor.cols().is_multiple_of(BLOCK_LEN);
    let stored = Some(tensor.dtype()).filter(|dtype| dtype.is_quantized());
    (meant.filter(|_| fits).or(stored), meant.is_some() && !fits)
}

/// Returns a tensor's name on disk: our name, then its block layout.
pub(super) fn name_on_disk(name: &str, dtype: DType) -> String {
    let layout = block_types().find(|(known, _)| *known == dtype).map_or("", |(_, layout)| layout);
    format!("{name}.{}", layout.to_ascii_lowercase())
}

/// Returns the shape on disk, whose last dim is in bytes; none if a row is not a whole number of blocks.
pub(super) fn shape_on_disk(shape: &[usize], dtype: DType) -> Option<Vec<usize>> {
    let (&cols, outer) = shape.split_last()?;
    let blocks = cols.is_multiple_of(dtype.block_len()).then_some(cols / dtype.block_len())?;
    Some(outer.iter().copied().chain([blocks * dtype.size()]).collect())
}

/// Returns the tensor in blocks of `dtype`: borrowed if it is in them already, otherwise quantized while it is
/// written.
pub(super) fn on_disk<'a>(
    quantize: Option<Quantize<'a>>,
    name: &str,
    tensor: &'a Tensor,
    dtype: DType,
) -> TensorBytes<'a> {
    let shape = shape_on_disk(tensor.shape(), dtype).unwrap_or_default();
    let bytes = match quantize {
        Some(Quantize { ctx, .. }) if tensor.dtype() != dtype => {
            let make = move || match tensor.dtype().is_quantized() {
                true => quantized::quantize(ctx, &quantized::dequantize(ctx, tensor, DType::F32), dtype),
                false => quantized::quantize(ctx, tensor, dtype),
            };
            let len = shape.iter().product();
            Payload::Made { len, make: Box::new(move || Ok(make().bytes().to_vec())) }
        }
        _ => Payload::Lent(tensor.bytes()),
    };
    TensorBytes { name: name_on_disk(name, dtype), dtype: FileDType::U8, shape, bytes }
}
