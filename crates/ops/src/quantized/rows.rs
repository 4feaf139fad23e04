//! Rows of activations quantized to 8 bits, with a scale for each block of 32.

use bytemuck::{Pod, Zeroable};
use moeworks_tensor::{BLOCK_LEN, DType, Tensor, bf16};

use crate::Context;
use crate::simd::{Float, LANES, kernel, with_float};

/// Four consecutive blocks of a row, zeros beyond its end. Corrections that kernels need are computed once here
/// instead of for each row of weights.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Quad {
    /// The first 16 numbers of each block, and then the other 16 of each.
    pub(super) halves: [[i8; 2 * BLOCK_LEN]; 2],
    /// Scales, and values for minima or offsets, as the [`ActivationFormat`] says.
    pub(super) corrections: [[f32; 16]; 2],
}

impl Quad {
    /// Returns the 128 bf16 that it holds for FP8 weights.
    #[inline(always)]
    pub(super) fn floats(&self) -> &[bf16; QUAD] {
        bytemuck::cast_ref(self)
    }

    fn floats_mut(&mut self) -> &mut [bf16; QUAD] {
        bytemuck::cast_mut(self)
    }
}

/// The format of activations for a kernel: the corrections that go with the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActivationFormat {
    /// For weights in short blocks: in each quad the blocks' scales, each four times; and as integer bits minus the
    /// offset times the sums of four consecutive numbers of the first half and four of the second, for weights stored
    /// larger by the offset.
    Offset(u8),
    /// Like `Offset`, but the halves of a block are its even numbers and its odd ones.
    Pairs(u8),
    /// Like `Offset`, but the corrections of each block are the scale times the sum of its first half, the same for
    /// the second half, and two zeros.
    Min,
    /// For weights in blocks of 256: in every other quad the scales of the 8 parts, then minus the scale times the
    /// sum of each part; the rest are zeros.
    Parts,
    /// Like `Parts`, but with each scale twice, for the halves of parts, and with the sums of halves times the scales
    /// and this factor.
    Halves(u8),
    /// For FP8: 128 bf16 in place of numbers and corrections.
    Floats,
    /// Like `Floats`, but of each 64 first the first eight of each 16, then the others.
    InterleavedFloats,
}

/// Elements of a [`Quad`].
pub(super) const QUAD: usize = 4 * BLOCK_LEN;

/// Quantized rows. Element i of a block is about `scale` times its number, off by at most half a scale; the scale is
/// the block's largest magnitude over 127. A block with a value that is not finite has scale NaN.
pub(super) struct QuantizedRows {
    memory: Tensor,
    quads_per_row: usize,
}

impl QuantizedRows {
    /// Quantizes the rows of `x [R, K]`, f32 or bf16.
    pub(super) fn quantize(ctx: &Context, x: &Tensor, format: ActivationFormat) -> Self {
        let (rows, cols) = (x.rows(), x.cols());
        let quads_per_row = cols.div_ceil(QUAD);
        let mut memory = ctx.empty(&[rows * quads_per_row, size_of::<Quad>() / 4], DType::U32);
        let rows_per_task = (1 << 14) / cols.max(1) + 1;
        with_float!(x.dtype(), T => {
            let x = x.slice::<T>();
            let quads: &mut [Quad] = bytemuck::cast_slice_mut(memory.u32s_mut());
            ctx.threads().run_pieces(quads, (rows_per_task * quads_per_row).max(1), |task, quads| {
                let x = x[task * rows_per_task * cols..].chunks_exact(cols.max(1));
                for (x, quads) in x.zip(quads.chunks_exact_mut(quads_per_row.max(1))) {
                    quantize_row::<T>(ctx.isa(), x, format, quads);
                }
            });
        });
        Self { memory, quads_per_row }
    }

    /// Returns row `index`.
    pub(super) fn row(&self, index: usize) -> &[Quad] {
        &bytemuck::cast_slice(self.memory.u32s())[index * self.quads_per_row..][..self.quads_per_row]
    }
}

kernel! {
    fn quantize_row<S: Level, T: Float>(x: &[T], format: ActivationFormat, to: &mut [Quad]) {
        to.fill(Quad::zeroed());
        if let ActivationFormat::Floats | ActivationFormat::InterleavedFloats = format {
            return write_floats(x, format == ActivationFormat::InterleavedFloats, to);
        }
        for (index, x) in x.as_chunks().0.iter().enumerate() {
            let (scale, mut numbers) = quantize_block(x);
            if let ActivationFormat::Pairs(_) = format {
                numbers = parted(&numbers);
            }
            let (first, second) = numbers.split_at(HALF);
            let (quad, part) = (index / 4, index % 4);
            to[quad].halves[0][part * HALF..][..HALF].copy_from_slice(first);
            to[quad].halves[1][part * HALF..][..HALF].copy_from_slice(second);
            format.write(to, index, scale, bytemuck::cast(sums_of_fours(&numbers)));
        }
    }
}

/// Rounds a row to bf16.
#[inline(always)]
fn write_floats<T: Float>(x: &[T], are_interleaved: bool, to: &mut [Quad]) {
    for (x, to) in x.chunks(QUAD).zip(to) {
        let to = to.floats_mut();
        for (i, x) in x.iter().enumerate() {
            let place = i / 64 * 64 + i / 8 % 2 * 32 + i % 64 / 16 * 8 + i % 8;
            to[if are_interleaved { place } else { i }] = bf16::from_f32(x.load());
        }
    }
}

/// Moves even numbers to the first half and odd ones to the second.
#[inline(always)]
fn parted(numbers: &[i8; BLOCK_LEN]) -> [i8; BLOCK_LEN] {
    std::array::from_fn(|i| numbers[i % HALF * 2 + i / HALF])
}

/// Returns sums of four consecutive numbers, computed on 32-bit words so that it vectorises.
#[inline(always)]
fn sums_of_fours(numbers: &[i8; BLOCK_LEN]) -> [i32; BLOCK_LEN / 4] {
    let words: [i32; BLOCK_LEN / 4] = bytemuck::cast(*numbers);
    let mut sums = [0; BLOCK_LEN / 4];
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = (word >> 24) + (word << 8 >> 24) + (word << 16 >> 24) + (word << 24 >> 24);
    }
    sums
}

/// Half of a block.
const HALF: usize = BLOCK_LEN / 2;

impl ActivationFormat {
    /// Stores the scale and the corrections of block `index`; `fours` are sums of four consecutive numbers of its
    /// halves.
    #[inline(always)]
    fn write(self, to: &mut [Quad], index: usize, scale: f32, fours: [[i32; 4]; 2]) {
        let sums = fours.map(|fours| scale * fours.iter().sum::<i32>() as f32);
        // The first quad holds those of all eight blocks.
        let ([scales, others], part) = match self {
            Self::Offset(_) | Self::Pairs(_) | Self::Min => (&mut to[index / 4].corrections, 4 * (index % 4)),
            Self::Parts => (&mut to[index / 8 * 2].corrections, index % 8),
            Self::Floats | Self::InterleavedFloats => return,
            Self::Halves(_) => (&mut to[index / 8 * 2].corrections, 2 * (index % 8)),
        };
        match self {
            Self::Offset(offset) | Self::Pairs(offset) => {
                scales[part..][..4].fill(scale);
                for (i, to) in others[part..][..4].iter_mut().enumerate() {
                    *to = f32::from_bits((-i32::from(offset) * (fours[0][i] + fours[1][i])).cast_unsigned());
                }
            }
            Self::Min => {
                scales[part..][..4].fill(scale);
                others[part..][..2].copy_from_slice(&sums);
            }
            Self::Parts => {
                scales[part] = scale;
                scales[8 + part] = -(sums[0] + sums[1]);
            }
            Self::Halves(factor) => {
                scales[part..][..2].fill(scale);
                others[part..][..2].copy_from_slice(&sums.map(|sum| f32::from(factor) * sum));
            }
            Self::Floats | Self::InterleavedFloats => {}
        }
    }
}

/// Returns a block's scale and numbers.
#[inline(always)]
fn quantize_block<T: Float>(x: &[T; BLOCK_LEN]) -> (f32, [i8; BLOCK_LEN]) {
    let (mut largest, mut not_finite) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    for x in x.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            let size = x[i].load().abs();
            largest[i] = if size > largest[i] { size } else { largest[i] };
            // Zero times a value that is not finite is NaN.
            not_finite[i] += size * 0.0;
        }
    }
    // By halves, so that they stay vectors.
    let mut len = LANES / 2;
    while len > 0 {
        for i in 0..len {
            largest[i] = if largest[len + i] > largest[i] { largest[len + i] } else { largest[i] };
            not_finite[i] += not_finite[len + i];
        }
        len /= 2;
    }
    let largest = largest[0];
    let scale = largest / 127.0 + not_finite[0];
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut numbers = [0; BLOCK_LEN];
    for (number, x) in numbers.iter_mut().zip(x) {
        // Adding 1.5 * 2^23 rounds to a whole number, ties to even, and leaves it in the low bits.
        *number = (x.load() * inverse + 12_582_912.0).to_bits() as i8;
    }
    (scale, numbers)
}
