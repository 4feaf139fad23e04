//! Parsing of the words of a command line.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Arg, Command, Error, FromArgMatches as _};

use super::{Cli, bench, command};
use crate::version;

/// Parses a command line, whose first word is the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Error> {
    let args = bench::kind_first(args.into_iter().collect());
    let error = match read(&args) {
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => error,
        result => return result,
    };
    // An option that takes several values may have taken the positional argument after them.
    let mut commands = command();
    commands.build();
    let others = last_values_first(&commands, &args);
    others.iter().find_map(|args| read(args).ok()).ok_or(error)
}

fn read(args: &[OsString]) -> Result<Cli, Error> {
    let mut commands = command();
    if args.iter().any(|word| word == "--version") {
        // The long version examines the machine, which is only done on request.
        commands = commands.long_version(version::long());
    }
    let mut matches = commands.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut commands))
}

/// Lists other readings of `args`: for each option with several values, its last value as the command's first word,
/// as in `evaluate --data a.txt b.txt MODEL`.
fn last_values_first(commands: &Command, args: &[OsString]) -> Vec<Vec<OsString>> {
    let named = |arg: &OsString| arg.to_str().and_then(|name| commands.find_subcommand(name));
    let Some((place, command)) = (1..args.len()).find_map(|i| Some((i, named(&args[i])?))) else { return Vec::new() };
    let takes_many = |arg: &&Arg| arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    let options = command.get_opts().filter(takes_many).filter_map(Arg::get_long);
    let reading = |option: &str| {
        let option = format!("--{option}");
        let start = args.iter().rposition(|arg| *arg == *option)? + 1;
        let is_value = |arg: &&OsString| *arg == "-" || !arg.as_encoded_bytes().starts_with(b"-");
        let count = args[start..].iter().take_while(is_value).count();
        if count < 2 {
            return None;
        }
        let mut other = args.to_vec();
        let last = other.remove(start + count - 1);
        other.insert(place + 1, last);
        Some(other)
    };
    options.filter_map(reading).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Command as Typed;
    use super::*;

    fn typed(line: &str) -> Result<Typed, Error> {
        parse(line.split(' ').map(OsString::from)).map(|cli| cli.command)
    }

    #[test]
    fn a_model_may_stand_before_or_behind_the_files() {
        for line in [
            "moeworks evaluate M --data a.txt b.txt",
            "moeworks evaluate --data a.txt b.txt M",
            "moeworks evaluate --data a.txt --json --data b.txt M",
            "moeworks -q evaluate --data a.txt b.txt M --json",
            "moeworks evaluate --data a.txt b.txt --json -- M",
        ] {
            let Ok(Typed::Evaluate(args)) = typed(line) else { panic!("{line}: {:?}", typed(line)) };
            assert_eq!(args.model, Path::new("M"), "{line}");
            assert_eq!(args.text.data, ["a.txt", "b.txt"], "{line}");
        }
        let Ok(Typed::Routing(args)) = typed("moeworks routing --data - M") else { panic!("routing") };
        let page = args.page;
        assert_eq!((page.model.as_deref(), page.text.data), (Some(Path::new("M")), vec!["-".to_owned()]));
        assert_eq!(typed("moeworks evaluate --data a.txt").unwrap_err().kind(), ErrorKind::MissingRequiredArgument);
    }

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        command().debug_assert();
    }
}
