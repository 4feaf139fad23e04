//! The number type in which a paged cache keeps keys and values.

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_ops::elementwise::into_type;
use moeworks_ops::quantized::quantize;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;

/// The number type of keys and values in a paged cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// The type of activations.
    #[default]
    Activations,
    /// 32 bits.
    F32,
    /// 16 bits: rounded where activations are f32.
    Bf16,
    /// 8 bits in blocks of 32 numbers of a row, each with a scale of 16 bits. Attention reads them as the type of
    /// activations.
    Q8,
}

impl KvType {
    const ALL: [Self; 4] = [Self::Activations, Self::F32, Self::Bf16, Self::Q8];

    /// Returns the number of this type in messages.
    pub(crate) fn word(self) -> u32 {
        self as u32
    }

    /// Returns the type of this number.
    pub(crate) fn of_word(word: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kv_type| kv_type.word() == word)
    }

    /// Returns the type of stored numbers in a model with activations of type `activations`.
    #[must_use]
    pub fn dtype(self, activations: DType) -> DType {
        match self {
            Self::Activations => activations,
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::Q8 => DType::Q8,
        }
    }

    /// Checks that the rows of a model of `config` can be kept in this type.
    ///
    /// # Errors
    /// If they do not consist of whole blocks.
    pub fn check(self, config: &ModelConfig) -> Result<(), ConfigError> {
        let widths = match config.variant.latent {
            Some(latent) => vec![latent.kv_rank + latent.rotary_dim],
            None => vec![config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim()],
        };
        let block_len = self.dtype(DType::F32).block_len();
        match widths.iter().find(|width| !width.is_multiple_of(block_len)) {
            Some(width) => {
                let expected = format!(
                    "keys and values of a token have {width} numbers, which are no whole blocks of {block_len}"
                );
                Err(ConfigError::new("kv_type", "q8", expected))
            }
            None => Ok(()),
        }
    }

    /// Returns `x` in this type, without a copy if it is of that type.
    pub(crate) fn converted(self, ctx: &Context, x: &Tensor) -> Tensor {
        match self.dtype(x.dtype()) {
            dtype if dtype.is_quantized() => quantize(ctx, x, dtype),
            dtype => into_type(ctx, x.clone(), dtype),
        }
    }
}
