//! Reading that can be followed and stopped: it takes minutes where data is large.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{DataError, Notes};

/// Who is told how far reading is.
type Listener = Arc<dyn Fn(ReadProgress) + Send + Sync>;

/// A companion of all reading: says whether to stop and where tokens are kept, and is told how far it is.
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
    /// Reading ends with [`DataError::Stopped`] soon after `stop` is set.
    #[must_use]
    pub fn new(stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..Self::default() }
    }

    /// Calls `listener` with each advance, many times a second.
    #[must_use]
    pub fn with_listener(self, listener: impl Fn(ReadProgress) + Send + Sync + 'static) -> Self {
        Self { listener: Some(Arc::new(listener)), ..self }
    }

    /// Keeps tokens in `folder`, the program's in the user's cache folder, where no setting names another; none if
    /// there is none.
    #[must_use]
    pub fn with_user_cache(self, folder: Option<PathBuf>) -> Self {
        Self { user_cache: folder, ..self }
    }

    /// The program's folder in the user's cache folder.
    #[must_use]
    pub fn user_cache(&self) -> Option<&Path> {
        self.user_cache.as_deref()
    }

    /// A watch by which reading stops like this one, and which is told nothing and warns of nothing: that of ranks
    /// which read what another one has read.
    #[must_use]
    pub fn silent(&self) -> Self {
        Self { listener: None, is_silent: true, ..self.clone() }
    }

    /// Warns of `notes`, unless another rank does.
    pub fn warn(&self, notes: &Notes) {
        if !self.is_silent {
            notes.warn();
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// An error if reading is to stop.
    pub(super) fn check(&self) -> Result<(), DataError> {
        if self.is_stopped() { Err(DataError::Stopped) } else { Ok(()) }
    }
}

/// A pass over the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadPhase {
    /// Text from a pipe is stored; nobody knows how much will come.
    Piped,
    /// Files are looked through: whether they are text, and whether their tokens are known.
    Looking,
    /// Texts are taken for a tokenizer to learn from.
    Sampling,
    /// Texts become tokens.
    Tokenising,
}

/// The state of a pass over the data. Bytes are those of files as they are on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadProgress {
    /// The pass.
    pub phase: ReadPhase,
    /// Files done.
    pub num_files_done: usize,
    /// Files in all.
    pub num_files: usize,
    /// Bytes done.
    pub num_bytes_done: u64,
    /// Bytes in all; 0 if nobody knows.
    pub num_bytes: u64,
    /// Whether the pass is over.
    pub is_over: bool,
}

/// A pass that is under way.
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

    /// A pass that can be stopped like this one and tells nobody how far it is.
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

    /// Counts a file of `num_bytes` as done, however much of it was read, with those before it `num_bytes_before`.
    pub(super) fn end_file(&self, num_bytes_before: u64, num_bytes: u64) {
        let progress = self.progress.get();
        let num_bytes_done = num_bytes_before + num_bytes;
        self.set(ReadProgress { num_files_done: progress.num_files_done + 1, num_bytes_done, ..progress });
    }

    /// Bytes done.
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

/// A reader whose bytes are counted, and which fails once reading is to stop.
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
