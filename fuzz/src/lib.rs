//! Shared parts of the fuzz targets: the bytes at hand as a file in memory, and a context of one thread.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use moeworks_ops::Context;
use moeworks_tensor::Bytes;

/// One thread: an input's behaviour must not depend on others.
pub fn context() -> &'static Context {
    static CONTEXT: OnceLock<Context> = OnceLock::new();
    CONTEXT.get_or_init(|| Context::cpu(1))
}

/// Bytes as the readers take them, and what errors call them.
pub fn shared(bytes: &[u8]) -> (&'static Path, Bytes) {
    (Path::new("fuzzed"), Arc::new(bytes.to_vec()))
}
