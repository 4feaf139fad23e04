//! One launch of a kernel, as a value.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::Source;

/// A kernel's argument; it keeps the tensor that it was made of borrowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arg<'a> {
    /// The value, in as many of the low bytes as it has.
    bits: u64,
    kind: u8,
    tensor: PhantomData<&'a ()>,
}

impl Arg<'_> {
    pub(super) fn pointer(address: u64) -> Self {
        Self { bits: address, kind: b'p', tensor: PhantomData }
    }

    /// A number of elements, of 64 bits in the kernel: a tensor may have 2^32 and more.
    pub(crate) fn elements(count: usize) -> Self {
        Self { bits: count as u64, kind: b'l', tensor: PhantomData }
    }

    /// A number of 32 bits.
    pub(crate) fn number(self) -> u32 {
        self.bits as u32
    }

    /// The same without the borrow: whoever keeps it sees to it that the tensor's memory outlives its use.
    pub(super) fn detached(self) -> Arg<'static> {
        Arg { bits: self.bits, kind: self.kind, tensor: PhantomData }
    }

    /// The null pointer, where a kernel has a choice.
    pub(crate) fn none() -> Self {
        Self::pointer(0)
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Self { bits: value.into(), kind: b'u', tensor: PhantomData }
    }
}

impl From<usize> for Arg<'_> {
    /// A size or a count of 32 bits; panics from 2^32 on, which no tensor's dim reaches ([`Arg::elements`] has no such bound).
    fn from(value: usize) -> Self {
        Self::from(u32::try_from(value).expect("a size of at least 2^32 is given to a kernel"))
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

/// Which kernel, over how many blocks of how many threads, with what.
pub(crate) struct Launch<'a> {
    /// Where the kernel is.
    pub(crate) source: &'static Source,
    /// Its name, one of the source's.
    pub(crate) kernel: &'a str,
    /// Blocks; nothing happens if any is 0.
    pub(crate) grid: [usize; 3],
    /// Threads of a block, whole warps.
    pub(crate) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: usize,
    /// The arguments in order.
    pub(crate) args: &'a [Arg<'a>],
}

impl Launch<'_> {
    /// The values, for [`pointers`].
    pub(super) fn values(&self) -> Vec<u64> {
        self.args.iter().map(|arg| arg.bits).collect()
    }

    /// The arguments that are no pointers, as their bits.
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.args.iter().filter(|arg| arg.kind != b'p').map(|arg| arg.bits).collect()
    }

    /// A letter for each argument: p, u (32 bits), l (64) or f.
    pub(super) fn kinds(&self) -> Vec<u8> {
        self.args.iter().map(|arg| arg.kind).chain([0]).collect()
    }

    /// The number of blocks as the driver takes it. Panics if it is out of range.
    pub(super) fn blocks(&self) -> [u32; 3] {
        self.grid.map(|n| u32::try_from(n).expect("a grid of at least 2^32 blocks"))
    }
}

/// Pointers to the values, as launches take them: the low bytes of a value are the argument on a little-endian machine.
pub(super) fn pointers(values: &mut [u64]) -> Vec<*mut c_void> {
    const { assert!(cfg!(target_endian = "little"), "arguments of kernels are the low bytes of words") };
    values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect()
}
