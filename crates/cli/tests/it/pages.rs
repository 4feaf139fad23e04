//! The documentation pages: their links, and the length of the front page.

use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The most lines of the front page.
const MAX_README_LINES: usize = 150;

/// A link of a page: `[text](target)`, an image, or a bare address in the text.
struct Link {
    line: usize,
    target: String,
    is_bare: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// The pages that are checked, as paths from the repository's root.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(PathBuf::from).to_vec();
    for folder in ["docs", "bench/history"] {
        find_pages(Path::new(folder), &mut pages);
    }
    pages
}

/// Adds the pages in `folder` and below it.
fn find_pages(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(root().join(folder)).expect("the folder of pages") {
        let entry = entry.expect("an entry");
        let path = folder.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            find_pages(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

fn read(page: &Path) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
}

/// Returns the lines of `text` outside fenced blocks and HTML comments, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fence: Option<&str> = None;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| trimmed.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (None, None) if !trimmed.starts_with("<!--") => lines.push((number + 1, line)),
            _ => {}
        }
    }
    lines
}

/// Replaces code within a line by spaces, so that what looks like a link in it is none.
fn without_code(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some(start) = rest.find('`') {
        let ticks = rest[start..].len() - rest[start..].trim_start_matches('`').len();
        let inside = &rest[start + ticks..];
        let Some(len) = inside.find(&"`".repeat(ticks)) else { break };
        text += &rest[..start];
        text += " ";
        rest = &inside[len + ticks..];
    }
    text + rest
}

fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (line, text) in prose(text) {
        let mut rest = without_code(text);
        // Links whose text is an image first, then the link around it.
        while let Some(middle) = rest.find("](") {
            let after = &rest[middle + 2..];
            let len = after.find(')').unwrap_or(after.len());
            let target = after[..len].split_whitespace().next().unwrap_or_default().to_owned();
            rest = format!("{} {}", &rest[..middle], &after[(len + 1).min(after.len())..]);
            links.push(Link { line, target, is_bare: false });
        }
        let bare = rest.split_whitespace().filter(|word| word.contains("://"));
        links.extend(bare.map(|word| Link { line, target: word.to_owned(), is_bare: true }));
    }
    links
}

/// Returns the anchors that GitHub gives the headings of a page.
fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let headings = prose(text).into_iter().filter_map(|(_, line)| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len() && title.starts_with(' ')).then_some(title.trim())
    });
    let mut anchors = Vec::new();
    for heading in headings {
        let kept =
            heading.to_lowercase().chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c)).collect::<String>();
        let slug = kept.replace(' ', "-");
        let count = seen.entry(slug.clone()).or_insert(0);
        anchors.push(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    anchors
}

/// Returns `path` without `.` and `..`, or nothing if it leads out of the repository.
fn normalised(path: &Path) -> Option<PathBuf> {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => result.pop().then_some(())?,
            Component::Normal(name) => result.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(result)
}

/// Returns the problem of a link in `page`, whose text is `text`.
fn fault(page: &Path, text: &str, link: &Link) -> Option<String> {
    let target = link.target.as_str();
    if let Some((_, address)) = target.split_once("://") {
        let host = address.split(['/', '#', '?']).next().unwrap_or_default();
        let leads_nowhere = !host.contains('.') || host.contains("example");
        return (link.is_bare || leads_nowhere).then(|| "an address in the text: write a link, or code".to_owned());
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    if path.is_empty() && anchor.is_empty() {
        return Some("a link to nothing".to_owned());
    }
    let file = if path.is_empty() { Some(page.to_owned()) } else { normalised(&page.parent()?.join(path)) };
    let Some(file) = file else { return Some("leads out of the repository".to_owned()) };
    if !root().join(&file).exists() {
        return Some(format!("there is no {}", file.display()));
    }
    if anchor.is_empty() || file.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    let headings = if file == page { anchors(text) } else { anchors(&read(&file)) };
    let is_there = headings.iter().any(|heading| heading == anchor);
    (!is_there).then(|| format!("{} has no heading #{anchor}; it has {}", file.display(), headings.join(", ")))
}

/// Returns a line for each link of a page that leads nowhere.
fn faults(page: &Path, text: &str) -> Vec<String> {
    let of_link = |link: Link| {
        let fault = fault(page, text, &link)?;
        Some(format!("{}:{}: {}: {fault}", page.display(), link.line, link.target))
    };
    links(text).into_iter().filter_map(of_link).collect()
}

#[test]
fn every_link_and_anchor_of_the_pages_leads_somewhere() {
    let faults: Vec<String> = pages().iter().flat_map(|page| faults(page, &read(page))).collect();
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn links_that_lead_nowhere_are_found() {
    for (text, fault) in [
        ("[x](docs/nowhere.md)", "there is no docs/nowhere.md"),
        ("![x](docs/nowhere.png)", "there is no docs/nowhere.png"),
        ("[x](docs/README.md#nowhere)", "has no heading #nowhere"),
        ("# Here\n\n[x](#there)", "has no heading #there; it has here"),
        ("[x](../other/README.md)", "leads out of the repository"),
        ("[x]()", "a link to nothing"),
        ("See https://github.com for more.", "an address in the text"),
        ("[x](https://localhost/)", "an address in the text"),
    ] {
        let found = faults(Path::new("README.md"), text);
        assert!(found.len() == 1 && found[0].contains(fault), "{text}: {found:?}");
    }
}

#[test]
fn links_in_code_and_links_to_what_is_there_are_no_faults() {
    let text = "# A `b` c, d!\n\n[x](#a-b-c-d) [y](docs/README.md) [z](docs) `[q](nowhere.md)`\n\n```sh\n[r](nowhere.md)\n```\n";
    assert!(faults(Path::new("README.md"), text).is_empty());
}

#[test]
fn the_front_page_is_short() {
    let lines = read(Path::new("README.md")).lines().count();
    assert!(lines <= MAX_README_LINES, "README.md has {lines} lines: move something to docs/");
}

/// The index must list every page.
#[test]
fn every_page_of_docs_is_in_an_index() {
    for (index, folder) in [
        ("docs/README.md", "docs"),
        ("docs/performance/README.md", "docs/performance"),
        ("bench/history/README.md", "bench/history"),
    ] {
        let linked: Vec<String> = links(&read(Path::new(index))).into_iter().map(|link| link.target).collect();
        for page in pages().iter().filter(|page| page.parent() == Some(Path::new(folder)) && *page != Path::new(index))
        {
            let name = page.file_name().expect("a name").to_string_lossy();
            assert!(linked.iter().any(|target| *target == name), "{} is not in {index}", page.display());
        }
    }
}
