//! The measured limits of this machine: the register-only rate of multiply-adds, and the rates of reading and copying
//! memory.
//!
//! Reported shares of peak are shares of these measured rates, so that they mean the same on any machine, whatever
//! its clock does.

use std::hint::black_box;
use std::time::Instant;

use moeworks_tensor::{DType, MemoryPool, Tensor};

use crate::cuda::{self, On};
#[cfg(target_arch = "x86_64")]
use crate::gemm::amx;
use crate::simd::{LANES, Level, fence, kernel};
use crate::{Context, Isa};

/// Returns the shortest of `tries` runs, in seconds.
pub fn best_seconds(tries: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..tries).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// The measured rates of a context, with all its threads and its instruction set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// f32 floating-point operations a second of multiply-adds on registers alone; a multiply-add counts as two.
    pub f32_flops: f64,
    /// Operations a second of f32 products in AMX tiles, each as several bf16 products; none where the context does
    /// not take them so.
    pub f32_in_tiles_flops: Option<f64>,
    /// Operations a second of the bf16 dot product or of AMX tiles of bf16, where the machine has them, whether or
    /// not the context uses them.
    pub bf16_flops: Option<f64>,
    /// Operations a second in FP8, on GPUs where products take it.
    pub fp8_flops: Option<f64>,
    /// Bytes a second that the threads together read from memory.
    pub read_bytes_per_s: f64,
    /// Bytes a second that the threads together copy past the caches, read and written bytes added up.
    pub copy_bytes_per_s: Option<f64>,
}

impl Peaks {
    /// Returns the rate that products with weights of a type can reach. bf16 products are taken by whichever
    /// instruction is faster.
    #[must_use]
    pub fn flops(&self, dtype: DType) -> f64 {
        match (dtype, self.bf16_flops) {
            (DType::BF16, Some(bf16_flops)) => bf16_flops.max(self.f32_flops),
            _ => self.f32_flops.max(self.f32_in_tiles_flops.unwrap_or(0.0)),
        }
    }
}

/// Independent sums: enough to cover the latency of two units, few enough for the registers of every instruction set.
const SUMS: usize = 12;

/// Multiply-adds of each sum in one task: about 10 ms.
const STEPS: usize = 2_000_000;

/// Measurements of each rate, taken alternately, of which the best counts. A short disturbance, such as threads that
/// begin on one core, does not affect a rate every time.
const ROUNDS: usize = 4;

/// Bytes read, or read and written, by each pass of the memory measurement: more than most caches hold.
const READ_BYTES: usize = 256 << 20;

/// Measures a context. Takes about a third of a second and 256 MiB of memory for that time, on a GPU 2 GiB of its
/// own.
#[must_use]
pub fn measure(ctx: &Context) -> Peaks {
    if let Some(on) = On::of(ctx) {
        return cuda::peak::measure(on);
    }
    let mut memory = Memory::default();
    let mut best = Peaks {
        f32_flops: 0.0,
        f32_in_tiles_flops: None,
        bf16_flops: None,
        fp8_flops: None,
        read_bytes_per_s: 0.0,
        copy_bytes_per_s: None,
    };
    for _ in 0..ROUNDS {
        best.f32_flops = best.f32_flops.max(f32_rate(ctx));
        best.bf16_flops = bf16_rate(ctx).map(|rate| rate.max(best.bf16_flops.unwrap_or(0.0)));
        best.read_bytes_per_s = best.read_bytes_per_s.max(memory.read(ctx));
        best.copy_bytes_per_s = Some(memory.copy(ctx).max(best.copy_bytes_per_s.unwrap_or(0.0)));
    }
    #[cfg(target_arch = "x86_64")]
    if ctx.isa() == Isa::AmxF32 {
        best.f32_in_tiles_flops = best.bf16_flops.map(|rate| rate / amx::PRODUCTS_OF_BF16X3);
    }
    best
}

fn f32_rate(ctx: &Context) -> f64 {
    let isa = ctx.isa();
    let lanes = match isa {
        Isa::Portable => crate::simd::Baseline::WIDTH,
        Isa::Neon | Isa::Avx2 => 8,
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx | Isa::AmxF32 => 16,
    };
    rate(ctx, 2 * SUMS * lanes * STEPS, || multiply_adds(isa, STEPS))
}

/// Returns the rate of bf16 products; none where the machine has no instruction for them.
fn bf16_rate(ctx: &Context) -> Option<f64> {
    match Isa::best() {
        // SAFETY: the machine has the instruction.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => Some(rate(ctx, 4 * SUMS * 16 * STEPS, || unsafe { bf16_dots(STEPS) })),
        // SAFETY: the machine has tiles.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx | Isa::AmxF32 => Some(rate(ctx, amx::FLOPS * STEPS, || unsafe { amx::products(STEPS) })),
        _ => None,
    }
}

/// Returns the operations a second of all threads, each of which runs `task` with `flops` operations.
fn rate(ctx: &Context, flops: usize, task: impl Fn() + Sync) -> f64 {
    let num_threads = ctx.threads().count();
    let seconds = best_seconds(1, || ctx.threads().run(num_threads, |_| task()));
    (num_threads * flops) as f64 / seconds
}

/// Returns whether the bf16 dot product multiplies more numbers a second than the f32 multiply-add. Only for machines
/// that have it. The two differ by a factor of two in one direction or the other, so that a short measurement always
/// gives the same answer.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_bf16_dot_fast() -> bool {
    const SHORT: usize = 4_000;
    let (mut dots, mut multiplies) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..10 {
        // SAFETY: the caller's machine has the instruction.
        dots = dots.min(best_seconds(1, || unsafe { bf16_dots(SHORT) }));
        multiplies = multiplies.min(best_seconds(1, || multiply_adds(Isa::Avx512, SHORT)));
    }
    // A dot product takes two products in each lane.
    dots < 2.0 * multiplies
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn is_bf16_dot_fast() -> bool {
    false
}

kernel! {
    fn multiply_adds<S: Level>(steps: usize) {
        let (factor, term) = (S::splat(black_box(0.5)), S::splat(black_box(1.0)));
        let mut sums = [term; SUMS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = S::vector_mul_add(*sum, factor, term);
            }
        }
        black_box(sums);
    }
}

/// Runs `steps` bf16 dot products on each sum.
///
/// # Safety
/// The machine must have AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_dots(steps: usize) {
    use core::arch::x86_64::{__m512bh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_set1_ps};
    // Pairs of 1.0 and 0.0: the sums grow slowly and stay finite.
    // SAFETY: the transmute only renames 512 bits.
    let pairs: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(black_box(0x3f80))) };
    let mut sums = [_mm512_set1_ps(black_box(0.0)); SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
        }
    }
    black_box(sums);
}

/// A buffer that is read and copied to measure the rate of memory.
pub struct Memory {
    buffer: Tensor,
}

/// f32 of a task that reads or copies: 1 MiB.
const PIECE: usize = 1 << 18;

impl Default for Memory {
    /// Allocates 256 MiB from a pool of its own, so that it does not count in the measured pool.
    fn default() -> Self {
        let mut buffer = Tensor::empty(&MemoryPool::new(), &[READ_BYTES / 4], DType::F32);
        // Untouched memory is one page of zeros, read from a cache.
        buffer.f32s_mut().fill(1.0);
        Self { buffer }
    }
}

impl Memory {
    /// Returns the bytes a second of one read of the whole buffer by all threads of the CPU.
    #[must_use]
    pub fn read(&self, ctx: &Context) -> f64 {
        let (values, isa) = (self.buffer.f32s(), ctx.isa());
        let seconds = best_seconds(1, || {
            ctx.threads().run(values.len() / PIECE, |index| {
                black_box(sum(isa, &values[index * PIECE..][..PIECE]));
            });
        });
        READ_BYTES as f64 / seconds
    }

    /// Returns the bytes a second of one copy of a half of the buffer to the other, read and written bytes added up.
    #[must_use]
    pub fn copy(&mut self, ctx: &Context) -> f64 {
        let isa = ctx.isa();
        let seconds = best_seconds(1, || {
            let values = self.buffer.f32s_mut();
            let (from, to) = values.split_at_mut(values.len() / 2);
            ctx.threads().run_pieces(to, PIECE, |index, to| copy(isa, &from[index * PIECE..][..PIECE], to));
        });
        READ_BYTES as f64 / seconds
    }
}

kernel! {
    /// Copies past the caches, line by line. Both slices have the same length, and `to` is aligned like the pool's
    /// memory.
    fn copy<S: Level>(from: &[f32], to: &mut [f32]) {
        assert!(from.len() == to.len() && to.as_ptr().addr().is_multiple_of(4 * S::WIDTH), "whole vectors");
        for at in (0..to.len() / S::WIDTH).map(|i| i * S::WIDTH) {
            // SAFETY: a vector of each from `at` on is inside, and of `to` aligned.
            unsafe { S::stream(to.as_mut_ptr().add(at), S::load(from.as_ptr().add(at))) };
        }
        fence();
    }
}

kernel! {
    fn sum<S: Level>(values: &[f32]) -> f32 {
        // Four streams a thread: with one the hardware prefetcher does not reach the rate of memory.
        const STREAMS: usize = 4;
        let mut sums = [[0.0; LANES]; STREAMS];
        let streams: [&[f32]; STREAMS] = std::array::from_fn(|i| &values[i * (values.len() / STREAMS)..]);
        for at in (0..values.len() / STREAMS / LANES * LANES).step_by(LANES) {
            for (sums, stream) in sums.iter_mut().zip(streams) {
                for (sum, value) in sums.iter_mut().zip(&stream[at..at + LANES]) {
                    *sum += value;
                }
            }
        }
        sums.as_flattened().iter().sum()
    }
}

#[cfg(test)]
#[path = "peak_tests.rs"]
mod tests;
