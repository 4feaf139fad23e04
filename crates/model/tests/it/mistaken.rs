//! Files and folders of other kinds than their names say: errors describe them and give advice.

use std::fs;
use std::path::{Path, PathBuf};

use moeworks_model::gguf::GgufFile;
use moeworks_model::hf::{ModelFolder, load_model};
use moeworks_model::{Tokenizer, model_path_advice};
use moeworks_ops::Context;
use tempfile::TempDir;

use crate::common::fixture;

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n";
const HTML: &[u8] = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>";

/// A folder with these files, those without contents copied from a fixture.
struct Folder(TempDir);

impl Folder {
    fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn mixtral() -> Self {
        Self::empty().copy("config.json").copy("model.safetensors")
    }

    fn copy(self, name: &str) -> Self {
        fs::copy(fixture("mixtral").join(name), self.path(name)).unwrap();
        self
    }

    fn with(self, name: &str, bytes: &[u8]) -> Self {
        fs::write(self.path(name), bytes).unwrap();
        self
    }

    fn rename(self, from: &str, to: &str) -> Self {
        fs::rename(self.path(from), self.path(to)).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Fails unless loading fails with a line that has all `parts`.
    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        let error = load_model(&Context::cpu(1), self.0.path()).map(|_| ()).expect_err("a bad folder was loaded");
        assert_line(&error.to_string(), parts);
    }

    #[track_caller]
    fn is_no_model(&self, parts: &[&str]) {
        assert_line(&model_path_advice(self.0.path()), parts);
    }

    #[track_caller]
    fn has_no_tokenizer(&self, parts: &[&str]) {
        let error = Tokenizer::from_dir(self.0.path()).err().expect("a tokenizer").to_string();
        assert_line(&error, parts);
    }
}

#[track_caller]
fn assert_line(line: &str, parts: &[&str]) {
    assert!(!line.contains('\n'), "{line}");
    for part in parts {
        assert!(line.contains(part), "{part:?} in {line:?}");
    }
}

#[test]
fn weights_that_are_another_kind_of_file_are_named() {
    let refused = |bytes: &[u8], part: &str| {
        Folder::mixtral().with("model.safetensors", bytes).refused(&["model.safetensors", part]);
    };
    refused(LFS, "git lfs pull");
    refused(HTML, "HTML");
    refused(b"", "empty");
    refused(b"{\"error\": \"Unauthorized\"}", "Unauthorized");
    refused(b"<?xml version='1.0'?><Error/>", "XML");
    refused(b"PK\x03\x04 and so on", "zip");
    refused(b"GGUF\x03\0\0\0", "GGUF file");
    refused(&[0; 4096], "unfinished download");
    let whole = fs::read(fixture("mixtral").join("model.safetensors")).unwrap();
    refused(&whole[..whole.len() - 100], "truncated");
}

#[test]
fn a_configuration_that_is_another_kind_of_file_is_named() {
    let refused = |bytes: &[u8], part: &str| {
        Folder::mixtral().with("config.json", bytes).refused(&["config.json", part]);
    };
    refused(LFS, "git lfs pull");
    refused(HTML, "HTML");
    refused(b"", "empty");
    refused(b"{\"error\": \"Entry not found\"}", "Entry not found");
    let text = fs::read_to_string(fixture("mixtral").join("config.json")).unwrap();
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    refused(&wide, "UTF-16");
    refused(&[b"\xff\xfe", &*wide].concat(), "UTF-16");
}

#[test]
fn a_byte_order_mark_is_passed_over() {
    let marked = |name: &str| [b"\xef\xbb\xbf", &*fs::read(fixture("qwen3_moe_sparse").join(name)).unwrap()].concat();
    let from = fixture("qwen3_moe_sparse");
    let folder = Folder::empty();
    for entry in fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
        }
    }
    let folder = folder
        .with("config.json", &marked("config.json"))
        .with("model.safetensors.index.json", &marked("model.safetensors.index.json"));
    let (config, _) = load_model(&Context::cpu(1), folder.0.path()).unwrap();
    assert_eq!(config, *ModelFolder::open(&from).unwrap().config());
}

#[test]
fn weights_in_other_formats_are_named_with_what_to_do() {
    let without = || Folder::empty().copy("config.json");
    without().with("pytorch_model.bin", b"PK\x03\x04").refused(&["pytorch_model.bin", "pickle", "save_pretrained"]);
    without().with("pytorch_model.bin", LFS).refused(&["pytorch_model.bin", "git lfs pull"]);
    Folder::mixtral()
        .rename("model.safetensors", "pytorch_model.bin")
        .refused(&["pytorch_model.bin is a safetensors file", "rename"]);
    without().with("model-00001-of-00002.safetensors", b"x").refused(&["model.safetensors.index.json", "all parts"]);
    without()
        .with("model.safetensors.incomplete", b"x")
        .refused(&["model.safetensors.incomplete", "unfinished download"]);
    without().with("model-q4.gguf", b"GGUF").refused(&["model-q4.gguf", "give that file"]);
    without().with("adapter_model.safetensors", b"x").refused(&["adapter", "merge_and_unload"]);
    without().with("tf_model.h5", b"\x89HDF").refused(&["tf_model.h5", "save_pretrained"]);
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
    without()
        .with("model.safetensors.index.json", index)
        .refused(&["model-00001-of-00002.safetensors: missing", "download"]);
}

#[test]
fn folders_that_are_no_models_are_named_with_what_to_do() {
    Folder::empty().is_no_model(&["empty folder"]);
    Folder::empty().with("adapter_config.json", b"{}").is_no_model(&["adapter", "merge_and_unload"]);
    Folder::empty().copy("model.safetensors").is_no_model(&["no config.json", "model.safetensors"]);
    Folder::empty().with("params.json", b"{}").with("consolidated.00.pth", b"").is_no_model(&["own format"]);
    Folder::empty().with("a.gguf", b"GGUF").with("b.gguf", b"GGUF").is_no_model(&["2 GGUF files", "a.gguf"]);
    let cache = Folder::empty();
    fs::create_dir_all(cache.path("snapshots/abc")).unwrap();
    cache.is_no_model(&["cache", "snapshots/abc"]);
    let outer = Folder::empty();
    fs::create_dir(outer.path("inner")).unwrap();
    fs::write(outer.path("inner/config.json"), "{}").unwrap();
    outer.is_no_model(&["a folder in it", "inner"]);
    Folder::empty().with("notes.txt", b"x").is_no_model(&["neither a run"]);
}

#[test]
fn files_that_are_no_models_are_named_with_what_to_do() {
    let folder = Folder::mixtral()
        .with("lfs.gguf", LFS)
        .with("zip.gguf", b"PK\x03\x04")
        .with("old.bin", b"tjgg\x03\0\0\0")
        .with("text.gguf", b"hello")
        .with("m.gguf.part", b"GGUF");
    let is = |name: &str, parts: &[&str]| assert_line(&model_path_advice(&folder.path(name)), parts);
    is("lfs.gguf", &["git lfs pull"]);
    is("zip.gguf", &["zip"]);
    is("old.bin", &["GGML", "before GGUF"]);
    is("text.gguf", &["does not begin with GGUF"]);
    is("m.gguf.part", &["unfinished download"]);
    is("config.json", &["give the folder"]);
    is("model.safetensors", &["safetensors file", "give the folder"]);
    for (name, part) in [("lfs.gguf", "git lfs pull"), ("old.bin", "before GGUF"), ("model.safetensors", "safetensors")]
    {
        let error = GgufFile::open(&folder.path(name)).err().expect("no GGUF file").to_string();
        assert_line(&error, &[name, part]);
    }
}

#[test]
fn names_of_the_hub_are_told_from_paths() {
    let is = |path: &str, parts: &[&str]| assert_line(&model_path_advice(Path::new(path)), parts);
    let hub = ["Nothing is downloaded", "hf download mistralai/Mixtral-8x7B-v0.1"];
    is("mistralai/Mixtral-8x7B-v0.1", &hub);
    is("https://huggingface.co/mistralai/Mixtral-8x7B-v0.1", &hub);
    is("hf://mistralai/Mixtral-8x7B-v0.1", &hub);
    for path in ["./models/mine", "/models/mine", "mine", "tests/mine"] {
        let what = model_path_advice(Path::new(path));
        assert!(what.contains("no such file or folder") && !what.contains("hf download"), "{path}: {what}");
    }
    is("https://example.com/model.gguf", &["nothing is downloaded"]);
}

#[test]
fn a_tokenizer_that_is_not_there_or_another_kind_of_file_is_named() {
    Folder::empty().with("tokenizer.model", b"x").has_no_tokenizer(&["tokenizer.model alone", "AutoTokenizer"]);
    Folder::empty().with("vocab.json", b"{}").has_no_tokenizer(&["vocab.json alone", "AutoTokenizer"]);
    Folder::empty().has_no_tokenizer(&["tokenizer.json", "missing", "download"]);
    Folder::empty().with("tokenizer.json", LFS).has_no_tokenizer(&["tokenizer.json", "git lfs pull"]);
    Folder::empty().with("tokenizer.json", HTML).has_no_tokenizer(&["tokenizer.json", "HTML"]);
    Folder::empty().with("tokenizer.json", b"").has_no_tokenizer(&["tokenizer.json", "empty"]);
}
