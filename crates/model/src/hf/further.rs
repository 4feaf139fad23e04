//! Layers behind the last, which predict further tokens (DeepSeek-V3's MTP modules): no part of what we compute, but kept
//! when the model is saved again.

use std::cell::RefCell;

use moeworks_tensor::bf16;

use super::error::LoadError;
use super::fp8::scales_name;
use super::load::ModelFolder;
use super::names::Piece;
use super::pieces::PieceReader;
use crate::config::ModelConfig;
use crate::safetensors::{FileDType, ModelFiles, Payload, TensorBytes};

/// The key that says how many they are.
pub(super) const COUNT_KEY: &str = "num_nextn_predict_layers";

/// The tensors of a folder's further layers.
#[derive(Default)]
pub(super) struct FurtherLayers<'a> {
    files: Option<&'a ModelFiles>,
    names: Vec<String>,
}

impl<'a> FurtherLayers<'a> {
    /// Those of the folder that a model of `config` came from, and whose files these are; none where it has none, or other
    /// layers.
    pub(super) fn of(origin: Option<(&ModelFolder, &'a ModelFiles)>, config: &ModelConfig) -> Self {
        let num_layers = config.num_layers;
        let may_have =
            |origin: &ModelFolder| origin.family.has_further_layers && origin.config().num_layers == num_layers;
        let Some((origin, files)) = origin.filter(|(origin, _)| may_have(origin)) else { return Self::default() };
        let is_further = |name: &&str| origin.family.is_further_layer(name, num_layers);
        Self { files: Some(files), names: files.names().filter(is_further).map(str::to_owned).collect() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The tensors as they are; eight-bit floats with their scales as bf16 if the rest of the model has become that.
    pub(super) fn tensors(&self, keeps_fp8: bool) -> Result<Vec<TensorBytes<'a>>, LoadError> {
        let Some(files) = self.files else { return Ok(Vec::new()) };
        let reader = PieceReader { files, used: RefCell::default() };
        let mut tensors = Vec::new();
        for name in &self.names {
            let (file, info) = files.get(name)?;
            let (mut dtype, shape) = (info.dtype, info.shape.clone());
            let is_fp8 = !keeps_fp8 && dtype == FileDType::F8E4M3 && files.find(&scales_name(name)).is_some();
            let is_scales = name.strip_suffix("_scale_inv").is_some_and(|matrix| files.find(matrix).is_some());
            let bytes = if is_fp8 {
                dtype = FileDType::BF16;
                let piece = Piece { name: name.clone(), shape: shape.clone(), view: None, is_mxfp4: false };
                reader.check(&piece)?;
                let mut values = vec![bf16::ZERO; shape.iter().product()];
                reader.read(&piece, &mut values)?;
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
