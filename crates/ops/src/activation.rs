//! Activations of feed-forward networks.

/// What stands between the projections of a feed-forward network or an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `silu(gate) * up`, three matrices (Shazeer, 2002.05202). The pre-activation has 2F columns: gate first, then up.
    SwiGlu,
    /// `x * Phi(x)` with the exact error function, two matrices.
    Gelu,
    /// `max(x, 0)`, two matrices.
    Relu,
}

impl Activation {
    /// Columns of the pre-activation for each column of the activation: 2 for gated ones, 1 otherwise.
    #[must_use]
    pub const fn num_inputs(self) -> usize {
        match self {
            Self::SwiGlu => 2,
            Self::Gelu | Self::Relu => 1,
        }
    }
}
