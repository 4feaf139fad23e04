//! Multi-token-prediction layers after the last one (DeepSeek-V3's MTP modules). They are not computed, but kept when
//! the model is saved again.

use std::cell::RefCell;

use moeworks_tensor::bf16;

use super::error::LoadError;
use super::fp8::scales_name;
use super::load::ModelFolder;
use super::names::TensorSlice;
use super::slices::SliceReader;
use crate::config::ModelConfig;
use crate::safetensors::{FileDType, ModelFiles, Payload, TensorBytes};

/// The key with the number of these layers.
pub(super) const COUNT_KEY: &str = "num_nextn_predict_layers";

/// The tensors of a folder's multi-token-prediction layers.
#[derive(Default)]
pub(super) struct MtpLayers<'a> {
    files: Option<&'a ModelFiles>,
    names: Vec<String>,
}

impl<'a> MtpLayers<'a> {
    /// Lists the layers of the folder that a model of `config` came from, with its files. Empty if it has none, or if
    /// the number of layers has changed.
    pub(super) fn new(origin: Option<&ModelFolder>, files: Option<&'a ModelFiles>, config: &ModelConfig) -> Self {
        let num_layers = config.num_layers;
        let may_have = |origin: &ModelFolder| origin.family.has_mtp_layers && origin.config().num_layers == num_layers;
        let Some((origin, files)) = origin.filter(|origin| may_have(origin)).zip(files) else { return Self::default() };
        let is_mtp = |name: &&str| origin.family.is_mtp_layer(name, num_layers);
        Self { files: Some(files), names: files.names().filter(is_mtp).map(str::to_owned).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the tensors as they are on disk. Without `keeps_fp8`, FP8 matrices are dequantized to bf16, like the
    /// rest of the model.
    pub(super) fn tensors(&self, keeps_fp8: bool) -> Result<Vec<TensorBytes<'a>>, LoadError> {
        let Some(files) = self.files else { return Ok(Vec::new()) };
        let reader = SliceReader { files, used: RefCell::default() };
        let mut tensors = Vec::new();
        for name in &self.names {
            let (file, info) = files.get(name)?;
            let (mut dtype, shape) = (info.dtype, info.shape.clone());
            let is_fp8 = !keeps_fp8 && dtype == FileDType::F8E4M3 && files.find(&scales_name(name)).is_some();
            let is_scales = name.strip_suffix("_scale_inv").is_some_and(|matrix| files.find(matrix).is_some());
            let bytes = if is_fp8 {
                dtype = FileDType::BF16;
                let slice = TensorSlice { name: name.clone(), shape: shape.clone(), view: None, is_mxfp4: false };
                reader.check(&slice)?;
                let mut values = vec![bf16::ZERO; shape.iter().product()];
                reader.read(&slice, &mut values)?;
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                Payload::Made { len: bytes.len(), make: Box::new(move || Ok(bytes.clone())) }
            } else if is_scales && !keeps_fp8 {
                continue;
            } else {
                Payload::Lent(file.bytes(name)?)
            };
            tensors.push(TensorBytes { name: name.clone(), dtype, shape, bytes });
        }
        Ok(tensors)
    }
}
