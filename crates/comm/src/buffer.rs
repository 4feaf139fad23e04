//! Memory that a started communication owns until it is finished.

use moeworks_tensor::Tensor;

use crate::number::{Number, NumberKind};

/// Memory that a started communication can own. [`Pending::finish`](crate::Pending::finish) gives it back.
///
/// # Safety
/// `bytes` and `bytes_mut` return the same region until the owner changes the value. Moving the value leaves the
/// region where it is: it lies behind a pointer.
pub unsafe trait Buffer: Send + 'static {
    /// Returns the contents.
    fn bytes(&self) -> &[u8];
    /// Returns the contents for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Returns the bytes of one element. Counts of a call are in elements.
    fn element_size(&self) -> usize;
    /// Returns the number type that a reduction works on; `None` if the elements cannot be reduced.
    fn number(&self) -> Option<NumberKind>;
}

// SAFETY: a vector's elements stay where they are when the vector is moved.
unsafe impl<N: Number> Buffer for Vec<N> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self)
    }

    fn element_size(&self) -> usize {
        size_of::<N>()
    }

    fn number(&self) -> Option<NumberKind> {
        Some(N::KIND)
    }
}

// SAFETY: as above.
unsafe impl Buffer for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn element_size(&self) -> usize {
        1
    }

    fn number(&self) -> Option<NumberKind> {
        None
    }
}

// SAFETY: a tensor's elements lie behind a counted pointer, in a block of its pool or in memory of another owner.
unsafe impl Buffer for Tensor {
    fn bytes(&self) -> &[u8] {
        Self::bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        Self::bytes_mut(self)
    }

    fn element_size(&self) -> usize {
        self.dtype().size()
    }

    fn number(&self) -> Option<NumberKind> {
        use moeworks_tensor::DType;
        match self.dtype() {
            DType::F32 => Some(NumberKind::F32),
            DType::BF16 => Some(NumberKind::BF16),
            DType::U32 => Some(NumberKind::U32),
            _ => None,
        }
    }
}
