//! The public API of `DTensor`: creating, reading, printing, writing and storing distributed tensors.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise::tensor::{Arange, Linspace, Logspace};
use shardwise::tensor::{DTensorState, DeviceBackend, register_backend};
use shardwise_test_suites::values;

fn on(ranks: usize, run: impl Fn(World) -> Result<()> + Send + Sync + 'static) {
    ThreadWorld::new(ranks).unwrap().run(run).unwrap();
}

fn list(t: &DTensor) -> Result<Vec<f64>> {
    let full = t.full_tensor()?;
    Ok(if full.elem_count() == 0 { Vec::new() } else { full.flatten_all()?.to_dtype(DType::F64)?.to_vec1()? })
}

#[test]
fn from_local_accepts_any_consistent_local_shapes() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        // two mesh axes shard one dimension, unevenly: 1, 3, 0, 2 rows
        let rows = [1, 3, 0, 2][world.rank()];
        let mine = Tensor::full(world.rank() as f64, (rows, 2), &Device::Cpu)?;
        let whole = DTensor::from_local(&mine, &mesh, [Shard(0), Shard(0)])?;
        assert_eq!(whole.shape(), [6, 2]);
        assert_eq!(list(&whole)?, [0., 0., 1., 1., 1., 1., 1., 1., 3., 3., 3., 3.]);
        // the sizes of a plain shard give a plain shard
        let mine = Tensor::zeros((if world.rank() < 2 { 3 } else { 2 }, 4), DType::F32, &Device::Cpu)?;
        let plain = DTensor::from_local(&mine, &mesh, [Shard(-2), Replicate])?;
        assert_eq!(plain.layout().to_string(), "[5, 4] on a=2,b=2: S(0), R");
        // partial operands
        let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
        assert_eq!(list(&DTensor::from_local(&ones, &mesh, [Partial(ReduceOp::Sum), Replicate])?)?, [2.0; 3]);
        assert_eq!(
            list(&DTensor::from_local(&ones, &mesh, [Partial(ReduceOp::Sum), Partial(ReduceOp::Sum)])?)?,
            [4.0; 3]
        );
        Ok(())
    });
}

#[test]
fn distribute_tensor_uses_the_data_of_the_source_rank() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let mine = Tensor::full(world.rank() as f64, (5, 3), &Device::Cpu)?;
        for placements in
            [[Shard(0), Shard(1)], [Replicate, Shard(0)], [Shard(0), Shard(0)], [Partial(ReduceOp::Sum), Shard(1)]]
        {
            let taken = DTensor::distribute_tensor(&mine, &mesh, placements.clone(), Some(2))?;
            assert_eq!(list(&taken)?, [2.0; 15], "{placements:?}");
        }
        let strided = Placement::StridedShard { dim: 0, split_factor: 3 };
        let whole = values::full_tensor(&[7, 2]);
        let taken = DTensor::distribute_tensor(&whole, &mesh, [strided, Shard(0)], Some(0))?;
        assert!(values::same(&taken.to_local()?, &values::local(taken.layout(), world.rank())));
        // without a source every rank slices its own copy, and nothing is communicated
        world.trace().clear();
        let own = DTensor::distribute_tensor(&mine, &mesh, [Shard(0), Replicate], None)?;
        assert!(world.trace().records().is_empty());
        assert_eq!(own.to_local()?.to_vec2::<f64>()?[0][0], world.rank() as f64);
        Ok(())
    });
    // shapes that differ are an error that names the ranks
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let mine = Tensor::zeros(2 + world.rank(), DType::F32, &Device::Cpu)?;
        DTensor::distribute_tensor(&mine, &mesh, [Shard(0)], Some(0))
    };
    for result in ThreadWorld::new(2).unwrap().run_each(run) {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("rank 0") && message.contains("rank 1") && message.contains("shape"), "{message}");
    }
}

#[test]
fn factories_give_the_same_tensor_in_every_layout() {
    on(6, |world| {
        let mesh = world.mesh([("a", 2), ("b", 3)])?;
        let sum = Partial(ReduceOp::Sum);
        for placements in [
            [Shard(0), Replicate],
            [Replicate, Shard(-1)],
            [Shard(0), Shard(0)],
            [sum.clone(), Shard(0)],
            [sum, Partial(ReduceOp::Product)],
        ] {
            let p = || placements.clone();
            assert_eq!(list(&DTensor::ones(7, DType::F32, &mesh, p())?)?, [1.0; 7], "{placements:?}");
            assert_eq!(list(&DTensor::full(2.5, 5, DType::F64, &mesh, p())?)?, [2.5; 5]);
            assert_eq!(list(&DTensor::empty(5, DType::I64, &mesh, p())?)?, [0.0; 5]);
            assert_eq!(
                list(&DTensor::arange(Arange::new(2.0, -6.0, -1.5), DType::F32, &mesh, p())?)?,
                [2.0, 0.5, -1.0, -2.5, -4.0, -5.5]
            );
            assert_eq!(list(&DTensor::arange(3.0..1.0, DType::F32, &mesh, p())?)?, [0.0; 0]);
            assert_eq!(
                list(&DTensor::linspace(Linspace { start: 0.0, end: 1.0, steps: 5 }, DType::F64, &mesh, p())?)?,
                [0.0, 0.25, 0.5, 0.75, 1.0]
            );
            assert_eq!(
                list(&DTensor::linspace(Linspace { start: 3.0, end: 9.0, steps: 1 }, DType::F64, &mesh, p())?)?,
                [3.0]
            );
            assert_eq!(
                list(&DTensor::logspace(
                    Logspace { start: 0.0, end: 3.0, steps: 4, base: 10.0 },
                    DType::F64,
                    &mesh,
                    p()
                )?)?,
                [1.0, 10.0, 100.0, 1000.0]
            );
            let eye = DTensor::eye((3, 4), DType::I64, &mesh, p())?;
            assert_eq!(list(&eye)?, [1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 1., 0.]);
            assert_eq!(list(&eye.ones_like()?)?, [1.0; 12]);
            assert_eq!((eye.zeros_like()?.dtype(), eye.full_like(3.0)?.shape()), (DType::I64, &[3, 4][..]));
        }
        Ok(())
    });
}

#[test]
fn item_equal_and_allclose_see_the_full_tensor() {
    on(3, |world| {
        let mesh = world.mesh([("a", 3)])?;
        // the terms of a sum, and a value that only one rank holds
        let part = Tensor::full(world.rank() as f32 + 1.0, (), &Device::Cpu)?;
        assert_eq!(DTensor::from_local(&part, &mesh, [Partial(ReduceOp::Sum)])?.item::<f32>()?, 6.0);
        let one = DTensor::full(5.0, (1, 1), DType::F64, &mesh, [Shard(0)])?;
        assert_eq!(one.item::<f64>()?, 5.0);

        let x = DTensor::arange(0.0..10.0, DType::F32, &mesh, [Shard(0)])?;
        let y = DTensor::arange(0.0..10.0, DType::F32, &mesh, [Replicate])?;
        assert!(x.equal(&y)? && y.equal(&x)? && x.allclose(&y, 0.0, 0.0)?);
        let mut z = y;
        z.fill_range(&[9..10], 9.001)?; // differs on the last rank only
        assert!(!x.equal(&z)? && !z.equal(&x)?);
        assert!(x.allclose(&z, 1e-3, 0.0)? && !x.allclose(&z, 1e-6, 1e-6)?);
        assert!(!x.equal(&x.to_dtype(DType::F64)?)? && !x.equal(&DTensor::zeros(9, DType::F32, &mesh, [Replicate])?)?);
        let inf = DTensor::full(f64::INFINITY, 4, DType::F32, &mesh, [Shard(0)])?;
        assert!(inf.allclose(&inf, 0.0, 0.0)? && inf.allclose(&inf, 0.1, 0.1)?);
        let one = inf.ones_like()?;
        assert!(!one.allclose(&inf, 0.5, 1.0)? && !inf.allclose(&one, 0.5, 1.0)?);
        let large = DTensor::full(9_007_199_254_740_992.0, 2, DType::I64, &mesh, [Shard(0)])?;
        let mut larger = large.clone();
        larger.copy_from(&DTensor::distribute_tensor(
            &Tensor::new(&[9_007_199_254_740_993i64; 2], &Device::Cpu)?,
            &mesh,
            [Replicate],
            None,
        )?)?;
        assert!(!large.allclose(&larger, 0.0, 0.0)?);
        assert!(larger.show()?.starts_with("[9007199254740993, 9007199254740993]"), "{larger}");
        let nan = DTensor::full(f64::NAN, 4, DType::F32, &mesh, [Shard(0)])?;
        assert!(!nan.equal(&nan)? && !nan.allclose(&nan, 1.0, 1.0)?);
        Ok(())
    });
}

#[test]
fn to_dtype_reduces_partials_first_where_rounding_does_not_commute() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let part = Tensor::full(0.75f32, 2, &Device::Cpu)?;
        let sum = DTensor::from_local(&part, &mesh, [Partial(ReduceOp::Sum)])?;
        assert_eq!(list(&sum.to_dtype(DType::I64)?)?, [1.0, 1.0]);
        let max = DTensor::from_local(&part, &mesh, [Partial(ReduceOp::Max)])?.to_dtype(DType::F64)?;
        assert!(max.layout().is_partial());
        assert_eq!(list(&max)?, [0.75, 0.75]);
        // 256 as u8 is 0, whatever the other terms are
        let part = Tensor::full(255 + world.rank() as i64, 1, &Device::Cpu)?;
        let max = DTensor::from_local(&part, &mesh, [Partial(ReduceOp::Max)])?;
        assert_eq!(list(&max.to_dtype(DType::U8)?)?, [0.0]);
        assert_eq!(list(&sum.to_device(&Device::Cpu)?)?, [1.5, 1.5]);
        Ok(())
    });
}

#[test]
fn show_prints_the_full_tensor_and_debug_the_local_shard() {
    on(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = DTensor::from_fn((3, 2), DType::F32, &mesh, [Shard(0)], |i| i[0] as f64 + 0.5 * i[1] as f64)?;
        assert_eq!(x.show()?, "[[0, 0.5000],\n [1, 1.5000],\n [2, 2.5000]]\nf32 [3, 2] on dp=2: S(0)");
        let debug = format!("{x:?}");
        assert!(debug.contains(&format!("rank {} holds", world.rank())) && !debug.contains("1.5000],\n [2"), "{debug}");
        let partial = x.redistribute([Partial(ReduceOp::Sum)])?;
        assert!(partial.show()?.starts_with("[[0, 0.5000],"), "{partial}");
        // large tensors are abbreviated, and only what is shown is communicated
        let large = DTensor::arange(0.0..1e6, DType::F64, &mesh, [Shard(0)])?;
        world.trace().clear();
        assert_eq!(large.show()?, "[0, 1, 2, ..., 999997, 999998, 999999]\nf64 [1000000] on dp=2: S(0)");
        assert!(world.trace().records().iter().map(|r| r.bytes).sum::<usize>() < 1000);
        let scalar = DTensor::full(1e-7, (), DType::F64, &mesh, [Replicate])?;
        assert_eq!(scalar.show()?, "1.0000e-7\nf64 [] on dp=2: R");
        assert_eq!(DTensor::zeros((0, 3), DType::U8, &mesh, [Shard(0)])?.show()?, "[]\nu8 [0, 3] on dp=2: S(0)");
        Ok(())
    });
}

#[test]
fn in_place_writes_work_in_every_layout() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for seed in 0..200 {
            let rng = &mut StdRng::seed_from_u64(seed);
            let kinds = ["R", "S(0)", "S(1)", "P(sum)", "SS(0,2)", "P(max)"];
            let mut pick =
                || -> Vec<Placement> { (0..2).map(|_| kinds[rng.random_range(0..6)].parse().unwrap()).collect() };
            let (p, q) = (pick(), pick());
            let shape = [rng.random_range(1..8), rng.random_range(1..6)];
            let range = |n: usize, rng: &mut StdRng| {
                let start = rng.random_range(0..=n);
                start..rng.random_range(start..=n)
            };
            let ranges = [range(shape[0], rng), range(shape[1], rng)];
            let mut x = DTensor::from_fn(shape.as_slice(), DType::F64, &mesh, p, |i| (i[0] * 10 + i[1]) as f64)?;
            let size = [ranges[0].len(), ranges[1].len()];
            let value = DTensor::from_fn(size.as_slice(), DType::F64, &mesh, q, |i| -1.0 - (i[0] * 10 + i[1]) as f64)?;
            x.assign(&ranges, &value)?;
            let expected = |i: usize, j: usize| match ranges[0].contains(&i) && ranges[1].contains(&j) {
                true => -1.0 - ((i - ranges[0].start) * 10 + j - ranges[1].start) as f64,
                false => (i * 10 + j) as f64,
            };
            let all: Vec<f64> =
                (0..shape[0]).flat_map(|i| (0..shape[1]).map(move |j| (i, j))).map(|(i, j)| expected(i, j)).collect();
            assert_eq!(list(&x)?, all, "seed {seed}: {} gets {ranges:?} from {}", x.layout(), value.layout());
            x.fill_range(&ranges, 7.0)?;
            let sevens = list(&x)?.iter().filter(|&&v| v == 7.0).count();
            assert!(sevens >= size[0] * size[1]);
        }
        // filling a partial tensor does not multiply the value by the number of ranks
        let mut sum = DTensor::ones(3, DType::F32, &mesh, [Partial(ReduceOp::Sum), Replicate])?;
        sum.fill(5.0)?;
        assert_eq!(list(&sum)?, [5.0; 3]);
        let other = DTensor::arange(0.0..3.0, DType::F32, &mesh, [Replicate, Shard(0)])?;
        sum.copy_from(&other)?;
        assert_eq!(list(&sum)?, [0.0, 1.0, 2.0]);
        Ok(())
    });
}

#[test]
fn a_local_shard_can_be_stored_and_restored() {
    on(3, |world| {
        let mesh = world.mesh([("a", 3)])?;
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::U32, DType::U8] {
            let x = DTensor::arange(0.0..8.0, dtype, &mesh, [Shard(0)])?;
            let text = serde_json::to_string(&x.state()?).unwrap();
            let state: DTensorState = serde_json::from_str(&text).unwrap();
            let back = DTensor::from_state(&state, &mesh)?;
            assert!(back.equal(&x)? && back.layout() == x.layout());
            let mut broken = state.clone();
            broken.bytes.push(0);
            assert!(DTensor::from_state(&broken, &mesh).unwrap_err().to_string().contains("bytes"));
            let mut foreign = state;
            foreign.rank = 7;
            assert!(DTensor::from_state(&foreign, &mesh).unwrap_err().to_string().contains("rank 7"));
        }
        Ok(())
    });
}

#[test]
fn custom_devices_go_to_their_registered_backend() {
    struct Doubling;
    impl DeviceBackend for Doubling {
        fn distribute_tensor(&self, tensor: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<DTensor> {
            let cpu = mesh.world().device_mesh(mesh.on_device("cpu")?)?;
            DTensor::distribute_tensor(&(tensor * 2.0)?, &cpu, placements.to_vec(), None)
        }
    }
    on(2, |world| {
        let tensor = Tensor::ones(4, DType::F32, &Device::Cpu)?;
        let message = "npu/a=2".parse::<Mesh>().unwrap_err().to_string();
        assert!(message.contains("`npu`") && message.contains("register_backend"), "{message}");
        register_backend("toy", Arc::new(Doubling))?;
        let toy = world.device_mesh("toy/a=2".parse()?)?;
        assert_eq!(list(&DTensor::distribute_tensor(&tensor, &toy, [Shard(0)], None)?)?, [2.0; 4]);
        assert!(register_backend("cpu", Arc::new(Doubling)).is_err());
        // a tensor that the backend does not create is not created on the CPU instead
        let message = DTensor::ones(4, DType::F32, &toy, [Shard(0)]).unwrap_err().to_string();
        assert!(message.contains("`toy`") && message.contains("distribute_tensor"), "{message}");
        Ok(())
    });
}

#[test]
fn tensors_do_not_alias_the_variables_they_were_created_from() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let var = candle_core::Var::from_tensor(&Tensor::ones(4, DType::F32, &Device::Cpu)?)?;
        let tensors = [
            DTensor::from_local(var.as_tensor(), &mesh, [Shard(0)])?,
            DTensor::from_local_with_shape(var.as_tensor(), &mesh, [Replicate], 4)?,
            DTensor::distribute_tensor(var.as_tensor(), &mesh, [Replicate], None)?,
            DTensor::distribute_tensor(var.as_tensor(), &mesh, [Replicate], Some(0))?,
            DTensor::distribute_tensor(var.as_tensor(), &mesh, [Shard(0)], Some(0))?,
        ];
        var.set(&Tensor::zeros(4, DType::F32, &Device::Cpu)?)?;
        world.barrier()?;
        for tensor in &tensors {
            assert!(list(tensor)?.iter().all(|&x| x == 1.0), "{tensor:?}");
        }
        Ok(())
    });
}

#[test]
fn arguments_that_differ_between_ranks_are_errors_on_all_ranks() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let part = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
        let placement = if world.rank() == 0 { Replicate } else { Shard(0) };
        let error = DTensor::from_local(&part, &mesh, [placement.clone()]).unwrap_err().to_string();
        assert!(error.contains("placements") && error.contains("rank 1"), "{error}");
        let error = DTensor::distribute_tensor(&part, &mesh, [placement], Some(0)).unwrap_err().to_string();
        assert!(error.contains("placements") && error.contains("rank 1"), "{error}");
        // a rank whose tensor does not fit the placements does not leave the other ranks waiting
        let flat = if world.rank() == 1 { part.flatten_all()? } else { part };
        assert!(DTensor::distribute_tensor(&flat, &mesh, [Shard(1)], Some(0)).is_err());
        world.barrier()
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn submeshes_inherit_the_seed_of_their_mesh() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        mesh.manual_seed(42);
        for derived in [mesh.slice(["b"])?, mesh.flatten(["a", "b"], "ab")?, mesh.unflatten("a", [("x", 2), ("y", 1)])?]
        {
            assert_eq!(derived.generator().state().seed, 42);
        }
        Ok(())
    });
}

#[test]
fn memory_is_counted_while_tensors_live() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let before = world.memory().current();
        let x = DTensor::zeros(1000, DType::F32, &mesh, [Shard(0)])?;
        let copy = x.clone();
        assert_eq!(world.memory().current() - before, 2000);
        let full = x.redistribute([Replicate])?;
        drop((x, copy));
        assert_eq!(world.memory().current() - before, 4000);
        assert!(world.memory().peak() >= before + 6000);
        drop(full);
        assert_eq!(world.memory().current(), before);
        Ok(())
    });
}
