//! Translation of regular expressions from Oniguruma's syntax to that of Rust's engines.
//!
//! Most of it is the same. In Oniguruma `^` and `$` match at line ends, `(?m)` lets a dot match a line end, `\h` is a
//! hexadecimal digit, POSIX names cover all of Unicode, joiners are not word characters, and `{1,3}+` is a repetition
//! where other engines make it possessive.

use std::iter::Peekable;
use std::str::Chars;

/// The set of `\w`: without the joiners of emoji and Indic scripts. Outside classes it also has the numbers of
/// Latin-1, such as ½.
const WORD: &str = r"[[\w²³¹¼-¾]&&[^\x{200C}\x{200D}]]";
const NOT_WORD: &str = r"[[^\w²³¹¼-¾]\x{200C}\x{200D}]";
const WORD_IN_CLASS: &str = r"[\w&&[^\x{200C}\x{200D}]]";
const NOT_WORD_IN_CLASS: &str = r"[\W\x{200C}\x{200D}]";

/// The content of POSIX classes (`[:name:]`, `\p{name}`) that Rust's engines do not have for all of Unicode.
const POSIX: [(&str, &str); 11] = [
    ("alnum", r"\p{Alphabetic}\p{Nd}"),
    ("alpha", r"\p{Alphabetic}"),
    ("blank", r"\p{Zs}\t"),
    ("cntrl", r"\p{Cc}"),
    ("digit", r"\p{Nd}"),
    ("lower", r"\p{Lowercase}"),
    ("punct", r"\p{P}$+<=>^`|~"),
    ("space", r"\s"),
    ("upper", r"\p{Uppercase}"),
    ("xdigit", "0-9a-fA-F"),
    ("word", WORD_IN_CLASS),
];

/// Translates an expression to the syntax of Rust's engines.
pub(super) fn translate(source: &str) -> Result<String, String> {
    let mut translator =
        Translator { source, rest: source.chars().peekable(), out: String::new(), atoms: vec![0], has_lines: false };
    translator.run()?;
    let Translator { out, has_lines, .. } = translator;
    Ok(if has_lines { format!("(?m){out}") } else { out })
}

/// Returns true if a translated expression has possessive quantifiers or atomic groups, such as `a++`. Engines
/// without backtracking read that as a repetition of a repetition.
pub(super) fn forbids_stepping_back(translated: &str) -> bool {
    let (mut depth, mut is_quantifier, mut chars) = (0_usize, false, translated.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            '+' if is_quantifier => return true,
            _ => {}
        }
        is_quantifier = depth == 0 && matches!(c, '*' | '+' | '?');
    }
    translated.contains("(?>")
}

struct Translator<'a> {
    source: &'a str,
    rest: Peekable<Chars<'a>>,
    out: String,
    /// The start in `out` of the last atom of each open group.
    atoms: Vec<usize>,
    has_lines: bool,
}

impl Translator<'_> {
    fn run(&mut self) -> Result<(), String> {
        while let Some(c) = self.rest.next() {
            if !matches!(c, '*' | '+' | '?' | '{' | ')') {
                self.begin_atom();
            }
            match c {
                '\\' => self.escape(false)?,
                '[' => self.class()?,
                '(' => self.open(),
                ')' => self.close(),
                '{' => self.interval(),
                '^' | '$' => {
                    self.has_lines = true;
                    self.out.push(c);
                }
                _ => self.out.push(c),
            }
        }
        Ok(())
    }

    fn begin_atom(&mut self) {
        if let Some(last) = self.atoms.last_mut() {
            *last = self.out.len();
        }
    }

    fn cut_short(&self) -> String {
        format!("the expression {:?} ends too early", self.source)
    }

    /// Translates the head of a group; the flag `m` is `s` elsewhere.
    fn open(&mut self) {
        self.out.push('(');
        if self.rest.next_if_eq(&'?').is_some() {
            self.out.push('?');
            while let Some(flag) = self.rest.next_if(|c| matches!(c, 'i' | 'm' | 'x' | '-')) {
                self.out.push(if flag == 'm' { 's' } else { flag });
            }
            // The rest of the group's head: `:`, `=`, `!`, `<=`, `>` or a name.
            if let Some(c) = self.rest.next_if(|c| matches!(c, ':' | '=' | '!' | '<' | '>')) {
                self.out.push(c);
            }
        }
        self.atoms.push(self.out.len());
    }

    fn close(&mut self) {
        self.out.push(')');
        if self.atoms.len() > 1 {
            self.atoms.pop();
        }
    }

    /// Translates `{n,m}`; a `+` after it repeats the whole.
    fn interval(&mut self) {
        self.out.push('{');
        let digits = |c: &char| c.is_ascii_digit() || *c == ',';
        let mut inside = String::new();
        while let Some(c) = self.rest.next_if(digits) {
            inside.push(c);
        }
        // A missing lower bound is 0.
        let inside = if inside.starts_with(',') { format!("0{inside}") } else { inside };
        self.out.push_str(&inside);
        if inside.is_empty() || self.rest.next_if_eq(&'}').is_none() {
            return;
        }
        self.out.push('}');
        if self.rest.peek() == Some(&'+') {
            self.out.insert_str(self.atoms.last().copied().unwrap_or(0), "(?:");
            self.out.push(')');
        }
    }

    fn escape(&mut self, in_class: bool) -> Result<(), String> {
        let c = self.rest.next().ok_or_else(|| self.cut_short())?;
        match c {
            'h' if in_class => self.out.push_str("0-9a-fA-F"),
            'h' => self.out.push_str("[0-9a-fA-F]"),
            'H' => self.out.push_str("[^0-9a-fA-F]"),
            'w' if in_class => self.out.push_str(WORD_IN_CLASS),
            'W' if in_class => self.out.push_str(NOT_WORD_IN_CLASS),
            'w' => self.out.push_str(WORD),
            'W' => self.out.push_str(NOT_WORD),
            'R' => self.out.push_str(r"(?>\r\n|[\n\x0B\f\r\x{85}\x{2028}\x{2029}])"),
            'Z' => self.out.push_str(r"(?=\n?\z)"),
            'e' => self.out.push_str(r"\x1B"),
            'b' if in_class => self.out.push_str(r"\x08"),
            'u' => self.code_point()?,
            'p' | 'P' => self.property(c, in_class)?,
            _ if c.is_ascii() && !matches!(c, '<' | '>' | ' ') => self.out.extend(['\\', c]),
            _ => self.out.push(c),
        }
        Ok(())
    }

    /// Translates `\uHHHH`.
    fn code_point(&mut self) -> Result<(), String> {
        let digits: String = (0..4).filter_map(|_| self.rest.next_if(char::is_ascii_hexdigit)).collect();
        if digits.len() != 4 {
            return Err(self.cut_short());
        }
        self.out.push_str(&format!(r"\x{{{digits}}}"));
        Ok(())
    }

    /// Translates `\p{name}`, `\P{name}` and `\p{^name}`.
    fn property(&mut self, c: char, in_class: bool) -> Result<(), String> {
        if self.rest.next_if_eq(&'{').is_none() {
            self.out.extend(['\\', c]);
            return Ok(());
        }
        let mut name = String::new();
        loop {
            match self.rest.next().ok_or_else(|| self.cut_short())? {
                '}' => break,
                c => name.push(c),
            }
        }
        let is_inverted = (c == 'P') != name.starts_with('^');
        let name = name.trim_start_matches('^');
        match POSIX.iter().find(|(posix, _)| posix.eq_ignore_ascii_case(name)) {
            Some((_, content)) if in_class && !is_inverted => self.out.push_str(content),
            Some((_, content)) => self.out.push_str(&format!("[{}{content}]", if is_inverted { "^" } else { "" })),
            None => self.out.push_str(&format!(r"\{}{{{name}}}", if is_inverted { 'P' } else { 'p' })),
        }
        Ok(())
    }

    /// Translates a class whose opening bracket has been read.
    fn class(&mut self) -> Result<(), String> {
        self.out.push('[');
        if self.rest.next_if_eq(&'^').is_some() {
            self.out.push('^');
        }
        // A bracket that closes nothing is a literal.
        if self.rest.next_if_eq(&']').is_some() {
            self.out.push_str(r"\]");
        }
        loop {
            match self.rest.next().ok_or_else(|| self.cut_short())? {
                ']' => break,
                '\\' => self.escape(true)?,
                '[' if self.rest.peek() == Some(&':') => self.posix_or_class()?,
                '[' => self.class()?,
                // `~~` is an operator in Rust's engines.
                '~' => self.out.push_str(r"\~"),
                c => self.out.push(c),
            }
        }
        self.out.push(']');
        Ok(())
    }

    /// Translates `[:name:]` in a class, or a class that begins with a colon.
    fn posix_or_class(&mut self) -> Result<(), String> {
        let ahead: String = self.rest.clone().take_while(|c| *c != ']').collect();
        let name = ahead.strip_prefix(':').and_then(|name| name.strip_suffix(':'));
        let (is_inverted, name) = match name.map(|name| (name.starts_with('^'), name.trim_start_matches('^'))) {
            Some(found) => found,
            None => return self.class(),
        };
        let Some((_, content)) = POSIX.iter().find(|(posix, _)| *posix == name) else { return self.class() };
        // Skips the name and its closing bracket.
        for _ in 0..=ahead.chars().count() {
            self.rest.next();
        }
        self.out.push_str(&if is_inverted { format!("[^{content}]") } else { (*content).to_owned() });
        Ok(())
    }
}

#[cfg(test)]
#[path = "oniguruma_tests.rs"]
mod tests;
