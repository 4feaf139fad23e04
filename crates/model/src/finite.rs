//! Looking for weights that are no numbers: a file may be damaged, or a training run may have gone wrong.

use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

use crate::weights::DecoderWeights;

impl DecoderWeights {
    /// The name of the first tensor with a NaN or an infinity in it, if there is one. Reads every weight.
    #[must_use]
    pub fn first_not_finite(&self, ctx: &Context) -> Option<String> {
        let is_finite = |part: &Tensor| match part.dtype().is_quantized() {
            true => elementwise::sum_of_squares(ctx, &quantized::dequantize(ctx, part, DType::F32)).is_finite(),
            false => {
                let base = part.as_turned().map_or(part, |(base, _)| base);
                elementwise::sum_of_squares(ctx, base).is_finite()
            }
        };
        let tensors = self.tensors().into_iter().chain(self.states());
        tensors.into_iter().find(|(_, tensor)| !tensor.parts().iter().all(is_finite)).map(|(name, _)| name)
    }
}
