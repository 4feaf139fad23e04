//! Parallel work on the rows of several tensors, block by block.

use std::sync::{Mutex, PoisonError};

use moeworks_ops::Context;

/// Rows per task. Sums over rows are split at these blocks, so that results do not depend on the threads.
pub(crate) const ROWS: usize = 128;

/// Runs `task` on each item, in any order and on any thread.
pub(crate) fn for_each<B: Send>(ctx: &Context, items: impl Iterator<Item = B>, task: impl Fn(usize, B) + Sync) {
    let items: Vec<Mutex<Option<B>>> = items.map(|item| Mutex::new(Some(item))).collect();
    ctx.threads().run(items.len(), |index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(item) = item {
            task(index, item);
        }
    });
}

/// Splits `values` into blocks of `ROWS` rows of width `width`.
pub(crate) fn split<T>(values: &[T], width: usize) -> std::slice::Chunks<'_, T> {
    values.chunks(ROWS * width)
}

/// Splits `values` into mutable blocks of `ROWS` rows of width `width`.
pub(crate) fn split_mut<T>(values: &mut [T], width: usize) -> std::slice::ChunksMut<'_, T> {
    values.chunks_mut(ROWS * width)
}
