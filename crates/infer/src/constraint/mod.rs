//! Answers that are held to a form: a schema of JSON, a regular expression, a grammar, or one of some texts.
//!
//! A [`Form`] is read once and may be used by many answers, a [`Constraint`] is the place of one answer in it. Before
//! each token the constraint finds the tokens of the [`Vocabulary`] that may come next, by their bytes, so that a
//! character may be spread over several tokens. Every form has bounds on its size, and finding tokens has a bound on
//! its work: what is too large is an error.
//!
//! The forms are networks of automata that may call each other, as grammars need it, made into one automaton step by
//! step, as the lazy automata of regular expressions are; masks are kept by state (Willard and Louf, "Efficient
//! Guided Generation for Large Language Models", 2307.09702, for the masks; Dong et al., "XGrammar", 2411.15100, for
//! stacks of states).

mod automaton;
mod gbnf;
mod grammar;
mod nfa;
mod regex;
mod schema;
mod strings;
mod vocabulary;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use self::automaton::{Automaton, Place};
use self::grammar::{Grammar, RuleId};
use self::nfa::Network;
use crate::json::Json;

pub use self::vocabulary::Vocabulary;

/// Texts to choose one from, at most.
pub const MAX_CHOICES: usize = 1024;
/// Bytes of a schema at most.
const MAX_SCHEMA_BYTES: usize = 256 << 10;

/// A form that cannot be read, or that an answer cannot be held to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The schema is wrong, or has a keyword that is not supported.
    #[error("the schema at {place}: {reason}")]
    Schema {
        /// The place in the schema, such as `#/properties/name`.
        place: String,
        /// The fault.
        reason: String,
    },
    /// The schema is not JSON.
    #[error("the schema is not JSON: {0}")]
    NoJson(String),
    /// The regular expression is wrong, or has something that is not supported.
    #[error("the regular expression: {0}")]
    Regex(String),
    /// The grammar is wrong.
    #[error("the grammar, line {line}: {reason}")]
    Grammar {
        /// The line.
        line: usize,
        /// The fault.
        reason: String,
    },
    /// The form is too large.
    #[error("the form of the answer is too large")]
    TooLarge,
    /// No text of finite length has the form.
    #[error("no answer has this form: a part of it can never end")]
    Endless,
    /// A rule begins with itself.
    #[error("a rule of the form begins with itself")]
    LeftRecursive,
    /// A list of texts is empty, or too long.
    #[error("the texts to choose from: must be 1 to {MAX_CHOICES}, none empty")]
    Choices,
    /// Finding the next tokens takes too long.
    #[error("the form of the answer is too complex: finding its next tokens takes too long")]
    TooComplex,
    /// No token of the vocabulary goes on.
    #[error("no token of the vocabulary continues the form of the answer")]
    NoToken,
}

/// A grammar with the rule of its texts.
struct Rules {
    grammar: Grammar,
    root: RuleId,
}

/// A form that answers are held to.
#[derive(Clone)]
pub struct Form(Arc<Mutex<Automaton>>);

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Form")
    }
}

impl Form {
    fn new(rules: Rules) -> Result<Self, ConstraintError> {
        Ok(Self(Arc::new(Mutex::new(Automaton::new(Network::new(&rules.grammar, rules.root)?)))))
    }

    /// Any object of JSON.
    ///
    /// # Errors
    /// Never; as the others.
    pub fn json_object() -> Result<Self, ConstraintError> {
        Self::new(schema::any_object())
    }

    /// The values of a schema of JSON.
    ///
    /// # Errors
    /// If the schema is wrong, too large, or has a keyword that is not supported.
    pub fn json_schema(schema: &Json) -> Result<Self, ConstraintError> {
        if schema.to_string().len() > MAX_SCHEMA_BYTES {
            return Err(ConstraintError::TooLarge);
        }
        Self::new(schema::grammar(schema)?)
    }

    /// The values of a schema of JSON as text.
    ///
    /// # Errors
    /// As [`Form::json_schema`], and if the text is not JSON.
    pub fn json_schema_text(text: &str) -> Result<Self, ConstraintError> {
        Self::json_schema(&Json::parse(text).map_err(|error| ConstraintError::NoJson(error.to_string()))?)
    }

    /// The texts that a regular expression matches as a whole.
    ///
    /// # Errors
    /// If the expression is wrong, too large, or looks around or back.
    pub fn regex(pattern: &str) -> Result<Self, ConstraintError> {
        let mut grammar = Grammar::default();
        let node = regex::whole(&mut grammar, pattern)?;
        Self::with_root(grammar, node)
    }

    /// The texts of the rule `root` of a grammar in llama.cpp's notation (GBNF).
    ///
    /// # Errors
    /// If the grammar is wrong or too large, or a rule begins with itself.
    pub fn grammar(text: &str) -> Result<Self, ConstraintError> {
        Self::new(gbnf::grammar(text)?)
    }

    /// One of some texts.
    ///
    /// # Errors
    /// If there is none, there are too many, or one is empty.
    pub fn choice(texts: &[String]) -> Result<Self, ConstraintError> {
        if texts.is_empty() || texts.len() > MAX_CHOICES || texts.iter().any(String::is_empty) {
            return Err(ConstraintError::Choices);
        }
        let mut grammar = Grammar::default();
        let nodes = texts.iter().map(|text| grammar.literal(text)).collect();
        let node = grammar.alternatives(nodes);
        Self::with_root(grammar, node)
    }

    fn with_root(mut grammar: Grammar, node: grammar::NodeId) -> Result<Self, ConstraintError> {
        let root = grammar.new_rule();
        grammar.set_rule(root, node);
        Self::new(Rules { grammar, root })
    }

    /// Says whether a text has the form.
    ///
    /// # Errors
    /// If finding out takes too long.
    pub fn matches(&self, text: &str) -> Result<bool, ConstraintError> {
        let mut automaton = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut start = automaton.start()?;
        Ok(automaton.advance(&mut start, text.as_bytes())?.is_some_and(|place| place.is_accepting()))
    }
}

/// The place of an answer in its form.
#[derive(Clone, Debug)]
pub struct Constraint {
    form: Form,
    vocabulary: Arc<Vocabulary>,
    place: Place,
}

impl Constraint {
    /// The beginning of an answer.
    ///
    /// # Errors
    /// If the form is too complex.
    pub fn new(form: Form, vocabulary: Arc<Vocabulary>) -> Result<Self, ConstraintError> {
        let place = form.0.lock().unwrap_or_else(PoisonError::into_inner).start()?;
        Ok(Self { form, vocabulary, place })
    }

    /// Makes the logits of all tokens that cannot come next impossible. `end_ids` may come where the answer may end.
    ///
    /// # Errors
    /// If no token can come, or finding out takes too long.
    pub fn apply(&mut self, logits: &mut [f32], end_ids: &[u32]) -> Result<(), ConstraintError> {
        let mut automaton = self.form.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mask = automaton.mask(&mut self.place, &self.vocabulary)?;
        drop(automaton);
        let ends = if self.place.is_accepting() { end_ids } else { &[] };
        if mask.is_empty() && ends.is_empty() {
            return Err(ConstraintError::NoToken);
        }
        let kept: Vec<(u32, f32)> = ends.iter().filter_map(|&id| Some((id, *logits.get(id as usize)?))).collect();
        for (_, logit) in logits.iter_mut().enumerate().filter(|(id, _)| !mask.contains(*id)) {
            // It is not the form's to hide a result that is no number.
            *logit = if logit.is_nan() { f32::NAN } else { f32::NEG_INFINITY };
        }
        kept.into_iter().for_each(|(id, logit)| logits[id as usize] = logit);
        Ok(())
    }

    /// Takes in the token that came.
    ///
    /// # Errors
    /// If it could not come, or finding out takes too long.
    pub fn push(&mut self, id: u32) -> Result<(), ConstraintError> {
        if self.vocabulary.is_special(id) {
            return Ok(());
        }
        let mut automaton = self.form.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.vocabulary.token_bytes(id);
        match automaton.advance(&mut self.place, bytes)? {
            Some(place) => self.place = place,
            None if self.place.is_accepting() => {}
            None => return Err(ConstraintError::NoToken),
        }
        Ok(())
    }

    /// Returns whether the answer can do nothing but end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.place.is_complete()
    }
}
