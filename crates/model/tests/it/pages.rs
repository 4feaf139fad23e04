//! Pages of documentation that are generated from tables in the code.

use std::fs;
use std::path::Path;

use moeworks_model::hf::families_page;

/// The line between the introduction, written by hand, and the generated part.
const MARK: &str = "<!-- From here on the page is made from the tables in the code: `MOEWORKS_WRITE_PAGES=1 cargo test -p moeworks-model --test it pages` -->\n";

/// With `MOEWORKS_WRITE_PAGES=1` the page is written instead of compared.
#[test]
fn the_page_of_model_families_is_that_of_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/model-families.md");
    let text = fs::read_to_string(&path).unwrap();
    let (introduction, found) = text.split_once(MARK).expect("the mark");
    let expected = format!("\n{}", families_page());
    if std::env::var_os("MOEWORKS_WRITE_PAGES").is_some() {
        fs::write(&path, format!("{introduction}{MARK}{expected}")).unwrap();
        return;
    }
    assert!(
        found == expected,
        "docs/model-families.md is not that of the tables: write it with MOEWORKS_WRITE_PAGES=1"
    );
}
