//! Decoders whose weights are spread over several ranks.

use std::sync::Arc;

use moeworks_model::{Decoder, ModelConfig, WeightTable};

use crate::config::ConfigError;
use crate::error::TrainError;
use crate::parallel::{Ranks, WholeLayers};

/// Creates the decoder of `config`, whose vocabulary is set, with the weights of `table`. This rank holds its part of
/// them, or slices of it. All ranks call this, once.
pub(crate) fn decoder_on_ranks(
    ranks: &Arc<Ranks>,
    config: ModelConfig,
    table: WeightTable,
) -> Result<Decoder, TrainError> {
    let decoder = match ranks.cut_tensors(&config, &table)? {
        None => Decoder::expert_parallel(config, table, ranks.experts().clone()),
        Some(tensor_ranks) => Decoder::tensor_parallel(config, table, tensor_ranks.clone()),
    };
    let decoder = decoder.map_err(ConfigError::from)?;
    ranks.hold(decoder.weight_table());
    let gather = || Arc::new(WholeLayers::new(Arc::clone(ranks)));
    Ok(if ranks.shards_weights() { decoder.gathering(gather()) } else { decoder })
}
