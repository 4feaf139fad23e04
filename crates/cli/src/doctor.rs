//! `moeworks doctor`: what the program can use of this machine, what is missing, and how to fix it.

mod devices;
mod machine;

use serde_json::{Value, json};

use crate::args::DoctorArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::version;

/// The state of a part of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Everything is in order.
    Ok,
    /// Usable, but it could be better, or an optional part is missing.
    Note,
    /// Missing, and the program cannot work without it.
    Missing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Missing => "missing",
        }
    }
}

/// The result of one check.
struct Finding {
    state: State,
    topic: &'static str,
    /// A description of what was found.
    text: String,
    /// Advice, if something should be done.
    advice: Option<String>,
    /// The measured numbers, for JSON.
    facts: Value,
}

impl Finding {
    fn new(state: State, topic: &'static str, text: impl Into<String>) -> Self {
        Self { state, topic, text: text.into(), advice: None, facts: Value::Null }
    }

    fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    fn with_facts(mut self, facts: Value) -> Self {
        self.facts = facts;
        self
    }

    fn json(&self) -> Value {
        json!({
            "topic": self.topic, "state": self.state.name(), "text": self.text, "advice": self.advice, "facts": self.facts,
        })
    }

    fn print(&self) {
        println!("{:<8} {:<13} {}", self.state.name(), self.topic, self.text);
        if let Some(advice) = &self.advice {
            println!("{:<22} -> {advice}", "");
        }
    }
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let mut findings = machine::look();
    findings.extend(devices::look());
    let can_run = findings.iter().all(|finding| finding.state != State::Missing);
    if args.json {
        let findings: Vec<Value> = findings.iter().map(Finding::json).collect();
        let (version, target) = (version::short(), version::target());
        println!("{:#}", json!({ "version": version, "target": target, "can_run": can_run, "findings": findings }));
    } else {
        println!("moeworks {} for {}", version::short(), version::target());
        findings.iter().for_each(Finding::print);
        let notes = findings.iter().filter(|finding| finding.state == State::Note).count();
        println!();
        println!("{}", verdict(can_run, notes));
    }
    Ok(if can_run { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn verdict(can_run: bool, notes: usize) -> String {
    match (can_run, notes) {
        (false, _) => "The program cannot run here: see the entries marked missing.".to_owned(),
        (true, 0) => "Everything is in order.".to_owned(),
        (true, 1) => "The program can run; one note suggests an improvement.".to_owned(),
        (true, notes) => format!("The program can run; {notes} notes suggest improvements."),
    }
}
