//! The answers of a request: its sequences are handed to the engine, and come back token by token.

use std::collections::VecDeque;
use std::time::Instant;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::app::{App, Ticket, now};
use super::driver::{Command, Event, NewAnswer, Piece, Reply};
use super::reply::{Choice, Envelope, Kind, Usage};
use crate::api::{ApiError, ChatRequest, Common, CompletionRequest, ErrorKind};
use crate::engine::Request;
use crate::experts::RoutedExperts;

/// A request with all that the engine needs.
pub(crate) struct Job {
    requests: Vec<Request>,
    pub(crate) common: Common,
    pub(crate) envelope: Envelope,
    prompt_tokens: usize,
}

/// The tokens of a request's prompts, and the limit on its answers.
struct Prompts {
    prompts: Vec<Vec<u32>>,
    max_tokens: Option<usize>,
    kind: Kind,
}

impl Job {
    /// Reads a completion. It takes a while where the text is long.
    pub(crate) fn completion(app: &App, body: &[u8], tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        let CompletionRequest { prompts, options, max_tokens, common } = CompletionRequest::parse(body)?;
        app.served.check_name(common.model.as_deref())?;
        let encode = |prompt| app.served.encode_prompt(prompt, options);
        let prompts = prompts.iter().map(encode).collect::<Result<_, _>>()?;
        Self::new(app, Prompts { prompts, max_tokens: Some(max_tokens), kind: Kind::Completion }, common, tenant)
    }

    /// Reads a chat completion, and carries out the template.
    pub(crate) fn chat(app: &App, body: &[u8], tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        let ChatRequest { prompt, common } = ChatRequest::parse(body)?;
        app.served.check_name(common.model.as_deref())?;
        let prompts = vec![app.served.encode_chat(&prompt)?];
        let kind = Kind::Chat { has_channels: app.served.model.tokenizer.has_channels() };
        Self::new(app, Prompts { prompts, max_tokens: common.sampling.max_tokens, kind }, common, tenant)
    }

    fn new(app: &App, prompts: Prompts, common: Common, tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        common.sampling.check_vocabulary(app.served.model.tokenizer.vocab_size())?;
        let Prompts { prompts, max_tokens, kind } = prompts;
        check_experts(app, &common)?;
        let salt = salt(app, &common, tenant);
        let seed = common.sampling.seed.unwrap_or_else(|| app.new_seed());
        let mut requests = Vec::new();
        for prompt in &prompts {
            let max_new_tokens = app.served.max_new_tokens(prompt.len(), max_tokens)?;
            check_min_tokens(common.sampling.min_tokens, max_new_tokens)?;
            for _ in 0..common.num_choices {
                let seed = seed.wrapping_add(requests.len() as u64);
                requests.push(request(app, &common, Start { prompt, max_new_tokens, seed, salt: &salt })?);
            }
        }
        let prefix = if kind == Kind::Completion { "cmpl" } else { "chatcmpl" };
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let envelope = Envelope {
            id: app.new_id(prefix),
            created: now(),
            model: common.model.clone().unwrap_or_else(|| app.served.name().to_owned()),
            kind,
            prompts: common.returns_token_ids.then_some(prompts),
            num_choices: common.num_choices,
        };
        Ok(Self { requests, common, envelope, prompt_tokens })
    }

    /// Hands the sequences to the engine, and waits until it has them.
    pub(crate) async fn begin(self, mut ticket: Ticket, since: Instant) -> Result<Answers, ApiError> {
        let Self { requests, common, envelope, prompt_tokens } = self;
        let num_choices = requests.len();
        ticket.take(num_choices)?;
        let (sender, events) = unbounded_channel();
        for (choice, request) in requests.into_iter().enumerate() {
            let reply = Reply { choice, events: sender.clone() };
            ticket.app().send(Command::Add(Box::new(NewAnswer { request, reply, since })))?;
        }
        let mut answers = Answers {
            events,
            early: VecDeque::new(),
            choices: vec![Choice::default(); num_choices],
            usage: Usage { prompt_tokens, completion_tokens: 0 },
            common,
            envelope,
            _ticket: ticket,
        };
        answers.wait_until_accepted().await?;
        Ok(answers)
    }
}

/// The beginning of a sequence.
struct Start<'a> {
    prompt: &'a [u32],
    max_new_tokens: usize,
    seed: u64,
    salt: &'a [u8],
}

/// Makes a sequence's request of the fields of a client's.
fn request(app: &App, common: &Common, start: Start<'_>) -> Result<Request, ApiError> {
    let Start { prompt, max_new_tokens, seed, salt } = start;
    let (served, sampling) = (&app.served, &common.sampling);
    let stop_ids = sampling.all_stop_ids(&served.model.stop_ids);
    Ok(Request {
        prompt: prompt.to_vec(),
        max_new_tokens,
        sampler: sampling.sampler(seed, &served.defaults, stop_ids.clone())?,
        stops: sampling.settings.stop_texts(&sampling.stops, &served.defaults),
        stop_ids,
        priority: common.priority,
        salt: salt.to_vec(),
        experts_from: common.routed_experts.map(|from| from.position(prompt.len())).transpose()?,
    })
}

/// Checks that the model has experts, if they are wanted.
fn check_experts(app: &App, common: &Common) -> Result<(), ApiError> {
    if common.routed_experts.is_some() && app.metrics.experts().is_none() {
        let message = "return_routed_experts: the model has no experts";
        return Err(ApiError::new(ErrorKind::Unsupported, message).of("return_routed_experts"));
    }
    Ok(())
}

fn check_min_tokens(least: usize, most: usize) -> Result<(), ApiError> {
    if least <= most {
        return Ok(());
    }
    let message = format!("min_tokens = {least}: must be at most the {most} tokens that the answer may have");
    Err(ApiError::new(ErrorKind::Invalid, message).of("min_tokens"))
}

/// Returns the salt that keeps the keys and values of those apart who are not to learn of each other: by the client's own salt, and by the
/// key where there are several.
fn salt(app: &App, common: &Common, tenant: Option<blake3::Hash>) -> Vec<u8> {
    let tenant = tenant.filter(|_| app.options.keys.are_many());
    let mut salt = tenant.map_or_else(Vec::new, |hash| hash.as_bytes().to_vec());
    salt.extend(common.cache_salt.as_deref().unwrap_or_default().bytes());
    if !common.uses_prefix_cache {
        salt.extend(app.new_id("alone").bytes());
    }
    salt
}

/// Answers under way. Those that are not complete are cancelled when it is dropped.
pub(crate) struct Answers {
    events: UnboundedReceiver<(usize, Event)>,
    /// Tokens that came before all sequences were accepted.
    early: VecDeque<(usize, Piece)>,
    pub(crate) choices: Vec<Choice>,
    pub(crate) usage: Usage,
    pub(crate) common: Common,
    pub(crate) envelope: Envelope,
    _ticket: Ticket,
}

/// A token of one of the answers, with the text that is shown for it.
pub(crate) struct NextToken {
    pub(crate) choice: usize,
    pub(crate) token: u32,
    pub(crate) text: String,
    pub(crate) is_first: bool,
    /// The experts of tokens before it, where they are wanted.
    pub(crate) experts: Option<RoutedExperts>,
}

impl Answers {
    async fn wait_until_accepted(&mut self) -> Result<(), ApiError> {
        let mut num_missing = self.choices.len();
        while num_missing > 0 {
            match self.events.recv().await {
                Some((_, Event::Accepted)) => num_missing -= 1,
                Some((choice, Event::Token(piece))) => self.early.push_back((choice, piece)),
                Some((_, Event::Failed(error))) => return Err(error),
                None => return Err(engine_gone()),
            }
        }
        Ok(())
    }

    /// Waits for the next token of any answer; none if all are complete.
    pub(crate) async fn next(&mut self) -> Result<Option<NextToken>, ApiError> {
        if let Some((choice, piece)) = self.early.pop_front() {
            return Ok(Some(self.take_in(choice, piece)));
        }
        if self.choices.iter().all(|choice| choice.end.is_some()) {
            return Ok(None);
        }
        loop {
            match self.events.recv().await {
                Some((choice, Event::Token(piece))) => return Ok(Some(self.take_in(choice, piece))),
                Some((_, Event::Accepted)) => {}
                Some((_, Event::Failed(error))) => return Err(error),
                None => return Err(engine_gone()),
            }
        }
    }

    fn take_in(&mut self, index: usize, piece: Piece) -> NextToken {
        let Piece { token, text, end, experts } = piece;
        let choice = &mut self.choices[index];
        let is_first = choice.tokens.is_empty();
        let text = choice.push(self.envelope.kind, token, &text);
        choice.end = end;
        if let Some(experts) = &experts {
            choice.experts.get_or_insert_default().extend(experts);
        }
        self.usage.completion_tokens += 1;
        NextToken { choice: index, token, text, is_first, experts }
    }
}

fn engine_gone() -> ApiError {
    ApiError::new(ErrorKind::Internal, "the engine has ended")
}
