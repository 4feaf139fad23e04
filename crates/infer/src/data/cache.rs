//! Tokenised data in a memory-mapped cache file, named by a hash of its origin.
//!
//! The name contains a hash of the documents, the tokenizer and this format's version, so that a file is either the
//! right one or absent. It is written under a temporary name, synced and renamed. Its header and a hash of its tokens
//! are checked on opening; a damaged file is made again.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use moeworks_model::files::Unfinished;
use moeworks_ops::MappedFile;
use tempfile::NamedTempFile;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::notes::StoredNote;
use super::{DataError, Encode, Notes, Piece, ReadSummary, Sources, Watch};

const MAGIC: [u8; 8] = *b"MOEWTOK\0";
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 88;

/// Bytes of text that are tokenised together: enough for all threads, little beside a model.
const ROUND_BYTES: usize = 4 << 20;

/// Prefix and suffix of the names of temporary files.
const TEMPORARY: (&str, &str) = ("tokens-", ".tmp");
/// The age at which a temporary file is taken for abandoned.
const STALE: Duration = Duration::from_secs(24 * 60 * 60);

/// Folders for cache files. The first one that can be written is used.
#[derive(Clone, Debug)]
pub struct CachePlace {
    folders: Vec<PathBuf>,
}

impl CachePlace {
    /// Makes a list of the program's folder in the user's cache folder, if there is one, and then `fallback`.
    #[must_use]
    pub fn from_user(user: Option<&Path>, fallback: PathBuf) -> Self {
        Self { folders: user.map(PathBuf::from).into_iter().chain([fallback]).collect() }
    }

    /// Returns the folders in the order in which they are tried.
    #[must_use]
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Makes a list of one folder.
    #[must_use]
    pub fn from_folder(folder: &Path) -> Self {
        Self { folders: vec![folder.into()] }
    }

    /// Creates an empty file to write, and returns it with its folder.
    fn create(&self) -> Result<(Draft, &Path), DataError> {
        let mut failure = None;
        for folder in &self.folders {
            match fs::create_dir_all(folder).and_then(|()| Draft::create(folder)) {
                Ok(file) => {
                    remove_stale(folder);
                    return Ok((file, folder));
                }
                Err(source) => {
                    tracing::debug!("{}: cannot be written: {source}", folder.display());
                    failure = Some(DataError::Cache { path: folder.clone(), source });
                }
            }
        }
        Err(failure.unwrap_or_else(|| cache_error(Path::new("."), io::ErrorKind::NotFound.into())))
    }
}

/// A cache file under a temporary name. It is deleted when this is dropped, and when a signal ends the program.
struct Draft {
    // This is dropped first: the file is deleted before its name is forgotten.
    file: NamedTempFile,
    _note: Unfinished,
}

impl Draft {
    fn create(folder: &Path) -> io::Result<Self> {
        let mut note = None;
        // The name is noted before the file exists.
        let file = tempfile::Builder::new().prefix(TEMPORARY.0).suffix(TEMPORARY.1).make_in(folder, |path| {
            note = Some(Unfinished::note(path));
            // Texts may be private.
            File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
        })?;
        let note = note.unwrap_or_else(|| Unfinished::note(file.path()));
        Ok(Self { file, _note: note })
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Draft {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Removes files of programs that were killed while they wrote here. Failing at that does no harm.
fn remove_stale(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_temporary = name.starts_with(TEMPORARY.0) && name.ends_with(TEMPORARY.1);
        let age = || SystemTime::now().duration_since(entry.metadata().ok()?.modified().ok()?).ok();
        if is_temporary && age().is_some_and(|age| age > STALE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn cache_error(path: &Path, source: io::Error) -> DataError {
    DataError::Cache { path: path.into(), source }
}

/// The header of a cache file. All numbers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    key: u128,
    token_bytes: u32,
    num_tokens: u64,
    num_text_bytes: u64,
    num_documents: u64,
    /// Bytes after the tokens, which hold the notes on rows as JSON.
    num_note_bytes: u64,
    payload_hash: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.token_bytes.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.key.to_le_bytes());
        let counts = [self.num_tokens, self.num_text_bytes, self.num_documents, self.num_note_bytes, self.payload_hash];
        for (i, count) in counts.into_iter().enumerate() {
            bytes[32 + 8 * i..40 + 8 * i].copy_from_slice(&count.to_le_bytes());
        }
        let check = xxh3_64(&bytes[..HEADER_BYTES - 8]);
        bytes[HEADER_BYTES - 8..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads the header of `file`, or returns the problem with the file.
    fn check(file: &[u8], key: u128) -> Result<Self, &'static str> {
        let Some((header, payload)) = file.split_at_checked(HEADER_BYTES) else {
            return Err("is shorter than its header");
        };
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        if header[..8] != MAGIC || header[8..12] != VERSION.to_le_bytes() {
            return Err("is of another kind or version");
        }
        if number(HEADER_BYTES - 8) != xxh3_64(&header[..HEADER_BYTES - 8]) {
            return Err("has a damaged header");
        }
        let parsed = Self {
            key: u128::from(number(16)) | (u128::from(number(24)) << 64),
            token_bytes: number(8).wrapping_shr(32) as u32,
            num_tokens: number(32),
            num_text_bytes: number(40),
            num_documents: number(48),
            num_note_bytes: number(56),
            payload_hash: number(64),
        };
        if parsed.key != key || !matches!(parsed.token_bytes, 2 | 4) {
            return Err("belongs to other data");
        }
        let token_bytes = parsed.num_tokens.checked_mul(u64::from(parsed.token_bytes));
        if token_bytes.and_then(|bytes| bytes.checked_add(parsed.num_note_bytes)) != Some(payload.len() as u64) {
            return Err("is not whole");
        }
        if xxh3_64(payload) != parsed.payload_hash {
            return Err("is damaged");
        }
        Ok(parsed)
    }
}

/// The tokens of a data set. Each document is followed by the token that ends it.
pub struct TokenStore {
    payload: Payload,
    num_tokens: u64,
    num_text_bytes: u64,
    num_documents: u64,
    notes: Notes,
}

enum Payload {
    Memory(Vec<u32>),
    Mapped { file: MappedFile, token_bytes: usize },
}

impl std::fmt::Debug for TokenStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenStore").field("num_tokens", &self.num_tokens).finish_non_exhaustive()
    }
}

impl From<Vec<u32>> for TokenStore {
    fn from(tokens: Vec<u32>) -> Self {
        let num_tokens = tokens.len() as u64;
        Self {
            payload: Payload::Memory(tokens),
            num_tokens,
            num_text_bytes: num_tokens,
            num_documents: 1,
            notes: Notes::default(),
        }
    }
}

impl TokenStore {
    /// Opens the tokens of `sources` from a cache file, or tokenises them and writes one.
    pub fn open(sources: &Sources, tokenizer: &dyn Encode, place: &CachePlace) -> Result<Self, DataError> {
        let key = cache_key(sources, tokenizer);
        let name = format!("{key:032x}.tokens");
        for folder in &place.folders {
            let path = folder.join(&name);
            match Self::map(&path, key, sources) {
                Ok(Some(store)) => {
                    tracing::debug!("{}: tokenised data from before", path.display());
                    return Ok(store);
                }
                Ok(None) => {}
                Err(problem) => tracing::warn!("{}: {problem}; tokenising again", path.display()),
            }
        }
        let (file, folder) = place.create()?;
        let path = folder.join(name);
        tracing::info!(
            "tokenising {} ({} files, {} bytes)",
            sources.describe(),
            sources.num_files(),
            sources.num_bytes()
        );
        let writer = Writer::new(file, sources, tokenizer, key);
        writer.write_all(sources)?.persist(&path)?;
        let mapped = Self::map(&path, key, sources);
        mapped
            .map_err(io::Error::other)
            .and_then(|store| store.ok_or_else(|| io::ErrorKind::NotFound.into()))
            .map_err(|source| cache_error(&path, source))
    }

    /// Opens the file at `path`: `None` if it does not exist, and an error with the problem if it cannot be used.
    fn map(path: &Path, key: u128, sources: &Sources) -> Result<Option<Self>, String> {
        let file = match MappedFile::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("cannot be read: {error}")),
        };
        let header = Header::check(file.as_ref(), key)?;
        let notes = &file.as_ref()[file.as_ref().len() - header.num_note_bytes as usize..];
        let notes: Vec<StoredNote> = serde_json::from_slice(notes).map_err(|error| format!("is damaged: {error}"))?;
        Ok(Some(Self {
            notes: Notes::restore(notes, &sources.paths()),
            payload: Payload::Mapped { file, token_bytes: header.token_bytes as usize },
            num_tokens: header.num_tokens,
            num_text_bytes: header.num_text_bytes,
            num_documents: header.num_documents,
        }))
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.num_tokens
    }

    /// Returns whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.num_tokens == 0
    }

    /// Returns the bytes of the tokens' text. A loss per token times tokens by bytes is the loss per byte.
    #[must_use]
    pub fn num_text_bytes(&self) -> u64 {
        self.num_text_bytes
    }

    /// Returns the number of documents.
    #[must_use]
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// Returns the figures of the data, which is in `num_files` files.
    #[must_use]
    pub fn summary(&self, num_files: usize) -> ReadSummary {
        let Self { num_documents, num_text_bytes, num_tokens, .. } = *self;
        ReadSummary { num_files, num_documents, num_text_bytes, num_tokens }
    }

    /// Returns the notes on rows that were skipped or changed.
    #[must_use]
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Appends the tokens of `range` to `out`.
    ///
    /// # Panics
    /// Panics if the range exceeds the tokens.
    pub fn read(&self, range: Range<u64>, out: &mut Vec<u32>) {
        let range = range.start as usize..range.end as usize;
        match &self.payload {
            Payload::Memory(tokens) => out.extend_from_slice(&tokens[range]),
            Payload::Mapped { file, token_bytes: 2 } => {
                let bytes = &file.as_ref()[HEADER_BYTES + 2 * range.start..HEADER_BYTES + 2 * range.end];
                out.extend(bytes.as_chunks().0.iter().map(|&two| u32::from(u16::from_le_bytes(two))));
            }
            Payload::Mapped { file, .. } => {
                let bytes = &file.as_ref()[HEADER_BYTES + 4 * range.start..HEADER_BYTES + 4 * range.end];
                out.extend(bytes.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)));
            }
        }
    }
}

/// Returns a hash of everything that determines the content of a cache file.
fn cache_key(sources: &Sources, tokenizer: &dyn Encode) -> u128 {
    let mut hasher = Xxh3::new();
    hasher.update(&VERSION.to_le_bytes());
    hasher.update(&sources.hash().to_le_bytes());
    hasher.update(&tokenizer.fingerprint().to_le_bytes());
    hasher.update(&(tokenizer.vocab_size() as u64).to_le_bytes());
    hasher.update(&tokenizer.eos().map_or(u64::MAX, u64::from).to_le_bytes());
    hasher.digest128()
}

/// A piece of text that is waiting to be tokenised.
struct Waiting {
    text: String,
    begins_document: bool,
    ends_document: bool,
    path: PathBuf,
}

/// A cache file being written. Dropping it deletes the file.
struct Writer<'t> {
    file: BufWriter<Draft>,
    watch: &'t Watch,
    tokenizer: &'t dyn Encode,
    header: Header,
    payload: Xxh3,
    bytes: Vec<u8>,
}

impl<'t> Writer<'t> {
    fn new(file: Draft, sources: &'t Sources, tokenizer: &'t dyn Encode, key: u128) -> Self {
        let token_bytes = if tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 };
        let [num_tokens, num_text_bytes, num_documents, num_note_bytes, payload_hash] = [0; 5];
        let header =
            Header { key, token_bytes, num_tokens, num_text_bytes, num_documents, num_note_bytes, payload_hash };
        let (file, watch) = (BufWriter::new(file), sources.watch());
        Self { file, watch, tokenizer, header, payload: Xxh3::new(), bytes: Vec::new() }
    }

    fn write_all(mut self, sources: &Sources) -> Result<Self, DataError> {
        self.write(&[0; HEADER_BYTES])?;
        let (mut waiting, mut num_bytes, mut begins_document) = (Vec::new(), 0, true);
        let notes = sources.for_each(|piece| {
            num_bytes += piece.text.len();
            let Piece { text, ends_document, path } = piece;
            waiting.push(Waiting { text: text.into(), begins_document, ends_document, path: path.into() });
            begins_document = ends_document;
            if num_bytes >= ROUND_BYTES {
                self.tokenise(&waiting)?;
                waiting.clear();
                num_bytes = 0;
            }
            Ok(ControlFlow::Continue(()))
        })?;
        self.tokenise(&waiting)?;
        // Notes are numbers and names, which are always valid JSON.
        let notes = serde_json::to_vec(&notes.store(&sources.paths())).unwrap_or_default();
        self.header.num_note_bytes = notes.len() as u64;
        self.payload.update(&notes);
        self.write(&notes)?;
        Ok(self)
    }

    /// Tokenises the pieces on all cores and writes their tokens in order.
    fn tokenise(&mut self, pieces: &[Waiting]) -> Result<(), DataError> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let share = pieces.len().div_ceil(threads).max(1);
        let (tokenizer, watch) = (self.tokenizer, self.watch);
        let parts: Vec<Result<Vec<u32>, DataError>> = thread::scope(|scope| {
            let start = |part| {
                let work = move || encode_part(tokenizer, part, watch);
                // If no more threads can be started this one does the work.
                thread::Builder::new().spawn_scoped(scope, work).map_err(|_| part)
            };
            let running: Vec<_> = pieces.chunks(share).map(start).collect();
            let finish = |part: Result<thread::ScopedJoinHandle<'_, _>, _>| match part {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(part) => encode_part(tokenizer, part, watch),
            };
            running.into_iter().map(finish).collect()
        });
        for ids in parts {
            self.put(&ids?)?;
        }
        self.header.num_text_bytes += pieces.iter().map(|piece| piece.text.len() as u64).sum::<u64>();
        self.header.num_documents += pieces.iter().filter(|piece| piece.ends_document).count() as u64;
        Ok(())
    }

    fn put(&mut self, ids: &[u32]) -> Result<(), DataError> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        if self.header.token_bytes == 2 {
            bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes()));
        } else {
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        self.payload.update(&bytes);
        self.header.num_tokens += ids.len() as u64;
        self.write(&bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.file.write_all(bytes).map_err(|source| cache_error(self.file.get_ref().file.path(), source))
    }

    /// Completes the header, syncs the file and renames it.
    fn persist(mut self, path: &Path) -> Result<(), DataError> {
        self.header.payload_hash = self.payload.digest();
        let finish = || -> io::Result<()> {
            self.file.rewind()?;
            self.file.write_all(&self.header.to_bytes())?;
            let Draft { file, _note } = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            file.persist(path).map_err(|error| error.error)?;
            // The name is on disk when the folder is synced.
            path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        finish().map_err(|source| cache_error(path, source))
    }
}

/// Returns the tokens of the pieces, one after another.
fn encode_part(tokenizer: &dyn Encode, pieces: &[Waiting], watch: &Watch) -> Result<Vec<u32>, DataError> {
    let mut ids = Vec::new();
    for piece in pieces {
        watch.check()?;
        let refused = |problem| DataError::Tokenizer { path: piece.path.clone(), problem };
        let start = ids.len();
        if piece.begins_document {
            ids.extend(tokenizer.text_start());
        }
        tokenizer.encode(&piece.text, &mut ids).map_err(refused)?;
        if piece.ends_document {
            ids.extend(tokenizer.eos());
        }
        // Larger ids would be truncated when stored, and later exceed the embedding.
        if let Some(id) = ids[start..].iter().find(|&&id| id as usize >= tokenizer.vocab_size()) {
            return Err(refused(format!("token {id} is not below the vocabulary's size, {}", tokenizer.vocab_size())));
        }
    }
    Ok(ids)
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
