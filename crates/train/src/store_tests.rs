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

/// A disk that does `limit` operations and then nothing any more, as if the process had been killed.
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
        // The same step again, then a later one: replacing, saving and deleting are all in the window.
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
