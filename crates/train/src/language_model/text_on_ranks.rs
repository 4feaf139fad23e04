//! Passes of inference that all ranks make together, over tokens of the root: a text that the model writes, and what its routers choose
//! for some tokens. Nowhere is more of the model than there always is.

use moeworks_infer::generation::ModelRef;
use moeworks_model::KvCache;
use moeworks_tensor::Tensor;

use crate::error::TrainError;
use crate::parallel::Ranks;

impl Ranks {
    /// Whether this rank passes the root's tokens: the root, and those that hold what is no expert with it. The others serve rows of
    /// theirs.
    pub(crate) fn passes_with_root(&self) -> bool {
        let (dp, ep, _) = self.layout().place(self.rank());
        (dp, ep) == (0, 0)
    }

    /// The root's: tells the others which ids come next in the text, and finds the logits after them.
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

    /// The others': takes part in the text until the root [ends](Self::end_text) it.
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

    /// The root's: no more ids come.
    pub(crate) fn end_text(&self) -> Result<(), TrainError> {
        self.tell(&[])
    }

    fn tell(&self, ids: &[u32]) -> Result<(), TrainError> {
        self.world().broadcast(&mut [ids.len() as u64], 0)?;
        Ok(self.world().broadcast(&mut ids.to_vec(), 0)?)
    }

    fn told(&self) -> Result<Vec<u32>, TrainError> {
        let mut len = [0_u64];
        self.world().broadcast(&mut len, 0)?;
        let mut ids = vec![0; len[0] as usize];
        self.world().broadcast(&mut ids, 0)?;
        Ok(ids)
    }
}
