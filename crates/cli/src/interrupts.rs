//! Signals that a command handles; the process that watches for them passes them on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moeworks_serve::server::StopSignal;
use moeworks_train::Requests;
use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGUSR1};

use crate::failure::Failure;

/// The exit code of a command that Ctrl-C ended, for use where the signal itself is not known.
const EXIT_INTERRUPTED: u8 = 130;

/// The reaction of a command to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// The command stops its current work, and continues or returns by itself.
    Handled,
    /// The command does not handle the signal. The process should end, as for any command.
    End,
}

/// The signals of a call. The process that watches for signals passes them to [`Interrupts::receive`]. Clones share
/// their state.
#[derive(Clone, Debug, Default)]
pub struct Interrupts(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    receiver: Receiver,
    /// The signal that stopped a run.
    signal: Option<i32>,
}

/// The part of a command that handles signals.
#[derive(Clone, Debug, Default)]
enum Receiver {
    #[default]
    Nobody,
    /// A run, which finishes its step and stops.
    Run(Requests),
    /// A chat, which ends its answer.
    Chat(ChatSignals),
    /// A server, which shuts down.
    Server(StopSignal),
}

/// The signals of a chat.
#[derive(Clone, Debug)]
pub(crate) struct ChatSignals {
    /// Set by Ctrl-C.
    pub(crate) is_asked: Arc<AtomicBool>,
    /// True while an answer is generated.
    is_answering: Arc<AtomicBool>,
    /// True if the line editor reads Ctrl-C as a key.
    reads_interrupts: bool,
}

impl ChatSignals {
    pub(crate) fn new(reads_interrupts: bool) -> Self {
        Self { is_asked: Arc::default(), is_answering: Arc::default(), reads_interrupts }
    }

    /// Sets whether an answer is being generated.
    pub(crate) fn set_answering(&self, is_answering: bool) {
        self.is_asked.store(false, Ordering::Relaxed);
        self.is_answering.store(is_answering, Ordering::Relaxed);
    }

    /// Ends the current answer. Between answers Ctrl-C ends the process, unless the line editor reads it as a key.
    fn receive(&self, signal: i32) -> Reaction {
        if signal != SIGINT || !(self.reads_interrupts || self.is_answering.load(Ordering::Relaxed)) {
            return Reaction::End;
        }
        self.is_asked.store(true, Ordering::Relaxed);
        Reaction::Handled
    }
}

impl Interrupts {
    /// Handles a signal given by its number (SIGINT, SIGTERM or SIGHUP), on behalf of the process that watches for
    /// it.
    #[must_use]
    pub fn receive(&self, signal: i32) -> Reaction {
        let mut state = self.state();
        match &state.receiver {
            Receiver::Run(requests) if state.signal.is_none() && requests.ask_to_stop() => {
                state.signal = Some(signal);
                Reaction::Handled
            }
            Receiver::Chat(chat) => chat.receive(signal),
            Receiver::Server(stop) if stop.stop() => Reaction::Handled,
            _ => Reaction::End,
        }
    }

    /// Returns the exit code of a run that a signal stopped.
    pub(crate) fn exit_code(&self) -> u8 {
        self.state().signal.and_then(|signal| u8::try_from(128 + signal).ok()).unwrap_or(EXIT_INTERRUPTED)
    }

    /// Directs signals to a run until the result is dropped.
    pub(crate) fn give_to_run(&self, requests: &Requests) -> Receiving<'_> {
        self.give_to(Receiver::Run(requests.clone()))
    }

    /// Directs signals to a chat until the result is dropped.
    pub(crate) fn give_to_chat(&self, chat: &ChatSignals) -> Receiving<'_> {
        self.give_to(Receiver::Chat(chat.clone()))
    }

    /// Directs signals to a server until the result is dropped: the first one starts its shutdown.
    pub(crate) fn give_to_server(&self, stop: &StopSignal) -> Receiving<'_> {
        self.give_to(Receiver::Server(stop.clone()))
    }

    fn give_to(&self, receiver: Receiver) -> Receiving<'_> {
        *self.state() = State { receiver, signal: None };
        Receiving { interrupts: self, save: None }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command's claim to signals. Dropping it releases them, so that the next call starts without any.
pub(crate) struct Receiving<'a> {
    interrupts: &'a Interrupts,
    save: Option<SigId>,
}

impl Receiving<'_> {
    /// Makes SIGUSR1 request a checkpoint; the handler only sets a flag.
    pub(crate) fn saving_on_usr1(mut self, requests: &Requests) -> Result<Self, Failure> {
        let id = signal_hook::flag::register(SIGUSR1, Arc::clone(&requests.save))
            .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
        self.save = Some(id);
        Ok(self)
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        self.interrupts.state().receiver = Receiver::Nobody;
        if let Some(id) = self.save.take() {
            signal_hook::low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_belongs_to_the_chat_while_it_answers_and_to_the_process_otherwise() {
        let interrupts = Interrupts::default();
        assert_eq!(interrupts.receive(SIGINT), Reaction::End);
        let chat = ChatSignals::new(false);
        let held = interrupts.give_to_chat(&chat);
        assert_eq!(interrupts.receive(SIGINT), Reaction::End);
        chat.set_answering(true);
        assert_eq!(interrupts.receive(SIGINT), Reaction::Handled);
        assert!(chat.is_asked.load(Ordering::Relaxed));
        assert_eq!(interrupts.receive(signal_hook::consts::SIGTERM), Reaction::End);
        drop(held);
        assert_eq!(interrupts.receive(SIGINT), Reaction::End);
    }

    #[test]
    fn the_first_signal_tells_a_server_to_end_and_the_second_ends_the_process() {
        let (interrupts, stop) = (Interrupts::default(), StopSignal::default());
        let held = interrupts.give_to_server(&stop);
        assert_eq!(interrupts.receive(signal_hook::consts::SIGTERM), Reaction::Handled);
        assert!(stop.is_stopped());
        assert_eq!(interrupts.receive(SIGINT), Reaction::End);
        drop(held);
        assert_eq!(interrupts.receive(SIGINT), Reaction::End);
    }
}
