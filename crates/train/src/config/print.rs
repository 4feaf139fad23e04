//! Prints the full effective configuration as TOML with a comment for each setting; the output is a valid
//! configuration file.

use toml::Table;

use super::RunConfig;
use super::table::setting_rows;

/// Prints `config` as TOML, each setting under its comment. Reading it back gives the same value.
///
/// # Panics
/// If a seed is above `i64::MAX`, which TOML cannot express and [`RunConfig::validate`] refuses.
#[must_use]
pub fn print_config(config: &RunConfig) -> String {
    let rows = setting_rows();
    let mut text = String::new();
    let mut section = String::new();
    for line in plain(config).lines() {
        let name = match line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            Some(header) => {
                section = header.into();
                section.clone()
            }
            None => format!("{section}.{}", line.split(" = ").next().unwrap_or_default()),
        };
        if let Some(row) = rows.iter().find(|row| row.name == name) {
            for comment_line in row.comment.lines() {
                text.push_str("# ");
                text.push_str(comment_line.trim_start());
                text.push('\n');
            }
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// Converts the configuration to a table. This goes through text, which has the shortest form of an f32; as f64 a
/// value of 0.02 would be 0.019999999552965164.
pub(crate) fn to_table(config: &RunConfig) -> Table {
    plain(config).parse().expect("what is written as TOML is TOML")
}

/// Returns the dotted names of all sections and settings of `table`.
pub(super) fn names(table: &Table) -> Vec<String> {
    let mut names = Vec::new();
    for (name, value) in table {
        names.push(name.clone());
        names.extend(value.as_table().into_iter().flat_map(self::names).map(|inner| format!("{name}.{inner}")));
    }
    names
}

/// Prints one line per setting; strings are on one line with escapes, whatever they contain.
fn plain(config: &RunConfig) -> String {
    toml::to_string(config).expect("every setting has a form in TOML")
}
