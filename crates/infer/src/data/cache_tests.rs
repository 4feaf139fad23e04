use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::data::TextOptions;

/// A tokenizer of bytes, each id `shift` higher; 256 + `shift` ends a document.
struct Bytes {
    shift: u32,
    vocab_size: usize,
    num_calls: AtomicUsize,
}

impl Bytes {
    fn new(shift: u32, vocab_size: usize) -> Self {
        Self { shift, vocab_size, num_calls: AtomicUsize::new(0) }
    }
}

impl Encode for Bytes {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        self.num_calls.fetch_add(1, Ordering::Relaxed);
        ids.extend(text.bytes().map(|byte| u32::from(byte) + self.shift));
        Ok(())
    }

    fn eos(&self) -> Option<u32> {
        Some(256 + self.shift)
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn fingerprint(&self) -> u128 {
        u128::from(self.shift)
    }
}

struct Workshop {
    folder: tempfile::TempDir,
    num_files: Cell<usize>,
}

impl Workshop {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), num_files: Cell::new(0) }
    }

    fn sources(&self, texts: &[&str]) -> Sources {
        let mut config = TextOptions::default();
        for text in texts {
            self.num_files.set(self.num_files.get() + 1);
            let path = self.folder.path().join(format!("{}.txt", self.num_files.get()));
            fs::write(&path, text).unwrap();
            config.paths.push(path.display().to_string());
        }
        Sources::find(&config, &Watch::default()).unwrap()
    }

    fn place(&self) -> CachePlace {
        CachePlace::from_folder(&self.folder.path().join("cache"))
    }

    fn cached(&self) -> Vec<PathBuf> {
        fs::read_dir(self.folder.path().join("cache")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

fn all(store: &TokenStore) -> Vec<u32> {
    let mut ids = Vec::new();
    store.read(0..store.len(), &mut ids);
    ids
}

#[test]
fn documents_are_tokenised_once_and_each_ends_with_its_token() {
    let shop = Workshop::new();
    let sources = shop.sources(&["ab", "c"]);
    for (shift, vocab_size) in [(0, 257), (70_000, 70_300)] {
        let tokenizer = Bytes::new(shift, vocab_size);
        let expected = [97, 98, 256, 99, 256].map(|id| id + shift);
        for _ in 0..2 {
            let store = TokenStore::open(&sources, &tokenizer, &shop.place()).unwrap();
            assert_eq!(all(&store), expected);
            assert_eq!((store.num_text_bytes(), store.num_documents()), (3, 2));
        }
        assert_eq!(tokenizer.num_calls.load(Ordering::Relaxed), 2);
    }
    assert_eq!(shop.cached().len(), 2);
}

#[test]
fn the_same_content_under_other_names_is_found_again_and_other_content_is_not() {
    let shop = Workshop::new();
    let tokenizer = Bytes::new(0, 257);
    for (texts, num_files) in [(["ab", "c"], 1), (["ab", "c"], 1), (["a", "bc"], 2), (["ab", "d"], 3)] {
        TokenStore::open(&shop.sources(&texts), &tokenizer, &shop.place()).unwrap();
        assert_eq!(shop.cached().len(), num_files, "{texts:?}");
    }
}

#[test]
fn a_cache_file_that_is_not_whole_is_made_again() {
    let shop = Workshop::new();
    let sources = shop.sources(&["some text"]);
    let tokenizer = Bytes::new(0, 257);
    let expected = all(&TokenStore::open(&sources, &tokenizer, &shop.place()).unwrap());
    let path = shop.cached().pop().unwrap();
    let whole = fs::read(&path).unwrap();
    let mut damaged: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
    damaged.extend((0..whole.len()).map(|i| {
        let mut bytes = whole.clone();
        bytes[i] ^= 0x10;
        bytes
    }));
    damaged.push([&whole[..], b"x"].concat());
    for bytes in damaged {
        fs::write(&path, &bytes).unwrap();
        let store = TokenStore::open(&sources, &tokenizer, &shop.place()).unwrap();
        assert_eq!(all(&store), expected);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
    assert_eq!(shop.cached(), [path]);
}

#[test]
fn order_is_kept_over_many_rounds_of_tokenising() {
    let shop = Workshop::new();
    let texts: Vec<String> = (0..40).map(|i| format!("{i} ").repeat(100_000)).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let store = TokenStore::open(&shop.sources(&texts), &Bytes::new(0, 257), &shop.place()).unwrap();
    let expected: Vec<u32> = texts.iter().flat_map(|text| text.bytes().map(u32::from).chain([256])).collect();
    assert!(all(&store) == expected);
    assert_eq!(store.num_documents(), 40);
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_and_leaves_nothing() {
    let shop = Workshop::new();
    let error = TokenStore::open(&shop.sources(&["ab"]), &Bytes::new(0, 98), &shop.place()).unwrap_err();
    let message = error.to_string();
    assert!(
        message.ends_with("1.txt: cannot be tokenised: token 98 is not below the vocabulary's size, 98"),
        "{message}"
    );
    assert!(shop.cached().is_empty());
}

#[test]
fn the_next_folder_is_used_where_the_first_cannot_be_written() {
    let shop = Workshop::new();
    let blocked = shop.folder.path().join("blocked");
    fs::write(&blocked, "a file, not a folder").unwrap();
    let sources = shop.sources(&["ab"]);
    let place = CachePlace { folders: vec![blocked.join("cache"), shop.folder.path().join("cache")] };
    TokenStore::open(&sources, &Bytes::new(0, 257), &place).unwrap();
    assert_eq!(shop.cached().len(), 1);
    let error = TokenStore::open(&sources, &Bytes::new(0, 257), &CachePlace::from_folder(&blocked)).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{}: tokenised data cannot be written: ", blocked.display())));
}

#[test]
fn what_was_passed_over_is_told_again_when_tokens_come_from_the_cache() {
    let shop = Workshop::new();
    for name in ["a", "b"] {
        let path = shop.folder.path().join(format!("{name}.jsonl"));
        fs::write(&path, "{\"text\": \"x\"}\n{\"text\": null}\n").unwrap();
        let config = TextOptions { paths: vec![path.display().to_string()], ..TextOptions::default() };
        let sources = Sources::find(&config, &Watch::default()).unwrap();
        let store = TokenStore::open(&sources, &Bytes::new(0, 257), &shop.place()).unwrap();
        let expected = format!("1 row skipped: its text is null ({}:2)", path.display());
        assert_eq!(store.notes().line(), Some(expected));
    }
    assert_eq!(shop.cached().len(), 1);
}

/// A tokenizer of bytes with tokens before each document.
struct Begun(Bytes);

impl Encode for Begun {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        self.0.encode(text, ids)
    }

    fn text_start(&self) -> &[u32] {
        &[298, 299]
    }

    fn eos(&self) -> Option<u32> {
        self.0.eos()
    }

    fn vocab_size(&self) -> usize {
        300
    }

    fn fingerprint(&self) -> u128 {
        1
    }
}

#[test]
fn each_document_begins_with_what_texts_begin_with() {
    let shop = Workshop::new();
    // The second document is read in several pieces, of which only the first gets its beginning.
    let long = "x\n".repeat(400_000);
    let store = TokenStore::open(&shop.sources(&["ab", &long]), &Begun(Bytes::new(0, 257)), &shop.place()).unwrap();
    let ids = all(&store);
    assert_eq!(ids[..8], [298, 299, 97, 98, 256, 298, 299, 120]);
    assert_eq!(ids.len(), 3 + 2 + 2 + long.len() + 1);
}
