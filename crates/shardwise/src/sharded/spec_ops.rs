//! Custom operators for the sharded tensors of a spec.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use super::spec::{AnyShardingSpec, ShardingSpec};
use super::tensor::ShardedTensor;
use crate::error::{ErrorKind, Result};

type SpecOpFn = Arc<dyn Fn(&AnyShardingSpec, &[&ShardedTensor]) -> Result<ShardedTensor> + Send + Sync>;

/// An operator, with the type of its function: registering the same function twice is allowed.
type SpecOp = (TypeId, SpecOpFn);

/// The registered operators of this process, by type of the spec and by name.
static OPERATORS: RwLock<BTreeMap<TypeId, BTreeMap<String, SpecOp>>> = RwLock::new(BTreeMap::new());

/// Registers an operator for sharded tensors whose spec is of type `S`.
///
/// [`call_sharded_op`](super::call_sharded_op), the methods of [`ShardedTensor`] of that name (`add`, `relu`, ...) and
/// [`ShardedTensor::apply`] run it if the first input has such a spec. An operator of
/// [`with_sharded_op`](super::with_sharded_op) takes precedence.
///
/// Local: it is registered for this process until it ends. All processes of a run must register the same operators before they
/// call one, because an operator may communicate. Registering the same function again has no effect, so every rank of a
/// launch may do it.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::sharded::{EnumerableShardingSpec, ShardMetadata, ShardedTensor, call_sharded_op, register_spec_op};
///
/// register_spec_op::<EnumerableShardingSpec>("shards", |spec, inputs| {
///     inputs[0].full_like(spec.shards().len() as f64)
/// })?;
/// launch(2, |world| {
///     let mesh = world.mesh([("all", 2)])?;
///     let shard = |at, size, rank: &str| ShardMetadata::new([at], [size], Some(rank.parse()?));
///     let spec = EnumerableShardingSpec::new([shard(0, 3, "rank:1/cpu")?, shard(3, 1, "rank:0/cpu")?])?;
///     let x = ShardedTensor::ones(spec, 4, DType::F32, &mesh)?;
///     let count = call_sharded_op("shards", &[&x])?.full_tensor()?;
///     assert_eq!(count.to_vec1::<f32>()?, [2.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if another operator has this name for the spec.
#[doc(alias = "custom_sharding_spec_op")]
pub fn register_spec_op<S: ShardingSpec>(
    name: &str,
    implementation: impl Fn(&S, &[&ShardedTensor]) -> Result<ShardedTensor> + Send + Sync + 'static,
) -> Result<()> {
    let function = implementation.type_id();
    let of_spec = move |spec: &AnyShardingSpec, inputs: &[&ShardedTensor]| {
        let spec = spec.downcast_ref::<S>().expect("operators are found by the type of the spec");
        implementation(spec, inputs)
    };
    let mut all = OPERATORS.write();
    let known = all.entry(TypeId::of::<S>()).or_default();
    if known.get(name).is_some_and(|(registered, _)| *registered != function) {
        let found = format!("a second operator {name:?} for {}", std::any::type_name::<S>());
        return Err(ErrorKind::Argument.error(
            "sharded operator",
            found,
            "one per name and spec",
            "give it another name",
        ));
    }
    known.entry(name.to_string()).or_insert_with(|| (function, Arc::new(of_spec)));
    Ok(())
}

/// Runs the operator of this name that is registered for the spec of the first input, if there is one.
pub(super) fn spec_op(name: &str, inputs: &[&ShardedTensor]) -> Option<Result<ShardedTensor>> {
    let spec = inputs.first()?.sharding_spec();
    let (_, operator) = OPERATORS.read().get(&type_of(spec))?.get(name)?.clone();
    Some(operator(spec, inputs))
}

/// Names of the operators that are registered for the type of a spec.
pub(super) fn spec_op_names(spec: &AnyShardingSpec) -> Vec<String> {
    OPERATORS.read().get(&type_of(spec)).map(|known| known.keys().cloned().collect()).unwrap_or_default()
}

fn type_of(spec: &AnyShardingSpec) -> TypeId {
    let spec: &dyn Any = &*spec.0;
    spec.type_id()
}
