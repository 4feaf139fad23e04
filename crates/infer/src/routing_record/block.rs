//! The blocks of a record, and their bytes.
//!
//! T tokens, L layers of the block, K slots for experts of a token, E experts.

use half::f16;

use super::bytes::Bytes;
use super::{RecordError, RecordHeader};

/// The entry of [`LayerChoices::expert_ids`] for no expert.
pub const NONE: u32 = u32::MAX;
/// The largest payload of a block.
pub(super) const MAX_BLOCK_BYTES: usize = 16 << 20;

const TOKENS: u8 = 1;
const LOADS: u8 = 2;
const HAS_TOKEN_IDS: u8 = 1;
const HAS_WEIGHTS: u8 = 2;
const HAS_DROPPED: u8 = 4;
const HAS_IMPORTANCE: u8 = 1;

/// A block of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// The choices of single tokens.
    Tokens(TokenBlock),
    /// The loads of all tokens of a step.
    Loads(LoadBlock),
}

/// Consecutive tokens of a step, a window or a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The step, window or sequence.
    pub id: u64,
    /// The position of the first token in it.
    pub position: u32,
    /// Tokens.
    pub len: u32,
}

/// The choices of T tokens in consecutive MoE layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenBlock {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The runs of tokens, one after the other.
    pub runs: Vec<Run>,
    /// The place of the first layer in the header's list.
    pub first_layer: usize,
    /// K: places for experts of a token.
    pub top_k: usize,
    /// `[T]`: the token ids, if they are recorded.
    pub token_ids: Option<Vec<u32>>,
    /// `[L]`: the choices in each layer.
    pub layers: Vec<LayerChoices>,
}

/// The choices of T tokens in one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerChoices {
    /// `[T, K]`: the experts, a token's first choice first; [`NONE`] where there are fewer.
    pub expert_ids: Vec<u32>,
    /// `[T, K]`: the weights, rounded to f16, if they are recorded.
    pub weights: Option<Vec<f32>>,
    /// `[T, K]`: true for choices that were dropped because the expert was full; none where no choice was.
    pub dropped: Option<Vec<bool>>,
}

/// The loads of all tokens of a step in consecutive MoE layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadBlock {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The step.
    pub step: u64,
    /// The tokens of the step.
    pub num_tokens: u64,
    /// The place of the first layer in the header's list.
    pub first_layer: usize,
    /// `[L]`: the loads of each layer.
    pub layers: Vec<LayerLoads>,
}

/// The loads of a step in one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerLoads {
    /// `[E]`: choices that name each expert, before any is dropped.
    pub chosen: Vec<u32>,
    /// `[E]`: rows of each expert, after capacity.
    pub kept: Vec<u32>,
    /// `[E]`: the sum of the weights of each expert's choices, if it is recorded.
    pub importance: Option<Vec<f32>>,
}

impl TokenBlock {
    /// Returns T.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.runs.iter().map(|run| run.len as usize).sum()
    }
}

/// The bytes of an expert's id.
fn id_width(num_experts: usize) -> usize {
    if num_experts <= 0xff { 1 } else { 2 }
}

fn size(what: &'static str, value: usize, expected: String) -> RecordError {
    RecordError::Block { what, value: value as u64, expected }
}

/// Returns `value` as a smaller number.
fn small<N: TryFrom<usize>>(what: &'static str, value: usize) -> Result<N, RecordError> {
    N::try_from(value).map_err(|_| size(what, value, "does not fit into the format".to_owned()))
}

impl Block {
    /// Returns the bytes of the payload.
    pub(super) fn to_bytes(&self, header: &RecordHeader) -> Result<Vec<u8>, RecordError> {
        let bytes = match self {
            Self::Tokens(block) => block.to_bytes(header)?,
            Self::Loads(block) => block.to_bytes(header)?,
        };
        if bytes.len() > MAX_BLOCK_BYTES {
            return Err(size("bytes of a block", bytes.len(), format!("must be at most {MAX_BLOCK_BYTES}")));
        }
        Ok(bytes)
    }

    /// Reads a payload. Fails with the problem, as a noun, if it is not what a writer writes.
    pub(super) fn from_bytes(bytes: &[u8], header: &RecordHeader) -> Result<Self, &'static str> {
        let mut bytes = Bytes(bytes);
        let block = match bytes.u8() {
            Some(TOKENS) => TokenBlock::from_bytes(&mut bytes, header).map(Self::Tokens)?,
            Some(LOADS) => LoadBlock::from_bytes(&mut bytes, header).map(Self::Loads)?,
            _ => return Err("unknown kind of block"),
        };
        if bytes.0.is_empty() { Ok(block) } else { Err("more bytes than the sizes say") }
    }
}

/// The sizes that a list of layers must have.
fn check_layers(first: usize, count: usize, header: &RecordHeader) -> Result<(), RecordError> {
    let most = header.layers.len();
    let fits = count > 0 && first.checked_add(count).is_some_and(|end| end <= most);
    if fits { Ok(()) } else { Err(size("layers of a block", count, format!("must be from 1 to {most}"))) }
}

const SHORT: &str = "fewer bytes than the sizes say";

impl TokenBlock {
    fn to_bytes(&self, header: &RecordHeader) -> Result<Vec<u8>, RecordError> {
        self.check(header)?;
        let has = |is: bool, flag: u8| if is { flag } else { 0 };
        let has_weights = self.layers.iter().all(|layer| layer.weights.is_some());
        let has_dropped = self.layers.iter().any(|layer| layer.dropped.is_some());
        let flags = has(self.token_ids.is_some(), HAS_TOKEN_IDS) | has(has_weights, HAS_WEIGHTS);
        let mut bytes = vec![TOKENS, flags | has(has_dropped, HAS_DROPPED)];
        bytes.extend(small::<u16>("experts of a token", self.top_k)?.to_le_bytes());
        bytes.extend(small::<u16>("first layer", self.first_layer)?.to_le_bytes());
        bytes.extend(small::<u16>("layers", self.layers.len())?.to_le_bytes());
        bytes.extend(self.time_ms.to_le_bytes());
        bytes.extend(small::<u32>("runs", self.runs.len())?.to_le_bytes());
        bytes.extend(small::<u32>("tokens", self.num_tokens())?.to_le_bytes());
        for Run { id, position, len } in &self.runs {
            bytes.extend(id.to_le_bytes());
            bytes.extend(position.to_le_bytes());
            bytes.extend(len.to_le_bytes());
        }
        self.token_ids.iter().flatten().for_each(|id| bytes.extend(id.to_le_bytes()));
        let width = id_width(header.num_experts);
        for layer in &self.layers {
            layer.expert_ids.iter().for_each(|id| bytes.extend(&id.to_le_bytes()[..width]));
            if has_weights {
                let weights = layer.weights.iter().flatten();
                weights.for_each(|&weight| bytes.extend(f16::from_f32(weight).to_le_bytes()));
            }
            if has_dropped {
                bytes.extend(bits(layer.dropped.as_deref().unwrap_or_default(), layer.expert_ids.len()));
            }
        }
        Ok(bytes)
    }

    fn check(&self, header: &RecordHeader) -> Result<(), RecordError> {
        check_layers(self.first_layer, self.layers.len(), header)?;
        let tokens = self.num_tokens();
        if tokens == 0 || self.top_k == 0 {
            return Err(size("choices of a block", 0, "must be at least 1".to_owned()));
        }
        let expected = tokens * self.top_k;
        let wrong = |what, found: usize, expected: usize| Err(size(what, found, format!("must be {expected}")));
        if let Some(ids) = self.token_ids.as_ref().filter(|ids| ids.len() != tokens) {
            return wrong("token ids of a block", ids.len(), tokens);
        }
        for layer in &self.layers {
            let counts = [
                layer.expert_ids.len(),
                layer.weights.as_ref().map_or(expected, Vec::len),
                layer.dropped.as_ref().map_or(expected, Vec::len),
            ];
            if let Some(&found) = counts.iter().find(|&&count| count != expected) {
                return wrong("choices of a layer", found, expected);
            }
            let is_wrong = |&&id: &&u32| id != NONE && id as usize >= header.num_experts;
            if let Some(&id) = layer.expert_ids.iter().find(is_wrong) {
                return Err(size("expert", id as usize, format!("must be below {}", header.num_experts)));
            }
        }
        Ok(())
    }

    fn from_bytes(bytes: &mut Bytes<'_>, header: &RecordHeader) -> Result<Self, &'static str> {
        let flags = bytes.u8().ok_or(SHORT)?;
        if flags & !(HAS_TOKEN_IDS | HAS_WEIGHTS | HAS_DROPPED) != 0 {
            return Err("unknown flags");
        }
        let top_k = usize::from(bytes.u16().ok_or(SHORT)?);
        let first_layer = usize::from(bytes.u16().ok_or(SHORT)?);
        let num_layers = usize::from(bytes.u16().ok_or(SHORT)?);
        check_layers(first_layer, num_layers, header).map_err(|_| "layers that the header does not have")?;
        let time_ms = bytes.u64().ok_or(SHORT)?;
        let num_runs = bytes.u32().ok_or(SHORT)? as usize;
        let num_tokens = bytes.u32().ok_or(SHORT)? as usize;
        // Every token has bytes for its choices, so that no size is beyond those of the payload.
        let num_choices = num_tokens.checked_mul(top_k).filter(|&count| count > 0).ok_or("no choices")?;
        if num_runs.checked_mul(16).is_none_or(|size| size > bytes.0.len()) || num_choices > bytes.0.len() {
            return Err(SHORT);
        }
        let mut runs = Vec::with_capacity(num_runs);
        for _ in 0..num_runs {
            let mut run = || Some(Run { id: bytes.u64()?, position: bytes.u32()?, len: bytes.u32()? });
            runs.push(run().ok_or(SHORT)?);
        }
        if runs.iter().map(|run| u64::from(run.len)).sum::<u64>() != num_tokens as u64 {
            return Err("runs of another number of tokens");
        }
        let has_ids = flags & HAS_TOKEN_IDS != 0;
        let token_ids = has_ids.then(|| bytes.u32s(num_tokens).ok_or(SHORT)).transpose()?;
        let layer = |_| LayerChoices::from_bytes(bytes, ChoiceSizes { num_choices, flags }, header);
        let layers = (0..num_layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self { time_ms, runs, first_layer, top_k, token_ids, layers })
    }
}

/// The sizes of a layer's part of a block.
#[derive(Clone, Copy)]
struct ChoiceSizes {
    num_choices: usize,
    flags: u8,
}

impl LayerChoices {
    fn from_bytes(
        bytes: &mut Bytes<'_>,
        ChoiceSizes { num_choices, flags }: ChoiceSizes,
        header: &RecordHeader,
    ) -> Result<Self, &'static str> {
        let width = id_width(header.num_experts);
        let ids = bytes.take(num_choices.checked_mul(width).ok_or(SHORT)?).ok_or(SHORT)?;
        let none = if width == 1 { 0xff } else { 0xffff };
        let id = |bytes: &[u8]| {
            let id = bytes.iter().rev().fold(0_u32, |id, &byte| id << 8 | u32::from(byte));
            if id == none { NONE } else { id }
        };
        let expert_ids: Vec<u32> = ids.chunks_exact(width).map(id).collect();
        if expert_ids.iter().any(|&id| id != NONE && id as usize >= header.num_experts) {
            return Err("an expert that the model does not have");
        }
        let mut weights = None;
        if flags & HAS_WEIGHTS != 0 {
            let raw = bytes.take(num_choices.checked_mul(2).ok_or(SHORT)?).ok_or(SHORT)?;
            let raw = raw.as_chunks::<2>().0.iter();
            weights = Some(raw.map(|&raw| f16::from_le_bytes(raw).to_f32()).collect());
        }
        let mut dropped = None;
        if flags & HAS_DROPPED != 0 {
            let raw = bytes.take(num_choices.div_ceil(8)).ok_or(SHORT)?;
            dropped = Some((0..num_choices).map(|i| raw[i / 8] >> (i % 8) & 1 == 1).collect());
        }
        Ok(Self { expert_ids, weights, dropped })
    }
}

/// Packs flags, lowest bit first; missing ones are false.
fn bits(flags: &[bool], count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count.div_ceil(8)];
    for (i, _) in flags.iter().enumerate().filter(|(_, is)| **is) {
        bytes[i / 8] |= 1 << (i % 8);
    }
    bytes
}

impl LoadBlock {
    fn to_bytes(&self, header: &RecordHeader) -> Result<Vec<u8>, RecordError> {
        check_layers(self.first_layer, self.layers.len(), header)?;
        let has_importance = self.layers.iter().all(|layer| layer.importance.is_some());
        let mut bytes = vec![LOADS, if has_importance { HAS_IMPORTANCE } else { 0 }, 0, 0];
        bytes.extend(small::<u16>("first layer", self.first_layer)?.to_le_bytes());
        bytes.extend(small::<u16>("layers", self.layers.len())?.to_le_bytes());
        bytes.extend(self.time_ms.to_le_bytes());
        bytes.extend(self.step.to_le_bytes());
        bytes.extend(self.num_tokens.to_le_bytes());
        for LayerLoads { chosen, kept, importance } in &self.layers {
            let lens = [chosen.len(), kept.len(), importance.as_ref().map_or(header.num_experts, Vec::len)];
            if let Some(&found) = lens.iter().find(|&&len| len != header.num_experts) {
                return Err(size("loads of a layer", found, format!("must be {}", header.num_experts)));
            }
            chosen.iter().chain(kept).for_each(|count| bytes.extend(count.to_le_bytes()));
            let importance = importance.iter().flatten().filter(|_| has_importance);
            importance.for_each(|sum| bytes.extend(sum.to_le_bytes()));
        }
        Ok(bytes)
    }

    fn from_bytes(bytes: &mut Bytes<'_>, header: &RecordHeader) -> Result<Self, &'static str> {
        let flags = bytes.u8().ok_or(SHORT)?;
        if flags & !HAS_IMPORTANCE != 0 || bytes.u16().ok_or(SHORT)? != 0 {
            return Err("unknown flags");
        }
        let first_layer = usize::from(bytes.u16().ok_or(SHORT)?);
        let num_layers = usize::from(bytes.u16().ok_or(SHORT)?);
        check_layers(first_layer, num_layers, header).map_err(|_| "layers that the header does not have")?;
        let mut fields = || Some([bytes.u64()?, bytes.u64()?, bytes.u64()?]);
        let [time_ms, step, num_tokens] = fields().ok_or(SHORT)?;
        let mut layers = Vec::new();
        for _ in 0..num_layers {
            let mut list = || bytes.u32s(header.num_experts).ok_or(SHORT);
            let (chosen, kept) = (list()?, list()?);
            let sums = (flags & HAS_IMPORTANCE != 0).then(list).transpose()?;
            let importance = sums.map(|sums| sums.into_iter().map(f32::from_bits).collect());
            layers.push(LayerLoads { chosen, kept, importance });
        }
        Ok(Self { time_ms, step, num_tokens, first_layer, layers })
    }
}
