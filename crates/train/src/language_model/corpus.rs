//! A run's text and tokenizer, from a configuration to tokens.

use moeworks_infer::data::{SpanRule, Watch};
use moeworks_model::Tokenizer;

use crate::config::{RunConfig, TokenizerChoice};
use crate::data::{Dataset, Mix};
use crate::error::TrainError;

/// The most text that a BPE tokenizer is trained on; more changes few merges and takes long.
const BPE_TRAINING_BYTES: u64 = 16 << 20;

/// The data of a run with its tokenizer.
pub(crate) struct Corpus {
    pub(crate) dataset: Dataset,
    pub(crate) tokenizer: Tokenizer,
    /// A hash of all documents, in hexadecimal digits.
    pub(crate) hash: String,
}

impl Corpus {
    /// Finds the texts of `config` and tokenises them, reporting to `watch`. `tokenizer` is that of a run that has
    /// one already; otherwise the configuration names one or asks for training one.
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
