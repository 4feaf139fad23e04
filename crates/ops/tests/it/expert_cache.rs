//! Experts that stay in the host's memory and come to a GPU when tokens choose them.

use moeworks_gpu::{Emulation, ExpertCacheStats, Gpu, GpuOptions};
use moeworks_ops::experts::{ExpertRows, ExpertWeights, experts_forward, send_experts_ahead};
use moeworks_ops::{Activation, Context, elementwise, quantized};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

const D: usize = 64;
const F: usize = 32;
const E: usize = 6;

/// Stacked weights of a layer, and their pieces one by one where asked.
struct Layer {
    gate_up: Tensor,
    down: Tensor,
}

impl Layer {
    fn new(ctx: &Context, dtype: DType, seed: u64) -> Self {
        let of = |shape: &[usize], stream| {
            let mut tensor = ctx.zeros(shape, DType::F32);
            elementwise::fill_normal(ctx, &Random::new(seed, Purpose::Test, stream), 0.3, &mut tensor);
            match dtype {
                DType::F32 => tensor,
                DType::BF16 => elementwise::cast(ctx, &tensor, dtype),
                _ => quantized::quantize(ctx, &tensor, dtype),
            }
        };
        Self { gate_up: of(&[E, 2 * F, D], 0), down: of(&[E, D, F], 1) }
    }

    fn weights(&self) -> ExpertWeights<'_> {
        ExpertWeights { gate_up: &self.gate_up, down: &self.down, activation: Activation::SwiGlu }
    }

    /// Returns the weights with each expert's matrix as a tensor of its own.
    fn in_pieces(&self, ctx: &Context) -> Self {
        let pieces = |stack: &Tensor| {
            let len = stack.len() / E;
            let piece = |e: usize| {
                let values = &stack.to_f32_vec()[e * len..][..len];
                let piece = Tensor::from_slice(ctx.pool(), &[len / stack.cols(), stack.cols()], values);
                elementwise::cast(ctx, &piece, stack.dtype())
            };
            Tensor::of_pieces(ctx.pool(), (0..E).map(piece).collect(), stack.shape()).expect("pieces of a stack")
        };
        Self { gate_up: pieces(&self.gate_up), down: pieces(&self.down) }
    }

    fn expert_bytes(&self) -> usize {
        (self.gate_up.num_bytes() + self.down.num_bytes()) / E
    }

    /// The output of tokens, the first of which has the first of `experts` and so on, again and again.
    fn forward(&self, ctx: &Context, tokens: usize, experts: &[usize]) -> Vec<f32> {
        let mut x = ctx.zeros(&[tokens, D], DType::F32);
        elementwise::fill_normal(&ctx.on_host(), &Random::new(9, Purpose::Test, 0), 1.0, &mut x);
        let (mut offsets, mut order, mut token_rows) = (vec![0], Vec::new(), vec![0; tokens]);
        for expert in 0..E {
            for token in (0..tokens).filter(|token| experts[token % experts.len()] == expert) {
                token_rows[token] = order.len() as u32;
                order.push(token as u32);
            }
            offsets.push(order.len() as u32);
        }
        let ones = vec![1.0; tokens];
        let rows = ExpertRows::new(&offsets, &order, &ones, &token_rows, 1);
        experts_forward(ctx, &x, self.weights(), rows).0.to_f32_vec()
    }
}

/// GPUs with an expert cache of so many bytes, and the same without.
fn gpus(bytes: usize) -> Vec<[Context; 2]> {
    let options = &GpuOptions::for_tests();
    let emulations =
        [false, true].map(|is_hopper| Gpu::emulated(Emulation { is_hopper, ..Emulation::default() }, options));
    let all = emulations.into_iter().chain([Gpu::open(0, options)]);
    let there = all
        .filter_map(|gpu| gpu.inspect_err(|missing| println!("SKIPPED: experts in the host's memory: {missing}")).ok());
    let contexts = |gpu: Gpu| [gpu.clone().with_expert_cache(bytes), gpu].map(|gpu| Context::cpu(2).with_gpu(gpu));
    there.map(contexts).collect()
}

fn stats(ctx: &Context) -> ExpertCacheStats {
    ctx.gpu().and_then(Gpu::expert_cache_stats).expect("a GPU with a cache")
}

#[test]
fn experts_that_come_give_the_bits_of_experts_that_are_there() {
    for dtype in [DType::F32, DType::BF16, DType::Q8, DType::Q4] {
        let bytes = Layer::new(&Context::cpu(1), dtype, 1).expert_bytes();
        // Room for one, for some and for all; less than for one.
        for size in [bytes / 2, bytes, 2 * bytes + 7, 100 * bytes] {
            for [with_cache, without] in gpus(size) {
                let layer = Layer::new(&Context::cpu(1), dtype, 1);
                for (tokens, experts) in [(3, vec![4, 1, 4]), (40, vec![0, 5, 2, 3, 5]), (20, vec![3]), (0, vec![0])] {
                    let name = format!("{dtype:?} in {size} bytes, {tokens} tokens on {}", with_cache.describe());
                    let found = layer.forward(&with_cache, tokens, &experts);
                    assert!(
                        found == Layer::new(&Context::cpu(1), dtype, 1).forward(&without, tokens, &experts),
                        "{name}"
                    );
                    assert!(tokens == 0 || found.iter().any(|&y| y != 0.0), "{name}");
                }
            }
        }
    }
}

#[test]
fn matrices_that_lie_one_by_one_come_as_well() {
    let layer = Layer::new(&Context::cpu(1), DType::BF16, 1);
    for [with_cache, without] in gpus(2 * layer.expert_bytes()) {
        let expected = layer.forward(&without, 12, &[1, 0, 4]);
        assert_eq!(layer.in_pieces(&Context::cpu(1)).forward(&with_cache, 12, &[1, 0, 4]), expected);
    }
}

#[test]
fn experts_that_were_wanted_last_stay_and_no_more_than_there_is_room_for() {
    let host = Context::cpu(1);
    let (first, second) = (Layer::new(&host, DType::BF16, 1), Layer::new(&host, DType::BF16, 2));
    for [ctx, _] in gpus(3 * first.expert_bytes()) {
        let gpu = ctx.gpu().expect("a GPU");
        let before = gpu.held_bytes();
        first.forward(&ctx, 2, &[0, 1]);
        second.forward(&ctx, 1, &[0]);
        assert_eq!(stats(&ctx), ExpertCacheStats { misses: 3, ..ExpertCacheStats::default() });
        first.forward(&ctx, 1, &[1]);
        // The first layer's expert 0 makes way.
        second.forward(&ctx, 2, &[0, 5]);
        first.forward(&ctx, 1, &[1]);
        assert_eq!(stats(&ctx), ExpertCacheStats { misses: 4, hits: 3, ..ExpertCacheStats::default() });
        assert!(gpu.held_bytes() - before <= 3 * first.expert_bytes() + 4096, "{} bytes", gpu.held_bytes() - before);
    }
}

#[test]
fn experts_that_were_sent_ahead_are_there_and_do_not_make_those_wanted_now_give_way() {
    let host = Context::cpu(1);
    let (first, second) = (Layer::new(&host, DType::BF16, 1), Layer::new(&host, DType::BF16, 2));
    for [ctx, without] in gpus(3 * first.expert_bytes()) {
        first.forward(&ctx, 2, &[0, 1]);
        // The third of them finds no place.
        send_experts_ahead(&ctx, second.weights(), E, &[3, 3, 2, u32::MAX, 4]);
        assert_eq!(stats(&ctx), ExpertCacheStats { misses: 2, prefetches: 1, ..ExpertCacheStats::default() });
        let found = second.forward(&ctx, 2, &[2, 3]);
        assert_eq!(found, second.forward(&without, 2, &[2, 3]));
        let expected = ExpertCacheStats { misses: 3, hits: 1, prefetch_hits: 1, prefetches: 1 };
        assert_eq!(stats(&ctx), expected);
        send_experts_ahead(&ctx, second.weights(), E, &[2, 3]);
        assert_eq!(stats(&ctx), expected);
    }
    send_experts_ahead(&host, first.weights(), E, &[1]);
}
