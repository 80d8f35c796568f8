//! Device types by name. Which of them can compute is decided when a mesh is bound to a world.

use std::collections::BTreeSet;

use parking_lot::RwLock;

use crate::error::{ErrorKind, Result, nearest};

/// The device types of PyTorch and candle.
pub(crate) const DEVICE_TYPES: [&str; 21] = [
    "cpu",
    "cuda",
    "metal",
    "mps",
    "meta",
    "xla",
    "xpu",
    "hpu",
    "hip",
    "mtia",
    "maia",
    "ipu",
    "ve",
    "fpga",
    "lazy",
    "mkldnn",
    "opengl",
    "opencl",
    "ideep",
    "vulkan",
    "privateuseone",
];

/// Device types with a registered backend.
static REGISTERED: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// Allows meshes on a device type from now on, in the whole process.
pub(crate) fn register_device_type(name: &str) -> Result<()> {
    check_name(name)?;
    REGISTERED.write().insert(name.to_string());
    Ok(())
}

/// Whether a device type has a registered backend.
pub(crate) fn is_registered(name: &str) -> bool {
    REGISTERED.read().contains(name)
}

/// An error unless `name` is a valid device type, without an index.
pub(super) fn check_name(name: &str) -> Result<()> {
    if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Ok(());
    }
    Err(ErrorKind::Mesh.error(
        "device type",
        format!("`{name}`"),
        "letters, digits and `_` without an index",
        "name the type only, such as `cpu` or `cuda`",
    ))
}

/// An error unless a device type is known or registered.
pub(super) fn check_known(name: &str) -> Result<()> {
    if DEVICE_TYPES.contains(&name) || is_registered(name) {
        return Ok(());
    }
    Err(ErrorKind::unknown(name).error(
        "device type",
        format!("`{name}`"),
        format!("a known type (the nearest are {}) or one with a registered backend", nearest(name, DEVICE_TYPES)),
        "use `cpu`, or call register_backend for the type first",
    ))
}
