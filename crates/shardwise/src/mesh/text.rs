//! Text and serde forms of meshes: `[device/]axes[@ranks]`, such as `dp=2,tp=4`, `cuda/dp=2` or `tp=2@4,6`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{Axes, Axis, DEFAULT_DEVICE, Mesh};
use crate::error::{Error, ErrorKind, Result};

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.device_type() != DEFAULT_DEVICE {
            write!(f, "{}/", self.device_type())?;
        }
        f.write_str(&axes(self.axes()))?;
        if self.ranks().iter().enumerate().any(|(i, &r)| i != r) {
            f.write_str("@")?;
            for (i, rank) in self.ranks().iter().enumerate() {
                write!(f, "{}{rank}", if i == 0 { "" } else { "," })?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({self})")
    }
}

pub(super) fn axes(axes: &[Axis]) -> String {
    axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect::<Vec<_>>().join(",")
}

/// An error for a name that the text form of a mesh could not be parsed with.
pub(super) fn check_name(name: &str) -> Result<()> {
    let word = name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-' || c == '.');
    if word && name.chars().any(char::is_alphabetic) {
        return Ok(());
    }
    Err(ErrorKind::Mesh.error(
        "axis name",
        format!("`{name}`"),
        "letters, digits, `_`, `-` or `.`, with at least one letter",
        "rename the axis",
    ))
}

impl FromStr for Mesh {
    type Err = Error;

    /// Parses `dp=2,tp=4`, plain sizes `2,4` or `2x4`, with an optional device type before `/` and ranks after `@`.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |found: &str, needed: &str| {
            ErrorKind::Mesh.error(
                "mesh text",
                format!("`{found}` in `{text}`"),
                needed,
                "write for example `dp=2,tp=4`",
            )
        };
        let (device, rest) = text.split_once('/').unwrap_or((DEFAULT_DEVICE, text));
        let (axes, ranks) = match rest.split_once('@') {
            Some((axes, ranks)) => (axes, Some(ranks)),
            None => (rest, None),
        };
        let number = |s: &str| s.trim().parse::<usize>().map_err(|_| bad(s, "an integer"));
        let axes: Axes = if axes.contains('=') {
            let named = axes.split(',').map(|part| {
                let (name, size) = part.split_once('=').ok_or_else(|| bad(part, "name=size"))?;
                Ok((name.trim().to_string(), number(size)?))
            });
            named.collect::<Result<Vec<_>>>()?.into()
        } else {
            let number = |s: &str| number(s).map_err(|_| bad(s, "a name and a size for each axis"));
            axes.split([',', 'x']).map(number).collect::<Result<Vec<_>>>()?.into()
        };
        let mesh = match ranks {
            Some(ranks) => Mesh::from_ranks(axes, ranks.split(',').map(number).collect::<Result<_>>()?)?,
            None => Mesh::new(axes)?,
        };
        mesh.on_device(device.trim())
    }
}

impl Serialize for Mesh {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mesh {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
