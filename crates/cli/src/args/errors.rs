//! One-line errors of the command line.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::command;

/// An error of the command line as one line, and the usage lines to print below it.
pub(crate) struct OneLine {
    /// The problem and its fix, without the prefix `error:`.
    pub(crate) message: String,
    /// The usage of the command; empty if the error is a wrong value.
    pub(crate) usage: String,
}

impl OneLine {
    pub(crate) fn new(error: &Error) -> Self {
        let text = error.to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let end = ["\n\nUsage:", "\n\nFor more information"].iter().filter_map(|mark| text.find(mark)).min();
        let (head, rest) = text.split_at(end.unwrap_or(text.len()));
        let mut lines = head.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut message = lines.next().unwrap_or_default().to_owned();
        for (i, line) in lines.enumerate() {
            message += match (line.starts_with("tip:"), i) {
                (true, _) => "; ",
                (false, 0) => " ",
                (false, _) => ", ",
            };
            message += line;
        }
        if let Some(kinds) = kinds_with(error) {
            message = message.split("; tip:").next().unwrap_or_default().to_owned() + &format!("; it is for {kinds}");
        }
        // Without a usage line the rest only points to --help.
        let usage = if rest.contains("Usage:") { rest.trim() } else { "" };
        Self { message, usage: usage.to_owned() }
    }
}

/// Lists the kinds of `bench` that have the option which another kind does not know. Returns `None` for any other
/// error.
fn kinds_with(error: &Error) -> Option<String> {
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument || !usage.contains("moeworks bench") {
        return None;
    }
    let long = option.strip_prefix("--")?;
    let commands = command();
    let kinds = commands.find_subcommand("bench")?.get_subcommands();
    let having = kinds.filter(|kind| kind.get_opts().any(|arg| arg.get_long() == Some(long)));
    let names: Vec<String> = having.map(|kind| format!("`bench {}`", kind.get_name())).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::parse;
    use super::*;

    fn message(line: &str) -> String {
        OneLine::new(&parse(line.split(' ').map(OsString::from)).expect_err(line)).message
    }

    #[test]
    fn what_is_wrong_with_a_command_line_is_one_line() {
        let cases = [
            ("moeworks trian", &["unrecognized subcommand 'trian'", "'train'"][..]),
            ("moeworks evaluate", &["--data", "<MODEL>"]),
            ("moeworks generate M --precision f31", &["'f31'", "[possible values: stored, f32, bf16]"]),
            ("moeworks generate M --max-tokens -3", &["'-3'", "-1 for as many as fit"]),
            ("moeworks generate M --temprature 1", &["--temprature", "--temperature"]),
            ("moeworks bench layers --layers 2", &["--layers", "it is for `bench decode`"]),
            ("moeworks bench --link 1,2", &["--link", "it is for `bench overlap`"]),
            ("moeworks bench decode --types bf16,q3", &["'q3'", "f32, bf16, q8, q4"]),
        ];
        for (line, parts) in cases {
            let message = message(line);
            assert!(!message.contains('\n'), "{message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{line}: {message}");
        }
    }
}
