//! The tensor: row-major, with shared read-only or unique writable memory. It is contiguous, unless a file has it in
//! pieces, with separate scales, or with transposed matrices.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

use crate::dtype::{DType, Element};
use crate::host_device::{DeviceBlock, DeviceBlocks, HostDeviceBytes};
use crate::pool::MemoryPool;
use crate::split_scales::{Lines, Place, SplitScales};
use crate::transposed::Transposed;

/// Memory of another owner, such as a mapped file.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

#[derive(Clone)]
enum Storage {
    Pooled(Arc<HostDeviceBytes>),
    Foreign { owner: Bytes, range: Range<usize>, device: Arc<DeviceBlocks> },
    Pieces(Arc<Pieces>),
    SplitScales(Arc<SplitScales>),
    Transposed(Arc<Transposed>),
}

/// Tensors that are consecutive pieces of one, and the contiguous copy made on first use.
struct Pieces {
    list: Vec<Tensor>,
    whole: OnceLock<Tensor>,
    pool: MemoryPool,
}

impl Pieces {
    fn whole(&self) -> &Tensor {
        self.whole.get_or_init(|| {
            let len = self.list.iter().map(Tensor::len).sum();
            let mut whole = Tensor::empty(&self.pool, &[len], self.list[0].dtype);
            let mut to = whole.bytes_mut();
            for piece in &self.list {
                let (here, rest) = to.split_at_mut(piece.num_bytes());
                here.copy_from_slice(piece.bytes());
                to = rest;
            }
            whole
        })
    }
}

/// A row-major array.
///
/// A file may store the matrices of a stack separately; such a tensor is made [of pieces](Tensor::of_pieces). Access
/// by [pieces](Tensor::pieces) makes no copy; access to all elements as one slice makes a copy that is kept.
///
/// Clones share the memory, and only a tensor whose memory is not shared can be written to. Element access names the
/// expected type and panics if the tensor has another.
#[derive(Clone)]
pub struct Tensor {
    storage: Storage,
    shape: Vec<usize>,
    dtype: DType,
}

impl Tensor {
    /// Returns a tensor of zeros.
    #[must_use]
    pub fn zeros(pool: &MemoryPool, shape: &[usize], dtype: DType) -> Self {
        let bytes = byte_len(shape, dtype);
        let (mut block, is_fresh) = pool.take(bytes);
        if !is_fresh {
            block.bytes_mut()[..bytes].fill(0);
        }
        Self::over(HostDeviceBytes::in_host(pool, bytes, block), shape, dtype)
    }

    /// Returns a tensor with unspecified contents (the memory's last ones), for results that are written in full.
    #[must_use]
    pub fn empty(pool: &MemoryPool, shape: &[usize], dtype: DType) -> Self {
        let bytes = byte_len(shape, dtype);
        let (block, _) = pool.take(bytes);
        Self::over(HostDeviceBytes::in_host(pool, bytes, block), shape, dtype)
    }

    /// Returns a tensor with the contents of `block`, on a device, which must have the size of the shape. The host's
    /// copy, made when the host first reads the tensor, comes from `pool`.
    #[must_use]
    pub fn from_device(pool: &MemoryPool, shape: &[usize], dtype: DType, block: DeviceBlock) -> Self {
        Self::over(HostDeviceBytes::on_device(pool, byte_len(shape, dtype), block), shape, dtype)
    }

    fn over(memory: HostDeviceBytes, shape: &[usize], dtype: DType) -> Self {
        Self { storage: Storage::Pooled(Arc::new(memory)), shape: shape.to_vec(), dtype }
    }

    /// Returns a tensor with a copy of `values`, whose number must be the product of `shape`.
    #[must_use]
    pub fn from_slice<E: Element>(pool: &MemoryPool, shape: &[usize], values: &[E]) -> Self {
        let mut tensor = Self::empty(pool, shape, E::DTYPE);
        tensor.slice_mut::<E>().copy_from_slice(values);
        tensor
    }

    /// Returns a read-only tensor over memory that `owner` keeps alive. `None` if `range` is not in it, has another
    /// length than the shape requires, or is not aligned for the element type.
    #[must_use]
    pub fn from_foreign(owner: Bytes, range: Range<usize>, shape: &[usize], dtype: DType) -> Option<Self> {
        let bytes = (*owner).as_ref().get(range.clone())?;
        let is_aligned = bytes.as_ptr().addr().is_multiple_of(dtype.align());
        if Some(bytes.len()) != checked_byte_len(shape, dtype) || !is_aligned {
            return None;
        }
        Some(Self { storage: Storage::Foreign { owner, range, device: Arc::default() }, shape: shape.to_vec(), dtype })
    }

    /// Returns a read-only tensor made of consecutive `pieces`, without a copy. `None` if there are no pieces, if
    /// their types differ, or if their number of elements or their last dim is not that of the shape.
    #[must_use]
    pub fn of_pieces(pool: &MemoryPool, pieces: Vec<Self>, shape: &[usize]) -> Option<Self> {
        let (dtype, cols) = (pieces.first()?.dtype, shape.last().copied());
        let is_alike = |piece: &Self| piece.dtype == dtype && piece.shape.last().copied() == cols;
        let bytes = pieces.iter().try_fold(0_usize, |sum, piece| sum.checked_add(piece.num_bytes()));
        if !pieces.iter().all(is_alike) || bytes.is_none() || bytes != checked_byte_len(shape, dtype) {
            return None;
        }
        let pieces = Pieces { list: pieces, whole: OnceLock::new(), pool: pool.clone() };
        Some(Self { storage: Storage::Pieces(Arc::new(pieces)), shape: shape.to_vec(), dtype })
    }

    /// Returns a read-only tensor in blocks ([`DType::Mxfp4`] or [`DType::F8`]) whose values and scales are in these
    /// places, without a copy. Values of four bits are two per byte, the first in its low half. `None` for another
    /// type, or if rows are missing.
    ///
    /// Access by [lines](Self::lines) makes no copy; access by blocks makes a copy that is kept.
    #[must_use]
    pub fn with_split_scales(
        pool: &MemoryPool,
        shape: &[usize],
        dtype: DType,
        [numbers, scales]: [Place; 2],
    ) -> Option<Self> {
        checked_byte_len(shape, dtype)?;
        let (&cols, outer) = shape.split_last()?;
        let split = SplitScales::new(pool, (outer.iter().product(), cols), dtype, [numbers, scales])?;
        Some(Self { storage: Storage::SplitScales(Arc::new(split)), shape: shape.to_vec(), dtype })
    }

    /// Returns the values and the scales of its rows, if they are separate.
    #[must_use]
    pub fn lines(&self) -> Option<[Lines<'_>; 2]> {
        match &self.storage {
            Storage::SplitScales(split) => Some(split.lines(self.cols(), self.dtype)),
            _ => None,
        }
    }

    /// Returns the read-only tensor `[E, N, K]` whose matrices are those of `base`, `[E, K, N]` floats, transposed,
    /// without a copy. With `is_interleaved` the columns of `base` alternate between the first and the second half of
    /// the rows. `None` if `base` has another shape or type.
    ///
    /// Access by [`as_transposed`](Self::as_transposed) makes no copy; access to elements makes a copy that is kept.
    #[must_use]
    pub fn transposed(pool: &MemoryPool, base: Self, is_interleaved: bool) -> Option<Self> {
        let &[matrices, depth, columns] = base.shape() else { return None };
        let is_meant = !base.dtype.is_quantized() && depth > 0 && (!is_interleaved || columns.is_multiple_of(2));
        let dtype = base.dtype;
        is_meant.then(|| Self {
            storage: Storage::Transposed(Arc::new(Transposed::new(pool, base, is_interleaved))),
            shape: vec![matrices, columns, depth],
            dtype,
        })
    }

    /// Returns the `base` of a [transposed](Self::transposed) tensor, and true if its columns alternate.
    #[must_use]
    pub fn as_transposed(&self) -> Option<(&Self, bool)> {
        match &self.storage {
            Storage::Transposed(stack) => Some((&stack.base, stack.is_interleaved)),
            _ => None,
        }
    }

    /// Returns the consecutive pieces of a tensor that is not contiguous.
    #[must_use]
    pub fn pieces(&self) -> Option<&[Self]> {
        match &self.storage {
            Storage::Pieces(pieces) => Some(&pieces.list),
            _ => None,
        }
    }

    /// Copies its bytes from `start` on to `out`, without joining its [pieces](Tensor::pieces). Panics if there are
    /// fewer.
    pub fn read_bytes(&self, start: usize, out: &mut [u8]) {
        let (mut skipped, mut rest) = (start, out);
        for part in self.parts() {
            let len = part.num_bytes().saturating_sub(skipped).min(rest.len());
            if len > 0 {
                let (filled, others) = rest.split_at_mut(len);
                filled.copy_from_slice(&part.bytes()[skipped..skipped + len]);
                rest = others;
            }
            skipped = skipped.saturating_sub(part.num_bytes());
        }
        assert!(rest.is_empty(), "bytes of a tensor {:?}", self.shape);
    }

    /// Returns its [pieces](Tensor::pieces), or the tensor itself if it is contiguous.
    #[must_use]
    pub fn parts(&self) -> &[Self] {
        self.pieces().unwrap_or(std::slice::from_ref(self))
    }

    /// Returns the elements from the first of either tensor to the last, and the start of each among them. None
    /// unless both are in the same memory, such as one file, at whole elements. Panics if `E` is not the type of
    /// both.
    #[must_use]
    pub fn span<'a, E: Element>(&'a self, other: &Self) -> Option<(&'a [E], [usize; 2])> {
        assert_eq!((self.dtype, other.dtype), (E::DTYPE, E::DTYPE), "element type of a tensor {:?}", self.shape);
        let (bytes, places) = self.span_of_bytes(other)?;
        Some((bytemuck::try_cast_slice(bytes).ok()?, places))
    }

    /// Returns true if two tensors of one type have a [`span`](Self::span).
    #[must_use]
    pub fn has_span(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.span_of_bytes(other).is_some()
    }

    /// Returns the bytes of the whole elements of a span.
    fn span_of_bytes(&self, other: &Self) -> Option<(&[u8], [usize; 2])> {
        let (Storage::Foreign { owner, range: a, .. }, Storage::Foreign { owner: theirs, range: b, .. }) =
            (&self.storage, &other.storage)
        else {
            return None;
        };
        let size = self.dtype.size();
        if !Arc::ptr_eq(owner, theirs) {
            return None;
        }
        let start = a.start.min(b.start);
        let bytes = (**owner).as_ref().get(start..a.end.max(b.end))?;
        // Both begin at whole elements, and so does everything between; the bytes after the last whole element are
        // dropped.
        let bytes = &bytes[..bytes.len() / size * size];
        let places = [a.start - start, b.start - start];
        let is_whole = places.iter().all(|place| place.is_multiple_of(size));
        is_whole.then(|| (bytes, places.map(|place| place / size)))
    }

    /// Returns the sizes of the dims, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of all elements.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        byte_len(&self.shape, self.dtype)
    }

    /// Returns the bytes of all elements as stored: fewer than [`num_bytes`](Self::num_bytes) if rows share scales.
    #[must_use]
    pub fn stored_bytes(&self) -> usize {
        match &self.storage {
            Storage::Pieces(pieces) => pieces.list.iter().map(Self::stored_bytes).sum(),
            Storage::SplitScales(split) => split.stored_bytes(self.rows(), self.cols(), self.dtype),
            Storage::Pooled(_) | Storage::Foreign { .. } | Storage::Transposed(_) => self.num_bytes(),
        }
    }

    /// Returns the size of the last dim; 1 for a tensor without dims.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the product of all dims but the last.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Returns the same elements with another shape. Panics if the numbers of elements differ.
    #[must_use]
    pub fn reshaped(mut self, shape: &[usize]) -> Self {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "reshape {:?} to {shape:?}", self.shape);
        let is_free = match self.storage {
            Storage::Pooled(_) | Storage::Foreign { .. } | Storage::Pieces(_) => true,
            Storage::SplitScales(_) => shape.last().copied() == Some(self.cols()),
            Storage::Transposed(_) => shape == self.shape,
        };
        assert!(is_free, "rows that lie otherwise in a file: reshape {:?} to {shape:?}", self.shape);
        self.shape = shape.to_vec();
        self
    }

    /// Returns a copy with memory of its own.
    #[must_use]
    pub fn copied(&self, pool: &MemoryPool) -> Self {
        let mut copy = Self::empty(pool, &self.shape, self.dtype);
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }

    /// Returns the elements as bytes, in the machine's byte order, after a copy from the device if only that has
    /// them.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Pooled(memory) => memory.bytes(),
            Storage::Foreign { owner, range, .. } => &(**owner).as_ref()[range.clone()],
            Storage::Pieces(pieces) => pieces.whole().bytes(),
            Storage::SplitScales(split) => split.joined(&self.shape, self.dtype).bytes(),
            Storage::Transposed(stack) => stack.whole().bytes(),
        }
    }

    /// Returns true if the host can read the elements without a copy from a device.
    #[must_use]
    pub fn is_in_host(&self) -> bool {
        match &self.storage {
            Storage::Pooled(memory) => memory.is_in_host(),
            Storage::Foreign { .. } | Storage::Pieces(_) | Storage::SplitScales(_) | Storage::Transposed(_) => true,
        }
    }

    /// Returns the address of the elements on device number `device`, for reading. If they are not there, `upload`
    /// allocates a block with the bytes that it is given.
    #[must_use]
    pub fn device_address(&self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        match &self.storage {
            Storage::Pooled(memory) => memory.address(device, upload),
            Storage::Foreign { device: blocks, .. } => blocks.address(device, || upload(self.bytes())),
            Storage::Pieces(pieces) => pieces.whole().device_address(device, upload),
            Storage::SplitScales(split) => split.joined(&self.shape, self.dtype).device_address(device, upload),
            Storage::Transposed(stack) => stack.whole().device_address(device, upload),
        }
    }

    /// Returns the address of the elements on a device for writing; the host's copy is dropped. Panics if the memory
    /// is shared.
    #[must_use]
    pub fn device_address_mut(&mut self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        match &mut self.storage {
            Storage::Pooled(memory) => {
                Arc::get_mut(memory).expect("a shared tensor is written to").address_mut(device, upload)
            }
            _ => panic!("a read-only tensor is written to"),
        }
    }

    /// Returns the elements as bytes, for writing. Panics if the memory is shared.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            Storage::Pooled(memory) => Arc::get_mut(memory).expect("a shared tensor is written to").bytes_mut(),
            _ => panic!("a read-only tensor is written to"),
        }
    }

    /// Returns the elements. Panics if `E` is not the tensor's type.
    #[must_use]
    pub fn slice<E: Element>(&self) -> &[E] {
        assert_eq!(self.dtype, E::DTYPE, "element type of a tensor {:?}", self.shape);
        bytemuck::cast_slice(self.bytes())
    }

    /// Returns the elements for writing. Panics if `E` is not the tensor's type or the memory is shared.
    #[must_use]
    pub fn slice_mut<E: Element>(&mut self) -> &mut [E] {
        assert_eq!(self.dtype, E::DTYPE, "element type of a tensor {:?}", self.shape);
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    /// Returns the elements of an f32 tensor.
    #[must_use]
    pub fn f32s(&self) -> &[f32] {
        self.slice()
    }

    /// Returns the elements of an f32 tensor, for writing.
    #[must_use]
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        self.slice_mut()
    }

    /// Returns the elements of a bf16 tensor.
    #[must_use]
    pub fn bf16s(&self) -> &[bf16] {
        self.slice()
    }

    /// Returns the elements of a bf16 tensor, for writing.
    #[must_use]
    pub fn bf16s_mut(&mut self) -> &mut [bf16] {
        self.slice_mut()
    }

    /// Returns the elements of a u32 tensor.
    #[must_use]
    pub fn u32s(&self) -> &[u32] {
        self.slice()
    }

    /// Returns the elements of a u32 tensor, for writing.
    #[must_use]
    pub fn u32s_mut(&mut self) -> &mut [u32] {
        self.slice_mut()
    }

    /// Converts the elements of any float type to f32.
    #[must_use]
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.f32s().to_vec(),
            DType::BF16 => self.bf16s().iter().map(|x| x.to_f32()).collect(),
            DType::F16 => self.slice::<f16>().iter().map(|x| x.to_f32()).collect(),
            DType::U32 => self.u32s().iter().map(|&x| x as f32).collect(),
            _ => panic!("a quantized tensor is dequantized by `ops::quantized`"),
        }
    }
}

/// Lets a tensor own what others [borrow](Tensor::from_foreign) of it.
impl AsRef<[u8]> for Tensor {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
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
