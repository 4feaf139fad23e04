//! `moeworks chat`: a script of turns, faulty templates, and models without a template.

use std::io::Write as _;
use std::process::{Output, Stdio};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}\
                        {% if add_generation_prompt %}assistant:{% endif %}";

/// Runs the program with `input` on standard input.
pub(crate) fn piped(work: &Workplace, args: &[&str], input: &str) -> Output {
    let mut command = work.command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    // Writing fails if the program rejects its arguments and does not read.
    let _ = child.stdin.take().expect("standard input").write_all(input.as_bytes());
    child.wait_with_output().expect("the program ends")
}

fn with_model() -> Workplace {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &["--set", "model.max_seq_len=256"]));
    assert_success(&work.run(&["convert", "run", "model"]));
    work
}

#[test]
fn a_script_of_turns_is_answered_line_by_line() {
    let work = with_model();
    work.file("model/chat_template.jinja", TEMPLATE);
    let chat = ["chat", "model", "--max-tokens", "5", "--temperature", "0", "--system", "Be brief."];
    let one = piped(&work, &chat, "Hello\n");
    assert_success(&one);
    let both = piped(&work, &chat, "Hello\n\nAgain <|endoftext|>\n");
    assert_success(&both);
    assert!(stdout(&both).starts_with(&stdout(&one)) && stdout(&both).len() > stdout(&one).len());
    // A given template takes precedence over the model's own.
    let other = work.file("other.jinja", "{{ messages[-1].content }}");
    assert_success(&piped(&work, &["chat", "run", "--template", &other, "--max-tokens", "2"], "Hi\n"));
}

#[test]
fn a_template_that_does_not_end_is_stopped_with_one_line() {
    let work = with_model();
    let endless = [
        ("steps", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("text", "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "longer than"),
        (
            "memory",
            "{% set n = namespace(s='xy') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "MiB",
        ),
    ];
    for (name, source, expected) in endless {
        let path = work.file("bad.jinja", source);
        let output = piped(&work, &["chat", "run", "--template", &path], "Hello\n");
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {error}");
        assert!(error.contains("was stopped") && error.contains(expected), "{name}: {error}");
        assert_eq!(error.lines().count(), 1, "{name}: {error}");
    }
}

#[test]
fn what_cannot_be_talked_with_is_refused() {
    let work = with_model();
    refused(&work, &["chat", "run"], &["no chat template", "--template"]);
    refused(&work, &["chat", "run", "--template", "nowhere.jinja"], &["nowhere.jinja"]);
    refused(&work, &["chat", "nowhere"], &["nowhere"]);
    let picky = work.file("picky.jinja", "{{ raise_exception('no system, please') }}");
    let output = piped(&work, &["chat", "run", "--template", &picky], "Hello\n");
    assert!(output.status.code() == Some(2) && stderr(&output).contains("no system, please"), "{}", stderr(&output));
    work.file("plain.jinja", "{{ messages[-1].content }}");
    let long = "x".repeat(300) + "\n";
    let output = piped(&work, &["chat", "run", "--template", "plain.jinja"], &long);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("256"), "{}", stderr(&output));
}

#[test]
fn a_prompt_may_come_from_standard_input_and_room_is_kept_to() {
    let work = with_model();
    let typed = work.run(&["generate", "run", "--prompt", "Line 7", "--temperature", "0", "--max-tokens", "9"]);
    let read =
        piped(&work, &["generate", "run", "--prompt", "-", "--temperature", "0", "--max-tokens", "9"], "Line 7\n");
    assert_success(&read);
    assert_eq!(stdout(&typed), stdout(&read));
    let file = work.file("prompt.txt", "Line 7\n");
    let of_file = work.run(&["generate", "run", "--prompt-file", &file, "--temperature", "0", "--max-tokens", "9"]);
    assert_eq!(stdout(&typed), stdout(&of_file));
    // 100 tokens of prompt leave room for 156, fewer than the usual 200.
    let long = "y".repeat(100);
    assert_success(&work.run(&["generate", "run", "--prompt", &long]));
    assert_success(&work.run(&["generate", "run", "--prompt", &long, "--max-tokens", "-1"]));
    refused(&work, &["generate", "run", "--prompt", &long, "--max-tokens", "157"], &["256"]);
    let nothing = work.run(&["generate", "run", "--prompt", "Line 7", "--max-tokens", "0"]);
    assert_eq!(stdout(&nothing), "Line 7\n");
}

#[test]
fn a_full_context_ends_no_conversation() {
    let work = with_model();
    work.file("model/chat_template.jinja", TEMPLATE);
    // Each turn has about 90 tokens with its answer, so that the third does not fit after the first two.
    let line = "y".repeat(60);
    let chat = ["chat", "model", "--temperature", "0", "--max-tokens", "20"];
    let output = piped(&work, &chat, &format!("{line}\n").repeat(6));
    assert_success(&output);
    assert!(stderr(&output).contains("oldest turn"), "{}", stderr(&output));
    // An answer that does not end by itself leaves room for the next turn.
    let output = piped(&work, &["chat", "model", "--temperature", "0"], "a\na\n");
    assert_success(&output);
    assert_eq!(stderr(&output).matches("was cut").count(), 2, "{}", stderr(&output));
    // A message that does not fit is rejected, and the chat continues.
    let long = "x".repeat(300);
    let alone = piped(&work, &chat, "Hello\n");
    let output = piped(&work, &chat, &format!("{long}\nHello\n"));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(stderr(&output).matches("error: ").count(), 1, "{}", stderr(&output));
    assert_eq!(stdout(&output), stdout(&alone));
}

#[test]
fn commands_of_a_chat_change_what_the_model_is_told() {
    let work = with_model();
    // The template raises an error whose text is the conversation, so that the messages can be checked.
    let told = work.file("told.jinja", "{{ raise_exception(messages|map(attribute='content')|join('/')) }}");
    let said = |input: &str| {
        let output = piped(&work, &["chat", "run", "--template", &told, "--system", "S", "--max-tokens", "1"], input);
        let shown = stderr(&output);
        shown.lines().last().unwrap_or_default().rsplit("fails in line 1: ").next().unwrap_or_default().to_owned()
    };
    assert_eq!(said("a\n"), "S/a");
    // A rejected turn is removed from the conversation.
    assert_eq!(said("a\nb\n"), "S/b");
    assert_eq!(said("/system T\na\n"), "T/a");
    assert_eq!(said("/system -\na\n"), "a");
    assert_eq!(said("//etc\n"), "S//etc");
    let template = work.file("plain.jinja", TEMPLATE);
    let chat = ["chat", "run", "--template", &template, "--temperature", "0", "--max-tokens", "6"];
    let answers = |input: &str| {
        let output = piped(&work, &chat, input);
        assert_success(&output);
        stdout(&output)
    };
    let once = answers("Hello\n");
    assert_eq!(answers("Hello\n/regen\n"), once.repeat(2));
    assert_eq!(answers("Hello\n/clear\nHello\n"), once.repeat(2));
    assert_eq!(answers("Hello\n/undo\nHello\n/exit\nHello\n"), once.repeat(2));
    let output = piped(&work, &chat, "/nothing\nHello\n");
    assert_eq!((output.status.code(), stdout(&output)), (Some(2), once));
    assert!(stderr(&output).contains("/nothing is no command") && stderr(&output).contains("/help"));
}

#[test]
fn what_a_models_files_recommend_is_used_unless_options_say_otherwise() {
    let work = with_model();
    let args = ["generate", "model", "--prompt", "Line 7", "--max-tokens", "30", "-v"];
    let run = |config: &str, more: &[&str]| {
        work.file("model/generation_config.json", config);
        let output = work.run(&[&args[..], more].concat());
        assert_success(&output);
        (stdout(&output), stderr(&output))
    };
    let greedy = run("{}", &["--temperature", "0"]).0;
    assert_eq!(run(r#"{"do_sample": false}"#, &[]).0, greedy);
    let (text, told) = run(r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "num_beams": 4}"#, &[]);
    assert!(told.contains("temperature 0.6 (generation_config.json), top_k 20 (generation_config.json)"), "{told}");
    assert!(told.contains("not used here: num_beams = 4"), "{told}");
    assert_eq!(text, run("{}", &["--temperature", "0.6", "--top-k", "20"]).0);
    let (text, told) = run(r#"{"do_sample": true, "temperature": 0.6}"#, &["--no-model-sampling"]);
    assert!(told.contains("temperature 0.8 (default)"), "{told}");
    assert_eq!(text, run("{}", &[]).0);
    // A barely trained model repeats its likeliest token, unless a penalty prevents it.
    let penalised = run(r#"{"do_sample": false, "repetition_penalty": 5.0}"#, &[]).0;
    assert_ne!(penalised, greedy);
    assert_eq!(penalised, run("{}", &["--temperature", "0", "--repetition-penalty", "5"]).0);
    work.file("model/generation_config.json", r#"{"temperature": "hot"}"#);
    refused(&work, &["generate", "model"], &["generation_config.json", "temperature = \"hot\"", "must be a number"]);
}

#[test]
fn a_stop_text_ends_the_answer_before_it() {
    let work = with_model();
    let args = ["generate", "run", "--prompt", "Line 7", "--max-tokens", "40", "--temperature", "5", "--seed", "3"];
    let whole = stdout(&work.run(&args));
    let answer: Vec<char> = whole.trim_end().chars().skip("Line 7".len()).collect();
    // A stop text that spans several tokens, which are bytes here.
    let stop: String = answer[10..14].iter().collect();
    let before = whole.split(&stop).next().expect("a beginning");
    let output = work.run(&[&args[..], &["--stop", "no such text", "--stop", &stop]].concat());
    assert_success(&output);
    assert_eq!(stdout(&output).trim_end_matches('\n'), before.trim_end_matches('\n'));
    let told = work.run(&[&args[..], &["--stop", &stop, "-v"]].concat());
    assert!(stderr(&told).contains("ended by a stop text"), "{}", stderr(&told));
}
