//! Counts and starts of pieces as MPI takes them, in `int`.

use std::ffi::c_int;

use super::api::Handle;
use super::library::Mpi;

/// The pieces of a region: lengths and starts in units of a type.
pub(crate) struct Pieces {
    pub(crate) counts: Vec<c_int>,
    pub(crate) starts: Vec<c_int>,
    /// Bytes of the type: 1, or a common divisor of all lengths where bytes exceed an `int`.
    pub(crate) unit: usize,
}

impl Pieces {
    /// Makes consecutive pieces of these byte counts. `None` if they cannot be expressed in `int`s up to `limit`.
    pub(crate) fn new(counts: &[usize], limit: usize) -> Option<Self> {
        let total: usize = counts.iter().sum();
        let unit = if total <= limit { 1 } else { unit_for(counts, limit) };
        let units = |bytes: usize| (bytes / unit) as c_int;
        let (counts, starts) =
            (counts.iter().map(|&count| units(count)).collect(), starts(counts).map(units).collect());
        (total / unit <= limit).then_some(Self { counts, starts, unit })
    }
}

/// Iterates over the starts of consecutive pieces.
#[inline]
pub(crate) fn starts(counts: &[usize]) -> impl Iterator<Item = usize> {
    counts.iter().scan(0, |end, &count| {
        let start = *end;
        *end += count;
        Some(start)
    })
}

/// Returns the greatest common divisor of the counts, halved until it is within the limit.
fn unit_for(counts: &[usize], limit: usize) -> usize {
    let mut unit = counts.iter().fold(0, |a, &b| gcd(a, b));
    while unit > limit && unit.is_multiple_of(2) {
        unit /= 2;
    }
    if unit > limit { 1 } else { unit.max(1) }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// An MPI type of a number of bytes. A communication that was started with it may outlive it.
pub(crate) struct Unit {
    mpi: &'static Mpi,
    pub(crate) handle: Handle,
    is_own: bool,
}

impl Unit {
    /// Returns the type of one byte.
    pub(crate) fn byte(mpi: &'static Mpi) -> Self {
        Self { mpi, handle: mpi.constants.byte, is_own: false }
    }

    pub(crate) fn new(mpi: &'static Mpi, bytes: usize) -> Result<Self, c_int> {
        let mut unit = Self::byte(mpi);
        if bytes == 1 {
            return Ok(unit);
        }
        let functions = &mpi.functions;
        let mut handle = 0;
        // SAFETY: MPI is initialised while there are communicators; `handle` is valid for writing. `bytes` fits
        // (`unit_for`).
        let code = unsafe {
            match (functions.type_contiguous)(bytes as c_int, mpi.constants.byte, &raw mut handle) {
                0 => (functions.type_commit)(&raw mut handle),
                code => code,
            }
        };
        if code != 0 {
            return Err(code);
        }
        (unit.handle, unit.is_own) = (handle, true);
        Ok(unit)
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: the type was made above and not freed before. An error would leak a few bytes.
            unsafe { (self.mpi.functions.type_free)(&raw mut self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_within_the_limit_are_bytes() {
        let pieces = Pieces::new(&[3, 0, 7], 10).unwrap();
        assert_eq!((pieces.unit, &*pieces.counts, &*pieces.starts), (1, &[3, 0, 7][..], &[0, 3, 3][..]));
    }

    #[test]
    fn beyond_it_they_are_multiples_of_a_divisor() {
        let pieces = Pieces::new(&[24, 0, 36], 10).unwrap();
        assert_eq!((pieces.unit, &*pieces.counts, &*pieces.starts), (6, &[4, 0, 6][..], &[0, 4, 4][..]));
        assert!(Pieces::new(&[23, 36], 10).is_none(), "no common divisor");
        let whole = Pieces::new(&[64], 10).unwrap();
        assert_eq!((whole.unit, &*whole.counts), (8, &[8][..]));
    }
}
