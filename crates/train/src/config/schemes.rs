//! Companion settings of routing schemes: choosing a scheme by `model.router.kind` also sets the settings it was
//! published with, unless they are given. The table of schemes lists them.

use moeworks_moe::RouterKind;
use toml::Value;

/// Returns the companion settings of a scheme, as TOML values.
pub(super) fn companions(kind: RouterKind) -> Vec<(&'static str, Value)> {
    let value = |text: &str| text.parse().expect("the table's values are TOML");
    kind.doc().companions.iter().map(|(setting, text)| (*setting, value(text))).collect()
}
