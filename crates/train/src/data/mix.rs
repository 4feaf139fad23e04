//! What a run trains on: one source, or several with weights.

use std::fmt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::search::Search;
use super::watch::Watch;
use super::{DataError, Notes, STDIN, Sources};
use crate::config::DataConfig;

/// One source of text, or several that training draws from by weight.
#[derive(Clone, Debug)]
pub struct Mix {
    sources: Vec<Sources>,
    /// One for each source.
    weights: Vec<f64>,
}

impl From<Sources> for Mix {
    fn from(sources: Sources) -> Self {
        Self { sources: vec![sources], weights: vec![1.0] }
    }
}

impl Mix {
    /// Finds the files that `config.paths` names: all of them as one source, or each path with a weight behind it, such as
    /// `books=0.3`, as one. A path that exists as it is has no weight. Either all paths have weights or none, as in Megatron-LM.
    /// Warns in one line of what is passed over.
    pub fn find(config: &DataConfig, watch: &Watch) -> Result<Self, DataError> {
        let entries: Vec<Entry<'_>> = config.paths.iter().map(|path| Entry::parse(path)).collect::<Result<_, _>>()?;
        if entries.iter().all(|entry| entry.weight.is_none()) {
            return Sources::find(config, watch).map(Self::from);
        }
        if let Some(without) = entries.iter().find(|entry| entry.weight.is_none()) {
            let problem = "has no weight, but other sources have; give each one, such as --data a.txt=0.3 b.txt=0.7";
            return Err(DataError::Weight { path: without.path.into(), problem: problem.into() });
        }
        let mut search = Search::new(watch);
        let mut sources = Vec::new();
        for Entry { path, .. } in &entries {
            sources.push(Sources::search(&mut search, &[(*path).to_owned()], config, watch)?);
        }
        watch.warn(&search.notes);
        Ok(Self { sources, weights: entries.iter().filter_map(|entry| entry.weight).collect() })
    }

    /// Warns in one line of rows that are passed over.
    pub(super) fn warn(&self, notes: &Notes) {
        if let Some(source) = self.sources.first() {
            source.watch().warn(notes);
        }
    }

    /// The sources.
    #[must_use]
    pub fn sources(&self) -> &[Sources] {
        &self.sources
    }

    /// The weight of each source.
    #[must_use]
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// A hash of all documents and of the weights.
    #[must_use]
    pub fn hash(&self) -> u128 {
        if let [source] = &self.sources[..] {
            return source.hash();
        }
        let mut hasher = Xxh3::new();
        for (source, weight) in self.sources.iter().zip(&self.weights) {
            hasher.update(&source.hash().to_le_bytes());
            hasher.update(&weight.to_le_bytes());
        }
        hasher.digest128()
    }

    /// Text to train a tokenizer on: about `max_bytes`, from each source by its weight.
    pub fn sample_texts(&self, max_bytes: u64) -> Result<Vec<String>, DataError> {
        let sum: f64 = self.weights.iter().sum();
        let mut texts = Vec::new();
        for (source, weight) in self.sources.iter().zip(&self.weights) {
            texts.extend(source.sample_texts((max_bytes as f64 * (weight / sum)) as u64)?);
        }
        Ok(texts)
    }
}

/// A path of the user's, perhaps with a weight.
struct Entry<'p> {
    path: &'p str,
    weight: Option<f64>,
}

impl<'p> Entry<'p> {
    fn parse(given: &'p str) -> Result<Self, DataError> {
        let whole = Ok(Self { path: given, weight: None });
        if Path::new(given).exists() {
            return whole;
        }
        let Some((path, number)) = given.rsplit_once('=').filter(|(path, _)| !path.is_empty()) else { return whole };
        match number.trim().parse::<f64>() {
            Ok(weight) if weight > 0.0 && weight.is_finite() => Ok(Self { path, weight: Some(weight) }),
            // Not a weight, but a part of a name that does not exist.
            Err(_) if path != STDIN && !Path::new(path).exists() => whole,
            _ => {
                let problem = "its weight, behind the last =, must be a number above 0, such as 0.3".into();
                Err(DataError::Weight { path: given.into(), problem })
            }
        }
    }
}

/// Whether a path of the user's has a weight, be it a wrong one.
pub(super) fn has_weight(given: &str) -> bool {
    !matches!(Entry::parse(given), Ok(Entry { weight: None, .. }))
}

/// Figures of data that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadSummary {
    /// Files that hold documents.
    pub num_files: usize,
    /// Documents: text files, and rows with a text.
    pub num_documents: u64,
    /// Bytes of their text.
    pub num_text_bytes: u64,
    /// Their tokens.
    pub num_tokens: u64,
}

impl fmt::Display for ReadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |number: u64, one: &str| {
            let digits = number.to_string();
            let grouped: Vec<&str> =
                digits.as_bytes().rchunks(3).rev().filter_map(|part| str::from_utf8(part).ok()).collect();
            format!("{} {one}{}", grouped.join(","), if number == 1 { "" } else { "s" })
        };
        let Self { num_files, num_documents, num_text_bytes, num_tokens } = *self;
        let numbers =
            [(num_files as u64, "file"), (num_documents, "document"), (num_text_bytes, "byte"), (num_tokens, "token")];
        let parts = numbers.map(|(number, one)| counted(number, one));
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
#[path = "mix_tests.rs"]
mod tests;
