use std::io::Write;

use super::*;

/// A folder of files, and what comes of naming paths in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, content) in files {
            let path = folder.0.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn find(&self, names: &[&str]) -> Result<Sources, DataError> {
        Sources::find(&DataConfig {
            paths: names.iter().map(|name| self.path(name)).collect(),
            ..DataConfig::default()
        })
    }

    fn documents(&self, names: &[&str]) -> Vec<String> {
        documents(&self.find(names).unwrap())
    }

    /// The message, with paths relative to the folder.
    fn error(&self, names: &[&str]) -> String {
        let message = match self.find(names) {
            Ok(sources) => sources.for_each(|_| Ok(ControlFlow::Continue(()))).unwrap_err(),
            Err(error) => error,
        };
        message.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }
}

fn documents(sources: &Sources) -> Vec<String> {
    let mut documents = Vec::new();
    sources
        .for_each(|piece| {
            documents.push(piece.text.to_string());
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    documents
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(content: &[u8]) -> Vec<u8> {
    zstd::encode_all(content, 1).unwrap()
}

#[test]
fn folders_are_walked_by_name_without_hidden_and_made_files() {
    let folder = Folder::new(&[
        ("d/b.txt", b"b"),
        ("d/a/z.md", b"z"),
        ("d/.hidden", b"no"),
        ("d/.git/config", b"no"),
        ("d/target/debug/x.txt", b"no"),
        ("d/picture.png", b"\x89PNG\0\0"),
        ("d/latin1.txt", b"caf\xe9"),
        ("d/empty.txt", b""),
        ("d/venv/pyvenv.cfg", b"no"),
    ]);
    assert_eq!(folder.documents(&["d"]), ["z", "b"]);
}

#[test]
fn globs_match_and_files_come_once() {
    let folder = Folder::new(&[("a.txt", b"a"), ("b.txt", b"b"), ("c.md", b"c"), ("d/e.txt", b"e"), ("[x].txt", b"x")]);
    assert_eq!(folder.documents(&["*.txt", "a.txt", "**/e.txt"]), ["x", "a", "b", "e"]);
    assert_eq!(folder.documents(&["[x].txt"]), ["x"]);
}

#[test]
fn compression_is_told_by_content() {
    let line = br#"{"text": "line"}"#;
    let two_members = [gzip(b"one "), gzip(b"two")].concat();
    let folder = Folder::new(&[
        ("1.txt.gz", &gzip(b"zipped")),
        ("2.txt.zst", &zstandard(b"small")),
        ("3.txt", &gzip(b"zipped without saying so")),
        ("4.jsonl.gz", &gzip(line)),
        ("5.jsonl.zst", &zstandard(line)),
        ("6.ndjson", line),
        ("7.gz", &two_members),
        ("8.txt.gz", b"not zipped"),
        ("9.txt", &[&b"\x50\x2a\x4d\x18\x02\0\0\0ab"[..], &zstandard(b"after a frame without content")].concat()),
    ]);
    let expected = [
        "zipped",
        "small",
        "zipped without saying so",
        "line",
        "line",
        "line",
        "one two",
        "not zipped",
        "after a frame without content",
    ];
    assert_eq!(folder.documents(&["."]), expected);
}

#[test]
fn bad_input_is_named() {
    let cut = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() - 5);
        bytes
    };
    let text = "some text that is long enough ".repeat(50);
    let folder = Folder::new(&[
        ("empty.txt", b""),
        ("bom.txt", b"\xef\xbb\xbf"),
        ("latin1.txt", b"caf\xe9"),
        ("picture.png", b"\x89PNG\0\0"),
        ("cut.txt.gz", &cut(gzip(text.as_bytes()))),
        ("cut.txt.zst", &cut(zstandard(text.as_bytes()))),
        ("bad.jsonl", b"{}\n"),
        ("bad.parquet", b"PAR1 nonsense"),
        ("none/latin1.txt", b"caf\xe9"),
        ("none/.hidden", b"text"),
    ]);
    for (name, expected) in [
        ("nowhere.txt", "nowhere.txt: no such file or folder"),
        ("empty.txt", "empty.txt: is empty; must hold text"),
        ("bom.txt", "bom.txt: is empty; must hold text"),
        ("latin1.txt", "latin1.txt: not UTF-8 at byte 3; must be converted to UTF-8"),
        ("picture.png", "picture.png: is binary (a NUL at byte 4); must be UTF-8 text, JSON lines or Parquet"),
        ("cut.txt.gz", "cut.txt.gz: cannot be read: "),
        ("cut.txt.zst", "cut.txt.zst: cannot be read: "),
        ("bad.jsonl", "bad.jsonl:1: no field \"text\" (fields: none); data.text_field names the one to use"),
        ("bad.parquet", "bad.parquet: not a readable Parquet file: "),
        ("none", "none: no text found (1 files that are not UTF-8 passed over); give text files, .jsonl or .parquet"),
        ("*.pdf", "*.pdf: matches no file"),
        ("a[", "a[: not a glob: "),
    ] {
        let message = folder.error(&[name]);
        assert!(message.starts_with(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn pipes_devices_and_circles_do_not_hang() {
    let folder = Folder::new(&[("a.txt", b"a")]);
    let pipe = folder.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::os::unix::fs::symlink(folder.0.path(), folder.path("circle")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path("dangling")).unwrap();
    assert_eq!(folder.documents(&["."]), ["a"]);
    assert_eq!(folder.error(&["pipe"]), "pipe: is a named pipe; must be a file, a folder or a glob");
    let device = Sources::find(&DataConfig { paths: vec!["/dev/zero".into()], ..DataConfig::default() });
    assert_eq!(device.unwrap_err().to_string(), "/dev/zero: is a device; must be a file, a folder or a glob");
}

#[test]
fn an_empty_file_beside_others_is_no_error() {
    let folder = Folder::new(&[("a.txt", b"a"), ("empty.txt", b"")]);
    assert_eq!(folder.documents(&["a.txt", "empty.txt"]), ["a"]);
}

#[test]
fn a_checkout_is_found_from_within() {
    let folder = Folder::new(&[
        (".git/HEAD", b"ref"),
        ("Cargo.lock", b"lock"),
        ("README.md", b"readme"),
        ("crates/x/Cargo.toml", b"toml"),
        ("crates/x/src/lib.rs", b"lib"),
        ("crates/x/data.bin", b"bin"),
        ("runs/1/log.txt", b"no"),
    ]);
    let sources = Sources::of_checkout(&folder.0.path().join("crates/x"), &DataConfig::default()).unwrap();
    assert_eq!(documents(&sources), ["readme", "toml", "lib"]);
}

#[test]
fn a_file_that_changes_between_the_two_readings_is_noticed() {
    let folder = Folder::new(&[("a.txt", b"a")]);
    let sources = folder.find(&["a.txt"]).unwrap();
    fs::write(folder.path("a.txt"), "longer").unwrap();
    let error = sources.for_each(|_| Ok(ControlFlow::Continue(()))).unwrap_err();
    assert!(matches!(error, DataError::Changed { .. }), "{error}");
}

#[test]
fn samples_are_bounded_and_from_everywhere() {
    let files: Vec<(String, Vec<u8>)> =
        (0..100).map(|i| (format!("{i:02}.txt"), format!("{i:02}").repeat(500).into_bytes())).collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (&**name, &**content)).collect();
    let sources = Folder::new(&files);
    let found = sources.find(&["."]).unwrap();
    let texts = found.sample_texts(10_000).unwrap();
    assert!((9..=11).contains(&texts.len()), "{}", texts.len());
    assert!(texts.last().unwrap().starts_with('9') || texts.last().unwrap().starts_with('8'));
    assert_eq!(found.sample_texts(1 << 30).unwrap().len(), 100);
}
