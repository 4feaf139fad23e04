//! Lists that are mostly short: these need no memory of the heap, which would take a part of a short call's time.

/// The longest list without.
pub(crate) const FEW: usize = 16;

/// What `work` makes of a list of `len` items: `item(0)`, `item(1)` and so on. (It is lent, not given: to move it
/// would take as long as the rest of a short call.)
#[inline(always)]
pub(crate) fn with_few<T: Copy + Default, R>(len: usize, item: impl Fn(usize) -> T, work: impl FnOnce(&[T]) -> R) -> R {
    if len > FEW {
        return work(&(0..len).map(item).collect::<Vec<T>>());
    }
    let mut items = [T::default(); FEW];
    for (index, place) in items[..len].iter_mut().enumerate() {
        *place = item(index);
    }
    work(&items[..len])
}
