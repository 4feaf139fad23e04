//! Models in several GGUF files, as llama.cpp's `gguf-split` makes them: `NAME-00001-of-00003.gguf` and so on.
//!
//! Each part is a GGUF file with `split.no` (from 0), `split.count` and `split.tensors.count`. The first one has the
//! model's keys. Any part may be opened: the others are found by its name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_ops::MappedFile;
use moeworks_tensor::Bytes;

use super::error::GgufError;
use super::header::{self, Header};

/// The largest number of parts.
const MAX_PARTS: usize = 99_999;

/// The components of a part's file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartName {
    /// The common prefix of all parts.
    pub(crate) prefix: String,
    /// The part's number, from 1.
    pub(crate) number: usize,
    /// The number of parts.
    pub(crate) count: usize,
}

impl PartName {
    /// Parses a file name `PREFIX-00001-of-00003.gguf`; none for other names.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let is_number = (4..=6).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse::<usize>().ok()).flatten()
        };
        let (number, count) = (digits(number)?, digits(count)?);
        let is_part = (1..=count).contains(&number) && count <= MAX_PARTS;
        is_part.then(|| Self { prefix: prefix.to_owned(), number, count })
    }

    fn file_name(&self, number: usize) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

/// The files of a model, with their merged headers.
pub(super) struct Parts {
    /// The path and the bytes of each file, in order.
    pub(super) files: Vec<(PathBuf, Bytes)>,
    pub(super) header: Header,
}

impl Parts {
    /// Opens the file at `path`, and the other parts if it is one of several.
    pub(super) fn open(path: &Path) -> Result<Self, GgufError> {
        let (data, header) = open_one(path)?;
        let name = path.file_name().and_then(|name| PartName::parse(name.to_str()?)).filter(|name| name.count > 1);
        let given = Split::from_header(path, &header)?;
        if given.count.is_none_or(|count| count < 2) {
            return match name {
                // A file without split keys is whole, whatever its name, if it has an architecture.
                Some(name) if !header.keys.contains_key(ARCHITECTURE) => Self::open_all(path, &name),
                _ => Ok(Self { files: vec![(path.to_owned(), data)], header }),
            };
        }
        let count = given.count.unwrap_or(1);
        match name {
            Some(name) if name.count == count => Self::open_all(path, &name),
            _ => {
                let number = given.number.unwrap_or(0) + 1;
                let reason = format!(
                    "part {number} of {count} of a model: its name must end in -{number:05}-of-{count:05}.gguf, so that \
                     the others are found"
                );
                Err(GgufError::Parts { path: path.to_owned(), reason })
            }
        }
    }

    fn open_all(path: &Path, name: &PartName) -> Result<Self, GgufError> {
        let mut parts = Self { files: Vec::new(), header: Header { keys: BTreeMap::new(), tensors: BTreeMap::new() } };
        let paths: Vec<PathBuf> = (1..=name.count).map(|number| path.with_file_name(name.file_name(number))).collect();
        if let Some(missing) = paths.iter().find(|path| !path.exists()) {
            return Err(missing_part(missing, &paths));
        }
        let mut announced = None;
        for (index, path) in paths.into_iter().enumerate() {
            let (data, header) = open_one(&path)?;
            let split = Split::from_header(&path, &header)?;
            split.check(&path, index, name.count)?;
            announced = announced.or(split.num_tensors);
            if index == 0 {
                parts.header.keys = header.keys;
            }
            for (tensor, mut info) in header.tensors {
                info.file = index;
                if let Some(other) = parts.header.tensors.insert(tensor.clone(), info) {
                    let first = &parts.files[other.file].0;
                    let reason = format!("tensor {tensor:?} is also in {}", first.display());
                    return Err(GgufError::Parts { path, reason });
                }
            }
            parts.files.push((path, data));
        }
        let found = parts.header.tensors.len();
        match announced {
            Some(announced) if announced != found => {
                let path = parts.files.swap_remove(0).0;
                let reason = format!(
                    "split.tensors.count is {announced}, but the {} parts have {found} tensors: the parts are of different models",
                    name.count
                );
                Err(GgufError::Parts { path, reason })
            }
            _ => Ok(parts),
        }
    }
}

const ARCHITECTURE: &str = "general.architecture";

fn open_one(path: &Path) -> Result<(Bytes, Header), GgufError> {
    let map = MappedFile::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
    let data: Bytes = Arc::new(map);
    let header = header::read(path, (*data).as_ref())?;
    Ok((data, header))
}

fn missing_part(missing: &Path, paths: &[PathBuf]) -> GgufError {
    let absent: Vec<String> =
        (1..).zip(paths).filter(|(_, path)| !path.exists()).map(|(number, _)| number.to_string()).collect();
    let listed = if absent.len() > 5 { format!("{}, ...", absent[..5].join(", ")) } else { absent.join(", ") };
    let reason = format!(
        "not found: of the model's {} parts {listed} {} missing; all must be in one folder",
        paths.len(),
        if absent.len() == 1 { "is" } else { "are" }
    );
    GgufError::Parts { path: missing.to_owned(), reason }
}

/// The split keys of a header.
struct Split {
    /// The number of the part, from 0.
    number: Option<usize>,
    count: Option<usize>,
    num_tensors: Option<usize>,
}

impl Split {
    fn from_header(path: &Path, header: &Header) -> Result<Self, GgufError> {
        let number = |key: &str| match header.keys.get(key) {
            None => Ok(None),
            Some(value) => value.as_usize().map(Some).ok_or_else(|| {
                let reason = "must be a whole number".to_owned();
                GgufError::Key { path: path.to_owned(), key: key.to_owned(), reason }
            }),
        };
        let split = Self {
            number: number("split.no")?,
            count: number("split.count")?,
            num_tensors: number("split.tensors.count")?,
        };
        if split.count.is_some_and(|count| count > MAX_PARTS) {
            let reason = format!("must be at most {MAX_PARTS}");
            return Err(GgufError::Key { path: path.to_owned(), key: "split.count".to_owned(), reason });
        }
        Ok(split)
    }

    /// Fails if the header is not that of part `index` of `count`.
    fn check(&self, path: &Path, index: usize, count: usize) -> Result<(), GgufError> {
        let found = (self.number.unwrap_or(index), self.count.unwrap_or(count));
        if found == (index, count) {
            return Ok(());
        }
        let reason = format!(
            "by its name part {} of {count}, but by its header part {} of {}: rename it, or get the right file",
            index + 1,
            found.0.saturating_add(1),
            found.1
        );
        Err(GgufError::Parts { path: path.to_owned(), reason })
    }
}
