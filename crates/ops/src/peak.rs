//! What this machine can do at best: the register-only rate of multiply-adds and the rate of reading memory.
//!
//! Shares of peak that Moeworks reports are shares of these measured rates, so that they mean the same on any machine,
//! whatever its clock does.

use std::hint::black_box;
use std::time::Instant;

use moeworks_tensor::DType;

use crate::simd::{Level, kernel};
use crate::{Context, Isa};

/// The measured rates of a context: all its threads, its instruction set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// f32 floating-point operations a second with multiply-adds on registers alone; a multiply-add counts as two.
    pub f32_flops: f64,
    /// The same for the bf16 dot product, where the instruction set has one.
    pub bf16_flops: Option<f64>,
    /// Bytes a second that the threads together read from memory.
    pub read_bytes_per_s: f64,
}

/// Independent sums: enough to cover the latency of two units, few enough for the registers of every instruction set.
const SUMS: usize = 12;

/// Multiply-adds of each sum in one task: about 10 ms.
const STEPS: usize = 2_000_000;

/// Bytes read by each pass of the memory measurement, more than most caches hold.
const READ_BYTES: usize = 256 << 20;

/// Measures a context. Takes about a third of a second, and 256 MiB of memory for that time.
#[must_use]
pub fn measure(ctx: &Context) -> Peaks {
    let lanes = match ctx.isa() {
        Isa::Portable => crate::simd::Baseline::WIDTH,
        Isa::Avx2 => 8,
        Isa::Avx512 | Isa::Avx512Bf16 => 16,
    };
    let isa = ctx.isa();
    let f32_flops = rate(ctx, 2 * SUMS * lanes * STEPS, || multiply_adds(isa));
    #[cfg(target_arch = "x86_64")]
    let bf16_flops = (isa == Isa::Avx512Bf16).then(|| {
        // SAFETY: a context with this instruction set exists only where the machine has it.
        rate(ctx, 4 * SUMS * lanes * STEPS, || unsafe { bf16_dots() })
    });
    #[cfg(not(target_arch = "x86_64"))]
    let bf16_flops = None;
    Peaks { f32_flops, bf16_flops, read_bytes_per_s: read_rate(ctx) }
}

/// Operations a second of all threads, each of which runs `task` with `flops` operations; the best of a few tries.
fn rate(ctx: &Context, flops: usize, task: impl Fn() + Sync) -> f64 {
    let num_threads = ctx.threads().count();
    let seconds = best_seconds(4, || ctx.threads().run(num_threads, |_| task()));
    (num_threads * flops) as f64 / seconds
}

fn best_seconds(tries: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..tries).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

kernel! {
    fn multiply_adds<S: Level>() {
        let (factor, term) = (S::splat(black_box(0.5)), S::splat(black_box(1.0)));
        let mut sums = [term; SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = S::vector_mul_add(*sum, factor, term);
            }
        }
        black_box(sums);
    }
}

/// # Safety
/// The machine must have AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_dots() {
    use core::arch::x86_64::{__m512bh, _mm512_dpbf16_ps, _mm512_set1_epi32, _mm512_set1_ps};
    // Pairs of 1.0 and 0.0: the sums grow slowly and stay finite.
    // SAFETY: the transmute only renames 512 bits.
    let pairs: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(black_box(0x3f80))) };
    let mut sums = [_mm512_set1_ps(black_box(0.0)); SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
        }
    }
    black_box(sums);
}

fn read_rate(ctx: &Context) -> f64 {
    let buffer = ctx.zeros(&[READ_BYTES / 4], DType::F32);
    let values = buffer.f32s();
    let piece = 1 << 18;
    let isa = ctx.isa();
    let seconds = best_seconds(3, || {
        ctx.threads().run(values.len() / piece, |index| {
            black_box(sum(isa, &values[index * piece..][..piece]));
        });
    });
    READ_BYTES as f64 / seconds
}

kernel! {
    fn sum<S: Level>(values: &[f32]) -> f32 {
        let mut sums = [0.0; 64];
        for values in values.as_chunks::<64>().0 {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value;
            }
        }
        sums.iter().sum()
    }
}
