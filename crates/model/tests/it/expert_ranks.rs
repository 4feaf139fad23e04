//! Models whose experts are spread over ranks: each rank loads its part of the files, and the logits have the bits of
//! one rank.

use moeworks_comm::{CommError, Communicator, RankOptions, try_run_ranks};
use moeworks_model::gguf::GgufFile;
use moeworks_model::hf::load_part;
use moeworks_model::{BatchError, Decoder, DecoderWeights, ModelConfig, ModelPart, SourceBatch};
use moeworks_moe::{RemoteExperts, serve_experts};
use moeworks_ops::Context;
use moeworks_plan::{Placement, Placements};

use crate::common::fixture;

/// Families of experts with their ways to store them: one by one, stacked, transposed, interleaved, in FP8 and MXFP4.
pub(crate) const FOLDERS: [&str; 11] = [
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe_fp8",
    "deepseek_v2",
    "deepseek_v3_fp8",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "granitemoe",
    "phimoe",
    "switch",
];
/// GGUF files of various architectures.
pub(crate) const GGUFS: [&str; 6] = ["mixtral_q4_k_m", "qwen3moe", "qwen2moe", "olmoe", "gptoss", "deepseek2"];

pub(crate) type Loaded = (ModelConfig, DecoderWeights);

/// A way to load a part of a model.
pub(crate) type Load<'a> = &'a (dyn Fn(&Context, &ModelPart) -> Loaded + Sync);

fn num_bytes(weights: &DecoderWeights) -> usize {
    weights.tensors().iter().map(|(_, tensor)| tensor.num_bytes()).sum()
}

fn logits(ctx: &Context, decoder: &Decoder, weights: &DecoderWeights) -> Result<Vec<f32>, BatchError> {
    let vocab_size = decoder.config().vocab_size as u32;
    let ids: Vec<u32> = (0..12).map(|i| (i * 7 + 3) % vocab_size).collect();
    let has_encoder = decoder.config().variant.encoder.is_some();
    let source = SourceBatch { ids: &ids, num_sequences: 1 };
    let encoded = has_encoder.then(|| decoder.encode(ctx, weights, &source, None)).transpose()?;
    Ok(decoder.logits(ctx, weights, &ids, 1, encoded.as_ref())?.to_f32_vec())
}

/// Returns the logits of the root, and the bytes of the weights of each rank.
fn on_ranks(load: Load<'_>, placement: &Placement) -> Vec<(Vec<f32>, usize)> {
    let rank = |comm: &dyn Communicator| {
        let (ctx, placements) = (Context::cpu(1), Placements::from(placement.clone()));
        let part = match comm.rank() {
            0 => ModelPart::Root(placements.clone()),
            rank => ModelPart::Experts { placements: placements.clone(), rank },
        };
        let (config, weights) = load(&ctx, &part);
        let (own, num_bytes) = (comm.split(Some(0), comm.rank())?.expect("a group"), num_bytes(&weights));
        if comm.rank() > 0 {
            serve_experts(&ctx, &*own, &weights.held_layers(&config))?;
            return Ok::<_, CommError>((Vec::new(), num_bytes));
        }
        let remote = RemoteExperts::new(own, placements);
        let decoder = Decoder::new(config).unwrap().with_remote_experts(&remote);
        let logits = logits(&ctx, &decoder, &weights).map_err(|error| CommError::Start(error.to_string()))?;
        remote.end()?;
        Ok((logits, num_bytes))
    };
    try_run_ranks::<_, CommError>(&RankOptions::new(placement.num_ranks()), rank).unwrap()
}

/// Places every other expert on rank 1: no two neighbours are together.
fn alternating(num_experts: usize) -> Placement {
    let lines: String = (0..num_experts).map(|expert| format!("{expert}: {}\n", (expert + 1) % 2)).collect();
    format!("placement experts={num_experts} ranks=2\n{lines}").parse().unwrap()
}

fn assert_same(name: &str, load: Load<'_>) {
    let ctx = Context::cpu(1);
    let (config, weights) = load(&ctx, &ModelPart::Whole);
    let (num_experts, whole) = (config.num_experts, num_bytes(&weights));
    let expected = logits(&ctx, &Decoder::new(config).unwrap(), &weights).unwrap();
    for placement in [Placement::sharded(num_experts, 2), Placement::sharded(num_experts, 3), alternating(num_experts)]
    {
        let found = on_ranks(load, &placement);
        assert_eq!(found[0].0, expected, "{name}: {placement}");
        let held: usize = found.iter().map(|(_, num_bytes)| num_bytes).sum();
        assert_eq!(held, whole, "{name}: each weight is on one rank");
    }
}

#[test]
fn folders_on_ranks_give_the_bits_of_one() {
    for name in FOLDERS {
        assert_same(name, &|ctx, part| load_part(ctx, &fixture(name), part).unwrap());
    }
}

#[test]
fn gguf_files_on_ranks_give_the_bits_of_one() {
    for name in GGUFS {
        let path = fixture("gguf").join(format!("{name}.gguf"));
        assert_same(name, &|ctx, part| GgufFile::open(&path).unwrap().load_part(ctx, part).unwrap());
    }
}
