//! What moves between ranks so that tokens and experts meet: tokens to experts, or experts to tokens, and by which hops.

use crate::Placement;

/// The path of an all-to-all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// A message from each rank to each other.
    #[default]
    Linear,
    /// Within the node first, then between nodes with messages larger by the ranks of a node (Tutel, 2206.03382, 2DH).
    Hierarchical,
    /// A token goes once to each node that has experts for it, and is handed on there (DeepEP, 2DH with copies left out).
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

/// What moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moved {
    /// Tokens go to the ranks that hold their experts.
    #[default]
    Tokens,
    /// Experts' weights come to the ranks that have tokens for them, and their gradients go back.
    Weights,
}

/// What may move in a layer, chosen for each step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Moving {
    /// Tokens always.
    #[default]
    Tokens,
    /// Experts always.
    Weights,
    /// The experts that it takes less time to bring to all ranks than their tokens to them, by what a rank can do; the tokens of
    /// the others.
    Cheapest {
        /// Bytes a second from or to one rank.
        bytes_per_s: f64,
        /// Operations a second of one rank.
        flops: f64,
    },
}

/// How the tokens of a layer and its experts meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Tokens or weights.
    pub moved: Moved,
    /// By which hops tokens go.
    pub algorithm: Algorithm,
    /// In how many chunks, so that one is computed while another is under way; 0 for the number that is measured to be best.
    pub chunks: usize,
    /// In which form tokens go.
    pub wire: Wire,
}

impl Exchange {
    /// Tokens in one piece, as they are.
    #[must_use]
    pub fn plain(wire: Wire) -> Self {
        Self { moved: Moved::Tokens, algorithm: Algorithm::Linear, chunks: 1, wire }
    }
}

/// What [`choose_moved`] weighs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeCosts {
    /// Bytes of a token's row on the wire.
    pub row_bytes: f64,
    /// Bytes of an expert's weights; its gradients have as many.
    pub expert_bytes: f64,
    /// Bytes a second from or to one rank.
    pub bytes_per_s: f64,
    /// Seconds of an expert's computation of a row, forward and backward.
    pub row_seconds: f64,
}

/// Seconds of a layer, forward and backward, when tokens move and when weights move. `counts[rank][expert]` are the rows that
/// each rank has for each expert.
///
/// Tokens: the busiest rank sends or receives its rows four times (dispatch and combine, forward and backward) and the busiest
/// rank computes what it got. Weights: a rank fetches each expert that it has rows for and does not hold, and sends the
/// gradients back; it computes its own rows.
#[must_use]
pub fn seconds_of(counts: &[Vec<u32>], placement: &Placement, costs: &ExchangeCosts) -> (f64, f64) {
    let n = placement.num_ranks();
    let (mut sent, mut received, mut computed) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
    let (mut fetched, mut lent) = (vec![0.0; n], vec![0.0; n]);
    for (source, row) in counts.iter().enumerate() {
        for (expert, &rows) in row.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            let server = placement.serving_rank(source, expert);
            computed[server] += f64::from(rows);
            if server != source {
                sent[source] += f64::from(rows);
                received[server] += f64::from(rows);
                fetched[source] += 1.0;
                lent[server] += 1.0;
            }
        }
    }
    let busiest = |a: &[f64], b: &[f64]| a.iter().chain(b).copied().fold(0.0, f64::max);
    let own = counts.iter().map(|row| row.iter().map(|&rows| f64::from(rows)).sum()).fold(0.0, f64::max);
    let most_computed = busiest(&computed, &[]);
    let tokens = 4.0 * busiest(&sent, &received) * costs.row_bytes / costs.bytes_per_s;
    let weights = 2.0 * busiest(&fetched, &lent) * costs.expert_bytes / costs.bytes_per_s;
    (tokens + most_computed * costs.row_seconds, weights + own * costs.row_seconds)
}

/// Whether tokens or weights are to move in a layer; tokens where both take the same time.
#[must_use]
pub fn choose_moved(counts: &[Vec<u32>], placement: &Placement, costs: &ExchangeCosts) -> Moved {
    let (tokens, weights) = seconds_of(counts, placement, costs);
    if weights < tokens { Moved::Weights } else { Moved::Tokens }
}
