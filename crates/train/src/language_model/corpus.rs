//! Text and tokenizer together: from what a configuration names to tokens.

use moeworks_infer::data::{SpanRule, Watch};
use moeworks_model::Tokenizer;

use crate::config::{RunConfig, TokenizerChoice};
use crate::data::{Dataset, Mix};
use crate::error::TrainError;

/// A BPE tokenizer learns from at most this much text: more changes few merges and takes long.
const BPE_TRAINING_BYTES: u64 = 16 << 20;

/// The data of a run, ready for batches.
pub(crate) struct Corpus {
    pub(crate) dataset: Dataset,
    pub(crate) tokenizer: Tokenizer,
    /// A hash of all documents, as hexadecimal digits.
    pub(crate) hash: String,
}

impl Corpus {
    /// Finds the texts of `config` and tokenises them, told to `watch`: with `tokenizer` if the run has one already, else with the one that the
    /// configuration names or asks to be trained.
    pub(crate) fn open(config: &RunConfig, tokenizer: Option<Tokenizer>, watch: &Watch) -> Result<Self, TrainError> {
        let mix = Mix::find(&config.data.texts(), watch)?;
        let tokenizer = match tokenizer {
            Some(tokenizer) => tokenizer,
            None => choose_tokenizer(config, &mix)?,
        };
        let spans = SpanRule::from_config(&config.model, &tokenizer)?;
        let dataset = Dataset::open(config, &mix, &tokenizer)?.with_spans(spans);
        Ok(Self { dataset, tokenizer, hash: format!("{:032x}", mix.hash()) })
    }
}

fn choose_tokenizer(config: &RunConfig, mix: &Mix) -> Result<Tokenizer, TrainError> {
    Ok(match &config.data.tokenizer {
        TokenizerChoice::Bytes => Tokenizer::bytes(),
        TokenizerChoice::File(path) => Tokenizer::from_file(path.as_ref())?,
        TokenizerChoice::Bpe => {
            let texts = mix.sample_texts(BPE_TRAINING_BYTES)?;
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            Tokenizer::train_bpe(&texts, config.data.bpe_vocab_size)?
        }
    })
}
