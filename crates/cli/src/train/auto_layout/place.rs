//! The ranks on which layouts are tried: threads of this process, or the processes of a launcher, of which this is
//! one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use moeworks_comm::{CommError, Communicator};
use moeworks_train::config::RunConfig;
use moeworks_train::{Ranks, TrainError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::host::Call;
use crate::ranks::{RunRanks, on_ranks};

/// The time that ranks wait for the root while it measures, chooses, or writes files.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// The ranks of a call.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// Threads, started anew for each trial and for the run.
    Threads(&'a Call<'a>),
    /// A process of a launcher: one rank of the communicator, in each trial and in the run.
    #[cfg_attr(not(unix), allow(dead_code))]
    Process(&'a dyn Communicator),
}

impl Place<'_> {
    /// Returns whether this is the process that decides, writes and prints.
    pub(super) fn is_root(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Process(comm) => comm.rank() == 0,
        }
    }

    /// Runs `work` on the ranks of `config`. Returns the result of rank 0, or of this process.
    pub(super) fn on_ranks<R: Send>(
        &self,
        config: &RunConfig,
        work: impl Fn(Option<Ranks>) -> Result<R, TrainError> + Sync,
    ) -> Result<R, TrainError> {
        match self {
            Self::Threads(call) => on_ranks(call, RunRanks { config, is_traced: false }, work),
            Self::Process(comm) => work(Some(Ranks::of_config(*comm, config, false)?)),
        }
    }

    /// Returns the root's decision. Only the root calls `decide`; if that fails, the processes end with its error.
    pub(super) fn agree<T: Serialize + DeserializeOwned>(
        &self,
        decide: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self::Process(comm) = self else { return decide() };
        let text = if comm.rank() == 0 { serde_json::to_vec(&decide()?)? } else { Vec::new() };
        Ok(serde_json::from_slice(&send_to_all(*comm, text)?)?)
    }

    /// Returns the path that the root decides on.
    pub(super) fn agree_on_path(&self, decide: impl FnOnce() -> PathBuf) -> Result<PathBuf, Failure> {
        let Self::Process(comm) = self else { return Ok(decide()) };
        let bytes = if comm.rank() == 0 { bytes_of(&decide()) } else { Vec::new() };
        Ok(path_of(send_to_all(*comm, bytes)?))
    }
}

/// Returns the root's bytes on all ranks.
fn send_to_all(comm: &dyn Communicator, mut bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
    comm.set_timeout(PATIENCE);
    let mut len = [bytes.len() as u64];
    comm.broadcast(&mut len, 0)?;
    bytes.resize(len[0] as usize, 0);
    comm.broadcast(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(unix)]
fn bytes_of(path: &Path) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec()
}

#[cfg(unix)]
fn path_of(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

/// Returns the bytes of a path; only Unix has launchers.
#[cfg(not(unix))]
fn bytes_of(path: &Path) -> Vec<u8> {
    path.to_string_lossy().into_owned().into_bytes()
}

#[cfg(not(unix))]
fn path_of(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(String::from_utf8_lossy(&bytes).into_owned())
}
