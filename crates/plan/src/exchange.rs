//! Exchanges between ranks that bring tokens and experts together: the path, the chunks and the wire format.

use crate::Links;

/// The path of an all-to-all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Each rank sends a message to each other rank.
    #[default]
    Linear,
    /// Messages go within the node first, then between nodes, larger by the number of ranks of a node (Tutel,
    /// 2206.03382, 2DH).
    Hierarchical,
    /// A token goes once to each node that has experts for it, and is handed on there (DeepEP: 2DH without duplicate
    /// copies).
    TwoHop,
}

impl Algorithm {
    /// All paths, the simplest first.
    pub const ALL: [Self; 3] = [Self::Linear, Self::Hierarchical, Self::TwoHop];
}

/// The wire format of a token's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Four bytes for each number.
    F32,
    /// Two bytes for each number; sums are f32.
    Bf16,
    /// Two bytes in IEEE half precision: more digits than bf16, but less range.
    F16,
    /// One byte for each number, and an f32 scale for each block of numbers.
    Byte {
        /// The numbers that share a scale.
        block: usize,
    },
    /// The largest numbers of a row alone, in IEEE half precision, with their places; the others become zeros.
    TopK {
        /// The thousandths of a row's numbers that travel, at least one number.
        per_mille: u16,
    },
    /// The largest numbers of a row alone, as one byte each with an f32 scale for the row; the others become zeros.
    TopKByte {
        /// The thousandths of a row's numbers that travel, at least one number.
        per_mille: u16,
    },
}

impl Wire {
    /// Returns the bytes of a row of `width` numbers.
    #[must_use]
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::F32 => 4 * width,
            Self::Bf16 | Self::F16 => 2 * width,
            Self::Byte { block } => width + 4 * width.div_ceil(block.max(1)),
            Self::TopK { per_mille } => {
                let kept = Self::num_kept(per_mille, width);
                2 * kept + Self::place_bytes(kept, width)
            }
            Self::TopKByte { per_mille } => {
                let kept = Self::num_kept(per_mille, width);
                4 * kept.min(1) + kept + Self::place_bytes(kept, width)
            }
        }
    }

    /// Returns how many of a row's `width` numbers travel where these thousandths of the largest do.
    #[must_use]
    pub fn num_kept(per_mille: u16, width: usize) -> usize {
        (width * usize::from(per_mille)).div_ceil(1000).clamp(width.min(1), width)
    }

    /// Returns whether the places of `kept` numbers are sent as a list of 16-bit numbers, not as a bit for each of
    /// `width`: whichever is shorter.
    #[must_use]
    pub fn lists_places(kept: usize, width: usize) -> bool {
        2 * kept < width.div_ceil(8) && width <= 1 << 16
    }

    /// Returns the bytes of the places of `kept` numbers among `width`.
    #[must_use]
    pub fn place_bytes(kept: usize, width: usize) -> usize {
        if Self::lists_places(kept, width) { 2 * kept } else { width.div_ceil(8) }
    }

    /// Returns the format for sums and gradients, which are compressed to no less than two bytes a number.
    #[must_use]
    pub fn of_sums(self) -> Self {
        if matches!(self, Self::Byte { .. }) { Self::Bf16 } else { self }
    }
}

/// The choice of what moves in a layer, made for each step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Moving {
    /// Tokens always move to their experts.
    #[default]
    Tokens,
    /// Experts always move to the tokens.
    Weights,
    /// An expert is fetched by all ranks where that takes less time than sending its tokens; the tokens of the others
    /// move ([`experts_to_fetch`](crate::experts_to_fetch)).
    Cheapest {
        /// The links of one rank.
        links: Links,
        /// Operations per second of one rank.
        flops: f64,
    },
}

/// The exchange of a layer's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The path of the tokens.
    pub algorithm: Algorithm,
    /// The number of chunks, so that one is computed while another is in flight; 0 for the number measured to be
    /// best.
    pub chunks: usize,
    /// The wire format of the tokens.
    pub wire: Wire,
}

impl Exchange {
    /// Makes an exchange in one piece on the direct path.
    #[must_use]
    pub fn plain(wire: Wire) -> Self {
        Self { algorithm: Algorithm::Linear, chunks: 1, wire }
    }
}
