//! Sampling settings recommended by a model's files: `generation_config.json` of a Hugging Face folder, and the keys
//! `general.sampling.*` of a GGUF file.
//!
//! A folder's file is read as `transformers` does. With `do_sample` true, the defaults are temperature 1 and the 50
//! most likely tokens; with `do_sample` false, the most likely token is taken. Without `do_sample`, only the keys in
//! the file count, as in vLLM.

use moeworks_model::gguf::{GgufError, GgufFile, Value};
use serde_json::Value as Json;

/// The temperature that `transformers` takes if a file only asks for sampling.
const SAMPLE_TEMPERATURE: f32 = 1.0;
const SAMPLE_TOP_K: usize = 50;

/// Keys of `generation_config.json` that change the result and are not supported here, with their neutral values.
const UNUSED: [(&str, &[f64]); 15] = [
    ("num_beams", &[1.0]),
    ("typical_p", &[1.0]),
    ("top_h", &[]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("guidance_scale", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("forced_bos_token_id", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("diversity_penalty", &[0.0]),
];

/// Keys with lists or objects that change the result and are not supported here.
const UNUSED_LISTS: [&str; 6] = [
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "force_words_ids",
    "watermarking_config",
];

/// Sampling settings recommended by a model's files; `None` where they have none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// True if the most likely token is always taken. The other settings then count only if the user asks for
    /// sampling.
    pub is_greedy: bool,
    /// The divisor of the logits.
    pub temperature: Option<f32>,
    /// The number of most likely tokens that are sampled; 0 for all.
    pub top_k: Option<usize>,
    /// The least total probability of the most likely tokens that are sampled.
    pub top_p: Option<f32>,
    /// The least probability of a sampled token, relative to the most likely one.
    pub min_p: Option<f32>,
    /// The repetition penalty of CTRL; 1 for none.
    pub repetition_penalty: Option<f32>,
    /// The number of last tokens that penalties count.
    pub penalty_last: Option<usize>,
    /// The most tokens of an answer.
    pub max_new_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stop_texts: Vec<String>,
    /// Settings that would change the result and are not supported here, as `name = value`.
    pub unused: Vec<String>,
}

impl SamplingDefaults {
    /// Reads `generation_config.json`. The error names the key and what would be right.
    pub fn from_generation_config(json: &Json) -> Result<Self, String> {
        let do_sample = match &json["do_sample"] {
            Json::Null => None,
            Json::Bool(value) => Some(*value),
            other => return Err(format!("do_sample = {other}: must be true or false")),
        };
        let number = |key: &str, range: Range| match &json[key] {
            Json::Null => Ok(None),
            value => range.check(key, value.as_f64(), value).map(Some),
        };
        let mut found = Self {
            is_greedy: do_sample == Some(false),
            temperature: number("temperature", Range::AtLeast0)?,
            top_k: number("top_k", Range::Count)?.map(|count| count as usize),
            top_p: number("top_p", Range::Share)?,
            min_p: number("min_p", Range::ShareOr0)?,
            repetition_penalty: number("repetition_penalty", Range::Above0)?,
            penalty_last: None,
            max_new_tokens: number("max_new_tokens", Range::Count)?
                .map(|count| count as usize)
                .filter(|&count| count > 0),
            stop_texts: stop_texts(&json["stop_strings"])?,
            unused: unused(json),
        };
        if do_sample == Some(true) {
            found.temperature.get_or_insert(SAMPLE_TEMPERATURE);
            found.top_k.get_or_insert(SAMPLE_TOP_K);
        }
        Ok(found)
    }

    /// Reads the keys `general.sampling.*` of a GGUF file, which are llama.cpp's defaults.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, GgufError> {
        let number = |name: &str, range: Range| {
            let key = format!("general.sampling.{name}");
            let Some(value) = file.optional(&key, Value::as_f64, "a number")? else { return Ok(None) };
            range.check(name, Some(value), &value).map(Some).map_err(|reason| file.wrong_key(&key, reason))
        };
        let is_set = |name: &&str| number(name, Range::Any).is_ok_and(|value| value.is_some_and(|value| value != 0.0));
        Ok(Self {
            temperature: number("temp", Range::AtLeast0)?,
            top_k: number("top_k", Range::Count)?.map(|count| count as usize),
            top_p: number("top_p", Range::Share)?,
            min_p: number("min_p", Range::ShareOr0)?,
            repetition_penalty: number("penalty_repeat", Range::Above0)?,
            // In llama.cpp -1 means all tokens and 0 none.
            penalty_last: number("penalty_last_n", Range::Any)?.filter(|&last| last >= 0.0).map(|last| last as usize),
            unused: ["xtc_probability", "mirostat"].into_iter().filter(is_set).map(|name| name.to_owned()).collect(),
            ..Self::default()
        })
    }
}

/// The allowed range of a setting.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Range {
    Any,
    AtLeast0,
    Above0,
    /// Above 0 and at most 1.
    Share,
    /// From 0 to 1.
    ShareOr0,
    /// An integer. Negative ones mean no limit, as 0 does.
    Count,
}

impl Range {
    fn check(self, name: &str, value: Option<f64>, shown: &impl std::fmt::Display) -> Result<f32, String> {
        let (is_right, expected) = match (self, value) {
            (Self::Any, Some(x)) => (x.is_finite(), "a number"),
            (Self::AtLeast0, Some(x)) => ((0.0..=1e6).contains(&x), "a number of at least 0"),
            (Self::Above0, Some(x)) => (x > 0.0 && x <= 1e6, "a number above 0"),
            (Self::Share, Some(x)) => (x > 0.0 && x <= 1.0, "above 0 and at most 1"),
            (Self::ShareOr0, Some(x)) => ((0.0..=1.0).contains(&x), "from 0 to 1"),
            (Self::Count, Some(x)) => (x.fract() == 0.0 && x.abs() < 1e9, "a whole number"),
            (_, None) => (false, "a number"),
        };
        match value {
            Some(x) if is_right => Ok(if self == Self::Count { x.max(0.0) } else { x } as f32),
            _ => Err(format!("{name} = {shown}: must be {expected}")),
        }
    }
}

fn stop_texts(value: &Json) -> Result<Vec<String>, String> {
    let text = |value: &Json| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let found = match value {
        Json::Null => Some(Vec::new()),
        Json::Array(many) => many.iter().map(text).collect(),
        one => text(one).map(|text| vec![text]),
    };
    found.ok_or_else(|| format!("stop_strings = {value}: must be a text or a list of texts"))
}

fn unused(json: &Json) -> Vec<String> {
    let is_neutral = |value: &Json, neutral: &[f64]| value.as_f64().is_some_and(|x| neutral.contains(&x));
    let numbers = UNUSED.iter().filter(|(key, neutral)| !json[key].is_null() && !is_neutral(&json[key], neutral));
    let is_empty = |value: &Json| {
        value.is_null()
            || value.as_array().is_some_and(Vec::is_empty)
            || value.as_object().is_some_and(|map| map.is_empty())
    };
    let lists = UNUSED_LISTS.iter().filter(|key| !is_empty(&json[**key])).map(|key| (*key).to_owned());
    numbers.map(|(key, _)| format!("{key} = {}", json[key])).chain(lists).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(json: Json) -> SamplingDefaults {
        SamplingDefaults::from_generation_config(&json).unwrap()
    }

    #[test]
    fn a_file_that_asks_for_sampling_has_the_defaults_of_transformers() {
        let plain = read(json!({"do_sample": true, "eos_token_id": 3}));
        assert_eq!((plain.temperature, plain.top_k, plain.is_greedy), (Some(1.0), Some(50), false));
        let full = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
                          "repetition_penalty": 1.05, "max_new_tokens": 2048, "stop_strings": "###"});
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.1),
            repetition_penalty: Some(1.05),
            max_new_tokens: Some(2048),
            stop_texts: vec!["###".to_owned()],
            ..SamplingDefaults::default()
        };
        assert_eq!(read(full), expected);
    }

    #[test]
    fn without_do_sample_only_what_is_set_counts_and_with_false_nothing_is_drawn() {
        assert_eq!(read(json!({"bos_token_id": 1, "top_p": null})), SamplingDefaults::default());
        let some = read(json!({"temperature": 0.7, "top_k": -1}));
        assert_eq!((some.temperature, some.top_k, some.is_greedy), (Some(0.7), Some(0), false));
        assert!(read(json!({"do_sample": false, "temperature": 0.6})).is_greedy);
    }

    #[test]
    fn what_is_not_used_is_named_unless_it_changes_nothing() {
        let unused = json!({"num_beams": 4, "typical_p": 1.0, "suppress_tokens": [1], "bad_words_ids": [],
                            "no_repeat_ngram_size": 3, "min_length": 0});
        assert_eq!(read(unused).unused, ["num_beams = 4", "no_repeat_ngram_size = 3", "suppress_tokens"]);
    }

    #[test]
    fn values_that_cannot_be_are_named() {
        let wrong = [
            (json!({"temperature": "hot"}), "temperature = \"hot\": must be a number"),
            (json!({"top_p": 0}), "top_p = 0: must be above 0"),
            (json!({"min_p": 2}), "min_p = 2: must be from 0 to 1"),
            (json!({"top_k": 1.5}), "top_k = 1.5: must be a whole number"),
            (json!({"repetition_penalty": -1.0}), "repetition_penalty = -1.0: must be a number above 0"),
            (json!({"do_sample": "yes"}), "do_sample = \"yes\": must be true or false"),
            (json!({"stop_strings": [1]}), "stop_strings = [1]: must be"),
        ];
        for (json, expected) in wrong {
            let error = SamplingDefaults::from_generation_config(&json).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
