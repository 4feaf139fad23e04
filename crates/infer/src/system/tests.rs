use std::fs;
use std::path::Path;

use super::*;

/// A system with these files.
fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let system = System::from_root(dir.path());
    (dir, system)
}

#[test]
fn a_system_that_says_nothing_is_not_known() {
    let (_dir, system) = system(&[]);
    assert_eq!(system.processors(), Processors::default());
    assert_eq!(system.memory(), None);
    assert_eq!(system.usable_memory_bytes(), None);
    assert_eq!(system.huge_pages(), None);
    assert_eq!(system.container_limits(), ContainerLimits::default());
}

#[test]
fn threads_of_a_core_are_one_core() {
    let processor = |number: u32, core: u32| {
        format!(
            "processor\t: {number}\nmodel name\t: Example 9000\nphysical id\t: 0\ncore id\t\t: {core}\nflags\t\t: fpu avx avx2 fma f16c avx512f amx_tile nonsense\n"
        )
    };
    let text = [processor(0, 0), processor(1, 1), processor(2, 0), processor(3, 1)].join("\n");
    let (_dir, system) = system(&[("proc/cpuinfo", &text)]);
    let processors = system.processors();
    assert_eq!(processors.model.as_deref(), Some("Example 9000"));
    assert_eq!((processors.num_logical, processors.num_physical), (4, Some(2)));
    assert_eq!(processors.instructions, ["avx", "avx2", "fma", "f16c", "avx512f", "amx_tile"]);
}

#[test]
fn an_aarch64_machine_has_no_name_and_says_nothing_of_cores() {
    let text = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU part\t: 0xd40\n\nprocessor\t: 1\nFeatures\t: fp asimd bf16 sve\n";
    let (_dir, system) = system(&[("proc/cpuinfo", text)]);
    let processors = system.processors();
    assert_eq!((processors.model, processors.num_logical, processors.num_physical), (None, 2, None));
    assert_eq!(processors.instructions, ["asimd", "bf16", "sve"]);
}

#[test]
fn memory_is_in_bytes_and_huge_pages_are_what_stands_in_brackets() {
    let meminfo =
        "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    9000 kB\nSwapTotal:         0 kB\n";
    let pages = "sys/kernel/mm/transparent_hugepage/enabled";
    let (_dir, system) = system(&[("proc/meminfo", meminfo), (pages, "always [madvise] never\n")]);
    let memory = Memory { total_bytes: 16_000 << 10, available_bytes: 9000 << 10, swap_bytes: 0 };
    assert_eq!(system.memory(), Some(memory));
    assert_eq!(system.huge_pages(), Some(HugePages::Madvise));
}

#[test]
fn limits_of_groups_around_a_group_count_in_version_2() {
    let (_dir, system) = system(&[
        ("proc/meminfo", "MemTotal: 16000 kB\n"),
        ("proc/self/cgroup", "0::/work.slice/job.scope\n"),
        ("sys/fs/cgroup/work.slice/memory.max", "8192000\n"),
        ("sys/fs/cgroup/work.slice/cpu.max", "max 100000\n"),
        ("sys/fs/cgroup/work.slice/job.scope/memory.max", "max\n"),
        ("sys/fs/cgroup/work.slice/job.scope/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/work.slice/job.scope/pids.max", "500\n"),
    ]);
    let limits = ContainerLimits { memory_bytes: Some(8_192_000), cores: Some(1.5), num_threads: Some(500) };
    assert_eq!(system.container_limits(), limits);
    assert_eq!(system.usable_memory_bytes(), Some(8_192_000));
}

#[test]
fn a_container_of_version_1_sees_its_limits_at_the_root() {
    let (_dir, system) = system(&[
        ("proc/meminfo", "MemTotal: 16000 kB\n"),
        ("proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n"),
        ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ("sys/fs/cgroup/pids/pids.max", "max\n"),
    ]);
    let limits = ContainerLimits { memory_bytes: None, cores: Some(0.5), num_threads: None };
    assert_eq!(system.container_limits(), limits);
    assert_eq!(system.usable_memory_bytes(), Some(16_000 << 10));
}

#[test]
fn a_file_system_is_the_one_mounted_nearest() {
    let mounts = "22 1 0:20 / / rw - overlay overlay rw\n23 22 8:1 / /data rw shared:1 - ext4 /dev/sda1 rw\n\
                  24 23 0:30 / /data/my\\040runs rw - nfs4 server:/x rw\n";
    let (_dir, system) = system(&[("proc/self/mountinfo", mounts)]);
    let kind = |path: &str| system.mount_kind(Path::new(path));
    assert_eq!(kind("/home").as_deref(), Some("overlay"));
    assert_eq!(kind("/data/x").as_deref(), Some("ext4"));
    assert_eq!(kind("/database").as_deref(), Some("overlay"));
    assert_eq!(kind("/data/my runs/a").as_deref(), Some("nfs4"));
}

#[cfg(unix)]
#[test]
fn a_disk_has_room_also_for_folders_that_are_not_there_yet() {
    let dir = tempfile::tempdir().unwrap();
    let disk = System::default().disk(&dir.path().join("runs/today")).unwrap();
    assert!(disk.total_bytes >= disk.free_bytes && disk.total_bytes > 0);
}
