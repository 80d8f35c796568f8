//! Types of devices that candle does not serve: others may take them over.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use candle_core::Tensor;
use parking_lot::RwLock;

use super::DTensor;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::mesh::register_device_type;
use crate::placement::Placement;

/// What takes over for meshes on a type of device that candle does not serve, such as `xla`.
pub trait DeviceBackend: Send + Sync {
    /// Spreads a tensor over a mesh of the backend's devices.
    fn distribute_tensor(&self, tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor>;
}

/// The types that candle serves. Of these, this library computes on the CPU.
const SERVED: [&str; 3] = ["cpu", "cuda", "metal"];

static BACKENDS: LazyLock<RwLock<HashMap<String, Arc<dyn DeviceBackend>>>> = LazyLock::new(RwLock::default);

/// Has `backend` take over for meshes on `device_type` from now on, in the whole process: such meshes can be built, and
/// [`DTensor::distribute_tensor`] on them is the backend's. A type that candle serves cannot be taken over.
pub fn register_backend(device_type: &str, backend: Arc<dyn DeviceBackend>) -> Result<()> {
    if SERVED.contains(&device_type) {
        return Err(ErrorKind::Unsupported.error(
            "device type",
            format!("`{device_type}`"),
            format!("a type other than {}", SERVED.join(", ")),
            "candle serves this type; choose another name",
        ));
    }
    register_device_type(device_type)?;
    BACKENDS.write().insert(device_type.to_string(), backend);
    Ok(())
}

/// The backend for a type of device: `None` if candle serves it, an error if nobody does.
pub(super) fn backend_for(device_type: &str) -> Result<Option<Arc<dyn DeviceBackend>>> {
    if SERVED.contains(&device_type) {
        return Ok(None);
    }
    BACKENDS.read().get(device_type).cloned().map(Some).ok_or_else(|| {
        ErrorKind::Unsupported.error(
            "device type",
            format!("`{device_type}`"),
            format!("{} or a type with a registered backend", SERVED.join(", ")),
            "call register_backend before using a mesh of this type",
        )
    })
}

/// An error if tensors on a mesh are made by the backend of its device and not here. A dry run computes nothing.
pub(super) fn check_computes(mesh: &DeviceMesh) -> Result<()> {
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
