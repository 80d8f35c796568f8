//! Operators on sharded tensors: those of `DTensor`, unless a custom operator replaces them.

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

/// A custom operator of a scope.
type ScopedOp = Rc<dyn Fn(&[&ShardedTensor]) -> Result<ShardedTensor>>;

/// The custom operators of a rank by name, that of the innermost scope last.
type ScopedOps = HashMap<String, Vec<ScopedOp>>;

/// Runs `body` with a custom operator on sharded tensors.
///
/// Inside `body`, [`call_sharded_op`] and the methods of [`ShardedTensor`] of that name (`add`, `matmul`, ...) run
/// `implementation`. Scopes nest: the innermost one wins. The scope is this rank's own; if the operator communicates, all ranks
/// must be in a scope with it.
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
        let add = |all: &mut ScopedOps| all.entry(name.to_string()).or_default().push(Rc::new(implementation));
        context.sharded_operators.with(add);
    };
    let leave = |context: &RankContext, ()| {
        context.sharded_operators.with(|all: &mut ScopedOps| drop(all.get_mut(name).map(Vec::pop)));
    };
    in_scope(enter, leave, body)
}

/// Runs a custom operator by name: that of a surrounding [`with_sharded_op`], or the one that
/// [`register_spec_op`](super::register_spec_op) registered for the spec of the first input.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if there is no operator of this name, or if the inputs are on different meshes.
pub fn call_sharded_op(name: &str, inputs: &[&ShardedTensor]) -> Result<ShardedTensor> {
    check_meshes(name, inputs)?;
    run_custom(name, inputs).unwrap_or_else(|| {
        let known = inputs.first().map(|first| spec_op_names(first.sharding_spec())).unwrap_or_default();
        let needed = match known.is_empty() {
            true => "an operator of a surrounding with_sharded_op, or of the spec".to_string(),
            false => format!("an operator of a surrounding with_sharded_op, or of the spec: {}", known.join(", ")),
        };
        let fix = "register it, or correct the name";
        Err(ErrorKind::unknown(name).error("sharded operator", format!("{name:?}"), needed, fix))
    })
}

/// Runs the custom operator of this name, if there is one: that of the scope, or that of the first input's spec.
fn run_custom(name: &str, inputs: &[&ShardedTensor]) -> Option<Result<ShardedTensor>> {
    let find = |all: &mut ScopedOps| all.get(name).and_then(|stack| stack.last().cloned());
    let scoped = rank_context(|context| context.sharded_operators.with(find));
    match scoped {
        Some(operator) => Some(operator(inputs)),
        None => spec_op(name, inputs),
    }
}

/// Checks that all inputs are on the same mesh.
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
    /// Converts the inputs to `DTensor`s, runs `f` on them and converts the result back.
    ///
    /// A custom operator called `name` ([`with_sharded_op`], [`register_spec_op`](super::register_spec_op)) replaces `f`. The
    /// second and later inputs are placed like the first if they have its shape and no layout of their own. Collective if `f`
    /// or a conversion communicates. The autograd graph ends here.
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
        if let Some(result) = run_custom(name, inputs) {
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
                let placement = |axis: usize| {
                    if axis == 0 && !other.shape().is_empty() { Placement::Shard(0) } else { Placement::Replicate }
                };
                (0..mesh.ndim()).map(placement).collect()
            });
            tensors.push(other.to_dtensor_on(&mesh, placements)?);
        }
        let result = f(&tensors)?;
        // The result keeps the process group of the inputs, even if it was computed on another mesh of the same ranks.
        let sharded = ShardedTensor::from_dtensor(&result)?;
        Ok(ShardedTensor { mesh: first.mesh.clone(), ..sharded })
    }

    /// Whether two tensors on one mesh have the same shape, type and elements, whatever their specs. The same answer on every
    /// rank.
    ///
    /// Collective: every rank of the mesh must call it. Reshards `other` to the spec of this tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) in a dry run, on a rank outside the mesh, or if the meshes differ.
    #[track_caller]
    pub fn equal(&self, other: &ShardedTensor) -> Result<bool> {
        match self.dtype() == other.dtype() {
            true => self.all_elements(other, Location::caller(), &|a, b| Ok(all_equal(a, b)?)),
            false => Ok(false),
        }
    }

    /// Whether two tensors on one mesh have the same shape and `|a - b| <= atol + rtol * |b|` for all elements, whatever their
    /// specs. The same answer on every rank. Collective, as [`equal`](Self::equal) is.
    #[track_caller]
    pub fn allclose(&self, other: &ShardedTensor, rtol: f64, atol: f64) -> Result<bool> {
        self.all_elements(other, Location::caller(), &|a, b| Ok(all_close(a, b, rtol, atol)?))
    }

    /// Looks up the rows of `ids`, with this tensor as the table `[vocabulary, features]`, sharded on either dimension or both.
    ///
    /// Collective: every rank of the mesh must call it; see [`DTensor::embedding`].
    #[track_caller]
    pub fn embedding(&self, ids: &DTensor) -> Result<DTensor> {
        let table = self.to_dtensor()?;
        table.embedding(&on_mesh_of(&table, ids)?)
    }

    /// Looks up and combines the rows of bags of ids, one row per bag, with this tensor as the table. Collective; see
    /// [`DTensor::embedding_bag`].
    #[track_caller]
    pub fn embedding_bag(&self, ids: &DTensor, offsets: Option<&[usize]>, mode: EmbeddingBagMode) -> Result<DTensor> {
        let table = self.to_dtensor()?;
        table.embedding_bag(&on_mesh_of(&table, ids)?, offsets, mode)
    }

    /// Looks up the rows of each rank's own `ids`, of any shape: every rank gets the rows of its ids.
    ///
    /// Collective: every rank of the mesh must call it, also one without ids. Communicates ids and rows.
    ///
    /// ```
    /// use shardwise::candle_core::{Device, Tensor};
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
        let line = self.flat_mesh()?;
        let shape = [ids.dims(), &self.shape()[1..]].concat();
        let local = DTensor::from_local(&ids.flatten_all()?, &line, [Placement::Shard(0)])?;
        let regular = self.metadata.layout_on(line.mesh()).map(|layout| layout.placements().to_vec());
        let table = self.to_dtensor_on(&line, regular.unwrap_or_else(|| vec![Placement::Shard(0)]))?;
        let rows = table.embedding(&local)?.redistribute(local.placements().to_vec())?;
        Ok(rows.local().reshape(shape)?)
    }

    /// Whether `test` holds for all pairs of shards, after resharding the other tensor to the spec of this one.
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

/// The ids on the mesh of the table: the same tensor, or moved there and replicated.
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
    neg "Negates every element.",
    abs "Computes the absolute value of every element.",
    exp "Computes the exponential of every element.",
    log "Computes the natural logarithm of every element.",
    sqrt "Computes the square root of every element.",
    square "Computes the square of every element.",
    relu "Computes `max(x, 0)` of every element.",
    gelu "Computes `x * Phi(x)` of every element.",
    silu "Computes `x * sigmoid(x)` of every element.",
    sigmoid "Computes the logistic function of every element.",
    tanh "Computes the hyperbolic tangent of every element.",
    t "Transposes a matrix.",
] [
    add "Adds elementwise, with broadcasting.",
    sub "Subtracts elementwise, with broadcasting.",
    mul "Multiplies elementwise, with broadcasting.",
    div "Divides elementwise, with broadcasting.",
    maximum "Computes the larger element of each pair, with broadcasting.",
    minimum "Computes the smaller element of each pair, with broadcasting.",
    matmul "Computes the matrix product. Collective if the layouts of the factors require it.",
]}
