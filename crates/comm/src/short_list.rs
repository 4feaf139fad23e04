//! Short lists on the stack: a heap allocation would take a noticeable part of a short call's time.

/// The length up to which a list lies on the stack.
pub(crate) const MAX_SHORT: usize = 16;

/// Calls `work` with the list `item(0)`, ..., `item(len - 1)`. The list is borrowed, because moving it would take as
/// long as the rest of a short call.
#[inline(always)]
pub(crate) fn with_short_list<T: Copy + Default, R>(
    len: usize,
    item: impl Fn(usize) -> T,
    work: impl FnOnce(&[T]) -> R,
) -> R {
    if len > MAX_SHORT {
        return work(&(0..len).map(item).collect::<Vec<T>>());
    }
    let mut items = [T::default(); MAX_SHORT];
    for (index, place) in items[..len].iter_mut().enumerate() {
        *place = item(index);
    }
    work(&items[..len])
}
