//! Any bytes as a model folder: the first line is its `config.json`, the rest its `model.safetensors`.

#![no_main]

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use moeworks_fuzz::context;
use moeworks_model::hf::load_model;
use tempfile::TempDir;

/// The folder, the same for all inputs.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| TempDir::new().expect("a temporary folder")).path()
}

fuzz_target!(|bytes: &[u8]| {
    let end = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
    let (config, tensors) = (&bytes[..end], bytes.get(end + 1..).unwrap_or_default());
    fs::write(folder().join("config.json"), config).expect("written");
    fs::write(folder().join("model.safetensors"), tensors).expect("written");
    if let Ok((config, weights)) = load_model(context(), folder()) {
        assert!(config.vocab_size > 0 && weights.num_parameters() > 0);
        // Reads every weight where it lies.
        let _ = weights.first_not_finite(context());
    }
});
