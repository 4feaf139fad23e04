//! The commands of a chat: lines that start with a slash.

/// The text of `/help`: the commands and their effects.
const HELP: &str = "\
/help          list the commands (also /?)
/clear         forget the conversation, but not the system message (also /reset, /new)
/undo          take back the last message and its answer
/regen         answer the last message again (also /retry)
/system TEXT   tell the model TEXT before the conversation; `/system -` nothing; `/system` shows it
/exit          end the chat (also /quit, /bye, Ctrl-D)
//TEXT         say a message that begins with a slash
In a terminal, a backslash at the end of a line goes on to the next line, as do three quotes (\"\"\") up to three more.
Ctrl-C stops an answer; the chat goes on. The arrow keys bring back earlier lines.";

/// The names that Tab completes.
pub(super) const NAMES: [&str; 7] = ["/clear", "/exit", "/help", "/regen", "/system", "/undo", "/reset"];

/// A line of a chat.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// Only white space.
    Empty,
    /// A message to the model.
    Say(&'a str),
    Help,
    Clear,
    Undo,
    Regenerate,
    /// Shows the system message.
    ShowSystem,
    /// Sets the system message, or removes it.
    SetSystem(Option<&'a str>),
    Exit,
    /// A word with a slash that is not a command.
    Unknown(&'a str),
}

impl<'a> Line<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        if text.trim().is_empty() {
            return Self::Empty;
        }
        let Some(command) = text.strip_prefix('/') else { return Self::Say(text) };
        if command.starts_with('/') {
            return Self::Say(command);
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" | "?" | "h" => Self::Help,
            "clear" | "reset" | "new" => Self::Clear,
            "undo" => Self::Undo,
            "regen" | "retry" | "regenerate" => Self::Regenerate,
            "system" if rest.is_empty() => Self::ShowSystem,
            "system" => Self::SetSystem(Some(rest).filter(|&rest| rest != "-")),
            "exit" | "quit" | "bye" | "q" => Self::Exit,
            _ => Self::Unknown(&text[..1 + name.len()]),
        }
    }
}

/// Returns the text of `/help`.
pub(super) fn help() -> &'static str {
    HELP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_a_slash_are_commands_and_with_two_are_said() {
        let cases = [
            ("Hello", Line::Say("Hello")),
            ("  ", Line::Empty),
            ("//etc/hosts", Line::Say("/etc/hosts")),
            ("/help", Line::Help),
            ("/? ", Line::Help),
            ("/reset", Line::Clear),
            ("/system  Be kind. ", Line::SetSystem(Some("Be kind."))),
            ("/system", Line::ShowSystem),
            ("/system -", Line::SetSystem(None)),
            ("/etc/hosts is what?", Line::Unknown("/etc/hosts")),
            ("a /exit", Line::Say("a /exit")),
        ];
        for (typed, expected) in cases {
            assert_eq!(Line::new(typed), expected, "{typed}");
        }
        for name in NAMES {
            assert!(!matches!(Line::new(name), Line::Unknown(_) | Line::Say(_)), "{name}");
            assert!(HELP.contains(name), "{name}");
        }
    }
}
