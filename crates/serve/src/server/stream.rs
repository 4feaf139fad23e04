//! Answers as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::Value;

use super::answers::{Answers, NextToken};
use super::reply::Delta;

/// The end of a stream, as OpenAI's clients know it.
const DONE: &str = "data: [DONE]\n\n";
/// A comment, which clients pass over: it keeps proxies from closing a connection on which nothing comes.
const PING: &str = ": ping\n\n";

/// Answers that are sent as they come.
struct Feed {
    answers: Answers,
    ping: Duration,
    is_done: bool,
}

/// The events of answers. A comment comes where there is no event for the time `ping`.
pub(crate) fn events(answers: Answers, ping: Duration) -> impl Stream<Item = Result<String, Infallible>> {
    unfold(Feed { answers, ping, is_done: false }, |mut feed| async {
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

    /// The event of a token, if it has anything to say.
    fn chunk(&self, token: &NextToken) -> Option<String> {
        let Answers { choices, common, envelope, usage, .. } = &self.answers;
        let &NextToken { choice, token, ref text, is_first, ref experts } = token;
        let end = choices[choice].end;
        if text.is_empty() && end.is_none() && !is_first && !common.returns_token_ids && experts.is_none() {
            return None;
        }
        let usage = common.includes_usage.then_some(Some(*usage).filter(|_| common.has_continuous_usage));
        let tokens = [token];
        let delta = Delta { choice, text, tokens: Some(&tokens), end, is_first, experts: experts.as_ref() };
        Some(event(&envelope.chunk(&delta, usage)))
    }

    fn usage(&self) -> Option<String> {
        let Answers { common, envelope, usage, .. } = &self.answers;
        common.includes_usage.then(|| event(&envelope.usage_chunk(*usage)))
    }
}

fn event(json: &Value) -> String {
    format!("data: {json}\n\n")
}
