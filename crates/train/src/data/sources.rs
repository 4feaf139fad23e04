//! Which files are data, and their documents as a stream.
//!
//! Files are found and looked through once before anything is read for good: that pass gives the hash that names the token
//! cache, and tells text from other things, so that a folder with a picture in it still works and a half-read one never
//! leaves half its tokens behind.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3;

use super::{DataError, checkout, decode, jsonl, parquet, text};
use crate::config::DataConfig;

/// A stretch of a document: the whole of it, unless the document is larger than a megabyte or so.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The text, never empty.
    pub text: &'a str,
    /// Whether the document ends with this piece.
    pub ends_document: bool,
    /// The file that it is from.
    pub path: &'a Path,
}

/// What is done with each piece; it may ask for no more.
pub(super) type Visit<'v> = dyn FnMut(Piece<'_>) -> Result<ControlFlow<()>, DataError> + 'v;

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    JsonLines,
    Parquet,
}

/// A file of data.
#[derive(Clone, Debug)]
struct SourceFile {
    path: PathBuf,
    format: Format,
    stamp: Stamp,
    hash: u128,
}

/// What changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    num_bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(path: &Path) -> Result<Self, DataError> {
        let metadata = fs::metadata(path).map_err(|source| decode::unreadable(path, source))?;
        Ok(Self { num_bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// The files of a data set, in the order in which their documents come.
#[derive(Clone, Debug)]
pub struct Sources {
    files: Vec<SourceFile>,
    text_field: String,
    place: String,
}

impl Sources {
    /// Finds the files that `config.paths` names; with none, those of the checkout that the current folder is in.
    pub fn find(config: &DataConfig) -> Result<Self, DataError> {
        if config.paths.is_empty() {
            let here = std::env::current_dir().map_err(|source| decode::unreadable(Path::new("."), source))?;
            return Self::of_checkout(&here, config);
        }
        let mut search = Search::default();
        for path in &config.paths {
            search.add(path)?;
        }
        Self::look_through(search, &config.text_field, config.paths.join(", "))
    }

    /// The sources and documents of the checkout that `start` is in.
    pub fn of_checkout(start: &Path, config: &DataConfig) -> Result<Self, DataError> {
        let nothing = |skipped| DataError::NoText { place: start.display().to_string(), skipped };
        let root = checkout::root(start).ok_or_else(|| nothing(" (not in a checkout)".into()))?;
        let mut search = Search::default();
        search.walk(&root, &checkout::is_document)?;
        Self::look_through(search, &config.text_field, root.display().to_string())
    }

    fn look_through(search: Search, text_field: &str, place: String) -> Result<Self, DataError> {
        let mut files = Vec::new();
        let mut empty = None;
        let mut num_skipped = 0;
        for Candidate { path, named } in search.candidates {
            match look_at(&path) {
                Ok(file) if file.stamp.num_bytes == 0 => empty = empty.or(named.then_some(path)),
                Ok(file) => files.push(file),
                Err(DataError::Binary { .. } | DataError::NotUtf8 { .. }) if !named => num_skipped += 1,
                Err(error) => return Err(error),
            }
        }
        if num_skipped > 0 {
            tracing::info!("{place}: passed over {num_skipped} files that are not UTF-8 text");
        }
        match (files.is_empty(), empty) {
            (true, Some(path)) => Err(DataError::Empty { path }),
            (true, None) => {
                let skipped = format!(" ({num_skipped} files that are not UTF-8 passed over)");
                Err(DataError::NoText { place, skipped: if num_skipped > 0 { skipped } else { String::new() } })
            }
            (false, empty) => {
                if let Some(path) = empty {
                    tracing::warn!("{}: is empty", path.display());
                }
                Ok(Self { files, text_field: text_field.into(), place })
            }
        }
    }

    /// What a user would call this data: the paths as given, or the checkout.
    #[must_use]
    pub fn describe(&self) -> String {
        self.place.clone()
    }

    /// Number of files.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Size of the files on disk, in bytes.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.stamp.num_bytes).sum()
    }

    /// A hash of all documents. The names of files have no part in it.
    #[must_use]
    pub fn hash(&self) -> u128 {
        let mut hasher = Xxh3::new();
        hasher.update(self.text_field.as_bytes());
        for file in &self.files {
            hasher.update(&[0, file.format as u8]);
            hasher.update(&file.hash.to_le_bytes());
        }
        hasher.digest128()
    }

    /// Calls `visit` with every piece of every document, until it breaks.
    pub fn for_each<F>(&self, mut visit: F) -> Result<(), DataError>
    where
        F: FnMut(Piece<'_>) -> Result<ControlFlow<()>, DataError>,
    {
        for file in &self.files {
            let flow = match file.format {
                Format::Text => text::read(&file.path, &mut visit)?,
                Format::JsonLines => jsonl::read(&file.path, &self.text_field, &mut visit)?,
                Format::Parquet => parquet::read(&file.path, &self.text_field, &mut visit)?,
            };
            if flow.is_break() {
                return Ok(());
            }
            if Stamp::of(&file.path)? != file.stamp {
                return Err(DataError::Changed { path: file.path.clone() });
            }
        }
        Ok(())
    }

    /// Text to train a tokenizer on: about `max_bytes`, taken evenly from all pieces when there is more.
    pub fn sample_texts(&self, max_bytes: u64) -> Result<Vec<String>, DataError> {
        let mut texts = Vec::new();
        let (mut seen, mut kept) = (0u64, 0u64);
        // Compressed files hold more than this, which takes more of their beginning; the bound holds all the same.
        let share = (max_bytes as f64 / self.num_bytes().max(1) as f64).min(1.0);
        self.for_each(|piece| {
            if kept as f64 <= seen as f64 * share {
                kept += piece.text.len() as u64;
                texts.push(piece.text.to_string());
            }
            seen += piece.text.len() as u64;
            Ok(if kept < max_bytes { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(texts)
    }
}

/// A path that may hold data.
struct Candidate {
    path: PathBuf,
    /// Whether the user named this very file, so that passing it over would be wrong.
    named: bool,
}

#[derive(Default)]
struct Search {
    candidates: Vec<Candidate>,
    seen: HashSet<PathBuf>,
}

impl Search {
    /// Adds what a path, folder or glob of the user's stands for.
    fn add(&mut self, given: &str) -> Result<(), DataError> {
        let path = Path::new(given);
        if !path.exists() && given.contains(['*', '?', '[']) {
            return self.add_glob(given);
        }
        self.add_path(path, true)
    }

    fn add_glob(&mut self, pattern: &str) -> Result<(), DataError> {
        let wrong = |problem: String| DataError::Glob { pattern: pattern.into(), problem };
        let paths = glob::glob(pattern).map_err(|error| wrong(format!("not a glob: {error}")))?;
        let mut matched = false;
        for path in paths {
            let path = path.map_err(|error| {
                let path = error.path().to_owned();
                decode::unreadable(&path, error.into())
            })?;
            // A pattern means hidden files only if it says so, as in a shell. The crate's own option for this would panic
            // on names that are not UTF-8.
            if num_hidden(&path) <= num_hidden(Path::new(pattern)) {
                matched = true;
                self.add_path(&path, false)?;
            }
        }
        if matched { Ok(()) } else { Err(wrong("matches no file".into())) }
    }

    fn add_path(&mut self, path: &Path, named: bool) -> Result<(), DataError> {
        let file_type = fs::metadata(path).map_err(|source| decode::unreadable(path, source))?.file_type();
        if file_type.is_dir() {
            self.walk(path, &|_| true)
        } else if file_type.is_file() {
            self.push(path, named);
            Ok(())
        } else {
            Err(DataError::Special { path: path.into(), kind: decode::special_kind(file_type) })
        }
    }

    /// Adds the files below `folder` that are wanted, by name in each folder. Folders are not entered through links, which
    /// may lead in circles; files are.
    fn walk(&mut self, folder: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<(), DataError> {
        let unreadable = |source| decode::unreadable(folder, source);
        let entries = fs::read_dir(folder).map_err(unreadable)?;
        let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let file_type = entry.file_type().map_err(|source| decode::unreadable(&path, source))?;
            if file_type.is_dir() {
                if !is_made_by_programs(&path) {
                    self.walk(&path, wanted)?;
                }
            } else if wanted(&path) && fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                self.push(&path, false);
            }
        }
        Ok(())
    }

    /// Adds a file once, however many of the user's paths lead to it: seen twice it could be trained on and held out.
    fn push(&mut self, path: &Path, named: bool) {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
        if self.seen.insert(real) {
            self.candidates.push(Candidate { path: path.into(), named });
        }
    }
}

/// How many parts of a path have the name of something hidden.
fn num_hidden(path: &Path) -> usize {
    let is_hidden =
        |part: &Component<'_>| matches!(part, Component::Normal(name) if name.as_encoded_bytes().starts_with(b"."));
    path.components().filter(is_hidden).count()
}

/// Folders whose content nobody wrote: build outputs, runs of this program, installed packages. Cargo and others mark
/// what they make with a `CACHEDIR.TAG`, a run has its metrics, whatever the folders are called.
fn is_made_by_programs(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    matches!(&*name, "target" | "runs" | "node_modules" | "__pycache__")
        || ["pyvenv.cfg", "CACHEDIR.TAG", "metrics.jsonl"].iter().any(|mark| folder.join(mark).exists())
}

/// Reads a file through once: what it is, whether it is text, and its hash.
fn look_at(path: &Path) -> Result<SourceFile, DataError> {
    let format = format_of(path)?;
    let mut file = SourceFile { path: path.into(), format, stamp: Stamp::of(path)?, hash: 0 };
    let mut hasher = Xxh3::new();
    if format == Format::Text {
        let mut num_bytes = 0;
        let _always_to_the_end = text::read(path, &mut |piece| {
            num_bytes += piece.text.len() as u64;
            hasher.update(piece.text.as_bytes());
            Ok(ControlFlow::Continue(()))
        })?;
        if num_bytes == 0 {
            file.stamp.num_bytes = 0;
        }
    } else {
        hash_raw(path, &mut hasher).map_err(|source| decode::unreadable(path, source))?;
    }
    file.hash = hasher.digest128();
    Ok(file)
}

fn hash_raw(path: &Path, hasher: &mut Xxh3) -> std::io::Result<()> {
    let mut reader = File::open(path)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// By the name, without an ending that tells the compression; Parquet also by its first bytes.
fn format_of(path: &Path) -> Result<Format, DataError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
    if name.ends_with(".jsonl") || name.ends_with(".ndjson") {
        return Ok(Format::JsonLines);
    }
    if name.ends_with(".parquet") {
        return Ok(Format::Parquet);
    }
    let mut magic = Vec::new();
    // A damaged compressed file is found out when it is read as text.
    let _ = decode::open(path)?.take(parquet::MAGIC.len() as u64).read_to_end(&mut magic);
    Ok(if magic == parquet::MAGIC { Format::Parquet } else { Format::Text })
}

#[cfg(test)]
#[path = "sources_tests.rs"]
mod tests;
