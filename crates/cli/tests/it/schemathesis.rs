//! Random requests, good and bad, that schemathesis makes from `/openapi.json`.
//!
//! Needs a Python with the package `schemathesis`: `MOEWORKS_PYTHON`, or `.venv-test/bin/python`, which `./test`
//! makes.
#![cfg(unix)]

use std::process::Command;

use crate::program::{stderr, stdout};
use crate::python::{is_full, python_with};
use crate::serve::{Server, with_model};

/// Random requests to each path that takes any, and the least number of requests in all.
struct Effort {
    num_examples: &'static str,
    least_cases: usize,
}

/// Beside these there are about 1,000 requests that try each bound of the description once.
const SHORT: Effort = Effort { num_examples: "12", least_cases: 500 };
const FULL: Effort = Effort { num_examples: "5000", least_cases: 20_000 };

/// A request that fits the description may be refused for what a schema cannot say: the context of the model, fields
/// that exclude each other, a grammar that is none.
const LEFT_OUT: &str = "positive_data_acceptance";

#[test]
fn no_request_that_schemathesis_makes_is_answered_in_another_way_than_described() {
    let Some(python) = python_with("schemathesis", "schemathesis") else { return };
    let Effort { num_examples, least_cases } = if is_full() { FULL } else { SHORT };
    let work = with_model();
    work.file("chat.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:");
    let server = Server::start(&work, &["--chat-template", "chat.jinja"]);
    let description = format!("http://{}/openapi.json", server.address);
    let mut schemathesis = Command::new(python.with_file_name("st"));
    schemathesis.args(["run", &description, "--exclude-checks", LEFT_OUT, "--max-examples", num_examples]);
    // The same examples each time.
    schemathesis.args(["--generation-deterministic", "--no-shrink", "--no-color"]);
    let output = schemathesis.current_dir(work.path(".")).output().expect("schemathesis starts");
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    let summary = said.split("Test cases:").nth(1).expect("a summary");
    let num_cases: String = summary.chars().take_while(|c| *c != 'g').filter(char::is_ascii_digit).collect();
    assert!(num_cases.parse::<usize>().expect("a number") >= least_cases, "{said}");
    server.wait_until_idle();
    assert_eq!(server.figure("kv_cache_usage_perc"), 0.0);
}
