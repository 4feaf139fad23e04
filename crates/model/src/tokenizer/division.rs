//! The division of text before the model of a tokenizer encodes each part (the `pre_tokenizer` of `tokenizer.json`).
//!
//! The steps are those of Hugging Face's library, except that regular expressions are matched by [`Pattern`].

use std::sync::Arc;

use serde_json::Value;
use tokenizers::pattern::Invert;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

use super::pattern::Pattern;

/// GPT-2's division into words, which is built into `ByteLevel`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The steps of a division, in order.
#[derive(Clone, Debug)]
pub(super) struct Division(Arc<[Step]>);

#[derive(Debug)]
enum Step {
    Split {
        pattern: Pattern,
        behavior: SplitDelimiterBehavior,
        is_inverted: bool,
    },
    /// Spells each byte as a printable character.
    ByteAlphabet(PreTokenizerWrapper),
    Library(PreTokenizerWrapper),
}

/// Compiles the expression whose matches are GPT-2's words.
pub(super) fn word_pattern() -> Result<Pattern, String> {
    Pattern::new(GPT2)
}

impl Division {
    /// Parses a `pre_tokenizer` of `tokenizer.json`; none for null.
    pub(super) fn new(value: &Value) -> Result<Option<Self>, String> {
        if value.is_null() {
            return Ok(None);
        }
        let mut steps = Vec::new();
        add_steps(value, &mut steps)?;
        Ok(Some(Self(steps.into())))
    }

    /// Returns the expressions at whose matches text is cut, if the division is cuts followed by
    /// [`Step::ByteAlphabet`] alone.
    pub(super) fn cuts(&self) -> Option<Vec<&Pattern>> {
        let (last, cuts) = self.0.split_last()?;
        let is_cut = |step: &'_ Step| matches!(step, Step::Split { behavior: SplitDelimiterBehavior::Isolated, .. });
        if !matches!(last, Step::ByteAlphabet(_)) || !cuts.iter().all(is_cut) {
            return None;
        }
        let patterns =
            cuts.iter().filter_map(|step| if let Step::Split { pattern, .. } = step { Some(pattern) } else { None });
        Some(patterns.collect())
    }
}

fn add_steps(value: &Value, steps: &mut Vec<Step>) -> Result<(), String> {
    let is_true = |key: &str| value[key] == Value::Bool(true);
    match value["type"].as_str() {
        Some("Sequence") => {
            let parts = value["pretokenizers"].as_array().ok_or("pre_tokenizer.pretokenizers: must be a list")?;
            return parts.iter().try_for_each(|part| add_steps(part, steps));
        }
        Some("Split") => {
            if let Some(source) = value["pattern"]["Regex"].as_str() {
                let behavior = serde_json::from_value(value["behavior"].clone());
                let behavior = behavior.map_err(|error| format!("pre_tokenizer: behavior: {error}"))?;
                steps.push(Step::Split { pattern: Pattern::new(source)?, behavior, is_inverted: is_true("invert") });
                return Ok(());
            }
        }
        // A prefix would have to be added before the division into words, so the library does it all.
        Some("ByteLevel") if value["add_prefix_space"] == Value::Bool(false) => {
            if value["use_regex"] != Value::Bool(false) {
                steps.push(isolated(GPT2)?);
            }
            let mut alphabet = value.clone();
            alphabet["use_regex"] = false.into();
            steps.push(Step::ByteAlphabet(library(alphabet)?));
            return Ok(());
        }
        Some("Digits") => {
            steps.push(isolated(if is_true("individual_digits") { r"\p{N}" } else { r"\p{N}+" })?);
            return Ok(());
        }
        _ => {}
    }
    steps.push(Step::Library(library(value.clone())?));
    Ok(())
}

fn isolated(source: &str) -> Result<Step, String> {
    let pattern = Pattern::new(source)?;
    Ok(Step::Split { pattern, behavior: SplitDelimiterBehavior::Isolated, is_inverted: false })
}

fn library(value: Value) -> Result<PreTokenizerWrapper, String> {
    let kind = value["type"].as_str().unwrap_or("without a type").to_owned();
    serde_json::from_value(value).map_err(|error| format!("pre_tokenizer {kind}: {error}"))
}

impl PreTokenizer for Division {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        for step in self.0.iter() {
            match step {
                Step::Split { pattern, behavior, is_inverted: false } => {
                    text.split(|_, part| part.split(pattern, *behavior))?;
                }
                Step::Split { pattern, behavior, is_inverted: true } => {
                    text.split(|_, part| part.split(Invert(pattern), *behavior))?;
                }
                Step::ByteAlphabet(step) | Step::Library(step) => step.pre_tokenize(text)?,
            }
        }
        Ok(())
    }
}
