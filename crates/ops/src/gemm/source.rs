//! The operands of a product and their conversion to the form that kernels take.
//!
//! A unit is one f32 or a pair of bf16 that are consecutive along the depth (see [`kernel`](super::kernel)). Packing
//! turns elements of any type into units of either kind. If the precision is bf16, f32 elements are rounded here.

use std::ops::Range;

use moeworks_tensor::{DType, Element, Tensor, bf16, f16};

use super::tasks::Panels;
use super::{Compute, Span};
use crate::quantized::Blocks;
use crate::simd::{Float, Level};

/// The elements of a tensor, by type.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Evaluates an expression with a name bound to the slice of [`Elements`].
macro_rules! with_elements {
    ($elements:expr, $x:ident => $body:expr) => {
        match $elements {
            Elements::F32($x) => $body,
            Elements::Bf16($x) => $body,
            Elements::F16($x) => $body,
        }
    };
}
pub(crate) use with_elements;

impl<'a> Elements<'a> {
    pub(crate) fn from_tensor(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(tensor.f32s()),
            DType::BF16 => Self::Bf16(tensor.bf16s()),
            DType::F16 => Self::F16(tensor.slice()),
            dtype => panic!("no products with operands of type {dtype:?}"),
        }
    }

    /// Returns the slice that spans two tensors of one type, and the place of each in it.
    fn span(first: &'a Tensor, second: &Tensor) -> Option<(Self, [usize; 2])> {
        fn of<'a, T: Element>(
            first: &'a Tensor,
            second: &Tensor,
            make: impl Fn(&'a [T]) -> Elements<'a>,
        ) -> Option<(Elements<'a>, [usize; 2])> {
            first.span(second).map(|(elements, places)| (make(elements), places))
        }
        match first.dtype() {
            DType::F32 => of(first, second, Self::F32),
            DType::BF16 => of(first, second, Self::Bf16),
            _ => of(first, second, Self::F16),
        }
    }

    /// Bytes of an element.
    #[inline(always)]
    fn size(self) -> usize {
        match self {
            Self::F32(_) => 4,
            Self::Bf16(_) | Self::F16(_) => 2,
        }
    }

    /// Returns the address that element `at` would have, even outside the slice.
    #[inline(always)]
    fn address(self, at: usize) -> *const u8 {
        with_elements!(self, x => x.as_ptr().wrapping_add(at).cast())
    }
}

/// Rows of a row-major matrix: all of it, a slice of a stack, or rows gathered by index.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) elements: Elements<'a>,
    /// Elements before row 0.
    pub(crate) offset: usize,
    /// Elements from one row to the next, at least the row's length.
    pub(crate) stride: usize,
    /// The first row of the second half, and the elements (modulo 2^64) that its rows lie further than the stride
    /// says: for a matrix whose halves are apart in a file.
    pub(crate) gap: Option<(usize, usize)>,
    /// The matrix row of each row, if rows are gathered.
    pub(crate) indices: Option<&'a [u32]>,
    /// Rows of quantized blocks, if there are no elements. Only swapped products (`swap_ab`) take them as B.
    pub(crate) blocks: Option<Blocks<'a>>,
}

impl<'a> Source<'a> {
    /// Describes the rows of a tensor from row `first` on.
    pub(crate) fn rows(tensor: &'a Tensor, first: usize) -> Self {
        let stride = tensor.cols();
        let elements = Elements::from_tensor(tensor);
        Self { elements, offset: first * stride, stride, gap: None, indices: None, blocks: None }
    }

    /// Describes matrix `index` of a stack of matrices of `rows` rows. In a stack of [pieces](Tensor::pieces) it has
    /// as many in every matrix: one, or two halves in the same memory; otherwise it is gathered.
    pub(crate) fn matrix(stack: &'a Tensor, index: usize, rows: usize) -> Self {
        match matrix_pieces(stack, index, rows) {
            Some([whole]) => Self::rows(whole, 0),
            Some([first, second]) if let Some((elements, places)) = Elements::span(first, second) => {
                Self::halves(elements, places, first)
            }
            _ => Self::rows(stack, index * rows),
        }
    }

    /// Describes rows of quantized weights.
    pub(crate) fn blocks(blocks: Blocks<'a>, depth: usize) -> Self {
        let elements = Elements::Bf16(&[]);
        Self { elements, offset: 0, stride: depth, gap: None, indices: None, blocks: Some(blocks) }
    }

    /// Describes rows like those of `first`, which begin at one place among the elements, and as many more at
    /// another.
    fn halves(elements: Elements<'a>, [offset, second]: [usize; 2], first: &Tensor) -> Self {
        let (rows, stride) = (first.rows(), first.cols());
        let gap = Some((rows, second.wrapping_sub(offset + rows * stride)));
        Self { elements, offset, stride, gap, indices: None, blocks: None }
    }

    /// Describes the rows of a tensor that `indices` name.
    pub(crate) fn gathered(tensor: &'a Tensor, indices: &'a [u32]) -> Self {
        Self { indices: Some(indices), ..Self::rows(tensor, 0) }
    }

    /// Skips the rows before `first`.
    pub(crate) fn skip_rows(self, first: usize) -> Self {
        if let Some(indices) = self.indices {
            return Self { indices: Some(&indices[first..]), ..self };
        }
        let gap = self.gap.map(|(row, gap)| (row.saturating_sub(first), gap));
        // If all rows are in the second half, the gap becomes part of the offset.
        match self.gap {
            Some((row, gap)) if first >= row => {
                Self { offset: (self.offset + first * self.stride).wrapping_add(gap), gap: None, ..self }
            }
            _ => Self { offset: self.offset + first * self.stride, gap, ..self },
        }
    }

    #[inline(always)]
    pub(crate) fn start(&self, row: usize) -> usize {
        let row = self.indices.map_or(row, |indices| indices[row] as usize);
        self.place(row)
    }

    /// Returns the first element of a matrix row.
    #[inline(always)]
    fn place(&self, row: usize) -> usize {
        let start = self.offset + row * self.stride;
        match self.gap {
            Some((first, gap)) if row >= first => start.wrapping_add(gap),
            _ => start,
        }
    }

    /// Returns the first unit of a row from element `at`, if `len` elements can be used in place.
    #[inline(always)]
    pub(crate) fn direct(&self, row: usize, at: usize, len: usize, format: Format) -> Option<*const u32> {
        let start = self.start(row) + at;
        match (self.elements, format.units, format.precision) {
            (Elements::F32(x), Compute::F32, Compute::F32) => Some(x[start..start + len].as_ptr().cast()),
            (Elements::Bf16(x), Compute::Bf16, _)
                if format.parts == 1 && len.is_multiple_of(2) && start.is_multiple_of(2) =>
            {
                Some(x[start..start + len].as_ptr().cast())
            }
            _ => None,
        }
    }

    /// Returns the address of `columns` in the first of the rows `depth`, which run across the depth, if all of them
    /// can become units in place and are `stride` apart.
    #[inline(always)]
    pub(crate) fn across(&self, depth: Span, columns: Span, format: Format) -> Option<*const u32> {
        let num_steps = depth.len.checked_sub(1)?;
        let (first, last) = (self.start(depth.first), self.start(depth.first + num_steps));
        let is_even = self.indices.is_none() && last == first + num_steps * self.stride;
        let is_whole = depth.len.is_multiple_of(format.elements_of(1)) && self.stride.is_multiple_of(2);
        if !is_even || !is_whole || self.blocks.is_some() || !self.is_direct(format) {
            return None;
        }
        let Span { first: column, len } = columns;
        Some(with_elements!(self.elements, x => x[first + column..last + column + len].as_ptr().cast()))
    }

    /// Returns whether rows of an even length can be used in place.
    #[inline(always)]
    pub(crate) fn is_direct(&self, format: Format) -> bool {
        match self.elements {
            Elements::F32(_) => format.units == Compute::F32 && format.precision == Compute::F32,
            Elements::Bf16(_) => format.units == Compute::Bf16 && format.parts == 1,
            Elements::F16(_) => false,
        }
    }

    /// Returns whether rows have to be widened before use.
    #[inline(always)]
    pub(crate) fn is_widened(&self, format: Format) -> bool {
        match self.elements {
            Elements::F32(_) => false,
            Elements::Bf16(_) => format.units == Compute::F32,
            Elements::F16(_) => true,
        }
    }

    /// Returns the address of element `at` of a row.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, at: usize) -> *const u8 {
        if let Some(blocks) = &self.blocks {
            return blocks.address(row, at);
        }
        self.elements.address(self.start(row) + at)
    }

    /// Returns the address of element `at` of the row `ahead` rows later, for prefetches only. After the last row of
    /// a matrix of a stack comes the first of the next one.
    #[inline(always)]
    pub(crate) fn address_later(&self, row: usize, ahead: usize, at: usize) -> *const u8 {
        let start = match self.indices {
            Some(indices) => indices.get(row + ahead).map_or(0, |&row| row as usize * self.stride) + self.offset,
            None => self.place(row + ahead),
        };
        self.elements.address(start + at)
    }

    /// Returns the bytes that so many elements take.
    #[inline(always)]
    pub(crate) fn bytes_of(&self, len: usize) -> usize {
        if let Some(blocks) = &self.blocks {
            return blocks.bytes_of(len);
        }
        self.elements.size() * len
    }

    /// Returns the bytes from one row to the next.
    pub(crate) fn row_step(&self) -> usize {
        self.blocks.map_or_else(|| self.bytes_of(self.stride), |blocks| blocks.row_step())
    }

    /// Converts `len` elements of a row from `at` on to units.
    #[inline(always)]
    pub(crate) fn load<S: Level>(&self, row: usize, at: usize, len: usize, format: Format, to: &mut [u32]) {
        #[cfg(target_arch = "x86_64")]
        if S::WIDTH == super::pack::LANES && format.units == Compute::Bf16 {
            // SAFETY: this level is in use only on machines with AVX-512, and pairs only where they have a product.
            return unsafe { super::pack::convert(self, row, at, len, to) };
        }
        let start = self.start(row) + at;
        match self.elements {
            Elements::F16(x) if format.units == Compute::F32 => widen_row::<S>(&x[start..start + len], to),
            // A bf16 is exact in either precision.
            Elements::Bf16(x) if format.units == Compute::F32 => {
                to.iter_mut().zip(&x[start..start + len]).for_each(|(to, x)| *to = u32::from(x.to_bits()) << 16);
            }
            elements => with_elements!(elements, x => load_row(&x[start..start + len], format, to)),
        }
    }
}

/// Returns the pieces of matrix `index` of a stack of matrices of `rows` rows, if the stack is in such pieces.
pub(crate) fn matrix_pieces(stack: &Tensor, index: usize, rows: usize) -> Option<&[Tensor]> {
    let (pieces, per_matrix) = (stack.pieces()?, rows.checked_div(stack.pieces()?.first()?.rows())?);
    let pieces = pieces.get(index * per_matrix..(index + 1) * per_matrix)?;
    pieces.iter().all(|piece| piece.rows() * per_matrix == rows).then_some(pieces)
}

/// The type that units hold, and the precision of products.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) units: Compute,
    pub(crate) precision: Compute,
    /// Units to a multiple of which the depth is padded.
    pub(crate) multiple: usize,
    /// Number of bf16 that an element is split into: blocks of `multiple` units are followed by as many with the next
    /// part of each element.
    pub(crate) parts: usize,
}

impl Format {
    /// Returns the units that `len` elements fill.
    #[inline(always)]
    pub(crate) fn units_of(self, len: usize) -> usize {
        match self.units {
            Compute::F32 => len,
            Compute::Bf16 => len.div_ceil(2).next_multiple_of(self.multiple) * self.parts,
        }
    }

    /// Returns the elements that so many units hold, which are whole blocks if elements are split.
    #[inline(always)]
    pub(crate) fn elements_of(self, units: usize) -> usize {
        match self.units {
            Compute::F32 => units,
            Compute::Bf16 => 2 * units / self.parts,
        }
    }

    /// Returns an element as f32, rounded to the precision.
    #[inline(always)]
    fn value<T: Float>(self, x: T) -> f32 {
        match self.precision {
            Compute::F32 => x.load(),
            Compute::Bf16 => bf16::store(x.load()).load(),
        }
    }
}

#[inline(always)]
fn half<T: Float>(x: T) -> u32 {
    u32::from(bf16::store(x.load()).to_bits())
}

#[inline(always)]
fn widen_row<S: Level>(from: &[f16], to: &mut [u32]) {
    let (whole, to) = (from.len() / S::WIDTH * S::WIDTH, &mut to[..from.len()]);
    for at in (0..whole).step_by(S::WIDTH) {
        // SAFETY: a vector of elements is there, and as many words may be written.
        unsafe { S::store(to.as_mut_ptr().add(at).cast(), S::load_halves(from.as_ptr().add(at))) };
    }
    to[whole..].iter_mut().zip(&from[whole..]).for_each(|(to, &x)| *to = x.load().to_bits());
}

#[inline(always)]
fn load_row<T: Float>(from: &[T], format: Format, to: &mut [u32]) {
    match format.units {
        Compute::F32 => {
            for (to, &x) in to.iter_mut().zip(from) {
                *to = format.value(x).to_bits();
            }
        }
        Compute::Bf16 => {
            let (pairs, rest) = from.as_chunks::<2>();
            for (to, &[low, high]) in to.iter_mut().zip(pairs) {
                *to = half(low) | (half(high) << 16);
            }
            if let [low] = rest {
                to[pairs.len()] = half(*low);
            }
        }
    }
}

/// A block of a source: some rows, and some elements of each.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) rows: Span,
    pub(crate) columns: Span,
}

/// Columns converted at a time: long loops vectorise well, and the row stays in the L1 cache.
const BATCH: usize = 1024;

/// Packs panels of a source whose rows run across the depth: the rows `depth`, of these the columns of the panels
/// `range`, each panel as `[unit][width]` with zeros beyond the last column.
#[inline(always)]
pub(crate) fn pack_straight<S: Level>(
    source: &Source<'_>,
    depth: Span,
    panels: &Panels,
    range: Range<usize>,
    format: Format,
    to: &mut [u32],
) {
    #[cfg(target_arch = "x86_64")]
    if S::WIDTH == super::pack::LANES && !range.is_empty() {
        let columns = super::pack::Columns { source, depth, panels, range: range.clone(), format };
        // SAFETY: this level is in use only on machines with AVX-512, and pairs only where they have a product.
        if unsafe { columns.pack(to) } {
            return;
        }
    }
    with_elements!(source.elements, x => straight(source, x, depth, panels, range, format, to));
}

#[inline(always)]
fn straight<T: Float>(
    source: &Source<'_>,
    x: &[T],
    depth: Span,
    panels: &Panels,
    range: Range<usize>,
    format: Format,
    mut to: &mut [u32],
) {
    let Span { first, len: depth } = depth;
    let num_units = format.units_of(depth);
    let is_copy = T::DTYPE == DType::F32 && format.units == Compute::F32 && format.precision == Compute::F32;
    let mut buffer = [0; BATCH];
    let mut batch = range;
    while !batch.is_empty() {
        let (column, ..) = panels.panel(batch.start);
        let end = |panel: usize| panels.panel(panel).0 + panels.panel(panel).1 - column;
        let next = (batch.start + 1..batch.end).find(|&panel| end(panel) > BATCH).unwrap_or(batch.end);
        let columns = end(next - 1);
        let row = |k: usize| &x[source.start(first + k) + column..][..columns];
        let width: usize = (batch.start..next).map(|panel| panels.panel(panel).2).sum();
        let (now, later) = to.split_at_mut(num_units * width);
        to = later;
        for unit in 0..num_units {
            let units = &mut buffer[..columns];
            match format.units {
                Compute::F32 if is_copy => {}
                Compute::F32 => load_values(row(unit), format, units),
                Compute::Bf16 if 2 * unit + 1 < depth => {
                    let (k, l) = (2 * unit, 2 * unit + 1);
                    for ((to, &low), &high) in units.iter_mut().zip(row(k)).zip(row(l)) {
                        *to = half(low) | (half(high) << 16);
                    }
                }
                Compute::Bf16 => {
                    for (to, &low) in units.iter_mut().zip(row(2 * unit)) {
                        *to = half(low);
                    }
                }
            }
            let units: &[u32] = if is_copy { bytemuck::cast_slice(row(unit)) } else { units };
            let mut start = 0;
            for panel in batch.start..next {
                let (at, columns, width) = panels.panel(panel);
                copy(&units[at - column..][..columns], &mut now[start + unit * width..][..width]);
                start += num_units * width;
            }
        }
        batch.start = next;
    }
}

#[inline(always)]
fn load_values<T: Float>(from: &[T], format: Format, to: &mut [u32]) {
    to.iter_mut().zip(from).for_each(|(to, &x)| *to = format.value(x).to_bits());
}

/// Copies a row of a panel and pads it with zeros.
#[inline(always)]
fn copy(from: &[u32], to: &mut [u32]) {
    #[inline(always)]
    fn whole<const WIDTH: usize>(from: &[u32], to: &mut [u32]) -> bool {
        match (from.as_array::<WIDTH>(), to.as_mut_array::<WIDTH>()) {
            (Some(from), Some(to)) => {
                *to = *from;
                true
            }
            _ => false,
        }
    }
    // Copies of lengths known to the compiler are a few moves; others are a call.
    let is_copied = whole::<48>(from, to)
        || whole::<16>(from, to)
        || whole::<8>(from, to)
        || whole::<6>(from, to)
        || whole::<32>(from, to)
        || whole::<12>(from, to)
        || whole::<4>(from, to);
    if !is_copied {
        let (whole, rest) = to.split_at_mut(from.len());
        whole.copy_from_slice(from);
        rest.fill(0);
    }
}

/// Packs a block whose rows run along the depth, transposed: `to[unit][width]`, zeros beyond the block's rows.
#[inline(always)]
pub(crate) fn pack_transposed<S: Level>(
    source: &Source<'_>,
    block: Block,
    format: Format,
    width: usize,
    to: &mut [u32],
) {
    with_elements!(source.elements, x => transposed::<S, _>(source, x, block, format, width, to));
}

#[inline(always)]
fn transposed<S: Level, T: Float>(
    source: &Source<'_>,
    x: &[T],
    block: Block,
    format: Format,
    width: usize,
    to: &mut [u32],
) {
    let (Span { first, len: rows }, Span { first: column, len: depth }) = (block.rows, block.columns);
    let num_units = format.units_of(depth);
    let to = &mut to[..num_units * width];
    let lanes = S::WIDTH.max(8);
    for tile in (0..width).step_by(lanes) {
        let tile_rows = rows.saturating_sub(tile).min(lanes);
        let tile_width = (width - tile).min(lanes);
        let mut done = 0;
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if tile_rows == lanes && num_units > 0 {
            let row = |r: usize| &x[source.start(first + tile + r) + column..][..depth];
            let to = &mut to[tile..];
            // SAFETY: levels of these widths are in use only on machines with AVX-512, and with AVX2 or NEON.
            done = unsafe {
                match S::WIDTH {
                    #[cfg(target_arch = "x86_64")]
                    16 => super::transpose::units(&std::array::from_fn::<_, 16, _>(row), format, width, to),
                    8 => super::transpose::units_of_8(&std::array::from_fn::<_, 8, _>(row), format, width, to),
                    _ => 0,
                }
            };
        }
        for unit in done..num_units {
            let to = &mut to[unit * width + tile..][..tile_width];
            for (r, to) in to.iter_mut().enumerate() {
                *to = if r < tile_rows {
                    let start = source.start(first + tile + r) + column;
                    match format.units {
                        Compute::F32 => format.value(x[start + unit]).to_bits(),
                        Compute::Bf16 if 2 * unit + 1 < depth => {
                            half(x[start + 2 * unit]) | (half(x[start + 2 * unit + 1]) << 16)
                        }
                        Compute::Bf16 => half(x[start + 2 * unit]),
                    }
                } else {
                    0
                };
            }
        }
    }
}
