//! Memory that a started communication owns until it is finished.

use moeworks_tensor::Tensor;

use crate::number::{Number, NumberKind};

/// Memory that can be given to a started communication and comes back when it is finished.
///
/// # Safety
/// Between two changes of the value by its owner, `bytes` and `bytes_mut` give the same region, also after the value
/// was moved: it lies behind a pointer, not in the value.
pub unsafe trait Buffer: Send + 'static {
    /// The contents.
    fn bytes(&self) -> &[u8];
    /// The contents, for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Bytes of one element: counts are in elements.
    fn element_size(&self) -> usize;
    /// What a reduction takes the elements for; `None` where they are no numbers.
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

// SAFETY: a tensor's elements lie in a block of its pool, or in memory of another owner, both behind a counted
// pointer.
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
