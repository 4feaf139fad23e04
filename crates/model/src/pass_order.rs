//! The order in which a training pass takes microbatches through layers, as a value.

/// The order of layers and microbatches in a training pass over several microbatches.
///
/// Gradients have the same bits in every order, because those of each weight are always summed in the order of the
/// microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassOrder {
    /// One microbatch after the other, each forward and backward through all layers. Activations of one microbatch
    /// are kept at a time.
    #[default]
    MicrobatchByMicrobatch,
    /// One layer after the other, each with all microbatches, forward and then backward. Weights of one layer are
    /// needed at a time; activations of all microbatches are kept (with checkpoints, only the inputs of layers).
    LayerByLayer,
}

/// One action of a training pass on a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassAction {
    /// Embeds the tokens; an encoder reads its sources.
    Begin {
        /// The microbatch.
        microbatch: usize,
    },
    /// Runs forward through a layer.
    Forward {
        /// The microbatch.
        microbatch: usize,
        /// The layer.
        layer: usize,
    },
    /// Computes the losses, and the gradient of the residual stream after the last layer.
    Losses {
        /// The microbatch.
        microbatch: usize,
    },
    /// Runs backward through a layer.
    Backward {
        /// The microbatch.
        microbatch: usize,
        /// The layer.
        layer: usize,
    },
    /// Computes the gradient of the embedding, and runs backward through an encoder.
    End {
        /// The microbatch.
        microbatch: usize,
    },
}

impl PassAction {
    /// Returns the microbatch.
    #[must_use]
    pub fn microbatch(self) -> usize {
        let (Self::Begin { microbatch }
        | Self::Forward { microbatch, .. }
        | Self::Losses { microbatch }
        | Self::Backward { microbatch, .. }
        | Self::End { microbatch }) = self;
        microbatch
    }
}

impl PassOrder {
    /// Lists the actions of a pass in order. With `is_tied` the embedding is also the output projection; its
    /// gradients as the embedding then come after all others, so that every order sums alike.
    #[must_use]
    pub fn actions(self, num_layers: usize, num_microbatches: usize, is_tied: bool) -> Vec<PassAction> {
        let all = 0..num_microbatches;
        let groups: Vec<_> = match self {
            Self::MicrobatchByMicrobatch => all.clone().map(|microbatch| microbatch..microbatch + 1).collect(),
            Self::LayerByLayer => vec![all.clone()],
        };
        let mut actions = Vec::new();
        for group in groups {
            actions.extend(group.clone().map(|microbatch| PassAction::Begin { microbatch }));
            for layer in 0..num_layers {
                actions.extend(group.clone().map(|microbatch| PassAction::Forward { microbatch, layer }));
            }
            actions.extend(group.clone().map(|microbatch| PassAction::Losses { microbatch }));
            for layer in (0..num_layers).rev() {
                actions.extend(group.clone().map(|microbatch| PassAction::Backward { microbatch, layer }));
            }
            if !is_tied {
                actions.extend(group.map(|microbatch| PassAction::End { microbatch }));
            }
        }
        if is_tied {
            actions.extend(all.map(|microbatch| PassAction::End { microbatch }));
        }
        actions
    }
}

#[cfg(test)]
#[path = "pass_order_tests.rs"]
mod tests;
