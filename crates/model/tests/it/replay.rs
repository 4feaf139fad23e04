//! Expert ids that are handed in to the MoE layers of a whole model.

use moeworks_model::{
    Decoder, DecoderWeights, GradTarget, ModelConfig, PagedKvCache, PassOptions, PassStats, SequencePart, TokenBatch,
    Variant, WantedLogits,
};
use moeworks_moe::{ExpertIds, MoeSaved, RouterConfig, RouterKind};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::DType;

use crate::common::{assert_same_bits, batch, model, next_ids, random_ids, small_config};

const SEQ_LEN: usize = 8;
const NUM_SEQUENCES: usize = 3;

/// A dense layer and three with experts.
fn config() -> ModelConfig {
    let variant = Variant { dense_layers: vec![1], ..Variant::default() };
    ModelConfig { num_layers: 4, moe_every: 1, num_experts: 6, variant, max_seq_len: 100, ..small_config() }
}

struct Case {
    ctx: Context,
    decoder: Decoder,
    weights: DecoderWeights,
    inputs: Vec<u32>,
    targets: Vec<u32>,
}

impl Case {
    fn new(config: ModelConfig, dtype: DType) -> Self {
        let ctx = Context::cpu(2);
        let (decoder, weights) = model(&ctx, config);
        let weights = weights.compute_copy(&ctx, dtype);
        let inputs = random_ids(decoder.config().vocab_size, NUM_SEQUENCES * SEQ_LEN, 1);
        let targets = next_ids(&inputs, SEQ_LEN);
        Self { ctx, decoder, weights, inputs, targets }
    }

    fn batch<'a>(&'a self, expert_ids: &'a [ExpertIds]) -> TokenBatch<'a> {
        TokenBatch { expert_ids, ..batch(&self.inputs, &self.targets, SEQ_LEN) }
    }

    /// The experts that the routers choose.
    fn chosen(&self) -> Vec<ExpertIds> {
        let mut ids = Vec::new();
        let mut hook = |_: usize, saved: &MoeSaved| ids.push(saved.expert_ids().expect("top-k takes expert ids"));
        self.decoder.evaluate(&self.ctx, &self.weights, &self.batch(&[]), Some(&mut hook)).unwrap();
        ids
    }

    /// In each MoE layer every token goes to the experts `first..first + K`, `first` being the layer's number.
    fn forced(&self) -> Vec<ExpertIds> {
        let config = self.decoder.config();
        let (num_tokens, k) = (self.inputs.len(), config.top_k as u32);
        let list = |layer: usize| (0..num_tokens as u32 * k).map(|i| layer as u32 + i % k).collect();
        let lists: Vec<Vec<u32>> = config.moe_layers().into_iter().map(|(_, layer)| list(layer)).collect();
        self.decoder.expert_ids(&self.ctx, num_tokens, &lists).unwrap()
    }

    fn step(&self, expert_ids: &[ExpertIds], checkpoint_layers: bool) -> (PassStats, DecoderWeights) {
        let mut grads = self.weights.zeros_like(&self.ctx);
        let options = PassOptions {
            balance_coef: 0.01,
            z_coef: 0.001,
            grad_scale: 0.05,
            checkpoint_layers,
            ..PassOptions::default()
        };
        let (target, batches) = (GradTarget::new(Write::Replace, &mut grads), [self.batch(expert_ids)]);
        let mut stats = self.decoder.forward_backward(&self.ctx, &self.weights, &batches, &options, target).unwrap();
        (stats.remove(0), grads)
    }
}

#[test]
fn a_training_pass_with_the_experts_that_its_routers_choose_has_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::new(config(), dtype);
        let ids = case.chosen();
        assert_eq!(ids.len(), 3);
        for checkpoint_layers in [false, true] {
            let (plain, plain_grads) = case.step(&[], checkpoint_layers);
            let (replayed, grads) = case.step(&ids, checkpoint_layers);
            assert_eq!((replayed.loss_sum, &replayed.layers), (plain.loss_sum, &plain.layers));
            assert_same_bits(&grads, &plain_grads);
        }
    }
}

#[test]
fn tokens_go_to_the_experts_that_are_handed_in_also_where_layers_are_computed_again() {
    let case = Case::new(config(), DType::F32);
    let ids = case.forced();
    let (stats, grads) = case.step(&ids, false);
    let k = case.decoder.config().top_k;
    for (stats, layer) in stats.layers.iter().zip([0_usize, 2, 3]) {
        for (expert, &tokens) in stats.tokens_per_expert.iter().enumerate() {
            let is_chosen = (layer..layer + k).contains(&expert);
            assert_eq!(tokens as usize, if is_chosen { case.inputs.len() } else { 0 }, "layer {layer}");
        }
    }
    let (again, same) = case.step(&ids, true);
    assert_eq!((again.loss_sum, &again.layers), (stats.loss_sum, &stats.layers));
    assert_same_bits(&grads, &same);
    let evaluated = case.decoder.evaluate(&case.ctx, &case.weights, &case.batch(&ids), None).unwrap();
    assert_eq!(evaluated.loss_sum, stats.loss_sum);
    assert_ne!(evaluated.loss_sum, case.step(&[], false).0.loss_sum);
}

#[test]
fn the_gradient_with_expert_ids_is_that_of_the_loss_with_them() {
    let mut case = Case::new(config(), DType::F32);
    let ids = case.forced();
    let mut grads = case.weights.zeros_like(&case.ctx);
    let options = PassOptions { grad_scale: 1.0, balance_coef: 0.0, z_coef: 0.0, ..PassOptions::default() };
    let (target, batches) = (GradTarget::new(Write::Replace, &mut grads), [case.batch(&ids)]);
    case.decoder.forward_backward(&case.ctx, &case.weights, &batches, &options, target).unwrap();
    // Along the gradient of each tensor the loss rises by its squared norm.
    let tensors = grads.tensors();
    for (index, (name, direction)) in tensors.iter().enumerate().filter(|(_, (_, tensor))| !tensor.is_empty()) {
        let direction = direction.f32s();
        let squared: f64 = direction.iter().map(|&d| f64::from(d) * f64::from(d)).sum();
        if squared < 1e-8 {
            continue;
        }
        let step = 0.01 / squared.sqrt() as f32;
        let mut loss_at = |step: f32| {
            let moved = |weights: &mut DecoderWeights, step: f32| {
                let (_, tensor) = weights.tensors_mut().swap_remove(index);
                tensor.f32s_mut().iter_mut().zip(direction).for_each(|(w, d)| *w += step * d);
            };
            moved(&mut case.weights, step);
            let loss = case.decoder.evaluate(&case.ctx, &case.weights, &case.batch(&ids), None).unwrap().loss_sum;
            moved(&mut case.weights, -step);
            loss
        };
        let slope = (loss_at(step) - loss_at(-step)) / (2.0 * f64::from(step));
        assert!((slope - squared).abs() <= 0.02 * squared, "{name}: {slope}, not {squared}");
    }
}

#[test]
fn sequences_of_a_ragged_pass_go_to_their_experts_or_to_those_of_the_routers() {
    let case = Case::new(config(), DType::F32);
    let ctx = Context::cpu(2).with_batch_invariance(true);
    let texts: Vec<Vec<u32>> = [5, 9, 1, 7].iter().map(|&len| random_ids(50, len, len as u64)).collect();
    let forced = |text: &Vec<u32>| {
        let list: Vec<u32> = (0..text.len() as u32 * 2).map(|i| 3 + i % 2).collect();
        case.decoder.expert_ids(&ctx, text.len(), &[list.clone(), list.clone(), list]).unwrap()
    };
    // The first and the third are told their experts.
    let ids: Vec<Vec<ExpertIds>> =
        texts.iter().enumerate().map(|(i, text)| if i % 2 == 0 { forced(text) } else { Vec::new() }).collect();
    let blocks: Vec<Vec<u32>> = (0..4).map(|i| vec![2 * i + 1, 2 * i]).collect();
    let pass = |wanted: &[usize], ids: &[Vec<ExpertIds>]| {
        let part = |&i: &usize| SequencePart {
            ids: &texts[i],
            blocks: &blocks[i],
            logits: WantedLogits::All,
            expert_ids: &ids[i],
            ..SequencePart::default()
        };
        let parts: Vec<SequencePart<'_>> = wanted.iter().map(part).collect();
        let mut cache = PagedKvCache::new(case.decoder.config(), 8, 8);
        case.decoder.forward_ragged(&ctx, &case.weights, &mut cache, &parts, None).unwrap().f32s().to_vec()
    };
    let together = pass(&[0, 1, 2, 3], &ids);
    let alone: Vec<f32> = (0..4).flat_map(|i| pass(&[i], &ids)).collect();
    assert_eq!(together, alone);
    let none = vec![Vec::new(); 4];
    assert_eq!(pass(&[1], &ids), pass(&[1], &none));
    assert_ne!(pass(&[0], &ids), pass(&[0], &none));
}

#[test]
fn expert_ids_that_do_not_fit_are_refused_with_their_layer() {
    let case = Case::new(config(), DType::F32);
    let (ctx, decoder, ids) = (&case.ctx, &case.decoder, case.forced());
    let evaluate = |expert_ids: &[ExpertIds]| {
        decoder.evaluate(ctx, &case.weights, &case.batch(expert_ids), None).unwrap_err().to_string()
    };
    assert_eq!(evaluate(&ids[1..]), "expert ids for 2 MoE layers: the model has 3");
    let short = [ids[0].clone(), ids[1].rows(ctx, 0..23), ids[2].clone()];
    assert_eq!(evaluate(&short), "layer 2 has expert ids of 23 tokens among 6 experts: must be of 24 tokens among 6");
    let made = |lists: &[Vec<u32>]| decoder.expert_ids(ctx, 1, lists).unwrap_err().to_string();
    assert_eq!(made(&[vec![0, 1]]), "expert ids for 1 MoE layers: the model has 3");
    assert_eq!(
        made(&[vec![0, 1], vec![2, 6], vec![0, 1]]),
        "layer 2: choice 1 of token 0 is expert 6: must be below the number of experts, 6"
    );
    let router = RouterConfig { kind: RouterKind::ExpertChoice, ..RouterConfig::default() };
    let by_experts = Case::new(ModelConfig { router, ..config() }, DType::F32);
    let error = by_experts.decoder.expert_ids(ctx, 1, &vec![vec![0, 1]; 3]).unwrap_err().to_string();
    assert!(error.starts_with("layer 0: router.kind = expert_choice takes no expert ids"), "{error}");
}
