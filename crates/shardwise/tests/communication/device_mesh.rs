//! Device meshes: groups per axis, ranks outside a mesh, and scopes with a current mesh.

use candle_core::{Device, Tensor};
use shardwise::comm::current_mesh;
use shardwise::prelude::*;

fn sum_of_ranks(group: &Group) -> Result<i64> {
    let mine = Tensor::new(&[group.global_rank() as i64], &Device::Cpu)?;
    Ok(group.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<i64>()?[0])
}

#[test]
fn groups_of_one_or_several_axes_reduce_over_their_ranks() {
    let run = |world: World| {
        let mesh = world.mesh([("pp", 2), ("dp", 2), ("tp", 2)])?;
        for axes in [&["pp"][..], &["dp"], &["tp"], &["dp", "tp"], &["tp", "pp"], &["pp", "dp", "tp"]] {
            let group = mesh.group(axes)?;
            let expected: usize = mesh.slice(axes)?.ranks().iter().sum();
            assert_eq!(sum_of_ranks(&group)?, expected as i64, "{axes:?}");
            assert_eq!(group.ranks(), mesh.group(axes)?.ranks());
        }
        assert_eq!(mesh.all_groups()?.len(), 3);
        assert_eq!(mesh.my_coordinate(), mesh.coordinate(world.rank()));
        // other views of the same ranks
        let flat = mesh.flatten(["pp", "dp"], "data")?;
        let split = flat.unflatten("data", [("a", 2), ("b", 2)])?;
        assert_eq!(sum_of_ranks(&flat.group(&["data"])?)?, sum_of_ranks(&split.group(&["a", "b"])?)?);
        let (dp, tp) = (mesh.slice(["dp"])?, mesh.slice(["tp"])?);
        assert_eq!(mesh.concatenate(&[&dp, &tp])?, mesh.slice(["dp", "tp"])?);
        Ok(())
    };
    ThreadWorld::new(8).unwrap().run(run).unwrap();
}

#[test]
fn ranks_outside_a_mesh_hold_it_but_do_not_take_part() {
    let run = |world: World| {
        let mesh = world.device_mesh("tp=2@1,3".parse()?)?;
        match mesh.my_coordinate() {
            Some(_) => assert_eq!(sum_of_ranks(&mesh.group(&["tp"])?)?, 4),
            None => {
                let message = mesh.group(&["tp"]).unwrap_err().to_string();
                assert!(message.contains("outside mesh tp=2@1,3"), "{message}");
            }
        }
        world.barrier()
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn a_mesh_larger_than_the_world_and_unknown_axes_are_rejected() {
    launch(2, |world| {
        let message = world.mesh([("dp", 2), ("tp", 2)]).unwrap_err().to_string();
        assert!(message.contains("dp=2,tp=2 of 4 ranks") && message.contains("below 2"), "{message}");
        let mesh = world.mesh([("dp", 2)])?;
        assert!(mesh.group(&["tp"]).unwrap_err().to_string().contains("one of `dp`"));
        assert!(world.mesh([("dp", 2), ("dp", 1)]).unwrap_err().to_string().contains("two axes called `dp`"));
        assert!(world.subgroup(&[0, 5]).is_err() && world.subgroup(&[0, 0, 1]).is_err());
        assert!(world.subgroup(&[1 - world.rank()]).unwrap_err().to_string().contains("only members"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_build_different_meshes_get_an_error_instead_of_a_hang() {
    let run = |world: World| {
        let axes = if world.rank() == 3 { [("a", 4), ("b", 1)] } else { [("a", 2), ("b", 2)] };
        let mesh = world.mesh(axes)?;
        sum_of_ranks(&mesh.group(&["a"])?)?;
        sum_of_ranks(&mesh.group(&["b"])?)?;
        world.barrier()
    };
    for (rank, result) in ThreadWorld::new(4).unwrap().run_each(run).iter().enumerate() {
        let message = result.as_ref().expect_err("the meshes differ").to_string();
        assert!(message.contains("rank 3") && message.contains("device_mesh.rs"), "rank {rank}: {message}");
    }
}

#[test]
fn with_mesh_scopes_nest_and_end_on_panic() {
    launch(1, |world| {
        assert!(current_mesh().unwrap_err().to_string().contains("with_mesh"));
        let (outer, inner) = (world.mesh([("a", 1)])?, world.mesh([("b", 1)])?);
        with_mesh(&outer, || {
            assert_eq!(current_mesh()?, outer);
            with_mesh(&inner, || {
                assert_eq!(current_mesh()?, inner);
                Ok(())
            })?;
            let panicking = || with_mesh(&inner, || -> Result<()> { panic!("on purpose") });
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicking)).is_err());
            assert_eq!(current_mesh()?, outer);
            Ok(())
        })?;
        assert!(current_mesh().is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_axis_can_be_given_another_group_of_the_same_ranks() {
    let run = |world: World| {
        let pairs = world.split(Some(world.rank() / 2), 0)?.expect("named a color");
        let line = DeviceMesh::from_group(&world, "tp", &pairs)?;
        assert_eq!(line.ranks(), pairs.ranks());
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?.with_group(&["tp"], &pairs)?;
        assert_eq!(sum_of_ranks(&mesh.group(&["tp"])?)?, sum_of_ranks(&pairs)?);
        let message = mesh.with_group(&["dp"], &pairs).unwrap_err().to_string();
        assert!(message.contains("ranks [0, 2]") || message.contains("ranks [1, 3]"), "{message}");
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}
