//! Answers in channels, as GPT-OSS gives them (OpenAI's harmony format): what it thinks, what it says and what it
//! calls are messages of their own, `<|channel|>NAME<|message|>TEXT` with `<|end|>`, `<|return|>` or `<|call|>`
//! behind.

/// The mark before the name of a channel.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];

/// Returns the part of an answer, in which special tokens are spelled, that stays in the conversation: its last
/// message in the channel `final`, nothing if it has none. Thoughts are left out of later turns, as the family's
/// template asks.
#[must_use]
pub fn final_message(answer: &str) -> &str {
    let messages = answer.split(CHANNEL).skip(1).filter_map(|part| part.split_once(MESSAGE));
    let is_final = |header: &str| header.split(|c: char| c.is_whitespace() || c == '<').next() == Some("final");
    let text = messages.filter(|(header, _)| is_final(header)).last().map_or("", |(_, text)| text);
    let end = ENDS.iter().filter_map(|end| text.find(end)).min();
    end.map_or(text, |end| &text[..end])
}
