use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

fn metadata(step: u64) -> Metadata {
    Metadata { step, ..Metadata::default() }
}

fn write_files(step: u64) -> impl FnOnce(&Path) -> io::Result<()> {
    move |dir| {
        fs::write(dir.join("model.safetensors"), step.to_le_bytes().repeat(100))?;
        fs::create_dir(dir.join("state"))?;
        fs::write(dir.join("state/optimizer.safetensors"), step.to_le_bytes().repeat(50))
    }
}

/// Makes a disk that does `limit` operations and then none, as if the process had been killed.
fn disk_killed_after(limit: u64) -> (Disk, Arc<AtomicU64>) {
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    let disk = Disk::with_hook(move |_, _| {
        if counter.fetch_add(1, Ordering::Relaxed) < limit { Ok(()) } else { Err(io::Error::other("killed")) }
    });
    (disk, count)
}

#[test]
fn kill_between_any_two_operations_leaves_a_whole_checkpoint_and_nothing_after_the_next_start() {
    for killed_after in 0.. {
        let run = tempfile::tempdir().unwrap();
        let keep = Keep { last: 1, best: true };
        Store::open_to_write(run.path()).unwrap().save(&metadata(100), keep, write_files(100)).unwrap();
        // The same step again, then a later one: replacing, saving and deleting are all covered.
        let (disk, count) = disk_killed_after(killed_after);
        let store = Store::open_with(run.path(), disk).unwrap();
        let _ = store.save(&metadata(100), keep, write_files(100));
        let _ = store.save(&metadata(200), keep, write_files(200));
        drop(store);
        let found = Store::open(run.path()).latest().unwrap().unwrap();
        assert!([100, 200].contains(&found.metadata.step));
        let store = Store::open_to_write(run.path()).unwrap();
        let found = store.latest().unwrap().unwrap();
        found.verify().unwrap();
        let names = fs::read_dir(run.path().join(CHECKPOINTS_DIR)).unwrap();
        for name in names.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
            assert!(step_of_folder(&name).is_some(), "killed after {killed_after}: {name} is left over");
        }
        if count.load(Ordering::Relaxed) < killed_after {
            assert_eq!(found.metadata.step, 200);
            break;
        }
    }
}

fn save(store: &Store, step: u64, val_loss: Option<f64>, keep: Keep) -> Checkpoint {
    store.save(&Metadata { step, val_loss, ..Metadata::default() }, keep, write_files(step)).unwrap()
}

fn keep_all() -> Keep {
    Keep { last: 100, best: true }
}

fn steps(store: &Store) -> Vec<u64> {
    store.list().unwrap().iter().map(|checkpoint| checkpoint.metadata.step).collect()
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn store_in_new_run() -> (tempfile::TempDir, Store) {
    let run = tempfile::tempdir().unwrap();
    let store = Store::open_to_write(run.path()).unwrap();
    (run, store)
}

#[test]
fn metadata_reads_back_bit_for_bit() {
    let (run, store) = store_in_new_run();
    let mut metadata = Metadata { step: 7, val_loss: Some(0.1 + 0.2), ..Metadata::default() };
    metadata.extra.insert("tokens".to_owned(), u64::MAX.into());
    metadata.extra.insert("best_loss".to_owned(), 1.234_567_890_123_456_7e-5.into());
    let saved = store.save(&metadata, keep_all(), write_files(7)).unwrap();
    assert_eq!(saved.path, run.path().join("checkpoints/step-00000007"));
    let found = Store::open(run.path()).latest().unwrap().unwrap();
    assert_eq!((&found.metadata, &found), (&metadata, &saved));
    // Any program can read the manifest's JSON.
    let manifest = fs::read(saved.path.join(MANIFEST_FILE)).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["manifest"]["files"][1]["path"], "state/optimizer.safetensors");
    assert_eq!(manifest["manifest"]["files"][0]["bytes"], 800);
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let (_run, store) = store_in_new_run();
    let keep = Keep { last: 2, best: true };
    for (step, val_loss) in
        [(10, Some(3.0)), (20, Some(1.0)), (30, Some(f64::NAN)), (40, None), (50, Some(1.0)), (60, Some(2.0))]
    {
        save(&store, step, val_loss, keep);
    }
    // The first of equally good ones is kept.
    assert_eq!(steps(&store), [20, 50, 60]);
    assert_eq!(store.best().unwrap().unwrap().metadata.step, 20);
    assert_eq!(store.latest().unwrap().unwrap().metadata.step, 60);
    save(&store, 70, Some(0.5), Keep { last: 0, best: false });
    assert_eq!(steps(&store), [70]);
}

#[test]
fn best_is_the_latest_when_nothing_was_evaluated() {
    let (_run, store) = store_in_new_run();
    assert_eq!(store.best().unwrap(), None);
    save(&store, 1, None, keep_all());
    save(&store, 2, Some(f64::INFINITY), keep_all());
    assert_eq!(store.best().unwrap().unwrap().metadata.step, 2);
}

#[test]
fn every_flipped_bit_and_cut_is_found_and_the_file_named() {
    let (_run, store) = store_in_new_run();
    save(&store, 1, None, keep_all());
    let newest = save(&store, 2, None, keep_all());
    for name in ["model.safetensors", "state/optimizer.safetensors", MANIFEST_FILE] {
        let path = newest.path.join(name);
        let whole = fs::read(&path).unwrap();
        for bit in (0..whole.len() * 8).step_by(61) {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, damaged).unwrap();
            assert!(store.find(2).unwrap_err().to_string().contains(name), "{name}, bit {bit}");
        }
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(store.find(2).unwrap_err().to_string().contains(name));
        fs::remove_file(&path).unwrap();
        assert!(store.find(2).unwrap_err().to_string().contains(name));
        assert_eq!(store.latest().unwrap().unwrap().metadata.step, 1);
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(store.latest().unwrap().unwrap().metadata.step, 2);
    assert_eq!(store.find(3).unwrap(), None);
}

#[test]
fn a_manifest_that_points_outside_is_refused() {
    let (_run, store) = store_in_new_run();
    let checkpoint = save(&store, 1, None, keep_all());
    let path = checkpoint.path.join(MANIFEST_FILE);
    let text = fs::read_to_string(&path).unwrap();
    let line = text.strip_prefix("{\"manifest\":").unwrap().split(",\n").next().unwrap();
    for outside in ["../model.safetensors", "/etc/passwd", "state/../../x", "", "state//x", "C:x", "a\\\\b"] {
        let line = line.replace("model.safetensors", outside);
        let seal = xxhash_rust::xxh3::xxh3_128(line.as_bytes());
        fs::write(&path, format!("{{\"manifest\":{line},\n\"xxh3\":\"{seal:032x}\"}}\n")).unwrap();
        let error = store.find(1).unwrap_err().to_string();
        assert!(error.contains("outside the checkpoint"), "{outside}: {error}");
    }
}

#[test]
fn what_others_put_there_is_never_deleted() {
    let (run, store) = store_in_new_run();
    let dir = run.path().join(CHECKPOINTS_DIR);
    let with_notes = save(&store, 1, None, keep_all());
    fs::write(with_notes.path.join("notes.txt"), "mine").unwrap();
    for foreign in
        [".tmp-mine", "step-1", "step-00000002-copy", ".tmp-save-mine", ".tmp-delete-step-2", "step-00000009"]
    {
        fs::create_dir(dir.join(foreign)).unwrap();
        fs::write(dir.join(foreign).join("model.safetensors"), "theirs").unwrap();
    }
    let before = names_in(&dir);
    drop(store);
    let store = Store::open_to_write(run.path()).unwrap();
    for step in [3, 4, 5] {
        save(&store, step, None, Keep { last: 1, best: true });
    }
    let mut after = names_in(&dir);
    after.retain(|name| name != "step-00000005");
    assert_eq!(after, before);
    assert_eq!(fs::read_to_string(with_notes.path.join("notes.txt")).unwrap(), "mine");
    // Nor when a save needs its name.
    save(&store, 1, None, keep_all());
    save(&store, 9, None, keep_all());
    assert_eq!(fs::read_to_string(dir.join("step-00000001.old/notes.txt")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(dir.join("step-00000009.old/model.safetensors")).unwrap(), "theirs");
    assert_eq!(store.latest().unwrap().unwrap().metadata.step, 9);
}

#[test]
fn a_checkpoint_of_the_same_step_is_replaced() {
    let (run, store) = store_in_new_run();
    save(&store, 5, Some(2.0), keep_all());
    save(&store, 5, Some(1.0), keep_all());
    assert_eq!(store.find(5).unwrap().unwrap().metadata.val_loss, Some(1.0));
    assert_eq!(names_in(&run.path().join(CHECKPOINTS_DIR)), ["step-00000005"]);
}

#[test]
fn a_full_disk_at_any_operation_is_one_error_and_leaves_the_older_checkpoint() {
    for failing in 0.. {
        let run = tempfile::tempdir().unwrap();
        save(&Store::open_to_write(run.path()).unwrap(), 100, None, keep_all());
        let count = AtomicU64::new(0);
        // Only this operation fails; ENOSPC is 28 on all common Unix systems.
        let store = Store::open_with(
            run.path(),
            Disk::with_hook(move |_, _| {
                let is_full = count.fetch_add(1, Ordering::Relaxed) == failing;
                if is_full { Err(io::Error::from_raw_os_error(28)) } else { Ok(()) }
            }),
        );
        let result = store.unwrap().save(&metadata(200), keep_all(), write_files(200));
        let store = Store::open(run.path());
        let Err(error) = result else {
            assert_eq!(steps(&store), [100, 200]);
            break;
        };
        let message = error.to_string();
        assert!(message.contains("step 200") && message.contains("free some space"), "{message}");
        let names = names_in(&run.path().join(CHECKPOINTS_DIR));
        assert!(!names.iter().any(|name| name.starts_with(".tmp")), "failed at {failing}: {names:?}");
        assert_eq!(store.find(100).unwrap().unwrap().metadata.step, 100);
    }
}

#[test]
fn an_error_of_the_writer_is_passed_on_and_nothing_stays() {
    let (run, store) = store_in_new_run();
    save(&store, 1, None, keep_all());
    let result = store.save(&metadata(2), keep_all(), |dir| {
        fs::write(dir.join("model.safetensors"), "half")?;
        Err::<(), _>(io::Error::other("tensor 3: no space"))
    });
    let message = result.unwrap_err().to_string();
    assert!(message.contains("step 2") && message.contains("tensor 3: no space"), "{message}");
    assert_eq!(names_in(&run.path().join(CHECKPOINTS_DIR)), ["step-00000001"]);
}

#[test]
#[cfg(unix)]
fn links_are_not_checkpoint_files() {
    let (_run, store) = store_in_new_run();
    let result = store.save(&metadata(2), keep_all(), |dir| std::os::unix::fs::symlink("/etc/hostname", dir.join("x")));
    assert!(result.unwrap_err().to_string().contains("not a plain file"));
}

/// This test needs the right to mount. Without it the test says so and passes.
#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_is_really_full_leaves_the_older_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let mount = |arguments: &[&str]| {
        std::process::Command::new("mount").args(arguments).arg(run.path()).stderr(std::process::Stdio::null()).status()
    };
    if !mount(&["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).is_ok_and(|status| status.success()) {
        eprintln!("not tested: cannot mount a small file system here");
        return;
    }
    let store = Store::open_to_write(run.path()).unwrap();
    save(&store, 1, None, keep_all());
    for kib in [100, 240, 300] {
        let result = store.save(&metadata(2), keep_all(), |dir| {
            fs::write(dir.join("small"), vec![1; 1000])?;
            fs::write(dir.join("model.safetensors"), vec![7; kib << 10])
        });
        assert_eq!(result.is_err(), kib > 200, "{kib} KiB");
        assert!(result.is_ok() || result.unwrap_err().to_string().contains("No space left"));
        assert_eq!(store.find(1).unwrap().unwrap().metadata.step, 1);
        assert!(!names_in(&run.path().join(CHECKPOINTS_DIR)).iter().any(|name| name.starts_with('.')));
        for checkpoint in store.list().unwrap().iter().filter(|checkpoint| checkpoint.metadata.step == 2) {
            store.delete(checkpoint).unwrap();
        }
    }
    drop(store);
    let unmounted = std::process::Command::new("umount").arg(run.path()).status().unwrap();
    assert!(unmounted.success());
}

#[test]
fn two_trainers_cannot_have_one_run() {
    let (run, store) = store_in_new_run();
    assert!(matches!(Store::open_to_write(run.path()), Err(StoreError::Locked { .. })));
    save(&store, 1, None, keep_all());
    assert_eq!(steps(&Store::open(run.path())), [1]);
    drop(store);
    Store::open_to_write(run.path()).unwrap();
}

#[test]
fn later_checkpoints_are_discarded_when_an_older_one_is_taken_up() {
    let (run, store) = store_in_new_run();
    for step in [1, 2, 3, 4] {
        save(&store, step, None, keep_all());
    }
    store.discard_after(2).unwrap();
    assert_eq!(names_in(&run.path().join(CHECKPOINTS_DIR)), ["step-00000001", "step-00000002"]);
}

#[test]
fn runs_checkpoints_and_models_are_told_apart() {
    let (run, store) = store_in_new_run();
    let out = run.path();
    let error = |path: &Path| resolve_run(path, Pick::Latest).unwrap_err().to_string();
    assert!(error(out).contains("no complete checkpoint yet"));
    assert!(error(&out.join("missing")).contains("missing"));
    assert!(error(&out.join(LOCK_FILE)).contains("not a folder"));
    save(&store, 1, Some(1.0), keep_all());
    let latest = save(&store, 2, Some(2.0), keep_all());
    let resolved = resolve_run(out, Pick::Latest).unwrap();
    assert_eq!((resolved.run_dir.as_deref(), &resolved.model_dir), (Some(out), &latest.path));
    assert_eq!(resolve_run(out, Pick::Best).unwrap().checkpoint.unwrap().metadata.step, 1);
    let resolved = resolve_run(&latest.path, Pick::Best).unwrap();
    assert_eq!(resolved.run_dir.unwrap(), fs::canonicalize(out).unwrap());
    assert_eq!(resolved.checkpoint.unwrap().metadata.step, 2);
    // A checkpoint that was copied elsewhere is found by itself; a damaged one is named.
    let copied = out.join("copied");
    fs::rename(&latest.path, &copied).unwrap();
    let resolved = resolve_run(&copied, Pick::Latest).unwrap();
    assert_eq!((resolved.run_dir, resolved.checkpoint.unwrap().metadata.step), (None, 2));
    fs::write(copied.join("model.safetensors"), "x").unwrap();
    assert!(error(&copied).contains("copied/model.safetensors: 1 bytes long, 800 were written"));
    let model = out.join("model");
    fs::create_dir(&model).unwrap();
    assert!(error(&model).contains("an empty folder"));
    fs::write(model.join("notes.txt"), "x").unwrap();
    assert!(error(&model).contains("neither a run"), "{}", error(&model));
    fs::write(model.join("config.json"), "{}").unwrap();
    let resolved = resolve_run(&model, Pick::Latest).unwrap();
    assert_eq!((resolved.run_dir, resolved.checkpoint, resolved.model_dir), (None, None, model));
}

#[test]
fn the_newest_run_is_the_one_written_last_that_can_be_gone_on_with_or_begun_again() {
    let out = tempfile::tempdir().unwrap();
    assert_eq!(newest_run(&out.path().join("missing")).unwrap(), None);
    assert_eq!(newest_run(out.path()).unwrap(), None);
    let at = |name: &str, seconds: u64, has_checkpoint: bool| {
        let run = out.path().join(name);
        let store = Store::open_to_write(&run).unwrap();
        if has_checkpoint {
            save(&store, 1, None, keep_all());
        }
        let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        File::open(run.join(CHECKPOINTS_DIR)).unwrap().set_modified(time).unwrap();
        run
    };
    at("c", 100, true);
    let newest = at("a", 300, true);
    at("b", 200, true);
    at("d", 400, false);
    fs::create_dir(out.path().join("not-a-run")).unwrap();
    fs::write(out.path().join("file"), "").unwrap();
    assert_eq!(newest_run(out.path()).unwrap(), Some(newest));
    // A run with a configuration but no checkpoint can start again, but not one that lost its checkpoints.
    let begun = at("e", 500, false);
    fs::write(begun.join(CONFIG_FILE), "").unwrap();
    let damaged = at("f", 600, false);
    fs::write(damaged.join(CONFIG_FILE), "").unwrap();
    fs::create_dir(damaged.join(CHECKPOINTS_DIR).join("step-00000001")).unwrap();
    assert_eq!(newest_run(out.path()).unwrap(), Some(begun));
}

/// This is not a test of its own: the next test starts and kills it.
#[test]
#[ignore = "run by the test below in a process of its own"]
fn child_that_saves_until_it_is_killed() {
    let Some(run_dir) = std::env::var_os("MOEWORKS_TEST_RUN_DIR") else { return };
    let store = Store::open_to_write(Path::new(&run_dir)).unwrap();
    let first = store.latest().unwrap().map_or(0, |checkpoint| checkpoint.metadata.step) + 1;
    for step in first.. {
        store
            .save(&metadata(step), Keep { last: 1, best: true }, |dir| {
                (0..5).try_for_each(|file| fs::write(dir.join(format!("{file}.bin")), vec![step as u8; 100_000]))
            })
            .unwrap();
    }
}

#[test]
fn kill_9_at_any_moment_leaves_a_whole_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let random = moeworks_tensor::Random::new(2026, moeworks_tensor::Purpose::Test, 0);
    let mut newest = 0;
    for round in 0..25 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "store::tests::child_that_saves_until_it_is_killed"])
            .env("MOEWORKS_TEST_RUN_DIR", run.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let micros = 5_000 + random.below(round, 40_000);
        std::thread::sleep(std::time::Duration::from_micros(micros));
        child.kill().unwrap();
        child.wait().unwrap();
        let found = Store::open(run.path()).latest().unwrap().map_or(0, |checkpoint| checkpoint.metadata.step);
        assert!(found >= newest, "round {round}: step {newest} was lost, {found} is left");
        newest = found;
    }
    assert!(newest > 0, "no child lived long enough to save");
    let store = Store::open_to_write(run.path()).unwrap();
    assert_eq!(names_in(&run.path().join(CHECKPOINTS_DIR)).len(), steps(&store).len());
}
