//! The device that holds a shard, with the rank or worker it belongs to.

use std::fmt;
use std::str::FromStr;

use candle_core::{Device, DeviceLocation};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};
use crate::mesh::DEVICE_TYPES;

/// A device and the rank or named worker it belongs to: `rank:1/cpu`, `trainer0/cuda:1` or `cpu`.
///
/// Parses and prints PyTorch's notation.
///
/// ```
/// # use shardwise::sharded::RemoteDevice;
/// let device: RemoteDevice = "rank:3/cuda:1".parse()?;
/// assert_eq!((device.rank(), device.device()), (Some(3), "cuda:1"));
/// assert_eq!("rank:3".parse::<RemoteDevice>()?.to_string(), "rank:3/cpu");
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "_remote_device")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RemoteDevice {
    owner: Option<DeviceOwner>,
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum DeviceOwner {
    Rank(usize),
    Worker(String),
}

impl RemoteDevice {
    /// The CPU of a global rank.
    pub fn cpu_of(rank: usize) -> Self {
        RemoteDevice { owner: Some(DeviceOwner::Rank(rank)), device: "cpu".to_string() }
    }

    /// The global rank, if the device belongs to a rank.
    pub fn rank(&self) -> Option<usize> {
        match self.owner {
            Some(DeviceOwner::Rank(rank)) => Some(rank),
            _ => None,
        }
    }

    /// The name of the worker, if the device belongs to one.
    pub fn worker(&self) -> Option<&str> {
        match &self.owner {
            Some(DeviceOwner::Worker(name)) => Some(name),
            _ => None,
        }
    }

    /// The device, such as `cpu` or `cuda:1`.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The same owner with another device.
    pub(super) fn with_device(&self, device: &Device) -> Self {
        let device = match device.location() {
            DeviceLocation::Cpu => "cpu".to_string(),
            DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
            DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
        };
        RemoteDevice { owner: self.owner.clone(), device }
    }

    /// Checks that a tensor on `device` is where this placement says.
    pub(super) fn check_holds(&self, device: &Device) -> Result<()> {
        let found = self.with_device(device).device;
        let first = |name: &str| format!("{}:0", name.split(':').next().unwrap_or(name));
        let same = found == self.device || found == first(&found) && self.device == found[..found.len() - 2];
        if same {
            return Ok(());
        }
        let needed = format!("a tensor on {}, where the shard is said to be", self.device);
        Err(ErrorKind::Unsupported.error(
            "shard",
            format!("a tensor on {found}"),
            needed,
            "move the tensor, or correct the placement",
        ))
    }
}

impl FromStr for RemoteDevice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            let needed = "rank:<rank>/<device>, <worker>/<device> or <device>, with a device such as cpu or cuda:0";
            ErrorKind::Argument.error("remote device", format!("{text:?}"), needed, "name it in one of these forms")
        };
        let (owner, device) = match text.split('/').collect::<Vec<_>>()[..] {
            [device] if is_device(device) => (None, device),
            [owner] => (Some(owner), "cpu"),
            [owner, device] if is_device(device) => (Some(owner), device),
            _ => return Err(bad()),
        };
        let owner = match owner {
            None => None,
            Some("") => return Err(bad()),
            Some(owner) => Some(match owner.split_once(':') {
                None => DeviceOwner::Worker(owner.to_string()),
                Some(("rank", rank)) if rank.bytes().all(|b| b.is_ascii_digit()) => {
                    DeviceOwner::Rank(rank.parse().map_err(|_| bad())?)
                }
                Some(_) => return Err(bad()),
            }),
        };
        Ok(RemoteDevice { owner, device: device.to_string() })
    }
}

/// Whether a text names a device: a type, and maybe a number of at most three digits.
fn is_device(text: &str) -> bool {
    match text.split_once(':') {
        None => DEVICE_TYPES.contains(&text),
        Some((kind, index)) => {
            let number = !index.is_empty() && index.len() <= 3 && index.bytes().all(|b| b.is_ascii_digit());
            DEVICE_TYPES.contains(&kind) && number
        }
    }
}

impl fmt::Display for RemoteDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.owner {
            Some(DeviceOwner::Rank(rank)) => write!(f, "rank:{rank}/{}", self.device),
            Some(DeviceOwner::Worker(name)) => write!(f, "{name}/{}", self.device),
            None => f.write_str(&self.device),
        }
    }
}

impl Serialize for RemoteDevice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RemoteDevice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
