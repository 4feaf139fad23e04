//! The weights of a model folder: one file, or several with an index.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::{SafetensorsError, SafetensorsFile, TensorInfo};
use crate::file_kind;

/// The largest index that is read, in bytes.
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// The weight files of a folder, with the file of each tensor.
pub struct ModelFiles {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    /// The index of each tensor's file.
    places: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl ModelFiles {
    /// Opens `model.safetensors` in `dir`, or else the files that `model.safetensors.index.json` names. These must be
    /// in the folder itself and contain the tensors that the index lists.
    pub fn open(dir: &Path) -> Result<Self, SafetensorsError> {
        let (whole, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
        if whole.exists() {
            let file = SafetensorsFile::open(&whole)?;
            let places = file.tensors().keys().map(|name| (name.clone(), 0)).collect();
            return Ok(Self { dir: dir.to_owned(), files: vec![file], places });
        }
        if index.exists() {
            return Self::open_index(dir, &index);
        }
        Err(SafetensorsError::NoWeights { path: dir.to_owned() })
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Self, SafetensorsError> {
        let bad = |reason: String| SafetensorsError::Index { path: index.to_owned(), reason };
        let io = |source| SafetensorsError::Io { path: index.to_owned(), source };
        let metadata = fs::metadata(index).map_err(io)?;
        let bytes = metadata.len();
        if !metadata.is_file() {
            return Err(bad("not a regular file".to_owned()));
        }
        if bytes > MAX_INDEX_BYTES {
            return Err(bad(format!("{bytes} bytes, but an index has at most {MAX_INDEX_BYTES}")));
        }
        let Index { weight_map } = file_kind::json(fs::read(index).map_err(io)?).map_err(bad)?;
        if weight_map.is_empty() {
            return Err(bad("weight_map names no tensor: download it again".to_owned()));
        }
        let mut files: Vec<SafetensorsFile> = Vec::new();
        let mut numbers = BTreeMap::new();
        let mut places = BTreeMap::new();
        for (tensor, name) in weight_map {
            let number = match numbers.get(&name) {
                Some(&number) => number,
                None => {
                    if !is_plain_name(&name) {
                        return Err(bad(format!("{name:?} is not the name of a file in this folder")));
                    }
                    let path = dir.join(&name);
                    if !path.exists() {
                        let reason = "missing, though model.safetensors.index.json names it: download it as well";
                        let source = std::io::Error::new(std::io::ErrorKind::NotFound, reason);
                        return Err(SafetensorsError::Io { path, source });
                    }
                    files.push(SafetensorsFile::open(&path)?);
                    numbers.insert(name, files.len() - 1);
                    files.len() - 1
                }
            };
            files[number].info(&tensor)?;
            places.insert(tensor, number);
        }
        Ok(Self { dir: dir.to_owned(), files, places })
    }

    /// Lists the names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Finds the tensor `name`: its file, and its entry in that file's header.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<(&SafetensorsFile, &TensorInfo)> {
        let file = &self.files[*self.places.get(name)?];
        Some((file, file.tensors().get(name)?))
    }

    /// Finds a tensor that must be in the files.
    pub fn get(&self, name: &str) -> Result<(&SafetensorsFile, &TensorInfo), SafetensorsError> {
        let missing = || SafetensorsError::Missing { path: self.dir.clone(), tensor: name.to_owned() };
        self.find(name).ok_or_else(missing)
    }
}

/// Returns true if `name` is a single ordinary component: no separator, no `..`, not absolute.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let first = components.next();
    matches!(first, Some(Component::Normal(_))) && components.next().is_none() && !name.contains(['/', '\\', ':'])
}
