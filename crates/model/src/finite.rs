//! A check of weights in memory for NaN and infinity, which a damaged file or a diverged training run leaves.

use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

use crate::weights::DecoderWeights;

impl DecoderWeights {
    /// Returns the name of the first tensor with NaN or infinity, if there is one. Reads every weight.
    #[must_use]
    pub fn first_not_finite(&self, ctx: &Context) -> Option<String> {
        let is_finite = |part: &Tensor| match part.dtype().is_quantized() {
            true => elementwise::sum_of_squares(ctx, &quantized::dequantize(ctx, part, DType::F32)).is_finite(),
            false => {
                let base = part.as_transposed().map_or(part, |(base, _)| base);
                elementwise::sum_of_squares(ctx, base).is_finite()
            }
        };
        let tensors = self.tensors().into_iter().chain(self.states());
        tensors.into_iter().find(|(_, tensor)| !tensor.parts().iter().all(is_finite)).map(|(name, _)| name)
    }
}
