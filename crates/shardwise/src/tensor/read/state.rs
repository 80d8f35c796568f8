//! Serializable state of the local part of a distributed tensor.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::tensor::DTensor;
use shardwise_kernels::bytes_of;

/// Serializable state of a distributed tensor on one rank: its local part and the layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DTensorState {
    /// The layout of the whole tensor.
    pub layout: Layout,
    /// Name of the element type, such as `f32`.
    pub dtype: String,
    /// The global rank whose local part this is.
    pub rank: usize,
    /// The elements of the local part: row-major, little-endian.
    pub bytes: Vec<u8>,
}

impl DTensor {
    /// Returns the state of this rank, for [`from_state`](Self::from_state). Local; copies the local part. For files, see
    /// [`checkpoint`](mod@crate::checkpoint).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) in a dry run and on a rank outside the mesh, which have no values.
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

    /// Restores a tensor from the state of each rank. Local; every rank of the mesh passes its own state.
    ///
    /// The mesh must equal the stored one. To load into another layout or world size, redistribute afterwards or use a
    /// [`checkpoint`](mod@crate::checkpoint).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the state is of another rank or mesh, or damaged.
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
