use super::*;

#[test]
fn a_program_that_ends_in_the_middle_removes_what_it_is_writing_and_nothing_else() {
    // In a process of its own, because nothing can be registered afterwards.
    if std::env::var_os("MOEWORKS_TEST_UNFINISHED").is_none() {
        let test = "files::tests::a_program_that_ends_in_the_middle_removes_what_it_is_writing_and_nothing_else";
        let program = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(program);
        let status = child.args(["--exact", test]).env("MOEWORKS_TEST_UNFINISHED", "1").status().unwrap();
        assert!(status.success());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write_whole(&path("whole"), b"done").unwrap();
    let dir = Unfinished::note(path("dir"));
    fs::create_dir(dir.path()).unwrap();
    fs::write(dir.path().join("part"), b"part").unwrap();
    write_through(&path("file"), |file| {
        file.write_all(b"part")?;
        assert!(path("file.tmp").exists());
        remove_unfinished();
        let left: Vec<_> = fs::read_dir(folder.path())?.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["whole"]);
        // Any write that would be completed now blocks until the end.
        std::process::exit(0)
    })
    .unwrap();
}
