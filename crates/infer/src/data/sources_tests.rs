use std::io::Write;

use super::*;

/// A folder of files, with the results of naming paths in it.
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
        let paths = names.iter().map(|name| self.path(name)).collect();
        Sources::find(&TextOptions { paths, ..TextOptions::default() }, &Watch::default())
    }

    /// Returns the line about skipped files, with paths relative to the folder.
    fn line(&self, names: &[&str]) -> String {
        let watch = Watch::default();
        let mut search = Search::new(&watch);
        let paths: Vec<String> = names.iter().map(|name| self.path(name)).collect();
        Sources::search(&mut search, &paths, &TextOptions::default(), &watch).unwrap();
        search.notes.line().unwrap_or_default().replace(&format!("{}/", self.0.path().display()), "")
    }

    fn documents(&self, names: &[&str]) -> Vec<String> {
        documents(&self.find(names).unwrap())
    }

    /// Returns the error message, with paths relative to the folder.
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
fn folders_are_walked_by_name_and_what_is_passed_over_is_counted() {
    let folder = Folder::new(&[
        ("d/b.txt", b"b"),
        ("d/a/z.md", b"z"),
        ("d/.hidden", b"no"),
        ("d/.git/config", b"no"),
        ("d/target/x.txt", b"target"),
        ("d/runs/y.txt", b"runs"),
        ("d/build/CACHEDIR.TAG", b"no"),
        ("d/node_modules/x.js", b"no"),
        ("d/x.zip", b"PK\x03\x04\x14\0\0\0"),
        ("d/picture.png", b"\x89PNG\0\0"),
        ("d/latin1.txt", b"caf\xe9"),
        ("d/empty.txt", b""),
        ("d/venv/pyvenv.cfg", b"no"),
    ]);
    assert_eq!(folder.documents(&["d"]), ["z", "b", "runs", "target"]);
    assert_eq!(
        folder.line(&["d"]),
        "1 file skipped: not UTF-8 (d/latin1.txt); 1 file skipped: binary (d/picture.png); \
         1 file skipped: an unsupported format (d/x.zip); 1 hidden file or folder skipped (d/.hidden); \
         3 folders skipped: made by programs (first: d/build); 1 empty file (d/empty.txt)"
    );
}

#[test]
fn globs_match_and_files_come_once() {
    let folder = Folder::new(&[("a.txt", b"a"), ("b.txt", b"b"), ("c.md", b"c"), ("d/e.txt", b"e"), ("[x].txt", b"x")]);
    assert_eq!(folder.documents(&["*.txt", "a.txt", "**/e.txt"]), ["x", "a", "b", "e"]);
    assert_eq!(folder.documents(&["[x].txt"]), ["x"]);
}

/// Returns the beginning of a tar archive.
fn tar() -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..5].copy_from_slice(b"a.txt");
    header[257..262].copy_from_slice(b"ustar");
    header
}

#[test]
fn bytes_behind_the_end_of_a_gzip_file_are_told() {
    let with_garbage = |content: &[u8]| [gzip(content), b"garbage".to_vec()].concat();
    let folder = Folder::new(&[("a.gz", &with_garbage(b"a")), ("b.gz", &[gzip(b"b"), vec![0; 9]].concat())]);
    assert_eq!(folder.documents(&["."]), ["a", "b"]);
    assert_eq!(folder.line(&["."]), "1 gzip file with other bytes behind its end (./a.gz)");
    let folder = Folder::new(&[("a.jsonl.gz", &with_garbage(b"{\"text\": \"a\"}"))]);
    assert_eq!(folder.line(&["."]), "");
    let notes = folder.find(&["."]).unwrap().for_each(|_| Ok(ControlFlow::Continue(()))).unwrap();
    assert!(notes.line().unwrap().starts_with("1 gzip file with other bytes behind its end ("));
}

#[test]
fn words_that_begin_like_other_formats_are_text() {
    let folder =
        Folder::new(&[("a.txt", b"BZh is how bzip2 begins"), ("b.txt", b"ORCs and GGUFs"), ("c.txt", b"LZIP")]);
    assert_eq!(folder.documents(&["."]), ["BZh is how bzip2 begins", "ORCs and GGUFs", "LZIP"]);
}

#[test]
fn rows_without_the_field_are_plain_text_in_a_folder_and_an_error_by_name() {
    let contents = ["{\"name\": \"x\", \"version\": 1}", "id,body\n1,a\n", "// not JSON\n{}"];
    let names = ["d/package.json", "d/t.csv", "d/z.json"];
    let files: Vec<(&str, &[u8])> = names.into_iter().zip(contents.map(str::as_bytes)).collect();
    let folder = Folder::new(&files);
    assert_eq!(folder.documents(&["d"]), contents);
    assert_eq!(
        folder.line(&["d"]),
        "3 files of rows without the text field are read as plain text (first: d/package.json)"
    );
    assert_eq!(folder.documents(&["d/package.json"]), contents[..1]);
    assert!(folder.error(&["d/t.csv"]).starts_with("d/t.csv: no column \"text\""));
}

#[test]
fn linked_folders_are_read_unless_they_lead_back() {
    let folder = Folder::new(&[("a/x.txt", b"x"), ("d/y.txt", b"y"), ("other/z.txt", b"z")]);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, folder.path(name)).unwrap();
    link("../other", "d/linked");
    link("..", "d/up");
    link("nowhere", "d/dangling");
    link("y.txt", "d/same.txt");
    assert_eq!(folder.documents(&["d"]), ["z", "y"]);
    assert_eq!(
        folder.line(&["d"]),
        "1 linked folder skipped: leads back (d/up); 1 link skipped: leads nowhere (d/dangling); \
         1 file named more than once is read once (d/y.txt)"
    );
}

#[test]
fn a_setting_says_how_files_hold_documents() {
    let folder = Folder::new(&[("rows", br#"{"text": "a"}"#), ("a.jsonl", br#"{"text": "b"}"#), ("t", b"text\nc\n")]);
    for (name, format, expected) in [
        ("rows", "auto", r#"{"text": "a"}"#),
        ("rows", "json", "a"),
        ("rows", "jsonl", "a"),
        ("a.jsonl", "text", r#"{"text": "b"}"#),
        ("t", "csv", "c"),
        ("t", "tsv", "c"),
    ] {
        let (paths, format) = (vec![folder.path(name)], format.parse().unwrap());
        let config = TextOptions { paths, format, ..TextOptions::default() };
        assert_eq!(documents(&Sources::find(&config, &Watch::default()).unwrap()), [expected], "{name}");
    }
    assert_eq!("xml".parse::<DataFormat>().unwrap_err(), "must be auto, text, json, csv or parquet");
}

#[test]
fn a_pipe_that_is_open_already_is_read_once_and_rows_in_it_are_told_by_the_first() {
    use std::os::fd::AsRawFd;
    for (content, format, expected) in [
        (&b"{\"text\": \"row\"}\n{\"text\": \"other\"}"[..], "auto", &["row", "other"][..]),
        (b"{\"text\": \"row\"}", "text", &["{\"text\": \"row\"}"]),
        (b"{ braces in a text }", "auto", &["{ braces in a text }"]),
        (b"\"quoted\"\nwords", "auto", &["\"quoted\"\nwords"]),
        (&gzip(b"zipped"), "auto", &["zipped"]),
    ] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(content).unwrap();
        drop(writer);
        let paths = vec![format!("/dev/fd/{}", reader.as_raw_fd())];
        let config = TextOptions { paths, format: format.parse().unwrap(), ..TextOptions::default() };
        let sources = Sources::find(&config, &Watch::default()).unwrap();
        assert_eq!([documents(&sources), documents(&sources)], [expected, expected]);
    }
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
        ("text.xz", b"\xfd7zXZ\0\0\x04"),
        ("text.bz2", b"BZh91AY&SY\x85\x90"),
        ("text.zip", b"PK\x03\x04\x14\0\0\0"),
        ("text.tar.gz", &gzip(&tar())),
        ("lfs.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
        ("table.csv", b"id,body\n1,a\n"),
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
        ("none", "none: no text found: 1 file skipped: not UTF-8 (none/latin1.txt); 1 hidden file"),
        (
            "text.xz",
            "text.xz: is compressed by xz, which is not supported; decompress it, or compress it by gzip or zstd instead",
        ),
        ("text.bz2", "text.bz2: is compressed by bzip2, which is not supported; decompress it"),
        ("text.zip", "text.zip: is a zip archive, which is not supported; unpack it and name the folder"),
        ("text.tar.gz", "text.tar.gz: is a tar archive, which is not supported; unpack it and name the folder"),
        (
            "lfs.jsonl",
            "lfs.jsonl: is a pointer of Git LFS, not the data, which is not supported; `git lfs pull` fetches",
        ),
        ("table.csv", "table.csv: no column \"text\" (columns: id, body); data.text_field names the one to use, "),
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
    let device =
        Sources::find(&TextOptions { paths: vec!["/dev/zero".into()], ..TextOptions::default() }, &Watch::default());
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
    let sources =
        Sources::from_checkout(&folder.0.path().join("crates/x"), &TextOptions::default(), &Watch::default()).unwrap();
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
