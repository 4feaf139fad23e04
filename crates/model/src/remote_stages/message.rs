//! Messages from stage to stage: a header of fixed size, words that describe the pass, then the residual stream.

use crate::KvType;
use crate::layers::Sequences;
use crate::layers::segments::Segment;
use crate::paged_kv_cache::BlockCopy;

/// The tags of the messages.
pub(super) const TAG_HEADER: u32 = 1;
pub(super) const TAG_WORDS: u32 = 2;
pub(super) const TAG_STREAM: u32 = 3;
pub(super) const TAG_REPORT: u32 = 4;

/// The sizes of the messages that follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The number of words that describe the pass.
    pub(super) num_words: u32,
    /// The number of router logits of a token that travel with the stream.
    pub(super) logits_width: usize,
}

impl Header {
    /// The number of words of a header.
    pub(super) const LEN: usize = 2;
    /// The header that says that no more passes come.
    pub(super) const END: Self = Self { num_words: u32::MAX, logits_width: 0 };

    pub(super) fn to_words(self) -> [u32; Self::LEN] {
        [self.num_words, self.logits_width as u32]
    }

    pub(super) fn from_words(words: &[u32]) -> Self {
        let word = |index: usize| words.get(index).copied().unwrap_or(0);
        Self { num_words: word(0), logits_width: word(1) as usize }
    }
}

/// The description of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PassMessage {
    pub(super) sequences: Sequences,
    /// `[T]`: the tokens, for routers that look at them.
    pub(super) ids: Vec<u32>,
    /// The segments that do not attend to each other; empty if these are the sequences.
    pub(super) segments: Vec<Segment>,
    pub(super) cache: CacheUse,
    /// The numbers of caches that are no longer needed.
    pub(super) forgotten: Vec<u32>,
    /// True if the root wants to know what MoE layers decide.
    pub(super) is_watched: bool,
}

/// The cache that a pass appends to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CacheUse {
    None,
    Growing {
        number: u32,
        num_sequences: usize,
        /// The number of tokens of each sequence before this pass; more are removed first.
        len: usize,
    },
    Paged {
        number: u32,
        num_blocks: usize,
        block_len: usize,
        kv_type: KvType,
        copies: Vec<BlockCopy>,
    },
}

impl PassMessage {
    pub(super) fn to_words(&self) -> Vec<u32> {
        let Self { sequences, ids, segments, cache, forgotten, is_watched } = self;
        let mut words =
            vec![sequences.count as u32, sequences.len as u32, sequences.start as u32, u32::from(*is_watched)];
        write_list(&mut words, ids);
        write_list(&mut words, forgotten);
        words.push(segments.len() as u32);
        for Segment { len, start, blocks } in segments {
            words.extend([*len as u32, *start as u32]);
            write_list(&mut words, blocks);
        }
        match cache {
            CacheUse::None => words.push(0),
            CacheUse::Growing { number, num_sequences, len } => {
                words.extend([1, *number, *num_sequences as u32, *len as u32]);
            }
            CacheUse::Paged { number, num_blocks, block_len, kv_type, copies } => {
                words.extend([2, *number, *num_blocks as u32, *block_len as u32, kv_type.word()]);
                let pairs: Vec<u32> = copies.iter().flat_map(|copy| [copy.from, copy.to]).collect();
                write_list(&mut words, &pairs);
            }
        }
        words
    }

    /// Reads a description; none if it is not one.
    pub(super) fn from_words(words: &[u32]) -> Option<Self> {
        let mut reader = Reader { rest: words };
        let [count, len, start] = reader.numbers()?;
        let sequences = Sequences { count, len, start };
        let is_watched = reader.word()? == 1;
        let (ids, forgotten) = (reader.list()?, reader.list()?);
        let num_segments = reader.word()?;
        let segments: Option<Vec<Segment>> = (0..num_segments).map(|_| reader.segment()).collect();
        let (segments, cache) = (segments?, reader.cache()?);
        let message = Self { sequences, ids, segments, cache, forgotten, is_watched };
        (reader.rest.is_empty() && message.is_sound()).then_some(message)
    }

    /// Returns whether the parts agree.
    fn is_sound(&self) -> bool {
        let num_tokens = self.sequences.num_tokens();
        let in_segments: usize = self.segments.iter().map(|segment| segment.len).sum();
        let are_segments = self.segments.is_empty() || in_segments == num_tokens;
        let are_blocks = match &self.cache {
            CacheUse::Paged { num_blocks, block_len, copies, .. } => {
                let is_block = |block: u32| (block as usize) < *num_blocks;
                let has_room = |segment: &Segment| {
                    segment.blocks.len() * block_len >= segment.start + segment.len
                        && segment.blocks.iter().all(|&block| is_block(block))
                };
                !self.segments.is_empty()
                    && self.segments.iter().all(has_room)
                    && copies.iter().all(|copy| is_block(copy.from) && is_block(copy.to))
            }
            CacheUse::Growing { num_sequences, .. } => *num_sequences == self.sequences.count,
            CacheUse::None => true,
        };
        num_tokens > 0 && self.ids.len() == num_tokens && are_segments && are_blocks
    }
}

/// Writes a list with its length before it.
fn write_list(words: &mut Vec<u32>, list: &[u32]) {
    words.push(list.len() as u32);
    words.extend(list);
}

/// The words that were not read yet.
struct Reader<'a> {
    rest: &'a [u32],
}

impl Reader<'_> {
    fn word(&mut self) -> Option<u32> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn numbers<const N: usize>(&mut self) -> Option<[usize; N]> {
        let (first, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(first.map(|word| word as usize))
    }

    fn list(&mut self) -> Option<Vec<u32>> {
        let len = self.word()? as usize;
        let (list, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(list.to_vec())
    }

    fn segment(&mut self) -> Option<Segment> {
        let [len, start] = self.numbers()?;
        Some(Segment { len, start, blocks: self.list()? })
    }

    fn cache(&mut self) -> Option<CacheUse> {
        match self.word()? {
            0 => Some(CacheUse::None),
            1 => {
                let (number, [num_sequences, len]) = (self.word()?, self.numbers()?);
                Some(CacheUse::Growing { number, num_sequences, len })
            }
            2 => {
                let (number, [num_blocks, block_len]) = (self.word()?, self.numbers()?);
                let (kv_type, pairs) = (KvType::of_word(self.word()?)?, self.list()?);
                let (pairs, odd) = pairs.as_chunks();
                let copies = pairs.iter().map(|&[from, to]| BlockCopy { from, to }).collect();
                odd.is_empty().then_some(CacheUse::Paged { number, num_blocks, block_len, kv_type, copies })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> PassMessage {
        PassMessage {
            sequences: Sequences { count: 1, len: 5, start: 0 },
            ids: vec![3, 1, 4, 1, 5],
            segments: vec![
                Segment { len: 4, start: 2, blocks: vec![7, 0] },
                Segment { len: 1, start: 9, blocks: vec![1, 2, 3] },
            ],
            cache: CacheUse::Paged {
                number: 6,
                num_blocks: 8,
                block_len: 4,
                kv_type: KvType::Q8,
                copies: vec![BlockCopy { from: 2, to: 5 }],
            },
            forgotten: vec![4],
            is_watched: true,
        }
    }

    #[test]
    fn a_description_is_read_as_it_was_written() {
        let growing = CacheUse::Growing { number: 2, num_sequences: 1, len: 30 };
        for cache in [message().cache, growing, CacheUse::None] {
            let message = PassMessage { cache, ..message() };
            assert_eq!(PassMessage::from_words(&message.to_words()), Some(message));
        }
    }

    #[test]
    fn a_description_that_is_cut_or_does_not_agree_is_refused() {
        let words = message().to_words();
        for len in 0..words.len() {
            assert_eq!(PassMessage::from_words(&words[..len]), None, "{len} words");
        }
        for wrong in [
            PassMessage { ids: vec![1], ..message() },
            PassMessage { segments: message().segments[..1].to_vec(), ..message() },
            PassMessage { segments: vec![Segment { len: 5, start: 0, blocks: vec![8, 1] }], ..message() },
            PassMessage { segments: vec![Segment { len: 5, start: 0, blocks: vec![1] }], ..message() },
        ] {
            assert_eq!(PassMessage::from_words(&wrong.to_words()), None, "{wrong:?}");
        }
    }
}
