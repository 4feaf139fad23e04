//! Log-probabilities as JSON, as OpenAI's API has them: lists side by side in completions, objects in chats.

use moeworks_infer::generation::{TokenLogprob, TokenLogprobs};
use moeworks_model::TokenTable;
use serde_json::{Map, Value, json};

/// Stands for what has no chance at all: JSON has no infinity.
const LEAST: f32 = -9999.0;

/// Tokens of a completion, in their order.
#[derive(Debug)]
pub(crate) struct CompletionTokens<'a> {
    /// The prompt's tokens, where they stand before the answer, with the log-probabilities of all but the first.
    pub(crate) prompt: Option<(&'a [u32], &'a [TokenLogprobs])>,
    /// Tokens of the answer.
    pub(crate) answer: &'a [TokenLogprobs],
}

/// The object of a completion. `offset` is the place of the first token in the text, in characters, and becomes that
/// behind the last one.
pub(crate) fn completion_json(table: &TokenTable, tokens: &CompletionTokens<'_>, offset: &mut usize) -> Value {
    let mut lists = Lists { table, offset: *offset, tokens: vec![], logprobs: vec![], top: vec![], offsets: vec![] };
    if let Some((ids, logprobs)) = tokens.prompt {
        if let Some(&first) = ids.first() {
            lists.push(first, Value::Null, Value::Null);
        }
        logprobs.iter().for_each(|token| lists.add(token));
    }
    tokens.answer.iter().for_each(|token| lists.add(token));
    *offset = lists.offset;
    let Lists { tokens, logprobs, top, offsets, .. } = lists;
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

/// The lists of a completion, side by side.
struct Lists<'a> {
    table: &'a TokenTable,
    offset: usize,
    tokens: Vec<String>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<usize>,
}

impl Lists<'_> {
    fn add(&mut self, logprobs: &TokenLogprobs) {
        let TokenLogprobs { token, top } = logprobs;
        let mut named = Map::new();
        // The token itself is named, too. Of tokens with the same text the likeliest is.
        for TokenLogprob { id, logprob } in top.iter().chain([token]) {
            named.entry(completion_text(self.table, *id)).or_insert_with(|| finite(*logprob));
        }
        self.push(token.id, finite(token.logprob), named.into());
    }

    fn push(&mut self, id: u32, logprob: Value, top: Value) {
        self.tokens.push(completion_text(self.table, id));
        self.logprobs.push(logprob);
        self.top.push(top);
        self.offsets.push(self.offset);
        if !self.table.is_special(id) {
            // Characters are counted by their first bytes.
            self.offset += self.table.bytes(id).iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
        }
    }
}

/// The object of a chat's message, or of a piece of it.
pub(crate) fn chat_json(table: &TokenTable, tokens: &[TokenLogprobs]) -> Value {
    let one = |&TokenLogprob { id, logprob }: &TokenLogprob| {
        let bytes = table.bytes(id);
        json!({"token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes})
    };
    let content = tokens.iter().map(|TokenLogprobs { token, top }| {
        let mut json = one(token);
        json["top_logprobs"] = top.iter().map(one).collect();
        json
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// The text of a token in a completion. Bytes that are a part of a character are spelled as OpenAI does.
fn completion_text(table: &TokenTable, id: u32) -> String {
    let bytes = table.bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let spelled: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{spelled}")
        }
    }
}

fn finite(logprob: f32) -> Value {
    logprob.max(LEAST).into()
}

#[cfg(test)]
mod tests {
    use moeworks_model::Tokenizer;

    use super::*;

    fn token(id: u32, logprob: f32) -> TokenLogprobs {
        let top = vec![TokenLogprob { id: 97, logprob: -0.5 }, TokenLogprob { id: 0xC3, logprob: -1.5 }];
        TokenLogprobs { token: TokenLogprob { id, logprob }, top }
    }

    #[test]
    fn completions_have_lists_with_the_prompt_first() {
        let (table, mut offset) = (Tokenizer::bytes().token_table(), 0);
        let (prompt, answer) = ([token(0xA9, -2.0)], [token(97, -0.5), token(98, f32::NEG_INFINITY)]);
        let tokens = CompletionTokens { prompt: Some((&[0xC3, 0xA9], &prompt)), answer: &answer };
        let json = completion_json(&table, &tokens, &mut offset);
        assert_eq!(json["tokens"], json!(["bytes:\\xc3", "bytes:\\xa9", "a", "b"]));
        assert_eq!(json["token_logprobs"], json!([null, -2.0, -0.5, -9999.0]));
        assert_eq!((&json["text_offset"], offset), (&json!([0, 1, 1, 2]), 3));
        assert_eq!(json["top_logprobs"][0], Value::Null);
        assert_eq!(json["top_logprobs"][1], json!({"a": -0.5, "bytes:\\xc3": -1.5, "bytes:\\xa9": -2.0}));
        assert_eq!(json["top_logprobs"][2], json!({"a": -0.5, "bytes:\\xc3": -1.5}));
    }

    #[test]
    fn chats_have_an_object_with_bytes_for_each_token() {
        let json = chat_json(&Tokenizer::bytes().token_table(), &[token(0xC3, -1.5)]);
        let expected = json!([{
            "token": "\u{fffd}", "logprob": -1.5, "bytes": [0xC3],
            "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]},
                             {"token": "\u{fffd}", "logprob": -1.5, "bytes": [0xC3]}],
        }]);
        assert_eq!(json, json!({"content": expected, "refusal": null}));
    }
}
