//! Plain bf16 products by NVIDIA's library cuBLASLt, which is found at run time. Without it, or where it has no
//! algorithm for a product, our kernels compute it.
//!
//! The library is column-major: our rows are its columns. So it computes the transposed product, whose operands
//! change sides.

use std::collections::HashMap;

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use moeworks_tensor::{DeviceBlock, Tensor};

use crate::library::{functions, load};
use crate::{GpuError, GpuOptions};

/// Names that the system's loader may know, the newest first.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so"];

/// Memory that products may use for partial sums.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;
/// The library's default alignment of operands in bytes.
const ALIGNMENT: u64 = 256;
/// The most products whose plans are kept.
const MAX_PLANS: usize = 256;

// cublas_api.h, library_types.h, cublasLt.h.
const COMPUTE_32F: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const OPERATION_TRANSPOSED: c_int = 1;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const PREFERENCE_MAX_WORKSPACE: c_int = 1;
const INVALID_VALUE: Status = 7;
const ARCH_MISMATCH: Status = 8;
const NOT_SUPPORTED: Status = 15;

type Status = c_int;
type Pointer = *mut c_void;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Found {
    algorithm: [u64; 8],
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

functions! {
    /// The functions, as `cublasLt.h` declares them.
    Functions:
    runtime_version = "cublasLtGetCudartVersion": fn() -> usize;
    create = "cublasLtCreate": fn(*mut Pointer) -> Status;
    new_desc = "cublasLtMatmulDescCreate": fn(*mut Pointer, c_int, c_int) -> Status;
    set_desc = "cublasLtMatmulDescSetAttribute": fn(Pointer, c_int, *const c_void, usize) -> Status;
    drop_desc = "cublasLtMatmulDescDestroy": fn(Pointer) -> Status;
    new_layout = "cublasLtMatrixLayoutCreate": fn(*mut Pointer, c_int, u64, u64, i64) -> Status;
    drop_layout = "cublasLtMatrixLayoutDestroy": fn(Pointer) -> Status;
    new_preference = "cublasLtMatmulPreferenceCreate": fn(*mut Pointer) -> Status;
    set_preference = "cublasLtMatmulPreferenceSetAttribute": fn(Pointer, c_int, *const c_void, usize) -> Status;
    drop_preference = "cublasLtMatmulPreferenceDestroy": fn(Pointer) -> Status;
    find = "cublasLtMatmulAlgoGetHeuristic": fn(Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, c_int, *mut Found, *mut c_int) -> Status;
    multiply = "cublasLtMatmul": fn(Pointer, Pointer, *const c_void, Pointer, Pointer, Pointer, Pointer, *const c_void, Pointer, Pointer, Pointer, Pointer, *const [u64; 8], Pointer, usize, Pointer) -> Status;
}

/// A product `A B` of two row-major bf16 matrices: `[rows, columns]` in f32 or bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DenseProduct {
    /// A is stored as `[depth, rows]`, not `[rows, depth]`.
    pub is_a_transposed: bool,
    /// B is stored as `[columns, depth]`, not `[depth, columns]`.
    pub is_b_transposed: bool,
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result.
    pub columns: usize,
    /// The length of the sums.
    pub depth: usize,
    /// The result is bf16, not f32.
    pub is_rounded: bool,
}

/// The summand that a product is added to.
#[derive(Clone, Copy)]
pub enum Onto<'a> {
    /// None: the result is overwritten.
    Nothing,
    /// A tensor of the result's type.
    Tensor(&'a Tensor),
    /// The result itself.
    Itself,
}

/// The addresses of operands and result. `base`, of the result's type, is added if it is there.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) base: Option<u64>,
    pub(crate) y: u64,
}

/// The library, ready to multiply.
pub(crate) struct Blas {
    functions: Functions,
    handle: Pointer,
    workspace: DeviceBlock,
    plans: Mutex<HashMap<DenseProduct, Option<Plan>>>,
}
// SAFETY: the handle may be used by several threads ("thread safety" in the library's documentation); plans are
// behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// The library's description of a product and the algorithm for it. Plans live as long as the library, as there are
/// few.
struct Plan {
    desc: Pointer,
    /// The layouts of the first operand, the second one, and the result.
    layouts: [Pointer; 3],
    found: Found,
}

/// Returns the error for a product's status.
pub(crate) fn failed(product: DenseProduct, status: c_int) -> GpuError {
    GpuError::Driver { call: format!("cuBLASLt's {product:?}"), message: format!("status {status}") }
}

/// The libraries to try in order: the one that [`CUBLASLT_VARIABLE`] names; or those beside NVRTC's if that was named
/// (in its folder, or where Python's wheels of version 12 have it), and the system's.
fn candidates(options: &GpuOptions) -> Vec<PathBuf> {
    let candidates: Vec<PathBuf> = match &options.cublaslt_library {
        Some(path) => vec![path.clone()],
        None => {
            let folder = options.nvrtc_library.as_deref().and_then(Path::parent);
            let wheels = folder.and_then(|folder| Some(folder.parent()?.parent()?.join("cublas/lib")));
            let folders = folder.map(Path::to_path_buf).into_iter().chain(wheels);
            let beside =
                |folder: PathBuf| NAMES.iter().filter_map(move |name| Some(folder.join(Path::new(name).file_name()?)));
            folders.flat_map(beside).chain(NAMES.iter().map(PathBuf::from)).collect()
        }
    };
    candidates.into_iter().filter(|path| !path.as_os_str().is_empty()).collect()
}

impl Blas {
    /// Opens the first library that can be used with a driver that knows this major version of CUDA. The device's
    /// context must be current.
    pub(crate) fn find(
        options: &GpuOptions,
        driver_major: c_int,
        workspace: impl Fn() -> Option<DeviceBlock>,
    ) -> Option<Self> {
        candidates(options).iter().find_map(|path| Self::open(load(path).ok()?, driver_major, workspace()?))
    }

    /// Opens a library; none if it lacks a function, is too new or cannot be initialised.
    pub(crate) fn open(library: &'static Library, driver_major: c_int, workspace: DeviceBlock) -> Option<Self> {
        let functions = Functions::new(library).ok()?;
        // SAFETY: it only says a number.
        let version = unsafe { (functions.runtime_version)() };
        if version / 1000 > driver_major as usize {
            return None;
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the library writes a handle, which lives as long as the process.
        let status = unsafe { (functions.create)(&raw mut handle) };
        (status == 0).then_some(Self { functions, handle, workspace, plans: Mutex::default() })
    }

    /// Queues the product on `stream`. Returns whether the library took it; `Err` has the library's status.
    ///
    /// # Safety
    ///
    /// The places are the device's memory of the sizes that the product says, nobody else uses the result's until the
    /// stream is done, and the device's context is current.
    pub(crate) unsafe fn run(&self, product: DenseProduct, at: Places, stream: Pointer) -> Result<bool, Status> {
        let places = [at.a, at.b, at.y, at.base.unwrap_or(0)];
        if places.iter().any(|place| !place.is_multiple_of(ALIGNMENT)) {
            return Ok(false);
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if plans.len() == MAX_PLANS && !plans.contains_key(&product) {
            plans.drain().filter_map(|(_, plan)| plan).for_each(|plan| self.drop_plan(&plan));
        }
        let Some(plan) = plans.entry(product).or_insert_with(|| self.plan(product)) else { return Ok(false) };
        let [first, second] = [at.b, at.a].map(|place| place as Pointer);
        let (to, base) = (at.y as Pointer, at.base.unwrap_or(at.y) as Pointer);
        let (one, keep): (f32, f32) = (1.0, if at.base.is_some() { 1.0 } else { 0.0 });
        let [of_first, of_second, of_result] = plan.layouts;
        // SAFETY: the caller's promise; the plan was made by this library for these sizes, and the factors are f32 as
        // its description says. The workspace is used by this stream alone, one product after the other.
        let status = unsafe {
            (self.functions.multiply)(
                self.handle,
                plan.desc,
                (&raw const one).cast(),
                first,
                of_first,
                second,
                of_second,
                (&raw const keep).cast(),
                base,
                of_result,
                to,
                of_result,
                &raw const plan.found.algorithm,
                self.workspace.address() as Pointer,
                WORKSPACE_BYTES,
                stream,
            )
        };
        match status {
            0 => Ok(true),
            // Nothing was launched: our own kernels compute it, now and later.
            INVALID_VALUE | ARCH_MISMATCH | NOT_SUPPORTED => {
                if let Some(plan) = plans.insert(product, None).flatten() {
                    self.drop_plan(&plan);
                }
                Ok(false)
            }
            status => Err(status),
        }
    }

    /// Returns the library's first choice for the product; none if it has none.
    fn plan(&self, product: DenseProduct) -> Option<Plan> {
        let DenseProduct { is_a_transposed, is_b_transposed, rows, columns, depth, is_rounded } = product;
        // Each operand as the library sees it: its rows are consecutive.
        let first = if is_b_transposed { [depth, columns] } else { [columns, depth] };
        let second = if is_a_transposed { [rows, depth] } else { [depth, rows] };
        let result_type = if is_rounded { TYPE_BF16 } else { TYPE_F32 };
        let mut plan = Plan { desc: ptr::null_mut(), layouts: [ptr::null_mut(); 3], found: Found::default() };
        let f = &self.functions;
        // SAFETY: each call gets what it is declared to get, of this library.
        let is_made = unsafe {
            (f.new_desc)(&raw mut plan.desc, COMPUTE_32F, TYPE_F32) == 0
                && [(DESC_TRANSA, is_b_transposed), (DESC_TRANSB, is_a_transposed)].into_iter().all(
                    |(side, is_transposed)| {
                        let operation = OPERATION_TRANSPOSED;
                        !is_transposed
                            || (f.set_desc)(plan.desc, side, (&raw const operation).cast(), size_of::<c_int>()) == 0
                    },
                )
                && [(first, TYPE_BF16), (second, TYPE_BF16), ([columns, rows], result_type)]
                    .into_iter()
                    .zip(&mut plan.layouts)
                    .all(|(([rows, columns], dtype), layout)| {
                        (f.new_layout)(layout, dtype, rows as u64, columns as u64, rows as i64) == 0
                    })
        };
        if is_made && self.choose(&mut plan) {
            return Some(plan);
        }
        self.drop_plan(&plan);
        None
    }

    /// Writes the library's first algorithm to the plan. Returns whether there is one.
    fn choose(&self, plan: &mut Plan) -> bool {
        let (f, mut preference, mut count) = (&self.functions, ptr::null_mut(), 0);
        let ([first, second, result], workspace) = (plan.layouts, WORKSPACE_BYTES);
        // SAFETY: as above; the library writes at most one result and how many there are.
        unsafe {
            if (f.new_preference)(&raw mut preference) != 0 {
                return false;
            }
            let workspace = (&raw const workspace).cast();
            let is_found = (f.set_preference)(preference, PREFERENCE_MAX_WORKSPACE, workspace, size_of::<usize>()) == 0
                && (f.find)(
                    self.handle,
                    plan.desc,
                    first,
                    second,
                    result,
                    result,
                    preference,
                    1,
                    &raw mut plan.found,
                    &raw mut count,
                ) == 0;
            (f.drop_preference)(preference);
            is_found && count == 1 && plan.found.status == 0
        }
    }

    /// Destroys the descriptions of a plan.
    fn drop_plan(&self, plan: &Plan) {
        // SAFETY: pointers that are not null were made by this library and are used no more; queued products have
        // copies.
        unsafe {
            if !plan.desc.is_null() {
                (self.functions.drop_desc)(plan.desc);
            }
            plan.layouts.iter().filter(|layout| !layout.is_null()).for_each(|&layout| {
                (self.functions.drop_layout)(layout);
            });
        }
    }
}
