//! One launch of a kernel, as a value.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::Source;

/// A kernel's argument. It borrows the tensor that it was made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arg<'a> {
    /// The value, in the low bytes.
    bits: u64,
    kind: u8,
    tensor: PhantomData<&'a ()>,
}

impl Arg<'_> {
    pub(crate) fn pointer(address: u64) -> Self {
        Self { bits: address, kind: b'p', tensor: PhantomData }
    }

    /// Makes an argument of a number of elements, 64 bits in the kernel: a tensor may have 2^32 and more.
    #[must_use]
    pub fn elements(count: usize) -> Self {
        Self { bits: count as u64, kind: b'l', tensor: PhantomData }
    }

    /// Returns the value as a 32-bit number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.bits as u32
    }

    /// Returns the argument without the borrow. The caller ensures that the tensor's memory outlives it.
    pub(crate) fn detached(self) -> Arg<'static> {
        Arg { bits: self.bits, kind: self.kind, tensor: PhantomData }
    }

    /// Makes a null pointer, for optional arguments.
    #[must_use]
    pub fn none() -> Self {
        Self::pointer(0)
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Self { bits: value.into(), kind: b'u', tensor: PhantomData }
    }
}

impl From<usize> for Arg<'_> {
    /// Converts a 32-bit size or count. Panics from 2^32 on, which no tensor's dim reaches; [`Arg::elements`] has no
    /// such bound.
    fn from(value: usize) -> Self {
        Self::from(u32::try_from(value).expect("a kernel argument of 32 bits for a size of at least 2^32"))
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Self { bits: value.to_bits().into(), kind: b'f', tensor: PhantomData }
    }
}

impl From<bool> for Arg<'_> {
    fn from(value: bool) -> Self {
        Self::from(u32::from(value))
    }
}

/// A kernel, its blocks and threads, and its arguments.
pub struct Launch<'a> {
    /// The source that defines the kernel.
    pub source: &'static Source,
    /// The kernel's name, one of the source's.
    pub kernel: &'a str,
    /// The number of blocks; nothing is launched if any is 0.
    pub grid: [usize; 3],
    /// Threads of a block, whole warps.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    /// The arguments in order.
    pub args: &'a [Arg<'a>],
}

impl Launch<'_> {
    /// Returns the values, for [`pointers`].
    pub(crate) fn values(&self) -> Vec<u64> {
        self.args.iter().map(|arg| arg.bits).collect()
    }

    /// Returns the bits of the arguments that are not pointers.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.args.iter().filter(|arg| arg.kind != b'p').map(|arg| arg.bits).collect()
    }

    /// Returns a letter for each argument: p, u (32 bits), l (64) or f.
    pub(crate) fn kinds(&self) -> Vec<u8> {
        self.args.iter().map(|arg| arg.kind).chain([0]).collect()
    }

    /// Returns the number of blocks as the driver takes it. Panics if it is out of range.
    pub(crate) fn blocks(&self) -> [u32; 3] {
        self.grid.map(|n| u32::try_from(n).expect("a grid of at least 2^32 blocks"))
    }
}

/// Returns pointers to the values, as the driver takes them: on a little-endian machine the low bytes of a value are
/// the argument.
pub(crate) fn pointers(values: &mut [u64]) -> Vec<*mut c_void> {
    const { assert!(cfg!(target_endian = "little"), "arguments of kernels are the low bytes of words") };
    values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect()
}
