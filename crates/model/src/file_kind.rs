//! Recognizes files whose content is not what their names say: a Git LFS pointer, a web page, an archive, an
//! unfinished download.

use std::path::Path;

/// The number of bytes that are read to recognize a file.
const HEAD: usize = 4096;

/// The largest header of a safetensors file, in bytes.
const MAX_SAFETENSORS_HEADER: u64 = 100_000_000;

/// The first bytes of formats that are mistaken for others, with a description and advice.
const MAGICS: [(&[u8], &str); 19] = [
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or download the file again",
    ),
    (b"GGUF", "a GGUF file"),
    (b"lmgg", OLD_GGML),
    (b"fmgg", OLD_GGML),
    (b"tjgg", OLD_GGML),
    (b"algg", OLD_GGML),
    (
        b"PK\x03\x04",
        "a zip archive, as PyTorch's .bin and .pt files are: save the model with `save_pretrained`, which writes safetensors",
    ),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x80\x05", PICKLE),
    (b"\x1f\x8b", "compressed by gzip: unpack it first (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first (unzstd)"),
    (b"\xfd7zXZ\0", "compressed by xz: unpack it first (unxz)"),
    (b"BZh", "compressed by bzip2: unpack it first (bunzip2)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it first"),
    (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file, as TensorFlow and Keras write: load the model with transformers and `save_pretrained` it",
    ),
    (b"\x93NUMPY", "a NumPy array"),
    (b"TFL3", "a TensorFlow Lite model"),
];

const OLD_GGML: &str = "a GGML file, llama.cpp's format before GGUF (August 2023): get the model as GGUF, or convert its original folder again";

const PICKLE: &str = "a Python pickle, which can run code and is not read: save the model with `save_pretrained`, which writes safetensors";

/// The endings of the names of unfinished downloads.
pub(crate) const UNFINISHED: [&str; 8] =
    [".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp", ".!ut"];

/// Describes the file with these bytes and gives advice, to follow "this is"; none for an unknown format.
pub(crate) fn describe(bytes: &[u8]) -> Option<String> {
    if bytes.is_empty() {
        return Some("empty: download it again".to_owned());
    }
    if let Some((_, what)) = MAGICS.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        return Some((*what).to_owned());
    }
    if is_safetensors(bytes) {
        return Some("a safetensors file".to_owned());
    }
    if bytes.get(257..262) == Some(b"ustar") {
        return Some("a tar archive: unpack it first".to_owned());
    }
    if let Some(what) = utf16(bytes) {
        return Some(what.to_owned());
    }
    let head = &bytes[..bytes.len().min(HEAD)];
    if head.len() >= 64 && head.iter().all(|&byte| byte == 0) {
        return Some("zeros, as an unfinished download leaves: download it again".to_owned());
    }
    text(head)
}

/// Describes the file at `path` like [`describe`], reading only its beginning.
pub(crate) fn describe_file(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = std::fs::File::open(path).ok().filter(|_| path.is_file())?;
    file.take(HEAD as u64).read_to_end(&mut head).ok()?;
    describe(&head)
}

/// Returns true if the bytes begin like a safetensors file.
pub(crate) fn is_safetensors(bytes: &[u8]) -> bool {
    let len = bytes.first_chunk().map(|len| u64::from_le_bytes(*len));
    len.is_some_and(|len| (2..=MAX_SAFETENSORS_HEADER).contains(&len)) && bytes.get(8) == Some(&b'{')
}

fn utf16(bytes: &[u8]) -> Option<&'static str> {
    let is_marked = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
    // Text in which every second byte is zero.
    let is_unmarked = matches!(bytes, [b'{', 0, _, 0, ..] | [0, b'{', 0, _, ..]);
    (is_marked || is_unmarked).then_some("text in UTF-16: save it as UTF-8")
}

/// Recognizes text that a server sent in place of a file.
fn text(head: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let lower: String = text.chars().take(64).collect::<String>().to_ascii_lowercase();
    if lower.starts_with("<!doctype html") || lower.starts_with("<html") || lower.starts_with("<head") {
        return Some("an HTML page, perhaps a server's login or error page: download the file again".to_owned());
    }
    if lower.starts_with("<?xml") || lower.starts_with("<error>") {
        return Some("a server's XML response, perhaps an error: download the file again".to_owned());
    }
    server_error(&serde_json::from_str(text).ok()?)
}

/// Describes a server's error in place of a file, if `json` is one.
pub(crate) fn server_error(json: &serde_json::Value) -> Option<String> {
    let error = ["error", "errors", "message", "detail"].iter().find_map(|key| json.get(*key))?;
    let is_answer = json.as_object().is_some_and(|map| map.len() <= 6 && !map.contains_key("model_type"));
    let shown: String = error.to_string().chars().take(80).collect();
    is_answer.then(|| format!("a server's error ({shown}): download the file again"))
}

/// Decodes a file that must be UTF-8; a byte-order mark at its beginning is removed.
pub(crate) fn utf8(bytes: Vec<u8>) -> Result<String, String> {
    if let Some(what) = utf16(&bytes) {
        return Err(format!("this is {what}"));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)),
        Err(error) => Err(match describe(error.as_bytes()) {
            Some(what) => format!("this is {what}"),
            None => format!("not UTF-8: byte {} is invalid", error.utf8_error().valid_up_to()),
        }),
    }
}

/// Parses a file's JSON. An error describes the file if its format is known, or else says where the JSON is invalid.
pub(crate) fn json<T: serde::de::DeserializeOwned>(bytes: Vec<u8>) -> Result<T, String> {
    let text = utf8(bytes)?;
    serde_json::from_str(&text).map_err(|error| match describe(text.as_bytes()) {
        Some(what) => format!("this is {what}"),
        None if text.contains("NaN") || text.contains("Infinity") => {
            format!("{error} (JSON has neither NaN nor Infinity: write a number, or null)")
        }
        None => error.to_string(),
    })
}

#[cfg(test)]
#[path = "file_kind_tests.rs"]
mod tests;
