//! Text of distributed values: printing on one rank communicates nothing, and errors print their message.

use std::sync::Mutex;
use std::time::Duration;

use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};

/// Every formatting of everything happens under one lock, as `println!` does; a rank that waited for another inside it
/// would wait until the deadline.
fn under_a_lock(text: impl FnOnce() -> String) -> String {
    static STDOUT: Mutex<()> = Mutex::new(());
    let _held = STDOUT.lock().unwrap();
    text()
}

#[test]
fn printing_communicates_nothing() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = DTensor::arange(0.0..6.0, DType::F32, &mesh, [Shard(0)])?;
        let partial = x.redistribute([Partial(ReduceOp::Sum)])?;
        let spec = ChunkShardingSpec::over_ranks(0, [0, 1])?;
        let sharded = ShardedTensor::ones(spec, (3, 2), DType::F32, &mesh)?;
        let param = Param::new(&x);
        let loss = x.requires_grad();
        let grads = loss.square()?.sum_all()?.backward()?;
        world.barrier()?;
        world.trace().clear();
        let me = world.rank();
        let text = under_a_lock(|| format!("{x}"));
        let held = ["[0, 1, 2]", "[3, 4, 5]"][me];
        assert_eq!(text, format!("{held}\nf32 [6] on dp=2: S(0), rank {me} holds [3]"));
        let debug = under_a_lock(|| format!("{x:?}"));
        assert_eq!(debug, format!("DTensor(f32 [6] on dp=2: S(0), rank {me} holds [3]: {held})"));
        let text = under_a_lock(|| format!("{sharded}"));
        assert!(text.contains("[[1, 1]") && text.contains(&format!("rank {me} holds")), "{text}");
        under_a_lock(|| format!("{sharded:?} {partial} {partial:?} {param:?} {grads:?} {mesh:?} {world:?}"));
        // only one rank
        if me == 0 {
            under_a_lock(|| format!("{x} {partial} {sharded}"));
        }
        assert!(world.trace().records().is_empty(), "{:?}", world.trace().report());
        Ok(())
    };
    ThreadWorld::new(2).unwrap().deadline(Duration::from_secs(20)).run(run).unwrap();
}

#[test]
fn show_returns_the_same_text_on_all_ranks() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let rule = |i: &[usize]| (10 * i[0] + i[1]) as f64;
        let mut texts = Vec::new();
        for placements in [[Shard(0), Shard(1)], [Replicate, Shard(0)], [Shard(1), Shard(1)], [Replicate, Replicate]] {
            let x = DTensor::from_fn((3, 4), DType::I64, &mesh, placements, rule)?;
            texts.push(x.show()?);
            texts.push(x.redistribute([Replicate, Partial(ReduceOp::Sum)])?.show()?);
            let reference = "[[0, 1, 2, 3],\n [10, 11, 12, 13],\n [20, 21, 22, 23]]\ni64 ";
            assert!(texts.iter().all(|text| text.starts_with(reference)), "{texts:?}");
        }
        let spec = ChunkShardingSpec::over_ranks(1, [3, 1])?;
        let whole = DTensor::from_fn((3, 4), DType::I64, &mesh, [Replicate, Replicate], rule)?;
        let sharded = ShardedTensor::from_dtensor(&whole)?.reshard(spec)?;
        texts.push(sharded.show()?);
        assert!(texts.last().unwrap().starts_with("[[0, 1, 2, 3],\n"), "{texts:?}");
        let wide = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, 0..4)?, (2000, 3), DType::F32, &mesh)?;
        assert_eq!(wide.show()?.matches("...").count(), 1);
        Ok(texts)
    };
    let texts = ThreadWorld::new(4).unwrap().deadline(Duration::from_secs(20)).run(run).unwrap();
    assert!(texts.iter().all(|other| *other == texts[0]), "{texts:#?}");
}

#[test]
fn tensors_of_many_dimensions_stay_short() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 1)])?;
        let x = DTensor::zeros(vec![2; 14], DType::U8, &mesh, [Replicate])?;
        assert!(x.to_string().len() < 200_000);
        Ok(())
    };
    ThreadWorld::new(1).unwrap().run(run).unwrap();
}

#[test]
fn errors_returned_from_main_print_their_message() {
    let error = launch(2, |world| world.mesh([("dp", 7)]).map(drop)).unwrap_err();
    let (debug, display) = (format!("{error:?}"), error.to_string());
    assert_eq!(debug, display);
    assert!(debug.starts_with("rank ") && debug.contains("needed ranks below 2"), "{debug}");
}
