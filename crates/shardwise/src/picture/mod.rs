//! Pictures of meshes, layouts and redistributions, as text for a terminal and as SVG. Pure: nothing here communicates.
//!
//! ```
//! use shardwise::{Layout, Mesh, Placement};
//!
//! let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
//! let layout = Layout::new(&mesh, (8, 64), Placement::parse_list("S(0),S(1)")?)?;
//! let picture = layout.picture();
//! assert!(picture.to_string().contains("│ 0"));
//! assert!(picture.to_svg().starts_with("<svg"));
//! println!("{}", mesh.show());
//! # Ok::<(), shardwise::Error>(())
//! ```
//!
//! JAX has `jax.debug.visualize_array_sharding` for this.

mod quantity;
mod ranks;
mod grid;
mod text;
mod svg;
mod layout_picture;
mod mesh_picture;
mod redistribution;

pub use layout_picture::LayoutPicture;
pub use mesh_picture::MeshPicture;
pub use quantity::{bytes_text, count_text, parse_quantity, time_text};
pub use redistribution::RedistributionPicture;
