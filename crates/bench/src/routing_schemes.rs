//! The cost of routing by each scheme, compared with its layer: the table of `moeworks bench routing`.

use moeworks_moe::{
    ConfigError, MoeConfig, MoeLayer, MoeWeights, Overflow, Ramp, RouterInput, RouterKind, RoutingError, ScoreFunction,
};
use moeworks_ops::Context;
use moeworks_ops::elementwise::{cast, fill_normal};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::timing::best_seconds_of_many;

/// The shape of the layer whose routing is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// The number of tokens, T.
    pub num_tokens: usize,
    /// The width, D.
    pub width: usize,
    /// The width of an expert, F.
    pub expert_width: usize,
    /// The number of experts, E.
    pub num_experts: usize,
    /// The number of experts per token, K, of the schemes that have one.
    pub top_k: usize,
}

/// The cost of one scheme's routing.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingCost {
    /// The name of the scheme.
    pub name: String,
    /// The shortest time of a routing decision in training, from tokens to [`Routing`](moeworks_moe::Routing), in
    /// seconds.
    pub seconds: f64,
    /// The shortest time of the forward pass of a layer with as many experts per token and the plain scheme, in
    /// seconds.
    pub layer_seconds: f64,
    /// The mean number of experts per token.
    pub experts_per_token: f64,
}

impl RoutingCost {
    /// Returns the share of routing in the forward pass of a layer with this router in place of the plain one.
    #[must_use]
    pub fn share(&self, plain_seconds: f64) -> f64 {
        self.seconds / (self.layer_seconds - plain_seconds + self.seconds)
    }
}

/// The reason why nothing was measured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MeasureError {
    /// A scheme cannot have this shape.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A logit was not finite.
    #[error(transparent)]
    Routing(#[from] RoutingError),
}

type Options = (&'static str, fn(&mut MoeConfig));

/// Options of `top_k` with a cost of their own.
const OPTIONS: [Options; 7] = [
    ("top_k, sigmoid and expert bias", |c| {
        (c.router.scores, c.router.expert_bias) = (ScoreFunction::Sigmoid, true);
    }),
    ("top_k, 2 of 8 groups", |c| (c.router.num_groups, c.router.top_groups) = (8, 2)),
    ("top_k, 4 of each kind without computation", |c| {
        let router = &mut c.router;
        (router.zero_experts, router.copy_experts, router.constant_experts, router.null_experts) = (4, 4, 4, 4);
    }),
    ("top_k, rerouted at capacity 1", |c| (c.router.overflow, c.capacity_factor) = (Overflow::Reroute, 1.0)),
    ("top_k, two modalities", |c| {
        c.router.modality_boundaries = "5000".to_owned();
        c.router.modality_experts = "16, 16".to_owned();
    }),
    ("top_k, input dropout 0.1", |c| c.router.input_dropout = Ramp::constant(0.1)),
    ("top_k, random choices", |c| c.router.random_share = 1.0),
];

/// Lists every scheme and every option with a cost of its own, with its layer.
fn cases(plain: &MoeConfig) -> Vec<(String, MoeConfig)> {
    let of_kind = |&kind: &RouterKind| {
        let mut config = plain.clone();
        config.router.kind = kind;
        config.top_k = config.top_k.min(config.router.fixed_top_k().unwrap_or(2));
        let Some(change) = kind.doc().bench else { return (kind.name().to_owned(), config) };
        (change.apply)(&mut config);
        (format!("{}{}", kind.name(), change.label), config)
    };
    let of_options = |(name, change): Options| {
        let mut config = plain.clone();
        change(&mut config);
        (name.to_owned(), config)
    };
    RouterKind::ALL.iter().map(of_kind).chain(OPTIONS.map(of_options)).collect()
}

impl RoutingShape {
    fn config(&self) -> MoeConfig {
        MoeConfig::plain(self.width, self.expert_width, self.num_experts, self.top_k)
    }

    /// Measures every scheme whose name contains `schemes`, with tokens and experts of type `dtype`. `found` gets
    /// each cost and its share of the layer's forward pass.
    ///
    /// Logits have a standard deviation of 2, as those of trained routers. For ReLU routing they are shifted down so
    /// that a token has about [`top_k`](Self::top_k) experts.
    pub fn measure(
        &self,
        ctx: &Context,
        dtype: DType,
        schemes: &str,
        mut found: impl FnMut(&RoutingCost, f64),
    ) -> Result<(), MeasureError> {
        let is_meant = |name: &str| name.contains(schemes);
        let plain = self.config();
        let cases: Vec<_> = cases(&plain).into_iter().filter(|(name, _)| is_meant(name)).collect();
        if cases.is_empty() {
            return Ok(());
        }
        let mut x = ctx.empty(&[self.num_tokens, self.width], DType::F32);
        fill_normal(ctx, &Random::new(0, Purpose::Test, 0), 1.0, &mut x);
        // The last element of all tokens is equal, so that its weight shifts all logits of an expert.
        x.f32s_mut().chunks_exact_mut(self.width).for_each(|x| x[self.width - 1] = 1.0);
        let x = cast(ctx, &x, dtype);
        let mut plain_times = Vec::new();
        for top_k in [self.top_k, 1] {
            let config = MoeConfig { top_k, ..plain.clone() };
            let times = (self.layer_seconds(ctx, &config, &x)?, self.routing(ctx, &config, &x)?.0);
            plain_times.push((top_k, times));
        }
        for (name, config) in cases {
            let (seconds, experts_per_token) = self.routing(ctx, &config, &x)?;
            let times =
                plain_times.iter().find(|(top_k, _)| *top_k == config.top_k).map_or((0.0, 0.0), |found| found.1);
            let cost = RoutingCost { name, seconds, layer_seconds: times.0, experts_per_token };
            found(&cost, cost.share(times.1));
        }
        Ok(())
    }

    /// Times the forward pass of the layer of `config` in training.
    fn layer_seconds(&self, ctx: &Context, config: &MoeConfig, x: &Tensor) -> Result<f64, MeasureError> {
        let layer = MoeLayer::new(config.clone())?;
        let mut weights = MoeWeights::random(ctx, config, 0, 0.02);
        for experts in [&mut weights.gate_up, &mut weights.down] {
            *experts = cast(ctx, experts, x.dtype());
        }
        let seconds = best_seconds_of_many(ctx, || drop(layer.forward(ctx, &weights, x, &RouterInput::default())));
        drop(weights);
        ctx.pool().trim();
        Ok(seconds)
    }

    /// Times a routing decision, and counts the experts per token.
    fn routing(&self, ctx: &Context, config: &MoeConfig, x: &Tensor) -> Result<(f64, f64), MeasureError> {
        // The experts do not compute here, so they can be small.
        let config = MoeConfig { expert_width: 1, ..config.clone() };
        let layer = MoeLayer::new(config.clone())?;
        let mut weights = MoeWeights::random(ctx, &config, 0, 2.0 / (self.width as f32).sqrt());
        if config.router.has_relu_gates(config.top_k) {
            // The share K/E of a normal distribution lies above about this many standard deviations.
            let share = self.top_k as f32 / self.num_experts as f32;
            let shift = -2.0 * (-2.0 * (share * 2.5).min(0.9).ln()).sqrt();
            weights.router.f32s_mut().chunks_exact_mut(self.width).for_each(|row| row[self.width - 1] = shift);
        }
        let ids: Vec<u32> = (0..self.num_tokens as u32).map(|t| t.wrapping_mul(2_654_435_761) % 10_000).collect();
        let noise = Random::new(1, Purpose::Router, 0);
        let input = RouterInput { token_ids: &ids, progress: 0.5, ..RouterInput::with_noise(noise) };
        let routing = layer.route(ctx, &weights, x, &input)?;
        let num_choices = routing.expert_ids().iter().filter(|id| **id != moeworks_moe::NO_EXPERT).count();
        let seconds = best_seconds_of_many(ctx, || drop(layer.route(ctx, &weights, x, &input)));
        Ok((seconds, num_choices as f64 / self.num_tokens.max(1) as f64))
    }
}
