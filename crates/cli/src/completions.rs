//! `moeworks completions`: scripts that complete commands, options and their values in a shell.

use crate::args::{CompletionsArgs, command};
use crate::exit_code::ExitCode;
use crate::failure::Failure;

pub(crate) fn run(args: &CompletionsArgs) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "moeworks", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}
