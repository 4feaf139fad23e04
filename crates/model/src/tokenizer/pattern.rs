//! Regular expressions that divide text, matched as in Oniguruma, the engine of Hugging Face's Python package.
//!
//! The `tokenizers` library would use an engine that silently gives up on long runs of blanks. Here expressions are
//! matched in linear time where their syntax allows it, and otherwise by backtracking that reports when it gives up.

use std::fmt;

use fancy_regex::RegexBuilder;
use regex_automata::meta;
use regex_automata::{Anchored, Input, Span};

use super::oniguruma::{forbids_stepping_back, translate};

/// The end of most expressions: a run of blanks, without the last blank if text follows.
const BLANKS: &str = r"|\s+(?!\S)|\s+";

/// The number of backtracking steps after which a match fails.
const MAX_STEPS_BACK: usize = 100_000_000;

/// A compiled regular expression.
pub(super) struct Pattern {
    source: String,
    engine: Engine,
}

enum Engine {
    Linear(meta::Regex),
    /// The expression before [`BLANKS`], and a run of blanks as the second pattern.
    WithBlanks(meta::Regex),
    Backtracking(fancy_regex::Regex),
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pattern").field(&self.source).finish()
    }
}

impl Pattern {
    /// Compiles an expression in Oniguruma's syntax.
    pub(super) fn new(source: &str) -> Result<Self, String> {
        let translated = translate(source)?;
        let engine = match Self::linear(&translated) {
            Some(engine) => engine,
            None => Self::backtracking(&translated).map_err(|error| format!("the expression {source:?}: {error}"))?,
        };
        Ok(Self { source: source.to_owned(), engine })
    }

    fn linear(translated: &str) -> Option<Engine> {
        if forbids_stepping_back(translated) {
            return None;
        }
        let with_blanks = |head| meta::Regex::new_many(&[head, r"\s+"]).ok().map(Engine::WithBlanks);
        let with_blanks = translated.strip_suffix(BLANKS).and_then(with_blanks);
        with_blanks.or_else(|| meta::Regex::new(translated).ok().map(Engine::Linear))
    }

    fn backtracking(translated: &str) -> Result<Engine, fancy_regex::Error> {
        RegexBuilder::new(translated).backtrack_limit(MAX_STEPS_BACK).build().map(Engine::Backtracking)
    }

    /// Returns the first match at or after `at`.
    fn find(&self, text: &str, at: usize) -> Result<Option<Span>, String> {
        // Most matches begin where the last one ended, and an anchored search takes half the time.
        let linear = |regex: &meta::Regex| {
            let input = Input::new(text).range(at..);
            regex.search(&input.clone().anchored(Anchored::Yes)).or_else(|| regex.search(&input))
        };
        Ok(match &self.engine {
            Engine::Linear(regex) => linear(regex).map(|found| found.span()),
            Engine::WithBlanks(regex) => linear(regex).map(|found| {
                let span = found.span();
                if found.pattern().as_usize() == 0 { span } else { without_last_blank(text, span) }
            }),
            Engine::Backtracking(regex) => {
                let found = regex.find_from_pos(text, at);
                let found = found.map_err(|error| format!("the expression {:?}: {error}", self.source))?;
                found.map(|found| Span { start: found.start(), end: found.end() })
            }
        })
    }

    /// Returns all matches in order. An empty match directly after another is left out.
    pub(super) fn find_all(&self, text: &str) -> Result<Vec<Span>, String> {
        let (mut found, mut at, mut last) = (Vec::new(), 0, None);
        while at <= text.len() {
            let Some(span) = self.find(text, at)? else { break };
            if span.is_empty() && last == Some(span.end) {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            (at, last) = (span.end, Some(span.end));
            found.push(span);
        }
        Ok(found)
    }
}

impl tokenizers::pattern::Pattern for &Pattern {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<((usize, usize), bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let (mut pieces, mut end) = (Vec::new(), 0);
        for span in self.find_all(inside)? {
            if end != span.start {
                pieces.push(((end, span.start), false));
            }
            pieces.push(((span.start, span.end), true));
            end = span.end;
        }
        if end != inside.len() {
            pieces.push(((end, inside.len()), false));
        }
        Ok(pieces)
    }
}

/// Drops the last blank of a run if text follows and it is not the only one.
fn without_last_blank(text: &str, span: Span) -> Span {
    let last = text[span.start..span.end].chars().next_back().map_or(0, char::len_utf8);
    let is_followed = span.end < text.len();
    Span { end: if is_followed && last < span.len() { span.end - last } else { span.end }, ..span }
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
mod tests;
