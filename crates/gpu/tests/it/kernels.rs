//! Kernels for GPUs: that they compile, for every architecture, where there is no GPU.

use std::fs;
use std::path::{Path, PathBuf};

use moeworks_gpu::{Gpu, GpuError, GpuOptions, Nvrtc, SOURCES, Target};

/// Ampere, Hopper, Blackwell.
const CAPABILITIES: [u32; 3] = [80, 90, 100];

/// NVRTC from the environment, from the Python wheels that `./test` installs, or from the system.
fn compiler() -> Option<Nvrtc> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let environments = [".venv-cuda", ".venv-test"].map(|name| root.join(name).join("lib"));
    let packages = environments.iter().flat_map(|lib| entries(lib)).map(|python| python.join("site-packages/nvidia"));
    let folders = packages.flat_map(|nvidia| entries(&nvidia)).map(|package| package.join("lib"));
    let wheels = folders
        .flat_map(|lib| entries(&lib))
        .filter(|file| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so")));
    let options = &GpuOptions::for_tests();
    let named = options.nvrtc_library.clone();
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(PathBuf::from);
    let found = named.into_iter().chain(wheels).chain(names).find_map(|path| Nvrtc::open(&path, options).ok());
    if found.is_none() {
        eprintln!("SKIPPED: compiling the kernels for GPUs (no NVRTC; `./test` installs it)");
    }
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(compiler) = compiler() else { return };
    let targets = CAPABILITIES.map(Target::real).into_iter();
    let all = targets.flat_map(|target| SOURCES.iter().map(move |source| (*source, target)));
    let jobs: Vec<_> = all.filter(|&(source, target)| source.is_for(target)).collect();
    let cubins = compiler.compile_all(&jobs);
    assert_eq!(cubins.len(), jobs.len());
    for ((source, target), cubin) in jobs.iter().zip(cubins) {
        let cubin = cubin.unwrap_or_else(|error| panic!("{error}"));
        assert!(cubin.starts_with(b"\x7fELF"), "{}.cu for {target} is no cubin", source.name);
        for kernel in source.kernels {
            let symbol = format!("\0{kernel}\0").into_bytes();
            let is_there = cubin.windows(symbol.len()).any(|window| window == symbol);
            assert!(is_there, "{}.cu for {target} has no kernel {kernel}", source.name);
        }
    }
}

#[test]
fn every_kernel_waits_for_those_before_it_prior_to_memory() {
    let Some(compiler) = compiler() else { return };
    let target = Target { is_virtual: true, ..Target::real(90) };
    let jobs: Vec<_> = SOURCES.iter().map(|source| (*source, target)).collect();
    for (source, ptx) in SOURCES.iter().zip(compiler.compile_all(&jobs)) {
        let ptx = ptx.unwrap_or_else(|error| panic!("{error}"));
        let ptx = String::from_utf8_lossy(&ptx);
        let entries: Vec<&str> = ptx.split(".visible .entry ").skip(1).collect();
        assert_eq!(entries.len(), source.kernels.len(), "kernels of {}.cu", source.name);
        for entry in entries {
            let name = entry.split('(').next().unwrap_or_default();
            let wait = entry.find("griddepcontrol.wait").unwrap_or_else(|| panic!("{name} does not wait"));
            let touches =
                ["ld.global", "st.global", "atom.", "red.global", "cp.async", "ld.v", "ld.u", "ld.f", "ld.b", "st.v"];
            let first = touches.iter().filter_map(|touch| entry.find(touch)).min().unwrap_or(entry.len());
            assert!(wait < first, "{name} touches memory before it waits");
            // What is read so must not change from the first block on, which comes before earlier kernels are done.
            assert!(!entry.contains("ld.global.nc"), "{name} reads memory as if nobody wrote it before");
        }
    }
}

#[test]
fn no_file_of_kernels_is_missing_from_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
    for file in entries(&folder).iter().filter(|file| file.extension().is_some_and(|ending| ending == "cu")) {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let source = SOURCES.iter().find(|source| source.file == name);
        let source = source.unwrap_or_else(|| panic!("{name}.cu is not in `SOURCES`"));
        assert!(!source.kernels.is_empty(), "{name}.cu has no kernels");
    }
}

#[test]
fn a_device_newer_than_the_compiler_gets_ptx_of_the_newest_that_it_knows() {
    let Some(compiler) = compiler() else { return };
    assert_eq!(compiler.target_for(90).to_string(), "sm_90a");
    let target = compiler.target_for(999);
    assert!(target.is_virtual && target.capability < 999);
    let ptx = compiler.compile(SOURCES[0], target).unwrap_or_else(|error| panic!("{error}"));
    assert!(String::from_utf8_lossy(&ptx).contains(".visible .entry"), "PTX with kernels");
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    let options = &GpuOptions::for_tests();
    if let Err(error) = Gpu::open(0, options) {
        let line = error.to_string();
        assert!(!line.contains('\n') && line.len() < 400, "{line}");
    }
    assert!(matches!(
        Gpu::open(4096, options),
        Err(GpuError::NoDriver | GpuError::NoDevice { index: 4096, .. } | GpuError::Driver { .. })
    ));
    let error = Nvrtc::open(Path::new("no/such/libnvrtc.so"), options).err().expect("there is no such library");
    assert!(error.to_string().contains("no/such/libnvrtc.so"), "{error}");
}
