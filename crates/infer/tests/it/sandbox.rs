//! The process that renders chat templates, with shell scripts in the place of the program.
#![cfg(unix)]

use moeworks_infer::chat::{ChatTemplate, Message, RenderOptions, Sandbox, SandboxError};
use moeworks_model::Tokenizer;

/// Renders a conversation of one message by a script, which gets the request on its standard input.
fn rendered(script: &str) -> Result<String, SandboxError> {
    let template = ChatTemplate::new("{{ messages[0].content }}".to_owned(), &Tokenizer::bytes());
    let messages = [Message::new("user", "Hello")];
    Sandbox::new("sh", ["-c", script]).render(&template, &messages, &RenderOptions::default())
}

#[test]
fn the_process_gets_the_request_and_its_output_is_the_text() {
    let request: serde_json::Value = serde_json::from_str(&rendered("cat").unwrap()).unwrap();
    assert_eq!(request["messages"][0]["content"], "Hello");
    assert_eq!(request["template"]["source"], "{{ messages[0].content }}");
}

#[test]
fn a_process_that_fails_says_why_in_one_line() {
    let error = rendered("cat > /dev/null; echo 'error: the template fails in line 3' >&2; exit 2").unwrap_err();
    assert_eq!(error.to_string(), "the template fails in line 3");
    // This script does not read its input.
    assert_eq!(rendered("echo 'error: no' >&2; exit 2").unwrap_err().to_string(), "no");
    let error = rendered("kill -9 $$").unwrap_err();
    assert!(matches!(&error, SandboxError::Stopped { why } if why.contains("memory")), "{error}");
}

#[test]
fn a_program_that_is_not_there_is_named_as_the_fault() {
    let template = ChatTemplate::new(String::new(), &Tokenizer::bytes());
    let sandbox = Sandbox::new("/no/such/program", [""; 0]);
    let error = sandbox.render(&template, &[], &RenderOptions::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot start a process for the chat template: "), "{error}");
}
