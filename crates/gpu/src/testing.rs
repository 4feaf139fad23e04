//! The GPUs that tests run on.

use std::sync::{Once, OnceLock};

use crate::{Emulation, Gpu, GpuError, GpuOptions};

impl GpuOptions {
    /// Returns the options that the environment variables of a test name.
    #[must_use]
    pub fn for_tests() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }
}

impl Gpu {
    /// Returns the devices that tests of operations run on besides the CPU, each with a name: the emulation of an
    /// older GPU and of Hopper, and the first GPU. Says once which of them are missing.
    ///
    /// A test has one of them in the usual order of a block's threads and the other one in reverse. Which one is
    /// reversed follows from the test's name, so that each kernel meets both orders in some test. With
    /// `MOEWORKS_FULL` a test has both in both orders; `MOEWORKS_NO_EMULATION` leaves the emulation out.
    ///
    /// # Panics
    ///
    /// If the kernels do not compile for the emulation.
    #[must_use]
    pub fn for_tests() -> Vec<(&'static str, Self)> {
        static SKIPPED: Once = Once::new();
        // A device without handles is closed, and takes a second to open again.
        static KEPT: OnceLock<Result<Gpu, GpuError>> = OnceLock::new();
        let options = &GpuOptions::for_tests();
        let _ = KEPT.get_or_init(|| Self::open(0, options));
        let emulation = |is_reversed, is_hopper| match std::env::var_os("MOEWORKS_NO_EMULATION") {
            Some(_) => Err(GpuError::NoEmulation { reason: "MOEWORKS_NO_EMULATION is set".into() }),
            None => Self::emulated(Emulation { is_reversed, is_hopper, ..Emulation::default() }, options),
        };
        let all_emulations = [
            ("emulated GPU", false, false),
            ("emulated Hopper in reverse", true, true),
            ("emulated GPU in reverse", true, false),
            ("emulated Hopper", false, true),
        ];
        let emulations = match std::env::var_os("MOEWORKS_FULL") {
            Some(_) => &all_emulations[..],
            None if has_even_name() => &all_emulations[..2],
            None => &all_emulations[2..],
        };
        let emulations =
            emulations.iter().map(|&(name, is_reversed, is_hopper)| (name, emulation(is_reversed, is_hopper)));
        let all: Vec<_> = emulations.chain([("GPU", Self::open(0, options))]).collect();
        // A compiler that is missing is no failure, one that finds an error is.
        for (name, gpu) in &all {
            if let Err(error @ GpuError::Compile { .. }) = gpu {
                panic!("{name}: {error}");
            }
        }
        let (there, missing): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, gpu)| gpu.is_ok());
        SKIPPED.call_once(|| {
            for (name, error) in missing.iter().filter_map(|(name, gpu)| Some((name, gpu.as_ref().err()?))) {
                eprintln!("SKIPPED: the operations' tests on the {name}: {error}");
            }
        });
        there.into_iter().filter_map(|(name, gpu)| Some((name, gpu.ok()?))).collect()
    }

    /// Returns the device for a test that needs any GPU: the first one, or else the emulation.
    ///
    /// # Errors
    ///
    /// The reason why there is no emulation.
    pub fn for_a_test() -> Result<Self, GpuError> {
        let options = &GpuOptions::for_tests();
        Self::open(0, options).or_else(|_| Self::emulated(Emulation::default(), options))
    }
}

/// Returns whether the bytes of this thread's name, which is that of the test, have an even sum.
fn has_even_name() -> bool {
    let thread = std::thread::current();
    thread.name().unwrap_or_default().bytes().fold(true, |is_even, byte| is_even == byte.is_multiple_of(2))
}
