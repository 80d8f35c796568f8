//! What PyTorch's tests of distributed checkpoints require in detail: which chunks are listed, how many bytes a load reads, types
//! that differ, boxes of any sizes, values that replace those of the template, files of ranks, groups of optimizers.

use std::path::Path;

use candle_core::{Device, Tensor};
use shardwise::TensorBox;
use shardwise::checkpoint::{
    self, ConvertOptions, ElementType, Format, Restore, SaveOptions, State, StateLoadOptions, Stateful, Value,
};
use shardwise::error::ErrorKind;
use shardwise::nn::Linear;
use shardwise::optim::ParamGroup;
use shardwise::prelude::*;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor,
    shard_tensor,
};
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

fn counting(shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| i as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn in_format(format: Format) -> SaveOptions {
    SaveOptions { format, ..SaveOptions::default() }
}

#[test]
fn entries_are_listed_with_their_chunks_and_types() {
    for format in [Format::Native, Format::Dcp] {
        let scratch = Scratch::new(&format!("listed-{format}"));
        let path = scratch.0.join("state");
        let place = path.clone();
        launch(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let on_one = ChunkShardingSpec::over_ranks(0, [1])?;
            let state = State::map([
                (
                    "sharded",
                    State::from(shard_tensor(
                        &counting(&[10, 10]),
                        ChunkShardingSpec::over_ranks(0, 0..2)?,
                        &mesh,
                        None,
                    )?),
                ),
                ("copies", State::from(DTensor::ones(4, DType::F32, &mesh, [Replicate])?)),
                ("on_one", State::from(ShardedTensor::ones(on_one, (4, 4), DType::F64, &mesh)?)),
                ("list", State::list([1, 2, 3])),
            ]);
            checkpoint::save_with(&world, &place, &state, &in_format(format))
        })
        .unwrap();
        let catalog = checkpoint::open(&path).unwrap();
        let listed = |key: &str| {
            let tensor = catalog.tensor(key).unwrap();
            let chunks: Vec<_> = tensor.chunks.iter().map(|c| (c.part.offsets.clone(), c.part.sizes.clone())).collect();
            (tensor.element, tensor.shape.clone(), chunks)
        };
        let rows = vec![(vec![0, 0], vec![5, 10]), (vec![5, 0], vec![5, 10])];
        assert_eq!(listed("sharded"), (ElementType::F64, vec![10, 10], rows), "{format}");
        assert_eq!(listed("copies"), (ElementType::F32, vec![4], vec![(vec![0], vec![4])]), "{format}");
        assert_eq!(listed("on_one"), (ElementType::F64, vec![4, 4], vec![(vec![0, 0], vec![4, 4])]), "{format}");
        assert_eq!(catalog.value("list").unwrap(), Value::List(vec![1.into(), 2.into(), 3.into()]), "{format}");
        // Entries and boxes that are not there.
        let error = catalog.tensor("sharde").unwrap_err().to_string();
        assert!(error.contains("sharde"), "{error}");
        assert!(catalog.value("lists").is_err() && catalog.value("sharded").is_err());
        let rows = |start: usize| TensorBox { offsets: vec![start, 0], sizes: vec![2, 10] };
        let expected: Vec<u8> = (40..60).flat_map(|i| f64::from(i).to_le_bytes()).collect();
        assert_eq!(catalog.read_box("sharded", &rows(4)).unwrap(), expected, "{format}: across two chunks");
        assert!(catalog.read_box("sharded", &rows(9)).is_err(), "{format}: beyond the last row");
    }
}

/// Saves 0, 1, ... over `from` ranks; loads it in `placement` on `to` ranks. Elements and bytes of each rank.
fn read_by(path: &Path, count: usize, from: usize, to: usize, placement: Placement) -> Vec<(Vec<f64>, u64)> {
    let place = path.to_path_buf();
    launch(from, move |world| {
        let mesh = world.mesh([("all", from)])?;
        let x = DTensor::distribute_tensor(&counting(&[count]), &mesh, [Shard(0)], None)?;
        checkpoint::save(&world, &place, &State::map([("x", x)]))
    })
    .unwrap();
    let place = path.to_path_buf();
    let load = move |world: World| {
        let mesh = world.mesh([("all", to)])?;
        let like = DTensor::zeros(count, DType::F64, &mesh, [placement.clone()])?;
        let loaded = checkpoint::load_with(&world, &place, &State::map([("x", like)]), &StateLoadOptions::default())?;
        Ok((numbers(&loaded.state.tensor("x")?.to_local()?), loaded.report.bytes))
    };
    ThreadWorld::new(to).unwrap().run(load).unwrap()
}

#[test]
fn a_load_in_another_world_reads_the_elements_that_it_needs_and_no_more() {
    let scratch = Scratch::new("needed-bytes");
    for (count, from, to) in [(128, 8, 4), (128, 4, 8), (120, 4, 3)] {
        let each = count / to;
        for (rank, (found, bytes)) in
            read_by(&scratch.0.join("state"), count, from, to, Shard(0)).into_iter().enumerate()
        {
            let expected: Vec<f64> = (rank * each..(rank + 1) * each).map(|i| i as f64).collect();
            assert_eq!(
                (found, bytes),
                (expected, 8 * each as u64),
                "{count} elements from {from} to {to}, rank {rank}"
            );
        }
    }
    // Two chunks of 8, of which rank 1 needs 4..11: the end of one and the beginning of the other.
    let found = read_by(&scratch.0.join("state"), 16, 2, 3, Placement::ragged(0, [4, 7, 5]));
    assert_eq!(found[1], ((4..11).map(f64::from).collect(), 7 * 8));
}

#[test]
fn elements_are_converted_to_the_type_of_the_template() {
    for format in [Format::Native, Format::Dcp] {
        let scratch = Scratch::new(&format!("converted-{format}"));
        let root = scratch.0.clone();
        launch(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            // Neither type holds these numbers exactly.
            let thirds = (counting(&[5, 3]) / 3.0)?;
            for (stored, wanted) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::F32, DType::F64)] {
                let path = root.join(format!("{stored:?}-{wanted:?}"));
                let values = thirds.to_dtype(stored)?;
                let x = DTensor::distribute_tensor(&values, &mesh, [Shard(0)], None)?;
                checkpoint::save_with(&world, &path, &State::map([("x", x)]), &in_format(format))?;
                let like = DTensor::zeros((5, 3), wanted, &mesh, [Shard(1)])?;
                let loaded = checkpoint::load(&world, &path, &State::map([("x", like)]))?;
                let found = loaded.tensor("x")?.full_tensor()?;
                assert_eq!(found.dtype(), wanted);
                assert_eq!(numbers(&found), numbers(&values.to_dtype(wanted)?), "{stored:?} as {wanted:?}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// 10 x 20 on two ranks: two chunks, four chunks on 0, 1, 1, 0, five boxes of different sizes, and two boxes of 8 and 2 rows.
#[test]
fn sharded_tensors_load_from_every_spec_into_every_other() {
    let scratch = Scratch::new("spec-pairs");
    let root = scratch.0.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let part = |offsets: [usize; 2], sizes: [usize; 2], rank: usize| {
            ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank)))
        };
        let five = [
            part([0, 0], [2, 2], 0)?,
            part([0, 2], [2, 18], 1)?,
            part([2, 0], [8, 8], 1)?,
            part([2, 8], [8, 6], 0)?,
            part([2, 14], [8, 6], 0)?,
        ];
        let specs: [AnyShardingSpec; 4] = [
            ChunkShardingSpec::over_ranks(0, [0, 1])?.into(),
            ChunkShardingSpec::over_ranks(0, [0, 1, 1, 0])?.into(),
            EnumerableShardingSpec::new(five)?.into(),
            EnumerableShardingSpec::new([part([0, 0], [8, 20], 1)?, part([8, 0], [2, 20], 0)?])?.into(),
        ];
        let whole = counting(&[10, 20]);
        for (i, from) in specs.iter().enumerate() {
            let path = root.join(i.to_string());
            let saved = shard_tensor(&whole, from.clone(), &mesh, None)?;
            checkpoint::save(&world, &path, &State::map([("x", saved.clone())]))?;
            for to in &specs {
                let like = ShardedTensor::zeros(to.clone(), (10, 20), DType::F64, &mesh)?;
                let loaded = checkpoint::load(&world, &path, &State::map([("x", like)]))?;
                let Some(State::Sharded(found)) = loaded.get("x") else { panic!("a sharded tensor") };
                assert_eq!(found.sharding_spec(), to);
                assert!(found.equal(&saved)?, "{from} to {to}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// An object of the program with a state of its own.
struct Counter {
    count: i64,
    restored: usize,
}

impl Stateful for &mut Counter {
    fn entry(&self) -> &str {
        "counter"
    }

    fn state(&self) -> Result<State> {
        Ok(State::map([("count", self.count)]))
    }
}

impl Restore for &mut Counter {
    fn restore(&mut self, loaded: &State) -> Result<()> {
        self.count = loaded.value("count")?.read()?;
        self.restored += 1;
        Ok(())
    }
}

#[test]
fn stored_values_replace_those_of_templates_and_objects() {
    for format in [Format::Native, Format::Dcp] {
        let scratch = Scratch::new(&format!("replaced-{format}"));
        let (plain, object) = (scratch.0.join("plain"), scratch.0.join("object"));
        launch(2, move |world| {
            let state = |numbers: Vec<i64>, text: &str, deep: i64| {
                State::map([
                    ("list", State::list(numbers)),
                    ("text", State::from(text)),
                    ("nested", State::map([("deep", State::list([State::map([("value", deep)])]))])),
                ])
            };
            checkpoint::save_with(&world, &plain, &state(vec![1], "string", 5), &in_format(format))?;
            let loaded = checkpoint::load(&world, &plain, &state(vec![2], "other", 6))?;
            assert_eq!(loaded.value("list")?, Value::List(vec![1.into()]));
            assert_eq!(loaded.value("text")?, Value::Text("string".into()));
            assert_eq!(loaded.value("nested.deep.0.value")?, Value::Int(5));
            for unknown in ["texts", "list.1", "nested.deep.1", "nested.deep.0.value.x"] {
                assert!(loaded.get(unknown).is_none(), "{unknown}");
            }
            // Objects are updated where they are.
            let mut counter = Counter { count: 7, restored: 0 };
            checkpoint::save_from_with(&world, &object, (&mut counter,), &in_format(format))?;
            counter.count = 0;
            checkpoint::load_into(&world, &object, (&mut counter,))?;
            assert_eq!((counter.count, counter.restored), (7, 1));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn hugging_face_saves_have_a_file_per_rank_and_load_without_a_template() {
    let scratch = Scratch::new("hf-files");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let rows = DTensor::distribute_tensor(&counting(&[5, 3]), &mesh, [Shard(0)], None)?;
        let columns = DTensor::distribute_tensor(&counting(&[2, 7]), &mesh, [Shard(1)], None)?;
        checkpoint::save_with(
            &world,
            &place,
            &State::map([("rows", rows), ("columns", columns)]),
            &in_format(Format::HuggingFace),
        )
    })
    .unwrap();
    let mut files: Vec<String> =
        std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.retain(|name| name.ends_with(".safetensors"));
    files.sort();
    assert_eq!(files, ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"]);
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let place = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(0)])?));
        let loaded = checkpoint::load_placed(&world, &path, |_| true, place)?;
        for (key, shape) in [("rows", [5, 3]), ("columns", [2, 7])] {
            let found = loaded.tensor(key)?;
            assert_eq!((found.shape(), numbers(&found.full_tensor()?)), (&shape[..], numbers(&counting(&shape))));
        }
        Ok(())
    })
    .unwrap();
}

/// A file that PyTorch's `torch.save` wrote becomes a distributed checkpoint, from which ranks load their parts.
#[test]
fn a_torch_save_file_becomes_a_checkpoint_that_ranks_load_in_parts() {
    let scratch = Scratch::new("torch-to-dcp");
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/dcp/torch_save");
    let path = scratch.0.join("dcp");
    checkpoint::convert(recorded.join("checkpoint/model.pt"), &path, &ConvertOptions::to(Format::Dcp), &|_| {})
        .unwrap();
    let expected = checkpoint::open(recorded.join("expected.safetensors")).unwrap();
    assert!(expected.tensors.values().any(|tensor| tensor.shape.len() == 2));
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let place = |_: &str, shape: &[usize]| {
            let placement = if shape.is_empty() { Replicate } else { Shard(shape.len() as isize - 1) };
            Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [placement])?))
        };
        let loaded = checkpoint::load_placed(&world, &path, |_| true, place)?;
        let place = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::replicated(mesh.mesh(), shape)?));
        let whole = checkpoint::load_placed(&world, recorded.join("expected.safetensors"), |_| true, place)?;
        for key in expected.tensors.keys() {
            let (found, expected) = (loaded.tensor(key)?, whole.tensor(key)?);
            assert_eq!((found.shape(), found.dtype()), (expected.shape(), expected.dtype()), "{key}");
            assert_eq!(numbers(&found.full_tensor()?), numbers(&expected.full_tensor()?), "{key}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn groups_with_their_own_rates_and_an_empty_one_are_restored() {
    let scratch = Scratch::new("groups");
    for ranks in [1, 2] {
        let path = scratch.0.join(ranks.to_string());
        launch(ranks, move |world| {
            let mesh = world.mesh([("dp", ranks)])?;
            let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 5)?;
            let optimizer = |rates: [f64; 3]| -> Result<ShardedOptimizer> {
                let [weight, bias] = [0, 1].map(|i| layer.named_parameters().swap_remove(i));
                let group = |i: usize| ParamGroup::new(AdamW::default()).with_lr(rates[i]);
                let mut optimizer = ShardedOptimizer::new([weight], group(0))?;
                optimizer.add_param_group([bias], group(1))?;
                optimizer.add_param_group([], group(2))?;
                Ok(optimizer)
            };
            let rates =
                |optimizer: &ShardedOptimizer| optimizer.groups().iter().map(|group| group.lr).collect::<Vec<_>>();
            let mut trained = optimizer([0.1, 0.2, 0.3])?;
            let x = DTensor::ones((2, 3), DType::F32, &mesh, [Replicate])?;
            trained.step(layer.forward(&x)?.square()?.sum_all()?.backward()?)?;
            let mut from_state = optimizer([9.0; 3])?;
            from_state.load_state_dict(&trained.state_dict()?)?;
            let mut from_full = optimizer([9.0; 3])?;
            from_full.load_full_state(&trained.state_dict()?.to_full()?)?;
            let mut from_file = optimizer([9.0; 3])?;
            checkpoint::save_from(&world, &path, (&trained,))?;
            checkpoint::load_into(&world, &path, (&mut from_file,))?;
            let expected = trained.state_dict()?.to_full()?;
            for loaded in [from_state, from_full, from_file] {
                assert_eq!((rates(&loaded), loaded.steps()), (vec![0.1, 0.2, 0.3], 1));
                let found = loaded.state_dict()?.to_full()?;
                for (name, state) in &expected.params {
                    assert_eq!(found.params[name].numbers, state.numbers);
                    for (kind, tensor) in &state.tensors {
                        assert_eq!(numbers(&found.params[name].tensors[kind]), numbers(tensor), "{name} {kind}");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Options that differ between ranks are found before anything is read: an error on all of them, where ranks that share reads
/// would wait for ranks that do not, or get elements without their scales.
#[test]
fn ranks_that_pass_different_options_get_one_error_before_anything_is_read() {
    let scratch = Scratch::new("different-options");
    let path = scratch.0.join("state");
    let place = path.clone();
    launch(1, move |world| checkpoint::save(&world, &place, &State::map([("x", counting(&[4]))]))).unwrap();
    type Differ = fn(&mut StateLoadOptions);
    let differ: [(Differ, &str); 4] = [
        (|options| options.share_reads = true, "share_reads: true on rank 1"),
        (|options| options.block_scales = Some([2, 2]), "block_scales: Some([2, 2])"),
        (|options| options.allow_partial = true, "allow_partial: true"),
        (|options| options.allow_narrowing = false, "allow_narrowing: false"),
    ];
    for (change, said) in differ {
        for into in [false, true] {
            let place = path.clone();
            let error = same_error_on_all_ranks(3, move |world| {
                let mut options = StateLoadOptions { share_reads: false, ..StateLoadOptions::default() };
                if world.rank() == 1 {
                    change(&mut options);
                }
                // The path is not there on rank 2: the options are compared first.
                let place = if world.rank() == 2 { place.with_extension("none") } else { place.clone() };
                let result = match into {
                    false => {
                        checkpoint::load_with(&world, &place, &State::map([("x", counting(&[4]))]), &options).map(drop)
                    }
                    true => {
                        let mut counter = Counter { count: 0, restored: 0 };
                        let result = checkpoint::load_into_with(&world, &place, (&mut counter,), &options).map(drop);
                        assert_eq!(counter.restored, 0);
                        result
                    }
                };
                assert!(
                    result.as_ref().is_err_and(|error| error.kind() == Some(&ErrorKind::Disagreement)),
                    "{result:?}"
                );
                result
            });
            assert!(error.contains("load options") && error.contains(said), "{error}");
        }
    }
    // Of a save: format, whether to overwrite, and the rank that coordinates.
    type DifferSave = fn(&mut SaveOptions);
    let differ: [DifferSave; 3] = [
        |options| options.format = Format::Dcp,
        |options| options.overwrite = false,
        |options| options.coordinator = 1,
    ];
    for change in differ {
        let place = path.clone();
        let error = same_error_on_all_ranks(2, move |world| {
            let mut options = SaveOptions::default();
            if world.rank() == 1 {
                change(&mut options);
            }
            checkpoint::save_with(&world, &place, &State::map([("step", 1)]), &options)
        });
        assert!(error.contains("save options") && error.contains("on rank 1"), "{error}");
    }
    assert!(checkpoint::open(&path).unwrap().tensors.contains_key("x"), "the checkpoint is as it was");
}
