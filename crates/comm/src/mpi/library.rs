//! The search for the MPI library that belongs to the launcher of this process.

use std::iter::successors;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, process};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::MpiError;
use super::api::{Constants, Functions};

/// The environment variable with the path of an MPI library to use.
pub const LIBRARY_VARIABLE: &str = "MOEWORKS_MPI_LIBRARY";

/// The variables in which launchers pass the number of ranks.
const SIZE_VARIABLES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"];

/// The most ancestors that are searched for the launcher. Between a rank and its launcher there are a proxy and
/// perhaps a shell or a profiler.
const MOST_ANCESTORS: usize = 6;

/// File names of Open MPI (4 and 5), of MPICH and libraries with its ABI, and of the standard ABI.
const OPEN_MPI: [&str; 1] = ["libmpi.so.40"];
const MPICH: [&str; 3] = ["libmpi.so.12", "libmpich.so.12", "libmpich.so"];
const STANDARD: [&str; 4] = ["libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so", "libmpi.so"];

/// Returns whether an MPI launcher (`mpirun`, `mpiexec`, or `srun` with PMI or PMIx) started this process.
#[must_use]
pub fn is_launched() -> bool {
    SIZE_VARIABLES.iter().chain(&["PMIX_RANK", "PMI_RANK"]).any(|name| env::var_os(name).is_some())
}

/// A loaded library. It stays loaded until the process ends, because it has threads and handlers of its own.
pub(crate) struct Mpi {
    pub(crate) functions: Functions,
    pub(crate) constants: Constants,
}

/// Returns the library of this process, which the first call loads.
pub(crate) fn load() -> Result<&'static Mpi, MpiError> {
    static LIBRARY: OnceLock<Result<Mpi, MpiError>> = OnceLock::new();
    LIBRARY.get_or_init(open_first).as_ref().map_err(Clone::clone)
}

fn open_first() -> Result<Mpi, MpiError> {
    let mut failures = Vec::new();
    for path in candidates() {
        // SAFETY: the initialisers of an MPI library have no preconditions. `RTLD_GLOBAL`, because its plug-ins look
        // for its symbols.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => {
                let library = Box::leak(Box::new(library));
                return Ok(Mpi {
                    constants: Constants::from_library(library)?,
                    functions: Functions::from_library(library)?,
                });
            }
            // A library that exists and cannot be loaded is worth a message; the others are merely absent.
            Err(error) if path.is_absolute() => failures.push(error.to_string()),
            Err(_) => {}
        }
    }
    Err(MpiError::NotFound { failures })
}

/// Fails if the launcher started several processes but the library sees one: it belongs to another MPI.
pub(crate) fn check_size(size: usize) -> Result<(), MpiError> {
    let launched = SIZE_VARIABLES[..2].iter().find_map(|name| env::var(name).ok()?.parse::<usize>().ok());
    match launched {
        Some(num_launched) if num_launched > 1 && size == 1 => Err(MpiError::OfAnother { num_launched }),
        _ => Ok(()),
    }
}

/// Lists the places to look, in order: the user's choice; beside the launcher, an ancestor of this process; beside a
/// launcher on the path; the loader's own search.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = env::var_os(LIBRARY_VARIABLE) {
        return vec![PathBuf::from(path)];
    }
    let is_open_mpi = env::vars_os().any(|(name, _)| name.to_string_lossy().starts_with("OMPI_"));
    // Under Open MPI's launcher, another MPI's library with the standard ABI may be found before its own.
    let families: Vec<Vec<&str>> = if is_open_mpi {
        vec![OPEN_MPI.to_vec(), STANDARD.to_vec()]
    } else {
        vec![MPICH.iter().chain(&STANDARD).chain(&OPEN_MPI).copied().collect()]
    };
    let folders = library_folders();
    let of_family = |names: &Vec<&str>| {
        let in_folders = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
        in_folders.filter(|path| path.exists()).chain(names.iter().map(PathBuf::from)).collect::<Vec<_>>()
    };
    families.iter().flat_map(of_family).collect()
}

fn library_folders() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let prefixes = folders_of_ancestors()
        .into_iter()
        .chain(env::split_paths(&path))
        .filter(|folder| ["mpirun", "mpiexec"].iter().any(|name| folder.join(name).exists()))
        .filter_map(|folder| folder.parent().map(Path::to_path_buf));
    // The system's own folders are left to its loader.
    let own = prefixes.filter(|prefix| prefix != Path::new("/usr") && prefix != Path::new("/"));
    own.flat_map(|prefix| ["lib", "lib64", "lib/release"].map(|folder| prefix.join(folder))).collect()
}

/// Returns the folders of the programs that started this process, the nearest first, where the system tells.
fn folders_of_ancestors() -> Vec<PathBuf> {
    let parent_of = |pid: &u32| {
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The fields behind the program's name, which is in brackets: the state, then the parent.
        state.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let ancestors = successors(parent_of(&process::id()), parent_of).take(MOST_ANCESTORS);
    let program = |pid| fs::read_link(format!("/proc/{pid}/exe")).ok();
    ancestors.filter_map(program).filter_map(|program| program.parent().map(Path::to_path_buf)).collect()
}
