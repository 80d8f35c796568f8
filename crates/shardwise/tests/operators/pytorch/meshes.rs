//! Scenarios of PyTorch's `test_device_mesh.py`, `test_op_strategy.py` and `test_strategy_validation.py` that are not about one
//! operator.

use candle_core::{Device, Tensor};
use shardwise::DryWorld;
use shardwise::op::{self, Gradient, KernelContext, Op, OpPlan};
use shardwise::prelude::*;
use shardwise::rule::{DimSharding, Signature};
use shardwise_test_suites::counting::counted;
use shardwise_test_suites::values;

use crate::pytorch::{list, on, tensor};

#[test]
fn groups_of_a_mesh_are_made_once_and_shared_by_slices() {
    on(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        // a mesh over the world has the ranks of the world
        let flat = world.mesh([("all", 4)])?;
        assert_eq!(flat.group(&["all"])?.ranks(), world.ranks());
        // the position of an axis, in the mesh and in a slice of it; unknown ones are errors
        assert_eq!((mesh.axis("dp")?, mesh.axis("tp")?, mesh.slice(["tp"])?.axis("tp")?), (0, 1, 0));
        assert!(mesh.axis("pp").is_err() && mesh.slice(["tp"])?.axis("dp").is_err());
        // slicing and asking for groups again communicates nothing
        let first = mesh.slice(["tp"])?;
        first.group(&["tp"])?.barrier()?;
        world.trace().clear();
        let again = mesh.slice(["tp"])?;
        assert!(again == first);
        assert_eq!(again.group(&["tp"])?.ranks(), first.group(&["tp"])?.ranks());
        assert_eq!(mesh.group(&["tp"])?.ranks(), first.group(&["tp"])?.ranks());
        assert!(world.trace().records().is_empty());
        Ok(())
    });
}

#[test]
fn groups_along_an_axis_are_those_of_its_slices() {
    on(8, |world| {
        let square: Mesh = "dp=2,tp=2".parse()?;
        assert_eq!(square.groups("dp")?, [[0, 2], [1, 3]]);
        assert_eq!(square.groups("tp")?, [[0, 1], [2, 3]]);
        let cube = world.mesh([("pp", 2), ("dp", 2), ("tp", 2)])?;
        let all = cube.all_groups()?;
        let expected = [
            ("pp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
            ("dp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
            ("tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ];
        for (axis, (name, groups)) in expected.into_iter().enumerate() {
            assert_eq!(cube.groups(name)?, groups);
            let mine = groups.into_iter().find(|group| group.contains(&world.rank())).expect("one group");
            assert_eq!(cube.group(&[name])?.ranks(), mine);
            assert_eq!(all[axis].ranks(), mine);
            assert_eq!(cube.slice([name])?.group(&[name])?.ranks(), mine);
            // the coordinate along an axis is the position in its group
            let coordinate = cube.my_coordinate().expect("a rank of the mesh")[axis];
            assert_eq!(mine[coordinate], world.rank());
            // what the first rank of the group has
            let value = Tensor::full(world.rank() as f64, 2, &Device::Cpu)?;
            let group = cube.group(&[name])?;
            let sent = group.broadcast((coordinate == 0).then_some(&value), &TensorMeta::new(2, DType::F64), 0)?;
            assert_eq!(sent.to_vec1::<f64>()?, [mine[0] as f64; 2]);
        }
        Ok(())
    });
}

#[test]
fn collectives_of_a_world_without_processes_have_shapes_and_names() {
    let run = DryWorld::new(4).unwrap().run(|world| {
        let x = Tensor::zeros((2, 8), DType::F32, &Device::Cpu)?;
        let meta = TensorMeta::new((2, 8), DType::F32);
        assert_eq!(world.all_gather(&x, 0, &[2; 4])?.dims(), [8, 8]);
        assert_eq!(world.reduce_scatter(&x, ReduceOp::Sum, 1, &[2; 4])?.dims(), [2, 2]);
        assert_eq!(world.all_reduce(&x, ReduceOp::Sum)?.dims(), [2, 8]);
        assert_eq!(world.broadcast(Some(&x), &meta, 0)?.dims(), [2, 8]);
        assert_eq!(world.scatter(Some(&x), &meta, 1, &[2; 4], 0)?.dims(), [2, 2]);
        world.reduce(&x, ReduceOp::Max, 0)?;
        world.gather(&x, 0, &[2; 4], 0)?;
        let parts = vec![x; 4];
        assert_eq!(world.all_to_all(&parts, &vec![meta; 4])?.len(), 4);
        world.barrier()
    });
    let calls: Vec<&str> = run.unwrap().records.iter().map(|record| record.call).collect();
    let expected = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "scatter", "reduce", "gather"];
    assert_eq!(calls, [&expected[..], &["all_to_all", "barrier"]].concat());
}

#[test]
fn a_mesh_takes_the_groups_of_a_larger_one() {
    on(8, |world| {
        let cube = world.mesh([("pp", 2), ("dp", 2), ("tp", 2)])?;
        let square = cube.slice(["dp", "tp"])?;
        let (dp, tp) = (cube.group(&["dp"])?, cube.group(&["tp"])?);
        let built = world.device_mesh(square.mesh().clone())?.with_group(&["dp"], &dp)?.with_group(&["tp"], &tp)?;
        assert!(built.mesh() == square.mesh());
        let x = tensor(&built, &[4, 4], &[Shard(0), Shard(1)])?;
        assert_eq!(list(&x)?, list(&tensor(&square, &[4, 4], &[Replicate, Replicate])?)?);
        assert!(world.device_mesh(square.mesh().clone())?.with_group(&["dp"], &tp).is_err());
        Ok(())
    });
}

#[test]
fn a_strided_slice_is_reduced_as_its_dense_copy() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let all = Tensor::arange(0f64, 64.0, &Device::Cpu)?.reshape((8, 8))?;
        let strided = all.reshape((4, 2, 8))?.narrow(1, 0, 1)?.squeeze(1)?.narrow(1, 0, 2)?;
        assert!(!strided.is_contiguous());
        let of = |t: &Tensor| DTensor::from_local(t, &mesh, [Partial(ReduceOp::Sum)])?.redistribute([Shard(0)]);
        assert!(of(&strided)?.equal(&of(&strided.contiguous()?)?)?);
        assert_eq!(list(&of(&strided)?)?[..4], [0.0, 4.0, 64.0, 68.0]);
        Ok(())
    });
}

#[test]
fn a_shard_of_one_row_combines_with_a_replicated_row() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let (x, y) = (tensor(&mesh, &[1, 8], &[Shard(0)])?, tensor(&mesh, &[1, 8], &[Replicate])?);
        assert_eq!(x.local_elem_count(), if world.rank() == 0 { 8 } else { 0 });
        let (sum, calls) = counted(&world, || x.add(&y))?;
        assert!(calls.is_empty() && list(&sum)? == list(&(&y * 2.0)?)?);
        Ok(())
    });
}

#[test]
fn partial_samples_differ_between_ranks_and_reduce_to_the_value() {
    let mesh: Mesh = "a=2,b=2".parse().unwrap();
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
        let layout = Layout::new(&mesh, (5, 7), [Partial(op), Replicate]).unwrap();
        let of = |rank: usize| values::local(&layout, rank).flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let (first, second) = (of(0), of(2));
        assert_eq!(of(0), of(1), "replicas are equal");
        assert!(first != second, "{op:?}");
        let whole = values::full_tensor(&[5, 7]).flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for (flat, value) in whole.iter().enumerate() {
            let (a, b) = (first[flat], second[flat]);
            let reduced = match op {
                ReduceOp::Sum => a + b,
                ReduceOp::Avg => (a + b) / 2.0,
                ReduceOp::Max => a.max(b),
                ReduceOp::Min => a.min(b),
                _ => a * b,
            };
            assert_eq!(reduced, *value, "{op:?}");
        }
        // neither rank has the whole tensor, so that a forgotten reduction is noticed
        assert!(first != whole || op == ReduceOp::Product, "{op:?}");
    }
}

/// The sum of any number of matrices between a first and a last one, which needs them whole.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SumOfAll;

impl Op for SumOfAll {
    fn name(&self) -> &'static str {
        "sum_of_all"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims = vec![Some(0), Some(1)];
        let signature = Signature::new([DimSharding::Never; 2], vec![dims.clone(); inputs.len()], [dims]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let first = inputs[0].clone();
        Ok(vec![inputs[1..].iter().try_fold(first, |sum, x| sum + x)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

#[test]
fn a_custom_operator_takes_a_list_of_tensors() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let parts = ["S(0),S(1)", "R,R", "P(sum),S(0)", "S(1),R"];
        let parts = parts
            .iter()
            .map(|text| tensor(&mesh, &[4, 6], &Placement::parse_list(text)?))
            .collect::<Result<Vec<_>>>()?;
        for count in 1..=4 {
            let inputs: Vec<&DTensor> = parts.iter().take(count).collect();
            let (y, calls) = counted(&world, || Ok(op::apply(&SumOfAll, &inputs)?.swap_remove(0)))?;
            // one exchange or reduction and gather per tensor that is not whole; PyTorch gathers one axis at a time
            assert!(calls.len() <= 2 * count, "{calls:?}");
            assert_eq!(y.placements(), [Replicate, Replicate]);
            assert_eq!(list(&y)?, list(&(&parts[1] * count as f64)?)?);
        }
        Ok(())
    });
}
