//! Checkpoints: saved in any layout on any world and loaded into any other; values, async saves, and invalid calls.
//!
//! `SHARDWISE_CHECKPOINT_CASES` sets the number of random round trips per format (default 400), `SHARDWISE_SEED` the first
//! seed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use shardwise::DryWorld;
use shardwise::checkpoint::{
    self, ConvertOptions, DiffOptions, ElementType, Format, SaveOptions, Series, State, Value, convert, diff,
};
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor, shard_tensor};
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

const DTYPES: [DType; 9] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I16, DType::U32, DType::U8];

fn whole(shape: &[usize], dtype: DType, salt: usize) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<i64> = (0..count).map(|i| ((i * 37 + salt * 11) % 113) as i64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    let numbers = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && a.dtype() == b.dtype() && numbers(a) == numbers(b)
}

/// A random mesh over some ranks of a world, and placements on it.
fn layout(rng: &mut StdRng, ranks: usize, ndim: usize) -> (Mesh, Vec<Placement>) {
    let axes: Vec<usize> = match ranks {
        4 if rng.random() => vec![2, 2],
        6 => [vec![2, 3], vec![3, 2], vec![6]][rng.random_range(0..3)].clone(),
        n => vec![rng.random_range(1..=n)],
    };
    let mut order: Vec<usize> = (0..ranks).collect();
    order.shuffle(rng);
    order.truncate(axes.iter().product());
    let placement = |rng: &mut StdRng| match rng.random_range(0..6) {
        _ if ndim == 0 => Replicate,
        0 => Replicate,
        1 => Partial(ReduceOp::Sum),
        2 => Placement::block_cyclic(rng.random_range(0..ndim) as isize, rng.random_range(1..3)),
        _ => Shard(rng.random_range(0..ndim) as isize),
    };
    let placements = axes.iter().map(|_| placement(rng)).collect();
    (Mesh::from_ranks(axes, order).unwrap(), placements)
}

fn round_trips(format: Format, name: &str) {
    let (cases, first) = (env_or("SHARDWISE_CHECKPOINT_CASES", 400usize), env_or("SHARDWISE_SEED", 0usize) as u64);
    let scratch = Scratch::new(name);
    for case in 0..cases {
        let seed = first * 1_000_003 + case as u64;
        let mut rng = StdRng::seed_from_u64(seed);
        let (ranks, others) = (rng.random_range(1..7), rng.random_range(1..7));
        let tensors: Vec<(Vec<usize>, DType)> = (0..rng.random_range(1..4))
            .map(|_| {
                let shape = (0..rng.random_range(0..4)).map(|_| rng.random_range(0..8)).collect();
                (shape, DTYPES[rng.random_range(0..DTYPES.len())])
            })
            .collect();
        let from: Vec<_> = tensors.iter().map(|(shape, _)| layout(&mut rng, ranks, shape.len())).collect();
        let to: Vec<_> = tensors.iter().map(|(shape, _)| layout(&mut rng, others, shape.len())).collect();
        let options = SaveOptions { format, ..SaveOptions::default() };
        let (path, label) = (scratch.0.join("state"), format!("seed {seed}: {tensors:?} {from:?} to {to:?}"));
        let (saved, place, kinds) = (tensors.clone(), path.clone(), label.clone());
        launch(ranks, move |world| {
            let mut entries = Vec::new();
            for (i, ((shape, dtype), (mesh, placements))) in saved.iter().zip(&from).enumerate() {
                let (mesh, table) = (world.device_mesh(mesh.clone())?, whole(shape, *dtype, i));
                entries.push((format!("t{i}"), DTensor::distribute_tensor(&table, &mesh, placements.clone(), None)?));
            }
            checkpoint::save_with(&world, &place, &State::map(entries), &options)
        })
        .unwrap_or_else(|error| panic!("{label}: {error}"));
        launch(others, move |world| {
            let mut template = Vec::new();
            for (i, ((shape, dtype), (mesh, placements))) in tensors.iter().zip(&to).enumerate() {
                let mesh = world.device_mesh(mesh.clone())?;
                template.push((format!("t{i}"), DTensor::zeros(shape.as_slice(), *dtype, &mesh, placements.clone())?));
            }
            let loaded = checkpoint::load(&world, &path, &State::map(template))?;
            for (i, ((shape, dtype), (mesh, _))) in tensors.iter().zip(&to).enumerate() {
                let tensor = loaded.tensor(&format!("t{i}"))?;
                if mesh.contains(world.rank()) {
                    assert!(same(&tensor.full_tensor()?, &whole(shape, *dtype, i)), "tensor {i}, {kinds}");
                }
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{label}: {error}"));
    }
    println!("{cases} round trips in {format:?} from seed {first}");
}

#[test]
fn any_layout_loads_into_any_other_from_native() {
    round_trips(Format::Native, "native");
}

#[test]
fn any_layout_loads_into_any_other_from_hugging_face() {
    round_trips(Format::HuggingFace, "hf");
}

#[test]
fn any_layout_loads_into_any_other_from_dcp() {
    round_trips(Format::Dcp, "dcp");
}

fn nested(mesh: &DeviceMesh) -> Result<State> {
    let rows = ChunkShardingSpec::over_ranks(0, mesh.ranks().iter().rev().copied())?;
    Ok(State::map([
        ("model", State::map([("w", DTensor::arange(0.0..10.0, DType::F32, mesh, [Shard(0)])?)])),
        ("sharded", State::from(shard_tensor(&whole(&[5, 2], DType::I64, 3), rows, mesh, None)?)),
        ("plain", State::from(whole(&[3], DType::F64, 1))),
        ("step", State::from(-7)),
        ("rate", State::from(0.1)),
        ("infinite", State::from(f64::NEG_INFINITY)),
        ("name", State::from("naïve \"run\"")),
        ("none", State::Value(Value::None)),
        ("pair", State::Value(Value::Tuple(vec![4.into(), "five".into()]))),
        ("list", State::list([1, 2, 3])),
        ("mixed", State::list([State::from(whole(&[2], DType::U8, 5)), State::from(true)])),
        ("empty", State::Map(Default::default())),
        ("generator", State::from(mesh.generator().state())),
    ]))
}

#[test]
fn nested_state_round_trips() {
    nested_state(Format::Native, "nested");
}

#[test]
fn nested_state_round_trips_through_dcp() {
    nested_state(Format::Dcp, "nested-dcp");
}

fn nested_state(format: Format, name: &str) {
    let scratch = Scratch::new(name);
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        mesh.manual_seed(u64::MAX - 5);
        checkpoint::save_with(&world, &place, &nested(&mesh)?, &SaveOptions { format, ..SaveOptions::default() })
    })
    .unwrap();
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let template = nested(&mesh)?;
        let State::Map(mut entries) = template else { unreachable!("a map") };
        // other values and types in the template: values come from the checkpoint, types are the template's
        let zeros = DTensor::zeros(10, DType::F32, &mesh, [Shard(0)])?;
        let Some(State::Sharded(sharded)) = entries.get("sharded") else { panic!("a sharded tensor") };
        let sharded = sharded.zeros_like()?;
        for (key, other) in [
            ("model", State::map([("w", zeros)])),
            ("sharded", State::from(sharded)),
            ("plain", State::from(whole(&[3], DType::BF16, 0))),
            ("step", State::from(0)),
            ("rate", State::from(0.0)),
            ("infinite", State::from(0.0)),
            ("name", State::from("other")),
            ("pair", State::Value(Value::Tuple(vec![0.into(), "".into()]))),
            ("list", State::list([0])),
            ("mixed", State::list([State::from(whole(&[2], DType::U8, 0)), State::from(false)])),
        ] {
            entries.insert(key.to_string(), other);
        }
        let loaded = checkpoint::load(&world, &path, &State::Map(entries))?;
        assert_eq!(loaded.tensor("model.w")?.full_tensor()?.to_vec1::<f32>()?[9], 9.0);
        let Some(State::Sharded(sharded)) = loaded.get("sharded") else { panic!("a sharded tensor") };
        assert!(same(&sharded.full_tensor()?, &whole(&[5, 2], DType::I64, 3)));
        let Some(State::Plain(plain)) = loaded.get("plain") else { panic!("a plain tensor") };
        assert!(same(plain, &whole(&[3], DType::BF16, 1)));
        for (key, expected) in [
            ("step", Value::Int(-7)),
            ("rate", Value::Float(0.1)),
            ("infinite", Value::Float(f64::NEG_INFINITY)),
            ("name", Value::Text("naïve \"run\"".to_string())),
            ("none", Value::None),
            ("pair", Value::Tuple(vec![Value::Int(4), Value::Text("five".to_string())])),
            ("list", Value::List(vec![Value::Int(1), Value::Int(2), Value::Int(3)])),
            ("mixed.1", Value::Bool(true)),
            ("empty", Value::Map(Default::default())),
        ] {
            assert_eq!(loaded.value(key)?, expected, "{key}");
        }
        let generator: shardwise::random::GeneratorState = loaded.get("generator").unwrap().try_into()?;
        assert_eq!(generator.seed, u64::MAX - 5);
        let everything = checkpoint::load_placed(
            &world,
            &path,
            |_| true,
            |_, shape| Ok((mesh.clone(), Layout::replicated(mesh.mesh(), shape)?)),
        )?;
        assert_eq!(everything.value("mixed.1")?, Value::Bool(true));
        assert!(same(&everything.tensor("mixed.0")?.to_local()?, &whole(&[2], DType::U8, 5)));
        Ok(())
    })
    .unwrap();
}

#[test]
fn each_box_is_written_once_and_bytes_are_balanced_over_ranks() {
    let scratch = Scratch::new("balance");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(4, move |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let entry = |i: usize| {
            let placements = [[Replicate, Replicate], [Replicate, Shard(0)], [Shard(0), Shard(1)]][i % 3].clone();
            Ok((format!("t{i}"), DTensor::zeros((64, 64), DType::F32, &mesh, placements)?))
        };
        checkpoint::save(&world, &place, &State::map((0..12).map(entry).collect::<Result<Vec<_>>>()?))
    })
    .unwrap();
    let catalog = checkpoint::open(&path).unwrap();
    let stored: usize = catalog.tensors.values().flat_map(|t| &t.chunks).map(|c| c.part.volume()).sum();
    assert_eq!(stored, 12 * 64 * 64);
    let mut sizes: Vec<u64> = std::fs::read_dir(&path)
        .unwrap()
        .map(|e| e.unwrap())
        .filter(|e| e.file_name() != "manifest.json")
        .map(|e| e.metadata().unwrap().len())
        .collect();
    sizes.sort_unstable();
    assert_eq!(sizes.len(), 4);
    assert!(sizes[3] - sizes[0] < 17 << 10, "{sizes:?}");
}

#[test]
fn an_async_save_is_a_snapshot_and_does_not_block() {
    let scratch = Scratch::new("async");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let weight = Param::new(&DTensor::ones((1000, 100), DType::F32, &mesh, [Shard(0)])?);
        let state = State::map([("w", weight.get())]);
        let saving = checkpoint::async_save(&world, &place, &state, &SaveOptions::default())?;
        // collectives and updates run while it is written
        for _ in 0..20 {
            weight.set(&weight.get().detach().mul_scalar(2.0)?)?;
            let sum = weight.get().sum_all()?.item::<f32>()?;
            assert!(sum > 100_000.0);
        }
        saving.wait()
    })
    .unwrap();
    let catalog = checkpoint::open(&path).unwrap();
    assert!(catalog.read("w").unwrap().chunks(4).all(|x| x == 1f32.to_le_bytes()));
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "nothing is left next to the checkpoint");
}

#[test]
fn invalid_saves_and_loads_are_one_error_on_all_ranks_and_change_nothing() {
    let scratch = Arc::new(Scratch::new("refused"));
    let save = |name: &'static str, state: fn(&DeviceMesh, usize) -> Result<State>| {
        let scratch = Arc::clone(&scratch);
        same_error_on_all_ranks(2, move |world| {
            let state = state(&world.mesh([("all", 2)])?, world.rank())?;
            checkpoint::save(&world, scratch.0.join(name), &state)
        })
    };
    let differs = save("a", |_, rank| Ok(State::map([("step", rank as i64)])));
    assert!(differs.contains("state to save") && differs.contains("step = 1"), "{differs}");
    let plain = save("b", |_, rank| Ok(State::map([("p", whole(&[2], DType::F32, rank))])));
    assert!(plain.contains("state to save"), "{plain}");
    let twice = save("c", |_, _| Ok(State::map([("a.b", State::from(1)), ("a", State::map([("b", 2)]))])));
    assert!(twice.contains("\"a.b\"") && twice.contains("rename"), "{twice}");
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0, "nothing was written");

    let good = scratch.0.join("good");
    let place = good.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let w = DTensor::ones((4, 3), DType::F32, &mesh, [Shard(0)])?;
        checkpoint::save(&world, &place, &State::map([("weight", State::from(w)), ("n", State::from(1))]))
    })
    .unwrap();
    let place = good.clone();
    let missing = same_error_on_all_ranks(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let like = |shape: (usize, usize)| DTensor::zeros(shape, DType::F32, &mesh, [Replicate]);
        let template = State::map([
            ("weights", State::from(like((4, 3))?)),
            ("weight", State::from(like((3, 4))?)),
            ("m", State::from(0)),
        ]);
        checkpoint::load(&world, &place, &template).map(drop)
    });
    for said in ["no tensor \"weights\"", "`weight` as the nearest", "[4, 3] instead of [3, 4]", "no value \"m\""] {
        assert!(missing.contains(said), "{said}: {missing}");
    }
    let nowhere = same_error_on_all_ranks(2, move |world| {
        checkpoint::load(&world, "/nowhere/at/all", &State::map([("a", 1)])).map(drop)
    });
    assert!(nowhere.contains("no such file or directory") && nowhere.contains("/nowhere/at/all"), "{nowhere}");
    let read_only =
        same_error_on_all_ranks(2, move |world| checkpoint::save(&world, "/proc/nothing", &State::map([("a", 1)])));
    assert!(read_only.contains("rank 0"), "{read_only}");
    let values = same_error_on_all_ranks(1, {
        let place = scratch.0.join("values");
        move |world| {
            let options = SaveOptions { format: Format::HuggingFace, ..SaveOptions::default() };
            checkpoint::save_with(&world, &place, &State::map([("a", 1)]), &options)
        }
    });
    assert!(values.contains("tensors only"), "{values}");
    let dry = DryWorld::new(4).unwrap().run(|world| checkpoint::save(&world, "x", &State::map([("a", 1)])));
    assert!(dry.unwrap_err().to_string().contains("dry run"));
    check_weight(&good);
}

#[test]
fn long_lists_keep_their_order() {
    let scratch = Scratch::new("long");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let entry = |i: usize| DTensor::full(i as f64, 3, DType::F32, &mesh, [Shard(0)]);
        let list = State::list((0..25).map(entry).collect::<Result<Vec<_>>>()?);
        checkpoint::save(&world, &path, &State::map([("list", list.clone())]))?;
        let loaded = checkpoint::load(&world, &path, &State::map([("list", list)]))?;
        for i in 0..25 {
            let value = loaded.tensor(&format!("list.{i}"))?.full_tensor()?.to_vec1::<f32>()?;
            assert_eq!(value, [i as f32; 3]);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_save_replaces_nothing_but_checkpoints() {
    let scratch = Arc::new(Scratch::new("precious"));
    let project = scratch.0.join("project");
    std::fs::create_dir_all(project.join("inner")).unwrap();
    std::fs::write(project.join("notes.txt"), "mine").unwrap();
    for (place, said) in [("project", "would be lost"), ("project/notes.txt", "a file")] {
        let target = scratch.0.join(place);
        let error = same_error_on_all_ranks(2, move |world| checkpoint::save(&world, &target, &State::map([("a", 1)])));
        assert!(error.contains(said), "{error}");
    }
    assert_eq!(std::fs::read_to_string(project.join("notes.txt")).unwrap(), "mine");
    // a series below, converted to the directory that it is in
    let (steps, place) = (scratch.0.join("run"), scratch.0.join("run"));
    launch(1, move |world| {
        let x = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        Series::new(&place).save(&world, 1, &State::map([("x", x)]))
    })
    .unwrap();
    let options = ConvertOptions::to(Format::Native);
    let error = convert(steps.join("step-00000001"), &steps, &options, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("contains the source"), "{error}");
    // two saves to the same path at the same time
    let target = scratch.0.join("twice");
    let error = same_error_on_all_ranks(2, move |world| {
        let state = State::map([("a", 1)]);
        let first = checkpoint::async_save(&world, &target, &state, &SaveOptions::default())?;
        let second = checkpoint::async_save(&world, &target, &state, &SaveOptions::default());
        first.wait()?;
        // The first may have finished before the second began.
        second.and_then(checkpoint::AsyncSave::wait).and(Err(Error::other("in progress")))
    });
    assert!(error.contains("in progress"), "{error}");
    assert!(checkpoint::verify(scratch.0.join("twice"), &|_| {}).is_intact());
}

#[test]
fn a_series_keeps_the_newest_after_resuming_from_an_older_checkpoint() {
    let scratch = Scratch::new("series");
    let series = Series::new(scratch.0.join("run")).keep(2);
    let saving = series.clone();
    launch(2, move |world| {
        for step in [10, 20, 30, 15] {
            saving.save(&world, step, &State::map([("step", step as i64)]))?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(series.steps().unwrap(), [15, 20, 30]);
    std::fs::create_dir(scratch.0.join("run").join("step-7")).unwrap();
    assert_eq!(series.steps().unwrap(), [15, 20, 30], "only its own names count");
}

#[test]
fn conversions_preserve_tensors_and_values_and_diff_finds_changes() {
    let scratch = Scratch::new("convert");
    let (native, place) = (scratch.0.join("native"), scratch.0.join("native"));
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        checkpoint::save(&world, &place, &nested(&mesh)?)
    })
    .unwrap();
    let first = checkpoint::open(&native).unwrap();
    for (format, name) in [(Format::Dcp, "dcp"), (Format::HuggingFace, "hf"), (Format::Native, "again")] {
        let to = scratch.0.join(name);
        let mut options = ConvertOptions { max_file_bytes: 60, ..ConvertOptions::to(format) };
        let done = convert(&native, &to, &options, &|_| {}).unwrap();
        assert_eq!((done.tensors, done.left_out.is_empty()), (first.tensors.len(), format != Format::HuggingFace));
        assert!(checkpoint::verify(&to, &|_| {}).is_intact());
        let second = checkpoint::open(&to).unwrap();
        let found = diff(&first, &second, DiffOptions::default()).unwrap();
        let tensors: Vec<_> = found.iter().filter(|(key, _)| first.tensors.contains_key(key)).collect();
        assert!(tensors.is_empty(), "{format:?}: {tensors:?}");
        assert!(format != Format::Native || found.is_empty(), "{found:?}");
        // resharded for four ranks, in bf16, renamed
        let mesh = Mesh::new([4]).unwrap();
        options.reshard = Some(Arc::new(move |_, shape| {
            let placement = if shape.is_empty() { Replicate } else { Shard(0) };
            Ok(Layout::new(&mesh, shape, [placement])?.primary_boxes().collect())
        }));
        options.element = Some(ElementType::BF16);
        options.rename = Arc::new(|name| format!("new.{name}"));
        let resharded = scratch.0.join(format!("{name}-resharded"));
        convert(&to, &resharded, &options, &|_| {}).unwrap();
        let third = checkpoint::open(&resharded).unwrap();
        let w = third.tensor("new.model.w").unwrap();
        assert_eq!((w.element, w.chunks.len()), (ElementType::BF16, 4));
        assert_eq!(third.tensor("new.sharded").unwrap().element, ElementType::I64, "integers stay");
    }
    // integers that are equal as f64, and infinities
    let write = |name: &str, big: i64, x: f64| {
        let path = scratch.0.join(name);
        let place = path.clone();
        launch(1, move |world| {
            let numbers = Tensor::new(&[big], &Device::Cpu)?;
            let x = Tensor::new(&[x], &Device::Cpu)?;
            checkpoint::save(&world, &place, &State::map([("n", State::from(numbers)), ("x", State::from(x))]))
        })
        .unwrap();
        checkpoint::open(&path).unwrap()
    };
    let (a, b) = (write("a", (1 << 53) + 1, 1.0), write("b", 1 << 53, f64::INFINITY));
    let found = diff(&a, &b, DiffOptions::default()).unwrap();
    assert_eq!(found.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["n", "x"]);
    let found = diff(&a, &b, DiffOptions { rtol: 1e-3, ..DiffOptions::default() }).unwrap();
    assert_eq!(found.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["x"]);
    let loads = checkpoint::dry_load(&first, &Mesh::new([2]).unwrap(), |_: &str, shape: &[usize]| {
        Ok(vec![if shape.is_empty() { Replicate } else { Shard(0) }])
    })
    .unwrap();
    assert_eq!(loads.iter().map(|l| l.read_bytes).sum::<usize>(), first.bytes());
    assert!(loads.iter().all(|l| l.peak_bytes == l.tensor_bytes && l.files > 0), "{loads:?}");
}

fn check_weight(path: &Path) {
    let catalog = checkpoint::open(path).unwrap();
    let stored = catalog.tensor("weight").unwrap();
    assert_eq!((stored.element, stored.shape.as_slice()), (ElementType::F32, [4, 3].as_slice()));
}

#[test]
fn a_rank_that_dies_while_saving_leaves_the_old_checkpoint() {
    let scratch = Scratch::new("dies");
    let path = scratch.0.join("state");
    let save = |value: f64, dies: bool, path: PathBuf| {
        launch(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let x = DTensor::full(value, 8, DType::F32, &mesh, [Shard(0)])?;
            let options = SaveOptions { deadline: Duration::from_secs(20), ..SaveOptions::default() };
            let saving = checkpoint::async_save(&world, &path, &State::map([("x", x)]), &options)?;
            if dies && world.rank() == 1 {
                return Err(Error::other("rank 1 gives up"));
            }
            saving.wait()
        })
    };
    save(1.0, false, path.clone()).unwrap();
    let error = save(2.0, true, path.clone()).unwrap_err().to_string();
    assert!(error.contains("rank 1 gives up"), "{error}");
    // Rank 1 may have written its files before it failed, so the new checkpoint may be complete; a mixture never is.
    let bytes = checkpoint::open(&path).unwrap().read("x").unwrap();
    let values: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert!(values == [1.0; 8] || values == [2.0; 8], "{values:?}");
}

#[test]
fn sharded_tensors_without_shards_on_some_ranks_are_saved() {
    let scratch = Scratch::new("sharded");
    let path = scratch.0.join("state");
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let spec = ChunkShardingSpec::over_ranks(1, [2, 0, 2])?;
        let x = ShardedTensor::randn(spec, (3, 7), DType::F32, &mesh)?;
        checkpoint::save(&world, &path, &State::map([("x", x.clone())]))?;
        let template = ShardedTensor::zeros(ChunkShardingSpec::over_ranks(0, [1])?, (3, 7), DType::F32, &mesh)?;
        let loaded = checkpoint::load(&world, &path, &State::map([("x", template)]))?;
        let Some(State::Sharded(loaded)) = loaded.get("x") else { panic!("a sharded tensor") };
        assert!(loaded.equal(&x)?);
        Ok(())
    })
    .unwrap();
}
