//! Programs in which one rank makes another call than the rest, for any engine with its default settings and at least
//! two ranks.
//!
//! Every case must end in a typed error with the same text on every rank, and leave the group usable.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use shardwise::checkpoint::{self, State};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::{Error, Group, TensorMeta};

/// Name of the case, the program (its flag is true on rank 1, which makes another call), and texts that the error must
/// contain.
type Case = (&'static str, fn(&World, bool) -> Result<()>, &'static [&'static str]);

/// More elements than any engine sends inline with the message in which ranks agree on a call.
const LARGE: usize = 1 << 18;

fn zeros(count: usize, dtype: DType) -> Tensor {
    Tensor::zeros(count, dtype, &Device::Cpu).unwrap()
}

/// Ones in this shape, sharded over all ranks.
fn ones(world: &World, shape: (usize, usize), dim: isize) -> Result<DTensor> {
    DTensor::ones(shape, DType::F32, &world.mesh([("dp", world.size())])?, [Shard(dim)])
}

fn all_reduce_types(group: &Group, odd: bool, count: usize) -> Result<()> {
    group.all_reduce(&zeros(count, if odd { DType::I32 } else { DType::F32 }), ReduceOp::Sum).map(drop)
}

fn broadcast_roots(group: &Group, odd: bool, count: usize) -> Result<()> {
    let (root, tensor) = (usize::from(odd), zeros(count, DType::F32));
    let mine = (group.rank() == root).then_some(&tensor);
    group.broadcast(mine, &TensorMeta::new(count, DType::F32), root).map(drop)
}

const CASES: &[Case] = &[
    ("all_reduce of f32 and i32", |w, odd| all_reduce_types(w, odd, 16), &["of f32 [16]", "of i32 [16]"]),
    ("large all_reduce of f32 and i32", |w, odd| all_reduce_types(w, odd, LARGE), &["of f32 [", "of i32 ["]),
    ("broadcast from two roots", |w, odd| broadcast_roots(w, odd, 16), &["root 0", "root 1"]),
    ("large broadcast from two roots", |w, odd| broadcast_roots(w, odd, LARGE), &["root 0", "root 1"]),
    (
        "all_reduce and reduce",
        |w, odd| match odd {
            true => w.reduce(&zeros(3, DType::F32), ReduceOp::Sum, 0).map(drop),
            false => w.all_reduce(&zeros(3, DType::F32), ReduceOp::Sum).map(drop),
        },
        &["all_reduce(sum)", "reduce(sum, root 0)"],
    ),
    (
        "a small and a large all_gather",
        |w, odd| {
            let count = if odd { LARGE } else { 2 };
            w.all_gather(&zeros(count, DType::F32), 0, &vec![count; w.size()]).map(drop)
        },
        &["all_gather(dim 0, sizes [2", "all_gather(dim 0, sizes [262144"],
    ),
    (
        "broadcast and a barrier",
        |w, odd| if odd { w.barrier() } else { broadcast_roots(w, false, LARGE) },
        &["broadcast(f32 [262144], root 0)", "barrier"],
    ),
    (
        "layouts before full_tensor",
        |w, odd| ones(w, (12, 12), isize::from(odd))?.full_tensor().map(drop),
        &["for redistribute of a tensor of shape [12, 12]", "all_gather(dim 0", "all_gather(dim 1"],
    ),
    (
        "sum_all of tensors of different shapes",
        |w, odd| ones(w, (if odd { 10 } else { 12 }, 2), 0)?.sum_all()?.item::<f32>().map(drop),
        &["for item of the result of sum on shape [12, 2]", "the result of sum on shape [10, 2]", "same shapes"],
    ),
    (
        "sum and mean",
        |w, odd| {
            let x = ones(w, (12, 2), 0)?;
            if odd { x.mean(&[], false)?.item::<f32>() } else { x.sum_all()?.item::<f32>() }.map(drop)
        },
        &["the result of sum on", "same operators"],
    ),
    (
        "sums over different dimensions of a square",
        |w, odd| ones(w, (12, 12), 0)?.exp()?.sum(&[isize::from(odd)], false)?.sum_all()?.item::<f32>().map(drop),
        &["the result of sum on shape [12]"],
    ),
    (
        "different numbers as arguments",
        |w, odd| ones(w, (12, 2), 0)?.mul_scalar(if odd { 2.0 } else { 3.0 })?.sum_all()?.item::<f32>().map(drop),
        &["the result of sum on shape [12, 2]"],
    ),
    (
        "different operators before the same redistribution",
        |w, odd| {
            let x = ones(w, (12, 12), 0)?;
            if odd { x.exp()? } else { x.sqrt()? }.redistribute([Shard(1)]).map(drop)
        },
        &["the result of sqrt on shape [12, 12]", "the result of exp on shape [12, 12]"],
    ),
];

/// Runs all cases and returns their number. Collective: every rank of the world calls it.
pub fn run(world: &World) -> Result<usize> {
    for (name, case, parts) in CASES {
        let error = case(world, world.rank() == 1).expect_err(name);
        assert!(matches!(error, Error::Mismatch { .. } | Error::Rejected { .. }), "{name}: {error}");
        let message = error.to_string();
        for part in *parts {
            assert!(message.contains(part), "{name}: {part} is missing in: {message}");
        }
        // The text is the same on every rank, and the group can be used again.
        assert_same_on_all_ranks(world, &message)?;
        let one = Tensor::new(1i64, &Device::Cpu)?;
        assert_eq!(world.all_reduce(&one, ReduceOp::Sum)?.to_scalar::<i64>()?, world.size() as i64, "{name}");
    }
    // Local operators on only one rank are not a disagreement.
    let x = ones(world, (12, 2), 0)?;
    if world.rank() == 0 {
        let _ = x.exp()?.mul_scalar(7.0)?.sum_all()?;
    }
    assert_eq!(x.mul_scalar(2.0)?.sum_all()?.item::<f32>()?, 48.0);
    Ok(CASES.len())
}

fn assert_same_on_all_ranks(world: &World, text: &str) -> Result<()> {
    let mine = Tensor::new(text.as_bytes(), &Device::Cpu)?;
    let whole = TensorMeta::new(mine.dims(), DType::U8);
    let first = world.broadcast((world.rank() == 0).then_some(&mine), &whole, 0)?;
    assert_eq!(first.to_vec1::<u8>()?, mine.to_vec1::<u8>()?, "{text}");
    Ok(())
}

/// Rank 1 loads an entry of a checkpoint in another layout than the other ranks: an error with the same text on every rank, before
/// anything is read. Entries that only some ranks load are not a disagreement. Collective.
pub fn layouts_to_load(world: &World, path: &Path) -> Result<()> {
    let (mesh, odd) = (world.mesh([("dp", world.size())])?, world.rank() == 1);
    let state = ["v", "w"].map(|key| -> Result<_> { Ok((key, ones(world, (12, 12), 0)?)) });
    checkpoint::save(world, path, &State::map(state.into_iter().collect::<Result<Vec<_>>>()?))?;
    let on_rows = |_: &str, shape: &[usize]| Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(0)])?));
    let own = |key: &str, shape: &[usize]| {
        let dim = isize::from(odd && key == "w");
        Ok((mesh.clone(), Layout::new(mesh.mesh(), shape, [Shard(dim)])?))
    };
    let errors = [
        checkpoint::load_placed(world, path, |_| true, own).map(drop).expect_err("two layouts"),
        checkpoint::load_placed(world, path, |key| !odd || key == "w", own).map(drop).expect_err("two layouts"),
    ];
    for error in errors {
        assert_eq!(error.kind(), Some(&ErrorKind::Disagreement), "{error}");
        for part in ["S(0) on rank 0", "S(1) on rank 1", "for entry \"w\""] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
        assert_same_on_all_ranks(world, &error.to_string())?;
    }
    // One rank cannot choose at all.
    let refused = checkpoint::load_placed(
        world,
        path,
        |_| true,
        |key, shape| match odd {
            true => Err(ErrorKind::Layout.error("layout", "none", "one", "choose one")),
            false => on_rows(key, shape),
        },
    );
    let refused = refused.map(drop);
    assert!(matches!(refused, Err(Error::OnRank { rank: 1, .. })), "{refused:?}");
    let some = checkpoint::load_placed(world, path, |key| !odd || key == "w", on_rows)?;
    assert_eq!(some.get("v").is_none(), odd);
    assert_eq!(some.tensor("w")?.sum_all()?.item::<f32>()?, 144.0);
    Ok(())
}

/// Several threads of one rank use its world: a thread other than the one that runs the program gets an error, and no
/// collective is matched with a call of such a thread.
pub fn two_threads(world: &World) -> Result<()> {
    let call = |value: i64| world.all_reduce(&Tensor::new(value, &Device::Cpu)?, ReduceOp::Sum);
    let refused = |result: Result<Tensor>| {
        let error = result.expect_err("a call of a second thread");
        assert!(matches!(error, Error::Rejected { .. }), "{error}");
        assert!(error.to_string().contains("another thread than the one that runs its program"), "{error}");
    };
    // Neither thread runs the program.
    std::thread::scope(|scope| {
        let threads = [scope.spawn(|| call(1)), scope.spawn(|| call(1000))];
        threads.into_iter().for_each(|thread| refused(thread.join().expect("no panic")));
    });
    // One of them runs the program: its call may be matched with a rejected one, but never with that of another thread.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| call(1000));
        match call(1) {
            Ok(sum) => assert_eq!(sum.to_scalar::<i64>().unwrap(), world.size() as i64),
            refusal => refused(refusal),
        }
        refused(other.join().expect("no panic"));
    });
    assert_eq!(call(1)?.to_scalar::<i64>()?, world.size() as i64);
    Ok(())
}
