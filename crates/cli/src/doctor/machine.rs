//! Checks of the host: processors, memory, disks, limits and the terminal.

use std::fs;
use std::io::IsTerminal as _;
use std::path::Path;

use moeworks_infer::system::{ContainerLimits, HugePages, System, limits};
use moeworks_ops::Isa;
use moeworks_train::config::RunConfig;
use serde_json::json;

use super::{Finding, State};
use crate::environment;
use crate::progress::bytes;
use crate::version;

/// The memory below which hardly any useful model can be trained.
const LITTLE_MEMORY: u64 = 1 << 30;
/// The free disk space below which a checkpoint of a small model may not fit.
const LITTLE_DISK: u64 = 1 << 30;
/// The number of open files that a model of many shards, several ranks and a cache may need.
const FEW_FILES: u64 = 1024;

/// Checks the host.
pub(super) fn look() -> Vec<Finding> {
    let system = System::default();
    let limits = system.container_limits();
    let mut findings = vec![processors(&system), kernels(&system), memory(&system, &limits)];
    findings.extend(container(&limits));
    findings.extend(huge_pages(&system));
    findings.push(runs(&system));
    findings.push(cache(&system));
    findings.push(open_files());
    findings.push(terminal());
    findings
}

fn processors(system: &System) -> Finding {
    let found = system.processors();
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let model = found.model.unwrap_or_else(|| format!("a processor of {}", std::env::consts::ARCH));
    let physical = found.num_physical.map_or_else(String::new, |count| format!(" on {count} physical cores"));
    let text =
        format!("{model}: {} threads{physical}, {usable} of them for this process", found.num_logical.max(usable));
    Finding::new(State::Ok, "processor", text).with_facts(json!({
        "model": model, "logical": found.num_logical, "physical": found.num_physical, "usable": usable,
    }))
}

fn kernels(system: &System) -> Finding {
    let found = system.processors().instructions;
    let listed = if found.is_empty() { String::new() } else { format!("; the processor has {}", found.join(" ")) };
    let isa = environment::machine().isa();
    let facts = json!({ "kernels": format!("{isa:?}"), "instructions": found });
    let text = format!("kernels: {}{listed}", version::kernels());
    let finding = Finding::new(State::Ok, "instructions", text).with_facts(facts);
    if isa > Isa::Portable {
        return finding;
    }
    let advice =
        "kernels are fast with AVX2 and FMA or newer; a virtual machine may hide them: give it the host's processor";
    Finding { state: State::Note, ..finding }.advise(advice)
}

fn memory(system: &System, limits: &ContainerLimits) -> Finding {
    let Some(memory) = system.memory() else {
        return Finding::new(State::Note, "memory", "not known: this system does not say how much there is");
    };
    let usable = limits.memory_bytes.map_or(memory.available_bytes, |limit| limit.min(memory.available_bytes));
    let swap = if memory.swap_bytes > 0 { format!(", swap {}", bytes(memory.swap_bytes)) } else { String::new() };
    let text = format!("{} in all, {} free for programs{swap}", bytes(memory.total_bytes), bytes(usable));
    let facts = json!({ "total": memory.total_bytes, "available": memory.available_bytes, "swap": memory.swap_bytes });
    let finding = Finding::new(State::Ok, "memory", text).with_facts(facts);
    if usable >= LITTLE_MEMORY {
        return finding;
    }
    let advice =
        "end other programs, or take a smaller model: `moeworks estimate` and `moeworks inspect` say what one needs";
    Finding { state: State::Note, ..finding }.advise(advice)
}

/// Checks the limits of the container, if there is one.
fn container(limits: &ContainerLimits) -> Option<Finding> {
    let ContainerLimits { memory_bytes, cores, num_threads } = *limits;
    let said = [
        memory_bytes.map(|limit| format!("memory {}", bytes(limit))),
        cores.map(|cores| format!("{cores:.1} cores")),
        num_threads.map(|count| format!("{count} processes and threads")),
    ];
    let said: Vec<String> = said.into_iter().flatten().collect();
    let facts = json!({ "memory": memory_bytes, "cores": cores, "threads": num_threads });
    let text = || format!("this process is in a control group that is limited to {}", said.join(", "));
    (!said.is_empty()).then(|| Finding::new(State::Ok, "container", text()).with_facts(facts))
}

fn huge_pages(system: &System) -> Option<Finding> {
    // Tensors ask the system for huge pages.
    let text = match system.huge_pages()? {
        HugePages::Always => "always: large tensors have pages of 2 MB",
        HugePages::Madvise => "madvise: programs that ask have pages of 2 MB, as this one does for its tensors",
        HugePages::Never => {
            let text = "never: all memory is in pages of 4 kB, in which large tensors are read more slowly";
            let advice = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
            return Some(Finding::new(State::Note, "huge pages", text).advise(advice));
        }
    };
    Some(Finding::new(State::Ok, "huge pages", text))
}

/// Checks the folder of runs.
fn runs(system: &System) -> Finding {
    let out = RunConfig::default().run.out;
    place(system, "runs", &out, "start in another folder, or give --out")
}

/// Checks the folders for tokenized data.
fn cache(system: &System) -> Finding {
    let place_of_cache = RunConfig::default().cache_place(environment::cache_folder().as_deref());
    let folders = place_of_cache.folders();
    let advice = "set data.cache_dir, or XDG_CACHE_HOME, to a folder that can be written";
    let mut findings = folders.iter().map(|folder| place(system, "cache", folder, advice));
    let first = findings.next().unwrap_or_else(|| Finding::new(State::Missing, "cache", "there is no folder for it"));
    if first.state != State::Missing {
        return first;
    }
    // The next folder is used if this one cannot be written.
    findings.find(|finding| finding.state != State::Missing).unwrap_or(first)
}

/// Checks whether a folder can be written, and the free space on its disk.
fn place(system: &System, topic: &'static str, folder: &Path, advice: &str) -> Finding {
    let shown = folder.display();
    if let Err(error) = try_to_write(folder) {
        return Finding::new(State::Missing, topic, format!("{shown} cannot be written: {error}")).advise(advice);
    }
    let disk = match system.disk(folder) {
        Ok(disk) => disk,
        Err(error) => {
            return Finding::new(State::Note, topic, format!("{shown} can be written; its disk is not known: {error}"));
        }
    };
    let kind = disk.kind.as_deref().map_or_else(String::new, |kind| format!(" ({kind})"));
    let text =
        format!("{shown} can be written; {} of {} are free{kind}", bytes(disk.free_bytes), bytes(disk.total_bytes));
    let facts = json!({ "path": folder, "free": disk.free_bytes, "total": disk.total_bytes, "kind": disk.kind });
    let finding = Finding::new(State::Ok, topic, text).with_facts(facts);
    if disk.free_bytes >= LITTLE_DISK {
        return finding;
    }
    Finding { state: State::Note, ..finding }.advise(format!("make room, or {advice}"))
}

/// Tries to write into `folder`, or into its nearest existing ancestor if it does not exist yet.
fn try_to_write(folder: &Path) -> std::io::Result<()> {
    let folder = std::path::absolute(folder)?;
    let place = folder.ancestors().find(|place| place.exists()).unwrap_or(&folder);
    let probe = place.join(format!(".moeworks-doctor-{}", std::process::id()));
    fs::create_dir(&probe)?;
    fs::remove_dir(&probe)
}

fn open_files() -> Finding {
    let [files, threads] = limits();
    let said = |limit: Option<u64>| limit.map_or_else(|| "any number of".to_owned(), |limit| limit.to_string());
    let text = format!("{} open files, {} processes and threads of this user", said(files), said(threads));
    let finding = Finding::new(State::Ok, "limits", text).with_facts(json!({ "files": files, "threads": threads }));
    if files.is_none_or(|files| files >= FEW_FILES) {
        return finding;
    }
    Finding { state: State::Note, ..finding }.advise("a model of many files may need more: ulimit -n 4096")
}

fn terminal() -> Finding {
    let kind = environment::terminal();
    let is_terminal = std::io::stderr().is_terminal();
    let text = match (is_terminal, kind.as_str()) {
        (false, _) => "none: progress is shown as plain lines",
        (true, "dumb" | "") => "one that cannot move its cursor: progress is shown as plain lines",
        (true, _) => "progress is shown as a live line",
    };
    Finding::new(State::Ok, "terminal", text).with_facts(json!({ "is_terminal": is_terminal, "term": kind }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        }
        let system = System::from_root(dir.path());
        (dir, system)
    }

    #[test]
    fn little_memory_is_worth_a_note_with_what_to_do() {
        let meminfo = |available: u64| format!("MemTotal: 16000000 kB\nMemAvailable: {available} kB\n");
        let (_dir, enough) = system(&[("proc/meminfo", &meminfo(9_000_000))]);
        assert_eq!(memory(&enough, &ContainerLimits::default()).state, State::Ok);
        let (_dir, little) = system(&[("proc/meminfo", &meminfo(90_000))]);
        let finding = memory(&little, &ContainerLimits::default());
        assert!(finding.state == State::Note && finding.advice.is_some());
        let limits = ContainerLimits { memory_bytes: Some(1 << 20), ..ContainerLimits::default() };
        assert_eq!(memory(&enough, &limits).state, State::Note);
        assert!(container(&limits).is_some_and(|finding| finding.text.contains("memory 1.0 MB")));
        assert!(container(&ContainerLimits::default()).is_none());
    }

    #[test]
    fn huge_pages_that_are_not_given_are_worth_a_note() {
        let name = "sys/kernel/mm/transparent_hugepage/enabled";
        for (text, state) in [("always [madvise] never", State::Ok), ("always madvise [never]", State::Note)] {
            let (_dir, system) = system(&[(name, text)]);
            let finding = huge_pages(&system).expect("known");
            assert_eq!((finding.state, finding.advice.is_some()), (state, state == State::Note));
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_missing() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("file"), "").expect("written");
        let found = place(&System::default(), "runs", &dir.path().join("file/runs"), "do something");
        assert_eq!((found.state, found.advice.as_deref()), (State::Missing, Some("do something")));
        let found = place(&System::default(), "runs", &dir.path().join("new/runs"), "do something");
        assert_ne!(found.state, State::Missing);
        assert_eq!(fs::read_dir(dir.path()).expect("read").count(), 1, "nothing is left");
    }
}
