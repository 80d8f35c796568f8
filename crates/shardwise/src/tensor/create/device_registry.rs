//! Custom backends for types of devices that candle does not support, such as `xla`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use candle_core::Tensor;
use parking_lot::RwLock;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::mesh::register_device_type;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// A custom backend for meshes on a type of device that candle does not support, such as `xla`.
pub trait DeviceBackend: Send + Sync {
    /// Distributes a tensor over a mesh of the backend's devices. [`DTensor::distribute_tensor`] calls it on every rank.
    fn distribute_tensor(&self, tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor>;
}

/// The types that candle supports. Of these, this library computes on the CPU.
const CANDLE_TYPES: [&str; 3] = ["cpu", "cuda", "metal"];

static BACKENDS: LazyLock<RwLock<HashMap<String, Arc<dyn DeviceBackend>>>> = LazyLock::new(RwLock::default);

/// Registers a backend for meshes on `device_type`, for the whole process. Local.
///
/// Such meshes can then be built, and [`DTensor::distribute_tensor`] on them calls the backend. PyTorch does the same for `xla`
/// meshes.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for a type that candle supports.
pub fn register_backend(device_type: &str, backend: Arc<dyn DeviceBackend>) -> Result<()> {
    if CANDLE_TYPES.contains(&device_type) {
        return Err(ErrorKind::Unsupported.error(
            "device type",
            format!("`{device_type}`"),
            format!("a type other than {}", CANDLE_TYPES.join(", ")),
            "candle supports this type; choose another name",
        ));
    }
    register_device_type(device_type)?;
    BACKENDS.write().insert(device_type.to_string(), backend);
    Ok(())
}

/// The backend for a type of device: `None` if candle supports it, an error if there is no backend.
pub(in crate::tensor) fn backend_for(device_type: &str) -> Result<Option<Arc<dyn DeviceBackend>>> {
    if CANDLE_TYPES.contains(&device_type) {
        return Ok(None);
    }
    BACKENDS.read().get(device_type).cloned().map(Some).ok_or_else(|| {
        ErrorKind::Unsupported.error(
            "device type",
            format!("`{device_type}`"),
            format!("{} or a type with a registered backend", CANDLE_TYPES.join(", ")),
            "call register_backend before using a mesh of this type",
        )
    })
}

/// Checks that this library computes on the devices of a mesh: the CPU. A dry run computes nothing and may use any.
pub(in crate::tensor) fn check_computes(mesh: &DeviceMesh) -> Result<()> {
    if mesh.device_type() == "cpu" || mesh.world().is_dry() {
        return Ok(());
    }
    Err(ErrorKind::Unsupported.error(
        "mesh",
        format!("mesh {} on device type `{}`", mesh.mesh(), mesh.device_type()),
        "a mesh on `cpu`, where this library computes",
        "create the tensor on the CPU and give it to the backend with distribute_tensor",
    ))
}
