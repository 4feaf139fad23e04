//! Detection of terminals that interpret escape codes, and of the user's wish for plain text.

use std::io::{IsTerminal, stderr, stdout};

use crate::environment;

/// Returns whether colours and redrawn lines may be written to standard error.
pub(crate) fn stderr_takes_escapes() -> bool {
    takes_escapes(stderr().is_terminal(), environment::variable)
}

/// Returns false if `NO_COLOR` (<https://no-color.org>), `CLICOLOR=0` or `TERM=dumb` ask for plain text, or if there
/// is no terminal.
fn takes_escapes(is_terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
    let is_refused = variable("NO_COLOR").is_some_and(|value| !value.is_empty())
        || variable("CLICOLOR").is_some_and(|value| value == "0")
        || variable("TERM").is_none_or(|value| value.is_empty() || value == "dumb");
    is_terminal && !is_refused
}

/// Prepares a model's text for standard output. A terminal would interpret control characters, so they are replaced
/// for one.
pub(crate) fn shown(text: &str) -> String {
    if stdout().is_terminal() { printable(text) } else { text.to_owned() }
}

/// Replaces control characters other than newlines and tabs.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_go_to_terminals_alone_and_only_where_they_are_wanted() {
        let with = |is_terminal, set: &[(&str, &str)]| {
            let found = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
            takes_escapes(is_terminal, found)
        };
        let xterm = ("TERM", "xterm-256color");
        assert!(with(true, &[xterm]));
        assert!(with(true, &[xterm, ("NO_COLOR", ""), ("CLICOLOR", "1")]));
        assert!(!with(false, &[xterm]));
        for refusing in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
            assert!(!with(true, &[refusing, xterm]), "{refusing:?}");
        }
        assert!(!with(true, &[]));
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\tc\n\u{7}"), "a\u{fffd}[31mb\tc\n\u{fffd}");
    }
}
