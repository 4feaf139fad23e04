//! Placement of the optimizer's state during training on a GPU.

use moeworks_gpu::Gpu;
use moeworks_ops::Context;

use crate::steps::Steps;

/// Trains two steps in bf16 and computes one more pass. Returns the bytes of GPU memory per weight and the loss of
/// that pass.
fn trained(gpu: &Gpu, is_offloaded: bool) -> (f64, f64) {
    let ctx = Context::cpu(2).with_gpu(gpu.clone());
    let mut steps = Steps::new(&ctx, &if is_offloaded { ctx.on_host() } else { ctx.clone() });
    for _ in 0..2 {
        steps.pass();
        steps.update(1e-3);
    }
    let loss = steps.pass();
    (gpu.held_bytes() as f64 / steps.num_weights() as f64, loss)
}

#[test]
fn an_offloaded_optimizer_leaves_a_third_of_the_bytes_on_the_gpu_and_makes_the_same_steps() {
    let gpus = [false, true].map(|_| Gpu::for_a_test());
    let [Ok(first), Ok(second)] = &gpus else {
        println!("SKIPPED: memory of an offloaded optimizer: there is no GPU, nor an emulation of one");
        return;
    };
    let ((kept, loss), (offloaded, loss_offloaded)) = (trained(first, false), trained(second, true));
    // The GPU holds gradients in f32 and weights in bf16; without offloading also two moments and weights in f32.
    assert!(kept >= 17.5, "{kept} bytes a weight");
    assert!(offloaded <= 6.5, "{offloaded} bytes a weight");
    assert!((loss - loss_offloaded).abs() <= 1e-4 * loss, "{loss_offloaded}, not {loss}");
}
