//! The sampling settings that a model folder recommends.

use std::path::Path;

use moeworks_model::LoadError;
use moeworks_model::hf::read_json;

use super::SamplingDefaults;

/// Reads the settings in `generation_config.json` of the folder `dir`; all are `None` if there is no such file.
pub fn sampling_defaults(dir: &Path) -> Result<SamplingDefaults, LoadError> {
    let path = dir.join("generation_config.json");
    if !path.exists() {
        return Ok(SamplingDefaults::default());
    }
    let json = read_json(&path)?;
    SamplingDefaults::from_generation_config(&json).map_err(|reason| LoadError::Config { path, reason })
}
