//! Documentation pages that are generated from the code or show it.

use std::fs;
use std::path::{Path, PathBuf};

use moeworks_moe::{RouterKind, schemes_page};

/// The line between the hand-written introduction and the generated part.
const MARK: &str = "<!-- From here on the page is made from the table of schemes: `MOEWORKS_WRITE_PAGES=1 cargo test -p moeworks-moe --test it pages` -->\n";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// With `MOEWORKS_WRITE_PAGES=1` the page is rewritten.
#[test]
fn the_page_of_routing_schemes_is_that_of_the_table() {
    let path = repository().join("docs/routing-schemes.md");
    let text = fs::read_to_string(&path).unwrap();
    let (introduction, found) = text.split_once(MARK).expect("the mark");
    let expected = format!("\n{}", schemes_page());
    if std::env::var_os("MOEWORKS_WRITE_PAGES").is_some() {
        fs::write(&path, format!("{introduction}{MARK}{expected}")).unwrap();
        return;
    }
    assert!(
        found == expected,
        "docs/routing-schemes.md is not that of the table: write it with MOEWORKS_WRITE_PAGES=1"
    );
}

/// The code shown in `docs/add-a-routing-scheme.md` equals the scheme's file and line in the table.
#[test]
fn the_example_of_a_scheme_is_its_file() {
    let page = fs::read_to_string(repository().join("docs/add-a-routing-scheme.md")).unwrap();
    let added = |from: &str| -> Vec<String> {
        let diff = page.split_once(from).expect("the file").1;
        let lines = diff.lines().skip(1).take_while(|line| !line.starts_with("```") && !line.starts_with("+++ "));
        lines.filter_map(|line| line.strip_prefix('+')).map(str::to_owned).collect()
    };
    let schemes = repository().join("crates/moe/src/router/schemes");
    let file = fs::read_to_string(schemes.join("gumbel.rs")).unwrap();
    assert_eq!(added("+++ crates/moe/src/router/schemes/gumbel.rs"), file.lines().collect::<Vec<_>>());
    let table = fs::read_to_string(schemes.join("mod.rs")).unwrap();
    let lines = added("+++ crates/moe/src/router/schemes/mod.rs");
    assert_eq!(lines.len(), 1, "one line");
    assert!(table.lines().any(|line| line == lines[0]), "{lines:?}");
}

/// Collects all Rust files under `dir` except tests.
fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !path.ends_with("moe/src/router") && name != "tests" && name != "target" {
            sources(&path, found);
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// A scheme is its file and its line in the table; no other source names its kind or its settings.
#[test]
fn no_source_outside_the_routers_folder_names_a_scheme() {
    let mut files = Vec::new();
    sources(&repository().join("crates"), &mut files);
    assert!(
        files.len() > 300 && files.iter().any(|file| file.ends_with("bench/src/routing_schemes.rs")),
        "all sources are read"
    );
    let schemes = fs::read_dir(repository().join("crates/moe/src/router/schemes")).unwrap().count();
    assert_eq!(schemes, RouterKind::ALL.len() + 1, "a file for each scheme, and the table");
    let mut named = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for kind in RouterKind::ALL {
            let ways = [format!("RouterKind::{kind:?}"), format!("schemes.{}.", kind.name())];
            named.extend(
                ways.into_iter().filter(|way| text.contains(way)).map(|way| format!("{}: {way}", file.display())),
            );
        }
    }
    assert!(named.is_empty(), "{named:#?}");
}
