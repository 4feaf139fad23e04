//! The order in which a training pass takes microbatches through layers, as a value.

/// The order of layers and microbatches in a training pass over several microbatches.
///
/// Gradients are the same, to the bit: each weight's are added up in the order of the microbatches, whichever the order of the pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassOrder {
    /// One microbatch after the other, each through all layers and back: the activations of one are kept at a time.
    #[default]
    MicrobatchByMicrobatch,
    /// One layer after the other, each with all microbatches, forward and then back: the weights of one are needed at a time, the
    /// activations of all microbatches are kept (with checkpoints the inputs of layers alone).
    LayerByLayer,
}

/// One thing that a training pass does with a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassAction {
    /// Embeds the tokens; an encoder reads its sources.
    Begin {
        /// The microbatch.
        microbatch: usize,
    },
    /// Goes through a layer.
    Forward {
        /// The microbatch.
        microbatch: usize,
        /// The layer.
        layer: usize,
    },
    /// Finds the losses, and the gradient of the residual stream behind the last layer.
    Losses {
        /// The microbatch.
        microbatch: usize,
    },
    /// Goes back through a layer.
    Backward {
        /// The microbatch.
        microbatch: usize,
        /// The layer.
        layer: usize,
    },
    /// Finds the gradient of the embedding, and goes back through an encoder.
    End {
        /// The microbatch.
        microbatch: usize,
    },
}

impl PassAction {
    /// The microbatch.
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
    /// The actions of a pass in their order. With `is_tied` the embedding is the output projection, too: its gradients as the embedding
    /// come after all others, so that each order adds up the same.
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
