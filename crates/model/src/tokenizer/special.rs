//! The special tokens that a tokenizer puts around a text.
//!
//! `transformers` goes by the post-processor of `tokenizer.json`. The flags `add_bos_token` and `add_eos_token` of
//! `tokenizer_config.json` decide where there is no `tokenizer.json`, and, until release 5, in the classes of [`FLAGGED`]. Files of
//! DeepSeek rely on this: their post-processor adds nothing, their flag says that the model expects a beginning. So a flag of such a
//! class that asks for a token is followed where the post-processor adds none.

use serde_json::{Value, json};

/// Classes that go by their flags, with the names of the tokens where the configuration names none.
const FLAGGED: [(&str, &str, &str); 4] = [
    ("LlamaTokenizer", "<s>", "</s>"),
    ("CodeLlamaTokenizer", "<s>", "</s>"),
    ("GemmaTokenizer", "<bos>", "<eos>"),
    ("CohereTokenizer", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
];

/// A class that replaces the post-processor of its file by its flags.
const REPLACING: &str = "GPTNeoXTokenizer";

/// Ids before and behind a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Additions {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl Additions {
    fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// The additions of a post-processor as `tokenizer.json` describes it.
    fn of_processor(processor: &Value) -> Result<Self, String> {
        match processor["type"].as_str() {
            Some("TemplateProcessing") => Self::of_template(processor),
            Some("BertProcessing" | "RobertaProcessing") => {
                let id =
                    |key: &str| id_of(&processor[key][1]).ok_or_else(|| format!("post_processor.{key}: has no id"));
                Ok(Self { before: vec![id("cls")?], after: vec![id("sep")?] })
            }
            Some("Sequence") => {
                let processors = processor["processors"].as_array().into_iter().flatten();
                processors.map(Self::of_processor).try_fold(Self::default(), |inner, outer| Ok(inner.inside(outer?)))
            }
            // ByteLevel adds no token.
            _ => Ok(Self::default()),
        }
    }

    fn of_template(processor: &Value) -> Result<Self, String> {
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

    /// These additions with `outer` around them.
    fn inside(self, outer: Self) -> Self {
        Self { before: [outer.before, self.before].concat(), after: [self.after, outer.after].concat() }
    }
}

fn id_of(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// The content of a token that a configuration names, as text or as an object.
pub(super) fn named_token<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// A post-processor that puts one token before a text and one behind it, or either, each by name and id.
pub(crate) fn template(bos: Option<(&str, u32)>, eos: Option<(&str, u32)>) -> Value {
    let special = |(name, _): (&str, u32), type_id: u32| json!({ "SpecialToken": { "id": name, "type_id": type_id } });
    let around = |sequence: &str, type_id: u32| -> Vec<Value> {
        let text = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        let before = bos.map(|bos| special(bos, type_id));
        before.into_iter().chain([text]).chain(eos.map(|eos| special(eos, type_id))).collect()
    };
    let tokens = bos
        .into_iter()
        .chain(eos)
        .map(|(name, id)| (name.to_owned(), json!({ "id": name, "ids": [id], "tokens": [name] })));
    let pair = [around("A", 0), around("B", 1)].concat();
    json!({
        "type": "TemplateProcessing", "single": around("A", 0), "pair": pair,
        "special_tokens": tokens.collect::<serde_json::Map<_, _>>(),
    })
}

/// The additions of the tokenizer `value`, with `config` beside it. Where flags decide, the post-processor of `value` becomes one that
/// does the same, so that a saved file says it to every reader. `has_flags_only` is for files without a post-processor of their own.
pub(super) fn additions(
    value: &mut Value,
    config: &Value,
    has_flags_only: bool,
    id_of_token: impl Fn(&str) -> Option<u32>,
) -> Result<Additions, String> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    let processor = Additions::of_processor(&value["post_processor"])?;
    let replaces = class == REPLACING;
    let flagged = FLAGGED.iter().find(|(name, ..)| *name == class);
    if !(replaces || has_flags_only || flagged.is_some() && processor.is_empty()) {
        return Ok(processor);
    }
    let (_, bos, eos) = flagged.copied().unwrap_or(("", super::END_OF_TEXT, super::END_OF_TEXT));
    let token = |flag: &str, key: &str, default: &'static str| {
        let name = named_token(config, key).unwrap_or(default);
        let is_asked = config[flag] == Value::Bool(true);
        is_asked.then(|| id_of_token(name)).flatten().map(|id| (name.to_owned(), id))
    };
    let bos = token("add_bos_token", "bos_token", bos);
    let eos = token("add_eos_token", "eos_token", eos);
    let additions = Additions { before: bos.iter().map(|t| t.1).collect(), after: eos.iter().map(|t| t.1).collect() };
    if additions != processor {
        let [bos, eos] = [&bos, &eos].map(|token| token.as_ref().map(|(name, id)| (&name[..], *id)));
        value["post_processor"] = template(bos, eos);
    }
    Ok(additions)
}
