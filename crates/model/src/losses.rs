//! The losses on the routers of all layers, from what the layers say about themselves.

use moeworks_moe::{LayerStats, LossGrad, balance_loss_per_layer, balance_loss_pooled, z_loss};

use crate::pass::{BalanceKind, PassOptions};

/// The balance loss and the z-loss of the MoE layers (not multiplied by their coefficients), and each layer's gradient
/// (multiplied by them).
pub(crate) fn router_losses(layers: &[LayerStats], options: &PassOptions) -> ((f64, f64), Vec<LossGrad>) {
    let layers: Vec<&LayerStats> = layers.iter().collect();
    let balance = match options.balance {
        BalanceKind::Layer => balance_loss_per_layer(&layers, options.balance_coef),
        BalanceKind::Pooled => balance_loss_pooled(&layers, options.balance_coef),
    };
    let grads = balance
        .gradients
        .into_iter()
        .map(|balance| LossGrad { balance, z: options.z_coef, sequence: options.sequence_coef })
        .collect();
    ((balance.value, z_loss(&layers)), grads)
}
