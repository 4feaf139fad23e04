//! Matrices in blocks of small integers with a scale: a form of model folder that is ours alone.
//!
//! A folder of any family can have some of its matrices in blocks. Such a matrix is a tensor of type U8 named as ours is
//! (experts stacked, gate and up joined: `model.layers.N.mlp.experts.gate_up_proj`) with the name of the layout behind,
//! `.q8_0` or `.q4_0`: a row is its blocks one behind the other, so the last dim is `in / 32 * 34` or `in / 32 * 18` bytes
//! instead of `in` elements. The layouts are those of GGUF of the same names ([`Q8Block`](moeworks_tensor::Q8Block),
//! [`Q4Block`](moeworks_tensor::Q4Block)), and the file is used as it lies. Matrices that come from a GGUF file in another of
//! its layouts keep that, `.q4_k` for instance. All other tensors are as the family has them.
//! `config.json` says so under `quantization_config`:
//! `{"quant_method": "moeworks", "bits": 8, "block_size": 32, "only": "experts"}`, where `only` is null if all matrices are
//! in blocks. Programs that do not know the method refuse the folder; ours goes by the names of the tensors.

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

/// Which matrices are written in blocks. Embeddings, norms, biases and routers never are, and neither are matrices whose
/// rows are no whole blocks.
#[derive(Clone, Copy)]
pub struct Quantize<'a> {
    /// Where the blocks are computed.
    pub ctx: &'a Context,
    /// [`DType::Q8`] or [`DType::Q4`].
    pub dtype: DType,
    /// Only the matrices of experts, shared ones included; otherwise all matrices.
    pub only_experts: bool,
}

impl Quantize<'_> {
    /// Whether a tensor is one of those that are to be in blocks if its rows allow it.
    fn is_meant(&self, role: WeightRole) -> bool {
        let is_expert = matches!(role.group(), WeightGroup::Experts | WeightGroup::SharedExperts);
        role.is_product() && role != WeightRole::Embedding && (!self.only_experts || is_expert)
    }

    /// Fails if a number of a matrix does not fit blocks: it is NaN or infinite, or so large that even the largest scale cuts
    /// it, which `clamp` allows.
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

    /// What `config.json` says about the folder.
    pub(super) fn json(&self) -> Value {
        let bits = if self.dtype == DType::Q8 { 8 } else { 4 };
        let only = self.only_experts.then_some("experts");
        json!({ "quant_method": METHOD, "bits": bits, "block_size": BLOCK_LEN, "only": only })
    }
}

/// The type of blocks that a tensor is to be written in, and whether it was meant to be in blocks but cannot.
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

/// A tensor's name on disk.
pub(super) fn name_on_disk(name: &str, dtype: DType) -> String {
    let layout = block_types().find(|(known, _)| *known == dtype).map_or("", |(_, layout)| layout);
    format!("{name}.{}", layout.to_ascii_lowercase())
}

/// The shape on disk, whose last dim is bytes; none if rows are no whole blocks.
pub(super) fn shape_on_disk(shape: &[usize], dtype: DType) -> Option<Vec<usize>> {
    let (&cols, outer) = shape.split_last()?;
    let blocks = cols.is_multiple_of(dtype.block_len()).then_some(cols / dtype.block_len())?;
    Some(outer.iter().copied().chain([blocks * dtype.size()]).collect())
}

/// The tensor as it stands on disk, in blocks of `dtype`: lent if it is in such already, made while it is written otherwise.
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
