//! Matrices of groups that lie in memory one by one.

use moeworks_tensor::Tensor;

use super::On;

/// The matrices of groups that are not in one stack.
#[derive(Clone, Copy)]
pub(super) struct Scattered<'a> {
    /// `[E]` of 64 bits, as pairs of 32: the address of each group's matrix.
    pub(super) addresses: &'a Tensor,
    /// The groups that have an address.
    pub(super) groups: &'a [u32],
}

impl Scattered<'_> {
    /// Returns the addresses of these groups' matrices in a stack that has them alone, one behind the other.
    pub(super) fn in_stack(self, on: On<'_>, stack: &Tensor) -> Tensor {
        let mut addresses = vec![0; self.addresses.len()];
        let bytes = stack.num_bytes() / self.groups.len().max(1);
        for (place, &group) in self.groups.iter().enumerate() {
            let address = on.gpu.address(stack) + (place * bytes) as u64;
            addresses[2 * group as usize..][..2].copy_from_slice(&[address as u32, (address >> 32) as u32]);
        }
        on.u32s(&addresses)
    }
}
