//! A scan of a folder's weights for NaN and infinity.

use std::path::Path;

use moeworks_ops::Context;

use super::blocks;
use super::error::LoadError;
use crate::gguf::block_types;
use crate::safetensors::{FileDType, ModelFiles, SafetensorsFile, TensorInfo};
use crate::scan::{Region, Stored, WeightCheck, scan};

/// Scans the model folder `dir` for NaN and infinity. If its files have more than `most` bytes, routed experts are
/// left out.
pub fn check_weights(ctx: &Context, dir: &Path, most: u64) -> Result<WeightCheck, LoadError> {
    let files = ModelFiles::open(dir)?;
    let mut regions = Vec::new();
    for name in files.names() {
        if let Some((file, info)) = files.find(name) {
            regions.extend(region(&files, file, name, info)?);
        }
    }
    Ok(scan(ctx, &regions, most))
}

fn region<'a>(
    files: &ModelFiles,
    file: &'a SafetensorsFile,
    name: &str,
    info: &TensorInfo,
) -> Result<Option<Region<'a>>, LoadError> {
    let mut shape = info.shape.clone();
    let stored = match info.dtype {
        FileDType::F32 => Stored::F32,
        FileDType::F16 => Stored::F16,
        FileDType::BF16 => Stored::Bf16,
        FileDType::F8E4M3 => Stored::F8E4M3,
        FileDType::U8
            if name.strip_suffix("_scales").is_some_and(|stem| files.find(&format!("{stem}_blocks")).is_some()) =>
        {
            Stored::Powers
        }
        FileDType::U8 => {
            let ours =
                block_types().map(|(dtype, _)| dtype).find(|&dtype| name.ends_with(&blocks::name_on_disk("", dtype)));
            let Some(dtype) = ours else { return Ok(None) };
            if let Some(last) = shape.last_mut() {
                *last = *last / dtype.size() * dtype.block_len();
            }
            Stored::Blocks(dtype)
        }
        _ => return Ok(None),
    };
    // The names under which families store stacks of routed experts; shared experts of Qwen and DeepSeek have other
    // names.
    let is_of_experts = [".experts.", ".input_linear.", ".output_linear."].iter().any(|part| name.contains(part));
    Ok(Some(Region { name: name.to_owned(), shape, stored, bytes: file.bytes(name)?, is_of_experts }))
}
