//! The form that `generate` and `chat` hold answers to.

use std::path::Path;

use moeworks_infer::constraint::{ConstraintError, Form};
use moeworks_infer::json::Json;
use moeworks_serve::server::NamedForm;

use crate::args::FormArgs;
use crate::failure::Failure;
use crate::files::text_of;

/// Bytes of a file with a schema or a grammar at most.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the form of the command line, if there is one.
pub(crate) fn form(args: &FormArgs) -> Result<Option<NamedForm>, Failure> {
    let (option, form) = if let Some(schema) = &args.json_schema {
        let (option, text) = schema_text(schema)?;
        let json = Json::parse(&text).map_err(|error| Failure::input(format!("{option}: is not JSON: {error}")))?;
        (option, Form::json_schema(&json))
    } else if args.json {
        ("--json".to_owned(), Form::json_object())
    } else if let Some(pattern) = &args.regex {
        (format!("--regex {pattern}"), Form::regex(pattern))
    } else if let Some(path) = &args.grammar {
        let text = text_of("--grammar", path, MAX_FILE_BYTES)?;
        (format!("--grammar {}", path.display()), Form::grammar(&text))
    } else if !args.choices.is_empty() {
        ("--choices".to_owned(), Form::choice(&args.choices))
    } else {
        return Ok(None);
    };
    let form = form.map_err(|error: ConstraintError| Failure::input(format!("{option}: {error}")))?;
    let field = option.split(' ').next().unwrap_or_default().to_owned();
    Ok(Some(NamedForm { field, form }))
}

/// The text of a schema, which is given itself or as a file, and the option's name for errors.
fn schema_text(schema: &str) -> Result<(String, String), Failure> {
    if schema.trim_start().starts_with('{') || matches!(schema.trim(), "true" | "false") {
        return Ok(("--json-schema".to_owned(), schema.to_owned()));
    }
    Ok((format!("--json-schema {schema}"), text_of("--json-schema", Path::new(schema), MAX_FILE_BYTES)?))
}
