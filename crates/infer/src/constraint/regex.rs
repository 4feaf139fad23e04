//! Regular expressions as grammars, by the parser of the `regex` crates: no look-around and no references back, so
//! that every expression is an automaton.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look};
use regex_syntax::utf8::Utf8Sequences;

use super::ConstraintError;
use super::grammar::{Grammar, NodeId};
use super::strings;

/// Bytes of an expression at most.
const MAX_BYTES: usize = 16 << 10;
/// Groups inside of each other at most.
const MAX_NESTING: u32 = 60;

/// The way in which the characters of a text are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writing {
    /// Unchanged.
    Plain,
    /// By the rules of strings of JSON.
    Json,
}

/// Adds a regular expression that a whole text has to match.
pub(super) fn whole(grammar: &mut Grammar, pattern: &str) -> Result<NodeId, ConstraintError> {
    let hir = parse(pattern)?;
    let (inner, _) = without_ends(hir);
    Translation { grammar, writing: Writing::Plain }.node(&inner)
}

/// Adds the strings of JSON, without their quotes, of which some part matches a regular expression.
pub(super) fn in_string(grammar: &mut Grammar, pattern: &str) -> Result<NodeId, ConstraintError> {
    let (inner, ends) = without_ends(parse(pattern)?);
    let node = Translation { grammar, writing: Writing::Json }.node(&inner)?;
    let mut nodes = Vec::new();
    if !ends.has_start {
        nodes.push(strings::any_characters(grammar));
    }
    nodes.push(node);
    if !ends.has_end {
        nodes.push(strings::any_characters(grammar));
    }
    Ok(grammar.sequence(nodes))
}

fn parse(pattern: &str) -> Result<Hir, ConstraintError> {
    if pattern.len() > MAX_BYTES {
        return Err(ConstraintError::Regex(format!("more than {MAX_BYTES} bytes")));
    }
    let mut parser = ParserBuilder::new().nest_limit(MAX_NESTING).build();
    parser.parse(pattern).map_err(|error| {
        // The last line says what is wrong; those before it show where.
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        ConstraintError::Regex(reason)
    })
}

/// Says whether an expression says that a text begins and ends with it.
struct Ends {
    has_start: bool,
    has_end: bool,
}

/// Takes `^` from the beginning of an expression and `$` from its end.
fn without_ends(hir: Hir) -> (Hir, Ends) {
    let is_start = |hir: &Hir| matches!(hir.kind(), HirKind::Look(Look::Start));
    let is_end = |hir: &Hir| matches!(hir.kind(), HirKind::Look(Look::End));
    let mut parts = match hir.kind() {
        HirKind::Concat(parts) => parts.clone(),
        _ => vec![hir],
    };
    let has_start = parts.first().is_some_and(is_start);
    if has_start {
        parts.remove(0);
    }
    let has_end = parts.last().is_some_and(is_end);
    if has_end {
        parts.pop();
    }
    (Hir::concat(parts), Ends { has_start, has_end })
}

/// Makes nodes of parsed expressions.
struct Translation<'a> {
    grammar: &'a mut Grammar,
    writing: Writing,
}

impl Translation<'_> {
    /// Adds an expression. The parser bounds the recursion.
    fn node(&mut self, hir: &Hir) -> Result<NodeId, ConstraintError> {
        match hir.kind() {
            HirKind::Empty => Ok(self.grammar.empty()),
            HirKind::Literal(literal) => self.literal(&literal.0),
            HirKind::Class(Class::Unicode(class)) => Ok(self.class(class)),
            HirKind::Class(Class::Bytes(_)) => Err(ConstraintError::Regex("bytes that are no text".to_owned())),
            HirKind::Look(_) => {
                let reason = "^ and $ stand at the beginning and the end alone, and \\b is not supported";
                Err(ConstraintError::Regex(reason.to_owned()))
            }
            HirKind::Repetition(repetition) => {
                let node = self.node(&repetition.sub)?;
                Ok(self.grammar.repeat(node, repetition.min, repetition.max))
            }
            HirKind::Capture(capture) => self.node(&capture.sub),
            HirKind::Concat(parts) => {
                let nodes = parts.iter().map(|part| self.node(part)).collect::<Result<_, _>>()?;
                Ok(self.grammar.sequence(nodes))
            }
            HirKind::Alternation(parts) => {
                let nodes = parts.iter().map(|part| self.node(part)).collect::<Result<_, _>>()?;
                Ok(self.grammar.alternatives(nodes))
            }
        }
    }

    fn literal(&mut self, bytes: &[u8]) -> Result<NodeId, ConstraintError> {
        let text =
            std::str::from_utf8(bytes).map_err(|_| ConstraintError::Regex("bytes that are no text".to_owned()))?;
        Ok(match self.writing {
            Writing::Plain => self.grammar.literal(text),
            Writing::Json => self.grammar.literal(strings::escaped(text)),
        })
    }

    /// Adds one character of a class.
    fn class(&mut self, class: &ClassUnicode) -> NodeId {
        let mut nodes = Vec::new();
        let mut class = class.clone();
        if self.writing == Writing::Json {
            let mut special = ClassUnicode::new([
                ClassUnicodeRange::new('\0', '\u{1f}'),
                ClassUnicodeRange::new('"', '"'),
                ClassUnicodeRange::new('\\', '\\'),
            ]);
            special.intersect(&class);
            class.difference(&special);
            for c in special.iter().flat_map(|range| range.start()..=range.end()) {
                nodes.push(self.grammar.literal(strings::escaped(c.encode_utf8(&mut [0; 4]))));
            }
        }
        for range in class.iter() {
            for sequence in Utf8Sequences::new(range.start(), range.end()) {
                let bytes =
                    sequence.as_slice().iter().map(|bytes| self.grammar.range(bytes.start, bytes.end)).collect();
                nodes.push(self.grammar.sequence(bytes));
            }
        }
        self.grammar.alternatives(nodes)
    }
}
