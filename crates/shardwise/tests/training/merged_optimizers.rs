//! Optimizers over parameters that are stored with merged dimensions: they see the shape that modules see, and their states load
//! into optimizers over parameters without merged dimensions, and back.

use candle_core::Tensor;
use shardwise::checkpoint;
use shardwise::nn::init::Init;
use shardwise::optim::{Adafactor, Algorithm, Muon, OptimizerState, ParamGroup};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

#[derive(Module)]
struct Experts {
    stack: Param,
    bias: Param,
}

impl Experts {
    /// Experts on a mesh; with merged dimensions, rows are sharded over all its ranks.
    fn new(mesh: &DeviceMesh, shape: &[usize], merged: bool, dtype: DType) -> Result<Self> {
        mesh.manual_seed(3);
        let builder = Builder::new(mesh).dtype(dtype);
        let experts = Experts {
            stack: builder.param("stack", shape, Init::Normal(0.0, 1.0))?,
            bias: builder.param("bias", &[shape[shape.len() - 1]], Init::ONES)?,
        };
        if merged {
            experts.stack.merge_dims(2)?;
            experts.stack.set(&experts.stack.get().detach().redistribute(vec![Shard(0); mesh.ndim()])?)?;
        }
        Ok(experts)
    }

    /// The gradients of a loss that treats every element differently, and every step too.
    fn gradients(&self, step: usize) -> Result<Gradients> {
        let (seen, mesh) = (self.stack.forward_value()?, self.stack.get().device_mesh().clone());
        let factor = move |at: &[usize]| ((at.iter().fold(1, |sum, i| sum * 7 + i) * (step + 2)) % 11) as f64 - 5.0;
        let factors = DTensor::from_fn(seen.shape(), DType::F64, &mesh, vec![Replicate; mesh.ndim()], factor)?;
        let factors = factors.to_dtype(seen.dtype())?;
        let biased = seen.add(&self.bias.forward_value()?)?;
        biased.mul(&factors)?.sum_all()?.add(&biased.square()?.sum_all()?)?.backward()
    }
}

/// A mesh of this rank only.
fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The experts as one tensor of their own shape.
fn stack(experts: &Experts) -> Result<Tensor> {
    experts.unmerged_state_dict()?["stack"].full_tensor()
}

fn assert_near(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * b.abs().max(1.0);
    let (found, expected) = (numbers(found), numbers(expected));
    assert!(found.iter().zip(&expected).all(near), "{what}: {found:?}, not {expected:?}");
}

/// Compares names, numbers, shapes and elements of two states.
fn assert_same_state(found: &OptimizerState, expected: &OptimizerState, what: &str) -> Result<()> {
    assert_eq!(found.steps, expected.steps);
    for (name, expected) in &expected.params {
        let found = &found.params[name];
        assert_eq!(found.numbers, expected.numbers, "{what}, {name}");
        assert!(found.tensors.keys().eq(expected.tensors.keys()), "{what}, {name}");
        for (kind, expected) in &expected.tensors {
            let (found, expected) = (found.tensors[kind].full_tensor()?, expected.full_tensor()?);
            assert_near(&found, &expected, &format!("{what}, {kind} of {name}"));
        }
    }
    Ok(())
}

/// Names and sizes of the axes of a mesh.
type Axes = Vec<(&'static str, usize)>;

/// Fully sharded so that rows cross the borders of experts, sharded over two axes, and with borders at the ends of shards.
fn meshes() -> [(Axes, [usize; 3]); 3] {
    [(vec![("dp", 4)], [3, 5, 8]), (vec![("a", 2), ("b", 2)], [3, 5, 4]), (vec![("dp", 4)], [4, 3, 5])]
}

fn optimizers() -> [Algorithm; 2] {
    [Adafactor { weight_decay: 0.1, ..Adafactor::default() }.into(), AdamW::default().into()]
}

#[test]
fn steps_and_states_are_those_of_one_device_in_the_shape_of_the_tensor() {
    for (axes, shape) in meshes() {
        for algorithm in optimizers() {
            let axes = axes.clone();
            launch(4, move |world| {
                let (mesh, one) = (world.mesh(axes.clone())?, alone(&world)?);
                let merged = Experts::new(&mesh, &shape, true, DType::F64)?;
                let plain = Experts::new(&one, &shape, false, DType::F64)?;
                let what = format!("{} of {shape:?} on {axes:?}", algorithm.name());
                let group = || ParamGroup::new(algorithm.clone()).with_lr(0.05);
                let (mut ours, mut theirs) = (group().over(&merged)?, group().over(&plain)?);
                // Also before the first step.
                assert_same_state(&ours.unmerged_state_dict()?, &theirs.state_dict()?, &what)?;
                for step in 0..4 {
                    ours.step(merged.gradients(step)?)?;
                    theirs.step(plain.gradients(step)?)?;
                    assert_near(&stack(&merged)?, &plain.stack.get().full_tensor()?, &what);
                }
                assert_same_state(&ours.unmerged_state_dict()?, &theirs.state_dict()?, &what)?;
                // Parameter and state stay sharded as they were.
                let rows = shape[0] * shape[1];
                assert_eq!(merged.stack.get().shape(), [rows, shape[2]]);
                assert_eq!(merged.stack.get().placements(), vec![Shard(0); mesh.ndim()]);
                for (kind, tensor) in &ours.state_dict()?.params["stack"].tensors {
                    if kind != "col_var" {
                        assert_eq!(
                            (tensor.shape()[0], tensor.placements()),
                            (rows, merged.stack.get().placements()),
                            "{kind}"
                        );
                    }
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn states_in_memory_load_merged_and_not() {
    for algorithm in optimizers() {
        launch(4, move |world| {
            let mesh = world.mesh([("dp", 4)])?;
            let group = || ParamGroup::new(algorithm.clone()).with_lr(0.05);
            let trained = |merged: bool| -> Result<(Experts, ShardedOptimizer)> {
                let experts = Experts::new(&mesh, &[3, 5, 8], merged, DType::F64)?;
                let mut optimizer = group().over(&experts)?;
                (0..2).try_for_each(|step| optimizer.step(experts.gradients(step)?))?;
                Ok((experts, optimizer))
            };
            for (from_merged, to_merged) in [(true, false), (false, true), (true, true)] {
                let what = format!("{}: {from_merged} to {to_merged}", algorithm.name());
                let (source, optimizer) = trained(from_merged)?;
                let (weights, state) = (source.unmerged_state_dict()?, optimizer.unmerged_state_dict()?);
                assert_eq!(weights["stack"].shape(), [3, 5, 8], "{what}");
                assert_eq!(source.state_dict()["stack"].shape(), if from_merged { vec![15, 8] } else { vec![3, 5, 8] });
                for way in ["sharded", "full", "of one rank"] {
                    let target = Experts::new(&mesh, &[3, 5, 8], to_merged, DType::F64)?;
                    target.stack.set(&target.stack.get().detach().mul_scalar(0.0)?)?;
                    target.load_state_dict(&weights)?;
                    let mut loaded = ParamGroup::new(algorithm.clone()).with_lr(9.0).over(&target)?;
                    match way {
                        "sharded" => loaded.load_state_dict(&state)?,
                        "full" => loaded.load_full_state(&state.to_full()?)?,
                        _ => {
                            let full = state.to_full_on(&world, 2)?;
                            loaded.load_full_state_from(&world, 2, full.as_ref())?;
                        }
                    }
                    assert_same_state(&loaded.unmerged_state_dict()?, &state, &what)?;
                    // The next step is that of the run that goes on.
                    let (on, mut goes_on) = trained(from_merged)?;
                    goes_on.step(on.gradients(2)?)?;
                    loaded.step(target.gradients(2)?)?;
                    assert_near(&stack(&target)?, &stack(&on)?, &format!("{what}, {way}"));
                }
                // As it is stored, a state loads where dimensions are merged too.
                if from_merged && to_merged {
                    let mut again = group().over(&source)?;
                    again.load_state_dict(&optimizer.state_dict()?)?;
                    assert_same_state(&again.state_dict()?, &optimizer.state_dict()?, &what)?;
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn checkpoints_of_factored_moments_have_the_shape_of_the_tensor() {
    for format in [checkpoint::Format::Native, checkpoint::Format::Dcp] {
        let scratch = Scratch::new(&format!("merged-factors-{format}"));
        let path = scratch.0.join("run");
        let place = path.clone();
        let expected = launch(4, move |world| {
            let mesh = world.mesh([("dp", 4)])?;
            let experts = Experts::new(&mesh, &[3, 5, 8], true, DType::F64)?;
            let mut optimizer = Adafactor::default().over(&experts)?;
            (0..2).try_for_each(|step| optimizer.step(experts.gradients(step)?))?;
            let options = checkpoint::SaveOptions { format, ..Default::default() };
            checkpoint::save_from_with(&world, &place, (&experts, &optimizer), &options)?;
            optimizer.step(experts.gradients(2)?)?;
            stack(&experts)
        })
        .unwrap();
        let catalog = checkpoint::open(&path).unwrap();
        assert_eq!(catalog.tensors["model.stack"].shape, [3, 5, 8]);
        for (kind, shape) in [("row_var", [3, 5, 1]), ("col_var", [3, 1, 8])] {
            assert_eq!(catalog.tensors[&format!("optimizer.state.stack.{kind}")].shape, shape, "{format}");
        }
        for (ranks, merged) in [(3, true), (1, false), (2, false)] {
            let (place, expected) = (path.clone(), expected.clone());
            launch(ranks, move |world| {
                let mesh = world.mesh([("dp", ranks)])?;
                let experts = Experts::new(&mesh, &[3, 5, 8], merged, DType::F64)?;
                let mut optimizer = Adafactor::default().over(&experts)?;
                checkpoint::load_into(&world, &place, (&experts, &mut optimizer))?;
                optimizer.step(experts.gradients(2)?)?;
                assert_near(&stack(&experts)?, &expected, &format!("{format} on {ranks}"));
                Ok(())
            })
            .unwrap();
        }
    }
}

/// A matrix that is stored as one vector is a matrix for Muon; stacks of matrices are refused, merged or not.
#[test]
fn muon_sees_the_matrix_and_refuses_stacks() {
    launch(4, |world| {
        let (mesh, one) = (world.mesh([("dp", 4)])?, alone(&world)?);
        let (merged, plain) =
            (Experts::new(&mesh, &[6, 5], true, DType::F64)?, Experts::new(&one, &[6, 5], false, DType::F64)?);
        assert_eq!(merged.stack.get().shape(), [30]);
        let muon = |param: &Param| ShardedOptimizer::new([("stack".to_string(), param.clone())], Muon::default());
        let (mut ours, mut theirs) = (muon(&merged.stack)?, muon(&plain.stack)?);
        for step in 0..3 {
            ours.step(merged.gradients(step)?)?;
            theirs.step(plain.gradients(step)?)?;
        }
        assert_near(&stack(&merged)?, &plain.stack.get().full_tensor()?, "muon");
        for is_merged in [true, false] {
            let experts = Experts::new(&mesh, &[3, 5, 8], is_merged, DType::F64)?;
            let error = muon(&experts.stack).err().map(|error| error.to_string()).unwrap_or_default();
            for part in ["`stack` with shape [3, 5, 8]", "a matrix", "AdamW"] {
                assert!(error.contains(part), "{error}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Half-precision weights with master weights: the master weights have the shape of the tensor too.
#[test]
fn master_weights_of_merged_parameters_are_those_of_one_device() {
    launch(4, |world| {
        let (mesh, one) = (world.mesh([("dp", 4)])?, alone(&world)?);
        let merged = Experts::new(&mesh, &[3, 5, 8], true, DType::BF16)?;
        let plain = Experts::new(&one, &[3, 5, 8], false, DType::BF16)?;
        // Elementwise, so that no sum is rounded in another order.
        let group = || ParamGroup::new(AdamW::default()).with_lr(1e-3).with_master();
        let (mut ours, mut theirs) = (group().over(&merged)?, group().over(&plain)?);
        for step in 0..3 {
            ours.step(merged.gradients(step)?)?;
            theirs.step(plain.gradients(step)?)?;
        }
        assert_eq!(numbers(&stack(&merged)?), numbers(&plain.stack.get().full_tensor()?));
        let (found, expected) = (ours.unmerged_state_dict()?, theirs.state_dict()?);
        let master = |state: &OptimizerState| state.params["stack"].tensors["master_param"].full_tensor();
        assert_eq!(master(&found)?.dims(), [3, 5, 8]);
        assert_eq!(numbers(&master(&found)?), numbers(&master(&expected)?));
        Ok(())
    })
    .unwrap();
}
