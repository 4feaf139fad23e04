//! The special tokens that a tokenizer adds around a text.
//!
//! `transformers` uses the post-processor of `tokenizer.json`. The flags `add_bos_token` and `add_eos_token` of
//! `tokenizer_config.json` decide if there is no `tokenizer.json` and, until release 5, in the classes of
//! [`FLAGGED`]. DeepSeek's files rely on this: their post-processor adds nothing, but a flag says that the model
//! expects a BOS token. A flag of such a class is therefore followed if the post-processor adds nothing.

use serde_json::{Value, json};

/// Classes that follow their flags, with the default names of their tokens.
const FLAGGED: [(&str, &str, &str); 4] = [
    ("LlamaTokenizer", "<s>", "</s>"),
    ("CodeLlamaTokenizer", "<s>", "</s>"),
    ("GemmaTokenizer", "<bos>", "<eos>"),
    ("CohereTokenizer", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
];

/// A class whose flags replace the post-processor of its file.
const REPLACING: &str = "GPTNeoXTokenizer";

/// The ids added before and after a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Additions {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl Additions {
    fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// Reads the additions of a `post_processor` of `tokenizer.json`.
    fn from_processor(processor: &Value) -> Result<Self, String> {
        match processor["type"].as_str() {
            Some("TemplateProcessing") => Self::from_template(processor),
            Some("BertProcessing" | "RobertaProcessing") => {
                let id =
                    |key: &str| id_of(&processor[key][1]).ok_or_else(|| format!("post_processor.{key}: has no id"));
                Ok(Self { before: vec![id("cls")?], after: vec![id("sep")?] })
            }
            Some("Sequence") => {
                let processors = processor["processors"].as_array().into_iter().flatten();
                processors.map(Self::from_processor).try_fold(Self::default(), |inner, outer| Ok(inner.inside(outer?)))
            }
            // ByteLevel adds no token.
            _ => Ok(Self::default()),
        }
    }

    fn from_template(processor: &Value) -> Result<Self, String> {
        let (mut additions, mut is_behind) = (Self::default(), false);
        for piece in processor["single"].as_array().into_iter().flatten() {
            if !piece["Sequence"].is_null() {
                is_behind = true;
                continue;
            }
            let name = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
            let ids: Option<Vec<u32>> =
                processor["special_tokens"][name]["ids"].as_array().and_then(|ids| ids.iter().map(id_of).collect());
            let ids = ids.ok_or_else(|| format!("post_processor: the special token {name:?} has no ids"))?;
            if is_behind { additions.after.extend(ids) } else { additions.before.extend(ids) }
        }
        Ok(additions)
    }

    /// Returns these additions with `outer` around them.
    fn inside(self, outer: Self) -> Self {
        Self { before: [outer.before, self.before].concat(), after: [self.after, outer.after].concat() }
    }
}

fn id_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Returns the content of a token in a configuration, where it is text or an object.
pub(super) fn named_token<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// A token of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedToken<'a> {
    pub(crate) name: &'a str,
    pub(crate) id: u32,
}

/// Builds a post-processor that adds `bos` before a text and `eos` after it, if given.
pub(crate) fn template(bos: Option<NamedToken<'_>>, eos: Option<NamedToken<'_>>) -> Value {
    let special =
        |token: NamedToken<'_>, type_id: u32| json!({ "SpecialToken": { "id": token.name, "type_id": type_id } });
    let around = |sequence: &str, type_id: u32| -> Vec<Value> {
        let text = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        let before = bos.map(|bos| special(bos, type_id));
        before.into_iter().chain([text]).chain(eos.map(|eos| special(eos, type_id))).collect()
    };
    let tokens = bos
        .into_iter()
        .chain(eos)
        .map(|NamedToken { name, id }| (name.to_owned(), json!({ "id": name, "ids": [id], "tokens": [name] })));
    let pair = [around("A", 0), around("B", 1)].concat();
    json!({
        "type": "TemplateProcessing", "single": around("A", 0), "pair": pair,
        "special_tokens": tokens.collect::<serde_json::Map<_, _>>(),
    })
}

/// Returns the additions of the tokenizer `value` with the configuration `config`. If flags decide, the
/// post-processor of `value` is replaced by an equivalent one, so that every reader of a saved file adds the same.
/// `has_flags_only` is for files without a post-processor.
pub(super) fn additions(
    value: &mut Value,
    config: &Value,
    has_flags_only: bool,
    id_of_token: impl Fn(&str) -> Option<u32>,
) -> Result<Additions, String> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    let processor = Additions::from_processor(&value["post_processor"])?;
    let replaces = class == REPLACING;
    let flagged = FLAGGED.iter().find(|(name, ..)| *name == class);
    if !(replaces || has_flags_only || flagged.is_some() && processor.is_empty()) {
        return Ok(processor);
    }
    let (_, bos, eos) = flagged.copied().unwrap_or(("", super::END_OF_TEXT, super::END_OF_TEXT));
    let token = |flag: &str, key: &str, default: &'static str| {
        let name: &str = named_token(config, key).unwrap_or(default);
        let is_asked = config[flag] == Value::Bool(true);
        is_asked.then(|| id_of_token(name)).flatten().map(|id| NamedToken { name, id })
    };
    let bos = token("add_bos_token", "bos_token", bos);
    let eos = token("add_eos_token", "eos_token", eos);
    let [before, after] = [bos, eos].map(|token| token.iter().map(|token| token.id).collect());
    let additions = Additions { before, after };
    if additions != processor {
        value["post_processor"] = template(bos, eos);
    }
    Ok(additions)
}
