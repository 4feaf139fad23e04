//! Any bytes as a safetensors file: the header, then every tensor that it describes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moeworks_fuzz::{context, shared};
use moeworks_model::safetensors::SafetensorsFile;

fuzz_target!(|bytes: &[u8]| {
    let (path, data) = shared(bytes);
    let Ok(file) = SafetensorsFile::from_bytes(path, data) else { return };
    for (name, info) in file.tensors() {
        let lent = file.bytes(name).expect("the header was checked");
        assert_eq!(lent.len(), info.range.len());
        // A type that is not computed with is refused; all others are read, whole.
        if let Ok(tensor) = file.tensor(context(), name) {
            assert_eq!(tensor.shape(), &info.shape[..]);
            std::hint::black_box(tensor.bytes().iter().fold(0_u8, |sum, byte| sum ^ byte));
        }
    }
});
