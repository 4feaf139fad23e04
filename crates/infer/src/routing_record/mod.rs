//! Records of routing: the load of experts and the choices of single tokens, in a compact file.
//!
//! A file has a header and blocks. A block stands alone and has a length and a checksum, so that a killed process
//! leaves a file that can be read up to its last whole block; [`Damage`] says how much was left out. The format is
//! documented byte by byte in `docs/routing-records.md`.
//!
//! [`RoutingRecorder`] collects what the MoE layers of a pass decided, [`RecordWriter`] writes blocks, and
//! [`RecordReader`] reads them.

mod block;
mod bytes;
mod error;
mod export;
mod header;
mod parquet_rows;
mod reader;
mod recorder;
mod writer;

pub use block::{Block, LayerChoices, LayerLoads, LoadBlock, NONE, Run, TokenBlock};
pub use error::RecordError;
pub use export::{Exported, write_json_lines};
pub use header::{RecordHeader, RecordSource};
pub use parquet_rows::write_parquet;
pub use reader::{Damage, RecordReader, is_record};
pub use recorder::{PassTokens, RecordOptions, RoutingRecorder};
pub use writer::RecordWriter;

#[cfg(test)]
mod tests;
