//! The text of a run: one source, or several with weights.

use moeworks_infer::data::{DataError, Notes, Sources, TextOptions, Watch, WeightedPath};
use xxhash_rust::xxh3::Xxh3;

/// One source of text, or several with weights.
#[derive(Clone, Debug)]
pub struct Mix {
    sources: Vec<Sources>,
    /// A weight for each source.
    weights: Vec<f64>,
}

impl From<Sources> for Mix {
    fn from(sources: Sources) -> Self {
        Self { sources: vec![sources], weights: vec![1.0] }
    }
}

impl Mix {
    /// Finds the files that `texts.paths` names. They are a single source, or one source per path if the paths have
    /// weights, such as `books=0.3`. A path that exists literally has no weight. Either all paths have weights or
    /// none, as in Megatron-LM. Warns in one line of skipped files.
    pub fn find(texts: &TextOptions, watch: &Watch) -> Result<Self, DataError> {
        let given: Vec<WeightedPath<'_>> =
            texts.paths.iter().map(|path| WeightedPath::parse(path)).collect::<Result<_, _>>()?;
        if given.iter().all(|path| path.weight.is_none()) {
            return Sources::find(texts, watch).map(Self::from);
        }
        if let Some(without) = given.iter().find(|path| path.weight.is_none()) {
            let problem = "has no weight, but other sources have; give each one, such as --data a.txt=0.3 b.txt=0.7";
            return Err(DataError::Weight { path: without.path.into(), problem: problem.into() });
        }
        let paths = given.iter().map(|given| given.path.to_owned()).collect();
        let sources = Sources::find_each(&TextOptions { paths, ..texts.clone() }, watch)?;
        Ok(Self { sources, weights: given.iter().filter_map(|path| path.weight).collect() })
    }

    /// Warns in one line of skipped rows.
    pub(super) fn warn(&self, notes: &Notes) {
        if let Some(source) = self.sources.first() {
            source.watch().warn(notes);
        }
    }

    /// Returns the sources.
    #[must_use]
    pub fn sources(&self) -> &[Sources] {
        &self.sources
    }

    /// Returns the weight of each source.
    #[must_use]
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Returns a hash of all documents and of the weights.
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

    /// Samples text to train a tokenizer on: about `max_bytes`, from each source by its weight.
    pub fn sample_texts(&self, max_bytes: u64) -> Result<Vec<String>, DataError> {
        let sum: f64 = self.weights.iter().sum();
        let mut texts = Vec::new();
        for (source, weight) in self.sources.iter().zip(&self.weights) {
            texts.extend(source.sample_texts((max_bytes as f64 * (weight / sum)) as u64)?);
        }
        Ok(texts)
    }
}
