//! Settings that come with a routing scheme: choosing one by `model.router.kind` also sets what it was published with, unless that
//! is given beside it. The table of schemes says which.

use moeworks_moe::RouterKind;
use toml::Value;

/// The settings that go with a scheme, as in TOML.
pub(super) fn companions(kind: RouterKind) -> Vec<(&'static str, Value)> {
    let value = |text: &str| text.parse().expect("the table's values are TOML");
    kind.doc().companions.iter().map(|(setting, text)| (*setting, value(text))).collect()
}
