//! Quoting of command lines that the user can paste into a shell.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::Path;

/// Quotes `word` for a POSIX shell: unchanged, in single quotes, or as `$'...'` if it contains characters that cannot
/// be printed.
pub(crate) fn word(word: impl AsRef<OsStr>) -> String {
    let bytes = word.as_ref().as_encoded_bytes();
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_@%+=:,./-".contains(byte);
    if !bytes.is_empty() && bytes.iter().all(is_plain) {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains(char::is_control) => format!("'{}'", text.replace('\'', "'\\''")),
        _ => format!("$'{}'", escaped(bytes)),
    }
}

/// Returns the part inside `$'...'`.
fn escaped(bytes: &[u8]) -> String {
    let mut quoted = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\n' => quoted += "\\n",
                '\'' | '\\' => quoted.extend(['\\', c]),
                c if c.is_control() => octal(&mut quoted, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => quoted.push(c),
            }
        }
        octal(&mut quoted, chunk.invalid());
    }
    quoted
}

/// Appends bytes as octal escapes of three digits, so that a following digit is not part of one.
fn octal(quoted: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(quoted, "\\{byte:03o}");
    }
}

/// Quotes a path as an argument, such that one that starts with a dash is not read as an option.
pub(crate) fn path(path: &Path) -> String {
    if path.as_os_str().as_encoded_bytes().starts_with(b"-") { word(Path::new(".").join(path)) } else { word(path) }
}

/// Quotes an option with its value.
pub(crate) fn option(name: &str, value: &str) -> String {
    if value.starts_with('-') { format!("{name}={}", word(value)) } else { format!("{name} {}", word(value)) }
}

/// Quotes the name by which the program was called, the first of the words.
pub(crate) fn program(words: &[OsString]) -> String {
    words.first().map_or_else(|| "moeworks".to_owned(), |name| path(Path::new(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the arguments that a shell makes of `line`.
    fn read_back(line: &str) -> Vec<u8> {
        let command = format!("printf '%s\\0' {line}");
        let output = std::process::Command::new("bash").args(["-c", &command]).output().expect("a shell");
        assert!(output.status.success(), "{line}");
        output.stdout
    }

    #[test]
    fn a_shell_reads_back_every_word() {
        let words = [
            "plain",
            "",
            "my run",
            "it's",
            "a\"b",
            "$HOME `x` !y",
            "two\nlines",
            "-dash",
            "~",
            "é",
            "a*?[b]",
            "\\",
            "\x1b[1m7",
            "#",
            "a;b&c",
        ];
        for text in words {
            assert_eq!(read_back(&word(text)), [text.as_bytes(), b"\0"].concat(), "{}", word(text));
        }
        assert_eq!(word("runs/a-1_b.txt"), "runs/a-1_b.txt");
        assert_eq!(word("my run"), "'my run'");
    }

    #[cfg(unix)]
    #[test]
    fn a_name_that_is_not_text_is_read_back_too() {
        use std::os::unix::ffi::OsStrExt as _;
        let name = OsStr::from_bytes(b"a\xff7'\n");
        assert_eq!(read_back(&word(name)), [name.as_bytes(), b"\0"].concat());
    }

    #[test]
    fn what_begins_with_a_dash_is_no_option() {
        assert_eq!(path(Path::new("-run")), "./-run");
        assert_eq!(option("--prompt", "-x y"), "--prompt='-x y'");
        assert_eq!(option("--prompt", "The "), "--prompt 'The '");
    }
}
