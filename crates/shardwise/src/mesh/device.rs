//! Types of devices by name. Which of them a program can use is decided where a mesh is bound to a world.

use std::collections::BTreeSet;

use parking_lot::RwLock;

use crate::error::{ErrorKind, Result, nearest};

/// Types of devices that have a name in PyTorch or candle.
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

/// Types for which a backend was registered.
static REGISTERED: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// Lets meshes be on a type of device from now on, in the whole process.
pub(crate) fn register_device_type(name: &str) -> Result<()> {
    check_name(name)?;
    REGISTERED.write().insert(name.to_string());
    Ok(())
}

/// Whether a backend was registered for a type of device.
pub(crate) fn is_registered(name: &str) -> bool {
    REGISTERED.read().contains(name)
}

/// An error unless a text is a name for a type of device.
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

/// An error unless a type of device is a known or a registered one.
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
