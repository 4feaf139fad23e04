//! Diagnoses of paths that are not a model, its weights or its tokenizer, with advice.

use std::fs;
use std::path::{Path, PathBuf};

use crate::file_kind::{UNFINISHED, describe_file};

/// The largest number of names of a folder that are looked at.
const MAX_NAMES: usize = 10_000;

/// The advice for weights in formats other than safetensors.
const SAVE_AGAIN: &str = "load the model with transformers and `save_pretrained` it, which writes safetensors";

/// Describes what is wrong with a path that is no model folder, and what would be right, as the end of a line that
/// begins with the path.
#[must_use]
pub fn model_path_advice(path: &Path) -> String {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => folder(path),
        Ok(metadata) if metadata.is_file() => file(path),
        Ok(_) => "neither a folder nor a file; give a run, checkpoint or model folder, or a GGUF file".to_owned(),
        Err(error) => missing(path, &error),
    }
}

fn missing(path: &Path, error: &std::io::Error) -> String {
    let text = path.to_string_lossy();
    if error.kind() != std::io::ErrorKind::NotFound {
        return error.to_string();
    }
    let mut hub_name = None;
    for prefix in ["https://huggingface.co/", "http://huggingface.co/", "hf://", "hf.co/", "https://hf.co/"] {
        hub_name = hub_name.or(text.strip_prefix(prefix));
    }
    let is_local = |name: &str| name.starts_with(['.', '/', '~']) || name.contains('\\');
    let is_pair = text.split('/').count() == 2 && text.split('/').all(|part| !part.is_empty());
    let owner_is_here = path.parent().is_some_and(|parent| !parent.as_os_str().is_empty() && parent.is_dir());
    if hub_name.is_none() && is_pair && !is_local(&text) && !owner_is_here {
        hub_name = Some(&text);
    }
    match hub_name {
        Some(name) => format!(
            "no such file or folder. Nothing is downloaded: if it is a model of the Hugging Face hub, get it with \
             `hf download {name} --local-dir FOLDER` and give FOLDER"
        ),
        None if text.contains("://") => "a URL; nothing is downloaded: give a local folder or file".to_owned(),
        None => "no such file or folder; give a run, checkpoint or model folder, or a GGUF file".to_owned(),
    }
}

fn file(path: &Path) -> String {
    let name = name_of(path);
    if is_unfinished(&name) {
        return "an unfinished download: let it finish, or start it again".to_owned();
    }
    if name == "config.json" || name.ends_with(".safetensors.index.json") {
        return "not a folder; give the folder that it is in".to_owned();
    }
    let what = describe_file(path);
    if crate::gguf::is_gguf(path) {
        return "a GGUF file, which this command does not read: convert it to a model folder with `moeworks convert`"
            .to_owned();
    }
    if let Some(hint) = split_file_advice(&name) {
        return format!("not a folder; {hint}");
    }
    match what.as_deref() {
        Some("a safetensors file") => {
            "a safetensors file; give the folder that it is in, with its config.json".to_owned()
        }
        Some(what) => format!("not a folder; this file is {what}"),
        None if name.ends_with(".gguf") => {
            "not a GGUF file despite its name: it does not begin with GGUF; download it again".to_owned()
        }
        None => "not a folder; give a run, checkpoint or model folder, or a GGUF file".to_owned(),
    }
}

/// Returns advice for a piece of a file that was split into chunks of bytes, recognized by its name; none for other
/// names.
pub(crate) fn split_file_advice(name: &str) -> Option<String> {
    let is_cut = |rest: &str, marker: &str| {
        let part = rest.split_once(marker).map_or("", |(_, part)| part);
        !part.is_empty() && part.len() <= 8 && part.chars().all(|c| c.is_ascii_alphanumeric())
    };
    let (stem, marker) = ["-split-", ".part", ".gguf."].into_iter().find_map(|marker| {
        let stem = &name[..name.find(".gguf")? + ".gguf".len()];
        let begin = if marker == ".gguf." { stem.len() - ".gguf".len() } else { stem.len() };
        is_cut(&name[begin..], marker).then_some((stem, marker))
    })?;
    let pieces = if marker == ".gguf." { format!("{stem}.*") } else { format!("{stem}{marker}*") };
    Some(format!("it is one piece of a split file: join the pieces (cat {pieces} > {stem})"))
}

fn folder(dir: &Path) -> String {
    let names = names(dir);
    let has = |name: &str| names.iter().any(|known| known == name);
    let ends = |ending: &str| names.iter().find(|name| name.ends_with(ending));
    if names.is_empty() {
        return "an empty folder; give a run, checkpoint or model folder".to_owned();
    }
    if has("adapter_config.json") {
        return ADAPTER.to_owned();
    }
    if has("snapshots") {
        let snapshot = fs::read_dir(dir.join("snapshots")).ok().and_then(|mut entries| entries.next()?.ok());
        let given = snapshot.map_or_else(|| dir.join("snapshots/..."), |entry| entry.path());
        return format!("a folder of the Hugging Face cache; the model is below it: give {}", given.display());
    }
    if has("params.json") && (ends(".pth").is_some() || has("consolidated.safetensors")) {
        return "a model in its makers' own format (params.json, consolidated.*); get the folder in the format of transformers"
            .to_owned();
    }
    if has("model_index.json") {
        return "a pipeline of diffusers, not a language model".to_owned();
    }
    if let Some(first) = ends(".gguf") {
        let count = names.iter().filter(|name| name.ends_with(".gguf")).count();
        return format!(
            "not a model folder (no config.json), but it has {count} GGUF files: give one, such as {first}"
        );
    }
    if let Some(name) = names.iter().find(|name| is_unfinished(name)) {
        return format!("no config.json, and {name} is an unfinished download");
    }
    if let Some(weights) = [".safetensors", ".bin", ".pt", ".pth"].into_iter().find_map(ends) {
        return format!("no config.json beside {weights}: the weights are unusable without it; download it as well");
    }
    if let [inner] = &*inner_models(dir, &names) {
        return format!("not a model, but a folder in it is: give {}", inner.display());
    }
    "neither a run (checkpoints/), nor a checkpoint (checkpoint.json), nor a model (config.json)".to_owned()
}

const ADAPTER: &str = "an adapter (LoRA) without its model: merge it into the model first, with peft's `merge_and_unload` and \
     `save_pretrained`, and give that folder";

/// Lists the folders in `dir` that are models.
fn inner_models(dir: &Path, names: &[String]) -> Vec<PathBuf> {
    names.iter().map(|name| dir.join(name)).filter(|inner| inner.join("config.json").is_file()).collect()
}

/// Describes what a model folder has instead of safetensors weights, and what to do, as the end of a line; empty if
/// nothing helps.
pub(crate) fn weights_advice(dir: &Path) -> String {
    let names = names(dir);
    let find = |wanted: &dyn Fn(&str) -> bool| names.iter().find(|name| wanted(name));
    let is_pickle = |name: &str| {
        let endings = [".bin", ".pt", ".pth", ".ckpt"];
        endings.iter().any(|ending| name.ends_with(ending)) || name.ends_with(".bin.index.json")
    };
    if let Some(name) = find(&|name| name.starts_with("model-") && name.ends_with(".safetensors")) {
        return format!("; {name} is a part of the weights: download model.safetensors.index.json and all parts");
    }
    if find(&|name| name.starts_with("adapter_")).is_some() {
        return format!(": {ADAPTER}");
    }
    if let Some(name) = find(&is_unfinished) {
        return format!("; {name} is an unfinished download");
    }
    if let Some(name) = find(&is_pickle) {
        return pickled(dir, name);
    }
    if let Some(name) = find(&|name| name.ends_with(".safetensors")) {
        return format!("; if {name} is the whole model in the names of transformers, rename it to model.safetensors");
    }
    if let Some(name) = find(&|name| name.ends_with(".gguf")) {
        return format!("; {name} is a complete model: give that file");
    }
    let others = [".h5", ".msgpack", ".onnx", ".ot", ".tflite"];
    match find(&|name| others.iter().any(|ending| name.ends_with(ending))) {
        Some(name) => format!("; {name} is not read: {SAVE_AGAIN}"),
        None => String::new(),
    }
}

fn pickled(dir: &Path, name: &str) -> String {
    match describe_file(&dir.join(name)).as_deref() {
        Some("a safetensors file") => format!("; {name} is a safetensors file: rename it to model.safetensors"),
        Some(what) if !what.contains("pickle") && !what.contains("zip") => format!("; {name} is {what}"),
        _ => format!("; {name} is a pickle, which can run code and is not read: {SAVE_AGAIN}"),
    }
}

/// Describes what a model folder has instead of a `tokenizer.json`, and what to do, as the end of a line; empty if
/// nothing helps.
pub(crate) fn tokenizer_advice(dir: &Path) -> String {
    let names = names(dir);
    let make = "make it with transformers: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`";
    let is_other = |name: &&String| {
        let endings =
            [".tiktoken", ".spm", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"];
        endings.iter().any(|ending| name.ends_with(ending))
            || ["vocab.json", "vocab.txt", "merges.txt"].contains(&&***name)
    };
    match names.iter().find(is_other) {
        Some(name) => format!("; {name} alone is not enough: {make}"),
        None => "; a model folder needs it: download it as well, or copy it from the model that this one came from"
            .to_owned(),
    }
}

/// Returns the only GGUF model in a folder that is no model folder itself: one file, or the first of all its parts.
#[must_use]
pub fn only_gguf(dir: &Path) -> Option<PathBuf> {
    if !dir.is_dir() || dir.join("config.json").exists() {
        return None;
    }
    let mut files: Vec<String> = names(dir).into_iter().filter(|name| name.ends_with(".gguf")).collect();
    // A projector of images is not a language model.
    files.retain(|name| !name.starts_with("mmproj"));
    let (first, others) = files.split_first()?;
    let part = crate::gguf::PartName::parse(first);
    let is_of_first = |name: &String| {
        let of = |part: &crate::gguf::PartName| (part.prefix.clone(), part.count);
        part.as_ref().is_some_and(|part| crate::gguf::PartName::parse(name).is_some_and(|other| of(&other) == of(part)))
    };
    others.iter().all(is_of_first).then(|| dir.join(first))
}

fn is_unfinished(name: &str) -> bool {
    UNFINISHED.iter().any(|ending| name.ends_with(ending))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Lists the names in a folder, sorted, without those that begin with a dot.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().take(MAX_NAMES).flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}
