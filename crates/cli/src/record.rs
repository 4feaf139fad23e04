//! Recording of routing, as the options say.

use std::path::Path;

use moeworks_infer::open::Model;
use moeworks_infer::routing_record::{RecordHeader, RecordOptions, RecordSource, RecordWriter, RoutingRecorder};

use crate::args::RecordArgs;
use crate::failure::Failure;
use crate::page::Target;
use crate::serve::name_of;

/// The beginning of a record.
pub(crate) const RECORD_MARK: &str = "MOEROUTE";

/// Refuses a file that cannot be written or is no record, before any work is done.
pub(crate) fn check(args: &RecordArgs) -> Result<(), Failure> {
    let Some(path) = &args.record_routing else { return Ok(()) };
    Target { option: "--record-routing", path, mark: RECORD_MARK, is_forced: false }.check().map_err(without_force)
}

/// The commands that record have no `--force`.
fn without_force(failure: Failure) -> Failure {
    Failure { message: failure.message.replace(", or --force to replace it", ""), ..failure }
}

/// Begins the record that the options ask for, of the model at `model_path`.
pub(crate) fn begin(
    args: &RecordArgs,
    source: RecordSource,
    model: &Model,
    model_path: &Path,
) -> Result<Option<RoutingRecorder>, Failure> {
    let Some(path) = &args.record_routing else { return Ok(None) };
    let name = name_of(model_path);
    let header = RecordHeader::new(source, &name, model.decoder.config())
        .map_err(|error| Failure::input(format!("--record-routing: {error}")))?;
    let writer = RecordWriter::create(path, header)?;
    let options = RecordOptions { token_ids: args.record_token_ids, weights: args.record_weights };
    Ok(Some(RoutingRecorder::new(writer, options)))
}
