//! Distributed tensors from plain tensors: the local part of each rank, or the whole tensor of one of them.

use std::panic::Location;

use candle_core::{Device, Shape, Tensor};

use crate::comm::{Call, DeviceMesh, Group};
use crate::error::{ErrorKind, Result, Site};
use crate::fnv::fnv1a;
use crate::layout::{Layout, TensorMeta};
use crate::placement::Placement;
use crate::tensor::graph::local_code::{enter, exits_behind, exits_numbered, numbers};
use crate::tensor::{DTensor, check_memory, check_partial, create::device_registry, hash_of};
use shardwise_kernels::{check_stored, contiguous, immutable, own_copy, placeholder, with_bytes};

/// Options of [`DTensor::from_local_with`].
#[derive(Debug, Clone, Default)]
pub struct FromLocalOptions {
    /// The shape of the whole tensor. If it is given, the call is local: ranks do not exchange their sizes, and each checks its
    /// own part only.
    pub shape: Option<Vec<usize>>,
    /// Compares replicas by a hash of 8 bytes per rank, one all-gather. An error on all ranks names the ranks that differ.
    pub run_check: bool,
    /// The placements of the gradient that local code before this call receives. `None`: those of the tensor, replicated where
    /// it is partial.
    pub grad_placements: Option<Vec<Placement>>,
}

impl DTensor {
    /// Creates a distributed tensor from the local part of each rank. The part is copied.
    ///
    /// Collective: every rank of the mesh must call it. Ranks exchange the shapes of their parts, not the elements. Unlike in
    /// PyTorch, parts may have any sizes: uneven ones become `Ragged` placements. That replicas are equal is not checked; see
    /// [`FromLocalOptions::run_check`]. A dry run assumes that all parts have the size of this rank's; where they do not, use
    /// [`from_local_with_shape`](Self::from_local_with_shape). So does a rank outside the mesh, which holds nothing and may skip the
    /// call.
    ///
    /// Differentiable: if candle computed `local` from the result of [`to_local`](Self::to_local) or
    /// [`full_tensor`](Self::full_tensor), gradients pass through that code. It receives the gradient in the layout of this tensor,
    /// replicated where it is partial. Candle variables (`Var`) in that code get no gradient.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let mine = Tensor::full(1f32, (1 + 3 * world.rank(), 2), &Device::Cpu)?; // 1 row and 4 rows
    ///     let whole = DTensor::from_local(&mine, &mesh, [Shard(0)])?;
    ///     assert_eq!(whole.layout().to_string(), "[5, 2] on dp=2: S(0;1,4)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) on every rank, naming a rank whose part does not fit the placements;
    /// [`Error::Mismatch`](crate::Error::Mismatch) if element types, numbers of dimensions or placements differ.
    #[track_caller]
    pub fn from_local(
        local: &Tensor,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        Self::from_local_with(local, mesh, placements, FromLocalOptions::default())
    }

    /// Creates a distributed tensor from the local part of each rank, as [`from_local`](Self::from_local) does, with options.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::tensor::FromLocalOptions;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("dp", 3)])?;
    ///     let mine = Tensor::new(&[1f32, if world.rank() == 2 { 5.0 } else { 2.0 }], &Device::Cpu)?;
    ///     let check = FromLocalOptions { run_check: true, ..Default::default() };
    ///     let error = DTensor::from_local_with(&mine, &mesh, [Replicate], check).unwrap_err().to_string();
    ///     assert!(error.contains("rank 2 differs from rank 0"), "{error}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "run_check")]
    #[doc(alias = "grad_placements")]
    #[track_caller]
    pub fn from_local_with(
        local: &Tensor,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
        options: FromLocalOptions,
    ) -> Result<DTensor> {
        let (site, placements) = (Location::caller(), placements.into_iter().collect::<Vec<_>>());
        let mut exits = exits_behind(local);
        let output = match &options.shape {
            Some(shape) => Self::with_known_shape(local, mesh, placements, shape.as_slice())?,
            None if !mesh.contains(mesh.world().rank()) => {
                let shapes = vec![local.dims().to_vec(); mesh.size()];
                let layout = infer_layout(mesh, &placements, &shapes, mesh.ranks())?;
                return Self::with_known_shape(local, mesh, layout.placements().to_vec(), layout.shape());
            }
            None => {
                let group = mesh.whole_group()?;
                let (shapes, counts) = gather_shapes(&group, local, &placements, exits.len(), site)?;
                if counts.iter().any(|count| *count != counts[0]) {
                    let mine = numbers(&exits);
                    let mine = Tensor::from_slice(&mine, mine.len(), &Device::Cpu)?;
                    let call = Call::AllGather { dim: 0, sizes: counts.iter().copied().collect() };
                    exits = exits_numbered(group.run(&call, &[mine], site)?.swap_remove(0).to_vec1()?);
                }
                check_stored(local)?;
                let layout = infer_layout(mesh, &placements, &shapes, group.ranks())?;
                check_fit(&layout, &shapes, group.ranks())?;
                check_partial(&layout, local.dtype())?;
                check_memory(&layout, local.dtype(), mesh.world().is_dry())?;
                DTensor::from_parts(mesh, layout, copied(mesh, local)?)
            }
        };
        if options.run_check {
            check_replicas(&output, site)?;
        }
        enter(output, local, exits, options.grad_placements)
    }

    /// Creates a replicated tensor from a plain tensor that all ranks have, for expressions that mix plain and distributed tensors.
    ///
    /// Local. That all ranks have the same elements is not checked; [`FromLocalOptions::run_check`] does. Differentiable, as
    /// [`from_local`](Self::from_local) is. Replaces PyTorch's `implicit_replication` context.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::ones((4, 2), DType::F32, &mesh, [Shard(0)])?;
    ///     let scale = Tensor::new(&[2f32, 3.0], &Device::Cpu)?;
    ///     let y = (&x * DTensor::replicate(&scale, &mesh)?)?;
    ///     assert_eq!(y.full_tensor()?.to_vec2::<f32>()?[3], [2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "implicit_replication")]
    #[track_caller]
    pub fn replicate(tensor: &Tensor, mesh: &DeviceMesh) -> Result<DTensor> {
        Self::from_local_with_shape(tensor, mesh, vec![Placement::Replicate; mesh.ndim()], tensor.dims())
    }

    /// Creates a distributed tensor from the local part of each rank and the shape of the whole tensor.
    ///
    /// Local, unlike [`from_local`](Self::from_local): each rank checks its own part only. A rank outside the mesh may pass any
    /// tensor of the element type.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the part of this rank does not have its local shape in the layout.
    pub fn from_local_with_shape(
        local: &Tensor,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
        shape: impl Into<Shape>,
    ) -> Result<DTensor> {
        enter(Self::with_known_shape(local, mesh, placements, shape)?, local, exits_behind(local), None)
    }

    fn with_known_shape(
        local: &Tensor,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
        shape: impl Into<Shape>,
    ) -> Result<DTensor> {
        let layout = Layout::new(mesh.mesh(), shape, placements)?;
        check_stored(local)?;
        check_partial(&layout, local.dtype())?;
        let rank = mesh.world().rank();
        if !mesh.contains(rank) {
            return Ok(DTensor::from_parts(mesh, layout, placeholder(&TensorMeta::new(0, local.dtype()))?));
        }
        let expected = layout.local_shape(rank);
        if local.dims() != expected {
            return Err(ErrorKind::shape(local.dims()).error(
                "local tensor",
                format!("shape {:?} on rank {rank}", local.dims()),
                format!("{expected:?}, what this rank holds of {layout}"),
                "pass this rank's part, or leave the shape to from_local",
            ));
        }
        Ok(DTensor::from_parts(mesh, layout, copied(mesh, local)?))
    }

    /// Distributes a plain tensor over a mesh with the given placements.
    ///
    /// Collective with `src_data_rank`, a position on the mesh: that rank sends every rank its part in one exchange, and the
    /// tensors of the other ranks state shape and type only. Local with `None`: every rank slices its part from its own copy,
    /// and nothing is compared. A mesh on a type of device that candle does not support is passed to the backend registered for
    /// it ([`register_backend`](crate::tensor::register_backend)).
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::candle_core::{Device, Tensor};
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let table = Tensor::arange(0f32, 6.0, &Device::Cpu)?.reshape((3, 2))?;
    ///     let x = DTensor::distribute_tensor(&table, &mesh, [Shard(0)], Some(0))?;
    ///     assert_eq!(x.local_shape(), [2 - world.rank(), 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) on every rank if ranks disagree on source, shape, type or placements;
    /// [`Error::Invalid`](crate::Error::Invalid) if the placements do not fit the shape or the source is not on the mesh.
    #[track_caller]
    pub fn distribute_tensor(
        tensor: &Tensor,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
        src_data_rank: Option<usize>,
    ) -> Result<DTensor> {
        let (site, placements) = (Location::caller(), placements.into_iter().collect::<Vec<_>>());
        if let Some(backend) = device_registry::backend_for(mesh.device_type())? {
            return backend.distribute_tensor(tensor, mesh, &placements);
        }
        let layout = || Layout::new(mesh.mesh(), tensor.dims(), placements.clone());
        distribute(tensor, mesh, layout, src_data_rank, placements_hash(&placements), site)
    }

    /// As [`distribute_tensor`](Self::distribute_tensor), to a layout, which may shard a dimension by several axes in another
    /// order than that of the mesh.
    #[track_caller]
    pub(crate) fn distribute_to_layout(
        tensor: &Tensor,
        mesh: &DeviceMesh,
        layout: &Layout,
        src_data_rank: Option<usize>,
    ) -> Result<DTensor> {
        distribute(tensor, mesh, || Ok(layout.clone()), src_data_rank, hash_of(layout), Location::caller())
    }
}

/// `layout` may fail: with a source rank, ranks compare what they want (`wanted`, a hash) before the error.
fn distribute(
    tensor: &Tensor,
    mesh: &DeviceMesh,
    layout: impl Fn() -> Result<Layout>,
    src_data_rank: Option<usize>,
    wanted: u64,
    site: Site,
) -> Result<DTensor> {
    let layout = || -> Result<Layout> {
        let to = layout()?;
        check_partial(&to, tensor.dtype())?;
        check_stored(tensor)?;
        Ok(to)
    };
    if !mesh.contains(mesh.world().rank()) {
        return Ok(DTensor::from_parts(mesh, layout()?, placeholder(&TensorMeta::new(0, tensor.dtype()))?));
    }
    let Some(source) = src_data_rank else {
        let to = layout()?;
        let whole = Layout::replicated(mesh.mesh(), tensor.dims())?;
        check_memory(&to, tensor.dtype(), mesh.world().is_dry())?;
        // Slicing a part copies it. A part that is the whole tensor is copied here, because the program may write to it.
        let is_slice = to.local_shape(mesh.world().rank()) != tensor.dims();
        let local =
            if is_slice && !mesh.world().is_dry() { contiguous(&immutable(tensor)?)? } else { copied(mesh, tensor)? };
        return DTensor::from_parts(mesh, whole, local).to_layout_at(&to, site);
    };
    // Ranks agree first: an error after that is the same on every rank.
    let group = mesh.whole_group()?;
    agree_on_source(tensor, &group, source, wanted, site)?;
    let to = layout()?;
    let scattered = to.reduced();
    let local = scatter_boxes(tensor, &group, &scattered, source, site)?;
    DTensor::from_parts(mesh, scattered, local).to_layout_at(&to, site)
}

/// Checks on every rank that replicas are equal. Collective: an all-gather of one hash per rank.
pub(crate) fn check_replicas(tensor: &DTensor, site: Site) -> Result<()> {
    let (mesh, layout) = (tensor.device_mesh(), tensor.layout());
    if mesh.world().is_dry() || !mesh.contains(mesh.world().rank()) {
        return Ok(());
    }
    let group = mesh.whole_group()?;
    let mine = with_bytes(tensor.local(), |bytes| hash_of(&bytes))? as i64;
    let call = Call::AllGather { dim: 0, sizes: std::iter::repeat_n(1, group.size()).collect() };
    let all = group.run(&call, &[Tensor::new(&[mine], &Device::Cpu)?], site)?.swap_remove(0).to_vec1::<i64>()?;
    let hash = |rank: usize| all[group.ranks().iter().position(|&r| r == rank).expect("a rank of the mesh")];
    let axes: Vec<usize> = (0..mesh.ndim()).filter(|&axis| layout.placements()[axis].is_replicate()).collect();
    let first = |rank: usize| mesh.mesh().group_ranks(&axes, rank)[0];
    let differing: Vec<String> = group
        .ranks()
        .iter()
        .filter(|&&rank| hash(rank) != hash(first(rank)))
        .map(|&rank| format!("rank {rank} differs from rank {}", first(rank)))
        .collect();
    if differing.is_empty() {
        return Ok(());
    }
    Err(ErrorKind::Disagreement.error(
        "replicas",
        format!("elements of {layout} that are not the same: {}", differing.join(", ")),
        "the same elements on all ranks of an axis that replicates",
        "compute them alike, take those of one rank with distribute_tensor, or say Partial if they are terms",
    ))
}

/// Copies a tensor of the program, which may be written to later. Placeholders of a dry run are not copied.
fn copied(mesh: &DeviceMesh, local: &Tensor) -> Result<Tensor> {
    if mesh.world().is_dry() { Ok(local.detach()) } else { Ok(own_copy(local)?) }
}

/// Gathers the shapes of all ranks' tensors, which must agree on type, number of dimensions and placements, together with a
/// count of each rank.
fn gather_shapes(
    group: &Group,
    local: &Tensor,
    placements: &[Placement],
    count: usize,
    site: Site,
) -> Result<(Vec<Vec<usize>>, Vec<usize>)> {
    let form = Call::Agree {
        what: "element type, number of dimensions and placements",
        values: [local.dtype() as u64, local.rank() as u64, placements_hash(placements)].into_iter().collect(),
    };
    group.run(&form, &[], site)?;
    let row: Vec<i64> = local.dims().iter().chain([&count]).map(|&n| n as i64).collect();
    let mine = Tensor::from_vec(row, (1, local.rank() + 1), &Device::Cpu)?;
    let call = Call::AllGather { dim: 0, sizes: std::iter::repeat_n(1, group.size()).collect() };
    let all = group.run(&call, &[mine], site)?.swap_remove(0);
    if group.is_dry() {
        return Ok((vec![local.dims().to_vec(); group.size()], vec![count; group.size()]));
    }
    let split = |row: Vec<i64>| {
        let mut shape: Vec<usize> = row.into_iter().map(|n| n as usize).collect();
        let count = shape.pop().expect("the last number of a row");
        (shape, count)
    };
    Ok(all.to_vec2::<i64>()?.into_iter().map(split).unzip())
}

/// A hash of placements that is the same on every rank.
pub(crate) fn placements_hash(placements: &[Placement]) -> u64 {
    let text = placements.iter().map(|p| p.to_string() + ",").collect::<String>();
    fnv1a(text.as_bytes())
}

/// Infers the layout from the placements and the shapes of all local parts, which are in the order of `ranks`.
fn infer_layout(mesh: &DeviceMesh, placements: &[Placement], shapes: &[Vec<usize>], ranks: &[usize]) -> Result<Layout> {
    let mesh = mesh.mesh();
    let ndim = shapes[0].len();
    // The layout of an empty tensor checks the placements and gives the order of the axes that shard a dimension.
    let plain: Vec<Placement> = placements.iter().map(Placement::plain).collect();
    let empty = Layout::new(mesh, vec![0; ndim], plain)?;
    let mut shape = shapes[0].clone();
    let mut sized: Vec<Placement> =
        placements.iter().map(|p| p.normalized(ndim)).collect::<Result<Vec<Placement>>>()?;
    for (dim, whole) in shape.iter_mut().enumerate() {
        let axes = empty.shard_order(dim);
        // The size at every combination of coordinates of the sharding axes, at coordinate 0 of all other axes.
        let count = |axes: &[usize]| axes.iter().map(|&a| mesh.shape()[a]).product::<usize>();
        let group_ranks = mesh.group_ranks(axes, mesh.ranks()[0]);
        let position = |rank: &usize| ranks.iter().position(|r| r == rank).expect("in the mesh");
        let sizes: Vec<usize> = group_ranks.iter().map(|rank| shapes[position(rank)][dim]).collect();
        // A sum that overflows saturates, and Layout::new refuses it.
        *whole = sizes.iter().fold(0, |sum, &n| sum.saturating_add(n));
        for (i, &axis) in axes.iter().enumerate() {
            if sized[axis].chunk_dim().is_some() {
                // A chunk of this axis is the sum of the chunks of the axes that shard it further.
                let inner = count(&axes[i + 1..]);
                let chunks: Vec<usize> =
                    sizes.chunks(inner).map(|c| c.iter().fold(0usize, |sum, &n| sum.saturating_add(n))).collect();
                sized[axis] = Placement::ragged(dim as isize, chunks);
            }
        }
    }
    Layout::new(mesh, shape, sized)
}

/// Checks that all parts have their local shapes in the layout; the error names the first rank whose part does not.
fn check_fit(layout: &Layout, shapes: &[Vec<usize>], ranks: &[usize]) -> Result<()> {
    for (shape, &rank) in shapes.iter().zip(ranks) {
        let expected = layout.local_shape(rank);
        if *shape != expected {
            return Err(ErrorKind::shape(shape).error(
                "local tensors",
                format!("shape {shape:?} on rank {rank} and {:?} on rank {}", shapes[0], ranks[0]),
                format!("{expected:?} on rank {rank}, if the whole is {layout}"),
                "correct the placements or the parts; along an axis that shards no dimension all parts have one shape",
            ));
        }
    }
    Ok(())
}

/// Checks on every rank that all name the same source, type, shape and placements, and that the source is on the mesh.
fn agree_on_source(tensor: &Tensor, group: &Group, source: usize, wanted: u64, site: Site) -> Result<()> {
    let shape = tensor.dims().iter().map(|&n| n as u64);
    let values = [source as u64, tensor.dtype() as u64, wanted].into_iter().chain(shape).collect();
    group.run(&Call::Agree { what: "source rank, element type, placements and shape", values }, &[], site)?;
    if source < group.size() {
        return Ok(());
    }
    let needed = format!("a position on the mesh, below {}", group.size());
    Err(ErrorKind::Rank { rank: source, size: group.size() }.error(
        "source rank",
        source,
        needed,
        "0 is the first rank of the mesh",
    ))
}

/// Sends every rank its part of the tensor of the rank at position `source` of the group.
fn scatter_boxes(tensor: &Tensor, group: &Group, layout: &Layout, source: usize, site: Site) -> Result<Tensor> {
    let part = |rank: usize| TensorMeta { shape: layout.local_shape(rank), dtype: tensor.dtype() };
    let nothing = TensorMeta::new(0, tensor.dtype());
    let mut expected = vec![nothing.clone(); group.size()];
    expected[source] = part(group.global_rank());
    // Copied: thread ranks may still read it after this rank has returned and its program writes to the tensor.
    let whole = match group.rank() == source && !group.is_dry() {
        true => own_copy(tensor)?,
        false => tensor.clone(),
    };
    let piece = |&rank: &usize| -> Result<Tensor> {
        if group.rank() != source {
            return Ok(placeholder(&nothing)?);
        }
        if group.is_dry() {
            return Ok(placeholder(&part(rank))?);
        }
        let mut piece = whole.clone();
        for dim in 0..tensor.rank() {
            let indices = layout.global_indices(rank, dim);
            let dense_run = indices.windows(2).all(|w| w[1] == w[0] + 1);
            piece = match indices.first() {
                Some(&first) if dense_run => piece.narrow(dim, first, indices.len())?,
                None => piece.narrow(dim, 0, 0)?,
                _ => {
                    let index: Vec<u32> = indices.iter().map(|&i| i as u32).collect();
                    contiguous(&piece)?.index_select(&Tensor::new(index, &Device::Cpu)?, dim)?
                }
            };
        }
        Ok(piece)
    };
    let pieces = group.ranks().iter().map(piece).collect::<Result<Vec<_>>>()?;
    let mut got = group.run(&Call::AllToAll { expected }, &pieces, site)?;
    let local = got.swap_remove(source);
    // Copied, so that a part does not keep the whole tensor alive.
    if group.is_dry() || local.dims() == tensor.dims() { Ok(local) } else { Ok(contiguous(&local.copy()?)?) }
}
