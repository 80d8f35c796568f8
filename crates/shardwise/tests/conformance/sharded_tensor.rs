//! Sharding specs, metadata, inference, merging and remote devices.
//!
//! Where PyTorch's chunk offsets run past the end of the tensor (an empty chunk begins at chunk size times its number),
//! offsets are clamped here: an empty chunk begins at the end. The vectors are clamped before they are compared.

use candle_core::DType;
use serde::Deserialize;
use serde_json::Value;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensorMetadata,
};

#[derive(Deserialize)]
struct Case {
    kind: String,
    input: Value,
    expected: Option<Value>,
    error: Option<Value>,
}

pub(crate) fn check(case: &Value) -> Result<(), String> {
    let case = Case::deserialize(case).map_err(|e| e.to_string())?;
    let got = match case.kind.as_str() {
        "chunk" => chunk(&case.input),
        "enumerable" => enumerable(&case.input),
        "infer" => infer(&case.input),
        "merge" => merge(&case.input),
        "device" => read::<RemoteDevice>(&case.input["text"]).map(|device| device_value(&device)),
        other => return Err(format!("unknown kind {other}")),
    };
    match (got, case.expected, case.error) {
        (Err(_), _, Some(_)) => Ok(()),
        (Ok(got), _, Some(error)) => Err(format!("expected an error like {error}, got {got}")),
        (Err(error), _, None) => Err(format!("unexpected error: {error}")),
        (Ok(got), Some(mut expected), None) => {
            clamp(&mut expected, &case.input);
            if got == expected { Ok(()) } else { Err(format!("got {got}, expected {expected}")) }
        }
        (Ok(_), None, None) => Err("the case expects neither a value nor an error".to_string()),
    }
}

fn chunk(input: &Value) -> Result<Value, String> {
    let dim = input["dim"].as_i64().ok_or("a dimension is a number")? as isize;
    let placements: Vec<String> = read(&input["placements"])?;
    let size: Vec<usize> = read(&input["tensor_size"])?;
    let spec = ChunkShardingSpec::new(dim, placements).map_err(|e| e.to_string())?;
    let metadata = spec.build_metadata(&size, dtype(&input["dtype"])?).map_err(|e| e.to_string())?;
    let along = if dim < 0 { dim + size.len() as isize } else { dim } as usize;
    let range = |shard: &ShardMetadata| shard.rank().map(|_| [shard.offsets[along], shard.sizes[along]]);
    let ranges: Vec<Option<[usize; 2]>> = metadata.shards.iter().map(range).collect();
    let mut value = metadata_value(&metadata);
    value["rank_start_and_length"] = serde_json::json!(ranges);
    Ok(value)
}

fn enumerable(input: &Value) -> Result<Value, String> {
    let shards: Vec<ShardMetadata> = read(&input["shards"])?;
    let size: Vec<usize> = read(&input["tensor_size"])?;
    let spec = EnumerableShardingSpec::new(shards).map_err(|e| e.to_string())?;
    Ok(metadata_value(&spec.build_metadata(&size, DType::F32).map_err(|e| e.to_string())?))
}

fn infer(input: &Value) -> Result<Value, String> {
    let shards: Vec<ShardMetadata> = read(&input["shards"])?;
    let spec = AnyShardingSpec::infer(&shards).map_err(|e| e.to_string())?;
    if let Some(spec) = spec.downcast_ref::<ChunkShardingSpec>() {
        return Ok(serde_json::json!({ "spec": "chunk", "dim": spec.dim(), "placements": spec.placements() }));
    }
    let spec = spec.downcast_ref::<EnumerableShardingSpec>().ok_or("a spec of another kind")?;
    let shards: Vec<Value> = spec.shards().iter().map(shard_value).collect();
    Ok(serde_json::json!({ "spec": "enumerable", "shards": shards }))
}

fn merge(input: &Value) -> Result<Value, String> {
    let mut ranks = Vec::new();
    for rank in input["ranks"].as_array().ok_or("ranks are a list")? {
        ranks.push(match rank {
            Value::Null => None,
            rank => Some(ShardedTensorMetadata {
                size: read(&rank["global_size"])?,
                dtype: dtype(&rank["dtype"])?,
                requires_grad: false,
                shards: read(&rank["shards"])?,
            }),
        });
    }
    Ok(metadata_value(&ShardedTensorMetadata::merge(&ranks).map_err(|e| e.to_string())?))
}

fn dtype(name: &Value) -> Result<DType, String> {
    read::<String>(name)?.parse().map_err(|_| format!("unknown element type {name}"))
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T, String> {
    serde_json::from_value(value.clone()).map_err(|e| e.to_string())
}

fn metadata_value(metadata: &ShardedTensorMetadata) -> Value {
    let shards: Vec<Value> = metadata.shards.iter().map(shard_value).collect();
    serde_json::json!({
        "size": metadata.size,
        "dtype": metadata.dtype.as_str(),
        "requires_grad": metadata.requires_grad,
        "shards": shards,
    })
}

fn shard_value(shard: &ShardMetadata) -> Value {
    let placement = shard.placement.as_ref().map(device_value);
    serde_json::json!({ "offsets": shard.offsets, "sizes": shard.sizes, "placement": placement })
}

fn device_value(device: &RemoteDevice) -> Value {
    serde_json::json!({
        "text": device.to_string(),
        "rank": device.rank(),
        "worker": device.worker(),
        "device": device.device(),
    })
}

/// Brings the offsets of empty shards back to the end of the tensor.
fn clamp(expected: &mut Value, input: &Value) {
    let Some(size) = expected.get("size").and_then(|size| read::<Vec<usize>>(size).ok()) else { return };
    let bounded = |value: &mut Value, bound: usize| {
        *value = serde_json::json!(value.as_u64().unwrap_or(0).min(bound as u64));
    };
    for shard in expected["shards"].as_array_mut().into_iter().flatten() {
        for (offset, &n) in shard["offsets"].as_array_mut().into_iter().flatten().zip(&size) {
            bounded(offset, n);
        }
    }
    let dim = input["dim"].as_i64().unwrap_or(0).rem_euclid(size.len().max(1) as i64) as usize;
    for range in expected
        .get_mut("rank_start_and_length")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .filter(|r| r.is_array())
    {
        bounded(&mut range[0], size[dim]);
    }
}
