//! Strings of JSON: their characters, and how texts are written in them.

use std::collections::BTreeMap;

use super::grammar::{ByteSet, Grammar, NodeId, RuleId};

/// A text as a string of JSON has it, without quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Adds one character of a string, written as it is, that is none of `without`, which are ASCII.
fn plain_character(grammar: &mut Grammar, without: &[u8]) -> NodeId {
    let ascii = grammar.bytes(plain_ascii(without));
    let longer = longer_character(grammar);
    grammar.alternatives(vec![ascii, longer])
}

/// Adds a character of two to four bytes of UTF-8.
fn longer_character(grammar: &mut Grammar) -> NodeId {
    let mut nodes = Vec::new();
    for ranges in [
        &[(0xC2, 0xDF), (0x80, 0xBF)][..],
        &[(0xE0, 0xE0), (0xA0, 0xBF), (0x80, 0xBF)],
        &[(0xE1, 0xEC), (0x80, 0xBF), (0x80, 0xBF)],
        &[(0xED, 0xED), (0x80, 0x9F), (0x80, 0xBF)],
        &[(0xEE, 0xEF), (0x80, 0xBF), (0x80, 0xBF)],
        &[(0xF0, 0xF0), (0x90, 0xBF), (0x80, 0xBF), (0x80, 0xBF)],
        &[(0xF1, 0xF3), (0x80, 0xBF), (0x80, 0xBF), (0x80, 0xBF)],
        &[(0xF4, 0xF4), (0x80, 0x8F), (0x80, 0xBF), (0x80, 0xBF)],
    ] {
        let bytes = ranges.iter().map(|&(first, last)| grammar.range(first, last)).collect();
        nodes.push(grammar.sequence(bytes));
    }
    grammar.alternatives(nodes)
}

/// Adds an escape of one character. Halves of a character beyond U+FFFF come in pairs.
fn escape(grammar: &mut Grammar) -> NodeId {
    let mut short = ByteSet::default();
    b"\"\\/bfnrt".iter().for_each(|&byte| short.insert(byte));
    let short = grammar.bytes(short);
    let mut digits = |text: &[u8]| {
        let mut set = ByteSet::default();
        text.iter().for_each(|&byte| set.insert(byte));
        grammar.bytes(set)
    };
    let any = digits(b"0123456789abcdefABCDEF");
    let (d, low, high) = (digits(b"dD"), digits(b"01234567"), digits(b"89abAB"));
    let (not_d, rest) = (digits(b"0123456789abcefABCEF"), digits(b"cdefCDEF"));
    let usual = grammar.sequence(vec![not_d, any, any, any]);
    let near = grammar.sequence(vec![d, low, any, any]);
    let u = grammar.literal("\\u");
    let pair = grammar.sequence(vec![d, high, any, any, u, d, rest, any, any]);
    let number = grammar.alternatives(vec![usual, near, pair]);
    let u = grammar.literal("u");
    let long = grammar.sequence(vec![u, number]);
    let behind = grammar.alternatives(vec![short, long]);
    let sign = grammar.literal("\\");
    grammar.sequence(vec![sign, behind])
}

/// Adds one character of a string.
pub(super) fn character(grammar: &mut Grammar) -> NodeId {
    let (plain, escape) = (plain_character(grammar, &[]), escape(grammar));
    grammar.alternatives(vec![plain, escape])
}

/// Adds any number of characters of a string.
pub(super) fn any_characters(grammar: &mut Grammar) -> NodeId {
    let one = character(grammar);
    grammar.repeat(one, 0, None)
}

/// Bytes of a text that is avoided at most.
pub(super) const MAX_AVOIDED: usize = 256;

/// Adds a string, with its quotes, that is none of `texts`. It has no escapes, so that none of them is written in
/// another way.
pub(super) fn other_than(grammar: &mut Grammar, texts: &[&str]) -> NodeId {
    let (longer, rest) = (grammar.new_rule(), grammar.new_rule());
    let node = longer_character(grammar);
    grammar.set_rule(longer, node);
    let plain = plain_character(grammar, &[]);
    let node = grammar.repeat(plain, 0, None);
    grammar.set_rule(rest, node);
    let node = Avoidance { grammar, longer, rest }.behind(texts.iter().map(|text| text.as_bytes()).collect());
    let (open, close) = (grammar.literal("\""), grammar.literal("\""));
    grammar.sequence(vec![open, node, close])
}

/// Makes nodes of texts that are none of some others.
struct Avoidance<'a> {
    grammar: &'a mut Grammar,
    /// A character beyond ASCII.
    longer: RuleId,
    /// Any characters.
    rest: RuleId,
}

impl Avoidance<'_> {
    /// Adds what may stand behind a common beginning of texts so that none of them comes out. The length of texts
    /// bounds the recursion.
    fn behind(&mut self, texts: Vec<&[u8]>) -> NodeId {
        let mut by_first: BTreeMap<u8, Vec<&[u8]>> = BTreeMap::new();
        for text in &texts {
            if let [first, rest @ ..] = text {
                by_first.entry(*first).or_default().push(rest);
            }
        }
        let mut nodes = Vec::new();
        if !texts.iter().any(|text| text.is_empty()) {
            nodes.push(self.grammar.empty());
        }
        let firsts: Vec<u8> = by_first.keys().copied().collect();
        let mut others = vec![self.grammar.bytes(plain_ascii(&firsts))];
        // Texts that go on with a character beyond ASCII are avoided with all that do.
        if firsts.iter().all(u8::is_ascii) {
            others.push(self.grammar.rule(self.longer));
        }
        let (other, rest) = (self.grammar.alternatives(others), self.grammar.rule(self.rest));
        nodes.push(self.grammar.sequence(vec![other, rest]));
        // What JSON writes by an escape never comes here.
        for (first, rests) in by_first.into_iter().filter(|(first, _)| plain_ascii(&[]).contains(*first)) {
            let (first, rest) = (self.grammar.range(first, first), self.behind(rests));
            nodes.push(self.grammar.sequence(vec![first, rest]));
        }
        self.grammar.alternatives(nodes)
    }
}

/// The characters of ASCII that a string has as they are, without some.
fn plain_ascii(without: &[u8]) -> ByteSet {
    let mut ascii = ByteSet::default();
    let is_plain = |&byte: &u8| byte != b'"' && byte != b'\\' && !without.contains(&byte);
    (0x20..0x7f).filter(is_plain).for_each(|byte| ascii.insert(byte));
    ascii
}
