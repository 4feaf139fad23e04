//! Elements as sums of three bf16, of which a tile's product takes one at a time.
//!
//! An f32 has 24 bits and a bf16 eight: rounded to bf16 it leaves a remainder of 16 bits and a sign, which is rounded likewise, and what
//! then remains is a bf16 itself. Numbers below 2^-102 are rounded to bf16: tiles take what is below 2^-126 as zero.
//!
//! A unit of a block of the depth is the pair of elements u and u + 16: any order will do as long as both operands have it, and in this
//! one nothing has to be moved between lanes. The three parts of a block of units follow each other, the largest first.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmpge_epu32_mask, _mm512_maskz_mov_epi32, _mm512_maskz_mov_ps, _mm512_or_si512, _mm512_set1_epi32,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_sub_ps,
};

use super::{BLOCK, PARTS};
use crate::gemm::pack::{Columns, store, widened};
use crate::gemm::source::{Elements, Source, with_elements};
use crate::simd::Float;

/// The instructions that every machine with tiles has and that this uses.
macro_rules! in_vectors {
    ($(#[$meta:meta])* $vis:vis fn $name:ident$([$T:ident])?($($arg:tt)*) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
        $vis fn $name$(<$T: Float>)?($($arg)*) $(-> $result)? $body
    };
}

in_vectors! {
    /// Pairs of a lane of both, by part.
    fn pairs(low: __m512, high: __m512) -> [__m512i; PARTS] {
        let (low, high, mut units) = (parts_of(low), parts_of(high), [_mm512_set1_epi32(0); PARTS]);
        for ((low, high), units) in low.into_iter().zip(high).zip(&mut units) {
            *units = _mm512_or_si512(_mm512_srli_epi32::<16>(low), high);
        }
        units
    }
}

in_vectors! {
    /// Three bf16 that add up to each element, in the upper halves of lanes. Of an element that is not finite, or rounded is not, at
    /// least one is not a number, or two are infinite and of different signs.
    fn parts_of(x: __m512) -> [__m512i; PARTS] {
        /// The bits of 2^-102 without the sign. What remains of a smaller number would be denormal, which takes a hundred times as long.
        const LEAST: i32 = (127 - 102) << 24;
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let has_rest = _mm512_cmpge_epu32_mask(_mm512_slli_epi32::<1>(_mm512_castps_si512(x)), _mm512_set1_epi32(LEAST));
        let mut parts = [upper; PARTS];
        let mut rest = x;
        for part in &mut parts[..PARTS - 1] {
            // Half of the lowest bit that stays.
            let rounded = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
            *part = _mm512_and_si512(rounded, upper);
            // Not a subtraction under a mask, which takes as long for what it leaves out.
            let taken = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(has_rest, *part));
            rest = _mm512_sub_ps(_mm512_maskz_mov_ps(has_rest, rest), taken);
        }
        parts[PARTS - 1] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
        parts
    }
}

in_vectors! {
    /// The elements `at..at + len` of a row of a source, at most 32, as units.
    pub(super) fn along(source: &Source<'_>, row: usize, at: usize, len: usize) -> [__m512i; PARTS] {
        let start = source.start(row) + at;
        with_elements!(source.elements, x => {
            let x = &x[start..start + len];
            pairs(widened(x, 0), widened(x, BLOCK))
        })
    }
}

in_vectors! {
    /// The elements `columns.0..columns.0 + columns.1`, at most 16, of unit `unit` of a block of the depth that begins with row `first`
    /// and has so many rows.
    pub(super) fn across(
        source: &Source<'_>,
        (first, rows): (usize, usize),
        unit: usize,
        (column, columns): (usize, usize),
    ) -> [__m512i; PARTS] {
        with_elements!(source.elements, x => {
            let mut both = [&x[..0]; 2];
            for (row, to) in [unit, BLOCK + unit].into_iter().zip(&mut both) {
                if row < rows {
                    *to = &x[source.start(first + row) + column..][..columns];
                }
            }
            pairs(widened(both[0], 0), widened(both[1], 0))
        })
    }
}

in_vectors! {
    /// Packs panels of rows across the depth, one after the other, each `[unit][width]`.
    pub(in crate::gemm) fn panels(columns: &Columns<'_>, to: &mut [u32]) {
        match columns.source.elements {
            Elements::F32(x) => panels_of(columns, x, to),
            Elements::Bf16(x) => panels_of(columns, x, to),
            Elements::F16(x) => panels_of(columns, x, to),
        }
    }
}

in_vectors! {
    fn panels_of[T](columns: &Columns<'_>, x: &[T], to: &mut [u32]) {
        let num_units = columns.format.units_of(columns.depth.1);
        for block in 0..num_units / (PARTS * BLOCK) {
            for unit in 0..BLOCK {
                // Units of pairs that follow each other would be 16 to a block.
                let (low, high) = (2 * BLOCK * block + unit, 2 * BLOCK * block + BLOCK + unit);
                let [[low], [high]]: [[&[T]; 1]; 2] = [columns.rows(x, low), columns.rows(x, high)];
                // Those of the next block.
                columns.prefetch_row(2 * BLOCK * block + unit, 2 * BLOCK);
                columns.prefetch_row(2 * BLOCK * block + BLOCK + unit, 2 * BLOCK);
                let (mut start, mut at) = (0, 0);
                for panel in columns.range.clone() {
                    let width = columns.panels.width(panel);
                    let place = start + (PARTS * BLOCK * block + unit) * width;
                    for column in (0..width).step_by(BLOCK) {
                        let units = pairs(widened(low, at + column), widened(high, at + column));
                        for (part, units) in units.into_iter().enumerate() {
                            store(units, &mut to[place + part * BLOCK * width + column..]);
                        }
                    }
                    (start, at) = (start + num_units * width, at + width);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "parts_tests.rs"]
mod tests;
