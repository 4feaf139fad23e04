//! Data files and their documents as a stream.
//!
//! Files are found and examined once before they are read. That pass computes the hash that names the token cache,
//! and detects files that are not text. A folder with a picture in it is thus fine, and no half-read folder leaves
//! half its tokens behind.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3;

use super::input::Input;
use super::notes::{Note, Notes, shown};
use super::search::{Candidate, Search, Walk};
use super::watch::{Pass, ReadPhase, Watch};
use super::weighted::has_weight;
use super::{DataError, DataFormat, STDIN, TextOptions, checkout, csv, decode, json, parquet, spool, text};

/// A piece of a document: the whole document, unless it is larger than about a megabyte.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The text, never empty.
    pub text: &'a str,
    /// True if the document ends with this piece.
    pub ends_document: bool,
    /// The file of the document.
    pub path: &'a Path,
}

/// A visitor of pieces. It may stop the reading.
pub(super) type Visit<'v> = dyn FnMut(Piece<'_>) -> Result<ControlFlow<()>, DataError> + 'v;

/// The format of a file. The numbers are part of hashes that name cache files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text = 0,
    Json = 1,
    Parquet = 2,
    Csv = 3,
}

/// A file of data.
#[derive(Clone, Debug)]
struct SourceFile {
    path: PathBuf,
    /// The stored text of a pipe.
    spool: Option<Arc<File>>,
    format: Format,
    stamp: Stamp,
    hash: u128,
}

/// The properties of a file that change when it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    num_bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn new(path: &Path, spool: Option<&File>) -> Result<Self, DataError> {
        let metadata = spool.map_or_else(|| fs::metadata(path), File::metadata);
        let metadata = metadata.map_err(|source| decode::unreadable(path, source))?;
        Ok(Self { num_bytes: metadata.len(), modified: metadata.modified().ok() })
    }
}

/// The files of a source, in the order of their documents.
#[derive(Clone, Debug)]
pub struct Sources {
    files: Vec<SourceFile>,
    text_field: String,
    place: String,
    watch: Watch,
}

impl Sources {
    /// Finds the files that `options.paths` names, which must have no weights; without paths, those of the checkout
    /// that contains the current folder. Logs one line about skipped files.
    pub fn find(options: &TextOptions, watch: &Watch) -> Result<Self, DataError> {
        if options.paths.is_empty() {
            let here = std::env::current_dir().map_err(|source| decode::unreadable(Path::new("."), source))?;
            return Self::from_checkout(&here, options, watch);
        }
        if let Some(path) = options.paths.iter().find(|path| has_weight(path)) {
            let problem = "has a weight, which only training has a use for; leave out what follows the last =";
            return Err(DataError::Weight { path: path.clone(), problem: problem.into() });
        }
        let mut search = Search::new(watch);
        let sources = Self::search(&mut search, &options.paths, options, watch)?;
        watch.warn(&search.notes);
        Ok(sources)
    }

    /// Finds the files of each path of `options`; no file is in two sources. Logs one line about skipped files.
    pub fn find_each(options: &TextOptions, watch: &Watch) -> Result<Vec<Self>, DataError> {
        let mut search = Search::new(watch);
        let paths = options.paths.iter();
        let search_one = |path| Self::search(&mut search, std::slice::from_ref(path), options, watch);
        let sources = paths.map(search_one).collect::<Result<_, _>>()?;
        watch.warn(&search.notes);
        Ok(sources)
    }

    /// Finds the sources and documents of the checkout that contains `start`.
    pub fn from_checkout(start: &Path, options: &TextOptions, watch: &Watch) -> Result<Self, DataError> {
        let nothing = |skipped| DataError::NoText { place: start.display().to_string(), skipped };
        let root = checkout::root(start).ok_or_else(|| nothing(" (not in a checkout)".into()))?;
        let mut search = Search::new(watch);
        search.walk(&root, Walk { is_wanted: &checkout::is_document, is_checkout: true })?;
        Self::look_through(&mut search, options, root.display().to_string(), watch)
    }

    /// Finds the files of `paths` that `search` has not seen yet, and notes skipped files in it.
    fn search(
        search: &mut Search<'_>,
        paths: &[String],
        options: &TextOptions,
        watch: &Watch,
    ) -> Result<Self, DataError> {
        for path in paths {
            search.add(path)?;
        }
        let name = |path: &String| if path == STDIN { spool::STDIN_NAME.into() } else { shown(Path::new(path)) };
        Self::look_through(search, options, paths.iter().map(name).collect::<Vec<_>>().join(", "), watch)
    }

    fn look_through(
        search: &mut Search<'_>,
        options: &TextOptions,
        place: String,
        watch: &Watch,
    ) -> Result<Self, DataError> {
        let candidates = std::mem::take(&mut search.candidates);
        let size = |candidate: &Candidate| {
            Stamp::new(&candidate.path, candidate.spool.as_deref()).map_or(0, |stamp| stamp.num_bytes)
        };
        let total = candidates.iter().map(size).sum();
        let pass = Pass::new(watch, ReadPhase::Looking, candidates.len(), total);
        let mut files = Vec::new();
        let mut empty = None;
        for candidate in candidates {
            let before = pass.num_bytes_done();
            let notes = RefCell::default();
            let looked = look_at(&candidate, options, &pass, &notes);
            watch.check()?;
            search.notes.merge(&notes.into_inner());
            match looked {
                Ok(file) if file.stamp.num_bytes > 0 => {
                    pass.end_file(before, file.stamp.num_bytes);
                    files.push(file);
                }
                looked => {
                    search.notes.add(reason_to_pass_over(looked, candidate.named)?, &candidate.path, String::new);
                    empty = empty.or(candidate.named.then_some(candidate.path));
                }
            }
        }
        if !files.is_empty() {
            return Ok(Self { files, text_field: options.text_field.clone(), place, watch: watch.clone() });
        }
        let skipped = search.notes.line().map_or_else(String::new, |line| format!(": {line}"));
        // Named files are skipped only if they are empty.
        Err(empty.map_or(DataError::NoText { place, skipped }, |path| DataError::Empty { path }))
    }

    /// Returns the name of this data for a user: the paths as given, or the checkout.
    #[must_use]
    pub fn describe(&self) -> String {
        self.place.clone()
    }

    /// Returns the number of files.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Returns the size of the files on disk, in bytes.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.stamp.num_bytes).sum()
    }

    /// Returns a hash of all documents. It does not depend on the names of files.
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

    /// Returns the names of the files.
    pub(super) fn paths(&self) -> Vec<&Path> {
        self.files.iter().map(|file| &*file.path).collect()
    }

    /// Returns the watch, which is told the progress of reading.
    #[must_use]
    pub fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Calls `visit` with every piece of every document, until it breaks. Returns notes on skipped rows.
    pub fn for_each<F>(&self, visit: F) -> Result<Notes, DataError>
    where
        F: FnMut(Piece<'_>) -> Result<ControlFlow<()>, DataError>,
    {
        self.read_all(ReadPhase::Tokenising, visit)
    }

    fn read_all<F>(&self, phase: ReadPhase, mut visit: F) -> Result<Notes, DataError>
    where
        F: FnMut(Piece<'_>) -> Result<ControlFlow<()>, DataError>,
    {
        let pass = Pass::new(&self.watch, phase, self.files.len(), self.num_bytes());
        let [notes, told] = [RefCell::default(), RefCell::default()];
        for file in &self.files {
            let before = pass.num_bytes_done();
            let SourceFile { path, spool, format, stamp, .. } = file;
            // Notes on plain text were already reported when the file was examined.
            let notes = if *format == Format::Text { &told } else { &notes };
            let input = Input { path, spool: spool.as_deref(), field: &self.text_field, pass: &pass, notes };
            let flow = match format {
                Format::Text => text::read(input, &mut visit),
                Format::Json => json::read(input, &mut visit),
                Format::Parquet => parquet::read(input, &mut visit),
                Format::Csv => csv::read(input, &mut visit),
            };
            self.watch.check()?;
            if flow?.is_break() {
                break;
            }
            if Stamp::new(path, spool.as_deref())? != *stamp {
                return Err(DataError::Changed { path: path.clone() });
            }
            pass.end_file(before, stamp.num_bytes);
        }
        Ok(notes.into_inner())
    }

    /// Returns text to train a tokenizer on: about `max_bytes`, taken evenly from all pieces if there is more.
    pub fn sample_texts(&self, max_bytes: u64) -> Result<Vec<String>, DataError> {
        let mut texts = Vec::new();
        let (mut seen, mut kept) = (0u64, 0u64);
        // Compressed files hold more text, of which a larger part of the beginning is taken; the limit still holds.
        let share = (max_bytes as f64 / self.num_bytes().max(1) as f64).min(1.0);
        self.read_all(ReadPhase::Sampling, |piece| {
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

/// Returns the reason to skip a file that was examined. A problem with a file that the user named is an error.
fn reason_to_pass_over(looked: Result<SourceFile, DataError>, named: bool) -> Result<Note, DataError> {
    match looked {
        Ok(_) => Ok(Note::Empty),
        Err(DataError::NotUtf8 { .. }) if !named => Ok(Note::NotUtf8),
        Err(DataError::Binary { .. }) if !named => Ok(Note::Binary),
        Err(DataError::Packed { .. }) if !named => Ok(Note::Packed),
        Err(error) => Err(error),
    }
}

/// Reads a file once to find its format, whether it is text, and its hash.
fn look_at(
    candidate: &Candidate,
    options: &TextOptions,
    pass: &Pass<'_>,
    notes: &RefCell<Notes>,
) -> Result<SourceFile, DataError> {
    let Candidate { path, spool, named } = candidate;
    let field = &options.text_field;
    let input = Input { path, spool: spool.as_deref(), field, pass, notes };
    let mut stamp = Stamp::new(path, input.spool)?;
    let format = if stamp.num_bytes == 0 { Format::Text } else { format_of(input, options.format, *named)? };
    let mut hasher = Xxh3::new();
    if format == Format::Text {
        let (mut num_bytes, mut has_nul) = (0, false);
        let _always_to_the_end = text::read(input, &mut |piece| {
            num_bytes += piece.text.len() as u64;
            has_nul |= piece.text.contains('\0');
            hasher.update(piece.text.as_bytes());
            Ok(ControlFlow::Continue(()))
        })?;
        if num_bytes == 0 {
            stamp.num_bytes = 0;
        }
        if has_nul {
            input.note(Note::Nul, String::new);
        }
    } else {
        hash_raw(input, &mut hasher)?;
    }
    Ok(SourceFile { path: path.clone(), spool: spool.clone(), format, stamp, hash: hasher.digest128() })
}

fn hash_raw(input: Input<'_>, hasher: &mut Xxh3) -> Result<(), DataError> {
    let mut reader = decode::open_raw(&input)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        input.pass.check()?;
        match reader.read(&mut buffer).map_err(|source| decode::unreadable(input.path, source))? {
            0 => return Ok(()),
            count => {
                hasher.update(&buffer[..count]);
                input.pass.add_bytes(count as u64);
            }
        }
    }
}

/// Returns the format: as set, or by the name without an extension of compression. Parquet files and pipes are
/// recognised by their content. Files that may be tables but lack the text column are plain text, unless the user
/// named them.
fn format_of(input: Input<'_>, asked: DataFormat, named: bool) -> Result<Format, DataError> {
    let format = match asked {
        DataFormat::Text => return Ok(Format::Text),
        DataFormat::Json => Format::Json,
        DataFormat::Csv => Format::Csv,
        DataFormat::Parquet => Format::Parquet,
        DataFormat::Auto => return guess(input, named),
    };
    // An unsupported compression or archive is reported now, as for text.
    if format != Format::Parquet {
        decode::open(input)?;
    }
    Ok(format)
}

fn guess(input: Input<'_>, named: bool) -> Result<Format, DataError> {
    let name = input.path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = [".gz", ".gzip", ".zst", ".zstd"].iter().fold(&*name, |name, end| name.trim_end_matches(end));
    // A second look must not add notes.
    let (apart, quiet) = (RefCell::default(), input.pass.quiet());
    let look = Input { notes: &apart, pass: &quiet, ..input };
    let mut magic = Vec::new();
    let read = decode::open(look)?.take(parquet::MAGIC.len() as u64).read_to_end(&mut magic);
    if name.ends_with(".parquet") || (read.is_ok() && magic == parquet::MAGIC) {
        return Ok(Format::Parquet);
    }
    // A pipe has no name: rows of objects are recognised by the first of them.
    if input.spool.is_some() && json::begins_as_rows(look)? && json::survey(look)? == json::Survey::Rows {
        return Ok(Format::Json);
    }
    if [".jsonl", ".ndjson"].iter().any(|end| name.ends_with(end)) {
        return Ok(Format::Json);
    }
    if name.ends_with(".json") {
        match json::survey(look)? {
            json::Survey::Rows => return Ok(Format::Json),
            json::Survey::RowsWithoutField if named => return Ok(Format::Json),
            _ => input.note(Note::PlainText, String::new),
        }
    }
    if [".csv", ".tsv"].iter().any(|end| name.ends_with(end)) {
        if csv::has_column(look)? {
            return Ok(Format::Csv);
        }
        if named {
            return Err(csv::without_column(look)?);
        }
        input.note(Note::PlainText, String::new);
    }
    Ok(Format::Text)
}

#[cfg(test)]
#[path = "sources_tests.rs"]
mod tests;
