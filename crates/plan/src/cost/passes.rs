//! Passes over memory of a training step: what lies between products, and the operands of products.

use crate::Precision;

/// Numbers of a token that the parts of a layer outside products read and write in a forward, in widths: two norms
/// (in and out) and two sums with the residual stream (two in, one out).
pub(crate) const LAYER_PASSES: f64 = 10.0;
/// Times that a query, a key or a value is read and written in a forward to rotate it, or to put it together from
/// the parts of latent attention.
pub(crate) const ROTARY_PASSES: f64 = 2.0;
/// Numbers of a routed row that are read and written besides those of the activation: to permute it, and to weigh
/// and sum it back.
pub(crate) const ROW_PASSES: f64 = 4.0;
/// Numbers of a received row that are read and written to sort rows by the experts of a rank, and back: the second
/// permutation of Megatron-Core's dispatchers, which ranks with one expert do without.
pub(crate) const SORT_PASSES: f64 = 4.0;

/// Bytes of memory that products pass for each number of their operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandBytes {
    /// The bytes of a weight, in F and in B.
    pub(crate) weight: f64,
    /// The bytes of a number in inputs and outputs, in F and in B.
    pub(crate) forward: f64,
    /// The bytes of a number in inputs and outputs, in W.
    pub(crate) weight_grad: f64,
}

impl OperandBytes {
    /// Returns the bytes of products in a precision. FP8 operands are quantised first: read in bf16, written twice,
    /// as rows and as columns, since W needs the columns, and read by the product. Outputs are bf16. So an input
    /// takes 5 bytes and an output 2, as many numbers of either on average, and W reads both as they are.
    pub(crate) fn new(precision: Precision) -> Self {
        let bytes = precision.bytes() as f64;
        match precision {
            Precision::Fp8 => Self { weight: 1.0, forward: 3.5, weight_grad: 1.0 },
            _ => Self { weight: bytes, forward: bytes, weight_grad: bytes },
        }
    }
}
