//! The tensor: row-major, with shared read-only or unique writable memory, in one piece unless a file has it in several, or its
//! scales apart, or its matrices transposed.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};

use crate::apart::{Apart, Lines, Place};
use crate::dtype::{DType, Element};
use crate::mirror::{DeviceBlock, DeviceBlocks, Mirrored};
use crate::pool::MemoryPool;
use crate::turned::Turned;

/// Memory that somebody else owns, such as a mapped file.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

#[derive(Clone)]
enum Storage {
    Pooled(Arc<Mirrored>),
    Foreign { owner: Bytes, range: Range<usize>, device: Arc<DeviceBlocks> },
    Pieces(Arc<Pieces>),
    Apart(Arc<Apart>),
    Turned(Arc<Turned>),
}

/// Tensors that make one, one behind the other, and that one in memory of its own if somebody has asked for it.
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
/// A file may have the matrices of a stack apart; such a tensor is made [of pieces](Tensor::of_pieces). Whoever goes by
/// [pieces](Tensor::pieces) takes no copy of it; whoever asks for its elements as one slice gets a copy that it then keeps.
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
        Self::over(Mirrored::in_host(pool, bytes, block), shape, dtype)
    }

    /// A tensor whose contents are unspecified (what the memory's last owner left): for results that are written whole.
    #[must_use]
    pub fn empty(pool: &MemoryPool, shape: &[usize], dtype: DType) -> Self {
        let bytes = byte_len(shape, dtype);
        let (block, _) = pool.take(bytes);
        Self::over(Mirrored::in_host(pool, bytes, block), shape, dtype)
    }

    /// A tensor whose contents are those of `block`, on a device; it must hold as many bytes as the shape asks for. The
    /// host's copy, made when the host first reads the tensor, comes from `pool`.
    #[must_use]
    pub fn from_device(pool: &MemoryPool, shape: &[usize], dtype: DType, block: DeviceBlock) -> Self {
        Self::over(Mirrored::on_device(pool, byte_len(shape, dtype), block), shape, dtype)
    }

    fn over(memory: Mirrored, shape: &[usize], dtype: DType) -> Self {
        Self { storage: Storage::Pooled(Arc::new(memory)), shape: shape.to_vec(), dtype }
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
        Some(Self { storage: Storage::Foreign { owner, range, device: Arc::default() }, shape: shape.to_vec(), dtype })
    }

    /// The read-only tensor that `pieces` make one behind the other, without a copy. `None` if there is none, or their types
    /// differ, or their elements are not as many as the shape asks for, or their last dim is another than the shape's.
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

    /// A read-only tensor in blocks (of [`DType::Mxfp4`] or [`DType::F8`]) whose numbers and scales lie in these places, without a
    /// copy. Numbers of four bits are two a byte, the first in its low half. `None` for another type, or if not all rows are there.
    ///
    /// Whoever goes by [lines](Self::lines) takes no copy; whoever asks for blocks gets one that is then kept.
    #[must_use]
    pub fn apart(pool: &MemoryPool, shape: &[usize], dtype: DType, [numbers, scales]: [Place; 2]) -> Option<Self> {
        checked_byte_len(shape, dtype)?;
        let (&cols, outer) = shape.split_last()?;
        let apart = Apart::new(pool, (outer.iter().product(), cols), dtype, [numbers, scales])?;
        Some(Self { storage: Storage::Apart(Arc::new(apart)), shape: shape.to_vec(), dtype })
    }

    /// The numbers and the scales of its rows, if they are apart.
    #[must_use]
    pub fn lines(&self) -> Option<[Lines<'_>; 2]> {
        match &self.storage {
            Storage::Apart(apart) => Some(apart.lines(self.cols(), self.dtype)),
            _ => None,
        }
    }

    /// The read-only tensor `[E, N, K]` whose matrices are those of `base`, `[E, K, N]` of floats, transposed, without a copy. With
    /// `is_in_turn` the columns there of its first and of its second half of rows take turns. `None` if `base` is of another shape or
    /// type.
    ///
    /// Whoever goes by [`as_turned`](Self::as_turned) takes no copy; whoever asks for elements gets one that is then kept.
    #[must_use]
    pub fn turned(pool: &MemoryPool, base: Self, is_in_turn: bool) -> Option<Self> {
        let &[matrices, depth, columns] = base.shape() else { return None };
        let is_meant = !base.dtype.is_quantized() && depth > 0 && (!is_in_turn || columns.is_multiple_of(2));
        let dtype = base.dtype;
        is_meant.then(|| Self {
            storage: Storage::Turned(Arc::new(Turned::new(pool, base, is_in_turn))),
            shape: vec![matrices, columns, depth],
            dtype,
        })
    }

    /// The `base` that this one was [turned](Self::turned) from, and whether columns there take turns.
    #[must_use]
    pub fn as_turned(&self) -> Option<(&Self, bool)> {
        match &self.storage {
            Storage::Turned(turned) => Some((&turned.base, turned.is_in_turn)),
            _ => None,
        }
    }

    /// The tensors that make this one, one behind the other, if it is not in one piece.
    #[must_use]
    pub fn pieces(&self) -> Option<&[Self]> {
        match &self.storage {
            Storage::Pieces(pieces) => Some(&pieces.list),
            _ => None,
        }
    }

    /// Copies its bytes from `start` on to `out`, without gathering its [pieces](Tensor::pieces). Panics if there are fewer.
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

    /// Its [pieces](Tensor::pieces), or itself where it is in one.
    #[must_use]
    pub fn parts(&self) -> &[Self] {
        self.pieces().unwrap_or(std::slice::from_ref(self))
    }

    /// The elements from the first of either tensor to the last, and where each begins among them; none if they do not lie
    /// in the same memory, that of one file say, at whole elements. Panics if `E` is not the type of both.
    #[must_use]
    pub fn span<'a, E: Element>(&'a self, other: &Self) -> Option<(&'a [E], [usize; 2])> {
        assert_eq!((self.dtype, other.dtype), (E::DTYPE, E::DTYPE), "element type of a tensor {:?}", self.shape);
        let (bytes, places) = self.span_of_bytes(other)?;
        Some((bytemuck::try_cast_slice(bytes).ok()?, places))
    }

    /// Whether there is a [`span`](Self::span) of two tensors of one type.
    #[must_use]
    pub fn has_span(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.span_of_bytes(other).is_some()
    }

    /// The bytes of whole elements of a span.
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
        // Both begin at whole elements, hence so does what lies between; what is behind the last whole element is nobody's.
        let bytes = &bytes[..bytes.len() / size * size];
        let places = [a.start - start, b.start - start];
        let is_whole = places.iter().all(|place| place.is_multiple_of(size));
        is_whole.then(|| (bytes, places.map(|place| place / size)))
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

    /// Bytes of all elements as they lie: fewer than [`num_bytes`](Self::num_bytes) where rows share scales.
    #[must_use]
    pub fn stored_bytes(&self) -> usize {
        match &self.storage {
            Storage::Pieces(pieces) => pieces.list.iter().map(Self::stored_bytes).sum(),
            Storage::Apart(apart) => apart.stored_bytes(self.rows(), self.cols(), self.dtype),
            Storage::Pooled(_) | Storage::Foreign { .. } | Storage::Turned(_) => self.num_bytes(),
        }
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
        let is_free = match self.storage {
            Storage::Pooled(_) | Storage::Foreign { .. } | Storage::Pieces(_) => true,
            Storage::Apart(_) => shape.last().copied() == Some(self.cols()),
            Storage::Turned(_) => shape == self.shape,
        };
        assert!(is_free, "rows that lie otherwise in a file: reshape {:?} to {shape:?}", self.shape);
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

    /// The elements as bytes, in the machine's byte order. Copied from the device first, if they are only there.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Pooled(memory) => memory.bytes(),
            Storage::Foreign { owner, range, .. } => &(**owner).as_ref()[range.clone()],
            Storage::Pieces(pieces) => pieces.whole().bytes(),
            Storage::Apart(apart) => apart.joined(&self.shape, self.dtype).bytes(),
            Storage::Turned(turned) => turned.whole().bytes(),
        }
    }

    /// Whether the host can read the elements without a copy from a device.
    #[must_use]
    pub fn is_in_host(&self) -> bool {
        match &self.storage {
            Storage::Pooled(memory) => memory.is_in_host(),
            Storage::Foreign { .. } | Storage::Pieces(_) | Storage::Apart(_) | Storage::Turned(_) => true,
        }
    }

    /// Where the elements are on a device, for reading. `device` is its number, and `upload` makes a block with the bytes
    /// that it is given; it is called if there is none yet.
    #[must_use]
    pub fn device_address(&self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        match &self.storage {
            Storage::Pooled(memory) => memory.address(device, upload),
            Storage::Foreign { device: blocks, .. } => blocks.address(device, || upload(self.bytes())),
            Storage::Pieces(pieces) => pieces.whole().device_address(device, upload),
            Storage::Apart(apart) => apart.joined(&self.shape, self.dtype).device_address(device, upload),
            Storage::Turned(turned) => turned.whole().device_address(device, upload),
        }
    }

    /// As [`device_address`](Self::device_address), for writing: the host's copy is given up. Panics if the memory is shared.
    #[must_use]
    pub fn device_address_mut(&mut self, device: usize, upload: impl FnOnce(&[u8]) -> DeviceBlock) -> u64 {
        match &mut self.storage {
            Storage::Pooled(memory) => {
                Arc::get_mut(memory).expect("a shared tensor is written to").address_mut(device, upload)
            }
            _ => panic!("a read-only tensor is written to"),
        }
    }

    /// The elements as bytes, for writing. Panics if the memory is shared.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            Storage::Pooled(memory) => Arc::get_mut(memory).expect("a shared tensor is written to").bytes_mut(),
            _ => panic!("a read-only tensor is written to"),
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
            DType::F16 => self.slice::<f16>().iter().map(|x| x.to_f32()).collect(),
            DType::U32 => self.u32s().iter().map(|&x| x as f32).collect(),
            _ => panic!("a quantized tensor is dequantized by `ops::quantized`"),
        }
    }
}

/// So that a tensor can own what others [borrow](Tensor::from_foreign) of it.
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
