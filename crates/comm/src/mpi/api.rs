//! The functions of an MPI library, found at run time, and its constants, which differ between libraries.
//!
//! Handles (communicators, requests, types) are pointers in Open MPI and in the MPI-5 standard ABI, and `int` in
//! MPICH. They are kept as zero-initialised `usize`. On the little-endian machines this runs on, the low half is the
//! `int`, both as an argument and where the library writes one. Arrays of handles would differ and are not used.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library;

use super::MpiError;

/// A handle of any kind.
pub(crate) type Handle = usize;

/// Memory for the status of any library (20 to 32 bytes).
pub(crate) type Status = [u64; 8];

macro_rules! functions {
    ($($field:ident = $name:literal ($($argument:ty),* $(,)?);)*) => {
        /// The functions, as the standard declares them. All return 0 or an error code.
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Self, MpiError> {
                Ok(Self { $(
                    $field: {
                        // SAFETY: the MPI standard declares the function with these arguments, handles apart (see
                        // above). The library is never closed.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($name) };
                        *symbol.map_err(|_| MpiError::Incomplete(String::from_utf8_lossy($name).into_owned()))?
                    },
                )* })
            }
        }
    };
}

functions! {
    init_thread = b"MPI_Init_thread" (*mut c_int, *mut c_void, c_int, *mut c_int);
    initialized = b"MPI_Initialized" (*mut c_int);
    finalize = b"MPI_Finalize" ();
    abort = b"MPI_Abort" (Handle, c_int);
    get_library_version = b"MPI_Get_library_version" (*mut c_char, *mut c_int);
    error_string = b"MPI_Error_string" (c_int, *mut c_char, *mut c_int);
    comm_set_errhandler = b"MPI_Comm_set_errhandler" (Handle, Handle);
    comm_rank = b"MPI_Comm_rank" (Handle, *mut c_int);
    comm_size = b"MPI_Comm_size" (Handle, *mut c_int);
    comm_dup = b"MPI_Comm_dup" (Handle, *mut Handle);
    comm_split = b"MPI_Comm_split" (Handle, c_int, c_int, *mut Handle);
    comm_split_type = b"MPI_Comm_split_type" (Handle, c_int, c_int, Handle, *mut Handle);
    type_contiguous = b"MPI_Type_contiguous" (c_int, Handle, *mut Handle);
    type_commit = b"MPI_Type_commit" (*mut Handle);
    type_free = b"MPI_Type_free" (*mut Handle);
    barrier = b"MPI_Barrier" (Handle);
    ibarrier = b"MPI_Ibarrier" (Handle, *mut Handle);
    bcast = b"MPI_Bcast" (*mut u8, c_int, Handle, c_int, Handle);
    ibcast = b"MPI_Ibcast" (*mut u8, c_int, Handle, c_int, Handle, *mut Handle);
    allgather = b"MPI_Allgather" (*const u8, c_int, Handle, *mut u8, c_int, Handle, Handle);
    iallgather = b"MPI_Iallgather" (*const u8, c_int, Handle, *mut u8, c_int, Handle, Handle, *mut Handle);
    allgatherv = b"MPI_Allgatherv" (*const u8, c_int, Handle, *mut u8, *const c_int, *const c_int, Handle, Handle);
    iallgatherv = b"MPI_Iallgatherv" (
        *const u8, c_int, Handle, *mut u8, *const c_int, *const c_int, Handle, Handle, *mut Handle);
    ialltoall = b"MPI_Ialltoall" (*const u8, c_int, Handle, *mut u8, c_int, Handle, Handle, *mut Handle);
    alltoallv = b"MPI_Alltoallv" (
        *const u8, *const c_int, *const c_int, Handle, *mut u8, *const c_int, *const c_int, Handle, Handle);
    ialltoallv = b"MPI_Ialltoallv" (
        *const u8, *const c_int, *const c_int, Handle, *mut u8, *const c_int, *const c_int, Handle, Handle,
        *mut Handle);
    allreduce = b"MPI_Allreduce" (*const u8, *mut u8, c_int, Handle, Handle, Handle);
    iallreduce = b"MPI_Iallreduce" (*const u8, *mut u8, c_int, Handle, Handle, Handle, *mut Handle);
    reduce_scatter = b"MPI_Reduce_scatter" (*const u8, *mut u8, *const c_int, Handle, Handle, Handle);
    ireduce_scatter = b"MPI_Ireduce_scatter" (*const u8, *mut u8, *const c_int, Handle, Handle, Handle, *mut Handle);
    send = b"MPI_Send" (*const u8, c_int, Handle, c_int, c_int, Handle);
    isend = b"MPI_Isend" (*const u8, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    recv = b"MPI_Recv" (*mut u8, c_int, Handle, c_int, c_int, Handle, *mut Status);
    irecv = b"MPI_Irecv" (*mut u8, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    wait = b"MPI_Wait" (*mut Handle, *mut Status);
    test = b"MPI_Test" (*mut Handle, *mut c_int, *mut Status);
    get_count = b"MPI_Get_count" (*const Status, Handle, *mut c_int);
}

/// The constants whose values differ between libraries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constants {
    pub(crate) comm_world: Handle,
    pub(crate) comm_null: Handle,
    pub(crate) info_null: Handle,
    pub(crate) byte: Handle,
    pub(crate) float: Handle,
    pub(crate) sum: Handle,
    pub(crate) errors_return: Handle,
    /// The address that means "in place": the data is in the receive buffer.
    pub(crate) in_place: usize,
    pub(crate) type_shared: c_int,
    pub(crate) thread_serialized: c_int,
    pub(crate) is_open_mpi: bool,
    pub(crate) status: StatusLayout,
}

/// The place in a status of the bytes received. Libraries fix it in their headers, since programs allocate statuses
/// themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusLayout {
    /// `{ int MPI_SOURCE, MPI_TAG, MPI_ERROR, _cancelled; size_t _ucount; }`, from Open MPI 1.7 on.
    OpenMpi,
    /// `{ int count_lo, count_hi_and_cancelled, MPI_SOURCE, MPI_TAG, MPI_ERROR; }`, in MPICH's ABI of 2014.
    Mpich,
    /// Not public: the library has to be asked.
    Hidden,
}

impl StatusLayout {
    /// Returns whether a status proves that `bytes` bytes came. If it does not, the library has to be asked.
    #[inline]
    pub(crate) fn proves(self, status: &Status, bytes: usize) -> bool {
        let bytes = bytes as u64;
        match self {
            Self::OpenMpi => status[2] == bytes,
            // The high half lies above the bit that says whether it was cancelled.
            Self::Mpich => status[0] == (bytes & 0xffff_ffff) | (bytes >> 32 << 33),
            Self::Hidden => false,
        }
    }
}

/// `MPI_UNDEFINED`, the colour of no group, in all libraries.
pub(crate) const UNDEFINED: c_int = -32766;

/// The values of the standard ABI (MPI 5.0, appendix A).
const ABI: Constants = Constants {
    comm_world: 0x101,
    comm_null: 0x100,
    info_null: 0x130,
    byte: 0x247,
    float: 0x210,
    sum: 0x21,
    errors_return: 0x143,
    in_place: 1,
    type_shared: 221,
    thread_serialized: 2048,
    is_open_mpi: false,
    status: StatusLayout::Hidden,
};

/// The values of MPICH and libraries built from it (its ABI of 2014).
const MPICH: Constants = Constants {
    comm_world: 0x4400_0000,
    comm_null: 0x0400_0000,
    info_null: 0x1c00_0000,
    byte: 0x4c00_010d,
    float: 0x4c00_040a,
    sum: 0x5800_0003,
    errors_return: 0x5400_0001,
    in_place: usize::MAX,
    type_shared: 1,
    thread_serialized: 2,
    is_open_mpi: false,
    status: StatusLayout::Mpich,
};

impl Constants {
    /// Finds out which of the three ABIs the library uses.
    pub(crate) fn from_library(library: &Library) -> Result<Self, MpiError> {
        if let Some(constants) = Self::from_open_mpi(library) {
            return Ok(constants);
        }
        type GetVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        // SAFETY: as the standard declares it.
        if let Ok(abi_version) = unsafe { library.get::<GetVersion>(b"MPI_Abi_get_version") } {
            let (mut major, mut minor) = (-1, -1);
            // SAFETY: both are valid for writing. It may be called before MPI is initialised.
            if unsafe { abi_version(&raw mut major, &raw mut minor) } == 0 && major >= 1 {
                return Ok(ABI);
            }
        }
        let functions = Functions::load(library)?;
        let version = functions.version();
        if version.contains("MPICH") || version.contains("MVAPICH") || version.contains("Intel") {
            return Ok(MPICH);
        }
        Err(MpiError::Unknown(version))
    }

    /// Reads Open MPI's constants: its predefined handles are the addresses of objects of the library.
    fn from_open_mpi(library: &Library) -> Option<Self> {
        // SAFETY: only the address is taken, as that of a byte.
        let address = |name: &[u8]| Some(unsafe { library.get::<*const u8>(name) }.ok()?.into_raw().addr());
        Some(Self {
            comm_world: address(b"ompi_mpi_comm_world")?,
            comm_null: address(b"ompi_mpi_comm_null")?,
            info_null: address(b"ompi_mpi_info_null")?,
            byte: address(b"ompi_mpi_byte")?,
            float: address(b"ompi_mpi_float")?,
            sum: address(b"ompi_mpi_op_sum")?,
            errors_return: address(b"ompi_mpi_errors_return")?,
            in_place: 1,
            type_shared: 0,
            thread_serialized: 2,
            is_open_mpi: true,
            status: StatusLayout::OpenMpi,
        })
    }
}

impl Functions {
    pub(crate) fn from_library(library: &Library) -> Result<Self, MpiError> {
        Self::load(library)
    }

    /// Returns the library's name and version, the first line of its own description.
    pub(crate) fn version(&self) -> String {
        let (mut text, mut len) = (vec![0_u8; 8192], 0);
        // SAFETY: no library writes more than 8192 characters (its MPI_MAX_LIBRARY_VERSION_STRING).
        if unsafe { (self.get_library_version)(text.as_mut_ptr().cast(), &raw mut len) } != 0 {
            return String::new();
        }
        first_line(&text)
    }

    /// Returns the library's text for an error code.
    pub(crate) fn explain(&self, code: c_int) -> String {
        let (mut text, mut len) = (vec![0_u8; 1024], 0);
        // SAFETY: no library writes more than 512 characters (its MPI_MAX_ERROR_STRING).
        if unsafe { (self.error_string)(code, text.as_mut_ptr().cast(), &raw mut len) } != 0 {
            return format!("error {code}");
        }
        first_line(&text)
    }
}

fn first_line(text: &[u8]) -> String {
    let end = text.iter().position(|&c| c == 0 || c == b'\n').unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_proves_the_bytes_that_came_and_no_others() {
        let (short, long) = (1_000, (5 << 32) + 7);
        // Laid out as in the headers: source 3, tag 9, no error; in MPICH's the count's high half above a bit.
        let open_mpi = |bytes: u64| [3 | 9 << 32, 0, bytes, 0, 0, 0, 0, 0];
        let mpich = |bytes: u64| [(bytes & 0xffff_ffff) | ((bytes >> 32) << 1) << 32, 3 | 9 << 32, 0, 0, 0, 0, 0, 0];
        for bytes in [0, short, long] {
            assert!(StatusLayout::OpenMpi.proves(&open_mpi(bytes), bytes as usize));
            assert!(StatusLayout::Mpich.proves(&mpich(bytes), bytes as usize));
            assert!(!StatusLayout::OpenMpi.proves(&open_mpi(bytes), bytes as usize + 1));
            assert!(!StatusLayout::Mpich.proves(&mpich(bytes), bytes as usize + 1));
            assert!(!StatusLayout::Hidden.proves(&open_mpi(bytes), bytes as usize));
        }
    }
}
