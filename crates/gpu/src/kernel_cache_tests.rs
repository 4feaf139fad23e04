use std::fs;
use std::path::Path;

use super::{GpuError, path, write_whole};

#[test]
fn a_name_depends_on_every_part_and_where_parts_end() {
    let of = |parts: &[&str]| path(Path::new("x"), "k", parts, "cubin");
    assert_eq!(of(&["a", "b"]), of(&["a", "b"]));
    for other in [&["a", "c"][..], &["ab", ""], &["ab"], &["b", "a"]] {
        assert_ne!(of(&["a", "b"]), of(other));
    }
}

#[test]
fn a_file_is_there_whole_or_not_at_all() {
    let folder = std::env::temp_dir().join(format!("moeworks-cache-test-{}", std::process::id()));
    let file = folder.join("k.cubin");
    let write = |bytes: &'static [u8]| {
        move |path: &Path| {
            fs::write(path, bytes).unwrap();
            Ok(())
        }
    };
    write_whole(&file, write(b"first")).unwrap();
    let failure = GpuError::NoDriver;
    let failing = |path: &Path| {
        fs::write(path, b"half").unwrap();
        Err(failure.clone())
    };
    assert_eq!(write_whole(&file, failing), Err(failure.clone()));
    assert_eq!(fs::read(&file).unwrap(), b"first");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing half-written is left");
    fs::remove_dir_all(&folder).unwrap();
}
