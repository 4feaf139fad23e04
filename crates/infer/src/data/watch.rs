//! Progress and interruption of reading, which takes minutes for large data.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{DataError, Notes};

/// The callback that gets the progress of reading.
type Listener = Arc<dyn Fn(ReadProgress) + Send + Sync>;

/// A companion of all reading: it says when to stop and where tokens are cached, and gets the progress.
#[derive(Clone, Default)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    listener: Option<Listener>,
    is_silent: bool,
    user_cache: Option<PathBuf>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("stop", &self.stop).finish_non_exhaustive()
    }
}

impl Watch {
    /// Makes a watch by which reading ends with [`DataError::Stopped`] soon after `stop` is set.
    #[must_use]
    pub fn new(stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..Self::default() }
    }

    /// Sets a listener for progress, which is called many times a second.
    #[must_use]
    pub fn with_listener(self, listener: impl Fn(ReadProgress) + Send + Sync + 'static) -> Self {
        Self { listener: Some(Arc::new(listener)), ..self }
    }

    /// Sets the program's folder in the user's cache folder, where tokens are cached unless a setting names another
    /// folder; `None` if there is none.
    #[must_use]
    pub fn with_user_cache(self, folder: Option<PathBuf>) -> Self {
        Self { user_cache: folder, ..self }
    }

    /// Returns the program's folder in the user's cache folder.
    #[must_use]
    pub fn user_cache(&self) -> Option<&Path> {
        self.user_cache.as_deref()
    }

    /// Returns a watch that stops as this one does, but gets no progress and logs no warnings: for ranks that read
    /// the same data as another rank.
    #[must_use]
    pub fn silent(&self) -> Self {
        Self { listener: None, is_silent: true, ..self.clone() }
    }

    /// Logs a warning about `notes`, unless another rank does.
    pub fn warn(&self, notes: &Notes) {
        if !self.is_silent {
            notes.warn();
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Fails if reading is to stop.
    pub(super) fn check(&self) -> Result<(), DataError> {
        if self.is_stopped() { Err(DataError::Stopped) } else { Ok(()) }
    }
}

/// A pass over the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadPhase {
    /// Text from a pipe is stored; its size is unknown.
    Piped,
    /// Files are examined: whether they are text, and whether their tokens are cached.
    Looking,
    /// Text is sampled to train a tokenizer.
    Sampling,
    /// Text is tokenised.
    Tokenising,
}

/// The progress of a pass over the data. Bytes are those of files on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadProgress {
    /// The pass.
    pub phase: ReadPhase,
    /// The number of files done.
    pub num_files_done: usize,
    /// The number of all files.
    pub num_files: usize,
    /// The bytes done.
    pub num_bytes_done: u64,
    /// The bytes of all files; 0 if unknown.
    pub num_bytes: u64,
    /// True if the pass is over.
    pub is_over: bool,
}

/// A pass in progress.
pub(super) struct Pass<'w> {
    watch: &'w Watch,
    progress: Cell<ReadProgress>,
    is_quiet: bool,
}

impl<'w> Pass<'w> {
    pub(super) fn new(watch: &'w Watch, phase: ReadPhase, num_files: usize, num_bytes: u64) -> Self {
        let progress =
            ReadProgress { phase, num_files_done: 0, num_files, num_bytes_done: 0, num_bytes, is_over: false };
        Self { watch, progress: Cell::new(progress), is_quiet: false }
    }

    /// Returns a pass that stops as this one does and reports no progress.
    pub(super) fn quiet(&self) -> Self {
        Self { watch: self.watch, progress: self.progress.clone(), is_quiet: true }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.watch.is_stopped()
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        self.watch.check()
    }

    /// Counts bytes that were read.
    pub(super) fn add_bytes(&self, num_bytes: u64) {
        let progress = self.progress.get();
        self.set(ReadProgress { num_bytes_done: progress.num_bytes_done + num_bytes, ..progress });
    }

    /// Counts a file of `num_bytes` as done, even if it was read only in part. `num_bytes_before` is the size of
    /// those before.
    pub(super) fn end_file(&self, num_bytes_before: u64, num_bytes: u64) {
        let progress = self.progress.get();
        let num_bytes_done = num_bytes_before + num_bytes;
        self.set(ReadProgress { num_files_done: progress.num_files_done + 1, num_bytes_done, ..progress });
    }

    /// Returns the bytes done.
    pub(super) fn num_bytes_done(&self) -> u64 {
        self.progress.get().num_bytes_done
    }

    fn set(&self, progress: ReadProgress) {
        self.progress.set(progress);
        if let (false, Some(listener)) = (self.is_quiet, &self.watch.listener) {
            listener(progress);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.set(ReadProgress { is_over: true, ..self.progress.get() });
    }
}

/// A reader that counts its bytes, and fails once reading is to stop.
pub(super) struct Watched<'p, R> {
    pub(super) reader: R,
    pub(super) pass: &'p Pass<'p>,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.pass.is_stopped() {
            return Err(io::Error::other("stopped"));
        }
        let count = self.reader.read(buffer)?;
        self.pass.add_bytes(count as u64);
        Ok(count)
    }
}
