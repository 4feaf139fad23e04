//! Answers in channels, as of GPT-OSS (OpenAI's harmony format). Thoughts, answers and calls are separate messages of
//! the form `<|channel|>NAME<|message|>TEXT`, ended by `<|end|>`, `<|return|>` or `<|call|>`.

/// The token before the name of a channel.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];

/// Returns the part of an answer, with special tokens spelled out, that stays in the conversation: its last message
/// in the channel `final`, or nothing. Thoughts are left out of later turns, as the family's template expects.
#[must_use]
pub fn final_message(answer: &str) -> &str {
    let messages = answer.split(CHANNEL).skip(1).filter_map(|part| part.split_once(MESSAGE));
    let is_final = |header: &str| header.split(|c: char| c.is_whitespace() || c == '<').next() == Some("final");
    let text = messages.filter(|(header, _)| is_final(header)).last().map_or("", |(_, text)| text);
    let end = ENDS.iter().filter_map(|end| text.find(end)).min();
    end.map_or(text, |end| &text[..end])
}
