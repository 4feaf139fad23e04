//! Training with fp8 products in the experts.

use moeworks_gpu::{Emulation, Gpu, GpuOptions};
use moeworks_ops::Context;

use crate::steps::Steps;

const STEPS: usize = 12;

/// Trains a few steps on one batch, in bf16 except for the products that the context computes in fp8, and returns the
/// losses.
fn losses(ctx: &Context) -> Vec<f64> {
    let mut steps = Steps::new(ctx, ctx);
    let step = |_| {
        let loss = steps.pass();
        steps.update(3e-3);
        loss
    };
    (0..STEPS).map(step).collect()
}

/// Returns the largest relative difference of two runs' losses.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs() / b))
}

#[test]
fn experts_in_eight_bit_floats_learn_as_in_bf16() {
    let [bf16, fp8] = [false, true].map(|has| losses(&Context::cpu(2).with_fp8_experts(has)));
    assert!(bf16[STEPS - 1] < 0.8 * bf16[0], "{bf16:?}");
    let distance = distance(&fp8, &bf16);
    assert!(distance > 0.0 && distance < 0.01, "{distance}: {fp8:?}, in bf16 {bf16:?}");
}

#[test]
fn a_gpu_makes_the_steps_of_the_processor_in_eight_bit_floats() {
    let expected = losses(&Context::cpu(2).with_fp8_experts(true));
    let hopper = Emulation { is_hopper: true, ..Emulation::default() };
    let options = &GpuOptions::for_tests();
    let gpus = [Gpu::emulated(Emulation::default(), options), Gpu::emulated(hopper, options), Gpu::open(0, options)];
    for gpu in gpus {
        let gpu = match gpu {
            Ok(gpu) => gpu,
            Err(missing) => {
                println!("SKIPPED: training in eight-bit floats: {missing}");
                continue;
            }
        };
        let name = gpu.name().to_owned();
        let found = losses(&Context::cpu(2).with_gpu(gpu).with_fp8_experts(true));
        let distance = distance(&found, &expected);
        assert!(distance < 2e-3, "{name}: {distance}: {found:?}, not {expected:?}");
    }
}
