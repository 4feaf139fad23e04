//! The device to compute with, by the name that a user gives it.

use std::fmt;
use std::str::FromStr;

use crate::{Emulation, Gpu, GpuError, GpuOptions};

/// A device by name: `cpu`, `cuda` (the first GPU), `cuda:1`, `auto` (the first GPU if there is one), or, for tests,
/// `emulated`, `emulated-hopper` or `trace-sm90`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// The GPU with this index.
    Cuda(usize),
    /// The first GPU, or the CPU where there is none.
    Auto,
    /// The emulation of a GPU: slow, for tests.
    Emulated,
    /// The emulation of a GPU with Hopper's instructions.
    EmulatedHopper,
    /// A Hopper GPU (`sm_90`) that computes nothing and lists the launches and copies that it is asked for.
    TraceSm90,
}

/// The error for a name of no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown device {0:?}: must be cpu, cuda, cuda:N or auto")]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice(name.to_string());
        match name {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "auto" => Ok(Self::Auto),
            "emulated" => Ok(Self::Emulated),
            "emulated-hopper" => Ok(Self::EmulatedHopper),
            // The second is the name of earlier versions.
            "trace-sm90" | "listed-hopper" => Ok(Self::TraceSm90),
            _ => {
                let index = name.strip_prefix("cuda:").ok_or_else(unknown)?;
                index.parse().map(Self::Cuda).map_err(|_| unknown())
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Auto => f.write_str("auto"),
            Self::Emulated => f.write_str("emulated"),
            Self::EmulatedHopper => f.write_str("emulated-hopper"),
            Self::TraceSm90 => f.write_str("trace-sm90"),
        }
    }
}

/// The device that a choice led to.
pub struct Chosen {
    /// The GPU; none for the CPU.
    pub gpu: Option<Gpu>,
    /// The reason why `auto` is the CPU.
    pub missing: Option<GpuError>,
}

impl DeviceChoice {
    /// Returns the device of the rank `place` places after the one that has this choice. Ranks take GPUs in turn, and
    /// several ranks share a GPU where there are fewer of them. Other devices are the same for all ranks, and so is
    /// `auto` where the GPU cannot be used.
    #[must_use]
    pub fn later(self, place: usize, options: &GpuOptions) -> Self {
        let after = |first: usize| match Gpu::count() {
            Ok(count) if first < count => (first + place) % count,
            // Opening it says what is missing.
            _ => first,
        };
        match self {
            Self::Cuda(first) => Self::Cuda(after(first)),
            Self::Auto if Gpu::open(after(0), options).is_ok() => Self::Cuda(after(0)),
            _ => self,
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// If a GPU that was asked for is missing or cannot be used.
    pub fn open(self, options: &GpuOptions) -> Result<Chosen, GpuError> {
        let emulated = |emulation| Gpu::emulated(emulation, options);
        let gpu = match self {
            Self::Cpu => return Ok(Chosen { gpu: None, missing: None }),
            Self::Cuda(index) => Gpu::open(index, options)?,
            Self::Emulated => emulated(Emulation::default())?,
            Self::EmulatedHopper => emulated(Emulation { is_hopper: true, ..Emulation::default() })?,
            Self::TraceSm90 => emulated(Emulation { is_hopper: true, is_traced: true, ..Emulation::default() })?,
            Self::Auto => match Gpu::open(0, options) {
                Ok(gpu) => gpu,
                Err(error) => return Ok(Chosen { gpu: None, missing: Some(error) }),
            },
        };
        Ok(Chosen { gpu: Some(gpu), missing: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_read_as_they_are_written() {
        for name in ["cpu", "cuda", "cuda:3", "auto", "emulated", "emulated-hopper", "trace-sm90"] {
            assert_eq!(name.parse::<DeviceChoice>().map(|choice| choice.to_string()), Ok(name.to_string()));
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("listed-hopper".parse(), Ok(DeviceChoice::TraceSm90));
        for name in ["", "gpu", "cuda:", "cuda:-1", "CPU", "cuda:1x"] {
            let error = name.parse::<DeviceChoice>().expect_err("an unknown device");
            assert!(error.to_string().contains("must be cpu, cuda, cuda:N or auto"), "{error}");
        }
    }
}
