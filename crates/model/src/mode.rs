//! The mode of a pass: training or inference.

/// The rules that a pass follows, and whether it keeps activations for a backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Training: experts have a capacity, routers have noise, and all activations that the backward pass needs are
    /// kept.
    Train,
    /// The rules of training without a backward pass: experts have a capacity, but nothing is random and nothing is
    /// kept.
    TrainForward,
    /// Inference: no token is dropped, nothing is random, nothing is kept.
    #[default]
    Infer,
}

impl Mode {
    /// Returns true if a backward pass follows.
    #[must_use]
    pub fn keeps_for_backward(self) -> bool {
        self == Self::Train
    }

    /// Returns true if routers follow the rules of training.
    #[must_use]
    pub fn has_training_rules(self) -> bool {
        self != Self::Infer
    }

    /// Returns the mode with the same rules that keeps no activations.
    #[must_use]
    pub fn without_backward(self) -> Self {
        if self.has_training_rules() { Self::TrainForward } else { Self::Infer }
    }
}
