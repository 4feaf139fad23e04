//! Weights for inference of 8 or 4 bits, in blocks of 32 with a scale: [`DType::Q8`] and [`DType::Q4`]; and all others that
//! GGUF files have blocks of, which are read and multiplied as they lie but never made here.
//!
//! [`linear`](crate::linear::linear) and [`experts_forward`](crate::experts::experts_forward) take such weights where they
//! take floats; there is no backward. Activations are f32.
//!
//! Errors, each proven by a test against f64:
//! - An 8-bit weight is off by at most half its block's scale, which is the block's largest magnitude over 127 (as an f16):
//!   0.4% of it; a little more where the scale is so small that f16 has few digits for it. A 4-bit weight is off by at most
//!   half a scale, about a sixteenth of the largest magnitude, but for the largest ones, which may be off by 1.4 scales; the
//!   scale is chosen for the least sum of squares.
//! - Up to 16 rows of a group are themselves quantized to 8 bits, block by block, and multiplied in whole numbers: exact
//!   within a block, f32 between blocks. An activation is off by at most half its block's scale, so a sum by at most the
//!   sum of `|w| * scale / 2`, and by the rounding of f32.
//! - More rows are multiplied with the weights turned into bf16, in whatever way is the fastest for bf16: both operands
//!   are off by at most 2^-9 of themselves.
//!
//! What is not finite in a row of activations makes the row's results NaN; in a weight, its column's.

mod block;
mod dequantize;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod layouts;
mod product;
mod rows;
#[cfg(target_arch = "x86_64")]
mod vnni;

use moeworks_tensor::{BLOCK_LEN, DType, LONG_BLOCK_LEN, Tensor};

use crate::Context;
use crate::parallel::{PIECE, piece_range};
use crate::simd::{Float, with_float, with_stored};
use block::FromNumbers;
use layouts::Block;

pub(crate) use dequantize::Blocks;
pub(crate) use product::{Group, Product, matrix, run};

/// Evaluates an expression with a type name bound to the block type of a quantized tensor; of some types alone, if they are
/// named.
macro_rules! with_block {
    ($dtype:expr, $B:ident => $body:expr) => {
        with_block!($dtype, $B => $body, Q8 Q8Block, Q4 Q4Block, Q4_1 Q4_1Block, Q5_0 Q5_0Block, Q5_1 Q5_1Block, Q2K Q2KBlock,
            Q3K Q3KBlock, Q4K Q4KBlock, Q5K Q5KBlock, Q6K Q6KBlock, Iq4Nl Iq4NlBlock, Mxfp4 Mxfp4Block)
    };
    ($dtype:expr, $B:ident => $body:expr, $($ty:ident $block:ident),*) => {
        match $dtype {
            $(moeworks_tensor::DType::$ty => {
                type $B = moeworks_tensor::$block;
                $body
            })*
            dtype => panic!("{dtype:?} is no type of blocks for this"),
        }
    };
}
pub(crate) use with_block;

/// Bytes as blocks, which need no alignment.
fn blocks_of<B: Block>(bytes: &[u8]) -> &[B] {
    bytemuck::cast_slice(bytes)
}

/// The nearest tensor of `dtype` ([`DType::Q8`] or [`DType::Q4`]) to `x` (f32, bf16 or f16), whose last dim must be a multiple of
/// 32. Panics if it is not.
#[must_use]
pub fn quantize(ctx: &Context, x: &Tensor, dtype: DType) -> Tensor {
    let mut y = ctx.empty(x.shape(), dtype);
    let blocks_per_task = PIECE / BLOCK_LEN;
    with_stored!(x.dtype(), T => with_block!(dtype, B => {
        let mut to = y.slice_mut::<B>();
        for x in x.parts() {
            let x = x.slice::<T>().as_chunks::<BLOCK_LEN>().0;
            let (here, rest) = to.split_at_mut(x.len());
            ctx.threads().run_pieces(here, blocks_per_task, |task, blocks| {
                quantize_kernel::<B, T>(ctx.isa(), &x[piece_range(task, blocks_per_task, x.len())], blocks);
            });
            to = rest;
        }
    }, Q8 Q8Block, Q4 Q4Block));
    y
}

crate::simd::kernel! {
    fn quantize_kernel<S: Level, B: FromNumbers, T: Float>(x: &[[T; BLOCK_LEN]], blocks: &mut [B]) {
        for (block, x) in blocks.iter_mut().zip(x) {
            *block = B::quantize(&x.map(Float::load));
        }
    }
}

/// The numbers that a quantized tensor stands for, as `dtype` (f32, exact, or bf16, rounded).
#[must_use]
pub fn dequantize(ctx: &Context, x: &Tensor, dtype: DType) -> Tensor {
    let mut y = ctx.empty(x.shape(), dtype);
    with_float!(dtype, T => with_block!(x.dtype(), B => {
        let mut to = y.slice_mut::<T>();
        for x in x.parts() {
            let (here, rest) = to.split_at_mut(x.len());
            dequantize_blocks::<B, T>(ctx, x.slice::<B>(), here);
            to = rest;
        }
    }));
    y
}

/// Writes the numbers that the bytes of whole blocks of `dtype` stand for to `to`, which is as long as they are.
pub fn decode(dtype: DType, bytes: &[u8], to: &mut [f32]) {
    assert_eq!(bytes.len() / dtype.size() * dtype.block_len(), to.len(), "numbers of blocks");
    with_block!(dtype, B => {
        for (block, to) in blocks_of::<B>(bytes).iter().zip(to.chunks_exact_mut(dtype.block_len())) {
            layouts::decode(block, to);
        }
    });
}

fn dequantize_blocks<B: Block, T: Float>(ctx: &Context, blocks: &[B], to: &mut [T]) {
    ctx.threads().run_pieces(to, PIECE, |task, to| {
        let blocks = &blocks[piece_range(task, PIECE / B::DTYPE.block_len(), blocks.len())];
        block_kernel::<B, T>(ctx.isa(), blocks, to);
    });
}

crate::simd::kernel! {
    fn block_kernel<S: Level, B: Block, T: Float>(blocks: &[B], to: &mut [T]) {
        let mut values = [0.0; LONG_BLOCK_LEN];
        let values = &mut values[..B::DTYPE.block_len()];
        for (block, to) in blocks.iter().zip(to.chunks_exact_mut(B::DTYPE.block_len())) {
            layouts::decode(block, values);
            to.iter_mut().zip(&*values).for_each(|(to, &x)| *to = T::store(x));
        }
    }
}

#[cfg(test)]
mod tests;
