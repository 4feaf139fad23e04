//! A model in use whose experts are spread over ranks: the root has everything else and makes the passes, the other
//! ranks compute their experts for it.

use moeworks_comm::CommError;
use moeworks_moe::{HeldLayer, RemoteExperts};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::pass::BatchError;
use crate::remote_stages::RemoteStages;
use crate::stage::Stage;
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

    /// Tells the ranks that hold experts or layers of the model that no more passes come, if there are any.
    ///
    /// # Errors
    /// [`CommError`] if a rank was lost.
    pub fn end_ranks(&self) -> Result<(), CommError> {
        self.rest.as_ref().map_or(Ok(()), RemoteStages::end)?;
        self.stage.remote.as_ref().map_or(Ok(()), RemoteExperts::end)
    }

    /// Returns why ranks that hold experts or layers of the model cannot go on, if they cannot.
    #[must_use]
    pub fn lost_rank(&self) -> Option<CommError> {
        let of_stages = self.rest.as_ref().and_then(RemoteStages::failure);
        of_stages.or_else(|| self.stage.remote.as_ref().and_then(RemoteExperts::failure))
    }

    /// Fails if a rank that holds experts or layers was lost: results since then are not those of the model.
    pub(crate) fn check_ranks(&self) -> Result<(), BatchError> {
        self.lost_rank().map_or(Ok(()), |failure| Err(BatchError::Ranks(failure)))
    }
}

impl Stage {
    /// Spreads the experts of a stage in use over the ranks of `remote`, whose root this rank is; see
    /// [`Decoder::with_remote_experts`].
    #[must_use]
    pub fn with_remote_experts(mut self, remote: &RemoteExperts) -> Self {
        self.set_remote_experts(remote);
        self
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
