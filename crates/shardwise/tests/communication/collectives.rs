//! The suite of collectives on thread worlds of 1 to 8 ranks, and on subgroups.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use shardwise::error::ErrorKind;
use shardwise::{DryWorld, Error, ThreadWorld};
use shardwise_test_suites::collectives as suite;

#[test]
fn every_collective_matches_the_reference_on_every_world_size() {
    for ranks in 1..=8 {
        let checked = ThreadWorld::new(ranks).unwrap().run(|world| suite::run(&world)).unwrap();
        assert!(checked.iter().all(|&n| n > 900), "{checked:?}");
    }
}

#[test]
fn groups_within_a_world_work_side_by_side_and_in_any_rank_order() {
    let run = |world: shardwise::World| {
        let parity = world.split(Some(world.rank() % 2), 0)?.expect("named a color");
        assert_eq!(parity.rank(), world.rank() / 2);
        suite::run(&parity)?;
        let backwards: Vec<usize> = (0..world.size()).rev().collect();
        let backwards = world.subgroup(&backwards)?;
        assert_eq!(backwards.rank(), world.size() - 1 - world.rank());
        suite::run(&backwards)?;
        // ranks without a color are left alone
        let first_two = world.split((world.rank() < 2).then_some(7), -(world.rank() as i64))?;
        match first_two {
            Some(group) => {
                assert_eq!(group.ranks(), [1, 0]);
                suite::run(&group)?;
            }
            None => assert!(world.rank() >= 2),
        }
        world.barrier()
    };
    ThreadWorld::new(5).unwrap().run(run).unwrap();
}

#[test]
fn work_of_the_first_rank_is_done_before_other_ranks_continue_and_its_error_is_theirs() {
    let done = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&done);
    let run = move |world: shardwise::World| {
        for round in 1..=20 {
            let mine = world.on_first_rank(|| Ok(counted.fetch_add(1, SeqCst) + 1))?;
            assert_eq!(mine, (world.rank() == 0).then_some(round));
            assert_eq!(counted.load(SeqCst), round);
            world.barrier()?;
        }
        // the first of a group is not the first of the world; its error leaves the group as it was
        let backwards = world.subgroup(&(0..world.size()).rev().collect::<Vec<_>>())?;
        let refused =
            backwards.on_first_rank(|| Err::<(), _>(ErrorKind::Argument.error("disk", "none", "one", "buy one")));
        let last = world.size() - 1;
        match refused {
            Err(Error::OnRank { rank, message, .. }) => {
                assert_eq!((rank, &*message), (last, "invalid disk: found none, needed one; buy one"));
            }
            other => panic!("{other:?}"),
        }
        let mine = if world.rank() % 2 == 1 { Err(Error::other("odd")) } else { Ok(world.rank()) };
        let message = world.all_ok(mine).unwrap_err().to_string();
        assert_eq!(message, "on rank 1: odd");
        assert_eq!(world.all_ok(Ok(world.rank()))?, world.rank());
        backwards.barrier()
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
    assert_eq!(done.load(SeqCst), 20);
    let dry = DryWorld::new(8).unwrap().run(|world| world.on_first_rank(|| Ok(world.size())));
    assert_eq!(dry.unwrap().value, Some(8));
}
