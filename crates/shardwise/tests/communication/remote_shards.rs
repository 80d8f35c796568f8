//! One-sided reads of other ranks' shards on thread worlds.

use shardwise::prelude::*;
use shardwise_test_suites::remote_shards;
use shardwise_test_suites::scratch::Scratch;

#[test]
fn shards_are_read_without_calls_of_their_owners() {
    for ranks in 1..=4 {
        let scratch = Scratch::new(&format!("remote-shards-{ranks}"));
        let path = scratch.0.clone();
        let run = move |world: World| remote_shards::run(&world, &path);
        let read = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
        // Ranks hold 1, 2, 0 and 1 shards; each rank reads all shards of other ranks, twice per case.
        let held = &[1, 2, 0, 1][..ranks];
        let expected: Vec<usize> = held.iter().map(|own| 2 * 5 * (held.iter().sum::<usize>() - own)).collect();
        assert_eq!(read, expected);
    }
}
