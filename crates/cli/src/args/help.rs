//! The help texts: commands in groups, and for each command its usual use before its options.

use clap::{Command, CommandFactory as _};

use super::Cli;

/// The groups of commands in `moeworks --help`, in the order in which a new user needs them. Other commands are
/// listed under `Other`.
const GROUPS: [(&str, &[&str]); 6] = [
    ("Train", &["train", "study", "report"]),
    ("Run", &["chat", "generate", "serve", "gateway"]),
    ("Inspect", &["inspect", "advise", "evaluate", "routing"]),
    ("Make", &["convert", "upcycle"]),
    ("Plan", &["estimate", "plan", "simulate", "balance", "check"]),
    ("Measure", &["bench", "doctor"]),
];

const START: &str = "\
Start here:
  moeworks train           trains a small model on the text of this folder, in minutes
  moeworks chat MODEL      chats with a model: a run, a Hugging Face folder or a GGUF file
  moeworks help COMMAND    explains a command, with examples
";

/// The order of a command's help: its purpose, its usual use, then the options.
const TEMPLATE: &str = "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

/// Builds the program's command line with its help texts.
pub(crate) fn command() -> Command {
    let command = Cli::command().mut_subcommands(in_order);
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}Options:\n{{options}}\n\n{START}",
        groups(&command)
    );
    command.help_template(template)
}

/// Commands whose options take numbers: a negative one is a wrong value, not an unknown option.
const OF_NUMBERS: [&str; 3] = ["plan", "simulate", "advise"];

fn in_order(command: Command) -> Command {
    let command = command.help_template(TEMPLATE).mut_subcommands(in_order);
    if !OF_NUMBERS.contains(&command.get_name()) {
        return command;
    }
    command.mut_args(|arg| {
        let takes_value = arg.get_action().takes_values();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    })
}

/// Lists the commands and their purposes, group by group.
fn groups(command: &Command) -> String {
    let shown: Vec<&Command> = command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    let width = shown.iter().map(|command| command.get_name().len()).max().unwrap_or(0);
    let line = |name: &str, about: &str| format!("  {name:width$}  {about}\n");
    let of =
        |command: &Command| line(command.get_name(), &command.get_about().map(ToString::to_string).unwrap_or_default());
    let is_grouped = |name: &str| GROUPS.iter().any(|(_, names)| names.contains(&name));
    let mut text = String::new();
    for (group, names) in GROUPS {
        let lines: String = names
            .iter()
            .filter_map(|name| shown.iter().find(|command| command.get_name() == *name))
            .map(|c| of(c))
            .collect();
        text += &format!("{group}:\n{lines}\n");
    }
    let others: String = shown.iter().filter(|command| !is_grouped(command.get_name())).map(|c| of(c)).collect();
    text + &format!("Other:\n{others}{}\n", line("help", "Print this help, or the help of a command"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::super::parse;
    use super::*;

    /// Splits a line of shell into words; quotes hold words together.
    fn words(line: &str) -> Vec<OsString> {
        let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
        for c in line.chars().chain([' ']) {
            match quote {
                Some(open) if c == open => quote = None,
                None if c == '"' || c == '\'' => quote = Some(c),
                None if c == ' ' => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
                _ => word.push(c),
            }
        }
        words.into_iter().map(OsString::from).collect()
    }

    /// Calls `check` with the help text of each visible command.
    fn each(command: &mut Command, check: &mut impl FnMut(&str)) {
        let shown = command.get_subcommands_mut().filter(|command| !command.is_hide_set());
        for command in shown.filter(|command| command.get_name() != "help") {
            check(&command.render_long_help().to_string());
            each(command, check);
        }
    }

    #[test]
    fn every_usage_line_and_every_example_can_be_typed() {
        let mut commands = command();
        commands.build();
        let mut num_examples = 0;
        each(&mut commands, &mut |help| {
            let usage = help.lines().find_map(|line| line.strip_prefix("Usage: ")).expect("a usage line");
            let plain = usage.replace("[OPTIONS]", "").replace("[COMMAND]", "").replace(['[', ']', '<', '>'], "");
            let plain = plain.replace("...", "").replace("SHELL", "bash").replace("KIND", "comm").replace(" N ", " 2 ");
            parse(words(&plain)).unwrap_or_else(|error| panic!("{usage}: {error}"));
            let examples =
                help.lines().skip_while(|line| !line.starts_with("Usual use")).take_while(|line| !line.is_empty());
            for line in examples {
                let Some(start) = line.find("moeworks ") else { continue };
                let end = ["  ", " >", ")"].iter().filter_map(|mark| line[start..].find(mark)).min();
                let example = end.map_or(&line[start..], |end| &line[start..start + end]);
                parse(words(example)).unwrap_or_else(|error| panic!("{example}: {error}"));
                num_examples += 1;
            }
        });
        assert!(num_examples > 20, "{num_examples} examples");
    }

    #[test]
    fn every_command_that_is_shown_stands_in_a_group() {
        let mut commands = command();
        let help = commands.render_long_help().to_string();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            assert!(help.contains(&format!("\n  {} ", command.get_name())), "{}", command.get_name());
        }
        let others = help.split("Other:").nth(1).expect("a group of others");
        let names: Vec<&str> = others.lines().skip(1).map_while(|line| line.split_whitespace().next()).collect();
        assert_eq!(names, ["completions", "help"]);
    }
}
