//! Conversion of quantized weights to the nearest bf16, for products of many rows.

#[cfg(target_arch = "x86_64")]
use bytemuck::cast_slice_mut;
use moeworks_tensor::{DType, bf16};

#[cfg(target_arch = "x86_64")]
use super::avx2_rows;
#[cfg(target_arch = "x86_64")]
use super::store_bf16::{ByWords, Widened};
use super::weights::{Layout, RowBytes, Weights};
use super::{blocks_of, row_kernel, with_values};
use crate::gemm::Compute;
use crate::parallel::PIECE;
use crate::{Context, Isa};

/// Converts `rows` rows of `depth` weights. Numbers below the smallest normal bf16 may become zero.
pub(super) fn to_bf16(ctx: &Context, weights: Weights<'_>, rows: usize, depth: usize, to: &mut [bf16]) {
    assert_eq!(rows * depth, to.len(), "space for the rows of weights");
    let rows_per_task = (PIECE / depth.max(1)).max(1);
    ctx.threads().run_pieces(to, rows_per_task * depth.max(1), |task, to| {
        for (row, to) in to.chunks_exact_mut(depth.max(1)).enumerate() {
            let row = task * rows_per_task + row;
            row_to_bf16(ctx.isa(), weights.row(row), weights.layout, to);
        }
    });
}

fn row_to_bf16(isa: Isa, row: RowBytes<'_>, layout: Layout, to: &mut [bf16]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: each level has the instructions of what is called with it.
    unsafe {
        match isa {
            // FP8 is simple enough for compiled loops.
            Isa::Avx2 if layout.dtype != DType::F8 => return avx2_rows::write_row(row, layout, to),
            Isa::Avx512 => return vectors::row::<ByWords>(row, layout, to),
            Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32 => {
                return vectors::row_by_instruction(row, layout, to);
            }
            _ => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon && layout.dtype != DType::F8 {
        return super::neon_rows::write_row(row, layout, to);
    }
    with_values!(layout, B => row_kernel::<B, bf16>(isa, blocks_of::<B>(row.numbers), row.scales, to));
}

/// Returns whether the machine has the vectors with which products convert weights by themselves.
fn is_fast(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa >= Isa::Avx512;
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Rows of quantized weights for a product that converts them to units by itself.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    /// The rows of B for columns and, with paired columns, those for the other half of the pairs.
    halves: [Weights<'a>; 2],
    /// Number of rows of a half.
    columns: usize,
    depth: usize,
}

impl<'a> Blocks<'a> {
    /// Describes two halves of `columns` rows of `depth` weights. Only for vectors of 16 lanes.
    pub(super) fn new(isa: Isa, halves: [Weights<'a>; 2], columns: usize, depth: usize) -> Self {
        assert!(is_fast(isa), "blocks in a product");
        Self { halves, columns, depth }
    }

    /// Returns the half that holds a row, and the row's number in it.
    #[inline(always)]
    fn place(&self, row: usize) -> (Weights<'a>, usize) {
        let [first, second] = self.halves;
        if row < self.columns { (first, row) } else { (second, row - self.columns) }
    }

    /// Returns the address of a row's bytes from element `at` on, for prefetches only.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, at: usize) -> *const u8 {
        let (half, row) = self.place(row);
        half.numbers.address(row).wrapping_add(self.bytes_of(at))
    }

    /// Returns the bytes from one row of a half to the next.
    pub(crate) fn row_step(&self) -> usize {
        let numbers = self.halves[0].numbers;
        numbers.address(1).addr().wrapping_sub(numbers.address(0).addr())
    }

    /// Returns the elements of a block.
    pub(crate) fn block_len(&self) -> usize {
        self.halves[0].layout.dtype.block_len()
    }

    /// Returns the bytes that so many elements take.
    #[inline(always)]
    pub(crate) fn bytes_of(&self, len: usize) -> usize {
        len * self.halves[0].numbers.row_bytes() / self.depth
    }

    /// Converts a row from element `at`, the first of a block, to units, as many as `to` holds: pairs of bf16, or
    /// f32.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn to_units(self, row: usize, at: usize, units: Compute, to: &mut [u32]) {
        let (half, row) = self.place(row);
        let len = if units == Compute::Bf16 { 2 * to.len() } else { to.len() };
        let RowBytes { numbers, scales } = half.row(row);
        let numbers = &numbers[self.bytes_of(at)..][..self.bytes_of(len)];
        let row = RowBytes { numbers, scales: &scales[at * scales.len() / self.depth..] };
        // SAFETY: `new` has checked the instructions, and units are pairs only on machines with a bf16 pair product.
        unsafe {
            match units {
                Compute::Bf16 => vectors::row_by_instruction(row, half.layout, cast_slice_mut(to)),
                Compute::F32 => vectors::row::<Widened>(row, half.layout, to),
            }
        };
    }
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use core::arch::x86_64::{
        __m128i, __m512, __m512i, _mm512_castsi512_si128, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
        _mm512_extracti32x4_epi32, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi32,
        _mm512_sub_epi8, _mm512_sub_ps,
    };

    use moeworks_tensor::DType;

    use super::bf16;
    use crate::quantized::avx512_blocks::{Avx512Blocks, PARTS};
    use crate::quantized::float8::{self, with_floats};
    use crate::quantized::layouts::PART;
    use crate::quantized::store_bf16::{ByInstruction, StoreNumbers};
    use crate::quantized::stream::{Unit, unit_of_scales};
    use crate::quantized::weights::{Layout, RowBytes};
    use crate::quantized::{blocks_of, with_ints};

    /// Converts a row of whole blocks to bf16 with the AVX-512 BF16 instructions, as many elements as `to` holds.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ, VL and BF16, AVX2, FMA, F16C and BMI2.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn row_by_instruction(row: RowBytes<'_>, layout: Layout, to: &mut [bf16]) {
        // SAFETY: the caller's promise.
        unsafe { write_row::<ByInstruction>(row, layout, to) }
    }

    /// Converts a row as [`row_by_instruction`] does, stored by `P`.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ and VL, AVX2, FMA, F16C and BMI2, which must be enough for `P`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
    pub(super) unsafe fn row<P: StoreNumbers>(row: RowBytes<'_>, layout: Layout, to: &mut [P::Number]) {
        // SAFETY: the caller's promise.
        unsafe { write_row::<P>(row, layout, to) }
    }

    // The functions below are inlined into those two and so compiled with their CPU features.

    /// # Safety
    /// As for [`row`], with the instructions of `P`.
    #[inline(always)]
    unsafe fn write_row<P: StoreNumbers>(row: RowBytes<'_>, layout: Layout, to: &mut [P::Number]) {
        let RowBytes { numbers, scales } = row;
        // SAFETY: the caller's promise.
        unsafe {
            if layout.dtype == DType::F8 {
                with_floats!(layout, B => float8::write::<B, P>(blocks_of::<B>(numbers), scales, to));
            } else {
                with_ints!(layout, B => write::<B, P>(blocks_of::<B>(numbers), scales, to));
            }
        }
    }

    /// # Safety
    /// As for [`write_row`].
    #[inline(always)]
    unsafe fn write<B: Avx512Blocks, P: StoreNumbers>(blocks: &[B], scales: &[u8], to: &mut [P::Number]) {
        assert!(scales.len() >= blocks.len() * B::SPLIT_BYTES, "scales of a row");
        let units = blocks.chunks(B::BLOCKS);
        for (index, (unit, to)) in units.zip(to.chunks_mut(B::BLOCKS * B::LEN)).enumerate() {
            let scales = &scales[index * B::BLOCKS * B::SPLIT_BYTES..];
            if unit.len() == B::BLOCKS {
                // SAFETY: the caller's promise.
                unsafe { write_unit::<B, P>(Unit { blocks: unit.as_ptr(), scales: scales.as_ptr() }, to) };
                continue;
            }
            let mut whole = [B::zeroed(); PARTS];
            whole[..unit.len()].copy_from_slice(unit);
            // SAFETY: as above; short blocks have units of `PARTS`.
            unsafe {
                let scales = unit_of_scales(scales);
                write_unit::<B, P>(Unit { blocks: whole.as_ptr(), scales: scales.as_ptr() }, to);
            }
        }
    }

    /// Converts the elements of a unit, as many as `to` holds.
    ///
    /// # Safety
    /// As for [`write_row`]; the unit and its scales must be readable.
    #[inline(always)]
    unsafe fn write_unit<B: Avx512Blocks, P: StoreNumbers>(unit: Unit<B>, to: &mut [P::Number]) {
        let Unit { blocks: unit, scales } = unit;
        // SAFETY: the caller's promise.
        let scales = unsafe { B::scales(unit, scales) };
        for (quad, to) in to.chunks_mut(PARTS * PART).enumerate() {
            // SAFETY: as above.
            let numbers = unsafe { B::numbers(unit, quad) };
            // SAFETY: as above.
            let [first, second] = unsafe { [quarters::<B>(numbers[0]), quarters::<B>(numbers[1])] };
            for (part, to) in to.as_chunks_mut().0.iter_mut().enumerate() {
                let lanes = B::SCALE_LANES[quad].map(|lanes| lanes[4 * part]);
                // SAFETY: as above.
                unsafe { write_part::<B, P>([first[part], second[part]], scales, lanes, to) };
            }
        }
    }

    /// Returns the numbers without their offset, 16 by 16.
    ///
    /// # Safety
    /// As for [`write_row`].
    #[inline(always)]
    unsafe fn quarters<B: Avx512Blocks>(numbers: __m512i) -> [__m128i; PARTS] {
        // SAFETY: the caller's promise.
        unsafe {
            let numbers = _mm512_sub_epi8(numbers, _mm512_set1_epi8(B::OFFSET));
            [
                _mm512_castsi512_si128(numbers),
                _mm512_extracti32x4_epi32::<1>(numbers),
                _mm512_extracti32x4_epi32::<2>(numbers),
                _mm512_extracti32x4_epi32::<3>(numbers),
            ]
        }
    }

    /// # Safety
    /// As for [`write_row`].
    #[inline(always)]
    unsafe fn write_part<B: Avx512Blocks, P: StoreNumbers>(
        numbers: [__m128i; 2],
        scales: [__m512; 2],
        lanes: [i32; 2],
        to: &mut [P::Number; PART],
    ) {
        // No `map`: it is compiled without the CPU features, so its closure would stay a call.
        // SAFETY: the caller's promise.
        unsafe {
            let [first, second] = numbers;
            let mut floats =
                [_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second))];
            for (floats, lane) in floats.iter_mut().zip(lanes) {
                *floats = _mm512_mul_ps(*floats, _mm512_permutexvar_ps(_mm512_set1_epi32(lane), scales[0]));
                if B::HAS_MIN {
                    let lane = _mm512_set1_epi32(lane + B::FIRST_MIN);
                    *floats = _mm512_sub_ps(*floats, _mm512_permutexvar_ps(lane, scales[1]));
                }
            }
            if B::IS_PAIRED { P::store_interleaved(floats, to) } else { P::store(floats, to) }
        }
    }
}
