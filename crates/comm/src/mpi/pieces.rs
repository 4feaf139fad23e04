//! Counts of bytes as MPI wants them: `int`s, with where each piece begins.

use std::ffi::c_int;

use super::api::Handle;
use super::library::Mpi;

/// Pieces of a region: how long each is and where it begins, in units of a type.
#[derive(Default)]
pub(crate) struct Pieces {
    pub(crate) counts: Vec<c_int>,
    pub(crate) starts: Vec<c_int>,
    /// Bytes of the type. 1, or for what is longer than an `int` can say a divisor of all lengths.
    pub(crate) unit: usize,
}

impl Pieces {
    /// Sets the pieces to these counts of bytes, which lie one after another. `false` if they cannot be said in `int`s up to
    /// `limit`.
    pub(crate) fn set(&mut self, counts: &[usize], limit: usize) -> bool {
        let total: usize = counts.iter().sum();
        self.counts.clear();
        self.starts.clear();
        if total <= limit {
            self.unit = 1;
            self.lay_out(counts, |bytes| bytes);
            return true;
        }
        let unit = unit_for(counts, limit);
        self.unit = unit;
        self.lay_out(counts, |bytes| bytes / unit);
        total / unit <= limit
    }

    /// One piece after the other, `units` being how many units so many bytes are. (A division takes longer than the rest.)
    fn lay_out(&mut self, counts: &[usize], units: impl Fn(usize) -> usize) {
        self.counts.extend(counts.iter().map(|&count| units(count) as c_int));
        let starts = counts.iter().scan(0, |end, &count| Some(std::mem::replace(end, *end + count)));
        self.starts.extend(starts.map(|start| units(start) as c_int));
    }

    pub(crate) fn of(counts: &[usize], limit: usize) -> Option<Self> {
        let mut pieces = Self::default();
        pieces.set(counts, limit).then_some(pieces)
    }
}

/// The greatest divisor of all counts, made smaller by halves where it is above the limit itself.
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

/// A type of so many bytes. A communication that was started with it goes on when it is dropped.
pub(crate) struct Unit {
    mpi: &'static Mpi,
    pub(crate) handle: Handle,
    is_own: bool,
}

impl Unit {
    /// One byte.
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
        // SAFETY: MPI is initialised while there are communicators; `handle` is valid for writing. `bytes` fits (`unit_for`).
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
            // SAFETY: made above, and not freed before. An error would leave a few bytes behind.
            unsafe { (self.mpi.functions.type_free)(&raw mut self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_within_the_limit_are_bytes() {
        let pieces = Pieces::of(&[3, 0, 7], 10).unwrap();
        assert_eq!((pieces.unit, pieces.counts, pieces.starts), (1, vec![3, 0, 7], vec![0, 3, 3]));
    }

    #[test]
    fn beyond_it_they_are_multiples_of_a_divisor() {
        let pieces = Pieces::of(&[24, 0, 36], 10).unwrap();
        assert_eq!((pieces.unit, pieces.counts, pieces.starts), (6, vec![4, 0, 6], vec![0, 4, 4]));
        assert!(Pieces::of(&[23, 36], 10).is_none(), "no common divisor");
        let whole = Pieces::of(&[64], 10).unwrap();
        assert_eq!((whole.unit, whole.counts), (8, vec![8]));
    }
}
