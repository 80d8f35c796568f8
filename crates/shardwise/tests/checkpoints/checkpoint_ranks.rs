//! Saves in which ranks have different entries, another coordinator, hooks and refusals; partial loads.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, CommitHook, ConvertOptions, Format, SaveOptions, State, StateLoadOptions, Value};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, shard_tensor};
use shardwise_test_suites::disagreements;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

fn counting(shape: &[usize], first: f64) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..count).map(|i| first + i as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A mesh of some ranks of the world.
fn mesh_of(world: &World, ranks: Vec<usize>) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("own", ranks.len())], ranks)?)
}

/// Shared layers on all of 4 ranks, expert e on ranks e and e + 2 only, a stage per rank: the state of a rank lists its own.
#[test]
fn entries_of_some_ranks_are_saved_by_them_and_loaded_anywhere() {
    for format in [Format::Native, Format::Dcp, Format::HuggingFace] {
        let scratch = Scratch::new(&format!("experts-{format}"));
        let path = scratch.0.join("state");
        let place = path.clone();
        let options = SaveOptions { format, ..SaveOptions::default() };
        launch(4, move |world| {
            let all = world.mesh([("all", 4)])?;
            let expert = world.rank() % 2;
            let own = mesh_of(&world, vec![expert, expert + 2])?;
            let shared = DTensor::distribute_tensor(&counting(&[5, 3], 0.0), &all, [Shard(0)], None)?;
            let weight = counting(&[3, 4], 100.0 * (1.0 + expert as f64));
            let weight = DTensor::distribute_tensor(&weight, &own, [Shard(1)], None)?;
            let stage = counting(&[2], 1000.0 * (1.0 + world.rank() as f64));
            let mut state = State::map([
                ("shared".to_string(), State::from(shared)),
                (format!("experts.{expert}"), State::from(weight)),
                (format!("stages.{}", world.rank()), State::from(stage)),
            ]);
            if format != Format::HuggingFace {
                state.extend([("step", State::from(9))]);
                state.extend([(format!("seed{}", world.rank()), State::from(world.rank() as i64))]);
            }
            checkpoint::save_with(&world, &place, &state, &options)
        })
        .unwrap();
        let catalog = checkpoint::open(&path).unwrap();
        assert_eq!(catalog.tensors.len(), 1 + 2 + 4, "{format}: {:?}", catalog.tensors.keys());
        if format != Format::HuggingFace {
            assert_eq!(catalog.value("seed3").unwrap(), Value::Int(3));
        }
        let place = path.clone();
        launch(3, move |world| {
            let mesh = world.mesh([("fsdp", 3)])?;
            let like = |shape: &[usize]| DTensor::zeros(shape, DType::F64, &mesh, [Shard(0)]);
            let mut template = vec![("shared".to_string(), State::from(like(&[5, 3])?))];
            let mut expected = vec![("shared".to_string(), counting(&[5, 3], 0.0))];
            for e in 0..2 {
                template.push((format!("experts.{e}"), State::from(like(&[3, 4])?)));
                expected.push((format!("experts.{e}"), counting(&[3, 4], 100.0 * (1.0 + e as f64))));
            }
            for s in 0..4 {
                template.push((format!("stages.{s}"), State::from(like(&[2])?)));
                expected.push((format!("stages.{s}"), counting(&[2], 1000.0 * (1.0 + s as f64))));
            }
            let loaded = checkpoint::load(&world, &place, &State::map(template))?;
            for (key, whole) in expected {
                let found = loaded.tensor(&key)?.full_tensor()?;
                assert_eq!(found.flatten_all()?.to_vec1::<f64>()?, whole.flatten_all()?.to_vec1::<f64>()?, "{key}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn contradicting_and_incomplete_entries_are_refused_on_all_ranks() {
    let scratch = Arc::new(Scratch::new("contradict"));
    let refused = |state: fn(&World) -> Result<State>| {
        let scratch = Arc::clone(&scratch);
        same_error_on_all_ranks(3, move |world| checkpoint::save(&world, scratch.0.join("x"), &state(&world)?))
    };
    let value = refused(|world| Ok(State::map([("lr", world.rank() as i64 / 2)])));
    assert!(value.contains("lr = 0 on rank 0, lr = 1 on rank 2"), "{value}");
    let shape = refused(|world| Ok(State::map([("w", counting(&[2 + world.rank() / 2], 0.0))])));
    assert!(shape.contains("[2]") && shape.contains("[3]") && shape.contains("rank 2"), "{shape}");
    let kind = refused(|world| {
        let tensor = State::from(counting(&[1], 0.0));
        Ok(State::map([("w", if world.rank() == 1 { State::from(1) } else { tensor })]))
    });
    assert!(kind.contains("w = 1 on rank 1"), "{kind}");
    let lacking = refused(|world| {
        let w = DTensor::ones((3, 2), DType::F32, &world.mesh([("all", 3)])?, [Shard(0)])?;
        Ok(if world.rank() == 1 { State::map([("a", 1)]) } else { State::map([("w", w)]) })
    });
    assert!(lacking.contains("no entry \"w\" on rank 1"), "{lacking}");
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0, "nothing was written");
}

#[test]
fn any_rank_may_coordinate_and_hooks_run_there_around_the_commit() {
    let scratch = Scratch::new("coordinator");
    for coordinator in 0..3 {
        for format in [Format::Native, Format::Dcp] {
            let path = scratch.0.join(format!("{format}-{coordinator}"));
            let place = path.clone();
            let calls = Arc::new(AtomicUsize::new(0));
            let seen = Arc::clone(&calls);
            launch(3, move |world| {
                let mesh = world.mesh([("all", 3)])?;
                let state = State::map([
                    ("w", State::from(DTensor::ones((4, 2), DType::F32, &mesh, [Shard(0)])?)),
                    ("step", State::from(coordinator as i64)),
                ]);
                let (before, after, target) = (Arc::clone(&seen), Arc::clone(&seen), place.clone());
                let before_commit = CommitHook::new(move |staged| {
                    assert!(std::fs::read_dir(staged)?.count() >= 2 && !target.exists());
                    before.fetch_add(1, SeqCst);
                    Ok(())
                });
                let after_commit = CommitHook::new(move |path| {
                    checkpoint::open(path)?;
                    after.fetch_add(10, SeqCst);
                    Ok(())
                });
                let options = SaveOptions {
                    format,
                    coordinator,
                    before_commit: Some(before_commit),
                    after_commit: Some(after_commit),
                    ..SaveOptions::default()
                };
                checkpoint::save_with(&world, &place, &state, &options)
            })
            .unwrap();
            assert_eq!(calls.load(SeqCst), 11, "each hook once, before and after");
            assert_eq!(checkpoint::open(&path).unwrap().value("step").unwrap(), Value::Int(coordinator as i64));
        }
    }
    let path = scratch.0.join("refused");
    let place = path.clone();
    let error = same_error_on_all_ranks(2, move |world| {
        let refuse = CommitHook::new(|_| Err(ErrorKind::Argument.error("quota", "9 GB", "8 GB", "delete something")));
        let options = SaveOptions { before_commit: Some(refuse), ..SaveOptions::default() };
        checkpoint::save_with(&world, &place, &State::map([("a", 1)]), &options)
    });
    assert!(error.contains("quota") && error.contains("rank 0"), "{error}");
    assert!(!path.exists() && std::fs::read_dir(&scratch.0).unwrap().count() == 6, "the staged files are gone");
    let outside = same_error_on_all_ranks(2, move |world| {
        let options = SaveOptions { coordinator: 2, ..SaveOptions::default() };
        checkpoint::save_with(&world, &path, &State::map([("a", 1)]), &options)
    });
    assert!(outside.contains("below 2"), "{outside}");
}

#[test]
fn an_existing_checkpoint_is_kept_where_overwriting_is_refused() {
    let scratch = Scratch::new("overwrite");
    let path = scratch.0.join("state");
    let save = |step: i64, overwrite: bool| {
        let place = path.clone();
        ThreadWorld::new(2).unwrap().run(move |world| {
            let options = SaveOptions { overwrite, ..SaveOptions::default() };
            Ok(checkpoint::save_with(&world, &place, &State::map([("step", step)]), &options)
                .map_err(|e| e.to_string()))
        })
    };
    assert!(save(1, false).unwrap().iter().all(Result::is_ok), "nothing is there yet");
    assert!(save(2, true).unwrap().iter().all(Result::is_ok));
    let refused = save(3, false).unwrap();
    assert!(refused.iter().all(|r| r.as_ref().is_err_and(|e| e.contains("already") && e.contains("overwrite"))));
    assert_eq!(checkpoint::open(&path).unwrap().value("step").unwrap(), Value::Int(2), "the old one stays");
    let keep = ConvertOptions { overwrite: false, ..ConvertOptions::to(Format::Native) };
    let (other, target) = (scratch.0.join("other"), path.clone());
    checkpoint::convert(&path, &other, &keep, &|_| {}).unwrap();
    let error = checkpoint::convert(&other, &target, &keep, &|_| {}).unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
}

#[test]
fn urls_are_refused_instead_of_taken_for_relative_paths() {
    for url in ["abc://abc.abc", "s3://bucket/run", "file:///tmp/x"] {
        let error = same_error_on_all_ranks(2, move |world| checkpoint::save(&world, url, &State::map([("a", 1)])));
        assert!(error.contains(url) && error.contains("scheme"), "{error}");
        assert!(checkpoint::open(url).unwrap_err().to_string().contains("scheme"));
        let options = ConvertOptions::to(Format::Native);
        assert!(checkpoint::convert(url, "/tmp/never", &options, &|_| {}).unwrap_err().to_string().contains("scheme"));
    }
    assert!(!PathBuf::from("abc:").exists());
}

fn saved(scratch: &Scratch) -> PathBuf {
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let tensor = |shape: &[usize]| DTensor::distribute_tensor(&counting(shape, 1.0), &mesh, [Shard(0)], None);
        let state = State::map([
            ("model", State::map([("weight", tensor(&[4, 3])?), ("bias", tensor(&[3])?)])),
            ("optimizer", State::map([("state", State::map([("weight.exp_avg", tensor(&[4, 3])?)]))])),
            ("step", State::from(4)),
        ]);
        checkpoint::save(&world, &place, &state)
    })
    .unwrap();
    path
}

#[test]
fn a_partial_load_keeps_what_is_missing_and_lists_both_sides() {
    let scratch = Scratch::new("partial");
    let path = saved(&scratch);
    launch(3, move |world| {
        let mesh = world.mesh([("dp", 3)])?;
        let like = |shape: &[usize]| DTensor::full(7.0, shape, DType::F64, &mesh, [Shard(0)]);
        let template = State::map([
            ("model", State::map([("weight", like(&[4, 3])?), ("extra", like(&[2])?)])),
            ("best", State::from(0.25)),
        ]);
        let strict = checkpoint::load(&world, &path, &template).err().unwrap().to_string();
        assert!(strict.contains("model.extra") && strict.contains("best"), "{strict}");
        let options = StateLoadOptions { allow_partial: true, ..StateLoadOptions::default() };
        let loaded = checkpoint::load_with(&world, &path, &template, &options)?;
        assert_eq!(loaded.missing_keys, ["best", "model.extra"]);
        assert_eq!(loaded.unexpected_keys, ["model.bias", "optimizer.state.weight.exp_avg", "step"]);
        let found = loaded.state.tensor("model.weight")?.full_tensor()?;
        assert_eq!(found.to_vec2::<f64>()?, counting(&[4, 3], 1.0).to_vec2::<f64>()?);
        assert_eq!(loaded.state.tensor("model.extra")?.full_tensor()?.to_vec1::<f64>()?, [7.0, 7.0]);
        assert_eq!(loaded.state.value("best")?, Value::Float(0.25));
        // A shape that differs is not a missing entry.
        let other = State::map([("model", State::map([("weight", like(&[3, 4])?)]))]);
        let error = checkpoint::load_with(&world, &path, &other, &options).err().unwrap().to_string();
        assert!(error.contains("[4, 3] instead of [3, 4]"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn narrowing_is_listed_and_refused_on_request() {
    let scratch = Scratch::new("narrowing");
    let path = saved(&scratch);
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let template = |dtype| -> Result<State> {
            Ok(State::map([("model", State::map([("weight", DTensor::zeros((4, 3), dtype, &mesh, [Shard(0)])?)]))]))
        };
        let strict = StateLoadOptions { allow_narrowing: false, ..StateLoadOptions::default() };
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            let loaded = checkpoint::load_with(&world, &path, &template(dtype)?, &StateLoadOptions::default())?;
            assert_eq!(loaded.narrowed_keys, ["model.weight"]);
            assert_eq!(loaded.state.tensor("model.weight")?.dtype(), dtype);
            let error = checkpoint::load_with(&world, &path, &template(dtype)?, &strict).err().unwrap().to_string();
            assert!(error.contains("f64 instead of") && error.contains("StateLoadOptions"), "{error}");
        }
        assert!(checkpoint::load_with(&world, &path, &template(DType::F64)?, &strict)?.narrowed_keys.is_empty());
        Ok(())
    })
    .unwrap();
}

/// Every type against every dtype: narrowing is what does not hold all values.
#[test]
fn types_narrow_where_values_are_lost() {
    use shardwise::checkpoint::ElementType as E;
    let exact: [(E, &[DType]); 12] = [
        (
            E::U8,
            &[
                DType::U8,
                DType::I16,
                DType::U32,
                DType::I32,
                DType::I64,
                DType::F16,
                DType::BF16,
                DType::F32,
                DType::F64,
            ],
        ),
        (E::I8, &[DType::I16, DType::I32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64]),
        (E::I16, &[DType::I16, DType::I32, DType::I64, DType::F32, DType::F64]),
        (E::U16, &[DType::U32, DType::I32, DType::I64, DType::F32, DType::F64]),
        (E::I32, &[DType::I32, DType::I64, DType::F64]),
        (E::U32, &[DType::U32, DType::I64, DType::F64]),
        (E::I64, &[DType::I64]),
        (E::F16, &[DType::F16, DType::F32, DType::F64]),
        (E::BF16, &[DType::BF16, DType::F32, DType::F64]),
        (E::F32, &[DType::F32, DType::F64]),
        (E::F64, &[DType::F64]),
        (E::F8E4M3, &[DType::F8E4M3, DType::F16, DType::BF16, DType::F32, DType::F64]),
    ];
    let integers = [DType::U8, DType::I16, DType::U32, DType::I32, DType::I64];
    let floats = [DType::F8E4M3, DType::F16, DType::BF16, DType::F32, DType::F64];
    for (element, holds) in exact {
        for dtype in integers.into_iter().chain(floats) {
            assert_eq!(!element.narrows_to(dtype), holds.contains(&dtype), "{element} to {}", dtype.as_str());
        }
    }
}

#[test]
fn entries_below_a_prefix_load_without_a_template() {
    let scratch = Scratch::new("prefix");
    let path = saved(&scratch);
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let place = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(0)])?));
        let state = checkpoint::load_placed(&world, &path, |key| key.starts_with("optimizer.state."), place)?;
        assert_eq!(state.tensor("optimizer.state.weight.exp_avg")?.shape(), [4, 3]);
        assert!(state.get("model").is_none() && state.get("step").is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_load_an_entry_in_different_layouts_get_the_same_error() {
    for ranks in [2, 3] {
        let scratch = Scratch::new(&format!("layouts-{ranks}"));
        let path = scratch.0.join("state");
        launch(ranks, move |world| disagreements::layouts_to_load(&world, &path)).unwrap();
    }
}

#[test]
fn a_failed_background_save_reports_its_error_and_the_next_one_succeeds() {
    let scratch = Scratch::new("background");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let state = State::map([("step", 1)]);
        let fail = CommitHook::new(|_| Err(ErrorKind::Argument.error("disk", "full", "room", "free some")));
        let failing = SaveOptions { before_commit: Some(fail), ..SaveOptions::default() };
        let error = checkpoint::async_save(&world, &path, &state, &failing)?.wait().unwrap_err().to_string();
        assert!(error.contains("disk"), "{error}");
        world.barrier()?;
        checkpoint::async_save(&world, &path, &state, &SaveOptions::default())?.wait()?;
        assert_eq!(checkpoint::open(&path)?.value("step")?, Value::Int(1));
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_empty_state_round_trips() {
    let scratch = Scratch::new("empty");
    for format in [Format::Native, Format::Dcp] {
        let path = scratch.0.join(format.name());
        launch(1, move |world| {
            let empty = || State::Map(std::collections::BTreeMap::new());
            let options = SaveOptions { format, ..SaveOptions::default() };
            checkpoint::save_with(&world, &path, &empty(), &options)?;
            let State::Map(loaded) = checkpoint::load(&world, &path, &empty())? else { panic!("not a map") };
            assert!(loaded.is_empty());
            Ok(())
        })
        .unwrap();
    }
}

/// 32 elements, saved as plain or in four ways of sharding, loaded as plain or in the same four.
#[test]
fn sharded_tensors_and_plain_ones_stand_for_each_other() {
    let scratch = Scratch::new("switch");
    let root = scratch.0.clone();
    launch(4, move |world| {
        let mesh = world.mesh([("all", 4)])?;
        let whole = counting(&[32], 5.0);
        let specs = [vec![0, 1, 2, 3], vec![2, 0], vec![3, 3, 1], vec![1]];
        let forms = |values: &Tensor| -> Result<Vec<State>> {
            let mut all = vec![State::from(values.clone())];
            for ranks in &specs {
                let spec = ChunkShardingSpec::over_ranks(0, ranks.clone())?;
                all.push(State::from(shard_tensor(values, spec, &mesh, None)?));
            }
            Ok(all)
        };
        let zeros = whole.zeros_like()?;
        for (i, from) in forms(&whole)?.into_iter().enumerate() {
            let path = root.join(i.to_string());
            checkpoint::save(&world, &path, &State::map([("x", from)]))?;
            for to in forms(&zeros)? {
                let loaded = checkpoint::load(&world, &path, &State::map([("x", to)]))?;
                let found = match loaded.get("x") {
                    Some(State::Plain(tensor)) => tensor.clone(),
                    Some(State::Sharded(tensor)) => tensor.full_tensor()?,
                    _ => panic!("no tensor"),
                };
                assert_eq!(found.to_vec1::<f64>()?, whole.to_vec1::<f64>()?);
            }
        }
        Ok(())
    })
    .unwrap();
}
