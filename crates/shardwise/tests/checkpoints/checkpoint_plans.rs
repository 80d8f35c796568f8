//! Reads that replicas share, and plans that saves keep for the next one: what is read, what is sent, and the same result.

use std::path::Path;

use candle_core::{Device, Tensor};
use shardwise::ThreadWorld;
use shardwise::checkpoint::{self, LoadReport, PlanCache, SaveOptions, State, StateLoadOptions, Value};
use shardwise::nn::Linear;
use shardwise::prelude::*;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

fn counting(shape: &[usize], first: f64) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..count).map(|i| first + i as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn sharing() -> StateLoadOptions {
    StateLoadOptions { share_reads: true, ..StateLoadOptions::default() }
}

/// Bytes that each rank read with `options`, and what it loaded.
fn loaded<T: Send + 'static>(
    path: &Path,
    ranks: usize,
    options: StateLoadOptions,
    template: impl Fn(&World) -> Result<State> + Send + Sync + 'static,
    values: impl Fn(&State) -> Result<T> + Send + Sync + 'static,
) -> Result<Vec<(LoadReport, T)>> {
    let path = path.to_path_buf();
    ThreadWorld::new(ranks)?.run(move |world| {
        let loaded = checkpoint::load_with(&world, &path, &template(&world)?, &options)?;
        Ok((loaded.report, values(&loaded.state)?))
    })
}

fn bytes<T>(reports: &[(LoadReport, T)]) -> Vec<u64> {
    reports.iter().map(|(report, _)| report.bytes).collect()
}

/// Two ranks need the same two tensors: each reads one. On 2 x 2 ranks, replicas of a shard share it among themselves.
#[test]
fn replicas_read_each_part_once_with_the_bytes_balanced() {
    let scratch = Scratch::new("shared-reads");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(1, move |world| {
        let mesh = world.mesh([("all", 1)])?;
        let tensor = |first: f64| DTensor::distribute_tensor(&counting(&[64, 8], first), &mesh, [Replicate], None);
        let entry = |(name, first): (&str, f64)| Ok((name.to_string(), State::from(tensor(first)?)));
        let entries = [("a", 0.0), ("b", 1000.0), ("c", 2000.0)].into_iter().map(entry).collect::<Result<Vec<_>>>()?;
        let mut state = State::map(entries);
        state.extend([("plain", counting(&[64, 8], 3000.0))]);
        checkpoint::save(&world, &place, &state)
    })
    .unwrap();
    let size = 64 * 8 * 8u64;

    let two = |world: &World| {
        let mesh = world.mesh([("dp", 2)])?;
        let like = || DTensor::zeros((64, 8), DType::F64, &mesh, [Replicate]);
        Ok(State::map([("a", like()?), ("b", like()?)]))
    };
    let values = |state: &State| Ok([state.tensor("a")?.to_local()?, state.tensor("b")?.to_local()?]);
    let shared = loaded(&path, 2, sharing(), two, values).unwrap();
    assert_eq!(bytes(&shared), [size, size]);
    assert_eq!(bytes(&loaded(&path, 2, StateLoadOptions::default(), two, values).unwrap()), [2 * size; 2]);
    for (report, [a, b]) in &shared {
        assert_eq!(a.to_vec2::<f64>().unwrap(), counting(&[64, 8], 0.0).to_vec2::<f64>().unwrap());
        assert_eq!(b.to_vec2::<f64>().unwrap(), counting(&[64, 8], 1000.0).to_vec2::<f64>().unwrap());
        assert_eq!(report.unchecked_bytes, 0);
    }

    // On 2 x 2 ranks: everywhere, in two replicas of shards, in four shards; in another type; and a plain tensor.
    let four = |world: &World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let a = DTensor::zeros((64, 8), DType::F64, &mesh, [Replicate, Replicate])?;
        let b = DTensor::zeros((64, 8), DType::F32, &mesh, [Replicate, Shard(1)])?;
        let c = DTensor::zeros((64, 8), DType::F64, &mesh, [Shard(0), Shard(0)])?;
        let plain = Tensor::zeros((64, 8), DType::F64, &Device::Cpu)?;
        Ok(State::map([("a", State::from(a)), ("b", b.into()), ("c", c.into()), ("plain", plain.into())]))
    };
    let values = |state: &State| {
        let mut all = Vec::new();
        for name in ["a", "b", "c"] {
            all.push(state.tensor(name)?.full_tensor()?.to_dtype(DType::F64)?.to_vec2::<f64>()?);
        }
        let Some(State::Plain(plain)) = state.get("plain") else { panic!("a plain tensor") };
        all.push(plain.to_vec2::<f64>()?);
        Ok(all)
    };
    let own = loaded(&path, 4, StateLoadOptions::default(), four, values).unwrap();
    let shared = loaded(&path, 4, sharing(), four, values).unwrap();
    assert_eq!(bytes(&own).iter().sum::<u64>(), 4 * size + 2 * size + size + 4 * size);
    assert_eq!(bytes(&shared).iter().sum::<u64>(), 4 * size, "each byte of the files once");
    let (most, least) = (bytes(&shared).into_iter().max().unwrap(), bytes(&shared).into_iter().min().unwrap());
    assert!(most - least <= size / 2, "{:?}", bytes(&shared));
    let expected: Vec<_> =
        (0..4).map(|i| counting(&[64, 8], 1000.0 * f64::from(i)).to_vec2::<f64>().unwrap()).collect();
    assert!(own.iter().chain(&shared).all(|(_, values)| *values == expected));
}

/// Local rows of tensors by name.
type Rows = Vec<(&'static str, Vec<Vec<f64>>)>;

/// Ranks that need other parts, other types or other entries read their own, in addition to what they share.
#[test]
fn ranks_that_need_different_parts_read_their_own() {
    let scratch = Scratch::new("unshared-reads");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(1, move |world| {
        let entries = ["rows", "types", "own", "same"].map(|name| (name, counting(&[8, 8], 1.0)));
        checkpoint::save(&world, &place, &State::map(entries))
    })
    .unwrap();
    let size = 8 * 8 * 8u64;
    let template = |world: &World| {
        let first = world.rank() == 0;
        let alone = world.device_mesh(Mesh::from_ranks([("own", 1)], vec![world.rank()])?)?;
        let mesh = world.mesh([("tp", 2)])?;
        // The same tensor, sharded differently: no box is needed twice.
        let rows = DTensor::zeros((8, 8), DType::F64, &mesh, [if first { Shard(0) } else { Shard(1) }]);
        let types = DTensor::zeros((8, 8), if first { DType::F64 } else { DType::F32 }, &alone, [Replicate])?;
        let same = DTensor::zeros((8, 8), DType::F64, &alone, [Replicate])?;
        let mut state = State::map([("types", types), ("same", same.clone())]);
        if first {
            state.extend([("own", same)]);
        } else {
            state.extend([("rows", rows?)]);
        }
        Ok(state)
    };
    let values = |state: &State| {
        let names = ["types", "same", "own", "rows"].into_iter().filter(|name| state.get(name).is_some());
        names.map(|name| Ok((name, state.tensor(name)?.to_local()?.to_dtype(DType::F64)?.to_vec2::<f64>()?))).collect()
    };
    let shared: Vec<(LoadReport, Rows)> = loaded(&path, 2, sharing(), template, values).unwrap();
    // Rank 0: types and own; rank 1: types and half of rows; one of them reads what both need.
    assert_eq!(bytes(&shared).iter().sum::<u64>(), 2 * size + size + size / 2 + size);
    assert_eq!(bytes(&shared)[1], size + size / 2 + size, "the rank with fewer bytes of its own reads what is shared");
    let whole = counting(&[8, 8], 1.0).to_vec2::<f64>().unwrap();
    for (_, values) in &shared {
        for (name, values) in values {
            let expected: Vec<Vec<f64>> = match *name {
                "rows" => whole.iter().map(|row| row[4..].to_vec()).collect(),
                _ => whole.clone(),
            };
            assert_eq!(*values, expected, "{name}");
        }
    }
}

#[test]
fn a_rank_that_cannot_read_fails_all_ranks_that_share() {
    let scratch = Scratch::new("failing-shared-reads");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(1, move |world| checkpoint::save(&world, &place, &State::map([("a", counting(&[8, 8], 0.0))]))).unwrap();
    // A flipped byte: only the rank that reads the tensor sees it.
    let data = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
    let data = data.max_by_key(|file| if file.extension().is_some_and(|e| e == "json") { 0 } else { 1 }).unwrap();
    let mut content = std::fs::read(&data).unwrap();
    let last = content.len() - 1;
    content[last] ^= 1;
    std::fs::write(&data, content).unwrap();
    let place = path.clone();
    let error = same_error_on_all_ranks(3, move |world| {
        let like = Tensor::zeros((8, 8), DType::F64, &Device::Cpu)?;
        checkpoint::load_with(&world, &place, &State::map([("a", like)]), &sharing()).map(drop)
    });
    assert!(error.contains("checksum"), "{error}");
    // Also what one rank asks for in vain.
    let error = same_error_on_all_ranks(3, move |world| {
        let name = if world.rank() == 1 { "b" } else { "a" };
        let like = Tensor::zeros((8, 8), DType::F64, &Device::Cpu)?;
        checkpoint::load_with(&world, &path, &State::map([(name, like)]), &sharing()).map(drop)
    });
    assert!(error.contains("no tensor \"b\""), "{error}");
}

/// Parts of a training run: two replicas of a model and its optimizer read half of the file each.
#[test]
fn a_training_run_is_restored_with_shared_reads() {
    let scratch = Scratch::new("shared-parts");
    let path = scratch.0.join("run");
    let reports = ThreadWorld::new(2).unwrap().run(move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let model = Linear::new(&Builder::new(&mesh), 16, 32)?;
        let mut optimizer = AdamW::default().over(&model)?;
        let x = DTensor::randn((4, 16), &mesh, [Shard(0)])?;
        let step =
            |optimizer: &mut ShardedOptimizer| optimizer.step(model.forward(&x)?.square()?.sum_all()?.backward()?);
        step(&mut optimizer)?;
        checkpoint::save_from(&world, &path, (&model, &optimizer))?;
        let saved = model.weight.get().full_tensor()?.to_vec2::<f32>()?;
        step(&mut optimizer)?;
        let report = checkpoint::load_into_with(&world, &path, (&model, &mut optimizer), &sharing())?;
        assert_eq!(model.weight.get().full_tensor()?.to_vec2::<f32>()?, saved);
        assert_eq!(optimizer.steps(), 1);
        Ok(report.bytes)
    });
    let reports = reports.unwrap();
    assert_eq!(reports.iter().sum::<u64>(), 3 * 4 * (16 * 32 + 32), "weights and two moments, once");
    assert!(reports.iter().all(|bytes| bytes * 3 > 4 * 3 * (16 * 32 + 32)), "{reports:?}");
}

/// State of a rank: a tensor that all ranks hold parts of, 20 experts of its own, and a value.
fn state(world: &World, step: i64, extra: bool) -> Result<State> {
    let all = world.mesh([("all", world.size())])?;
    let own = world.device_mesh(Mesh::from_ranks([("own", 1)], vec![world.rank()])?)?;
    let shared = DTensor::distribute_tensor(&counting(&[8, 4], step as f64), &all, [Shard(0)], None)?;
    let mut state = State::map([("shared", State::from(shared)), ("step", State::from(step))]);
    for i in 0..20 {
        let first = 100.0 * f64::from(i) + 10_000.0 * world.rank() as f64 + step as f64;
        let expert = DTensor::distribute_tensor(&counting(&[3, 4], first), &own, [Replicate], None)?;
        state.extend([(format!("experts.{}.{i}", world.rank()), expert)]);
    }
    if extra && world.rank() == 1 {
        state.extend([("extra", DTensor::distribute_tensor(&counting(&[5], 7.0), &own, [Replicate], None)?)]);
    }
    Ok(state)
}

/// All bytes of a checkpoint by key, and the rank whose file has each tensor.
fn contents(path: &Path) -> Vec<(String, Vec<u8>, Vec<String>)> {
    let catalog = checkpoint::open(path).unwrap();
    let files = |key: &str| catalog.tensors[key].chunks.iter().map(|chunk| chunk.file.clone()).collect();
    catalog.tensors.keys().map(|key| (key.clone(), catalog.read(key).unwrap(), files(key))).collect()
}

#[test]
fn saves_of_an_unchanged_structure_send_hashes_only_and_changed_ranks_send_their_changes() {
    let scratch = Scratch::new("plan-cache");
    let root = scratch.0.clone();
    let sent = ThreadWorld::new(3).unwrap().run(move |world| {
        let cached = SaveOptions { plan_cache: Some(PlanCache::default()), ..SaveOptions::default() };
        let mut sent = Vec::new();
        // The first save, the same again, another step on all ranks, an entry more on rank 1, and one less again.
        for (i, (step, extra)) in [(1, false), (1, false), (2, false), (2, true), (2, false)].into_iter().enumerate() {
            let state = state(&world, step, extra)?;
            let mut bytes = Vec::new();
            for (name, options) in [("anew", SaveOptions::default()), ("cached", cached.clone())] {
                world.trace().clear();
                checkpoint::save_with(&world, root.join(format!("{name}-{i}")), &state, &options)?;
                bytes.push(world.trace().report().0.iter().map(|(_, _, total)| total.bytes).sum::<usize>());
            }
            sent.push((bytes[0], bytes[1]));
        }
        Ok(sent)
    });
    let sent = sent.unwrap();
    for (rank, sent) in sent.iter().enumerate() {
        let [first, same, step, more, less] = sent[..] else { panic!("{sent:?}") };
        assert!(first.1.abs_diff(first.0) < 100, "rank {rank}: {sent:?}");
        assert!(same.1 + 3000 < same.0, "the entries are not sent again: {sent:?}");
        assert!(step.1 < same.1 + 300, "one value: {sent:?}");
        for changed in [more, less] {
            let own = if rank == 1 { 600 } else { 100 };
            assert!(changed.1 < same.1 + own, "rank {rank} sends what it changed: {sent:?}");
        }
    }
    for i in 0..5 {
        let (anew, cached) = (scratch.0.join(format!("anew-{i}")), scratch.0.join(format!("cached-{i}")));
        assert_eq!(contents(&anew), contents(&cached), "save {i}");
        let step = Value::Int(if i < 2 { 1 } else { 2 });
        assert_eq!(checkpoint::open(&cached).unwrap().value("step").unwrap(), step, "save {i}");
    }
    assert_eq!(contents(&scratch.0.join("cached-3")).len(), contents(&scratch.0.join("cached-4")).len() + 1);
}

/// A tensor that changes its layout between saves, a plain tensor that changes its elements, a cache that only some ranks have,
/// and one that thread ranks share.
#[test]
fn a_cache_never_changes_what_is_saved() {
    let scratch = Scratch::new("plan-cache-right");
    let root = scratch.0.clone();
    let common = PlanCache::default();
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let layouts = [Shard(0), Shard(1), Replicate, Shard(0), Shard(0)];
        for (i, placement) in layouts.into_iter().enumerate() {
            // In the last saves one rank begins anew: the ranks no longer remember the same save.
            let cache = if i > 2 && world.rank() == 2 { PlanCache::default() } else { common.clone() };
            let options = SaveOptions { plan_cache: Some(cache), ..SaveOptions::default() };
            let weight = counting(&[6, 6], i as f64);
            let weight = DTensor::distribute_tensor(&weight, &mesh, [placement], None)?;
            let mut state = State::map([("weight", State::from(weight)), ("plain", counting(&[2], i as f64).into())]);
            state.extend([(format!("seed.{}", world.rank()), State::from(i as i64))]);
            let path = root.join(i.to_string());
            checkpoint::save_with(&world, &path, &state, &options)?;
            let template = State::map([("weight", DTensor::zeros((6, 6), DType::F64, &mesh, [Replicate])?)]);
            let found = checkpoint::load(&world, &path, &template)?.tensor("weight")?.to_local()?.to_vec2::<f64>()?;
            assert_eq!(found, counting(&[6, 6], i as f64).to_vec2::<f64>()?, "save {i}");
            let catalog = checkpoint::open(&path)?;
            assert_eq!(catalog.value("seed.2")?, Value::Int(i as i64));
            assert_eq!(catalog.read("plain")?[..8], (i as f64).to_le_bytes(), "save {i}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_contradict_each_other_are_refused_with_a_cache_too() {
    let scratch = Scratch::new("plan-cache-refused");
    let root = scratch.0.clone();
    let error = same_error_on_all_ranks(2, move |world| {
        let options = SaveOptions { plan_cache: Some(PlanCache::default()), ..SaveOptions::default() };
        let state = |step: i64| State::map([("step", step), (["a", "b"][world.rank()], 1)]);
        checkpoint::save_with(&world, root.join("state"), &state(1), &options)?;
        checkpoint::save_with(&world, root.join("state"), &state(2 + world.rank() as i64), &options)
    });
    assert!(error.contains("step = 2 on rank 0, step = 3 on rank 1"), "{error}");
}
