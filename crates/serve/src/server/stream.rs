//! Answers as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::Value;

use super::answers::{Answers, NextToken};
use super::choice::Shown;
use super::reply::Delta;

/// The end of a stream, as OpenAI's clients know it.
const DONE: &str = "data: [DONE]\n\n";
/// A comment, which clients pass over: it keeps proxies from closing a connection on which nothing comes.
const PING: &str = ": ping\n\n";

/// Answers that are sent as they come.
struct Feed {
    answers: Answers,
    ping: Duration,
    /// The place in the text behind the last token of each answer.
    offsets: Vec<usize>,
    is_done: bool,
}

/// The events of answers. A comment comes where there is no event for the time `ping`.
pub(crate) fn events(answers: Answers, ping: Duration) -> impl Stream<Item = Result<String, Infallible>> {
    let offsets = vec![0; answers.choices.len()];
    unfold(Feed { answers, ping, offsets, is_done: false }, |mut feed| async {
        let text = feed.next().await?;
        Some((Ok(text), feed))
    })
}

impl Feed {
    /// Waits for the next text to send; none if all is said.
    async fn next(&mut self) -> Option<String> {
        while !self.is_done {
            match tokio::time::timeout(self.ping, self.answers.next()).await {
                Err(_) => return Some(PING.to_owned()),
                Ok(Ok(Some(token))) => {
                    if let Some(event) = self.chunk(&token) {
                        return Some(event);
                    }
                }
                Ok(Ok(None)) => {
                    self.is_done = true;
                    return Some(self.usage().unwrap_or_default() + DONE);
                }
                Ok(Err(error)) => {
                    self.is_done = true;
                    return Some(event(&error.to_json()) + DONE);
                }
            }
        }
        None
    }

    /// The events of a token, if it has anything to say.
    fn chunk(&mut self, token: &NextToken) -> Option<String> {
        let Answers { choices, common, envelope, usage, .. } = &self.answers;
        let &NextToken { choice, token, ref shown, is_first, ref experts } = token;
        let finish_reason = choices[choice].finish_reason();
        let has_tokens = common.returns_token_ids || common.num_logprobs.is_some();
        if *shown == Shown::default() && finish_reason.is_none() && !is_first && !has_tokens && experts.is_none() {
            return None;
        }
        let usage = common.includes_usage.then_some(Some(*usage).filter(|_| common.has_continuous_usage));
        let start = choices[choice].tokens.len().saturating_sub(1);
        let logprobs = envelope.logprobs(choice, &choices[choice], start, &mut self.offsets[choice]);
        let delta = Delta {
            choice,
            shown,
            tokens: Some(token.as_slice()),
            finish_reason,
            logprobs,
            is_first,
            experts: experts.as_ref(),
        };
        let further = envelope.further_calls(&delta, usage);
        Some(event(&envelope.chunk(&delta, usage)) + &further.iter().map(event).collect::<String>())
    }

    fn usage(&self) -> Option<String> {
        let Answers { common, envelope, usage, .. } = &self.answers;
        common.includes_usage.then(|| event(&envelope.usage_chunk(*usage)))
    }
}

fn event(json: &Value) -> String {
    format!("data: {json}\n\n")
}
