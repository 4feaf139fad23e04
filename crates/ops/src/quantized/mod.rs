//! Weights of 8 or 4 bits for inference, in blocks of 32 with a scale: [`DType::Q8`] and [`DType::Q4`]. The other
//! block types of GGUF files, and FP4 and FP8 with [scales in tensors of their own](Tensor::with_split_scales), are
//! read and multiplied in place but never written here.
//!
//! [`linear`](crate::linear::linear) and [`experts_forward`](crate::experts::experts_forward) take such weights in
//! place of floats; there is no backward. Activations are f32.
//!
//! Errors, each proven by a test against f64:
//!
//! - An 8-bit weight is off by at most half its block's scale, which is the block's largest magnitude over 127 (as an
//!   f16): 0.4% of it, and a little more if the scale is so small that f16 has few digits for it. A 4-bit weight is
//!   off by at most half a scale, about a sixteenth of the largest magnitude, except for the largest ones, which may
//!   be off by 1.4 scales; the scale minimises the sum of squared errors.
//! - Up to 16 rows of activations in a group are quantized to 8 bits block by block and multiplied as integers: exact
//!   within a block, f32 between blocks. An activation is off by at most half its block's scale, so a sum by at most
//!   the sum of `|w| * scale / 2`, and by the rounding of f32.
//! - With FP8 weights ([`DType::F8`]) activations are rounded to bf16 instead: off by at most 2^-9 of themselves.
//! - With more rows the weights are converted to bf16 and multiplied by the fastest bf16 kernel: both operands are
//!   off by at most 2^-9 of themselves.
//! - On a GPU up to 8 rows are multiplied in f32 with the numbers of `Q8`, `Q4`, `Q4_K`, `Q5_K`, `Q6_K`, MXFP4 and
//!   FP8 blocks; for more rows, and for the other types, both operands are rounded to bf16.
//!
//! A value that is not finite in a row of activations makes the row's results NaN, or infinite with FP8 weights and
//! on a GPU; in a weight, its column's.

#[cfg(target_arch = "x86_64")]
mod avx2_blocks;
#[cfg(target_arch = "x86_64")]
mod avx2_rows;
#[cfg(target_arch = "x86_64")]
mod avx512_blocks;
mod block;
mod dequantize;
#[cfg(target_arch = "x86_64")]
mod dot_avx2;
#[cfg(target_arch = "aarch64")]
mod dot_neon;
#[cfg(target_arch = "x86_64")]
mod dot_vnni;
mod float8;
#[cfg(target_arch = "x86_64")]
mod fp8_avx2;
mod kernel;
mod layouts;
#[cfg(target_arch = "aarch64")]
mod neon_blocks;
#[cfg(target_arch = "aarch64")]
mod neon_rows;
mod product;
mod rows;
#[cfg(target_arch = "x86_64")]
mod store_bf16;
#[cfg(target_arch = "x86_64")]
mod stream;
mod weights;

use moeworks_tensor::{BLOCK_LEN, DType, LONG_BLOCK_LEN, Q4Block, Q8Block, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, with_float, with_stored};
use block::FromNumbers;
use layouts::Values;
use weights::{RowBytes, Weights};

pub(crate) use dequantize::Blocks;
pub(crate) use product::{Group, Product, run};
pub(crate) use weights::matrix;

/// Evaluates an expression with a type name bound to the blocks of a layout, all of which hold integers.
macro_rules! with_ints {
    ($layout:expr, $B:ident => $body:expr) => {
        $crate::quantized::with_block!($layout, $B => $body, (Mxfp4 true Fp4Pairs, Q8 false Q8Block, Q4 false Q4Block,
            Q4_1 false Q4_1Block, Q5_0 false Q5_0Block, Q5_1 false Q5_1Block, Q2K false Q2KBlock, Q3K false Q3KBlock,
            Q4K false Q4KBlock, Q5K false Q5KBlock, Q6K false Q6KBlock, Iq4Nl false Iq4NlBlock, Mxfp4 false Mxfp4Block))
    };
}
pub(crate) use with_ints;

/// Evaluates an expression with a type name bound to the blocks of a layout, one of the listed.
macro_rules! with_block {
    ($layout:expr, $B:ident => $body:expr, ($($dtype:ident $has_split_scales:literal $block:ident),*)) => {{
        let $crate::quantized::weights::Layout { dtype, has_split_scales } = $layout;
        match (dtype, has_split_scales) {
            $((moeworks_tensor::DType::$dtype, $has_split_scales) => {
                type $B = $crate::quantized::layouts::$block;
                $body
            })*
            (dtype, _) => panic!("unexpected block type {dtype:?}"),
        }
    }};
}
pub(crate) use with_block;

/// Evaluates an expression with a type name bound to the blocks of a layout, of integers or of floats.
macro_rules! with_values {
    ($layout:expr, $B:ident => $body:expr) => {
        match $layout {
            layout if layout.dtype == DType::F8 => {
                $crate::quantized::float8::with_floats!(layout, $B => $body)
            }
            layout => $crate::quantized::with_ints!(layout, $B => $body),
        }
    };
}
pub(crate) use with_values;

/// Views bytes as blocks, which need no alignment.
fn blocks_of<B: bytemuck::Pod>(bytes: &[u8]) -> &[B] {
    bytemuck::cast_slice(bytes)
}

/// Quantizes `x` (f32, bf16 or f16) to `dtype` ([`DType::Q8`] or [`DType::Q4`]). Panics unless its last dim is a
/// multiple of 32.
#[must_use]
pub fn quantize(ctx: &Context, x: &Tensor, dtype: DType) -> Tensor {
    let mut y = ctx.empty(x.shape(), dtype);
    with_stored!(x.dtype(), T => match dtype {
        DType::Q8 => quantize_parts::<Q8Block, T>(ctx, x, y.slice_mut()),
        DType::Q4 => quantize_parts::<Q4Block, T>(ctx, x, y.slice_mut()),
        dtype => panic!("cannot quantize to {dtype:?}: expected Q8 or Q4"),
    });
    y
}

fn quantize_parts<B: FromNumbers, T: Float>(ctx: &Context, x: &Tensor, mut to: &mut [B]) {
    let blocks_per_task = PIECE / BLOCK_LEN;
    for x in x.parts() {
        let x = x.slice::<T>().as_chunks::<BLOCK_LEN>().0;
        let (here, rest) = to.split_at_mut(x.len());
        ctx.threads().run_pieces(here, blocks_per_task, |task, blocks| {
            quantize_kernel::<B, T>(ctx.isa(), &x[piece_range(task, blocks_per_task, x.len())], blocks);
        });
        to = rest;
    }
}

crate::simd::kernel! {
    fn quantize_kernel<S: Level, B: FromNumbers, T: Float>(x: &[[T; BLOCK_LEN]], blocks: &mut [B]) {
        for (block, x) in blocks.iter_mut().zip(x) {
            *block = B::quantize(&x.map(Float::load));
        }
    }
}

/// Converts a quantized tensor to `dtype`: f32, exact, or bf16, rounded.
#[must_use]
pub fn dequantize(ctx: &Context, x: &Tensor, dtype: DType) -> Tensor {
    // Only for a matrix in one piece; GPU kernels know bf16 alone.
    if let Some(on) = On::of(ctx).filter(|_| dtype == DType::BF16 && x.parts().len() == 1 && !x.is_empty()) {
        return cuda::blocks::dequantized(on, x);
    }
    let mut y = ctx.empty(x.shape(), dtype);
    with_float!(dtype, T => {
        let mut to = y.slice_mut::<T>();
        for x in x.parts() {
            let (here, rest) = to.split_at_mut(x.len());
            dequantize_rows::<T>(ctx, Weights::from_tensor(x), x.cols(), here);
            to = rest;
        }
    });
    y
}

/// Converts the bytes of whole blocks of `dtype`, with their scales inside, to `to`, which has as many elements.
pub fn decode(dtype: DType, bytes: &[u8], to: &mut [f32]) {
    let weights = Weights::packed(bytes, dtype, to.len());
    assert_eq!(weights.numbers.row_bytes(), bytes.len(), "numbers of blocks");
    with_values!(weights.layout, B => {
        for (block, to) in blocks_of::<B>(bytes).iter().zip(to.chunks_exact_mut(dtype.block_len())) {
            block.decode(&[], to);
        }
    });
}

fn dequantize_rows<T: Float>(ctx: &Context, weights: Weights<'_>, cols: usize, to: &mut [T]) {
    let rows_per_task = (PIECE / cols.max(1)).max(1);
    ctx.threads().run_pieces(to, rows_per_task * cols.max(1), |task, to| {
        for (row, to) in to.chunks_exact_mut(cols.max(1)).enumerate() {
            let row = task * rows_per_task + row;
            let RowBytes { numbers, scales } = weights.row(row);
            with_values!(weights.layout, B => row_kernel::<B, T>(ctx.isa(), blocks_of::<B>(numbers), scales, to));
        }
    });
}

crate::simd::kernel! {
    fn row_kernel<S: Level, B: Values, T: Float>(blocks: &[B], scales: &[u8], to: &mut [T]) {
        let mut values = [0.0; LONG_BLOCK_LEN];
        let values = &mut values[..B::LEN];
        for (index, (block, to)) in blocks.iter().zip(to.chunks_exact_mut(B::LEN)).enumerate() {
            block.decode(&scales[index * B::SPLIT_BYTES..], values);
            to.iter_mut().zip(&*values).for_each(|(to, &x)| *to = T::store(x));
        }
    }
}

#[cfg(test)]
mod tests;
