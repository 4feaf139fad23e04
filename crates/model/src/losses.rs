//! The losses on the routers of all layers, from what the layers say about themselves.

use moeworks_moe::{
    EntropyRule, LayerStats, LossGrad, RouterConfig, RouterKind, balance_loss_gshard, balance_loss_of_groups,
    balance_loss_per_layer, balance_loss_pooled, cv_squared, entropy_loss, z_loss,
};

use crate::pass::{BalanceKind, PassOptions};

/// The balance loss and the z-loss of the MoE layers (not multiplied by their coefficients), and each layer's gradient
/// (multiplied by them).
pub(crate) fn router_losses(
    layers: &[LayerStats],
    router: &RouterConfig,
    options: &PassOptions,
) -> ((f64, f64), Vec<LossGrad>) {
    let all: Vec<&LayerStats> = layers.iter().collect();
    let coef = options.balance_coef;
    let balance = match options.balance {
        BalanceKind::Layer => balance_loss_per_layer(&all, coef),
        BalanceKind::Pooled => balance_loss_pooled(&all, coef),
        BalanceKind::Gshard => balance_loss_gshard(&all, coef),
        BalanceKind::Groups => balance_loss_of_groups(&all, router.num_groups, coef),
    };
    let grads = balance.gradients.into_iter().zip(layers).map(|(balance, layer)| {
        let mut grad = LossGrad { balance, z: options.z_coef, sequence: options.sequence_coef, ..LossGrad::default() };
        add_layer_losses(layer, options, &mut grad);
        if router.kind == RouterKind::Relu {
            grad.l1 = options.l1_scale;
        }
        grad
    });
    let grads = grads.collect();
    ((balance.value, z_loss(&all)), grads)
}

/// The gradients of the losses that are of one layer and off unless asked for.
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
