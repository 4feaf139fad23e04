//! The auxiliary losses on the routers of all layers, from the layers' statistics.

use moeworks_moe::{
    BalanceLoss, EntropyRule, LayerStats, LossGrad, RouterConfig, balance_loss_gshard, balance_loss_per_layer,
    balance_loss_pooled, communication_loss, cv_squared, entropy_loss, group_balance_loss, l1_loads, z_loss,
};

use crate::config::ModelConfig;
use crate::pass::{BalanceKind, PassOptions, RouterLosses};

/// The losses on all routers, without their coefficients.
#[derive(Clone, Copy, Debug)]
pub struct LossValues {
    /// The balance loss.
    pub balance: f64,
    /// The router z-loss.
    pub z: f64,
    /// The other losses.
    pub others: RouterLosses,
}

/// The losses on a model's routers, and their gradients.
#[derive(Clone, Debug)]
pub struct RouterLoss {
    /// The losses.
    pub values: LossValues,
    /// The gradients of each MoE layer in order, multiplied by the coefficients.
    pub grads: Vec<LossGrad>,
}

/// Computes the losses on routers of a model of `config` from the statistics of all its MoE layers, in order.
#[must_use]
pub fn router_losses(config: &ModelConfig, layers: &[LayerStats], options: &PassOptions) -> RouterLoss {
    let (router, top_k) = (&config.router, config.top_k);
    let all: Vec<&LayerStats> = layers.iter().collect();
    let coef = options.balance_coef;
    let balance = match options.balance {
        BalanceKind::Layer => balance_loss_per_layer(&all, coef),
        BalanceKind::Pooled => balance_loss_pooled(&all, coef),
        // Reported, though it has no gradient.
        BalanceKind::None => balance_loss_pooled(&all, 0.0),
        BalanceKind::Gshard => balance_loss_gshard(&all),
    };
    let groups = group_losses(&all, router, options);
    let mut others = other_losses(&all, router, top_k, options);
    [others.device, others.communication] = groups.each_ref().map(|loss| Some(loss.as_ref()?.value));
    let value = balance.value;
    let balance = groups.into_iter().flatten().fold(balance, plus);
    let grads = balance.gradients.into_iter().zip(layers).map(|(balance, layer)| {
        let mut grad = LossGrad { balance, z: options.z_coef, sequence: options.sequence_coef, ..LossGrad::default() };
        if options.balance == BalanceKind::Gshard {
            grad.gshard = coef;
        }
        add_layer_losses(layer, options, &mut grad);
        if let Some(is_balanced) = router.l1_is_balanced() {
            grad.l1 = options.l1_scale / layers.len() as f32;
            grad.l1_loads = if is_balanced { l1_loads(layer, top_k) } else { Vec::new() };
        }
        grad
    });
    let grads = grads.collect();
    RouterLoss { values: LossValues { balance: value, z: z_loss(&all), others }, grads }
}

/// Computes the device-level and communication losses, if experts are in groups.
fn group_losses(layers: &[&LayerStats], router: &RouterConfig, options: &PassOptions) -> [Option<BalanceLoss>; 2] {
    if router.num_groups < 2 || layers.is_empty() {
        return [None, None];
    }
    let device = group_balance_loss(layers, router.num_groups, options.device_coef);
    let RouterConfig { num_groups, top_groups, .. } = *router;
    [Some(device), Some(communication_loss(layers, num_groups, top_groups, options.communication_coef))]
}

/// Adds the gradients of `other` to those of `sum`.
fn plus(mut sum: BalanceLoss, other: BalanceLoss) -> BalanceLoss {
    for (sum, other) in sum.gradients.iter_mut().zip(other.gradients) {
        sum.resize(other.len(), 0.0);
        sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
    }
    sum
}

/// Computes the losses other than balance and z-loss, summed over the layers.
fn other_losses(layers: &[&LayerStats], router: &RouterConfig, top_k: usize, options: &PassOptions) -> RouterLosses {
    if layers.is_empty() {
        return RouterLosses::default();
    }
    let sum = |loss: &dyn Fn(&LayerStats) -> f64| Some(layers.iter().map(|layer| loss(layer)).sum::<f64>());
    let has_noise = layers.iter().all(|layer| !layer.smooth_load.is_empty());
    // An expert's importance is the sum of its weights, which are a token's gates times the scale.
    let l1 = |layer: &LayerStats| {
        let scale = f64::from(router.routed_scale) * layer.num_tokens.max(1) as f64;
        let loads = if router.l1_is_balanced() == Some(true) {
            l1_loads(layer, top_k)
        } else {
            vec![1.0; layer.importance.len()]
        };
        layer.importance.iter().zip(loads).map(|(sum, load)| sum * f64::from(load)).sum::<f64>() / scale
    };
    RouterLosses {
        device: None,
        communication: None,
        sequence: if options.sequence_coef == 0.0 { None } else { sum(&|layer| layer.sequence_loss) },
        importance: sum(&|layer| cv_squared(&layer.importance, 0.0).0),
        load: if has_noise { sum(&|layer| cv_squared(&layer.smooth_load, 0.0).0) } else { None },
        local_entropy: sum(&|layer| entropy_loss(layer, &options.entropy).local),
        global_entropy: sum(&|layer| entropy_loss(layer, &options.entropy).global),
        l1: if router.l1_is_balanced().is_some() { sum(&l1).map(|sum| sum / layers.len() as f64) } else { None },
    }
}

/// Adds the gradients of the losses that are per layer and off by default.
fn add_layer_losses(layer: &LayerStats, options: &PassOptions, grad: &mut LossGrad) {
    if options.importance_coef != 0.0 {
        grad.importance = cv_squared(&layer.importance, options.importance_coef).1;
    }
    if options.load_coef != 0.0 && !layer.smooth_load.is_empty() {
        grad.load = cv_squared(&layer.smooth_load, options.load_coef).1;
    }
    let EntropyRule { local, global, .. } = options.entropy;
    if local != 0.0 || global != 0.0 {
        let loss = entropy_loss(layer, &options.entropy);
        (grad.entropy, grad.modality_balance) = (loss.entropy, loss.modality_balance);
    }
}
