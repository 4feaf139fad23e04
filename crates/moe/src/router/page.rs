//! Generates the tables of `docs/routing-schemes.md` from the schemes' documentation.

use std::fmt::Write as _;

use super::replay::Replay;
use super::schemes::{RouterKind, Schemes};

/// Returns the generated part of `docs/routing-schemes.md`: a section for each scheme with its source, the settings
/// that come with it and its own settings.
#[must_use]
pub fn schemes_page() -> String {
    let mut page = String::new();
    for kind in RouterKind::ALL {
        section(*kind, &mut page);
    }
    page
}

fn section(kind: RouterKind, page: &mut String) {
    let doc = kind.doc();
    let _ = writeln!(page, "## `{}`\n\n{}\n", kind.name(), doc.text);
    if !doc.source.is_empty() {
        let _ = writeln!(page, "Source: {}.\n", doc.source);
    }
    if let Some(top_k) = kind.fixed_top_k() {
        let _ = writeln!(page, "Needs `model.top_k = {top_k}`.\n");
    }
    if !doc.companions.is_empty() {
        let set = |(setting, value): &(&str, &str)| format!("`{setting} = {}`", value.replace('\'', "\""));
        let all: Vec<String> = doc.companions.iter().map(set).collect();
        let _ = writeln!(page, "Unless they are given, choosing it sets {}.\n", all.join(", "));
    }
    if let Replay::Refused(reason) = Schemes::default().get(kind).replay() {
        let _ = writeln!(page, "Takes no [expert ids](routing-replay.md) from outside: {reason}.\n");
    }
    if !doc.settings.is_empty() {
        page.push_str("| setting | default | values | |\n| --- | --- | --- | --- |\n");
        for setting in doc.settings {
            let (comment, default) = (setting.comment.replace('\n', " "), setting.default);
            let _ = writeln!(page, "| `router.{}` | `{default}` | {} | {comment} |", setting.name, setting.values());
        }
        page.push('\n');
    }
}
