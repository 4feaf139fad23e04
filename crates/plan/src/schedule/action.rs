//! Actions of a pipeline schedule and their text form: `2F5` is the forward of microbatch 5 through stage 2.

use std::fmt;
use std::str::FromStr;

/// A kind of action.
///
/// F, B, W and BW pass a whole stage. An expanded schedule has the parts of each MoE layer instead, so that its
/// all-to-alls are actions of their own; parts carry the number of the layer within the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// F: the forward of a stage.
    Forward,
    /// B: the gradient of a stage's input.
    InputGrad,
    /// W: the gradient of a stage's weights.
    WeightGrad,
    /// BW: the whole backward of a stage, both gradients at once.
    Backward,
    /// SF: sends the output of a stage to the rank of the next stage.
    SendOutput,
    /// RF: receives the input of a stage from the rank of the stage before.
    ReceiveInput,
    /// SB: sends the gradient of a stage's input to the rank of the stage before.
    SendGrad,
    /// RB: receives the gradient of a stage's output from the rank of the next stage.
    ReceiveGrad,
    /// FA: the forward up to the dispatch: attention, router, and what comes before.
    ForwardAttention,
    /// FD: the forward all-to-all that sends tokens to experts.
    ForwardDispatch,
    /// FE: the forward of the experts.
    ForwardExperts,
    /// FC: the forward all-to-all that brings results back.
    ForwardCombine,
    /// BC: the backward of the combine: an all-to-all that sends gradients of results to experts.
    BackwardCombine,
    /// BE: the gradient of the experts' input.
    BackwardExperts,
    /// BD: the backward of the dispatch: an all-to-all that brings gradients of tokens back.
    BackwardDispatch,
    /// BA: the gradient of the input of attention.
    BackwardAttention,
    /// WE: the gradient of the experts' weights.
    WeightExperts,
    /// WA: the gradient of the weights of attention and router.
    WeightAttention,
}

/// The three chains of work on a microbatch in a stage. The actions of a chain follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chain {
    /// The forward.
    Forward,
    /// The gradient of the input.
    Backward,
    /// The gradient of the weights.
    Weight,
}

impl Kind {
    /// Every kind with its letters in the text form.
    pub const LETTERS: [(Self, &'static str); 18] = [
        (Self::Forward, "F"),
        (Self::InputGrad, "B"),
        (Self::WeightGrad, "W"),
        (Self::Backward, "BW"),
        (Self::SendOutput, "SF"),
        (Self::ReceiveInput, "RF"),
        (Self::SendGrad, "SB"),
        (Self::ReceiveGrad, "RB"),
        (Self::ForwardAttention, "FA"),
        (Self::ForwardDispatch, "FD"),
        (Self::ForwardExperts, "FE"),
        (Self::ForwardCombine, "FC"),
        (Self::BackwardCombine, "BC"),
        (Self::BackwardExperts, "BE"),
        (Self::BackwardDispatch, "BD"),
        (Self::BackwardAttention, "BA"),
        (Self::WeightExperts, "WE"),
        (Self::WeightAttention, "WA"),
    ];

    /// Returns the letters of the kind in the text form.
    #[must_use]
    pub fn letters(self) -> &'static str {
        Self::LETTERS[self as usize].1
    }

    /// Returns whether the action is a part of a MoE layer, and so carries the layer's number.
    #[must_use]
    pub fn is_part(self) -> bool {
        self >= Self::ForwardAttention
    }

    /// Returns whether the action is an all-to-all: the rank starts it and goes on.
    #[must_use]
    pub fn is_all_to_all(self) -> bool {
        matches!(self, Self::ForwardDispatch | Self::ForwardCombine | Self::BackwardCombine | Self::BackwardDispatch)
    }

    /// Returns whether the action sends to another stage or receives from one.
    #[must_use]
    pub fn is_message(self) -> bool {
        (Self::SendOutput..=Self::ReceiveGrad).contains(&self)
    }

    /// Returns whether the action keeps the rank computing.
    #[must_use]
    pub fn is_compute(self) -> bool {
        !self.is_all_to_all() && !self.is_message()
    }

    /// Returns the chain that the action belongs to. A whole backward belongs to that of the input's gradient, and to
    /// that of the weights' too.
    #[must_use]
    pub fn chain(self) -> Chain {
        match self {
            Self::Forward | Self::SendOutput | Self::ReceiveInput => Chain::Forward,
            Self::ForwardAttention | Self::ForwardDispatch | Self::ForwardExperts | Self::ForwardCombine => {
                Chain::Forward
            }
            Self::WeightGrad | Self::WeightExperts | Self::WeightAttention => Chain::Weight,
            _ => Chain::Backward,
        }
    }
}

/// One action of a rank on a microbatch in a stage.
///
/// The text form is the stage, the letters of the kind and the microbatch, and for a part of a MoE layer a dot and
/// the layer's number within the stage: `0F0`, `2BW7`, `3FD1.0`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage, counted along the model: stage 0 has the embedding. With several stages a rank it is the virtual
    /// stage.
    pub stage: u32,
    /// The microbatch.
    pub microbatch: u32,
    /// The MoE layer within the stage; 0 for an action that is no part of one.
    pub layer: u16,
    /// The kind of the action.
    pub kind: Kind,
}

impl Action {
    /// Makes an action of a whole stage.
    #[must_use]
    pub fn new(kind: Kind, stage: u32, microbatch: u32) -> Self {
        Self { stage, microbatch, layer: 0, kind }
    }

    /// Makes an action on one MoE layer of a stage.
    #[must_use]
    pub fn part(kind: Kind, stage: u32, microbatch: u32, layer: u16) -> Self {
        Self { stage, microbatch, layer, kind }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stage, microbatch, layer, kind } = *self;
        write!(f, "{stage}{}{microbatch}", kind.letters())?;
        if kind.is_part() { write!(f, ".{layer}") } else { Ok(()) }
    }
}

impl fmt::Debug for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is no action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an action: expected a stage, one of {kinds} and a microbatch, as in 0F0, or 0FD0.1 for layer 1 of a stage",
    kinds = kinds())]
pub struct ActionError {
    /// The text, cut off where it is long.
    pub text: String,
}

fn kinds() -> String {
    Kind::LETTERS.map(|(_, letters)| letters).join(" ")
}

impl FromStr for Action {
    type Err = ActionError;

    fn from_str(text: &str) -> Result<Self, ActionError> {
        parse(text).ok_or_else(|| ActionError { text: text.chars().take(40).collect() })
    }
}

fn parse(text: &str) -> Option<Action> {
    let (stage, rest) = split_number(text)?;
    let num_letters = rest.bytes().take_while(u8::is_ascii_uppercase).count();
    let (letters, rest) = rest.split_at(num_letters);
    let (kind, _) = Kind::LETTERS.into_iter().find(|(_, of)| *of == letters)?;
    let (microbatch, rest) = split_number(rest)?;
    let layer = match (kind.is_part(), rest) {
        (false, "") => 0,
        (true, rest) => match split_number(rest.strip_prefix('.')?)? {
            (layer, "") => u16::try_from(layer).ok()?,
            _ => return None,
        },
        _ => return None,
    };
    Some(Action { stage, microbatch, layer, kind })
}

/// Splits a number without sign and leading zeros off the front.
fn split_number(text: &str) -> Option<(u32, &str)> {
    let num_digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, rest) = text.split_at(num_digits);
    let is_plain = digits.len() == 1 || !digits.starts_with('0');
    if is_plain { Some((digits.parse().ok()?, rest)) } else { None }
}

/// A place in a rank's list: one action, or a forward and a backward whose layers are interleaved, so that the
/// all-to-all of one runs under the computation of the other.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// One action.
    One(Action),
    /// An overlapped pair: F first, then B or BW. It starts when both can, and both are done when it ends.
    Pair(Action, Action),
}

impl Entry {
    /// Returns the action, or the forward of the pair.
    #[must_use]
    pub fn first(&self) -> Action {
        match *self {
            Self::One(action) | Self::Pair(action, _) => action,
        }
    }

    /// Iterates over the action or the two actions.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::One(action) => (action, None),
            Self::Pair(forward, backward) => (forward, Some(backward)),
        };
        std::iter::once(first).chain(second)
    }
}

impl From<Action> for Entry {
    fn from(action: Action) -> Self {
        Self::One(action)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(action) => write!(f, "{action}"),
            Self::Pair(forward, backward) => write!(f, "{forward}&{backward}"),
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
