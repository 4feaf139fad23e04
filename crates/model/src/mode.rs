//! The rules that a pass follows.

/// The rules that a pass follows, and whether it keeps something for a backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Training: an expert takes no more tokens than its capacity, routers have their noise, and everything that the backward pass needs
    /// is kept.
    Train,
    /// The rules of training without a backward pass: capacity holds, nothing is random, nothing is kept.
    TrainForward,
    /// Use: each token chooses for itself, no token is dropped for a share, nothing is random, nothing is kept.
    #[default]
    Infer,
}

impl Mode {
    /// Whether a backward pass follows.
    #[must_use]
    pub fn keeps_for_backward(self) -> bool {
        self == Self::Train
    }

    /// Whether routers follow the rules of training.
    #[must_use]
    pub fn has_training_rules(self) -> bool {
        self != Self::Infer
    }

    /// The mode with the same rules that keeps nothing.
    #[must_use]
    pub fn without_backward(self) -> Self {
        if self.has_training_rules() { Self::TrainForward } else { Self::Infer }
    }
}
