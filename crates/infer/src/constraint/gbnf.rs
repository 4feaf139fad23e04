//! Grammars in the notation of llama.cpp (GBNF): rules `name ::= ...` of texts, sets of characters, groups and
//! repetitions.

use std::collections::HashMap;

use regex_syntax::utf8::Utf8Sequences;

use super::grammar::{Grammar, NodeId, RuleId};
use super::{ConstraintError, Rules};

/// Bytes of a grammar at most, and groups inside of each other.
const MAX_BYTES: usize = 64 << 10;
const MAX_NESTING: usize = 100;
/// The largest number of repetitions that is written.
const MAX_REPEATS: u32 = 10_000;

/// Makes the grammar of a text in this notation.
pub(super) fn grammar(text: &str) -> Result<Rules, ConstraintError> {
    if text.len() > MAX_BYTES {
        return Err(ConstraintError::Grammar { line: 1, reason: format!("more than {MAX_BYTES} bytes") });
    }
    let mut parser = Parser { text, at: 0, grammar: Grammar::default(), rules: HashMap::new(), depth: 0 };
    parser.skip(true);
    while parser.peek().is_some() {
        parser.rule()?;
    }
    let is_missing = |rule: &RuleId| parser.grammar.rules[rule.0 as usize].is_none();
    if let Some((name, _)) = parser.rules.iter().find(|(_, rule)| is_missing(rule)) {
        return Err(parser.fault(&format!("the rule {name} is used and not there")));
    }
    match parser.rules.get("root") {
        Some(&root) => Ok(Rules { grammar: parser.grammar, root }),
        None => Err(parser.fault("there is no rule root ::= ...")),
    }
}

/// The characters from one to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CharRange {
    first: char,
    last: char,
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    grammar: Grammar,
    rules: HashMap<String, RuleId>,
    depth: usize,
}

impl Parser<'_> {
    fn fault(&self, reason: &str) -> ConstraintError {
        let line = self.text[..self.at].lines().count().max(1);
        ConstraintError::Grammar { line, reason: reason.to_owned() }
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn takes(&mut self, sign: &str) -> bool {
        let is_there = self.text[self.at..].starts_with(sign);
        self.at += if is_there { sign.len() } else { 0 };
        is_there
    }

    /// Passes over blanks and comments, and over the ends of lines where the rule goes on behind them.
    fn skip(&mut self, over_lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if over_lines => self.at += 1,
                '#' => self.at += self.text[self.at..].find('\n').unwrap_or(self.text.len() - self.at),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<String, ConstraintError> {
        let rest = &self.text[self.at..];
        let is_other = |c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_');
        let len = rest.find(is_other).unwrap_or(rest.len());
        if len == 0 {
            return Err(self.fault("the name of a rule is missing"));
        }
        self.at += len;
        Ok(rest[..len].to_owned())
    }

    fn rule_id(&mut self, name: String) -> RuleId {
        let grammar = &mut self.grammar;
        *self.rules.entry(name).or_insert_with(|| grammar.new_rule())
    }

    fn rule(&mut self) -> Result<(), ConstraintError> {
        let name = self.name()?;
        self.skip(false);
        if !self.takes("::=") {
            return Err(self.fault(&format!("::= must follow the name {name}")));
        }
        self.skip(true);
        let node = self.alternatives(false)?;
        let rule = self.rule_id(name);
        if self.grammar.rules[rule.0 as usize].is_some() {
            return Err(self.fault("a rule comes twice"));
        }
        self.grammar.set_rule(rule, node);
        self.skip(true);
        Ok(())
    }

    fn alternatives(&mut self, is_nested: bool) -> Result<NodeId, ConstraintError> {
        let mut nodes = vec![self.sequence(is_nested)?];
        loop {
            self.skip(is_nested);
            // An alternative may stand on a line of its own.
            let before = self.at;
            self.skip(true);
            if !self.takes("|") {
                self.at = if is_nested { self.at } else { before };
                return Ok(self.grammar.alternatives(nodes));
            }
            self.skip(true);
            nodes.push(self.sequence(is_nested)?);
        }
    }

    fn sequence(&mut self, is_nested: bool) -> Result<NodeId, ConstraintError> {
        let mut nodes = Vec::new();
        loop {
            self.skip(is_nested);
            let node = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.set()?,
                Some('(') => self.group()?,
                Some('.') => {
                    self.at += 1;
                    self.characters(vec![CharRange { first: '\0', last: char::MAX }])
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' => {
                    let name = self.name()?;
                    let rule = self.rule_id(name);
                    self.grammar.rule(rule)
                }
                None | Some('|' | ')' | '\n' | '\r') => return Ok(self.grammar.sequence(nodes)),
                Some(c) => return Err(self.fault(&format!("{c:?} is not expected here"))),
            };
            nodes.push(self.repeated(node)?);
        }
    }

    fn group(&mut self) -> Result<NodeId, ConstraintError> {
        self.at += 1;
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return Err(self.fault(&format!("more than {MAX_NESTING} groups inside of each other")));
        }
        self.skip(true);
        let node = self.alternatives(true)?;
        self.skip(true);
        if !self.takes(")") {
            return Err(self.fault("a group does not end: ) is missing"));
        }
        self.depth -= 1;
        Ok(node)
    }

    /// A node with the sign of repetition behind it.
    fn repeated(&mut self, node: NodeId) -> Result<NodeId, ConstraintError> {
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(node),
            _ => return Ok(node),
        };
        self.at += 1;
        let node = self.grammar.repeat(node, least, most);
        // A repetition of a repetition is one, too.
        if matches!(self.peek(), Some('*' | '+' | '?' | '{')) {
            return Err(self.fault("two signs of repetition behind each other: use a group"));
        }
        Ok(node)
    }

    /// A node with numbers of repetitions behind it: `{3}`, `{3,}`, `{,5}` or `{3,5}`.
    fn counted(&mut self, node: NodeId) -> Result<NodeId, ConstraintError> {
        let rest = &self.text[self.at + 1..];
        let Some(len) = rest.find('}') else { return Err(self.fault("} is missing")) };
        let expected = format!("must be numbers up to {MAX_REPEATS}, as in {{2,5}}");
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&number| number <= MAX_REPEATS);
        let (least, most) = match rest[..len].split_once(',') {
            None => (number(&rest[..len]), number(&rest[..len]).map(Some)),
            Some((least, most)) => (
                if least.trim().is_empty() { Some(0) } else { number(least) },
                if most.trim().is_empty() { Some(None) } else { number(most).map(Some) },
            ),
        };
        match (least, most) {
            (Some(least), Some(most)) if most.is_none_or(|most| most >= least) => {
                self.at += len + 2;
                Ok(self.grammar.repeat(node, least, most))
            }
            _ => Err(self.fault(&expected)),
        }
    }

    fn literal(&mut self) -> Result<NodeId, ConstraintError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => break self.at += 1,
                None | Some('\n') => return Err(self.fault("a text does not end: \" is missing")),
                Some(_) => text.push(self.character()?),
            }
        }
        Ok(self.grammar.literal(text))
    }

    /// A character, perhaps by an escape.
    fn character(&mut self) -> Result<char, ConstraintError> {
        match self.next() {
            Some('\\') => {}
            Some(c) => return Ok(c),
            None => return Err(self.fault("the grammar ends too early")),
        }
        let sign = self.next();
        let num_digits = match sign {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.fault("an escape that is not known")),
        };
        let digits = self.text.get(self.at..self.at + num_digits);
        let number = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let c = number.and_then(char::from_u32).ok_or_else(|| self.fault("an escape that is no character"))?;
        self.at += num_digits;
        Ok(c)
    }

    /// A set of characters such as `[a-z_]`, or all others, as `[^"]`.
    fn set(&mut self) -> Result<NodeId, ConstraintError> {
        self.at += 1;
        let is_negated = self.takes("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break self.at += 1,
                None | Some('\n') => return Err(self.fault("a set of characters does not end: ] is missing")),
                Some(_) => {}
            }
            let first = self.character()?;
            let is_range = self.text[self.at..].starts_with('-') && !self.text[self.at..].starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.character()?
            } else {
                first
            };
            if first > last {
                return Err(self.fault("a range of characters that ends before it begins"));
            }
            ranges.push(CharRange { first, last });
        }
        let ranges = if is_negated { others(ranges) } else { ranges };
        Ok(self.characters(ranges))
    }

    fn characters(&mut self, ranges: Vec<CharRange>) -> NodeId {
        let mut nodes = Vec::new();
        for CharRange { first, last } in ranges {
            for sequence in Utf8Sequences::new(first, last) {
                let bytes =
                    sequence.as_slice().iter().map(|bytes| self.grammar.range(bytes.start, bytes.end)).collect();
                nodes.push(self.grammar.sequence(bytes));
            }
        }
        self.grammar.alternatives(nodes)
    }
}

/// The characters that are in no range.
fn others(mut ranges: Vec<CharRange>) -> Vec<CharRange> {
    ranges.sort_unstable();
    let (mut found, mut next) = (Vec::new(), Some('\0'));
    for CharRange { first, last } in ranges {
        let Some(start) = next else { break };
        if let Some(before) = before(first).filter(|&before| before >= start) {
            found.push(CharRange { first: start, last: before });
        }
        next = behind(last).map(|behind| behind.max(start));
    }
    found.extend(next.map(|first| CharRange { first, last: char::MAX }));
    found
}

fn before(c: char) -> Option<char> {
    (c > '\0').then(|| ('\0'..c).next_back()).flatten()
}

fn behind(c: char) -> Option<char> {
    (c..=char::MAX).nth(1)
}
