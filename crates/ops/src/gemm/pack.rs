//! Packing with AVX-512: operands whose rows run across the depth, and rows that are converted to pairs of bf16.
//!
//! Sixteen elements are read at a time from one row of the depth (units of f32) or from two (pairs of bf16), which
//! gives a vector of 16 units. Rows are read from end to end, and all panels grow together.

use core::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm256_maskz_loadu_epi16, _mm512_add_epi16,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_castsi512_si256, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
    _mm512_cvtneps_pbh, _mm512_cvtph_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps,
    _mm512_or_si512, _mm512_permutex2var_epi16, _mm512_set1_epi16, _mm512_shuffle_i64x2, _mm512_slli_epi32,
    _mm512_storeu_si512,
};

use std::ops::Range;

use moeworks_tensor::DType;

use super::source::{Elements, Format, Source};
use super::tasks::Panels;
use super::{Compute, Span};
use crate::prefetch::prefetch_far;
use crate::simd::Float;

/// Lanes of a vector, each of one unit.
pub(super) const LANES: usize = 16;

/// Rows that are prefetched ahead of those being packed.
const ROWS_AHEAD: usize = 16;

/// The columns to pack: rows `depth` of the source, of these the columns of the panels `range`.
pub(super) struct Columns<'a> {
    pub(super) source: &'a Source<'a>,
    pub(super) depth: Span,
    pub(super) panels: &'a Panels,
    pub(super) range: Range<usize>,
    pub(super) format: Format,
}

impl Columns<'_> {
    /// Packs the panels one after the other, each `[unit][width]`, with zeros beyond the last column and the end of
    /// the depth. Returns false if that needs rounding on a machine without a bf16 product, which is not done here.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ and VL, and AVX-512 BF16 where units are pairs of bf16.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, to: &mut [u32]) -> bool {
        if self.format.parts > 1 {
            // SAFETY: elements are split only where there are tiles, and with them all these instructions.
            unsafe { super::amx::pack_bf16x3(self, to) };
            return true;
        }
        // SAFETY: the caller's promise is handed on.
        unsafe {
            match (self.source.elements, self.format.units, self.format.precision) {
                (Elements::F32(x), Compute::Bf16, _) => pack_pairs(self, x, to),
                (Elements::Bf16(x), Compute::Bf16, _) => pack_pairs(self, x, to),
                (Elements::F32(x), Compute::F32, Compute::F32) => pack_singles(self, x, to),
                (Elements::F16(x), Compute::F32, Compute::F32) => pack_singles(self, x, to),
                (Elements::Bf16(x), Compute::F32, _) => pack_singles(self, x, to),
                _ => return false,
            }
        }
        true
    }

    /// Returns the `SIZE` rows of unit `unit` of `x`, from the first packed column to the last.
    #[inline(always)]
    pub(super) fn rows<'x, T: Copy, const SIZE: usize>(&self, x: &'x [T], unit: usize) -> [&'x [T]; SIZE] {
        let (first, end) = self.span();
        // A loop, because library functions that take closures would not be inlined here.
        let mut rows = [&x[..0]; SIZE];
        for (index, to) in (SIZE * unit..).zip(&mut rows) {
            let row = if index < self.depth.len { Some(self.depth.first + index) } else { None };
            *to = row_of(self.source, x, row, first, end - first);
        }
        rows
    }

    /// Returns the first column, and the one after the last.
    #[inline(always)]
    fn span(&self) -> (usize, usize) {
        let (last, columns, _) = self.panels.panel(self.range.end - 1);
        (self.panels.panel(self.range.start).0, last + columns)
    }

    /// Prefetches the rows that come [`ROWS_AHEAD`] after those of a unit.
    #[inline(always)]
    fn prefetch(&self, unit: usize, size: usize) {
        for row in size * unit..(size * (unit + 1)).min(self.depth.len) {
            self.prefetch_row(row, ROWS_AHEAD);
        }
    }

    /// Prefetches the row that comes `ahead` rows after `row`.
    #[inline(always)]
    pub(super) fn prefetch_row(&self, row: usize, ahead: usize) {
        let (first, end) = self.span();
        let bytes = self.source.bytes_of(end - first);
        let later = self.source.address_later(self.depth.first + row, ahead, first);
        (0..bytes).step_by(64).for_each(|line| prefetch_far(later.wrapping_add(line)));
    }
}

/// Defines a function compiled with the given CPU features.
macro_rules! in_vectors {
    ($features:literal, $(#[$meta:meta])* $vis:vis fn $name:ident[$($T:tt)*]($($arg:tt)*) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = $features)]
        $vis fn $name<$($T)*>($($arg)*) $(-> $result)? $body
    };
}

/// Defines a function that packs columns, in units that `$fetch` makes of `$size` rows.
macro_rules! packing {
    ($name:ident, $features:literal, $size:literal, $fetch:ident, $fill:ident) => {
        in_vectors! {
            $features,
            fn $name[T: Float](columns: &Columns<'_>, x: &[T], to: &mut [u32]) {
                let num_units = columns.format.units_of(columns.depth.len);
                // Two units of a narrow panel fill a cache line.
                for unit in (0..num_units).step_by(2) {
                    let rows: [[&[T]; $size]; 2] = [columns.rows(x, unit), columns.rows(x, unit + 1)];
                    columns.prefetch(unit, $size);
                    columns.prefetch(unit + 1, $size);
                    let num_rows = (num_units - unit).min(2);
                    let (mut start, mut at, mut panel) = (0, 0, columns.range.start);
                    while panel < columns.range.end {
                        let width = columns.panels.width(panel);
                        if width == LANES / 2 {
                            let (low, high) = ($fetch(&rows[0], at), $fetch(&rows[1], at));
                            let places = [start + unit * width, start + (num_units + unit) * width];
                            let num_panels = (columns.range.end - panel).min(2);
                            store_halves(low, high, num_rows, &places[..num_panels], to);
                            (start, at, panel) = (start + 2 * num_units * width, at + 2 * width, panel + 2);
                        } else {
                            for (unit, rows) in (unit..).zip(&rows).take(num_rows) {
                                let to = &mut to[start + unit * width..][..width];
                                $fill(rows, at, to);
                            }
                            (start, at, panel) = (start + num_units * width, at + width, panel + 1);
                        }
                    }
                }
            }
        }
    };
}
packing!(pack_singles, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2", 1, single, singles);
packing!(pack_pairs, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2", 2, pair, pairs);

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    pub(super) fn store[](units: __m512i, to: &mut [u32]) {
        let to = &mut to[..LANES];
        // SAFETY: sixteen units may be written there.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), units) }
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    /// Stores the first halves of one or two vectors at one place, and their second halves at the other if it exists.
    fn store_halves[](low: __m512i, high: __m512i, num_rows: usize, places: &[usize], to: &mut [u32]) {
        let halves = [_mm512_shuffle_i64x2::<0x44>(low, high), _mm512_shuffle_i64x2::<0xee>(low, high)];
        for (&at, half) in places.iter().zip(halves) {
            if num_rows == 2 {
                store(half, &mut to[at..]);
            } else {
                // SAFETY: the transmute renames 256 bits.
                let half: [u32; LANES / 2] = unsafe { std::mem::transmute(_mm512_castsi512_si256(half)) };
                to[at..at + LANES / 2].copy_from_slice(&half);
            }
        }
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    /// Loads sixteen elements of a row from `at` on, zeros beyond its end.
    fn single[T: Float](rows: &[&[T]; 1], at: usize) -> __m512i {
        _mm512_castps_si512(widened(rows[0], at))
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    /// Widens the elements of a row from `at` on, in whole vectors.
    fn singles[T: Float](rows: &[&[T]; 1], at: usize, to: &mut [u32]) {
        for (column, to) in (at..).step_by(LANES).zip(to.chunks_exact_mut(LANES)) {
            store(single(rows, column), to);
        }
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    pub(super) fn widened[T: Float](row: &[T], at: usize) -> __m512 {
        let x = row.get(at..).unwrap_or(&[]);
        let mask = mask_of(x.len());
        match T::DTYPE {
            // SAFETY: the mask keeps the load to the elements of the slice.
            DType::F32 => unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr().cast()) },
            DType::F16 => _mm512_cvtph_ps(loaded_halves(x)),
            _ => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(stored_halves(x))),
        }
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    /// Loads sixteen bf16 elements into the low halves of 16 lanes, zeros beyond the end.
    fn stored_halves[T: Float](x: &[T]) -> __m512i {
        _mm512_cvtepu16_epi32(loaded_halves(x))
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2",
    /// Loads sixteen elements of 16 bits, zeros beyond the end.
    fn loaded_halves[T: Float](x: &[T]) -> __m256i {
        assert!(size_of::<T>() == 2, "elements of 16 bits");
        if x.len() >= LANES {
            // SAFETY: sixteen elements of 16 bits are there. Building a mask would take longer than the load.
            return unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        }
        // SAFETY: the mask keeps the load to the elements of the slice, which are of 16 bits.
        unsafe { _mm256_maskz_loadu_epi16(mask_of(x.len()), x.as_ptr().cast()) }
    }
}

/// Returns the mask of the lanes that so many elements fill.
#[inline(always)]
fn mask_of(len: usize) -> u16 {
    if len >= LANES { u16::MAX } else { (1 << len) - 1 }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Pairs sixteen elements of two rows from `at` on, zeros beyond their ends.
    fn pair[T: Float](rows: &[&[T]; 2], at: usize) -> __m512i {
        let [low, high] = [halves(rows[0], at), halves(rows[1], at)];
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Pairs the elements of two rows from `at` on, in whole vectors.
    fn pairs[T: Float](rows: &[&[T]; 2], at: usize, to: &mut [u32]) {
        let [low, high] = rows;
        let len = low.len().min(high.len());
        if T::DTYPE == DType::BF16 && to.len() >= 2 * LANES && len >= at + to.len() {
            // SAFETY: the elements from `at` on are bf16, and as many as there are places.
            return unsafe { pairs_in_place([low[at..].as_ptr().cast(), high[at..].as_ptr().cast()], to) };
        }
        for (column, to) in (at..).step_by(LANES).zip(to.chunks_exact_mut(LANES)) {
            store(pair(rows, column), to);
        }
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Interleaves two vectors of 32 elements of 16 bits: pairs of the first sixteen of both, then of the others.
    pub(super) fn interleave[]([low, high]: [__m512i; 2]) -> [__m512i; 2] {
        /// Indices that interleave the first sixteen elements of two vectors of 32; those of the other sixteen are
        /// sixteen higher.
        const TURNS: [u16; 2 * LANES] = {
            let mut turns = [0; 2 * LANES];
            let mut i = 0;
            while i < 2 * LANES {
                turns[i] = (i / 2 + i % 2 * 2 * LANES) as u16;
                i += 1;
            }
            turns
        };
        // SAFETY: `TURNS` is a vector.
        let first = unsafe { _mm512_loadu_si512(TURNS.as_ptr().cast()) };
        let second = _mm512_add_epi16(first, _mm512_set1_epi16(LANES as i16));
        [_mm512_permutex2var_epi16(low, first, high), _mm512_permutex2var_epi16(low, second, high)]
    }
}

/// Interleaves two rows of elements of 16 bits, two vectors at a time; the last two may overlap those before.
///
/// # Safety
/// The machine must have the instructions; each row must have as many elements as there are places, whole vectors and
/// at least two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
unsafe fn pairs_in_place([low, high]: [*const u16; 2], to: &mut [u32]) {
    let mut at = 0;
    while at < to.len() {
        let from = at.min(to.len() - 2 * LANES);
        // SAFETY: loads and stores are inside what the caller promises.
        unsafe {
            let rows = [_mm512_loadu_si512(low.add(from).cast()), _mm512_loadu_si512(high.add(from).cast())];
            let [first, second] = interleave(rows);
            let to = to.as_mut_ptr().add(from);
            if from == at {
                _mm512_storeu_si512(to.cast(), first);
            }
            _mm512_storeu_si512(to.add(LANES).cast(), second);
        }
        at += 2 * LANES;
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Converts sixteen elements of a row to bf16 in the low halves of 16 lanes.
    fn halves[T: Float](row: &[T], at: usize) -> __m512i {
        if T::DTYPE == DType::BF16 {
            return stored_halves(row.get(at..).unwrap_or(&[]));
        }
        // SAFETY: the transmute renames 256 bits.
        _mm512_cvtepu16_epi32(unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(widened(row, at))) })
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Pairs the elements `at..at + len`, at most 16, of one or two rows (or none).
    pub(super) fn across[](source: &Source<'_>, rows: Span, at: usize, len: usize) -> __m512i {
        let row = |r: usize| if r < rows.len { Some(rows.first + r) } else { None };
        match source.elements {
            Elements::F32(x) => pair(&[0, 1].map(|r| row_of(source, x, row(r), at, len)), 0),
            Elements::Bf16(x) => pair(&[0, 1].map(|r| row_of(source, x, row(r), at, len)), 0),
            Elements::F16(_) => unreachable!("f16 is multiplied in f32"),
        }
    }
}

/// Returns the elements `at..at + len` of a row, or nothing without a row.
#[inline(always)]
fn row_of<'x, T: Copy>(source: &Source<'_>, x: &'x [T], row: Option<usize>, at: usize, len: usize) -> &'x [T] {
    let Some(row) = row else { return &[] };
    let start = source.start(row) + at;
    &x[start..start + len]
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Rounds a row of a source to pairs of bf16.
    pub(super) fn convert[](source: &Source<'_>, row: usize, at: usize, len: usize, to: &mut [u32]) {
        let (whole, rest) = (len / (2 * LANES), len % (2 * LANES));
        for (index, to) in to.chunks_exact_mut(LANES).enumerate().take(whole) {
            store(along(source, row, at + 2 * LANES * index, 2 * LANES), to);
        }
        let mut units = [0; LANES];
        store(along(source, row, at + len - rest, rest), &mut units);
        to[whole * LANES..][..rest.div_ceil(2)].copy_from_slice(&units[..rest.div_ceil(2)]);
    }
}

in_vectors! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2",
    /// Loads the elements `at..at + len` of a row of a source, at most 32, as 16 pairs.
    pub(super) fn along[](source: &Source<'_>, row: usize, at: usize, len: usize) -> __m512i {
        let start = source.start(row) + at;
        let mask = ((1_u64 << len) - 1) as u32;
        match source.elements {
            Elements::F32(x) => {
                let x = &x[start..start + len];
                // SAFETY: the masks keep the loads to the elements of the slice.
                let (low, high) = unsafe {
                    let high = x.as_ptr().wrapping_add(LANES);
                    (_mm512_maskz_loadu_ps(mask as u16, x.as_ptr()), _mm512_maskz_loadu_ps((mask >> 16) as u16, high))
                };
                // SAFETY: the transmute renames 512 bits.
                unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
            }
            Elements::Bf16(x) => {
                let x = &x[start..start + len];
                // SAFETY: as above.
                unsafe { _mm512_maskz_loadu_epi16(mask, x.as_ptr().cast()) }
            }
            Elements::F16(_) => unreachable!("f16 is multiplied in f32"),
        }
    }
}
