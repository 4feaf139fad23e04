//! Blocks turned into the bf16 numbers nearest to what they stand for, for products of many rows.

use moeworks_tensor::{DType, bf16};

use super::kernel::Kernel;
use super::{block_kernel, blocks_of, with_block};
use crate::gemm::Compute;
use crate::gemm::kernel::Kernels;
use crate::parallel::{PIECE, piece_range};
use crate::{Context, Isa};

/// Writes the numbers of blocks, whose bytes these are, to `to`. Those too small for a normal bf16 may become zero.
pub(super) fn to_bf16(ctx: &Context, (dtype, bytes): (DType, &[u8]), to: &mut [bf16]) {
    let is_fast = is_fast(ctx.isa());
    let piece_bytes = PIECE / dtype.block_len() * dtype.size();
    ctx.threads().run_pieces(to, PIECE, |task, to| {
        let bytes = &bytes[piece_range(task, piece_bytes, bytes.len())];
        with_block!(dtype, B => {
            let blocks = blocks_of::<B>(bytes);
            #[cfg(target_arch = "x86_64")]
            if is_fast {
                // SAFETY: `is_fast` has found the instructions.
                return unsafe { vectors::run(blocks, to) };
            }
            block_kernel::<B, bf16>(ctx.isa(), blocks, to);
        });
    });
}

/// Whether the machine has the byte kernels' instructions and rounds to bf16 by itself.
fn is_fast(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512Bf16 && Kernel::available(isa).contains(&Kernel::Vnni);
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Whether a product of so many rows turns blocks of weights into bf16 by itself, some rows at a time.
pub(super) fn is_in_product(isa: Isa, rows: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_fast(isa) && crate::gemm::turned::takes_blocks(&Kernels::select(isa, Compute::Bf16), rows);
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Rows of weights in blocks for a product that [turns them](is_in_product) into bf16 itself.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    /// The bytes of one half of the rows and of the other, which may be none.
    halves: [&'a [u8]; 2],
    row_bytes: usize,
    dtype: DType,
}

impl<'a> Blocks<'a> {
    /// Rows of `depth` weights. Only where [`is_in_product`] says so.
    pub(super) fn new(isa: Isa, halves: [&'a [u8]; 2], depth: usize, dtype: DType) -> Self {
        assert!(is_fast(isa), "blocks in a product");
        Self { halves, row_bytes: depth / dtype.block_len() * dtype.size(), dtype }
    }

    /// The half that has a row, and the row's place in it.
    #[inline(always)]
    fn place(&self, row: usize) -> (&'a [u8], usize) {
        let [first, second] = self.halves;
        let start = row * self.row_bytes;
        if start < first.len() { (first, start) } else { (second, start - first.len()) }
    }

    /// Where the blocks of a row from element `at` on lie: any address where there are none.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, at: usize) -> *const u8 {
        let (half, start) = self.place(row);
        half.as_ptr().wrapping_add(start + self.bytes_of(at))
    }

    /// Elements of a block.
    pub(crate) fn block_len(&self) -> usize {
        self.dtype.block_len()
    }

    /// Bytes that so many elements take.
    #[inline(always)]
    pub(crate) fn bytes_of(&self, len: usize) -> usize {
        len / self.dtype.block_len() * self.dtype.size()
    }

    /// Writes a row's numbers from element `at`, the first of a block, on to `to`: as many as there is room for.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn to_bf16(self, row: usize, at: usize, to: &mut [bf16]) {
        let (half, start) = self.place(row);
        let bytes = &half[start + self.bytes_of(at)..][..self.bytes_of(to.len())];
        // SAFETY: `new` has found the instructions.
        with_block!(self.dtype, B => unsafe { vectors::run(blocks_of::<B>(bytes), to) });
    }
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use core::arch::x86_64::{
        __m128i, __m512, __m512i, _mm512_castsi512_si128, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
        _mm512_cvtne2ps_pbh, _mm512_extracti32x4_epi32, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_epi8,
        _mm512_set1_epi32, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_ps,
    };

    use super::bf16;
    use crate::quantized::lanes::{Lanes, PARTS};
    use crate::quantized::layouts::PART;

    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ, VL, VNNI and BF16, AVX2, FMA and F16C.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn run<B: Lanes>(blocks: &[B], to: &mut [bf16]) {
        let units = blocks.chunks(B::BLOCKS);
        for (unit, to) in units.zip(to.chunks_mut(B::BLOCKS * B::DTYPE.block_len())) {
            if unit.len() == B::BLOCKS {
                // SAFETY: the caller's promise.
                unsafe { write_unit(unit.as_ptr(), to) };
                continue;
            }
            let mut whole = [B::zeroed(); PARTS];
            whole[..unit.len()].copy_from_slice(unit);
            // SAFETY: as above; short blocks have units of `PARTS`.
            unsafe { write_unit(whole.as_ptr(), to) };
        }
    }

    /// Writes as many numbers of a unit as there is room for.
    ///
    /// # Safety
    /// As for [`run`]; the unit must be readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    unsafe fn write_unit<B: Lanes>(unit: *const B, to: &mut [bf16]) {
        // SAFETY: the caller's promise.
        let scales = unsafe { B::scales(unit) };
        for (quad, to) in to.chunks_mut(PARTS * PART).enumerate() {
            // SAFETY: as above.
            let numbers = unsafe { B::numbers(unit, quad) };
            let [first, second] = [quarters::<B>(numbers[0]), quarters::<B>(numbers[1])];
            for (part, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
                let lanes = B::SCALE_LANES[quad].map(|lanes| lanes[4 * part]);
                write_part::<B>([first[part], second[part]], (scales, lanes), to);
            }
        }
    }

    /// The numbers without their offset, 16 by 16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    fn quarters<B: Lanes>(numbers: __m512i) -> [__m128i; PARTS] {
        let numbers = _mm512_sub_epi8(numbers, _mm512_set1_epi8(B::OFFSET));
        [
            _mm512_castsi512_si128(numbers),
            _mm512_extracti32x4_epi32::<1>(numbers),
            _mm512_extracti32x4_epi32::<2>(numbers),
            _mm512_extracti32x4_epi32::<3>(numbers),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c,bmi2")]
    fn write_part<B: Lanes>(numbers: [__m128i; 2], (scales, lanes): ([__m512; 2], [i32; 2]), to: &mut [bf16; PART]) {
        // No `map`, which has not the instructions, so that its closure would stay a call.
        let [first, second] = numbers;
        let mut floats =
            [_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second))];
        for (floats, lane) in floats.iter_mut().zip(lanes) {
            *floats = _mm512_mul_ps(*floats, _mm512_permutexvar_ps(_mm512_set1_epi32(lane), scales[0]));
            if B::HAS_LEAST {
                let lane = _mm512_set1_epi32(lane + B::FIRST_LEAST);
                *floats = _mm512_sub_ps(*floats, _mm512_permutexvar_ps(lane, scales[1]));
            }
        }
        // SAFETY: the transmute renames 512 bits, and 32 bf16 have as many.
        unsafe {
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(floats[1], floats[0]));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), rounded);
        }
    }
}
