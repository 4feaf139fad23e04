//! The tensor: contiguous, row-major, with shared read-only or unique writable memory.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use crate::dtype::{DType, Element};
use crate::pool::{MemoryPool, PooledBytes};

/// Memory that somebody else owns, such as a mapped file.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

#[derive(Clone)]
enum Storage {
    Pooled(Arc<PooledBytes>),
    Foreign { owner: Bytes, range: Range<usize> },
}

/// A contiguous row-major array.
///
/// Cloning shares the memory; a tensor can be written to only while nobody shares it. Element access names the type it
/// expects: asking for another one than the tensor holds is an error of the program and panics.
#[derive(Clone)]
pub struct Tensor {
    storage: Storage,
    shape: Vec<usize>,
    dtype: DType,
}

impl Tensor {
    /// A tensor of zeros.
    #[must_use]
    pub fn zeros(pool: &MemoryPool, shape: &[usize], dtype: DType) -> Self {
        let bytes = byte_len(shape, dtype);
        let (mut block, is_fresh) = pool.take(bytes);
        if !is_fresh {
            block.bytes_mut()[..bytes].fill(0);
        }
        Self { storage: Storage::Pooled(Arc::new(block)), shape: shape.to_vec(), dtype }
    }

    /// A tensor whose contents are unspecified (what the memory's last owner left): for results that are written whole.
    #[must_use]
    pub fn empty(pool: &MemoryPool, shape: &[usize], dtype: DType) -> Self {
        let (block, _) = pool.take(byte_len(shape, dtype));
        Self { storage: Storage::Pooled(Arc::new(block)), shape: shape.to_vec(), dtype }
    }

    /// A tensor with a copy of `values`, whose number must be the product of `shape`.
    #[must_use]
    pub fn from_slice<E: Element>(pool: &MemoryPool, shape: &[usize], values: &[E]) -> Self {
        let mut tensor = Self::empty(pool, shape, E::DTYPE);
        tensor.slice_mut::<E>().copy_from_slice(values);
        tensor
    }

    /// A read-only tensor over memory that `owner` keeps alive. `None` if `range` is not inside it, has another length
    /// than the shape asks for, or is not aligned for the element type.
    #[must_use]
    pub fn from_foreign(owner: Bytes, range: Range<usize>, shape: &[usize], dtype: DType) -> Option<Self> {
        let bytes = (*owner).as_ref().get(range.clone())?;
        let is_aligned = bytes.as_ptr().addr().is_multiple_of(dtype.align());
        if Some(bytes.len()) != checked_byte_len(shape, dtype) || !is_aligned {
            return None;
        }
        Some(Self { storage: Storage::Foreign { owner, range }, shape: shape.to_vec(), dtype })
    }

    /// The sizes of the dims, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all elements.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        byte_len(&self.shape, self.dtype)
    }

    /// The size of the last dim; 1 for a tensor without dims.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The product of all dims but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// The same elements under another shape of as many elements.
    #[must_use]
    pub fn reshaped(mut self, shape: &[usize]) -> Self {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "reshape {:?} to {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }

    /// A copy of its own.
    #[must_use]
    pub fn copied(&self, pool: &MemoryPool) -> Self {
        let mut copy = Self::empty(pool, &self.shape, self.dtype);
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }

    /// The elements as bytes, in the machine's byte order.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let bytes = self.num_bytes();
        match &self.storage {
            Storage::Pooled(block) => &block.bytes()[..bytes],
            Storage::Foreign { owner, range } => &(**owner).as_ref()[range.clone()],
        }
    }

    /// The elements as bytes, for writing. Panics if the memory is shared.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.num_bytes();
        match &mut self.storage {
            Storage::Pooled(block) => {
                &mut Arc::get_mut(block).expect("a shared tensor is written to").bytes_mut()[..bytes]
            }
            Storage::Foreign { .. } => panic!("a read-only tensor is written to"),
        }
    }

    /// The elements. Panics if `E` is not the tensor's type.
    #[must_use]
    pub fn slice<E: Element>(&self) -> &[E] {
        assert_eq!(self.dtype, E::DTYPE, "element type of a tensor {:?}", self.shape);
        bytemuck::cast_slice(self.bytes())
    }

    /// The elements, for writing. Panics if `E` is not the tensor's type or the memory is shared.
    #[must_use]
    pub fn slice_mut<E: Element>(&mut self) -> &mut [E] {
        assert_eq!(self.dtype, E::DTYPE, "element type of a tensor {:?}", self.shape);
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// The elements of an f32 tensor.
    #[must_use]
    pub fn f32s(&self) -> &[f32] {
        self.slice()
    }

    /// The elements of an f32 tensor, for writing.
    #[must_use]
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        self.slice_mut()
    }

    /// The elements of a bf16 tensor.
    #[must_use]
    pub fn bf16s(&self) -> &[bf16] {
        self.slice()
    }

    /// The elements of a bf16 tensor, for writing.
    #[must_use]
    pub fn bf16s_mut(&mut self) -> &mut [bf16] {
        self.slice_mut()
    }

    /// The elements of a u32 tensor.
    #[must_use]
    pub fn u32s(&self) -> &[u32] {
        self.slice()
    }

    /// The elements of a u32 tensor, for writing.
    #[must_use]
    pub fn u32s_mut(&mut self) -> &mut [u32] {
        self.slice_mut()
    }

    /// The elements converted to f32, whatever float type they have.
    #[must_use]
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.f32s().to_vec(),
            DType::BF16 => self.bf16s().iter().map(|x| x.to_f32()).collect(),
            DType::U32 => self.u32s().iter().map(|&x| x as f32).collect(),
            DType::Q8 | DType::Q4 => panic!("a quantized tensor is dequantized by `ops::quantized`"),
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}{:?})", self.dtype, self.shape)
    }
}

fn byte_len(shape: &[usize], dtype: DType) -> usize {
    checked_byte_len(shape, dtype).expect("the size of a tensor overflows, or its rows are not whole blocks")
}

fn checked_byte_len(shape: &[usize], dtype: DType) -> Option<usize> {
    let Some((&cols, outer)) = shape.split_last() else { return (!dtype.is_quantized()).then_some(dtype.size()) };
    let blocks = cols.is_multiple_of(dtype.block_len()).then_some(cols / dtype.block_len())?;
    outer.iter().try_fold(blocks.checked_mul(dtype.size())?, |bytes, &dim| bytes.checked_mul(dim))
}

#[cfg(test)]
#[path = "tensor_tests.rs"]
mod tests;
