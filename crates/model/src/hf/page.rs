//! The page that lists for each family what is read, used and refused, generated from the tables that the readers
//! use.

use std::fmt::Write;

use super::families::FAMILIES;
use super::family::Family;
use super::key_table::{HARMLESS, KeyTable, REFUSED, Refused};
use super::names::Form;
use crate::gguf::{architectures_of, keys_page};

/// Returns the generated part of `docs/model-families.md`, after its introduction.
#[must_use]
pub fn families_page() -> String {
    let mut page = String::new();
    let _ = writeln!(page, "## In every family\n");
    let _ = writeln!(
        page,
        "Keys of `config.json` without influence on what a model computes, with any value: {}.\n",
        list(HARMLESS)
    );
    let _ = writeln!(
        page,
        "The same holds for keys that begin with `_` or `unsloth`, and those that end in `_token_id`, `_token_ids`, `_token`, `_token_index`, \
         `_version` or `_dropout`.\n"
    );
    let _ = writeln!(
        page,
        "Keys that are refused unless the family uses them, or they are absent, null or have a value given here:\n"
    );
    let _ = writeln!(page, "{}\n", refusals(REFUSED.iter()));
    let _ = writeln!(
        page,
        "`quantization_config`: our own blocks in every family (`\"quant_method\": \"moeworks\"`), others where it is listed.\n"
    );
    for family in FAMILIES {
        one(&mut page, family);
    }
    page.push_str(&keys_page());
    page
}

fn one(page: &mut String, family: &Family) {
    let Family { model_type, architecture, keys, .. } = family;
    let _ = writeln!(page, "## {model_type}\n");
    let gguf = architectures_of(model_type);
    let gguf = if gguf.is_empty() { "none".to_owned() } else { list(&gguf) };
    let _ = writeln!(page, "Class `{architecture}`; GGUF architectures: {gguf}.\n");
    let _ = writeln!(page, "| | |\n| --- | --- |");
    let used: Vec<&str> = keys.used().collect();
    let _ = writeln!(page, "| used | {} |", list(&used));
    if !keys.harmless.is_empty() {
        let _ = writeln!(page, "| without influence | {} |", list(keys.harmless));
    }
    if !keys.refused.is_empty() {
        let _ = writeln!(page, "| must be | {} |", refusals(keys.refused.iter()));
    }
    let freed = refused_elsewhere(keys);
    if !freed.is_empty() {
        let _ = writeln!(page, "| used here, refused elsewhere | {} |", list(&freed));
    }
    let _ = writeln!(page, "| tensors | {} |", tensors(family));
    let types = if used.contains(&"quantization_config") {
        "F32, BF16, F16, our blocks, and the published form (FP8 or MXFP4)"
    } else {
        "F32, BF16, F16, our blocks"
    };
    let _ = writeln!(page, "| types of weights | {types} |\n");
}

fn refused_elsewhere(keys: &KeyTable) -> Vec<&'static str> {
    REFUSED.iter().map(|known| known.key).filter(|key| keys.used().any(|used| used == *key)).collect()
}

/// Lists the names on disk of tensors that are not named as usual.
fn tensors(family: &Family) -> String {
    let mut names: Vec<String> = Vec::new();
    for rule in family.rules {
        let found: Vec<&str> = match rule.form {
            Form::Whole(name)
            | Form::Transposed(name)
            | Form::Interleaved(name)
            | Form::InterleavedVectors(name)
            | Form::Mxfp4 { name, .. }
            | Form::Third { name, .. } => vec![name],
            Form::Joined(names) | Form::PerExpert(names) => names.to_vec(),
        };
        for name in found {
            let name = if matches!(rule.form, Form::Mxfp4 { .. }) {
                format!("{name}_blocks, {name}_scales")
            } else {
                name.to_owned()
            };
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let layers: Vec<String> = family.layers.iter().map(|layers| format!("`{layers}N.`")).collect();
    let layers = layers.join(" or ");
    if names.is_empty() {
        return format!("after {layers} the usual names");
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    format!("after {layers} the usual names and {}", list(&names))
}

/// Joins names in backquotes with commas.
pub(crate) fn list<T: AsRef<str>>(names: &[T]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", name.as_ref())).collect();
    quoted.join(", ")
}

fn refusals<'a>(refused: impl Iterator<Item = &'a Refused>) -> String {
    let one = |entry: &Refused| match entry.off {
        [] => format!("`{}`", entry.key),
        off => format!("`{}` ({})", entry.key, off.join(", ")),
    };
    refused.map(one).collect::<Vec<_>>().join(", ")
}
