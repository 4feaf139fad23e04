//! An engine that answers with the alphabet, or with the tokens that come nearest to it where an answer has a form or
//! biases, but decides its turns as the real one does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moeworks_infer::generation::{End, StopTexts, TokenLogprob, TokenLogprobs};
use moeworks_ops::Context;
use moeworks_serve::server::TurnEngine;
use moeworks_serve::{Counts, EngineError, Limits, NewSequence, Output, PromptOutput, Request, Scheduler, SequenceId};
use moeworks_tensor::Tensor;

/// Tokens of the vocabulary: the bytes, and the end of a text.
const VOCAB_SIZE: usize = 257;
/// A prompt with this byte makes a turn fail.
pub(crate) const FAILS: char = '!';
/// A prompt with this byte makes its own request fail at the third token.
pub(crate) const SPOILS: char = '~';
/// A prompt with this byte makes a turn fail as where a rank was lost: the engine cannot go on.
pub(crate) const LOSES: char = '^';
/// A prompt with this byte makes the engine panic.
pub(crate) const PANICS: char = '?';

/// Log-probabilities that tell the token: a token's is its negative id, and the likeliest ones are `x`, `y` and so
/// on.
fn logprobs(id: u32, num_top: usize) -> TokenLogprobs {
    let one = |id: u32| TokenLogprob { id, logprob: -(id as f32) };
    TokenLogprobs { token: one(id), top: (u32::from(b'x')..).take(num_top).map(one).collect() }
}

struct Answering {
    request: Request,
    stops: StopTexts,
    num_drawn: usize,
}

pub(crate) struct FakeEngine {
    scheduler: Scheduler,
    answers: HashMap<SequenceId, Answering>,
    ctx: Context,
    /// The time of a turn.
    delay: Duration,
    /// The counts of the last turn, for tests.
    counts: Arc<Mutex<Counts>>,
    is_lost: bool,
}

impl FakeEngine {
    pub(crate) fn new(limits: Limits, delay: Duration) -> (Self, Arc<Mutex<Counts>>) {
        let scheduler = Scheduler::new(limits).unwrap();
        let counts = Arc::new(Mutex::new(scheduler.counts()));
        (
            Self {
                scheduler,
                answers: HashMap::new(),
                ctx: Context::cpu(1),
                delay,
                counts: Arc::clone(&counts),
                is_lost: false,
            },
            counts,
        )
    }

    fn has_prompt_with(&self, c: char) -> bool {
        self.answers.values().any(|answer| answer.request.prompt.contains(&(c as u32)))
    }

    fn draw(&mut self, id: SequenceId) -> Option<Output> {
        let num_cached = self.scheduler.num_cached(id);
        let answer = self.answers.get_mut(&id)?;
        let mut letter = char::from(b'a' + (answer.num_drawn % 26) as u8);
        answer.num_drawn += 1;
        if answer.request.sampler.counts_tokens() {
            let mut logits = [0.0; VOCAB_SIZE];
            logits[letter as usize] = 50.0;
            b"\t\n ".iter().for_each(|&blank| logits[usize::from(blank)] = -50.0);
            let logits = Tensor::from_slice(self.ctx.pool(), &[1, VOCAB_SIZE], &logits);
            let drawn = answer.request.sampler.sample(&self.ctx, &logits).id;
            if let Some(failure) = answer.request.sampler.failure() {
                return Some(Output { failure: Some(failure.to_string()), ..Output::empty(id) });
            }
            letter = char::from_u32(drawn).unwrap();
        }
        let wanted = answer.request.logprobs;
        let with_logprobs = |output: Output| {
            let prompt = &answer.request.prompt;
            let of_prompt = wanted.filter(|wanted| wanted.of_prompt).map(|wanted| (&prompt[1..], wanted.num_top));
            let of_prompt = of_prompt.into_iter().flat_map(|(ids, num)| ids.iter().map(move |&id| logprobs(id, num)));
            let prompt = PromptOutput { num_cached, logprobs: of_prompt.collect() };
            let is_first = answer.num_drawn == 1;
            let logprobs = wanted.map(|wanted| logprobs(output.token, wanted.num_top));
            Output { logprobs, prompt: is_first.then(|| Box::new(prompt)), ..output }
        };
        if letter == 'c' && answer.request.prompt.contains(&(SPOILS as u32)) {
            return Some(Output { failure: Some("a result is not a number".into()), ..Output::empty(id) });
        }
        if answer.request.stop_ids.contains(&(letter as u32)) {
            let (text, end) = (answer.stops.finish(), Some(End::StopToken));
            return Some(with_logprobs(Output { token: letter as u32, text, end, ..Output::empty(id) }));
        }
        let mut text = answer.stops.push(&letter.to_string());
        let is_last = answer.num_drawn == answer.request.max_new_tokens;
        let is_complete = answer.request.sampler.is_complete();
        let end = answer.stops.is_found().then_some(End::StopText).or(is_complete.then_some(End::StopToken));
        let end = end.or(is_last.then_some(End::Limit));
        if end.is_some() {
            text += &answer.stops.finish();
        }
        Some(with_logprobs(Output { token: letter as u32, text, end, ..Output::empty(id) }))
    }
}

impl TurnEngine for FakeEngine {
    fn add(&mut self, request: Request) -> Result<SequenceId, EngineError> {
        let new = NewSequence {
            prompt: request.prompt.clone(),
            max_new_tokens: request.max_new_tokens,
            priority: request.priority,
            salt: request.salt.clone(),
            adapter: None,
            uses_prefix_cache: request.logprobs.is_none_or(|wanted| !wanted.of_prompt),
        };
        let id = self.scheduler.add(new)?;
        let stops = StopTexts::new(&request.stops);
        self.answers.insert(id, Answering { request, stops, num_drawn: 0 });
        Ok(id)
    }

    fn cancel(&mut self, id: SequenceId) -> bool {
        self.answers.remove(&id);
        self.scheduler.remove(id)
    }

    fn turn(&mut self) -> Result<Vec<Output>, EngineError> {
        std::thread::sleep(self.delay);
        assert!(!self.has_prompt_with(PANICS), "the engine was asked to panic");
        self.is_lost |= self.has_prompt_with(LOSES);
        if self.has_prompt_with(FAILS) || self.is_lost {
            return Err(EngineError::Model(moeworks_infer::InferError::NotANumber { tensor: None }));
        }
        let turn = self.scheduler.next_turn();
        let drawing = turn.parts.iter().filter(|part| part.draws).map(|part| part.sequence).collect::<Vec<_>>();
        let outputs: Vec<Output> = drawing.into_iter().filter_map(|id| self.draw(id)).collect();
        let drawn: Vec<_> = outputs.iter().map(|output| (output.sequence, output.token)).collect();
        self.scheduler.complete(&turn, &drawn);
        for output in outputs.iter().filter(|output| output.is_last()) {
            self.cancel(output.sequence);
        }
        self.scheduler.check().unwrap();
        self.counts();
        Ok(outputs)
    }

    fn lost(&self) -> Option<String> {
        self.is_lost.then(|| "rank 1 died: killed".to_owned())
    }

    fn has_requests(&self) -> bool {
        self.scheduler.has_sequences()
    }

    fn counts(&self) -> Counts {
        let counts = self.scheduler.counts();
        *self.counts.lock().unwrap() = counts;
        counts
    }
}
