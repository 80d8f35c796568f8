//! Tensors that are sharded over several leading dimensions together, so that shards cross the borders of experts: boxes,
//! arithmetic, training, states and checkpoints, each against the tensor on one device.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, Format, ModelPart, SaveOptions, State, StateLoadOptions};
use shardwise::layout::MergedShape;
use shardwise::models;
use shardwise::nn::init::Init;
use shardwise::nn::{Linear, StateDictOptions};
use shardwise::optim::{ParamGroup, clip_grad_norm};
use shardwise::param::MergedTensor;
use shardwise::plan::{FullyShard, ShardingPlan, ShardingPlanner, shard_module};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

/// Offsets and sizes of the boxes of every rank.
fn boxes(shape: &MergedShape, layout: &Layout) -> Vec<Vec<(Vec<usize>, Vec<usize>)>> {
    let of =
        |rank: usize| shape.boxes_of(layout, rank).into_iter().map(|b| (b.global.offsets, b.global.sizes)).collect();
    (0..layout.mesh().size()).map(of).collect()
}

#[test]
fn shards_of_merged_dimensions_are_boxes_that_cross_borders() {
    let part = |offsets: &[usize], sizes: &[usize]| (offsets.to_vec(), sizes.to_vec());
    let shape = MergedShape::new(&[3, 4, 5], 2).unwrap();
    assert_eq!(shape.stored(), [12, 5]);
    let two = Layout::new(&Mesh::new([("dp", 2)]).unwrap(), shape.stored(), [Shard(0)]).unwrap();
    assert_eq!(
        boxes(&shape, &two),
        [
            vec![part(&[0, 0, 0], &[1, 4, 5]), part(&[1, 0, 0], &[1, 2, 5])],
            vec![part(&[1, 2, 0], &[1, 2, 5]), part(&[2, 0, 0], &[1, 4, 5])],
        ]
    );
    // 15 rows over 4 ranks: 4, 4, 4 and 3.
    let shape = MergedShape::new(&[3, 5, 8], 2).unwrap();
    let four = Layout::new(&Mesh::new([("dp", 4)]).unwrap(), shape.stored(), [Shard(0)]).unwrap();
    let rows = |rank: usize| boxes(&shape, &four)[rank].iter().map(|(_, sizes)| sizes[0] * sizes[1]).sum::<usize>();
    assert_eq!([0, 1, 2, 3].map(rows), [4, 4, 4, 3]);
    // Every element is in the boxes of one rank, also with all dimensions merged, more ranks than rows, and columns sharded.
    for (sizes, dims, placements) in [
        (vec![8, 6, 3], 2, [Shard(0), Shard(0)]),
        (vec![2, 3, 2], 3, [Shard(0), Shard(0)]),
        (vec![1, 2, 4], 2, [Shard(0), Shard(0)]),
        (vec![3, 5, 8], 2, [Shard(0), Shard(1)]),
    ] {
        let shape = MergedShape::new(&sizes, dims).unwrap();
        let layout = Layout::new(&Mesh::new([2, 2]).unwrap(), shape.stored(), placements).unwrap();
        let mut held = vec![0; sizes.iter().product()];
        for (offsets, extent) in boxes(&shape, &layout).concat() {
            let mut elements = vec![0];
            for dim in 0..sizes.len() {
                let (n, range) = (sizes[dim], offsets[dim]..offsets[dim] + extent[dim]);
                elements = elements.iter().flat_map(|at| range.clone().map(move |i| at * n + i)).collect();
            }
            elements.into_iter().for_each(|element| held[element] += 1);
        }
        assert!(held.iter().all(|&count| count == 1), "{sizes:?} {dims}: {held:?}");
    }
    for dims in [0, 1, 4] {
        let error = MergedShape::new(&[3, 5, 8], dims).unwrap_err().to_string();
        assert!(error.contains(&format!("the first {dims} of shape [3, 5, 8]")), "{error}");
    }
}

/// A name, the axes of a mesh of 4 ranks, and the placements of the rows on it.
type ShardedRows = (&'static str, Vec<(&'static str, usize)>, Vec<Placement>);

/// Fully sharded, in two replicas, and with experts sharded before rows.
fn meshes() -> [ShardedRows; 3] {
    [
        ("fsdp", vec![("dp", 4)], vec![Shard(0)]),
        ("hsdp", vec![("replica", 2), ("dp", 2)], vec![Replicate, Shard(0)]),
        ("expert parallel", vec![("ep", 2), ("dp", 2)], vec![Shard(0), Shard(0)]),
    ]
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    flat(a).iter().zip(flat(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn merged_tensors_compute_and_draw_as_on_one_device() {
    for shape in [[8, 6, 3], [3, 4, 5], [2, 3, 2]] {
        let one = launch(1, move |world| {
            let mesh = world.mesh([("one", 1)])?;
            let x = DTensor::randn(shape.to_vec(), &mesh, [Replicate])?;
            let y = x.gelu()?.add(&x.mul_scalar(2.0)?)?;
            Ok((x.to_local()?, y.to_local()?, y.norm(2.0, &[], false)?.full_tensor()?.to_scalar::<f32>()?))
        })
        .unwrap();
        for (name, axes, placements) in meshes() {
            let (x, y, norm) = one.clone();
            launch(4, move |world| {
                let mesh = world.mesh(axes.clone())?;
                let rows = DTensor::randn(vec![shape[0] * shape[1], shape[2]], &mesh, placements.clone())?;
                let merged = MergedTensor::new(&rows, &shape)?;
                assert_eq!(flat(&merged.full_tensor()?), flat(&x), "{name}: the same draws");
                world.trace().clear();
                let computed = rows.gelu()?.add(&rows.mul_scalar(2.0)?)?;
                assert!(world.trace().records().is_empty(), "{name}: elementwise operators are local");
                let merged = MergedTensor::new(&computed, &shape)?;
                assert_eq!(distance(&merged.full_tensor()?, &y), 0.0, "{name}");
                let found = computed.norm(2.0, &[], false)?.full_tensor()?.to_scalar::<f32>()?;
                assert!((found - norm).abs() <= 1e-6 * norm, "{name}: {found} {norm}");
                let separate = merged.separate()?;
                assert_eq!(separate.shape(), shape);
                assert_eq!(distance(&separate.full_tensor()?, &y), 0.0, "{name}");
                assert!(MergedTensor::new(&rows, &[shape[1], shape[0], shape[2] + 1]).is_err());
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Two stacks of experts; every token passes all of them.
#[derive(Module)]
struct Experts {
    up: Param,
    down: Param,
    head: Linear,
}

impl Experts {
    fn new(builder: &Builder, experts: usize) -> Result<Self> {
        Ok(Experts {
            up: builder.param("up", &[experts, 5, 8], Init::XavierUniform(1.0))?,
            down: builder.param("down", &[experts, 8, 5], Init::Normal(0.0, 0.3))?,
            head: Linear::new(&builder.child("head"), 8, 3)?,
        })
    }

    fn loss(&self, x: &DTensor) -> Result<DTensor> {
        let inner = DTensor::einsum("td,ehd->teh", &[x, &self.up.forward_value()?])?.gelu()?;
        let y = DTensor::einsum("teh,edh->td", &[&inner, &self.down.forward_value()?])?;
        self.head.forward(&y)?.square()?.mean_all()
    }
}

/// How a model is sharded: the experts over `ep` if the mesh has that axis, all rows over `dp`.
fn plan(model: &Experts, mesh: &DeviceMesh) -> Result<ShardingPlan> {
    let mut plan = ShardingPlan::new();
    if mesh.axes().iter().any(|axis| axis.name == "ep") {
        plan = plan.param("{up,down}", [("ep", Shard(0))]);
    }
    FullyShard::new(["dp"]).shard_merged("{up,down}", 2).extend(plan, model, mesh)
}

/// A model with its experts stored as rows, built in its layout.
fn build(mesh: &DeviceMesh, experts: usize) -> Result<Experts> {
    mesh.manual_seed(7);
    let template = Experts::new(&Builder::new(mesh).zeros(), experts)?;
    plan(&template, mesh)?.build(mesh, |builder| Experts::new(builder, experts))
}

fn input(mesh: &DeviceMesh, step: usize) -> Result<DTensor> {
    let values: Vec<f32> = (0..16 * 8).map(|i| ((i * 37 + step * 11) % 29) as f32 / 14.0 - 1.0).collect();
    let whole = Tensor::from_vec(values, (16, 8), &Device::Cpu)?;
    let batch = vec![Shard(0); mesh.ndim()];
    DTensor::distribute_tensor(&whole, mesh, batch, None)
}

fn step(model: &Experts, optimizer: &mut ShardedOptimizer, mesh: &DeviceMesh, step: usize) -> Result<(f32, f64)> {
    let loss = model.loss(&input(mesh, step)?)?;
    let params: Vec<Param> = model.named_parameters().into_iter().map(|(_, param)| param).collect();
    let (gradients, norm) = clip_grad_norm(loss.backward()?, &params, 0.005, 2.0)?;
    optimizer.step(gradients)?;
    Ok((loss.full_tensor()?.to_scalar::<f32>()?, norm))
}

fn optimizer(model: &Experts) -> Result<ShardedOptimizer> {
    ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()).with_lr(0.02))
}

/// Every parameter as a full tensor in its own shape.
fn full(model: &Experts) -> Result<BTreeMap<String, Tensor>> {
    let of = |(name, param): (String, Param)| {
        let whole = match param.merged() {
            Some(merged) => merged.full_tensor()?,
            None => param.get().full_tensor()?,
        };
        Ok((name, whole))
    };
    model.named_parameters().into_iter().map(of).collect()
}

/// Losses, norms and parameters after some steps on one device.
type Trained = (Vec<(f32, f64)>, BTreeMap<String, Tensor>);

fn on_one_device(experts: usize, steps: usize) -> Trained {
    launch(1, move |world| {
        let mesh = world.mesh([("dp", 1)])?;
        mesh.manual_seed(7);
        let model = Experts::new(&Builder::new(&mesh), experts)?;
        let mut optimizer = optimizer(&model)?;
        let losses = (0..steps).map(|i| step(&model, &mut optimizer, &mesh, i)).collect::<Result<_>>()?;
        Ok((losses, full(&model)?))
    })
    .unwrap()
}

fn assert_close(found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>, limit: f32, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, tensor) in expected {
        let distance = distance(&found[name], tensor);
        assert!(distance <= limit, "{what}, {name}: {distance}");
    }
}

#[test]
fn experts_start_with_the_same_values_however_they_are_sharded() {
    for (name, axes, _) in meshes() {
        let experts = if name == "expert parallel" { 2 } else { 3 };
        let (_, expected) = on_one_device(experts, 0);
        launch(4, move |world| {
            let mesh = world.mesh(axes.clone())?;
            let built = build(&mesh, experts)?;
            // Fans of an initializer are those of the shape that the module has: the same values, bit for bit.
            assert_close(&full(&built)?, &expected, 0.0, name);
            mesh.manual_seed(7);
            let sharded = Experts::new(&Builder::new(&mesh), experts)?;
            shard_module(&sharded, &mesh, &plan(&sharded, &mesh)?)?;
            assert_close(&full(&sharded)?, &expected, 0.0, name);
            assert_eq!(built.up.layout(), sharded.up.layout());
            world.trace().clear();
            shard_module(&sharded, &mesh, &plan(&sharded, &mesh)?)?;
            assert!(world.trace().records().iter().all(|record| record.call == "agree"), "again: nothing to do");
            let rows = sharded.up.get().local_shape()[0];
            match name {
                "fsdp" => assert_eq!(rows, [4, 4, 4, 3][world.rank()]),
                "hsdp" => assert_eq!(rows, [8, 7][world.rank() % 2]),
                _ => assert_eq!(rows, [3, 2][world.rank() % 2], "5 rows of one expert over dp"),
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_use_gathers_once_and_its_gradient_is_reduced_once() {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 4)])?;
        let calls = || -> Vec<&'static str> { world.trace().records().iter().map(|record| record.call).collect() };
        let experts = build(&mesh, 3)?;
        world.trace().clear();
        let seen = experts.up.forward_value()?;
        assert_eq!((seen.shape(), calls().as_slice()), (&[3, 5, 8][..], &["all_gather"][..]));
        assert_eq!(seen.placements(), [Replicate]);
        let rows = DTensor::ones((8, 8), DType::F32, &mesh, [Shard(0)])?;
        let loss = DTensor::einsum("td,ehd->teh", &[&rows, &seen])?.sum_all()?;
        world.trace().clear();
        let gradients = loss.backward()?;
        let gradient = gradients.get(&experts.up.get())?;
        assert_eq!((gradient.shape(), gradient.placements()), (&[15, 8][..], &[Shard(0)][..]));
        assert_eq!(calls().iter().filter(|call| **call != "agree").collect::<Vec<_>>(), [&"reduce_scatter"]);
        assert_eq!(flat(&gradient.full_tensor()?), vec![8.0; 120]);
        // Weights that are kept gathered are gathered once for several uses.
        experts.set_reshard_after_forward(false, &["dp"]);
        world.trace().clear();
        experts.up.forward_value()?;
        assert_eq!(experts.up.forward_value()?.shape(), [3, 5, 8]);
        assert_eq!(calls(), ["all_gather"]);
        // 4 experts on 4 ranks: shards end at borders, and operators decide what to gather.
        let even = build(&mesh, 4)?;
        world.trace().clear();
        assert_eq!(even.up.forward_value()?.placements(), [Shard(0)]);
        assert_eq!(calls(), Vec::<&str>::new());
        Ok(())
    })
    .unwrap();
}

#[test]
fn training_with_adamw_and_clipping_equals_one_device() {
    for (name, axes, _) in meshes() {
        let experts = if name == "expert parallel" { 2 } else { 3 };
        let (losses, expected) = on_one_device(experts, 6);
        launch(4, move |world| {
            let mesh = world.mesh(axes.clone())?;
            let model = build(&mesh, experts)?;
            let mut optimizer = optimizer(&model)?;
            for (i, (loss, norm)) in losses.iter().enumerate() {
                let found = step(&model, &mut optimizer, &mesh, i)?;
                assert!((found.0 - loss).abs() <= 1e-5 * loss, "{name}, step {i}: {} {loss}", found.0);
                assert!((found.1 - norm).abs() <= 1e-5 * norm, "{name}, step {i}: {} {norm}", found.1);
                assert!(*norm > 0.005, "clipped: {norm}");
            }
            // Moments of near-zero gradients turn rounding of sums into steps; parameters are of the order of 0.3.
            assert_close(&full(&model)?, &expected, 2e-5, name);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn states_have_the_shape_of_the_tensor() {
    for (name, axes, _) in meshes() {
        let (_, expected) = on_one_device(2, 0);
        launch(4, move |world| {
            let mesh = world.mesh(axes.clone())?;
            let model = build(&mesh, 2)?;
            // In memory a state dict has the rows, and a module takes either shape.
            assert_eq!(model.state_dict()["up"].shape(), [10, 8]);
            let state = model.state_dict();
            model.map_tensors(&|tensor| tensor.mul_scalar(0.0))?;
            model.load_state_dict(&state)?;
            assert_close(&full(&model)?, &expected, 0.0, name);
            let replicated = Experts::new(&Builder::new(&mesh), 2)?;
            model.load_state_dict(&replicated.state_dict())?;
            assert_close(&full(&model)?, &full(&replicated)?, 0.0, name);
            model.load_state_dict(&state)?;
            let mut wrong = state;
            wrong.insert("up".into(), DTensor::zeros((5, 2, 8), DType::F32, &mesh, vec![Replicate; mesh.ndim()])?);
            let error = model.load_state_dict(&wrong).unwrap_err().to_string();
            assert!(error.contains("other shapes of [\"up\"]"), "{error}");
            // The full state of one rank, and back from it.
            let whole = model.full_state_dict(&world, 1)?;
            if let Some(whole) = &whole {
                assert_close(whole, &expected, 0.0, name);
            }
            model.map_tensors(&|tensor| tensor.mul_scalar(0.0))?;
            model.load_full_state_dict(&world, 1, whole.as_ref(), &StateDictOptions::default())?;
            assert_close(&full(&model)?, &expected, 0.0, name);
            // A state that moves between ranks.
            let state = State::of((&model,))?;
            let gathered = state.gather(&world, &[2])?;
            let distributed = state.distribute(&world, &gathered, 2)?;
            let Some(State::Merged(up)) = distributed.get("model.up") else { panic!("{distributed}") };
            assert_eq!(distance(&up.full_tensor()?, &expected["up"]), 0.0);
            Ok(())
        })
        .unwrap();
    }
}

fn counting(shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>();
    Tensor::from_vec((0..count).map(|i| i as f32).collect(), shape, &Device::Cpu).unwrap()
}

#[test]
fn merged_tensors_are_saved_as_boxes_and_loaded_into_any_layout() {
    let shape = [3usize, 5, 8];
    for (format, share_reads) in [(Format::Native, false), (Format::Dcp, true), (Format::HuggingFace, false)] {
        let scratch = Scratch::new(&format!("merged-{format}"));
        let (path, again) = (scratch.0.join("rows"), scratch.0.join("columns"));
        let options = SaveOptions { format, ..SaveOptions::default() };
        let (place, save) = (path.clone(), options.clone());
        launch(4, move |world| {
            let mesh = world.mesh([("dp", 4)])?;
            let rows = DTensor::distribute_tensor(&counting(&[15, 8]), &mesh, [Shard(0)], None)?;
            checkpoint::save_with(&world, &place, &State::map([("w", MergedTensor::new(&rows, &shape)?)]), &save)
        })
        .unwrap();
        let catalog = checkpoint::open(&path).unwrap();
        assert_eq!(catalog.tensors["w"].shape, shape);
        // Rows 4, 4, 4 and 3 of experts with 5 rows: ranks 1 and 2 have parts of two experts.
        assert_eq!(catalog.tensors["w"].chunks.len(), 1 + 2 + 2 + 1);
        let place = path.clone();
        launch(3, move |world| {
            let mesh = world.mesh([("dp", 3)])?;
            let options = StateLoadOptions { share_reads, ..StateLoadOptions::default() };
            let load =
                |path: &Path, like: State| checkpoint::load_with(&world, path, &State::map([("w", like)]), &options);
            let check = |path: &Path| -> Result<()> {
                for placement in [Shard(0), Shard(1), Shard(2), Replicate] {
                    let like = DTensor::zeros(shape.to_vec(), DType::F32, &mesh, [placement.clone()])?;
                    let found = load(path, like.into())?.state.tensor("w")?.full_tensor()?;
                    assert_eq!(distance(&found, &counting(&shape)), 0.0, "{format} {placement}");
                }
                for (stored, placement) in [(vec![15, 8], Shard(0)), (vec![120], Shard(0)), (vec![15, 8], Shard(1))] {
                    let like = DTensor::zeros(stored.clone(), DType::F32, &mesh, [placement])?;
                    let loaded = load(path, MergedTensor::new(&like, &shape)?.into())?.state;
                    let Some(State::Merged(found)) = loaded.get("w") else { panic!("{loaded}") };
                    assert_eq!(found.stored().shape(), stored);
                    assert_eq!(distance(&found.full_tensor()?, &counting(&shape)), 0.0, "{format} {stored:?}");
                }
                Ok(())
            };
            check(&place)?;
            // And from a tensor that is sharded on another dimension.
            let columns = DTensor::distribute_tensor(&counting(&shape), &mesh, [Shard(1)], None)?;
            checkpoint::save_with(&world, &again, &State::map([("w", columns)]), &options_of(format))?;
            check(&again)
        })
        .unwrap();
    }
}

fn options_of(format: Format) -> SaveOptions {
    SaveOptions { format, ..SaveOptions::default() }
}

/// A run with merged experts is saved, and goes on with the same losses on other meshes, merged or not.
#[test]
fn training_goes_on_from_a_checkpoint_merged_or_not() {
    let (losses, expected) = on_one_device(2, 4);
    for format in [Format::Native, Format::Dcp] {
        let scratch = Scratch::new(&format!("merged-run-{format}"));
        let path = scratch.0.join("run");
        let place = path.clone();
        launch(4, move |world| {
            let mesh = world.mesh([("replica", 2), ("dp", 2)])?;
            let model = build(&mesh, 2)?;
            let mut optimizer = optimizer(&model)?;
            (0..2).try_for_each(|i| step(&model, &mut optimizer, &mesh, i).map(drop))?;
            checkpoint::save_from_with(&world, &place, (&model, &optimizer), &options_of(format))
        })
        .unwrap();
        let catalog = checkpoint::open(&path).unwrap();
        assert_eq!(catalog.tensors["model.up"].shape, [2, 5, 8]);
        assert_eq!(catalog.tensors["optimizer.state.up.exp_avg"].shape, [2, 5, 8]);
        for (axes, merged) in [
            (vec![("dp", 3)], true),
            (vec![("ep", 2), ("dp", 2)], true),
            (vec![("dp", 1)], false),
            (vec![("dp", 4)], false),
        ] {
            let (place, losses, expected) = (path.clone(), losses.clone(), expected.clone());
            let ranks = axes.iter().map(|(_, size)| size).product();
            launch(ranks, move |world| {
                let mesh = world.mesh(axes.clone())?;
                let model = if merged { build(&mesh, 2)? } else { Experts::new(&Builder::new(&mesh), 2)? };
                let mut optimizer = optimizer(&model)?;
                let mut part = ModelPart::new(&model, StateDictOptions::default());
                checkpoint::load_into(&world, &place, (&mut part, &mut optimizer))?;
                checkpoint::load_into(&world, &place, (&model, &mut optimizer))?;
                for (i, (loss, _)) in losses.iter().enumerate().skip(2) {
                    let found = step(&model, &mut optimizer, &mesh, i)?.0;
                    assert!((found - loss).abs() <= 1e-5 * loss, "{format} {axes:?}, step {i}: {found} {loss}");
                }
                assert_close(&full(&model)?, &expected, 2e-5, "resumed");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn plans_refuse_what_cannot_be_merged_and_change_nothing() {
    launch(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let model = Experts::new(&Builder::new(&mesh), 3)?;
        for (plan, needed) in [
            (ShardingPlan::new().merge_dims("gate", 2), "fits no parameter"),
            (ShardingPlan::new().merge_dims("up", 4), "the first 4 of shape [3, 5, 8]"),
            (ShardingPlan::new().merge_dims("head.bias", 2), "the first 2 of shape [3]"),
        ] {
            let error = shard_module(&model, &mesh, &plan).unwrap_err().to_string();
            assert!(error.contains(needed), "{error}");
        }
        assert!(model.named_parameters().iter().all(|(_, param)| param.merged().is_none()));
        shard_module(&model, &mesh, &ShardingPlan::new().merge_dims("up", 2))?;
        assert_eq!((model.up.get().shape(), model.up.forward_value()?.shape()), (&[15, 8][..], &[3, 5, 8][..]));
        let error = model.up.merge_dims(3).unwrap_err().to_string();
        assert!(error.contains("the first 2 are merged already"), "{error}");
        let text = serde_json::to_string(&plan(&model, &mesh)?).map_err(Error::other)?;
        assert_eq!(serde_json::from_str::<ShardingPlan>(&text).map_err(Error::other)?, plan(&model, &mesh)?);
        Ok(())
    })
    .unwrap();
}

/// A mixture of experts of a Hugging Face directory: 6 experts over 4 ranks, in the shapes of the files outside.
#[test]
fn a_model_directory_loads_with_merged_experts_and_exports_the_same_weights() {
    let run = |ranks: usize, merged: bool| {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models/mixtral");
        launch(ranks, move |world| {
            let mesh = world.mesh([("dp", ranks)])?;
            let planner = FullyShard::new(["dp"]);
            let planner = if merged { planner.shard_merged("**.experts.*", 2) } else { planner };
            let model = models::load(&directory, &mesh, planner)?;
            let experts = model.named_parameters().into_iter().filter(|(_, param)| param.merged().is_some()).count();
            assert_eq!(experts > 0, merged);
            let ids = DTensor::from_fn((1, 7), DType::U32, &mesh, [Replicate], |i| (i[1] * 9 + 3) as f64)?;
            let logits = model.forward(&ids)?.full_tensor()?;
            let weights = models::export(&model)?;
            model.map_tensors(&|tensor| tensor.mul_scalar(0.0))?;
            models::import(&model, &weights)?;
            assert_eq!(distance(&model.forward(&ids)?.full_tensor()?, &logits), 0.0, "imported again");
            Ok((logits, weights))
        })
        .unwrap()
    };
    let ((logits, weights), (found, exported)) = (run(1, false), run(4, true));
    assert!(distance(&found, &logits) < 1e-4);
    assert_close(&exported, &weights, 0.0, "exported");
}
