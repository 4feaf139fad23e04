//! The sequences of an attention: their numbers of queries and keys, and the rows of tensors that hold them.

use std::ops::Range;

use super::AttentionShape;

/// The sizes that all sequences of an attention share. H query heads share G key and value heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionHeads {
    /// H: query heads, a multiple of G.
    pub num_heads: usize,
    /// G: key and value heads.
    pub num_kv_heads: usize,
    /// h: elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values and of `o`; usually `head_dim`.
    pub value_dim: usize,
    /// The number of keys that a query sees, itself included; none for all keys up to it.
    pub window: Option<usize>,
    /// The factor of the scores; usually `1 / sqrt(h)`.
    pub scale: f32,
}

impl AttentionHeads {
    /// Returns the number of query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Checks that heads divide into groups and that a window is not empty.
    pub(super) fn check(&self) {
        assert!(self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads), "attention: {self:?}");
        assert!(self.window != Some(0), "attention: {self:?}");
    }
}

/// The rows of `k` and `v` that hold a sequence's keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyRows<'a> {
    /// Consecutive rows, token 0 in row `first`.
    Consecutive {
        /// The row of token 0.
        first: usize,
    },
    /// Blocks of rows: token t is in row `blocks[t / block_len] * block_len + t % block_len`. Sequences may share
    /// blocks.
    Blocks {
        /// The blocks of the sequence in the order of its tokens, at least as many as its keys fill.
        blocks: &'a [u32],
        /// Tokens of a block, at least one. A multiple of 8 keeps a step of decoding free of copies where there is no
        /// window.
        block_len: usize,
    },
}

/// Consecutive rows, and the consecutive tokens that they hold.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub(super) tokens: Range<usize>,
    /// The row of the first of these tokens.
    pub(super) first_row: usize,
}

impl KeyRows<'_> {
    /// Returns the row of a token.
    pub(super) fn row(&self, token: usize) -> usize {
        match *self {
            Self::Consecutive { first } => first + token,
            Self::Blocks { blocks, block_len } => blocks[token / block_len] as usize * block_len + token % block_len,
        }
    }

    /// Returns the rows of tokens in as few runs as possible. The runs count tokens from the first of `tokens`.
    pub(super) fn runs(&self, tokens: Range<usize>) -> Vec<Run> {
        let Self::Blocks { block_len, .. } = *self else {
            return vec![Run { tokens: 0..tokens.len(), first_row: self.row(tokens.start) }];
        };
        let mut runs: Vec<Run> = Vec::new();
        let mut token = tokens.start;
        while token < tokens.end {
            let end = ((token / block_len + 1) * block_len).min(tokens.end);
            let (found, first_row) = (token - tokens.start..end - tokens.start, self.row(token));
            match runs.last_mut() {
                Some(last) if last.first_row + last.tokens.len() == first_row => last.tokens.end = found.end,
                _ => runs.push(Run { tokens: found, first_row }),
            }
            token = end;
        }
        runs
    }

    /// Returns the rows of at most `N` tokens; the last row is repeated for missing ones.
    fn rows_of<const N: usize>(&self, tokens: &Range<usize>) -> [usize; N] {
        match *self {
            Self::Consecutive { first } => std::array::from_fn(|i| first + (tokens.start + i).min(tokens.end - 1)),
            Self::Blocks { block_len, .. } => {
                // Steps from token to token, because divisions are slow.
                let (mut row, mut left) = (self.row(tokens.start), block_len - tokens.start % block_len);
                std::array::from_fn(|i| {
                    if i > 0 && tokens.start + i < tokens.end {
                        (row, left) = (row + 1, left - 1);
                        if left == 0 {
                            (row, left) = (self.row(tokens.start + i), block_len);
                        }
                    }
                    row
                })
            }
        }
    }

    /// The number of keys in use. The last query is aligned with the last of them.
    pub(super) fn end(&self, num_keys: usize) -> Option<usize> {
        match *self {
            _ if num_keys == 0 => Some(0),
            Self::Consecutive { first } => first.checked_add(num_keys),
            Self::Blocks { block_len: 0, .. } => None,
            Self::Blocks { blocks, block_len } => {
                let whole = num_keys / block_len;
                let last = match num_keys % block_len {
                    0 => Some(0),
                    rest => (*blocks.get(whole)? as usize).checked_mul(block_len)?.checked_add(rest),
                };
                let largest = blocks.get(..whole)?.iter().max().copied();
                let end = largest.map_or(Some(0), |block| (block as usize + 1).checked_mul(block_len));
                Some(end?.max(last?))
            }
        }
    }
}

/// A sequence of an attention and the places of its rows.
#[derive(Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub(super) heads: AttentionHeads,
    /// The row of `q` and of `o` that holds its first query.
    pub(super) first_query: usize,
    pub(super) num_queries: usize,
    /// Keys that are used; the last query is aligned with the last of them.
    pub(super) num_keys: usize,
    pub(super) keys: KeyRows<'a>,
}

impl Sequence<'_> {
    /// Returns the sequences of a uniform shape.
    pub(super) fn all(shape: &AttentionShape) -> Vec<Sequence<'static>> {
        (0..shape.batch).map(|index| Self::nth(shape, index)).collect()
    }

    /// Returns sequence `index` of a uniform shape.
    pub(super) fn nth(shape: &AttentionShape, index: usize) -> Sequence<'static> {
        Sequence {
            heads: shape.heads(),
            first_query: index * shape.seq_len,
            num_queries: shape.seq_len,
            num_keys: shape.kv_len,
            keys: KeyRows::Consecutive { first: index * shape.kv_capacity },
        }
    }

    /// Returns the sequence's elements in `q` and its gradient.
    pub(super) fn query_elements(&self) -> Range<usize> {
        let row = self.heads.num_heads * self.heads.head_dim;
        self.first_query * row..(self.first_query + self.num_queries) * row
    }

    /// Returns the place in `lse` of a query and a head. The numbers of a sequence are `[H, num_queries]`.
    #[inline(always)]
    pub(super) fn statistic(&self, query: usize, head: usize) -> usize {
        self.first_query * self.heads.num_heads + head * self.num_queries + query
    }

    /// Returns the number of keys up to a query's position, those before its window included.
    #[inline(always)]
    pub(super) fn keys_until(&self, query: usize) -> usize {
        query + self.num_keys - self.num_queries + 1
    }

    /// Returns the offsets of the rows of `keys` (at most `N`) and a key head, in a tensor with `dim` elements a
    /// head.
    pub(super) fn key_starts<const N: usize>(&self, kv_head: usize, keys: &Range<usize>, dim: usize) -> [usize; N] {
        let num_kv_heads = self.heads.num_kv_heads;
        self.keys.rows_of::<N>(keys).map(|row| (row * num_kv_heads + kv_head) * dim)
    }
}

/// The tasks of several owners, numbered one owner's after the other's.
pub(super) struct TaskList {
    /// For each owner the number of its tasks and of all owners' before it.
    ends: Vec<usize>,
}

/// A task of a list: its owner, and its number among the owner's tasks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OwnedTask {
    pub(super) owner: usize,
    pub(super) index: usize,
}

impl TaskList {
    pub(super) fn new(counts: impl Iterator<Item = usize>) -> Self {
        let ends = counts.scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        Self { ends: ends.collect() }
    }

    /// Returns the number of tasks of all owners.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the number of tasks of the owners before `owner`.
    pub(super) fn first(&self, owner: usize) -> usize {
        if owner == 0 { 0 } else { self.ends[owner - 1] }
    }

    /// Finds task `task`, which must be less than [`len`](Self::len).
    pub(super) fn find(&self, task: usize) -> OwnedTask {
        let owner = self.ends.partition_point(|&end| end <= task);
        OwnedTask { owner, index: task - self.first(owner) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_follow_each_other_make_one_run() {
        let rows = KeyRows::Blocks { blocks: &[3, 4, 9, 0], block_len: 10 };
        let run = |tokens: Range<usize>, first_row| Run { tokens, first_row };
        assert_eq!(rows.runs(5..37), [run(0..15, 35), run(15..25, 90), run(25..32, 0)]);
        assert_eq!(rows.runs(20..20), []);
        assert_eq!(KeyRows::Consecutive { first: 7 }.runs(2..6), [run(0..4, 9)]);
    }

    #[test]
    fn rows_of_tokens_are_those_of_their_blocks() {
        let rows = KeyRows::Blocks { blocks: &[3, 1, 4], block_len: 2 };
        assert_eq!(rows.rows_of::<6>(&(1..5)), [7, 2, 3, 8, 8, 8]);
        assert_eq!(KeyRows::Consecutive { first: 5 }.rows_of::<4>(&(1..3)), [6, 7, 7, 7]);
    }

    #[test]
    fn the_end_of_rows_is_behind_the_largest_in_use() {
        let rows = KeyRows::Blocks { blocks: &[3, 1, 4], block_len: 2 };
        assert_eq!([0, 1, 2, 3, 5, 6].map(|keys| rows.end(keys)), [0, 7, 8, 8, 9, 10].map(Some));
        assert_eq!(rows.end(7), None, "too few blocks");
        assert_eq!(KeyRows::Blocks { blocks: &[0], block_len: 0 }.end(1), None);
        assert_eq!(KeyRows::Consecutive { first: usize::MAX }.end(2), None);
    }

    #[test]
    fn tasks_are_found_by_their_owners() {
        let tasks = TaskList::new([2, 0, 3].into_iter());
        let found: Vec<_> =
            (0..tasks.len()).map(|task| tasks.find(task)).map(|task| (task.owner, task.index)).collect();
        assert_eq!(found, [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]);
        assert_eq!(TaskList::new([].into_iter()).len(), 0);
    }
}
