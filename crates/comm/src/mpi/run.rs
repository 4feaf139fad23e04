//! Start and end of a run under an MPI launcher.

use std::ffi::c_int;
use std::fmt::Display;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use std::{env, fmt, fs, process, ptr, thread};

use super::MpiComm;
use super::api::Handle;
use super::group::{Group, Process, Report};
use super::heartbeat::{Heartbeat, HeartbeatSocket, NO_CONTACT};
use super::hydra_guard::HydraGuard;
use super::library::{self, Mpi};
use super::sums::LibrarySums;
use super::watch::{Page, Watch};
use crate::pin;
use crate::threads::{numbered_by_appearance, reason_of_panic};
use crate::{CommError, Communicator};

/// The exit code of a run that failed.
const FAILED: c_int = 2;

/// The size of the message with the path of the watchdogs' page.
const NAME_BYTES: usize = 256;

/// A callback that is given this rank's number and the error of the run, before the processes are ended.
#[derive(Clone)]
pub(crate) struct BeforeAbort(Arc<Report>);

impl BeforeAbort {
    pub(crate) fn call(&self, rank: usize, error: &dyn Display) {
        (self.0)(rank, error);
    }
}

impl fmt::Debug for BeforeAbort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BeforeAbort")
    }
}

/// The settings of a run: timeout, nodes, checks and the order of sums.
#[derive(Clone, Debug)]
pub struct MpiOptions {
    timeout: Duration,
    ranks_per_node: Option<usize>,
    limit: usize,
    is_checked: bool,
    keeps_order: bool,
    before_abort: Option<BeforeAbort>,
}

impl Default for MpiOptions {
    /// Returns the defaults. Nodes are detected; a rank that does not come for 25 seconds is reported as hung; debug
    /// builds compare calls; the library takes sums in its own order.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(25),
            ranks_per_node: None,
            limit: c_int::MAX as usize,
            is_checked: cfg!(debug_assertions),
            keeps_order: false,
            before_abort: None,
        }
    }
}

impl MpiOptions {
    /// Sets how long a rank waits for others before it reports them as hung.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Assumes this number of ranks on each node instead of detecting nodes, to try decisions for many machines on
    /// one.
    #[must_use]
    pub fn with_ranks_per_node(mut self, ranks: usize) -> Self {
        self.ranks_per_node = Some(ranks.max(1));
        self
    }

    /// Sets whether ranks compare their calls. A wrong call is then named instead of hanging or corrupting data.
    #[must_use]
    pub fn with_checks(mut self, is_checked: bool) -> Self {
        self.is_checked = is_checked;
        self
    }

    /// Sets whether sums of f32 are taken in the order of ranks, as among threads, and never by the library. The
    /// library's sums are as accurate, and the MPI standard requires identical results on all ranks, but their bits
    /// differ from those of threads and perhaps of another library.
    #[must_use]
    pub fn with_order(mut self, keeps_order: bool) -> Self {
        self.keeps_order = keeps_order;
        self
    }

    /// Sets a callback that every rank calls with its number and the error before it ends the processes of a failed
    /// run, such as to tell clients. Ranks often notice a failure together, so the processes may end once the first
    /// of these callbacks returns.
    #[must_use]
    pub fn before_abort(mut self, call: impl Fn(usize, &dyn Display) + Send + Sync + 'static) -> Self {
        self.before_abort = Some(BeforeAbort(Arc::new(call)));
        self
    }

    /// Sets the greatest count passed as one `int`, to test messages beyond 2 GiB with small ones.
    #[doc(hidden)]
    #[must_use]
    pub fn with_limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }
}

/// Runs `rank` as this process' rank of a run that an MPI launcher started, and returns its result. It may be called
/// once.
///
/// If `rank` fails or panics, or another rank hangs, `report` gets the rank and the error, and then `MPI_Abort` ends
/// all processes of the run with exit code 2. This function returns an error only if there is no run, or a run of a
/// single rank. A rank whose process dies is reported by the others of its node.
///
/// # Errors
/// Returns the error of `rank`, or that MPI cannot be started.
pub fn run_mpi<R, E>(
    options: &MpiOptions,
    report: impl Fn(usize, &dyn Display) + Send + Sync + 'static,
    rank: impl FnOnce(&dyn Communicator) -> Result<R, E>,
) -> Result<R, E>
where
    E: From<CommError> + Display,
{
    let comm = start(options, Arc::new(report))?;
    let process = Arc::clone(&comm.group.process);
    let is_alone = comm.size() == 1;
    let result = panic::catch_unwind(AssertUnwindSafe(|| rank(&comm)));
    match result {
        Ok(Ok(result)) => {
            process.end()?;
            Ok(result)
        }
        Ok(Err(error)) if is_alone => {
            process.end()?;
            Err(error)
        }
        Ok(Err(error)) => process.abort(&error),
        Err(payload) if is_alone => panic::resume_unwind(payload),
        Err(payload) => process.abort(&CommError::Died { rank: process.rank, reason: reason_of_panic(&*payload) }),
    }
}

fn start(options: &MpiOptions, report: Arc<Report>) -> Result<MpiComm, CommError> {
    static IS_STARTED: AtomicBool = AtomicBool::new(false);
    if IS_STARTED.swap(true, Ordering::SeqCst) {
        return Err(CommError::Start("MPI can be started once in a process".to_owned()));
    }
    let mpi = library::load()?;
    let hydra_guard = HydraGuard::start();
    ignore_launcher_notices();
    initialise(mpi)?;
    let comm = mpi.constants.comm_world;
    let (rank, size) = rank_and_size(mpi, comm)?;
    library::check_size(size)?;
    let node = Node::find(mpi, World { comm, rank }, options.ranks_per_node)?;
    let (page, own) = node.page(mpi)?;
    // A node is identified by its first rank.
    let nodes = gather(mpi, comm, node.ranks[0], size)?;
    let is_crowded = gather(mpi, comm, usize::from(node.is_crowded), size)?.contains(&1);
    let heartbeat = start_heartbeat(mpi, World { comm, rank }, &nodes)?;
    let watch = Arc::new(Watch::new(page, own, node.ranks.clone(), size, options.timeout));
    let process = Arc::new(Process {
        rank,
        report,
        mpi,
        watch: Arc::clone(&watch),
        in_flight: Arc::default(),
        failure: OnceLock::new(),
        spare: Mutex::default(),
        limit: options.limit,
        is_checked: options.is_checked,
        sums: LibrarySums::new(mpi.constants.is_open_mpi, is_crowded, options.keeps_order),
        hydra_guard,
        before_abort: options.before_abort.clone(),
    });
    let failing = Arc::clone(&process);
    watch
        .spawn(&node.pids(mpi)?, heartbeat, move |error| failing.abort(&error))
        .map_err(|error| CommError::Start(format!("cannot start the watchdog's thread: {error}")))?;
    let group = Group::from_comm(&process, comm, |rank| nodes[rank], rank)?;
    Ok(MpiComm { group: Arc::new(group) })
}

/// Ignores SIGUSR1, by which MPICH's launcher tells processes that another has failed. The default action would end
/// them before they can report which.
fn ignore_launcher_notices() {
    // SAFETY: a `sigaction` may be all zeros; it is valid for writing, and nothing is changed by this call.
    let is_default = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_DFL
    };
    if is_default {
        // SAFETY: no handler is installed: the signal is ignored.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
    }
}

fn initialise(mpi: &Mpi) -> Result<(), CommError> {
    let functions = &mpi.functions;
    let (mut is_initialised, mut provided) = (0, 0);
    let wanted = mpi.constants.thread_serialized;
    // SAFETY: both are valid for writing; `run_mpi` comes here once.
    unsafe {
        checked(mpi, (functions.initialized)(&raw mut is_initialised))?;
        if is_initialised == 0 {
            let code = (functions.init_thread)(ptr::null_mut(), ptr::null_mut(), wanted, &raw mut provided);
            checked(mpi, code)?;
        }
        // Errors are returned as codes instead of ending the process.
        checked(mpi, (functions.comm_set_errhandler)(mpi.constants.comm_world, mpi.constants.errors_return))?;
    }
    if is_initialised == 0 && provided < wanted {
        let version = functions.version();
        return Err(CommError::Start(format!("{version} was built without support for threads")));
    }
    Ok(())
}

fn checked(mpi: &Mpi, code: c_int) -> Result<(), CommError> {
    if code == 0 { Ok(()) } else { Err(CommError::Start(mpi.functions.explain(code))) }
}

fn rank_and_size(mpi: &Mpi, comm: Handle) -> Result<(usize, usize), CommError> {
    let (mut rank, mut size) = (0, 0);
    // SAFETY: a communicator of this process; both are valid for writing.
    unsafe {
        checked(mpi, (mpi.functions.comm_rank)(comm, &raw mut rank))?;
        checked(mpi, (mpi.functions.comm_size)(comm, &raw mut size))?;
    }
    Ok((rank as usize, size as usize))
}

/// Gathers one number from each rank.
fn gather(mpi: &Mpi, comm: Handle, own: usize, size: usize) -> Result<Vec<usize>, CommError> {
    Ok(gather_words(mpi, comm, &[own as u64], size)?.into_iter().map(|[number]| number as usize).collect())
}

fn gather_words<const N: usize>(
    mpi: &Mpi,
    comm: Handle,
    own: &[u64; N],
    size: usize,
) -> Result<Vec<[u64; N]>, CommError> {
    let mut all = vec![[0_u64; N]; size];
    let (byte, count) = (mpi.constants.byte, size_of_val(own) as c_int);
    // SAFETY: so many bytes from each of `size` ranks.
    let code = unsafe {
        (mpi.functions.allgather)(own.as_ptr().cast(), count, byte, all.as_mut_ptr().cast(), count, byte, comm)
    };
    checked(mpi, code)?;
    Ok(all)
}

/// This rank in the communicator of the whole run.
#[derive(Clone, Copy)]
struct World {
    comm: Handle,
    rank: usize,
}

/// Starts the heartbeat of a node's first rank, if there are several nodes. `nodes` has, for each rank, the first
/// rank of its node.
fn start_heartbeat(mpi: &Mpi, world: World, nodes: &[usize]) -> Result<Option<Heartbeat>, CommError> {
    let firsts: Vec<usize> = (0..nodes.len()).filter(|&rank| nodes[rank] == rank).collect();
    if firsts.len() < 2 {
        return Ok(None);
    }
    let place = firsts.iter().position(|&first| first == world.rank);
    let socket = place.and_then(|_| {
        let socket = HeartbeatSocket::open();
        socket.inspect_err(|error| tracing::info!("no heartbeats to other nodes: {error}")).ok()
    });
    let contacts =
        gather_words(mpi, world.comm, socket.as_ref().map_or(&NO_CONTACT, HeartbeatSocket::contact), nodes.len())?;
    let (Some(place), Some(socket)) = (place, socket) else { return Ok(None) };
    let of_place = |place: usize| firsts[place % firsts.len()];
    let (next, previous) = (of_place(place + 1), of_place(place + firsts.len() - 1));
    Ok(Some(socket.connect(&contacts[next], previous, &contacts[previous])))
}

/// Returns whether more ranks share the machine of `comm` than the cores that they may use.
fn is_crowded(mpi: &Mpi, comm: Handle) -> Result<bool, CommError> {
    let (_, size) = rank_and_size(mpi, comm)?;
    let num_cores = pin::num_cores(&gather_words(mpi, comm, &pin::allowed(), size)?);
    Ok((1..size).contains(&num_cores))
}

/// The ranks that share memory with this one.
struct Node {
    comm: Handle,
    own: usize,
    /// Their numbers in the whole run.
    ranks: Vec<usize>,
    /// True if this machine has more ranks than cores that they may use.
    is_crowded: bool,
}

impl Node {
    fn find(mpi: &Mpi, world: World, supposed: Option<usize>) -> Result<Self, CommError> {
        let constants = &mpi.constants;
        let mut comm = 0;
        // SAFETY: a call of all ranks; `comm` is valid for writing.
        checked(mpi, unsafe {
            (mpi.functions.comm_split_type)(world.comm, constants.type_shared, 0, constants.info_null, &raw mut comm)
        })?;
        let is_crowded = is_crowded(mpi, comm)?;
        if let Some(ranks_per_node) = supposed {
            let (of_machine, color) = (comm, (world.rank / ranks_per_node) as c_int);
            // SAFETY: as above.
            checked(mpi, unsafe { (mpi.functions.comm_split)(of_machine, color, world.rank as c_int, &raw mut comm) })?;
        }
        let (own, size) = rank_and_size(mpi, comm)?;
        Ok(Self { comm, own, ranks: gather(mpi, comm, world.rank, size)?, is_crowded })
    }

    /// Returns the process ids of the node's ranks; empty if they are in different PID namespaces, where ids mean
    /// nothing to each other.
    fn pids(&self, mpi: &Mpi) -> Result<Vec<usize>, CommError> {
        let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino() as usize);
        let size = self.ranks.len();
        let namespaces = gather(mpi, self.comm, namespace, size)?;
        let pids = gather(mpi, self.comm, process::id() as usize, size)?;
        Ok(if namespaces.iter().all(|&other| other == namespace) { pids } else { Vec::new() })
    }

    /// Makes the watchdogs' page: the first rank creates the file, all map it, then its name is removed.
    fn page(&self, mpi: &Mpi) -> Result<(Page, usize), CommError> {
        let path = if self.own == 0 { Some(page_path()) } else { None };
        let problem =
            |path: &Path, error| CommError::Start(format!("{}: cannot share memory: {error}", path.display()));
        let made = path.as_ref().map(|path| Page::create(path, self.ranks.len()).map_err(|error| problem(path, error)));
        let path = self.tell(mpi, path)?;
        let page = Page::open(&path, self.ranks.len()).map_err(|error| problem(&path, error));
        // Waits until all have mapped it.
        gather(mpi, self.comm, self.own, self.ranks.len())?;
        if made.transpose()?.is_some() {
            // It has no further use; if it stays behind it takes a few bytes.
            let _ = fs::remove_file(&path);
        }
        Ok((page?, self.own))
    }

    /// Sends the first rank's path to all ranks of the node.
    fn tell(&self, mpi: &Mpi, path: Option<PathBuf>) -> Result<PathBuf, CommError> {
        let mut name = [0_u8; NAME_BYTES];
        if let Some(text) = path.as_ref().and_then(|path| path.to_str()).filter(|text| text.len() < NAME_BYTES) {
            name[..text.len()].copy_from_slice(text.as_bytes());
        }
        // SAFETY: `name` has as many bytes as are told.
        checked(mpi, unsafe {
            (mpi.functions.bcast)(name.as_mut_ptr(), NAME_BYTES as c_int, mpi.constants.byte, 0, self.comm)
        })?;
        let len = name.iter().position(|&c| c == 0).unwrap_or(NAME_BYTES);
        Ok(PathBuf::from(String::from_utf8_lossy(&name[..len]).into_owned()))
    }
}

fn page_path() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_path_buf() } else { env::temp_dir() };
    let nonce = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.subsec_nanos());
    folder.join(format!("moeworks-{}-{nonce}", process::id()))
}

impl Group {
    /// Makes the group of a communicator. `node` returns the node of a rank by its number in the whole run; `own` is
    /// this rank's number.
    pub(super) fn from_comm(
        process: &Arc<Process>,
        comm: Handle,
        node: impl Fn(usize) -> usize,
        own: usize,
    ) -> Result<Self, CommError> {
        let (rank, size) = rank_and_size(process.mpi, comm)?;
        let members = gather(process.mpi, comm, own, size)?;
        let nodes: Vec<usize> = members.iter().map(|&member| node(member)).collect();
        Self::new(Arc::clone(process), comm, members, numbered_by_appearance(&nodes), rank)
    }
}

impl Process {
    /// Ends a run that has succeeded.
    fn end(&self) -> Result<(), CommError> {
        let ended = CommError::Start("the run has ended: its communicators cannot be used any more".to_owned());
        let has_failed = self.failure.get_or_init(|| ended.clone()) != &ended;
        if has_failed {
            // The rank ignored an error; the others may be in the middle of a call.
            return self.failure.get().map_or(Ok(()), |error| Err(error.clone()));
        }
        // SAFETY: a call of all ranks, after which nothing of the library is called: calls look for a failure first.
        let code = unsafe { (self.mpi.functions.finalize)() };
        self.watch.end();
        self.hydra_guard.iter().for_each(HydraGuard::end);
        if code == 0 { Ok(()) } else { Err(CommError::Start(format!("MPI_Finalize failed with error {code}"))) }
    }

    /// Ends all processes of the run. Reports the reason unless another rank of the node has, since ranks often
    /// notice together.
    pub(super) fn abort(&self, reason: &dyn Display) -> ! {
        if let Some(before) = &self.before_abort {
            before.call(self.rank, reason);
        }
        if self.watch.is_first_to_report() {
            (self.report)(self.rank, reason);
            // A launcher drops output that it has not yet passed on when it ends the processes.
            thread::sleep(Duration::from_millis(300));
        } else {
            // The rank that reports ends the processes when it has done so.
            thread::sleep(Duration::from_secs(5));
        }
        // Another thread may be inside the library. This process ends in any case, and its launcher ends the others.
        let _ = thread::Builder::new().spawn(|| {
            thread::sleep(Duration::from_secs(5));
            process::abort();
        });
        // SAFETY: MPI is initialised as long as a `Process` is in use.
        unsafe { (self.mpi.functions.abort)(self.mpi.constants.comm_world, FAILED) };
        process::abort()
    }
}
