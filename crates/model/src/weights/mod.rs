//! The weights of a model: the table that describes them ([`WeightTable`]), and the struct that holds them
//! ([`DecoderWeights`]).

mod build;
mod copies;
mod param_set;
mod part;
mod pattern;
mod role;
mod settings;
mod spec;
mod structs;
mod table;
mod table_builder;
mod walk;

pub use param_set::ParamSet;
pub use part::ModelPart;
pub(crate) use part::{TensorPart, as_range, chosen, part_shape, select};
pub use role::{WeightGroup, WeightPlace, WeightRole};
pub use settings::WeightRuleError;
pub use spec::{Init, Shard, WeightSpec};
pub use structs::{
    AttentionInputs, AttentionWeights, CrossWeights, DecoderWeights, DenseWeights, EncoderWeights, FeedForwardWeights,
    HeadWeights, LatentWeights, LayerWeights, LinearWeights, NormWeights, QueryDown,
};
pub use table::WeightTable;
pub use table_builder::TableBuilder;
