//! The complete path from files to batches, on real text if it is available.

use std::path::{Path, PathBuf};
use std::time::Instant;

use moeworks_infer::data::{Encode, Sources, Watch};
use moeworks_train::config::RunConfig;
use moeworks_train::data::{Dataset, Mix};

struct Bytes;

impl Encode for Bytes {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        ids.extend(text.bytes().map(u32::from));
        Ok(())
    }

    fn eos(&self) -> Option<u32> {
        Some(256)
    }

    fn vocab_size(&self) -> usize {
        257
    }

    fn fingerprint(&self) -> u128 {
        1
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_checkout_itself_is_data() {
    let cache = tempfile::tempdir().unwrap();
    let mut config = RunConfig::default();
    config.data.cache_dir = cache.path().into();
    let sources = Sources::from_checkout(&repository(), &config.data.texts(), &Watch::default()).unwrap();
    let data = Dataset::open(&config, &Mix::from(sources), &Bytes).unwrap();
    let tokens = data.parts()[0].tokens();
    assert_eq!(tokens.len(), tokens.num_text_bytes() + tokens.num_documents());
    assert!(data.train_batch(0, 0).inputs.iter().all(|&id| id < 257));
    assert!(data.validation_batches(0).count() > 0);
}

#[test]
fn real_text_is_read_and_found_again() {
    let folder = repository().join("../shared/data/text");
    if !folder.is_dir() {
        eprintln!("skipped: no text in ../shared/data/text");
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut config = RunConfig::default();
    config.data.cache_dir = cache.path().into();
    config.data.paths = vec![folder.display().to_string()];
    let mut batches = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        let mix = Mix::find(&config.data.texts(), &Watch::default()).unwrap();
        let data = Dataset::open(&config, &mix, &Bytes).unwrap();
        eprintln!("{} in {:?}", data.summary(), start.elapsed());
        batches.push(data.train_batch(1_000_000, 0));
    }
    assert_eq!(batches[0], batches[1]);
}
