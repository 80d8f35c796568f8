//! Operators on sharded tensors: as distributed tensors, and as the user says otherwise.

use std::collections::HashMap;
use std::panic::Location;
use std::rc::Rc;

use candle_core::{Device, Tensor};

use super::spec_ops::{spec_op, spec_op_names};
use super::tensor::ShardedTensor;
use crate::comm::Call;
use crate::error::{ErrorKind, Result, Site};
use crate::ops::EmbeddingBagMode;
use crate::placement::{Placement, ReduceOp};
use crate::rank_context::{RankContext, in_scope, rank_context};
use crate::tensor::DTensor;
use shardwise_kernels::{all_close, all_equal};

/// What a user's operator does.
type Implementation = Rc<dyn Fn(&[&ShardedTensor]) -> Result<ShardedTensor>>;

/// The operators of a rank by name, the innermost scope last.
type Registered = HashMap<String, Vec<Implementation>>;

/// Runs `body` with an operator on sharded tensors that has a name: [`call_sharded_op`] runs it, and the methods of
/// [`ShardedTensor`] of that name (`add`, `matmul`, ...) do too, instead of their own way. Scopes nest; every rank is in its
/// own.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor, with_sharded_op};
///
/// launch(2, |world| {
///     let mesh = world.mesh([("all", 2)])?;
///     let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1])?, 4, DType::F32, &mesh)?;
///     let y = with_sharded_op("relu", |inputs| inputs[0].full_like(7.0), || x.relu())?;
///     assert_eq!(y.full_tensor()?.to_vec1::<f32>()?, [7.0; 4]);
///     assert_eq!(x.relu()?.full_tensor()?.to_vec1::<f32>()?, [1.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "__torch_function__")]
#[doc(alias = "dispatch")]
#[doc(alias = "find_sharded_tensor")]
#[doc(alias = "custom_sharded_op_impl")]
pub fn with_sharded_op<R>(
    name: &str,
    implementation: impl Fn(&[&ShardedTensor]) -> Result<ShardedTensor> + 'static,
    body: impl FnOnce() -> R,
) -> R {
    let enter = |context: &RankContext| {
        let add = |all: &mut Registered| all.entry(name.to_string()).or_default().push(Rc::new(implementation));
        context.sharded_operators.with(add);
    };
    let leave = |context: &RankContext, ()| {
        context.sharded_operators.with(|all: &mut Registered| drop(all.get_mut(name).map(Vec::pop)));
    };
    in_scope(enter, leave, body)
}

/// Runs the operator that a surrounding [`with_sharded_op`] has given this name, or the one that
/// [`register_spec_op`](super::register_spec_op) has given it for the spec of the first input.
pub fn call_sharded_op(name: &str, inputs: &[&ShardedTensor]) -> Result<ShardedTensor> {
    check_meshes(name, inputs)?;
    replaced(name, inputs).unwrap_or_else(|| {
        let known = inputs.first().map(|first| spec_op_names(first.sharding_spec())).unwrap_or_default();
        let needed = match known.is_empty() {
            true => "an operator of a surrounding with_sharded_op, or of the spec".to_string(),
            false => format!("an operator of a surrounding with_sharded_op, or of the spec: {}", known.join(", ")),
        };
        let fix = "register it, or correct the name";
        Err(ErrorKind::unknown(name).error("sharded operator", format!("{name:?}"), needed, fix))
    })
}

/// What the user's operator of this name returns, if there is one: that of the scope, or that of the first input's spec.
fn replaced(name: &str, inputs: &[&ShardedTensor]) -> Option<Result<ShardedTensor>> {
    let find = |all: &mut Registered| all.get(name).and_then(|stack| stack.last().cloned());
    let scoped = rank_context(|context| context.sharded_operators.with(find));
    match scoped {
        Some(operator) => Some(operator(inputs)),
        None => spec_op(name, inputs),
    }
}

/// An error unless all inputs have one process group.
fn check_meshes(name: &str, inputs: &[&ShardedTensor]) -> Result<()> {
    let Some((first, others)) = inputs.split_first() else { return Ok(()) };
    match others.iter().find(|other| other.mesh != first.mesh) {
        None => Ok(()),
        Some(other) => {
            let found = format!("{name} of tensors on mesh {} and mesh {}", first.mesh.mesh(), other.mesh.mesh());
            Err(ErrorKind::Mesh.error(
                "sharded operator",
                found,
                "one mesh",
                "reshard to one mesh through to_dtensor_on",
            ))
        }
    }
}

impl ShardedTensor {
    /// The result of a function of distributed tensors, as shards again. `name` is what [`with_sharded_op`] knows it by.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("all", 2)])?;
    ///     let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1])?, (4, 2), DType::F32, &mesh)?;
    ///     let y = ShardedTensor::apply("softmax", &[&x], |x| x[0].softmax(1))?;
    ///     assert_eq!(y.local_tensor()?.to_vec2::<f32>()?, [[0.5, 0.5], [0.5, 0.5]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn apply(
        name: &str,
        inputs: &[&ShardedTensor],
        f: impl FnOnce(&[DTensor]) -> Result<DTensor>,
    ) -> Result<ShardedTensor> {
        check_meshes(name, inputs)?;
        if let Some(result) = replaced(name, inputs) {
            return result;
        }
        let Some((first, others)) = inputs.split_first() else {
            return Err(ErrorKind::Operands.error(
                "sharded operator",
                "no inputs",
                "one tensor at least",
                "pass the tensors",
            ));
        };
        let first_tensor = first.to_dtensor()?;
        let (mesh, mut tensors) = (first_tensor.device_mesh().clone(), vec![first_tensor.clone()]);
        for other in others {
            let regular = other.metadata.layout_on(mesh.mesh()).map(|layout| layout.placements().to_vec());
            let placements = regular.unwrap_or_else(|| {
                if other.shape() == first.shape() {
                    return first_tensor.placements().to_vec();
                }
                let cut = |axis: usize| {
                    if axis == 0 && !other.shape().is_empty() { Placement::Shard(0) } else { Placement::Replicate }
                };
                (0..mesh.ndim()).map(cut).collect()
            });
            tensors.push(other.to_dtensor_on(&mesh, placements)?);
        }
        let result = f(&tensors)?;
        // The result belongs to the process group of the inputs, whatever mesh it was computed on.
        let sharded = ShardedTensor::from_dtensor(&result)?;
        Ok(ShardedTensor { mesh: first.mesh.clone(), ..sharded })
    }

    /// Whether two tensors have the same shape, type and elements, however they are cut. The same answer on every rank.
    #[track_caller]
    pub fn equal(&self, other: &ShardedTensor) -> Result<bool> {
        match self.dtype() == other.dtype() {
            true => self.all_elements(other, Location::caller(), &|a, b| Ok(all_equal(a, b)?)),
            false => Ok(false),
        }
    }

    /// Whether two tensors have the same shape and `|a - b| <= atol + rtol * |b|` everywhere, however they are cut. The same
    /// answer on every rank.
    #[track_caller]
    pub fn allclose(&self, other: &ShardedTensor, rtol: f64, atol: f64) -> Result<bool> {
        self.all_elements(other, Location::caller(), &|a, b| Ok(all_close(a, b, rtol, atol)?))
    }

    /// Rows for ids, with this tensor as the table `[vocabulary, features]`, cut along rows, columns or both.
    #[track_caller]
    pub fn embedding(&self, ids: &DTensor) -> Result<DTensor> {
        let table = self.to_dtensor()?;
        table.embedding(&on_mesh_of(&table, ids)?)
    }

    /// Rows for bags of ids, one row per bag; see [`DTensor::embedding_bag`].
    #[track_caller]
    pub fn embedding_bag(&self, ids: &DTensor, offsets: Option<&[usize]>, mode: EmbeddingBagMode) -> Result<DTensor> {
        let table = self.to_dtensor()?;
        table.embedding_bag(&on_mesh_of(&table, ids)?, offsets, mode)
    }

    /// Rows for ids that every rank has of its own, any number of them: each rank gets the rows for its ids.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor, shard_tensor};
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("all", 2)])?;
    ///     let table = Tensor::arange(0f32, 10.0, &Device::Cpu)?.reshape((5, 2))?;
    ///     let table = shard_tensor(&table, ChunkShardingSpec::over_ranks(0, [0, 1])?, &mesh, Some(0))?;
    ///     let ids = Tensor::new([vec![4i64], vec![0, 3]][world.rank()].as_slice(), &Device::Cpu)?;
    ///     let rows = table.embedding_of_local(&ids)?.to_vec2::<f32>()?;
    ///     assert_eq!(rows, [vec![vec![8.0, 9.0]], vec![vec![0.0, 1.0], vec![6.0, 7.0]]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn embedding_of_local(&self, ids: &Tensor) -> Result<Tensor> {
        if self.shape().len() != 2 {
            let found = format!("a tensor of shape {:?}", self.shape());
            return Err(ErrorKind::Operands.error(
                "embedding",
                found,
                "a table [vocabulary, features]",
                "use a matrix",
            ));
        }
        let line = self.line()?;
        let shape = [ids.dims(), &self.shape()[1..]].concat();
        let local = DTensor::from_local(&ids.flatten_all()?, &line, [Placement::Shard(0)])?;
        let regular = self.metadata.layout_on(line.mesh()).map(|layout| layout.placements().to_vec());
        let table = self.to_dtensor_on(&line, regular.unwrap_or_else(|| vec![Placement::Shard(0)]))?;
        let rows = table.embedding(&local)?.redistribute(local.placements().to_vec())?;
        Ok(rows.local().reshape(shape)?)
    }

    /// Whether a test of two shards holds for all, with the other tensor cut like this one.
    fn all_elements(
        &self,
        other: &ShardedTensor,
        site: Site,
        test: &dyn Fn(&Tensor, &Tensor) -> Result<bool>,
    ) -> Result<bool> {
        if self.mesh.world().is_dry() || !self.mesh.contains(self.mesh.world().rank()) {
            let found = "a comparison in a dry run or on a rank outside the mesh";
            return Err(ErrorKind::NoData.error(
                "reader",
                found,
                "a rank that holds data",
                "test my_coordinate() first",
            ));
        }
        check_meshes("comparison", &[self, other])?;
        if self.shape() != other.shape() {
            return Ok(false);
        }
        let other = other.reshard_at(self.spec.clone(), site)?;
        let mut passed = true;
        for (a, b) in self.shards.iter().zip(&other.shards) {
            passed = passed && test(&a.tensor, &b.tensor)?;
        }
        let mine = Tensor::new(&[u8::from(passed)], &Device::Cpu)?;
        let all = self.process_group()?.run(&Call::AllReduce { op: ReduceOp::Min }, &[mine], site)?.swap_remove(0);
        Ok(all.to_vec1::<u8>()?[0] == 1)
    }
}

/// A tensor on the mesh of another.
fn on_mesh_of(table: &DTensor, ids: &DTensor) -> Result<DTensor> {
    match ids.device_mesh() == table.device_mesh() {
        true => Ok(ids.clone()),
        false => ids.to_mesh(table.device_mesh(), vec![Placement::Replicate; table.device_mesh().ndim()]),
    }
}

macro_rules! operators {
    ([$($unary:ident $unary_doc:literal,)*] [$($binary:ident $binary_doc:literal,)*]) => {
        impl ShardedTensor {
            $(
                #[doc = $unary_doc]
                #[track_caller]
                pub fn $unary(&self) -> Result<ShardedTensor> {
                    Self::apply(stringify!($unary), &[self], |x| x[0].$unary())
                }
            )*
            $(
                #[doc = $binary_doc]
                #[track_caller]
                pub fn $binary(&self, other: &ShardedTensor) -> Result<ShardedTensor> {
                    Self::apply(stringify!($binary), &[self, other], |x| x[0].$binary(&x[1]))
                }
            )*
        }
    };
}

operators! {[
    neg "The negative of every element.",
    abs "The absolute value of every element.",
    exp "The exponential of every element.",
    log "The natural logarithm of every element.",
    sqrt "The square root of every element.",
    square "The square of every element.",
    relu "The positive part of every element.",
    gelu "`x * Phi(x)` of every element.",
    silu "`x * sigmoid(x)` of every element.",
    sigmoid "The logistic function of every element.",
    tanh "The hyperbolic tangent of every element.",
    t "The transpose of a matrix.",
] [
    add "The sum, with broadcasting.",
    sub "The difference, with broadcasting.",
    mul "The product of elements, with broadcasting.",
    div "The quotient of elements, with broadcasting.",
    maximum "The larger element of each pair, with broadcasting.",
    minimum "The smaller element of each pair, with broadcasting.",
    matmul "The matrix product.",
]}
