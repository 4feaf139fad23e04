//! The thread of the engine: takes requests, makes turns while there are some, and hands out what they give.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use moeworks_infer::generation::{End, TokenLogprobs};
use tokio::sync::mpsc::UnboundedSender;

use super::failure::FailureSignal;
use super::metrics::{Finish, Metrics};
use super::work::TurnEngine;
use crate::api::{ApiError, ErrorKind};
use crate::engine::{Output, PromptOutput, Request};
use crate::experts::RoutedExperts;
use crate::scheduler::SequenceId;

/// An order to the engine's thread.
pub(crate) enum Command {
    /// Answers a request.
    Add(Box<NewAnswer>),
    /// Ends all requests that are left, and the thread.
    Stop,
}

/// A request with the receiver of its answer.
pub(crate) struct NewAnswer {
    pub(crate) request: Request,
    pub(crate) reply: Reply,
    /// The time at which the request came.
    pub(crate) since: Instant,
}

/// The receiver of an answer. It is closed when nobody waits for it any more.
pub(crate) struct Reply {
    /// The answer's number among those of an HTTP request.
    pub(crate) choice: usize,
    pub(crate) events: UnboundedSender<(usize, Event)>,
}

/// An event of an answer.
#[derive(Debug)]
pub(crate) enum Event {
    /// The engine has the request.
    Accepted,
    /// A token came.
    Token(Piece),
    /// There will be no more.
    Failed(ApiError),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) token: u32,
    /// The text that is certain with it.
    pub(crate) text: String,
    pub(crate) end: Option<End>,
    /// The experts of tokens before it, where they are wanted.
    pub(crate) experts: Option<RoutedExperts>,
    /// Its log-probabilities, where they are wanted.
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// Facts about the prompt, with the first token.
    pub(crate) prompt: Option<Box<PromptOutput>>,
}

/// An answer under way.
struct Live {
    reply: Reply,
    since: Instant,
    /// The time of the last token.
    last: Option<Instant>,
}

impl Reply {
    /// Returns whether somebody still waits for the answer.
    fn send(&self, event: Event) -> bool {
        self.events.send((self.choice, event)).is_ok()
    }
}

/// The engine with the answers under way.
pub(crate) struct Driver<'a, E> {
    engine: E,
    inbox: Receiver<Command>,
    live: HashMap<SequenceId, Live>,
    metrics: &'a Metrics,
    failure: &'a FailureSignal,
}

impl<'a, E: TurnEngine> Driver<'a, E> {
    pub(crate) fn new(engine: E, inbox: Receiver<Command>, metrics: &'a Metrics, failure: &'a FailureSignal) -> Self {
        metrics.set_counts(engine.counts());
        Self { engine, inbox, live: HashMap::new(), metrics, failure }
    }

    /// Makes turns until it is told to stop, nobody can send requests any more, or the engine cannot go on.
    pub(crate) fn run(mut self) {
        while self.failure.reason().is_none() && self.take_commands() {
            self.drop_abandoned();
            if self.engine.has_requests() {
                self.turn();
            }
            self.metrics.set_counts(self.engine.counts());
        }
        self.fail_all(&ApiError::new(ErrorKind::Unavailable, "the server is shutting down"));
        self.metrics.set_counts(self.engine.counts());
    }

    /// Takes all orders that are there, and waits for one where there is nothing to do. Returns whether to go on.
    fn take_commands(&mut self) -> bool {
        if !self.engine.has_requests() {
            match self.inbox.recv() {
                Ok(Command::Add(new)) => self.add(*new),
                Ok(Command::Stop) | Err(_) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(Command::Add(new)) => self.add(*new),
                Ok(Command::Stop) => return false,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
            }
        }
    }

    fn add(&mut self, new: NewAnswer) {
        let NewAnswer { request, reply, since } = new;
        let num_prompt_tokens = request.prompt.len();
        match self.engine.add(request) {
            Ok(id) => {
                self.metrics.add_prompt(num_prompt_tokens);
                reply.send(Event::Accepted);
                self.live.insert(id, Live { reply, since, last: None });
            }
            Err(error) => {
                reply.send(Event::Failed(error.into()));
            }
        }
    }

    /// Cancels the requests of clients that went away.
    fn drop_abandoned(&mut self) {
        let (engine, metrics) = (&mut self.engine, self.metrics);
        self.live.retain(|&id, live| {
            let is_wanted = !live.reply.events.is_closed();
            if !is_wanted {
                engine.cancel(id);
                metrics.finish(Finish::Abort, live.since);
            }
            is_wanted
        });
    }

    fn turn(&mut self) {
        match self.engine.turn() {
            Ok(outputs) => {
                // Before the outputs, so that a client with its answer finds it counted.
                self.metrics.set_counts(self.engine.counts());
                outputs.into_iter().for_each(|output| self.hand_out(output));
            }
            Err(error) => {
                tracing::error!("a turn failed, with all its requests: {error}");
                let error = match self.engine.lost() {
                    None => error.into(),
                    Some(reason) => {
                        self.failure.fail(&reason);
                        ApiError::new(ErrorKind::Unavailable, reason)
                    }
                };
                self.fail_all(&error);
            }
        }
    }

    fn hand_out(&mut self, output: Output) {
        let Output { sequence, token, text, end, logprobs, prompt, experts, failure } = output;
        if let Some(failure) = failure {
            self.fail(sequence, failure);
            return;
        }
        let Some(live) = self.live.get_mut(&sequence) else { return };
        let now = Instant::now();
        self.metrics.add_token(live.since, live.last.replace(now), now);
        if let Some(end) = end {
            self.metrics.finish(if end == End::Limit { Finish::Length } else { Finish::Stop }, live.since);
        }
        live.reply.send(Event::Token(Piece { token, text, end, logprobs, prompt, experts }));
        if end.is_some() {
            self.live.remove(&sequence);
        }
    }

    /// Ends a request that the engine has dropped.
    fn fail(&mut self, sequence: SequenceId, failure: String) {
        tracing::error!("a request failed: {failure}");
        if let Some(live) = self.live.remove(&sequence) {
            self.metrics.finish(Finish::Error, live.since);
            live.reply.send(Event::Failed(ApiError::new(ErrorKind::Internal, failure)));
        }
    }

    /// Ends all requests with an error.
    fn fail_all(&mut self, error: &ApiError) {
        for (id, live) in self.live.drain() {
            self.engine.cancel(id);
            self.metrics.finish(Finish::Error, live.since);
            live.reply.send(Event::Failed(error.clone()));
        }
    }
}
