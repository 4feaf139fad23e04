//! Models described in files, for planning on paper: groups of equal layers, and what follows from them.
//!
//! [`Model::parse`] reads a file, [`Model::named`] returns a bundled one, and [`Model::shape`] gives the
//! [`ModelShape`](crate::ModelShape) that costs depend on.
//!
//! # The file
//!
//! ```toml
//! name = "two kinds of layers"
//! width = 4096
//! vocabulary = 32000
//! sequence = 4096                # tokens of a sequence
//! is_tied = false                # the embedding is the head too (false)
//! has_embedding = true           # false: only a head, as in a vision model (true)
//! is_causal = true               # a token sees half of the others on average (true)
//! mtp_layers = 0                 # layers that predict further tokens: one of the last kind, a projection, the head
//! other_params = 0               # parameters outside the layers besides embedding and head
//!
//! [[layers]]                     # in order
//! num = 4
//! attention = { heads = 32, kv_heads = 8, head_dim = 128 }
//! dense_width = 14336            # of the feed-forward without experts
//!
//! [[layers]]
//! num = 28
//! attention = { heads = 32, query_rank = 1536, kv_rank = 512, nope_dim = 128, rotary_dim = 64, value_dim = 128 }
//! experts = { num = 64, top_k = 2, width = 14336, shared_width = 0 }
//! expert_every = 2               # the second, fourth, .. have experts, the others `dense_width` (1: all)
//! dense_width = 14336
//! is_gated = true                # three matrices instead of two (true)
//! has_biases = false             # in attention and feed-forward (false)
//! ```
//!
//! A group may also have its own `width` and `token_share`, the tokens it computes for each token of the sequence
//! (for vision models whose image shrinks), `window`, the tokens that each attends to, and `has_cross_attention`.

mod count;
mod file;
mod named;

pub use count::LayerCost;
pub use file::ModelError;

/// A model: its layers in groups, and the parts outside them.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The name, for tables.
    pub name: String,
    /// D, the width.
    pub width: usize,
    /// V, the entries of the vocabulary; classes, in a vision model.
    pub vocabulary: usize,
    /// S, the tokens of a sequence.
    pub sequence: usize,
    /// True if embedding and head are one matrix.
    pub is_tied: bool,
    /// True if tokens are looked up in an embedding.
    pub has_embedding: bool,
    /// True if a token attends to the tokens before it alone.
    pub is_causal: bool,
    /// The number of layers that predict further tokens.
    pub mtp_layers: usize,
    /// Parameters outside the layers besides embedding and head.
    pub other_params: u64,
    /// The groups of layers, in order.
    pub groups: Vec<LayerGroup>,
}

/// A group of equal layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerGroup {
    /// The number of layers.
    pub num: usize,
    /// The width, if it is not the model's.
    pub width: Option<usize>,
    /// The tokens that the layers compute for each token of the sequence.
    pub token_share: f64,
    /// The attention, if there is one.
    pub attention: Option<Attention>,
    /// The number of tokens that each attends to, if not the sequence.
    pub window: Option<usize>,
    /// True if there is a second attention to an encoder's output, as large as the first.
    pub has_cross_attention: bool,
    /// The width of the feed-forward without experts; 0 for none.
    pub dense_width: usize,
    /// The experts, if there are any.
    pub experts: Option<Experts>,
    /// The distance of layers with experts: the last of each `expert_every` layers has them.
    pub expert_every: usize,
    /// True if feed-forwards have a gate: three matrices.
    pub is_gated: bool,
    /// True if projections have biases.
    pub has_biases: bool,
}

/// The sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Queries, keys and values are projections of the input; queries may share keys and values.
    Heads {
        /// The number of query heads.
        heads: usize,
        /// The number of heads of keys and values.
        kv_heads: usize,
        /// The width of a head.
        head_dim: usize,
    },
    /// Latent attention (DeepSeek-V2): queries, keys and values come from narrow vectors.
    Latent {
        /// The number of heads.
        heads: usize,
        /// The width of the vector that queries come from.
        query_rank: usize,
        /// The width of the vector that keys and values come from.
        kv_rank: usize,
        /// The width of a head's part without position.
        nope_dim: usize,
        /// The width of a head's part with position.
        rotary_dim: usize,
        /// The width of a value.
        value_dim: usize,
    },
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// E, the number of experts.
    pub num: usize,
    /// K, the number of experts a token.
    pub top_k: usize,
    /// F, the width of an expert.
    pub width: usize,
    /// The width of the expert that every token uses; 0 for none.
    pub shared_width: usize,
}
