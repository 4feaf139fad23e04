//! Checks of other places to compute: GPUs, and further processes by MPI. These are optional, so a missing one is
//! only a note.

use std::process::{Command, Stdio};

use moeworks_comm::mpi::{RawMpi, is_launched};
use moeworks_gpu::{Gpu, GpuError, GpuOptions, Nvrtc};
use serde_json::json;

use super::{Finding, State};
use crate::environment;
use crate::progress::bytes;

/// Checks GPUs and MPI.
pub(super) fn look() -> Vec<Finding> {
    let mut findings = gpus();
    findings.push(mpi());
    findings.push(launchers());
    findings
}

fn gpus() -> Vec<Finding> {
    let count = match Gpu::count() {
        Ok(count) => count,
        Err(GpuError::NoDriver) => {
            let text = "no NVIDIA driver: the CPU computes everything, --device cuda is refused";
            let advice =
                "if this machine has an NVIDIA GPU, install its driver (in a container: start it with --gpus all)";
            return vec![Finding::new(State::Note, "gpu", text).advise(advice)];
        }
        Err(error) => return vec![Finding::new(State::Note, "gpu", error.to_string())],
    };
    if count == 0 {
        let advice = "in a container: start it with its GPUs, as by --gpus all";
        return vec![Finding::new(State::Note, "gpu", "there is an NVIDIA driver, and no GPU").advise(advice)];
    }
    let options = environment::machine().gpu;
    let mut findings = vec![compiler(&options)];
    findings.extend(driver());
    findings.extend((0..count).map(|index| gpu(index, &options)));
    findings
}

fn compiler(options: &GpuOptions) -> Finding {
    match Nvrtc::find(options) {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            Finding::new(State::Ok, "nvrtc", format!("{major}.{minor}, which compiles the kernels"))
                .with_facts(json!({ "version": [major, minor] }))
        }
        Err(error) => Finding::new(State::Note, "nvrtc", error.to_string()),
    }
}

/// Describes the driver and the GPUs' capabilities, using the driver's own tool if it is installed.
fn driver() -> Option<Finding> {
    let query = ["--query-gpu=index,name,driver_version,compute_cap", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(query).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let first: Vec<&str> = lines.first()?.split(", ").collect();
    let [_, _, version, _] = first[..] else { return None };
    let capabilities: Vec<&str> =
        lines.iter().filter_map(|line| line.rsplit_once(", ")).map(|(_, last)| last).collect();
    let text = format!("{version}; compute capability {}", capabilities.join(", "));
    Some(Finding::new(State::Ok, "driver", text).with_facts(json!({ "version": version, "compute": capabilities })))
}

fn gpu(index: usize, options: &GpuOptions) -> Finding {
    match Gpu::open(index, options) {
        Ok(gpu) => {
            let memory = gpu.memory_bytes();
            let shown = memory.map_or_else(String::new, |memory| format!(", {} of memory", bytes(memory)));
            Finding::new(State::Ok, "gpu", format!("--device cuda:{index} is {}{shown}", gpu.name()))
                .with_facts(json!({ "index": index, "name": gpu.name(), "memory": memory }))
        }
        Err(error) => Finding::new(State::Note, "gpu", format!("--device cuda:{index} cannot be used: {error}")),
    }
}

fn mpi() -> Finding {
    let launched = if is_launched() { "; this process was started by a launcher" } else { "" };
    match RawMpi::from_run() {
        // The library's description has several lines.
        Ok(mpi) => {
            let version = mpi.version();
            let first = version.lines().next().unwrap_or_default().trim().to_owned();
            Finding::new(State::Ok, "mpi", format!("{first}{launched}")).with_facts(json!({ "version": version }))
        }
        Err(error) => {
            let text = format!("{error}{launched}");
            let advice = "only several machines need it: ranks of one machine are threads. Install Open MPI or MPICH, or set the variable";
            Finding::new(if is_launched() { State::Missing } else { State::Note }, "mpi", text).advise(advice)
        }
    }
}

/// Searches for the programs that start processes as ranks.
fn launchers() -> Finding {
    let folders = environment::program_folders();
    let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file());
    let found: Vec<String> =
        ["mpirun", "mpiexec", "srun"].into_iter().filter_map(find).map(|file| file.display().to_string()).collect();
    let text = if found.is_empty() { "none on the path (mpirun, mpiexec, srun)".to_owned() } else { found.join(", ") };
    let state = if found.is_empty() { State::Note } else { State::Ok };
    Finding::new(state, "launcher", text).with_facts(json!({ "found": found }))
}
