//! Stacks of matrices that a file stores transposed.

use std::sync::OnceLock;

use crate::pool::MemoryPool;
use crate::tensor::Tensor;

/// A stack in the file's order, and its transposed copy made on first use.
pub(crate) struct Transposed {
    /// `[E, K, N]`
    pub(crate) base: Tensor,
    pub(crate) is_interleaved: bool,
    pool: MemoryPool,
    whole: OnceLock<Tensor>,
}

impl Transposed {
    pub(crate) fn new(pool: &MemoryPool, base: Tensor, is_interleaved: bool) -> Self {
        Self { base, is_interleaved, pool: pool.clone(), whole: OnceLock::new() }
    }

    /// Returns the transposed copy, `[E, N, K]`.
    pub(crate) fn whole(&self) -> &Tensor {
        self.whole.get_or_init(|| {
            let &[matrices, depth, columns] = self.base.shape() else { return self.base.clone() };
            let mut whole = Tensor::empty(&self.pool, &[matrices, columns, depth], self.base.dtype());
            match self.base.dtype().size() {
                2 => self.turn(columns, depth, bytes_of::<2>(self.base.bytes()), whole.bytes_mut().as_chunks_mut().0),
                _ => self.turn(columns, depth, bytes_of::<4>(self.base.bytes()), whole.bytes_mut().as_chunks_mut().0),
            }
            whole
        })
    }

    fn turn<const SIZE: usize>(&self, columns: usize, depth: usize, from: &[[u8; SIZE]], to: &mut [[u8; SIZE]]) {
        let len = (columns * depth).max(1);
        for (from, to) in from.chunks_exact(len).zip(to.chunks_exact_mut(len)) {
            for (row, to) in to.chunks_exact_mut(depth).enumerate() {
                let column = if self.is_interleaved { row % (columns / 2) * 2 + row / (columns / 2) } else { row };
                to.iter_mut().zip(from[column..].iter().step_by(columns)).for_each(|(to, from)| *to = *from);
            }
        }
    }
}

fn bytes_of<const SIZE: usize>(bytes: &[u8]) -> &[[u8; SIZE]] {
    bytes.as_chunks().0
}
