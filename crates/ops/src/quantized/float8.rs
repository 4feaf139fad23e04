//! Weights in FP8 (E4M3) with a scale for each 128 of them, as DeepSeek-V3 was published: products with few rows of
//! activations, which are rounded to bf16, and conversion to the nearest bf16.
//!
//! An E4M3 float has a mantissa of four bits and is exact as bf16, so within a block products are those of bf16
//! numbers. Scales are f32.

use bytemuck::{Pod, Zeroable};
use moeworks_tensor::{F8_BLOCK_LEN, F8Block, f8_value};

use super::blocks_of;
use super::kernel::{MAX_FEW, Panel, write_column};
use super::layouts::Values;
use super::rows::Quad;
use crate::Isa;
use crate::gemm::kernel::Tile;
use crate::simd::{Float, LANES, kernel};

/// A block of FP8 floats.
pub(super) trait Floats: Pod + Send + Sync {
    /// Bytes of the scale if it is in a tensor of its own, otherwise 0.
    const SPLIT_BYTES: usize;

    fn values(&self) -> &[u8; F8_BLOCK_LEN];

    /// Returns the scale; `split_scale` holds its bytes if it is in a tensor of its own.
    fn scale(&self, split_scale: &[u8]) -> f32;
}

/// The floats of an [`F8Block`] whose scale is in a tensor of its own.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct F8Values([[u8; 32]; F8_BLOCK_LEN / 32]);

impl Floats for F8Values {
    const SPLIT_BYTES: usize = 4;

    #[inline(always)]
    fn values(&self) -> &[u8; F8_BLOCK_LEN] {
        bytemuck::cast_ref(&self.0)
    }

    #[inline(always)]
    fn scale(&self, split_scale: &[u8]) -> f32 {
        f32::from_le_bytes([split_scale[0], split_scale[1], split_scale[2], split_scale[3]])
    }
}

impl Floats for F8Block {
    const SPLIT_BYTES: usize = 0;

    #[inline(always)]
    fn values(&self) -> &[u8; F8_BLOCK_LEN] {
        bytemuck::cast_ref(&self.values)
    }

    #[inline(always)]
    fn scale(&self, _: &[u8]) -> f32 {
        f32::from_le_bytes(self.scale)
    }
}

macro_rules! values {
    ($($block:ty),*) => {$(
        impl Values for $block {
            const LEN: usize = F8_BLOCK_LEN;
            const SPLIT_BYTES: usize = <Self as Floats>::SPLIT_BYTES;

            #[inline(always)]
            fn decode(&self, split_scale: &[u8], to: &mut [f32]) {
                let scale = self.scale(split_scale);
                to.iter_mut().zip(self.values()).for_each(|(to, &byte)| *to = scale * value(byte));
            }
        }
    )*};
}

values!(F8Values, F8Block);

/// Returns the value of a byte by operations that vectors have: its bits at the top of an f32 are 2^120 times too
/// small.
#[inline(always)]
fn value(byte: u8) -> f32 {
    const TWO_TO_120: f32 = f32::from_bits((127 + 120) << 23);
    let (sign, size) = (u32::from(byte & 0x80) << 24, u32::from(byte & 0x7f));
    let size = if size == 0x7f { f32::NAN.to_bits() } else { size << 20 };
    TWO_TO_120 * f32::from_bits(sign | size)
}

/// The value of each byte.
#[cfg(target_arch = "x86_64")]
const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = f8_value(byte as u8);
        byte += 1;
    }
    values
};

/// Returns whether the machine has the byte permutation of VBMI and the product of bf16 pairs.
#[cfg(target_arch = "x86_64")]
pub(super) fn is_fast(isa: Isa) -> bool {
    isa >= Isa::Avx512Bf16 && std::arch::is_x86_feature_detected!("avx512vbmi")
}

/// Evaluates an expression with a type name bound to the FP8 blocks of a layout.
macro_rules! with_floats {
    ($layout:expr, $B:ident => $body:expr) => {
        $crate::quantized::with_block!($layout, $B => $body, (F8 true F8Values, F8 false F8Block))
    };
}
pub(super) use with_floats;

/// Computes the sums of a panel as [`kernel::run`](super::kernel::run) does, with compiled loops.
pub(super) fn plain(isa: Isa, panel: Panel<'_>, tiles: &mut [Tile]) {
    with_floats!(panel.weights.layout, B => plain_kernel::<B>(isa, panel, tiles));
}

kernel! {
    fn plain_kernel<S: Level, B: Floats>(panel: Panel<'_>, tiles: &mut [Tile]) {
        let Panel { weights, columns, a, tile_step, .. } = panel;
        for column in 0..columns {
            let scales = weights.scales.row(column);
            let mut sums = [[0.0_f32; LANES]; MAX_FEW];
            for (index, block) in blocks_of::<B>(weights.numbers.row(column)).iter().enumerate() {
                let scale = block.scale(&scales[index * B::SPLIT_BYTES..]);
                let mut values = [0.0_f32; F8_BLOCK_LEN];
                values.iter_mut().zip(block.values()).for_each(|(to, &byte)| *to = value(byte));
                for (sum, a) in sums.iter_mut().zip(a) {
                    let mut parts = [0.0_f32; LANES];
                    for (values, a) in values.as_chunks::<LANES>().0.iter().zip(a[index].floats().as_chunks::<LANES>().0) {
                        for ((part, &value), a) in parts.iter_mut().zip(values).zip(a) {
                            *part = S::mul_add(value, a.load(), *part);
                        }
                    }
                    sum.iter_mut().zip(parts).for_each(|(sum, part)| *sum = S::mul_add(scale, part, *sum));
                }
            }
            let sums = sums.map(|parts| parts.iter().sum::<f32>());
            write_column(&sums[..a.len()], column, tile_step, tiles);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use vectors::{run, write};

#[cfg(target_arch = "x86_64")]
mod vectors {
    use core::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_si256,
        _mm512_cmpeq_epi16_mask, _mm512_cvtepu8_epi16, _mm512_cvtph_ps, _mm512_dpbf16_ps, _mm512_extracti64x4_epi64,
        _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_si512, _mm512_mask_mov_epi16, _mm512_mul_ps, _mm512_or_si512,
        _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_slli_epi16, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
    };
    use std::mem::transmute;

    use moeworks_tensor::F8_BLOCK_LEN;

    use super::{Floats, Panel, Quad, Tile, VALUES, blocks_of};
    use crate::prefetch::prefetch_far;
    use crate::quantized::kernel::{with_rows, write_column};
    use crate::quantized::store_bf16::StoreNumbers;
    use crate::simd::{Avx512, Level};

    /// Returns the low or the high bytes of the first 128 FP8 values as bf16. The other values are their negatives.
    const fn bytes(byte: usize) -> [u8; 128] {
        let mut bytes = [0; 128];
        let mut i = 0;
        while i < 128 {
            bytes[i] = VALUES[i].to_le_bytes()[2 + byte];
            i += 1;
        }
        bytes
    }

    static LOW: [u8; 128] = bytes(0);
    static HIGH: [u8; 128] = bytes(1);

    /// The two tables in registers.
    #[derive(Clone, Copy)]
    struct Tables([[__m512i; 2]; 2]);

    impl Tables {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
        fn new() -> Self {
            // SAFETY: tables of 128 bytes.
            let halves = |table: &[u8; 128]| unsafe {
                [_mm512_loadu_si512(table.as_ptr().cast()), _mm512_loadu_si512(table.as_ptr().add(64).cast())]
            };
            Self([halves(&LOW), halves(&HIGH)])
        }

        /// Converts 64 floats to bf16: of each 16 the first eight, and the others.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bf16")]
        fn numbers(&self, floats: __m512i) -> [__m512bh; 2] {
            let Self([low, high]) = self;
            let low = _mm512_permutex2var_epi8(low[0], floats, low[1]);
            let high = _mm512_permutex2var_epi8(high[0], floats, high[1]);
            let high = _mm512_or_si512(high, _mm512_and_si512(floats, _mm512_set1_epi8(i8::MIN)));
            // SAFETY: these rename 512 bits.
            unsafe {
                [
                    transmute::<__m512i, __m512bh>(_mm512_unpacklo_epi8(low, high)),
                    transmute::<__m512i, __m512bh>(_mm512_unpackhi_epi8(low, high)),
                ]
            }
        }
    }

    /// Computes the sums of a panel as [`kernel::run`](crate::quantized::kernel::run) does.
    ///
    /// # Safety
    /// The machine must have the instructions that [`is_fast`](super::is_fast) checks. Rows of activations must be in
    /// the format
    /// [`ActivationFormat::InterleavedFloats`](crate::quantized::rows::ActivationFormat::InterleavedFloats), with as
    /// many quads as a row of weights has blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
    pub(in crate::quantized) unsafe fn run(panel: Panel<'_>, tiles: &mut [Tile]) {
        // SAFETY: the caller's promise.
        with_floats!(panel.weights.layout, B => unsafe { columns::<B>(panel, tiles) });
    }

    /// # Safety
    /// As for [`run`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
    unsafe fn columns<B: Floats>(panel: Panel<'_>, tiles: &mut [Tile]) {
        let Panel { weights, columns, a, tile_step, .. } = panel;
        let (tables, pass, rows_ahead) = (Tables::new(), panel.pass(), panel.rows_ahead());
        for column in 0..columns {
            let row = Row {
                tables: &tables,
                blocks: blocks_of::<B>(weights.numbers.row(column)),
                scales: weights.scales.row(column),
                ahead: panel.ahead(column, rows_ahead).numbers.address(0),
            };
            let mut all = [0.0; super::MAX_FEW];
            for (a, sums) in a.chunks(pass).zip(all.chunks_mut(pass)) {
                // SAFETY: the caller's promise.
                with_rows!(a, rows => unsafe { row.sums(rows, sums) });
            }
            write_column(&all[..a.len()], column, tile_step, tiles);
        }
    }

    /// A row of weights.
    struct Row<'a, B> {
        tables: &'a Tables,
        blocks: &'a [B],
        /// Its scales, if they are in a tensor of their own.
        scales: &'a [u8],
        /// The bytes of a row some rows later, to be prefetched.
        ahead: *const u8,
    }

    impl<B: Floats> Row<'_, B> {
        /// Computes the sums with some rows of activations.
        ///
        /// # Safety
        /// As for [`run`].
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
        unsafe fn sums<const R: usize>(&self, a: [&[Quad]; R], to: &mut [f32]) {
            let mut totals = [_mm512_setzero_ps(); R];
            for (index, block) in self.blocks.iter().enumerate() {
                for line in (0..size_of::<B>()).step_by(64) {
                    prefetch_far(self.ahead.wrapping_add(index * size_of::<B>() + line));
                }
                let scale = _mm512_set1_ps(block.scale(&self.scales[index * B::SPLIT_BYTES..]));
                let at = block.values().as_ptr();
                // SAFETY: a block has 128 floats.
                let (first, second) = unsafe { (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())) };
                let numbers = [self.tables.numbers(first), self.tables.numbers(second)];
                for (total, a) in totals.iter_mut().zip(a) {
                    *total = _mm512_fmadd_ps(products(&numbers, &a[index]), scale, *total);
                }
            }
            to.iter_mut().zip(totals).for_each(|(to, total)| *to = Avx512::total(total));
        }
    }

    /// Returns the sums of the products of 128 interleaved numbers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma")]
    fn products(numbers: &[[__m512bh; 2]; 2], a: &Quad) -> __m512 {
        let a = |at: usize| -> __m512bh {
            // SAFETY: a quad is aligned to a cache line and has four; the transmute renames 512 bits.
            unsafe { transmute::<__m512i, __m512bh>(_mm512_load_si512(a.floats().as_ptr().add(32 * at).cast())) }
        };
        let zero = _mm512_setzero_ps();
        let first = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, numbers[0][0], a(0)), numbers[0][1], a(1));
        let second = _mm512_dpbf16_ps(_mm512_dpbf16_ps(zero, numbers[1][0], a(2)), numbers[1][1], a(3));
        _mm512_add_ps(first, second)
    }

    /// Converts the floats of some blocks, as many as `to` holds, a multiple of 32.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C, and the instructions of `P`.
    #[inline(always)]
    pub(in crate::quantized) unsafe fn write<B: Floats, P: StoreNumbers>(
        blocks: &[B],
        scales: &[u8],
        to: &mut [P::Number],
    ) {
        for (index, (block, to)) in blocks.iter().zip(to.chunks_mut(F8_BLOCK_LEN)).enumerate() {
            // The same bits as f16 are 256 times smaller; the product of both factors is exact.
            let scale = 256.0 * block.scale(&scales[index * B::SPLIT_BYTES..]);
            for (values, to) in block.values().as_chunks::<32>().0.iter().zip(to.as_chunks_mut::<32>().0) {
                // SAFETY: the caller's promise; 32 bytes are read.
                unsafe {
                    let scale = _mm512_set1_ps(scale);
                    let [first, second] = as_halves(_mm512_cvtepu8_epi16(_mm256_loadu_si256(values.as_ptr().cast())));
                    P::store([_mm512_mul_ps(first, scale), _mm512_mul_ps(second, scale)], to);
                }
            }
        }
    }

    /// Reads 32 floats, one in each 16 bits, as f16, with sign and remaining bits moved to their places.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
    fn as_halves(words: __m512i) -> [__m512; 2] {
        let size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
        let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(words, _mm512_set1_epi16(0x80)));
        let halves = _mm512_or_si512(_mm512_slli_epi16::<7>(size), sign);
        let is_nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
        let halves = _mm512_mask_mov_epi16(halves, is_nan, _mm512_set1_epi16(0x7e00));
        [_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves))]
    }
}
