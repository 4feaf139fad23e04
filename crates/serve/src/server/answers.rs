//! The answers of a request: its sequences are handed to the engine, and come back token by token.

use std::collections::VecDeque;
use std::pin::pin;
use std::time::Instant;

use futures_util::future::{Either, select};
use moeworks_infer::constraint::Constraint;
use moeworks_infer::generation::End;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::app::{App, Ticket, now};
use super::choice::{Choice, NewToken, Shown};
use super::driver::{Command, Event, NewAnswer, Piece, Reply};
use super::forms::NamedForm;
use super::reply::{Echo, Envelope, Kind, Usage};
use crate::api::{ApiError, ChatRequest, Common, CompletionRequest, ErrorKind};
use crate::engine::{Request, WantedLogprobs};
use crate::experts::RoutedExperts;

/// A request with all that the engine needs.
pub(crate) struct Job {
    requests: Vec<Request>,
    pub(crate) common: Common,
    pub(crate) envelope: Envelope,
    prompt_tokens: usize,
    /// Says whether the prompt alone is wanted, and the token behind it is left out.
    is_prompt_only: bool,
    /// An answer before its first token.
    empty: Choice,
}

/// The tokens of a request's prompts, and what its answers are to be.
#[derive(Default)]
struct Prompts {
    prompts: Vec<Vec<u32>>,
    max_tokens: Option<usize>,
    kind: Kind,
    /// The texts of the prompts, where they stand before the answers.
    echoed: Option<Vec<String>>,
    /// An answer before its first token.
    empty: Choice,
    /// Says whether special tokens are part of the text.
    shows_special: bool,
}

impl Job {
    /// Reads a completion. It takes a while where the text is long.
    pub(crate) fn completion(app: &App, body: &[u8], tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        let CompletionRequest { prompts, options, max_tokens, echoes, common } = CompletionRequest::parse(body)?;
        app.served.check_name(common.model.as_deref())?;
        let encode = |prompt| app.served.encode_prompt(prompt, options);
        let ids = prompts.iter().map(encode).collect::<Result<_, _>>()?;
        let echoed = echoes.then(|| prompts.iter().map(|prompt| app.served.prompt_text(prompt)).collect());
        let echoed = echoed.transpose()?;
        let prompts = Prompts {
            prompts: ids,
            max_tokens: Some(max_tokens),
            kind: Kind::Completion,
            echoed,
            ..Prompts::default()
        };
        Self::new(app, prompts, common, tenant)
    }

    /// Reads a chat completion, and carries out the template.
    pub(crate) fn chat(app: &App, body: &[u8], tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        let ChatRequest { prompt, mut common } = ChatRequest::parse(body)?;
        app.served.check_name(common.model.as_deref())?;
        let prompts = vec![app.served.encode_chat(&prompt)?];
        let kind = Kind::Chat { has_channels: app.served.model.tokenizer.has_channels() };
        let max_tokens = common.sampling.max_tokens;
        let parser = app.served.tool_parser(&prompt.tools)?;
        common.form = prompt.tools.form().or(common.form);
        let shows_special = parser.is_some() && common.form.is_none();
        let most = if prompt.tools.are_parallel { usize::MAX } else { 1 };
        let empty = parser.map_or_else(Choice::default, |parser| Choice::with_tools(parser, most));
        Self::new(app, Prompts { prompts, max_tokens, kind, echoed: None, empty, shows_special }, common, tenant)
    }

    fn new(app: &App, prompts: Prompts, common: Common, tenant: Option<blake3::Hash>) -> Result<Self, ApiError> {
        common.sampling.check_vocabulary(app.served.model.tokenizer.vocab_size())?;
        let Prompts { prompts, max_tokens, kind, echoed, empty, shows_special } = prompts;
        // A token behind the prompt is drawn in any case.
        let is_prompt_only = max_tokens == Some(0);
        let max_tokens = max_tokens.map(|most| most.max(1));
        let of_prompt = echoed.is_some();
        let logprobs = common.num_logprobs.map(|num_top| WantedLogprobs { num_top, of_prompt });
        check_experts(app, &common)?;
        let salt = salt(app, &common, tenant);
        let seed = common.sampling.seed.unwrap_or_else(|| app.new_seed());
        let constraint = constraint(app, &common, kind)?;
        let mut requests = Vec::new();
        for prompt in &prompts {
            let max_new_tokens = app.served.max_new_tokens(prompt.len(), max_tokens)?;
            check_min_tokens(common.sampling.min_tokens, max_new_tokens)?;
            for _ in 0..common.num_choices {
                let seed = seed.wrapping_add(requests.len() as u64);
                let start = Start {
                    prompt,
                    max_new_tokens,
                    seed,
                    salt: &salt,
                    logprobs,
                    shows_special,
                    constraint: constraint.clone(),
                };
                requests.push(request(app, &common, start)?);
            }
        }
        let prefix = if kind == Kind::Completion { "cmpl" } else { "chatcmpl" };
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let with_ids = |texts: Vec<String>| texts.into_iter().zip(prompts.iter().cloned());
        let echoes = echoed.map(|texts| with_ids(texts).map(|(text, ids)| Echo { text, ids }).collect());
        let envelope = Envelope {
            id: app.new_id(prefix),
            created: now(),
            model: common.model.clone().unwrap_or_else(|| app.served.name().to_owned()),
            kind,
            prompts: common.returns_token_ids.then_some(prompts),
            num_choices: common.num_choices,
            echoes,
            table: common.num_logprobs.map(|_| app.tokens()),
        };
        Ok(Self { requests, common, envelope, prompt_tokens, is_prompt_only, empty })
    }

    /// Hands the sequences to the engine, and waits until it has them.
    pub(crate) async fn begin(self, mut ticket: Ticket, since: Instant) -> Result<Answers, ApiError> {
        let Self { requests, common, envelope, prompt_tokens, is_prompt_only, empty } = self;
        let num_choices = requests.len();
        ticket.take(num_choices)?;
        let deadline = ticket.app().options.request_timeout.and_then(|time| since.checked_add(time));
        let (sender, events) = unbounded_channel();
        for (choice, request) in requests.into_iter().enumerate() {
            let reply = Reply { choice, events: sender.clone() };
            ticket.app().send(Command::Add(Box::new(NewAnswer { request, reply, since })))?;
        }
        let mut answers = Answers {
            events,
            early: VecDeque::new(),
            choices: vec![empty; num_choices],
            usage: Usage { prompt_tokens, ..Usage::default() },
            common,
            envelope,
            is_prompt_only,
            since,
            deadline,
            ticket,
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
    logprobs: Option<WantedLogprobs>,
    shows_special: bool,
    constraint: Option<Constraint>,
}

/// The beginning of the form that answers are held to.
fn constraint(app: &App, common: &Common, kind: Kind) -> Result<Option<Constraint>, ApiError> {
    let Some(request) = &common.form else { return Ok(None) };
    let form = NamedForm { field: request.field.clone(), form: app.forms.form(request)? };
    form.constraint(app.vocabulary(), kind == (Kind::Chat { has_channels: true })).map(Some)
}

/// Makes a sequence's request of the fields of a client's.
fn request(app: &App, common: &Common, start: Start<'_>) -> Result<Request, ApiError> {
    let Start { prompt, max_new_tokens, seed, salt, logprobs, shows_special, constraint } = start;
    let (served, sampling) = (&app.served, &common.sampling);
    let stop_ids = sampling.all_stop_ids(&served.model.stop_ids);
    Ok(Request {
        prompt: prompt.to_vec(),
        max_new_tokens,
        sampler: sampling.sampler(seed, &served.defaults, stop_ids.clone(), constraint)?,
        stops: sampling.settings.stop_texts(&sampling.stops, &served.defaults),
        stop_ids,
        priority: common.priority,
        shows_special,
        salt: salt.to_vec(),
        experts_from: common.routed_experts.map(|from| from.position(prompt.len())).transpose()?,
        logprobs,
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

/// Returns the salt that keeps the keys and values of those apart who are not to learn of each other: by the client's
/// own salt, and by the key where there are several.
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
    is_prompt_only: bool,
    /// The time at which the request came.
    since: Instant,
    /// The time at which it has to be answered.
    deadline: Option<Instant>,
    ticket: Ticket,
}

/// A token of one of the answers, with the text that is shown for it.
pub(crate) struct NextToken {
    pub(crate) choice: usize,
    /// None where the prompt alone is wanted.
    pub(crate) token: Option<u32>,
    pub(crate) shown: Shown,
    pub(crate) is_first: bool,
    /// The experts of tokens before it, where they are wanted.
    pub(crate) experts: Option<RoutedExperts>,
}

impl Answers {
    async fn wait_until_accepted(&mut self) -> Result<(), ApiError> {
        let mut num_missing = self.choices.len();
        while num_missing > 0 {
            match self.receive().await? {
                (_, Event::Accepted) => num_missing -= 1,
                (choice, Event::Token(piece)) => self.early.push_back((choice, piece)),
                (_, Event::Failed(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for the next event, up to the time that the request has and while the engine can go on.
    async fn receive(&mut self) -> Result<(usize, Event), ApiError> {
        let failure = self.ticket.app().options.failure.clone();
        let event = async {
            // Events that are there already come first.
            match select(pin!(self.events.recv()), pin!(failure.failed())).await {
                Either::Left((event, _)) => Ok(event),
                Either::Right((reason, _)) => Err(ApiError::new(ErrorKind::Unavailable, reason)),
            }
        };
        let event = match self.deadline {
            None => event.await,
            Some(deadline) => tokio::time::timeout_at(deadline.into(), event).await.map_err(|_| self.too_late())?,
        };
        event?.ok_or_else(|| ApiError::new(ErrorKind::Internal, "the engine has ended"))
    }

    fn too_late(&self) -> ApiError {
        let time = self.deadline.map_or_else(Default::default, |deadline| deadline.duration_since(self.since));
        let seconds = time.as_secs_f64();
        let message = format!("the answer takes longer than the {seconds} seconds that it has");
        ApiError::new(ErrorKind::Timeout, message)
    }

    /// Waits for the next token of any answer; none if all are complete.
    pub(crate) async fn next(&mut self) -> Result<Option<NextToken>, ApiError> {
        if let Some((choice, piece)) = self.early.pop_front() {
            return Ok(Some(self.take_in(choice, piece)));
        }
        if self.choices.iter().all(|choice| choice.end.is_some()) {
            self.say_end("answered");
            return Ok(None);
        }
        loop {
            match self.receive().await {
                Ok((choice, Event::Token(piece))) => return Ok(Some(self.take_in(choice, piece))),
                Ok((_, Event::Accepted)) => {}
                Ok((_, Event::Failed(error))) | Err(error) => {
                    self.say_end(&error.message);
                    return Err(error);
                }
            }
        }
    }

    /// Writes the end of a request to the log.
    fn say_end(&self, how: &str) {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = self.usage;
        let (id, seconds) = (&self.envelope.id, self.since.elapsed().as_secs_f64());
        tracing::info!(id, prompt_tokens, cached_tokens, completion_tokens, seconds, "{how}");
    }

    fn take_in(&mut self, index: usize, piece: Piece) -> NextToken {
        let Piece { token, text, end, logprobs, prompt, experts } = piece;
        let choice = &mut self.choices[index];
        let is_first = prompt.is_some();
        if let Some(prompt) = prompt {
            // Those of the first answer to each prompt count, as the prompt's tokens do.
            let counts = index.is_multiple_of(self.envelope.num_choices);
            self.usage.cached_tokens += if counts { prompt.num_cached } else { 0 };
            choice.prompt = *prompt;
        }
        if let Some(experts) = &experts {
            choice.experts.get_or_insert_default().extend(experts);
        }
        if self.is_prompt_only {
            choice.end = Some(End::Limit);
            return NextToken { choice: index, token: None, shown: Shown::default(), is_first, experts };
        }
        choice.logprobs.extend(logprobs);
        let shown = choice.push(self.envelope.kind, &NewToken { id: token, text: &text, end });
        self.usage.completion_tokens += 1;
        NextToken { choice: index, token: Some(token), shown, is_first, experts }
    }
}
