//! What moves between ranks so that tokens and experts meet: tokens to experts, or experts to tokens, and by which
//! hops.

use crate::Links;

/// The path of an all-to-all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// A message from each rank to each other.
    #[default]
    Linear,
    /// Within the node first, then between nodes with messages larger by the ranks of a node (Tutel, 2206.03382,
    /// 2DH).
    Hierarchical,
    /// A token goes once to each node that has experts for it, and is handed on there (DeepEP, 2DH with copies left
    /// out).
    TwoHop,
}

/// The form of a token's row on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Four bytes a number.
    F32,
    /// Two bytes a number; sums are f32.
    Bf16,
    /// The same with more digits and less range: IEEE half precision.
    F16,
    /// A byte a number and an f32 scale for each block of this many.
    Byte {
        /// Numbers that share a scale.
        block: usize,
    },
}

impl Wire {
    /// Bytes of a row of `width` numbers.
    #[must_use]
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::F32 => 4 * width,
            Self::Bf16 | Self::F16 => 2 * width,
            Self::Byte { block } => width + 4 * width.div_ceil(block.max(1)),
        }
    }

    /// The form for what is no dispatch of tokens: sums and gradients are not cut to a byte a number but to two.
    #[must_use]
    pub fn of_sums(self) -> Self {
        if matches!(self, Self::Byte { .. }) { Self::Bf16 } else { self }
    }
}

/// What may move in a layer, chosen for each step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Moving {
    /// Tokens always.
    #[default]
    Tokens,
    /// Experts always.
    Weights,
    /// The experts that it takes less time to bring to all ranks than their tokens to them, by what a rank can do;
    /// the tokens of the others ([`experts_to_fetch`](crate::experts_to_fetch)).
    Cheapest {
        /// From or to one rank.
        links: Links,
        /// Operations a second of one rank.
        flops: f64,
    },
}

/// How the tokens of a layer and its experts meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// By which hops tokens go.
    pub algorithm: Algorithm,
    /// In how many chunks, so that one is computed while another is under way; 0 for the number that is measured to
    /// be best.
    pub chunks: usize,
    /// In which form tokens go.
    pub wire: Wire,
}

impl Exchange {
    /// Tokens in one piece, as they are.
    #[must_use]
    pub fn plain(wire: Wire) -> Self {
        Self { algorithm: Algorithm::Linear, chunks: 1, wire }
    }
}
