//! Training with bf16 gradients of the experts.

use moeworks_gpu::Gpu;
use moeworks_ops::Context;
use moeworks_ops::elementwise::cast;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;

use crate::steps::Steps;

fn contexts() -> Vec<Context> {
    let gpu =
        Gpu::for_a_test().inspect_err(|missing| println!("SKIPPED: gradients of experts in bf16 on a GPU: {missing}"));
    let cpu = Context::cpu(2);
    gpu.into_iter().map(|gpu| cpu.clone().with_gpu(gpu)).chain([cpu.clone()]).collect()
}

#[test]
fn gradients_of_experts_in_bf16_are_rounded_and_all_others_the_same_bits() {
    for ctx in contexts() {
        let mut both = [DType::F32, DType::BF16].map(|dtype| Steps::with_expert_gradients(&ctx, &ctx, dtype));
        both.iter_mut().for_each(|steps| {
            steps.pass();
        });
        let [exact, rounded] = both.each_ref().map(|steps| steps.gradients().tensors());
        for ((name, exact), (_, rounded)) in exact.iter().zip(&rounded) {
            if name.contains(".mlp.experts.") {
                assert_eq!(rounded.dtype(), DType::BF16, "{name}");
                assert!(cast(&ctx, exact, DType::BF16).bytes() == rounded.bytes(), "{name}");
            } else {
                assert!(exact.bytes() == rounded.bytes(), "{name}");
            }
        }
    }
}

#[test]
fn a_model_learns_as_well_with_gradients_of_experts_in_bf16_over_two_passes() {
    for ctx in contexts() {
        let [exact, rounded] = [DType::F32, DType::BF16].map(|dtype| {
            let mut steps = Steps::with_expert_gradients(&ctx, &ctx, dtype);
            let first = steps.pass();
            for _ in 0..12 {
                steps.pass();
                steps.pass_writing(Write::Add);
                steps.update(3e-3);
            }
            (first, steps.pass())
        });
        assert!(exact.1 < 0.7 * exact.0, "nothing was learned: {exact:?}");
        assert!((exact.1 - rounded.1).abs() < 0.01 * exact.0, "{exact:?}, {rounded:?}");
    }
}
