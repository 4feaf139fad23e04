//! [`peak`](crate::peak) of a GPU. The bf16 rate is that of the instruction that products use: `wgmma` on Hopper,
//! `mma.sync` elsewhere. The FP8 rate is Hopper's.

use moeworks_tensor::DType;

use super::{On, THREADS, WARPS};
use crate::peak::{Peaks, best_seconds};
use moeworks_gpu::sources::{PEAK, PEAK_HOPPER};
use moeworks_gpu::{Arg, Launch};

/// Independent sums of a thread or a warp, as in the kernels.
const SUMS: usize = 8;
/// Multiply-adds of a product by `mma.sync`.
const PRODUCT: usize = 16 * 8 * 16;
/// Multiply-adds of a step of four warps on Hopper in bf16.
const HOPPER_PRODUCT: usize = 64 * 256 * 64;
/// Multiply-adds of a step of four warps on Hopper in FP8.
const HOPPER_BYTE_PRODUCT: usize = 64 * 128 * 128;
/// Shared memory of the bf16 operands on Hopper in bytes.
const HOPPER_SHARED: usize = (128 + 256) * 64 * 2;

/// The amount of work: enough to fill any GPU for about a millisecond, or little, where the emulation would take
/// minutes.
struct Amount {
    blocks: usize,
    steps: usize,
    bytes: usize,
}

pub(crate) fn measure(on: On<'_>) -> Peaks {
    let amount = match on.gpu.is_emulated() {
        true => Amount { blocks: 2, steps: 4, bytes: 1 << 16 },
        false => Amount { blocks: 2112, steps: 4096, bytes: 2 << 30 },
    };
    Peaks {
        f32_flops: rate(on, &amount, "multiply_adds", amount.blocks * THREADS * SUMS * 2),
        f32_in_tiles_flops: None,
        bf16_flops: Some(match on.gpu.hopper_processors() {
            Some(_) => hopper_rate(on, &amount, "hopper_matrix_products", HOPPER_PRODUCT),
            None => rate(on, &amount, "matrix_products", amount.blocks * WARPS * SUMS * 2 * PRODUCT),
        }),
        fp8_flops: on
            .gpu
            .hopper_processors()
            .map(|_| hopper_rate(on, &amount, "hopper_byte_products", HOPPER_BYTE_PRODUCT)),
        read_bytes_per_s: read_rate(on, &amount),
        copy_bytes_per_s: Some(copy_rate(on, &amount)),
    }
}

/// Returns the operations a second of a kernel that does `flops` in each of its steps, the best of a few tries.
fn rate(on: On<'_>, amount: &Amount, kernel: &str, flops: usize) -> f64 {
    let mut results = on.empty(&[amount.blocks * THREADS], DType::F32);
    let mut args = vec![on.write(&mut results), amount.steps.into()];
    if kernel == "multiply_adds" {
        args.extend([0.5_f32, 1.0].map(Arg::from));
    }
    let seconds = timed(on, || {
        // SAFETY: a thread writes its result.
        unsafe { on.launch(&PEAK, kernel, amount.blocks, &args) };
    });
    (flops * amount.steps) as f64 / seconds
}

/// Returns the operations a second of a `wgmma` kernel whose steps have `product` multiply-adds. Its steps are longer
/// than the others'.
fn hopper_rate(on: On<'_>, amount: &Amount, kernel: &str, product: usize) -> f64 {
    let steps = amount.steps.div_ceil(16);
    let mut results = on.empty(&[amount.blocks * THREADS], DType::F32);
    let args = [on.write(&mut results), steps.into()];
    let grid = [amount.blocks, 1, 1];
    let launch = Launch { source: &PEAK_HOPPER, kernel, grid, threads: THREADS, shared: HOPPER_SHARED, args: &args };
    let seconds = timed(on, || {
        // SAFETY: a thread writes its result.
        unsafe { on.gpu.launch(&launch) };
    });
    (amount.blocks * WARPS / 4 * 2 * product * steps) as f64 / seconds
}

fn read_rate(on: On<'_>, amount: &Amount) -> f64 {
    let data = on.empty(&[amount.bytes / 4], DType::U32);
    let mut results = on.empty(&[amount.blocks * THREADS], DType::U32);
    let args = [on.read(&data), on.write(&mut results), (amount.bytes / 16).into()];
    let seconds = timed(on, || {
        // SAFETY: the vectors lie within the data, and a thread writes its result.
        unsafe { on.launch(&PEAK, "read_memory", amount.blocks, &args) };
    });
    amount.bytes as f64 / seconds
}

/// Returns the bytes that are read and written a second.
fn copy_rate(on: On<'_>, amount: &Amount) -> f64 {
    let [from, mut to] = [(); 2].map(|()| on.empty(&[amount.bytes / 8], DType::U32));
    let args = [on.read(&from), on.write(&mut to), (amount.bytes / 32).into()];
    let seconds = timed(on, || {
        // SAFETY: the vectors lie within both halves.
        unsafe { on.launch(&PEAK, "copy_memory", amount.blocks, &args) };
    });
    amount.bytes as f64 / seconds
}

/// Returns the shortest of a few runs, after an untimed one in which kernels are compiled.
fn timed(on: On<'_>, mut run: impl FnMut()) -> f64 {
    let mut run = || {
        run();
        on.gpu.synchronize();
    };
    run();
    best_seconds(4, run)
}
