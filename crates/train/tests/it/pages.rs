//! The documentation page generated from the table of settings.

use std::fs;
use std::path::Path;

use moeworks_train::config::settings_page;

/// The line between the introduction, which is written by hand, and the generated rest.
const MARK: &str = "<!-- From here on the page is made from the table of settings: `MOEWORKS_WRITE_PAGES=1 cargo test -p moeworks-train --test it pages` -->\n";

/// With `MOEWORKS_WRITE_PAGES=1`, the test rewrites the page.
#[test]
fn the_page_of_settings_is_that_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let text = fs::read_to_string(&path).unwrap();
    let (introduction, found) = text.split_once(MARK).expect("the mark");
    let expected = format!("\n{}", settings_page());
    if std::env::var_os("MOEWORKS_WRITE_PAGES").is_some() {
        fs::write(&path, format!("{introduction}{MARK}{expected}")).unwrap();
        return;
    }
    assert!(found == expected, "docs/settings.md is not that of the table: write it with MOEWORKS_WRITE_PAGES=1");
}
