//! The state of one rank's part in a form that can be stored.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::DTensor;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use shardwise_kernels::bytes_of;

/// One rank's part of a distributed tensor, with the layout that it belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DTensorState {
    /// The layout of the whole.
    pub layout: Layout,
    /// Name of the element type, such as `f32`.
    pub dtype: String,
    /// Global rank that held the part.
    pub rank: usize,
    /// The part's elements in row-major order, in little-endian bytes.
    pub bytes: Vec<u8>,
}

impl DTensor {
    /// What this rank must store to have its part again.
    pub fn state(&self) -> Result<DTensorState> {
        self.check_readable("state")?;
        let bytes = bytes_of(self.local())?;
        Ok(DTensorState {
            layout: self.layout().clone(),
            dtype: self.dtype().as_str().to_string(),
            rank: self.device_mesh().world().rank(),
            bytes,
        })
    }

    /// The tensor of which every rank of the mesh has stored its part. The mesh must be the one it was stored on; to
    /// load into another layout or world, redistribute afterwards or use a checkpoint.
    pub fn from_state(state: &DTensorState, mesh: &DeviceMesh) -> Result<DTensor> {
        let bad = |found: String, needed: String| {
            ErrorKind::state().error(
                "tensor state",
                found,
                needed,
                "load the state on the rank and mesh that stored it",
            )
        };
        let rank = mesh.world().rank();
        if state.layout.mesh() != mesh.mesh() || state.rank != rank {
            return Err(bad(
                format!("rank {} of mesh {}", state.rank, state.layout.mesh()),
                format!("rank {rank} of mesh {}", mesh.mesh()),
            ));
        }
        let dtype: DType = state.dtype.parse().map_err(|_| bad(state.dtype.clone(), "an element type".into()))?;
        shardwise_kernels::check_dtype(dtype)?;
        let shape = state.layout.local_shape(rank);
        let expected = shape.iter().product::<usize>() * dtype.size_in_bytes();
        if state.bytes.len() != expected {
            return Err(bad(format!("{} bytes", state.bytes.len()), format!("{expected} bytes")));
        }
        let local = Tensor::from_raw_buffer(&state.bytes, dtype, &shape, &candle_core::Device::Cpu)?;
        Ok(Self::from_parts(mesh, state.layout.clone(), local))
    }
}
