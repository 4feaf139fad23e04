//! Checkpoints of every family on a GPU and on its emulations: in f32 as in `transformers`, in other types as on the
//! CPU.

use std::path::{Path, PathBuf};

use moeworks_gpu::Gpu;
use moeworks_model::KvCache;
use moeworks_model::{Decoder, DecoderWeights};
use moeworks_ops::Context;
use moeworks_tensor::DType;

use crate::common::{assert_close, fixture};
use crate::fixtures::{compare_logits, compare_training_step, expected_json, input_ids};
use crate::switch::Case;

/// The bounds of a GPU's distance from f32: 1.5 times that of the CPU, plus 2% of the logits.
const TIMES: f64 = 1.5;
const BESIDES: f64 = 0.02;

/// Compares a folder on each GPU: logits, greedy ids, one training step if the folder has gradients, and a text in
/// pieces.
pub(crate) fn compare_on_gpus(folder: &Path) {
    // The order of thread blocks is tested with single operations.
    for (name, gpu) in Gpu::for_tests().into_iter().filter(|(name, _)| !name.ends_with("in reverse")) {
        let ctx = Context::cpu(2).with_gpu(gpu);
        println!("{} on the {name}", folder.display());
        if expected_json(folder).get("source_ids").is_some() {
            let case = Case::on(ctx, folder.to_owned());
            case.compare();
            case.compare_step();
            continue;
        }
        let (decoder, stored) = compare_logits(&ctx, folder);
        if folder.join("grads").exists() {
            compare_training_step(&ctx, folder);
        }
        compare_in_pieces(&ctx, folder, &decoder, &stored);
    }
}

/// Compares the first text, passed in pieces as in a conversation: in f32 with the CPU's logits; in bf16 and in the
/// folder's types, the distance from f32 must be near the CPU's.
fn compare_in_pieces(ctx: &Context, folder: &Path, decoder: &Decoder, stored: &DecoderWeights) {
    let (ids, seq_len) = input_ids(&expected_json(folder));
    let ids = &ids[..seq_len];
    let in_pieces = |ctx: &Context, weights: &DecoderWeights| {
        let mut cache = KvCache::new(decoder.config());
        let pieces = [&ids[..3], &ids[3..4], &ids[4..5], &ids[5..]];
        let mut logits_of =
            |piece: &[u32]| decoder.forward_cached(ctx, weights, &mut cache, piece, None).unwrap().to_f32_vec();
        pieces.iter().flat_map(|piece| logits_of(piece)).collect::<Vec<f32>>()
    };
    let on_host = Context::cpu(2);
    let [f32s, bf16s] = [DType::F32, DType::BF16].map(|dtype| stored.compute_copy(&on_host, dtype));
    let exact = in_pieces(&on_host, &f32s);
    assert_close("a text in pieces in f32", &in_pieces(ctx, &f32s), &exact, 1e-4);
    for (what, weights) in [("in bf16", &bf16s), ("as stored", stored)] {
        let [host, gpu] = [&on_host, ctx].map(|ctx| distance(&in_pieces(ctx, weights), &exact));
        assert!(gpu < TIMES * host + BESIDES, "a text in pieces {what}: {gpu} from f32, on the processor {host}");
    }
}

/// Returns the length of the difference relative to that of the exact result.
fn distance(found: &[f32], exact: &[f32]) -> f64 {
    let length = |xs: &mut dyn Iterator<Item = f32>| xs.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    length(&mut found.iter().zip(exact).map(|(a, b)| a - b)) / length(&mut exact.iter().copied())
}

/// All that differ are named.
#[test]
fn checkpoints_of_every_family_compute_on_gpus_as_in_transformers_and_on_the_processor() {
    let all = std::fs::read_dir(fixture("olmoe").parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<PathBuf> = all.filter(|path| path.join("expected.json").exists()).collect();
    assert!(folders.len() >= 22, "{folders:?}");
    let differs = |folder: &&PathBuf| std::panic::catch_unwind(|| compare_on_gpus(folder)).is_err();
    let differing: Vec<&PathBuf> = folders.iter().filter(differs).collect();
    assert!(differing.is_empty(), "{differing:?}");
}
