//! `launch_scoped` with programs that borrow, the mesh of a `with_mesh` scope, and the identity of tensors.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use shardwise::comm::current_mesh;
use shardwise::prelude::*;
use shardwise::tensor::current_mesh as on_current_mesh;

#[test]
fn a_program_borrows_from_its_caller() {
    for ranks in 1..=3 {
        let numbers: Vec<f64> = (0..6).map(f64::from).collect();
        let calls = AtomicUsize::new(0);
        let sum = launch_scoped(ranks, |world| {
            calls.fetch_add(1, SeqCst);
            let mesh = world.mesh([("dp", ranks)])?;
            let x = DTensor::from_fn(6, DType::F64, &mesh, [Shard(0)], |index| numbers[index[0]])?;
            x.sum_all()?.item::<f64>()
        })
        .unwrap();
        assert_eq!((sum, calls.into_inner(), numbers.len()), (15.0, ranks, 6));
        // results may borrow too
        let firsts = ThreadWorld::new(ranks).unwrap().run_scoped(|world| Ok(&numbers[world.rank()])).unwrap();
        assert_eq!(firsts, numbers.iter().take(ranks).collect::<Vec<_>>());
    }
}

#[test]
fn failures_of_a_borrowing_program_name_the_rank() {
    let text = String::from("borrowed");
    let world = ThreadWorld::new(3).unwrap().deadline(Duration::from_secs(20));
    let error = world
        .run_scoped(|world| {
            if world.rank() == 1 {
                return Err(Error::other(text.clone()));
            }
            world.barrier()
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("rank 1 failed: borrowed"), "{error}");
    let error = world.run_scoped(|world| if world.rank() == 2 { panic!("{text}") } else { world.barrier() });
    assert!(error.unwrap_err().to_string().contains("rank 2 panicked: borrowed"));
}

#[test]
fn constructors_use_the_mesh_of_the_with_mesh_scope() {
    launch(2, |world| {
        let (dp, tp) = (world.mesh([("dp", 2)])?, world.mesh([("tp", 2)])?);
        let error = on_current_mesh::zeros(4, DType::F32, [Shard(0)]).unwrap_err().to_string();
        assert!(error.contains("with_mesh"), "{error}");
        with_mesh(&dp, || {
            let x = on_current_mesh::ones(4, DType::F32, [Shard(0)])?;
            assert_eq!(x.layout().to_string(), "[4] on dp=2: S(0)");
            let inner = with_mesh(&tp, || on_current_mesh::full(2, (2, 2), DType::I64, [Replicate]))?;
            assert_eq!(inner.layout().to_string(), "[2, 2] on tp=2: R");
            assert!(current_mesh()? == dp);
            let draws = on_current_mesh::randn((3, 2), [Shard(0)])?;
            assert_eq!((draws.shape(), on_current_mesh::rand(3, [Replicate])?.shape()), (&[3, 2][..], &[3][..]));
            let whole = on_current_mesh::arange(0..4, DType::F32, [Replicate])?.full_tensor()?;
            assert!(on_current_mesh::distribute_tensor(&whole, [Shard(0)], None)?.equal(&x.cumsum(0)?.sub(1)?)?);
            assert_eq!(on_current_mesh::from_local(&whole, [Shard(0)])?.shape(), [8]);
            Ok(())
        })?;
        assert!(current_mesh().is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn tensors_compare_by_identity() {
    launch(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let (x, y) =
            (DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?, DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?);
        let names = HashMap::from([(x.id(), "x"), (y.id(), "y")]);
        assert!(x.equal(&y)? && x.id() != y.id());
        let same = [x.clone(), y.requires_grad()];
        assert_eq!((names[&same[0].id()], names[&same[1].id()]), ("x", "y"));
        assert_ne!((&x + 0.0)?.id(), x.id());
        let weight = Param::new(&x);
        assert_eq!(weight.get().id(), weight.get().id());
        Ok(())
    })
    .unwrap();
}
