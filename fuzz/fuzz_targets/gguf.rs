//! Any bytes as a GGUF file: the header, the configuration, the chat template, the tokenizer and the weights.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moeworks_fuzz::{context, shared};
use moeworks_model::gguf::GgufFile;

fuzz_target!(|bytes: &[u8]| {
    let (path, data) = shared(bytes);
    let Ok(file) = GgufFile::from_bytes(path, data) else { return };
    for tensor in file.tensors().values() {
        assert!(tensor.range.end <= bytes.len());
    }
    let _ = file.chat_template();
    if let Ok(tokenizer) = file.tokenizer() {
        let _ = tokenizer.encode("Hello, world").map(|ids| tokenizer.decode(&ids));
        let _ = file.stop_ids(&tokenizer);
    }
    if let Ok((config, weights)) = file.load_model(context()) {
        assert!(config.vocab_size > 0 && weights.num_parameters() > 0);
    }
});
