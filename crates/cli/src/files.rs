//! Reading of small files that options name.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::failure::Failure;

/// Reads a text of at most `most` bytes: a file, or what comes from a pipe or a device until there is no more.
pub(crate) fn text_of(option: &str, path: &Path, most: u64) -> Result<String, Failure> {
    let wrong = |problem: String| Failure::input(format!("{option} {}: {problem}", path.display()));
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
    read.map_err(|error| wrong(error.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(wrong(format!("is larger than {most} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        wrong(format!("not UTF-8 at byte {place}; convert it, for example by iconv"))
    })
}
