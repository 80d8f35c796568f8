//! Errors have the same kind and fields on every rank, whichever rank found the mistake.

use std::path::PathBuf;

use shardwise::checkpoint::{self, State};
use shardwise::comm::{DryWorld, ThreadWorld};
use shardwise::error::ErrorKind;
use shardwise::nn::{Builder, Forward, Linear, Module};
use shardwise::optim::Algorithm;
use shardwise::prelude::*;
use shardwise::tensor::Arange;
use shardwise::tensor::FromLocalOptions;

type Program = fn(&World) -> Result<()>;

/// The kinds that ranks get from a program that fails on all of them.
fn kinds(ranks: usize, program: Program) -> Vec<Option<ErrorKind>> {
    let run = move |world: World| {
        let error = program(&world).expect_err("the program makes a mistake");
        Ok(error.kind().cloned())
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap()
}

fn ones(world: &World, shape: (usize, usize), placement: Placement) -> Result<DTensor> {
    DTensor::ones(shape, DType::F32, &world.mesh([("dp", world.size())])?, [placement])
}

fn cases() -> Vec<(&'static str, ErrorKind, Program)> {
    vec![
        ("axis", ErrorKind::UnknownName { name: "tp".into() }, |w| w.mesh([("dp", w.size())])?.axis("tp").map(drop)),
        ("optimizer", ErrorKind::UnknownName { name: "adan".into() }, |_| Algorithm::by_name("adan").map(drop)),
        ("linear", ErrorKind::Shape { found: vec![4, 5] }, |w| {
            ones(w, (4, 5), Shard(0))?.linear(&ones(w, (2, 3), Replicate)?, None).map(drop)
        }),
        ("add", ErrorKind::Shape { found: vec![4, 5] }, |w| {
            ones(w, (4, 5), Shard(0))?.add(&ones(w, (3, 5), Shard(1))?).map(drop)
        }),
        ("bits", ErrorKind::DType { found: DType::F32 }, |w| {
            let x = ones(w, (4, 5), Shard(0))?;
            x.bitwise_and(&x).map(drop)
        }),
        ("dimension", ErrorKind::Dimension { dim: -3, ndim: 2 }, |w| ones(w, (4, 5), Shard(0))?.softmax(-3).map(drop)),
        ("placement", ErrorKind::Dimension { dim: 3, ndim: 2 }, |w| ones(w, (4, 5), Shard(3)).map(drop)),
        ("placements", ErrorKind::Layout, |w| {
            let mesh = w.mesh([("dp", w.size())])?;
            DTensor::ones((4, 5), DType::F32, &mesh, [Shard(0), Shard(1)]).map(drop)
        }),
        ("root", ErrorKind::Rank { rank: 7, size: 2 }, |w| {
            w.broadcast(None, &TensorMeta::new(1, DType::F32), 7).map(drop)
        }),
        ("leaf", ErrorKind::Gradient, |w| ones(w, (4, 5), Shard(0))?.sum_all()?.backward().map(drop)),
        ("meshes", ErrorKind::Operands, |w| {
            let other = DTensor::ones(4, DType::F32, &w.mesh([("tp", w.size())])?, [Shard(0)])?;
            ones(w, (4, 4), Shard(0))?.add(&other).map(drop)
        }),
        ("ranks disagree", ErrorKind::Disagreement, |w| {
            let local = ones(w, (2, 2), Replicate)?.mul_scalar(w.rank() as f64)?.to_local()?;
            let options = FromLocalOptions { run_check: true, ..FromLocalOptions::default() };
            DTensor::from_local_with(&local, &w.mesh([("dp", w.size())])?, [Replicate], options).map(drop)
        }),
    ]
}

#[test]
fn every_rank_gets_the_kind_and_its_fields() {
    for (name, expected, program) in cases() {
        for (rank, kind) in kinds(2, program).into_iter().enumerate() {
            assert_eq!(kind.as_ref(), Some(&expected), "{name} on rank {rank}");
        }
    }
}

#[test]
fn the_first_index_outside_its_dimension_is_named() {
    let found = kinds(3, |world| {
        let x = ones(world, (6, 2), Shard(0))?;
        let index = DTensor::arange(Arange::new(0.0, 9.0, 1.5), DType::F64, x.device_mesh(), [Replicate])?
            .to_dtype(DType::I64)?;
        x.index_select(0, &index).map(drop)
    });
    for kind in found {
        assert_eq!(kind, Some(ErrorKind::Index { index: 6, size: 6 }));
    }
}

#[test]
fn an_error_that_one_rank_reports_keeps_its_kind() {
    let found = kinds(3, |world| {
        let missing = || Err(ErrorKind::path("/data/shard-0").error("file", "none", "one", "copy it"));
        world.on_first_rank(missing).map(|_: Option<()>| ())
    });
    assert_eq!(found, vec![Some(ErrorKind::Path { path: PathBuf::from("/data/shard-0") }); 3]);
    let other =
        kinds(2, |world| world.on_first_rank(|| -> Result<()> { Err(Error::other("of the program")) }).map(drop));
    assert_eq!(other, [None, None]);
}

#[test]
fn context_of_modules_and_ranks_does_not_hide_the_error_kind() {
    let error = launch(2, |world| {
        let layer = Linear::new(&Builder::new(&world.mesh([("dp", 2)])?).child("up"), 8, 4)?;
        layer.forward(&ones(&world, (2, 7), Replicate)?).map(drop)
    });
    let error = error.unwrap_err();
    assert!(!matches!(error, Error::Invalid(_)), "wrapped: {error}");
    assert_eq!(error.kind(), Some(&ErrorKind::Shape { found: vec![2, 7] }));
}

#[test]
fn a_state_dict_mismatch_lists_the_names() {
    let error = launch(2, |world| {
        let layer = Linear::new(&Builder::new(&world.mesh([("dp", 2)])?), 8, 4)?;
        let mut state = layer.state_dict();
        let bias = state.remove("bias").expect("a layer has a bias");
        state.insert("biass".into(), bias);
        layer.load_state_dict(&state)
    });
    let expected = ErrorKind::State { missing: vec!["bias".into()], unexpected: vec!["biass".into()] };
    assert_eq!(error.unwrap_err().kind(), Some(&expected));
}

#[test]
fn reads_in_dry_runs_and_huge_tensors_have_error_kinds() {
    let item = DryWorld::new(4).unwrap().run(|world| ones(&world, (1, 1), Replicate)?.item::<f32>());
    assert_eq!(item.map(drop).unwrap_err().kind(), Some(&ErrorKind::NoData));
    let huge = launch(1, |world| ones(&world, (1 << 20, 1 << 30), Shard(0)).map(drop)).unwrap_err();
    let Some(ErrorKind::OutOfMemory { bytes, limit }) = huge.kind() else { panic!("{huge}") };
    assert_eq!(*bytes, 4 << 50);
    assert!(limit < bytes);
}

#[test]
fn corrupt_and_conflicting_files_have_error_kinds() {
    let directory = std::env::temp_dir().join(format!("shardwise-error-kinds-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("thesis.txt"), "the only copy").unwrap();
    let opened = checkpoint::open(&directory).map(drop).unwrap_err();
    assert_eq!(opened.kind(), Some(&ErrorKind::Damaged), "{opened}");
    let target = directory.clone();
    let saved = launch(2, move |world| {
        let state = State::map([("x", ones(&world, (4, 2), Shard(0))?)]);
        checkpoint::save(&world, &target, &state).map(drop)
    });
    let saved = saved.unwrap_err();
    assert_eq!(saved.kind(), Some(&ErrorKind::Path { path: directory.clone() }), "{saved}");
    std::fs::remove_dir_all(&directory).unwrap();
}
