//! Upcycling: the new model computes what the dense one did.

use moeworks_model::hf::{SaveOptions, load_model, save_model};
use moeworks_model::{Decoder, UpcycleOptions, upcycle};
use moeworks_ops::Context;
use moeworks_tensor::DType;

use crate::common::{assert_close, batch, fixture, next_ids, random_ids};

const OPTIONS: UpcycleOptions = UpcycleOptions { num_experts: 4, top_k: 2, every: 1, noise: 0.0, seed: 3 };

#[test]
fn the_first_loss_is_that_of_the_dense_model() {
    let ctx = Context::cpu(2);
    for (name, every, model_type) in
        [("gpt2", 1, "moeworks"), ("gpt2", 2, "moeworks"), ("llama", 1, "mixtral"), ("qwen3", 2, "qwen3_moe")]
    {
        let (config, weights) = load_model(&ctx, &fixture(name)).unwrap();
        let ids = random_ids(config.vocab_size, 22, 1);
        let targets = next_ids(&ids, 11);
        let options = UpcycleOptions { every, ..OPTIONS };
        let (moe_config, moe_weights) = upcycle(&ctx, &config, &weights, &options).unwrap();
        let loss = |decoder: &Decoder, weights| {
            decoder.evaluate(&ctx, weights, &batch(&ids, &targets, 11), None).unwrap().mean_loss()
        };
        let dense = loss(&Decoder::new(config).unwrap(), &weights);
        let decoder = Decoder::new(moe_config).unwrap();
        let upcycled = loss(&decoder, &moe_weights);
        assert!((dense - upcycled).abs() < 1e-5, "{name}: {dense} became {upcycled}");
        // And so does the folder that it is saved to.
        let dir = tempfile::tempdir().unwrap();
        let saved = save_model(dir.path(), decoder.config(), &moe_weights, &SaveOptions::default()).unwrap();
        assert_eq!(saved.model_type, model_type, "{name}");
        let (config, weights) = load_model(&ctx, dir.path()).unwrap();
        assert_eq!(loss(&Decoder::new(config).unwrap(), &weights), upcycled, "{name}");
    }
}

#[test]
fn noise_makes_experts_differ_by_its_share() {
    for dtype in [DType::F32, DType::F16] {
        check_noise(dtype);
    }
}

fn check_noise(dtype: DType) {
    let ctx = Context::cpu(2);
    let (config, weights) = load_model(&ctx, &fixture("qwen3")).unwrap();
    let weights = weights.compute_copy(&ctx, dtype);
    let options = UpcycleOptions { noise: 0.01, ..OPTIONS };
    let (_, noisy) = upcycle(&ctx, &config, &weights, &options).unwrap();
    let (_, exact) = upcycle(&ctx, &config, &weights, &OPTIONS).unwrap();
    for ((name, a), (_, b)) in noisy.tensors().into_iter().zip(exact.tensors()) {
        let (a, b) = (a.to_f32_vec(), b.to_f32_vec());
        let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
        let distance = norm(&a.iter().zip(&b).map(|(a, b)| a - b).collect::<Vec<_>>()) / norm(&b);
        let expected = if name.contains("experts") { 0.01 } else { 0.0 };
        assert!((distance - expected).abs() < 0.001, "{name}: {distance}");
    }
    let experts = noisy.tensors().into_iter().find(|(name, _)| name.ends_with("experts.down_proj")).unwrap().1;
    assert_eq!(experts.dtype(), dtype);
    let values = experts.to_f32_vec();
    let (first, rest) = values.split_at(experts.len() / 4);
    assert_ne!(first, &rest[..first.len()]);
    assert_close(
        "twice the same",
        &noisy.tensors()[5].1.to_f32_vec(),
        &upcycle(&ctx, &config, &weights, &options).unwrap().1.tensors()[5].1.to_f32_vec(),
        0.0,
    );
}

#[test]
fn what_cannot_be_upcycled_is_refused() {
    let ctx = Context::cpu(1);
    let refused = |name: &str, options| {
        let (config, weights) = load_model(&ctx, &fixture(name)).unwrap();
        upcycle(&ctx, &config, &weights, &options).err().unwrap().setting
    };
    assert_eq!(refused("mixtral", OPTIONS), "num_experts");
    assert_eq!(refused("llama", UpcycleOptions { top_k: 5, ..OPTIONS }), "top_k");
    assert_eq!(refused("llama", UpcycleOptions { every: 0, ..OPTIONS }), "moe_every");
    assert_eq!(refused("llama", UpcycleOptions { every: 3, ..OPTIONS }), "every");
    assert_eq!(refused("llama", UpcycleOptions { noise: -1.0, ..OPTIONS }), "noise");
    assert_eq!(refused("llama", UpcycleOptions { num_experts: 0, ..OPTIONS }), "num_experts");
}
