//! An engine that answers with the alphabet, but decides its turns as the real one does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moeworks_infer::generation::{End, StopTexts};
use moeworks_serve::server::TurnEngine;
use moeworks_serve::{Counts, EngineError, Limits, NewSequence, Output, Request, Scheduler, SequenceId};

/// A prompt with this byte makes a turn fail.
pub(crate) const FAILS: char = '!';
/// A prompt with this byte makes the engine panic.
pub(crate) const PANICS: char = '?';

struct Answering {
    request: Request,
    stops: StopTexts,
    num_drawn: usize,
}

pub(crate) struct FakeEngine {
    scheduler: Scheduler,
    answers: HashMap<SequenceId, Answering>,
    /// The time of a turn.
    delay: Duration,
    /// The counts of the last turn, for tests.
    counts: Arc<Mutex<Counts>>,
}

impl FakeEngine {
    pub(crate) fn new(limits: Limits, delay: Duration) -> (Self, Arc<Mutex<Counts>>) {
        let scheduler = Scheduler::new(limits).unwrap();
        let counts = Arc::new(Mutex::new(scheduler.counts()));
        (Self { scheduler, answers: HashMap::new(), delay, counts: Arc::clone(&counts) }, counts)
    }

    fn has_prompt_with(&self, c: char) -> bool {
        self.answers.values().any(|answer| answer.request.prompt.contains(&(c as u32)))
    }

    fn draw(&mut self, id: SequenceId) -> Option<Output> {
        let answer = self.answers.get_mut(&id)?;
        let letter = char::from(b'a' + (answer.num_drawn % 26) as u8);
        answer.num_drawn += 1;
        if answer.request.stop_ids.contains(&(letter as u32)) {
            let (text, end) = (answer.stops.finish(), Some(End::StopToken));
            return Some(Output { sequence: id, token: letter as u32, text, end, experts: None });
        }
        let mut text = answer.stops.push(&letter.to_string());
        let is_last = answer.num_drawn == answer.request.max_new_tokens;
        let end = answer.stops.is_found().then_some(End::StopText).or(is_last.then_some(End::Limit));
        if end.is_some() {
            text += &answer.stops.finish();
        }
        Some(Output { sequence: id, token: letter as u32, text, end, experts: None })
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
            uses_prefix_cache: true,
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
        if self.has_prompt_with(FAILS) {
            return Err(EngineError::Model(moeworks_infer::InferError::NotANumber { tensor: None }));
        }
        let turn = self.scheduler.next_turn();
        let drawing = turn.parts.iter().filter(|part| part.draws).map(|part| part.sequence).collect::<Vec<_>>();
        let outputs: Vec<Output> = drawing.into_iter().filter_map(|id| self.draw(id)).collect();
        let drawn: Vec<_> = outputs.iter().map(|output| (output.sequence, output.token)).collect();
        self.scheduler.complete(&turn, &drawn);
        for output in outputs.iter().filter(|output| output.end.is_some()) {
            self.cancel(output.sequence);
        }
        self.scheduler.check().unwrap();
        self.counts();
        Ok(outputs)
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
