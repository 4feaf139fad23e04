//! A model in use whose experts are spread over ranks: the root has everything else and makes the passes, the other
//! ranks compute their experts for it.

use moeworks_moe::{HeldLayer, RemoteExperts};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::pass::BatchError;
use crate::weights::{DecoderWeights, FeedForwardWeights};

impl Decoder {
    /// Spreads the experts of the model over the ranks of `remote`, for use, not for training. The weights of its
    /// passes then have the experts of this rank, the root, alone ([`ModelPart::Root`](crate::ModelPart)). Methods
    /// that make passes return an error once a rank was lost.
    #[must_use]
    pub fn with_remote_experts(mut self, remote: &RemoteExperts) -> Self {
        self.stage.set_remote_experts(remote);
        if let Some(encoder) = &mut self.encoder {
            encoder.set_remote_experts(remote);
        }
        self
    }

    /// Returns the ranks that hold the experts, if they are spread over several.
    #[must_use]
    pub fn remote_experts(&self) -> Option<&RemoteExperts> {
        self.stage.remote.as_ref()
    }

    /// Fails if a rank that holds experts was lost: results since then are not those of the model.
    pub(crate) fn check_ranks(&self) -> Result<(), BatchError> {
        let failure = self.stage.remote.as_ref().and_then(RemoteExperts::failure);
        failure.map_or(Ok(()), |failure| Err(BatchError::Ranks(failure)))
    }
}

impl DecoderWeights {
    /// Lists the layers of a model of `config` that have experts, with the weights of those that are here, for
    /// [`serve_experts`](moeworks_moe::serve_experts). An encoder's layers come first and are numbered first.
    #[must_use]
    pub fn held_layers(&self, config: &ModelConfig) -> Vec<HeldLayer<'_>> {
        let activation = config.moe().activation;
        let of_encoder = self.encoder.iter().flat_map(|encoder| &encoder.layers);
        let layers = of_encoder.chain(&self.layers).enumerate();
        let held = layers.filter_map(|(number, layer)| match &layer.feed_forward {
            FeedForwardWeights::Moe(weights) => Some(HeldLayer { number, weights, activation }),
            FeedForwardWeights::Dense(_) => None,
        });
        held.collect()
    }
}
