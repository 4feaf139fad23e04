//! Inference passes of all ranks together over the root's tokens: sampling a text, and routing some tokens. No rank
//! holds more of the model than in training.

use moeworks_infer::generation::ModelRef;
use moeworks_model::KvCache;
use moeworks_tensor::Tensor;

use crate::error::TrainError;
use crate::parallel::Ranks;

impl Ranks {
    /// Returns whether this rank passes the root's tokens: the root, and the tensor-parallel ranks of its place.
    /// Other ranks only serve their experts to it.
    pub(crate) fn passes_with_root(&self) -> bool {
        let (dp, ep, _) = self.layout().place(self.rank());
        (dp, ep) == (0, 0)
    }

    /// On the root: broadcasts the next ids of the text and computes the logits after them.
    pub(crate) fn extend_together(
        &self,
        ModelRef { ctx, decoder, weights }: ModelRef<'_>,
        cache: &mut KvCache,
        ids: &[u32],
    ) -> Result<Tensor, TrainError> {
        self.tell(ids)?;
        let logits = decoder.forward_cached(ctx, weights, cache, ids, None)?;
        self.check()?;
        Ok(logits)
    }

    /// On the other ranks: takes part in the text until the root [ends](Self::end_text) it.
    pub(crate) fn follow_text(&self, ModelRef { ctx, decoder, weights }: ModelRef<'_>) -> Result<(), TrainError> {
        let mut cache = KvCache::new(decoder.config());
        loop {
            let ids = self.told()?;
            if ids.is_empty() {
                return Ok(());
            }
            if self.passes_with_root() {
                decoder.forward_cached(ctx, weights, &mut cache, &ids, None)?;
            } else {
                decoder.serve_inference(ctx, weights);
            }
            self.check()?;
        }
    }

    /// On the root: announces the end of the text.
    pub(crate) fn end_text(&self) -> Result<(), TrainError> {
        self.tell(&[])
    }

    /// Tells the other ranks the next ids of a text.
    pub(super) fn tell(&self, ids: &[u32]) -> Result<(), TrainError> {
        self.world().broadcast(&mut [ids.len() as u64], 0)?;
        Ok(self.world().broadcast(&mut ids.to_vec(), 0)?)
    }

    /// The next ids of a text; none at its end.
    pub(super) fn told(&self) -> Result<Vec<u32>, TrainError> {
        let mut len = [0_u64];
        self.world().broadcast(&mut len, 0)?;
        let mut ids = vec![0; len[0] as usize];
        self.world().broadcast(&mut ids, 0)?;
        Ok(ids)
    }
}
