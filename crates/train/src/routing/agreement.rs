//! The share of choices that are unchanged since the previous checkpoint.
//!
//! At each planned checkpoint the same validation tokens go through the model. The experts that each MoE layer
//! chooses for them are stored in the checkpoint. The agreement of two such samples is OLMoE's router saturation
//! (Muennighoff et al., arXiv:2409.02060, section 4.1), with the previous checkpoint in place of the last one.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use moeworks_model::LoadError;
use moeworks_model::safetensors::{self, FileDType, SafetensorsFile, TensorBytes};
use moeworks_moe::Routing;

use crate::error::TrainError;

/// The file of the sample in a checkpoint.
const ROUTING_FILE: &str = "routing.safetensors";
/// The id that fills the empty places of a token with fewer choices than another.
const NONE: u32 = u32::MAX;
const TOKENS: &str = "token_ids";

/// The experts that each MoE layer chose for the same tokens at one checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingSample {
    token_ids: Vec<u32>,
    /// The experts of each token in the order of choice, by the layer's index in the model.
    layers: BTreeMap<usize, Vec<Vec<u32>>>,
}

impl RoutingSample {
    /// Creates a sample of the tokens `token_ids` without any layer.
    #[must_use]
    pub fn new(token_ids: Vec<u32>) -> Self {
        Self { token_ids, layers: BTreeMap::new() }
    }

    /// Returns whether the sample has no layer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Lists the layers' indices with the choices of their tokens.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (usize, &[Vec<u32>])> {
        self.layers.iter().map(|(&layer, choices)| (layer, choices.as_slice()))
    }

    /// Adds the choices of layer `layer` for the next tokens.
    pub fn add(&mut self, layer: usize, routing: &Routing) {
        let choices = (0..routing.num_tokens()).map(|t| routing.choices(t).map(|(expert, _)| expert).collect());
        self.layers.entry(layer).or_default().extend(choices);
    }

    /// Builds the sample of all ranks, each of which has a contiguous part of the tokens or none. `join` concatenates
    /// the given values over the ranks in order.
    pub(crate) fn joined<E>(
        &self,
        layers: impl IntoIterator<Item = usize>,
        mut join: impl FnMut(&[u32]) -> Result<Vec<u32>, E>,
    ) -> Result<Self, E> {
        let mut whole = Self::new(self.token_ids.clone());
        for layer in layers {
            // For each token the number of its choices, and then the choices.
            let own = self.layers.get(&layer).map_or(&[][..], Vec::as_slice);
            let own = own.iter().flat_map(|token| [token.len() as u32].into_iter().chain(token.iter().copied()));
            let all = join(&own.collect::<Vec<u32>>())?;
            let (mut rest, choices) = (&all[..], whole.layers.entry(layer).or_default());
            while let Some((&count, after)) = rest.split_first() {
                let (token, after) = after.split_at(count as usize);
                choices.push(token.to_vec());
                rest = after;
            }
        }
        Ok(whole)
    }

    /// Returns the share (0 to 1) of this sample's choices in layer `layer` that `previous` has for the same token,
    /// in any order. Returns `None` if the samples have different tokens or there is no choice.
    #[must_use]
    pub fn agreement(&self, layer: usize, previous: &Self) -> Option<f64> {
        let (now, before) = (self.layers.get(&layer)?, previous.layers.get(&layer)?);
        if self.token_ids != previous.token_ids || now.len() != before.len() {
            return None;
        }
        let num_choices: usize = now.iter().map(Vec::len).sum();
        let num_kept: usize =
            now.iter().zip(before).map(|(now, before)| now.iter().filter(|&e| before.contains(e)).count()).sum();
        (num_choices > 0).then(|| num_kept as f64 / num_choices as f64)
    }

    /// Writes the sample to the checkpoint folder `dir`: `token_ids` `[T]` and `layers.N.expert_ids` `[T, K]`, with
    /// 2^32 - 1 for the choices that a token does not have.
    pub(crate) fn save(&self, dir: &Path) -> io::Result<()> {
        let mut tensors = vec![(TOKENS.to_owned(), vec![self.token_ids.len()], to_bytes(&self.token_ids))];
        for (layer, choices) in &self.layers {
            let most = choices.iter().map(Vec::len).max().unwrap_or(0);
            let padded =
                |token: &Vec<u32>| token.iter().copied().chain([NONE].into_iter().cycle()).take(most).collect();
            let ids: Vec<u32> = choices.iter().flat_map(|token| -> Vec<u32> { padded(token) }).collect();
            tensors.push((expert_ids_name(*layer), vec![choices.len(), most], to_bytes(&ids)));
        }
        let tensors: Vec<TensorBytes<'_>> = tensors
            .iter()
            .map(|(name, shape, bytes)| TensorBytes {
                name: name.clone(),
                dtype: FileDType::U32,
                shape: shape.clone(),
                bytes: bytes.as_slice().into(),
            })
            .collect();
        safetensors::write(&dir.join(ROUTING_FILE), &tensors, &BTreeMap::new())
    }

    /// Reads the sample of the checkpoint folder `dir`. Returns `None` if there is none.
    pub(crate) fn load(dir: &Path) -> Result<Option<Self>, TrainError> {
        let path = dir.join(ROUTING_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let file = SafetensorsFile::open(&path).map_err(LoadError::from)?;
        let mut sample = Self::new(read(&file, TOKENS)?.1);
        for name in file.tensors().keys() {
            let number = name.strip_prefix("layers.").and_then(|rest| rest.strip_suffix(".expert_ids"));
            let Some(layer) = number.and_then(|number| number.parse().ok()) else { continue };
            let (shape, ids) = read(&file, name)?;
            let &[num_tokens, most] = &shape[..] else {
                return Err(TrainError::State { path, problem: format!("{name} is not of two dims") });
            };
            let token = |t: usize| ids[t * most..(t + 1) * most].iter().copied().filter(|&id| id != NONE).collect();
            sample.layers.insert(layer, (0..num_tokens).map(token).collect());
        }
        Ok(Some(sample))
    }
}

fn expert_ids_name(layer: usize) -> String {
    format!("layers.{layer}.expert_ids")
}

fn to_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Returns the shape and the elements of a tensor, which must be U32.
fn read(file: &SafetensorsFile, name: &str) -> Result<(Vec<usize>, Vec<u32>), TrainError> {
    let info = file.info(name).map_err(LoadError::from)?;
    if info.dtype != FileDType::U32 {
        let problem = format!("{name} is {}, but U32 is needed", info.dtype);
        return Err(TrainError::State { path: file.path().to_owned(), problem });
    }
    let bytes = file.bytes(name).map_err(LoadError::from)?;
    let ids = bytes.as_chunks::<4>().0.iter().map(|&id| u32::from_le_bytes(id)).collect();
    Ok((info.shape.clone(), ids))
}

#[cfg(test)]
#[path = "agreement_tests.rs"]
mod tests;
