//! Text and serde forms of layouts.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::Layout;
use crate::mesh::Mesh;
use crate::placement::Placement;

impl Layout {
    /// The dimensions that are sharded in another order than mesh order, with their axes.
    fn unusual_orders(&self) -> Vec<(usize, Vec<&str>)> {
        let unusual = (0..self.shape().len()).filter(|&dim| self.shard_order(dim) != self.default_order(dim));
        unusual
            .map(|dim| (dim, self.shard_order(dim).iter().map(|&a| self.mesh().axes()[a].name.as_str()).collect()))
            .collect()
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {}: ", self.shape(), self.mesh())?;
        for (i, placement) in self.placements().iter().enumerate() {
            write!(f, "{}{placement}", if i == 0 { "" } else { ", " })?;
        }
        for (dim, axes) in self.unusual_orders() {
            write!(f, "; dim {dim} sharded by {}", axes.join(" then "))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layout({self})")
    }
}

#[derive(Serialize, Deserialize)]
struct SerializedLayout {
    mesh: Mesh,
    shape: Vec<usize>,
    placements: Vec<Placement>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    order: Vec<(usize, Vec<String>)>,
}

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let order = self.unusual_orders();
        SerializedLayout {
            mesh: self.mesh().clone(),
            shape: self.shape().to_vec(),
            placements: self.placements().to_vec(),
            order: order.into_iter().map(|(d, axes)| (d, axes.into_iter().map(String::from).collect())).collect(),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Layout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let form = SerializedLayout::deserialize(deserializer)?;
        let names: Vec<(usize, Vec<&str>)> =
            form.order.iter().map(|(d, axes)| (*d, axes.iter().map(String::as_str).collect())).collect();
        let order: Vec<(usize, &[&str])> = names.iter().map(|(d, axes)| (*d, axes.as_slice())).collect();
        Layout::with_shard_order(&form.mesh, form.shape, form.placements, &order).map_err(de::Error::custom)
    }
}
