//! The collective suite on thread worlds of 1 to 8 ranks, and on groups within them.

#[path = "suites/collectives.rs"]
mod suite;

use shardwise::ThreadWorld;

#[test]
fn every_collective_matches_the_oracle_on_every_world_size() {
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
