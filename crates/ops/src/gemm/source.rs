//! Where a product finds its elements, and how they are brought into the form that kernels take.
//!
//! A unit is one f32 or a pair of bf16 that are neighbours along the depth (see [`kernel`](super::kernel)). Packing turns
//! elements of any type into units of either kind; a matrix whose precision is bf16 has its f32 elements rounded here.

use std::ops::Range;

use moeworks_tensor::{DType, Element, Tensor, bf16, f16};

use super::Compute;
use super::tasks::Panels;
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
    pub(crate) fn of(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(tensor.f32s()),
            DType::BF16 => Self::Bf16(tensor.bf16s()),
            DType::F16 => Self::F16(tensor.slice()),
            dtype => panic!("a product of {dtype:?}"),
        }
    }

    /// The span of two tensors of one type, and where each begins.
    fn span(first: &'a Tensor, second: &Tensor) -> Option<(Self, [usize; 2])> {
        fn of<'a, T: Element>(
            tensors: (&'a Tensor, &Tensor),
            make: impl Fn(&'a [T]) -> Elements<'a>,
        ) -> Option<(Elements<'a>, [usize; 2])> {
            tensors.0.span(tensors.1).map(|(elements, places)| (make(elements), places))
        }
        match first.dtype() {
            DType::F32 => of((first, second), Self::F32),
            DType::BF16 => of((first, second), Self::Bf16),
            _ => of((first, second), Self::F16),
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

    /// Where element `at` would lie, in bytes from anywhere.
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
    /// Rows from this one on lie so many elements further (modulo all counts) than the stride says: the second half of a
    /// matrix whose halves are apart in a file. All rows without.
    pub(crate) gap: Option<(usize, usize)>,
    /// Which row of the matrix each row is; the same one without.
    pub(crate) indices: Option<&'a [u32]>,
    /// Rows in blocks of small integers instead of the elements, of which there are none then: what products with `turned`
    /// weights alone take.
    pub(crate) blocks: Option<Blocks<'a>>,
}

impl<'a> Source<'a> {
    /// The rows of a tensor from row `first` on.
    pub(crate) fn rows(tensor: &'a Tensor, first: usize) -> Self {
        let stride = tensor.cols();
        let elements = Elements::of(tensor);
        Self { elements, offset: first * stride, stride, gap: None, indices: None, blocks: None }
    }

    /// The rows of matrix `index` of a stack whose matrices have `rows` rows each. One of [pieces](Tensor::pieces) has as many
    /// in every matrix, one or two halves in the same memory, or is gathered.
    pub(crate) fn matrix(stack: &'a Tensor, index: usize, rows: usize) -> Self {
        match matrix_pieces(stack, index, rows) {
            Some([whole]) => Self::rows(whole, 0),
            Some([first, second]) if let Some((elements, places)) = Elements::span(first, second) => {
                Self::halves(elements, places, first)
            }
            _ => Self::rows(stack, index * rows),
        }
    }

    /// Rows of weights in blocks.
    pub(crate) fn blocks(blocks: Blocks<'a>, depth: usize) -> Self {
        let elements = Elements::Bf16(&[]);
        Self { elements, offset: 0, stride: depth, gap: None, indices: None, blocks: Some(blocks) }
    }

    /// Rows like those of `first`, which begin at one place among the elements, and as many more at another.
    fn halves(elements: Elements<'a>, [offset, second]: [usize; 2], first: &Tensor) -> Self {
        let (rows, stride) = (first.rows(), first.cols());
        let gap = Some((rows, second.wrapping_sub(offset + rows * stride)));
        Self { elements, offset, stride, gap, indices: None, blocks: None }
    }

    /// The rows of a tensor that `indices` name.
    pub(crate) fn gathered(tensor: &'a Tensor, indices: &'a [u32]) -> Self {
        Self { indices: Some(indices), ..Self::rows(tensor, 0) }
    }

    /// The rows from `first` on.
    pub(crate) fn skip_rows(self, first: usize) -> Self {
        if let Some(indices) = self.indices {
            return Self { indices: Some(&indices[first..]), ..self };
        }
        let gap = self.gap.map(|(row, gap)| (row.saturating_sub(first), gap));
        // Rows that all lie behind the gap have it in their offset.
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

    /// Where a row of the matrix begins.
    #[inline(always)]
    fn place(&self, row: usize) -> usize {
        let start = self.offset + row * self.stride;
        match self.gap {
            Some((first, gap)) if row >= first => start.wrapping_add(gap),
            _ => start,
        }
    }

    /// The first unit of a row from element `at`, if `len` elements can be used where they lie.
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

    /// Of rows across the depth, which are `depth.0 .. depth.0 + depth.1`, `len` elements from one on: where those of the first row lie,
    /// if all can be made units of where they lie, each row as far from the one before as the stride says.
    #[inline(always)]
    pub(crate) fn across(
        &self,
        depth: (usize, usize),
        (column, len): (usize, usize),
        format: Format,
    ) -> Option<*const u32> {
        let num_steps = depth.1.checked_sub(1)?;
        let (first, last) = (self.start(depth.0), self.start(depth.0 + num_steps));
        let is_even = self.indices.is_none() && last == first + num_steps * self.stride;
        let is_whole = depth.1.is_multiple_of(format.elements_of(1)) && self.stride.is_multiple_of(2);
        if !is_even || !is_whole || self.blocks.is_some() || !self.is_direct(format) {
            return None;
        }
        Some(with_elements!(self.elements, x => x[first + column..last + column + len].as_ptr().cast()))
    }

    /// Whether rows of an even length can be used where they lie.
    #[inline(always)]
    pub(crate) fn is_direct(&self, format: Format) -> bool {
        match self.elements {
            Elements::F32(_) => format.units == Compute::F32 && format.precision == Compute::F32,
            Elements::Bf16(_) => format.units == Compute::Bf16 && format.parts == 1,
            Elements::F16(_) => false,
        }
    }

    /// Whether rows are to be widened before they can be used.
    #[inline(always)]
    pub(crate) fn is_widened(&self, format: Format) -> bool {
        match self.elements {
            Elements::F32(_) => false,
            Elements::Bf16(_) => format.units == Compute::F32,
            Elements::F16(_) => true,
        }
    }

    /// Where the elements of a row from `at` on lie, in bytes from anywhere.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, at: usize) -> *const u8 {
        if let Some(blocks) = &self.blocks {
            return blocks.address(row, at);
        }
        self.elements.address(self.start(row) + at)
    }

    /// Where element `at` lies of the row that comes `ahead` rows later: any address, not to be read. Behind the last row of
    /// a matrix of a stack comes the first of the next one.
    #[inline(always)]
    pub(crate) fn address_later(&self, row: usize, ahead: usize, at: usize) -> *const u8 {
        let start = match self.indices {
            Some(indices) => indices.get(row + ahead).map_or(0, |&row| row as usize * self.stride) + self.offset,
            None => self.place(row + ahead),
        };
        self.elements.address(start + at)
    }

    /// Bytes that so many elements take.
    #[inline(always)]
    pub(crate) fn bytes_of(&self, len: usize) -> usize {
        if let Some(blocks) = &self.blocks {
            return blocks.bytes_of(len);
        }
        self.elements.size() * len
    }

    /// Bytes from one row to the next.
    pub(crate) fn row_step(&self) -> usize {
        self.blocks.map_or_else(|| self.bytes_of(self.stride), |blocks| blocks.row_step())
    }

    /// Brings `len` elements of a row from `at` on into units.
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
            // In either precision they are what they are.
            Elements::Bf16(x) if format.units == Compute::F32 => {
                to.iter_mut().zip(&x[start..start + len]).for_each(|(to, x)| *to = u32::from(x.to_bits()) << 16);
            }
            elements => with_elements!(elements, x => load_row(&x[start..start + len], format, to)),
        }
    }
}

/// The pieces of matrix `index` of a stack of matrices of `rows` rows, if it is in such.
pub(crate) fn matrix_pieces(stack: &Tensor, index: usize, rows: usize) -> Option<&[Tensor]> {
    let (pieces, per_matrix) = (stack.pieces()?, rows.checked_div(stack.pieces()?.first()?.rows())?);
    let pieces = pieces.get(index * per_matrix..(index + 1) * per_matrix)?;
    pieces.iter().all(|piece| piece.rows() * per_matrix == rows).then_some(pieces)
}

/// What units hold and in which precision products are taken.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    pub(crate) units: Compute,
    pub(crate) precision: Compute,
    /// Units that the depth is filled up to a multiple of.
    pub(crate) multiple: usize,
    /// How many bf16 an element is the sum of: blocks of `multiple` units are followed by as many with the next part of each element.
    pub(crate) parts: usize,
}

impl Format {
    /// Units that `len` elements fill.
    #[inline(always)]
    pub(crate) fn units_of(self, len: usize) -> usize {
        match self.units {
            Compute::F32 => len,
            Compute::Bf16 => len.div_ceil(2).next_multiple_of(self.multiple) * self.parts,
        }
    }

    /// Elements that so many units hold, which are whole blocks where elements are in parts.
    #[inline(always)]
    pub(crate) fn elements_of(self, units: usize) -> usize {
        match self.units {
            Compute::F32 => units,
            Compute::Bf16 => 2 * units / self.parts,
        }
    }

    /// The f32 that stands for an element.
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
        // SAFETY: a vector of elements is there, and room for as many words.
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

/// A block of a source: rows `rows.0 .. rows.0 + rows.1`, elements `columns.0 .. columns.0 + columns.1` of each.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) rows: (usize, usize),
    pub(crate) columns: (usize, usize),
}

/// Columns that are converted at a time: long loops vectorise well, and the row stays in the first-level cache.
const BATCH: usize = 1024;

/// Packs panels of a source whose rows run across the depth: rows `depth.0 .. depth.0 + depth.1`, of these the columns
/// that the panels `range` cut, each as `[unit][width]`, one after the other, with zeros beyond the last column.
#[inline(always)]
pub(crate) fn pack_straight<S: Level>(
    source: &Source<'_>,
    depth: (usize, usize),
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
    (first, depth): (usize, usize),
    panels: &Panels,
    range: Range<usize>,
    format: Format,
    mut to: &mut [u32],
) {
    let num_units = format.units_of(depth);
    let is_copy = T::DTYPE == DType::F32 && format.units == Compute::F32 && format.precision == Compute::F32;
    let mut room = [0; BATCH];
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
            let units = &mut room[..columns];
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

/// Copies a row of a panel and fills it up with zeros.
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
    // A copy of a length known to the compiler is a few moves; others are a call.
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

/// Packs a block whose rows run across the depth, that is transposes it: `to[unit][width]`, zeros beyond the block's rows.
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
    let ((first, rows), (column, depth)) = (block.rows, block.columns);
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
