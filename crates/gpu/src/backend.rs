//! The two kinds of device that a [`Gpu`](crate::Gpu) may be: NVIDIA's and the emulator.

use std::sync::Arc;

use moeworks_tensor::DeviceBlock;

use crate::blas::{DenseProduct, Places};
use crate::emulated::Emulated;
use crate::graph::{CapturedLaunch, Graph};
use crate::nvidia::Nvidia;
use crate::tensor_map::{Matrices, TensorMap};
use crate::{GpuError, Launch};

pub(crate) enum Backend {
    Nvidia(Arc<Nvidia>),
    Emulated(Emulated),
}

impl Backend {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Nvidia(device) => device.name(),
            Self::Emulated(device) => device.name(),
        }
    }

    /// Returns the device's number, by which tensors know where they are.
    pub(crate) fn number(&self) -> usize {
        match self {
            Self::Nvidia(device) => device.number(),
            Self::Emulated(device) => device.number(),
        }
    }

    /// Returns the bytes of the device's memory; none for an emulation.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        match self {
            Self::Nvidia(device) => device.memory_bytes(),
            Self::Emulated(_) => None,
        }
    }

    pub(crate) fn processors(&self) -> usize {
        match self {
            Self::Nvidia(device) => device.processors(),
            Self::Emulated(device) => device.processors(),
        }
    }

    pub(crate) fn hopper_processors(&self) -> Option<usize> {
        match self {
            Self::Nvidia(device) => device.hopper_processors(),
            Self::Emulated(device) => device.hopper_processors(),
        }
    }

    pub(crate) fn most_shared(&self) -> usize {
        match self {
            Self::Nvidia(device) => device.most_shared(),
            Self::Emulated(device) => device.most_shared(),
        }
    }

    /// Allocates a block with unspecified contents, for work that is queued from now on.
    pub(crate) fn block(&self, bytes: usize) -> Result<DeviceBlock, GpuError> {
        match self {
            Self::Nvidia(device) => device.block(bytes),
            Self::Emulated(device) => Ok(device.block(bytes)),
        }
    }

    /// Allocates a block with a copy of these bytes, which are the caller's again when this returns.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Result<DeviceBlock, GpuError> {
        match self {
            Self::Nvidia(device) => device.upload(bytes),
            Self::Emulated(device) => Ok(device.upload(bytes)),
        }
    }

    pub(crate) fn tensor_map(&self, matrices: &Matrices) -> Option<TensorMap> {
        match self {
            Self::Nvidia(device) => device.tensor_map(matrices),
            Self::Emulated(device) => device.tensor_map(matrices),
        }
    }

    /// Waits until everything that was queued is done.
    pub(crate) fn synchronize(&self) -> Result<(), GpuError> {
        match self {
            Self::Nvidia(device) => device.synchronize(),
            Self::Emulated(_) => Ok(()),
        }
    }

    /// Sorts the free blocks, so that a step that allocates as the one before did gets the same addresses.
    pub(crate) fn sort_free_blocks(&self) {
        if let Self::Nvidia(device) = self {
            device.sort_free_blocks();
        }
    }

    /// Queues a launch.
    ///
    /// # Safety
    ///
    /// See [`Gpu::launch`](crate::Gpu::launch).
    pub(crate) unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Nvidia(device) => device.launch(launch),
                Self::Emulated(device) => device.launch(launch),
            }
        }
    }

    /// Makes a graph of these launches, one after the other.
    pub(crate) fn graph(&self, launches: &[CapturedLaunch]) -> Result<Graph, GpuError> {
        match self {
            Self::Nvidia(device) => device.graph(launches).map(Graph::Nvidia),
            Self::Emulated(_) => Ok(Graph::Emulated(launches.to_vec())),
        }
    }

    /// Queues a graph.
    ///
    /// # Safety
    ///
    /// The conditions of [`Gpu::launch`](crate::Gpu::launch) hold for each launch with the arguments that it has now.
    pub(crate) unsafe fn run_graph(&self, graph: &Graph) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match (graph, self) {
                (Graph::Nvidia(graph), Self::Nvidia(device)) => device.run_graph(graph),
                (Graph::Emulated(launches), Self::Emulated(device)) => {
                    launches.iter().try_for_each(|captured| device.launch(&captured.launch()))
                }
                _ => unreachable!("a graph is used by the GPU that made it"),
            }
        }
    }

    /// Returns whether there is a library for plain products.
    pub(crate) fn has_blas(&self) -> bool {
        match self {
            Self::Nvidia(device) => device.blas().is_some(),
            Self::Emulated(device) => device.blas().is_some(),
        }
    }

    /// Queues a plain product by the library. Returns whether the library took it.
    ///
    /// # Safety
    ///
    /// See [`Blas::run`](crate::blas::Blas::run).
    pub(crate) unsafe fn dense(&self, product: DenseProduct, at: Places) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Nvidia(device) => device.dense(product, at),
                Self::Emulated(device) => device.dense(product, at),
            }
        }
    }
}
